"""Access: the one place that decides what a caller can see, use and change.

Everything belongs to a session, and a session to the owner of the key that made it. The ids of models, samplers, custom
losses and futures begin with the id of their session, so one check serves them all. Requests for things of another
owner are answered as if these things did not exist. Published checkpoints are the exception: everyone may read them,
and only the owner may change them. An admin has access to everything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gateway.database.outages import is_outage
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.ids import refusal_of, refused_id_of, session_of
from tinsmith.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or anyone when the server has no keys."""

    owner: str
    key_id: str = ""
    """A prefix of the key's hash, so it does not depend on the order of keys; empty when any key is accepted."""
    name: str = ""
    note: str = ""
    email: str = ""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key_hash: str = field(default="", repr=False)
    """Hash of a key of the database; empty for a key of the configuration."""

    @property
    def number(self) -> int:
        """The key's id for the public API."""
        return int(self.key_id, 16) if self.key_id else 0

    def sees(self, owner: str) -> bool:
        """Whether the caller has access to things of `owner`: the one rule that all access checks use."""
        return self.admin or owner == self.owner

    def reads(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.public or self.sees(checkpoint.owner)

    @property
    def sees_only(self) -> str | None:
        """The owner whose data the caller sees; None means all owners."""
        return None if self.admin else self.owner

    @property
    def cache_salt(self) -> str:
        """Salt that keeps an owner's prompts apart from those of other owners in the samplers' caches; empty when any
        key is accepted."""
        return hashlib.sha256(self.owner.encode()).hexdigest()[:32] if self.key_id else ""


class Access:
    """Finds sessions, models and sampling sessions that a caller has access to."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def owns(self, thing_id: str, caller: Caller) -> bool:
        """Whether the caller has access to a session, model, sampler, custom loss or future; False for an unknown
        id."""
        if (refused := refusal_of(thing_id)) is not None:
            return caller.admin or refused[0] == _tag(caller)
        whose = await self._store.sessions.whose(session_of(thing_id))
        return whose is not None and caller.sees(whose.owner)

    async def session(self, session_id: str, caller: Caller) -> Session | None:
        session = await self._store.sessions.get(session_id)
        return session if session is not None and caller.sees(session.owner) else None

    async def model(self, model_id: str, caller: Caller, *, is_newest: bool = False) -> Model | None:
        """The model; None for an unknown id, and for a model of another owner. `is_newest`: as for `ModelRows.get`, but
        while the database cannot be used, the row in memory is returned."""
        try:
            model = await self._store.models.get(model_id, is_newest=is_newest)
        except Exception as error:
            if not (is_newest and is_outage(error)):
                raise
            model = await self._store.models.get(model_id)
        return model if model is not None and await self.owns(model.session_id, caller) else None

    async def sampling_session(self, sampling_session_id: str, caller: Caller) -> SamplingSession | None:
        row = await self._store.samplers.get(sampling_session_id)
        return row if row is not None and await self.owns(row.session_id, caller) else None


def refused_id(caller: Caller, error: ServiceError) -> str:
    """A request id for a refused request. An id that the caller sent cannot serve, because it may be another owner's.

    The request id holds the text of the refusal. So nothing is stored, and any gateway can answer it at any time.
    """
    return refused_id_of(_tag(caller), error.message)


def _tag(caller: Caller) -> str:
    return hashlib.sha256(caller.owner.encode()).hexdigest()[:16]
