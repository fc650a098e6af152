"""What exists for a caller: the one place that decides whose things somebody can see, use and change.

Everything belongs to a session, and a session to the owner of the key that made it. The ids of models, samplers, custom
losses and futures begin with that of their session, so one question answers for all of them. What belongs to another
owner is answered like what does not exist. A published checkpoint is the exception: everyone may read it, and only its
owner may change it. For a caller who is an admin everything exists.
"""

from __future__ import annotations

import hashlib

from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.tenants.caller import Caller
from tinsmith.rpc.errors import ServiceError

_REFUSED = "refused"
_MAX_TOLD = 1000
"""Characters of a refusal that a request id holds."""


class Access:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def owns(self, thing_id: str, caller: Caller) -> bool:
        """Of a session, model, sampler, custom loss or future, by its id. False for what does not exist."""
        session_id, _, rest = thing_id.partition(":")
        if session_id == _REFUSED:
            return caller.admin or rest.startswith(f"{_tag(caller)}:")
        whose = await self._store.sessions.whose(session_id)
        return whose is not None and caller.sees(whose.owner)

    async def session(self, session_id: str, caller: Caller) -> Session | None:
        session = await self._store.sessions.get(session_id)
        return session if session is not None and caller.sees(session.owner) else None

    async def model(self, model_id: str, caller: Caller) -> Model | None:
        model = await self._store.models.get(model_id)
        return model if model is not None and await self.owns(model.session_id, caller) else None

    async def sampling_session(self, sampling_session_id: str, caller: Caller) -> SamplingSession | None:
        row = await self._store.samplers.get(sampling_session_id)
        return row if row is not None and await self.owns(row.session_id, caller) else None

    @staticmethod
    def reads(checkpoint: Checkpoint, caller: Caller) -> bool:
        return checkpoint.public or caller.sees(checkpoint.owner)

    @staticmethod
    def changes(checkpoint: Checkpoint, caller: Caller) -> bool:
        return caller.sees(checkpoint.owner)


def refused_id(caller: Caller, error: ServiceError) -> str:
    """A request id for what is refused and has no id of its own: an id that the caller has sent may be another owner's.
    The request id holds the refusal itself, so that it leaves nothing behind, and any gateway can tell it at any time.
    """
    return f"{_REFUSED}:{_tag(caller)}:{error.message[:_MAX_TOLD].encode().hex()}"


def refusal_in(request_id: str) -> str | None:
    """The refusal that `refused_id` put into this id; None in others."""
    begin, _, told = request_id.rpartition(":")
    if not begin.startswith(f"{_REFUSED}:"):
        return None
    try:
        return bytes.fromhex(told).decode()
    except ValueError:
        return None


def _tag(caller: Caller) -> str:
    return hashlib.sha256(caller.owner.encode()).hexdigest()[:16]
