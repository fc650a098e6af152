"""Samples that name no sampling session, or no number in one.

A gateway makes a session for each key that samples by `model_path` or `base_model`, and in it a sampling session for
each version that is named. Numbers come from a block that the gateway takes as one more client of the sampling session,
so that no other gateway, no earlier process and no client of the session uses them too.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from gateway.database.store import Store
from gateway.database.tables.sessions import SamplingSession
from gateway.sampling.completions import first_of
from gateway.tenants.caller import Caller

Key = TypeVar("Key")
Value = TypeVar("Value")

_MAX_KNOWN = 16_384
"""Keys, versions and sampling sessions that are remembered. A forgotten one gets a new session, or a new block."""

Weights = tuple[str | None, str | None, str]
"""What a sample names: base_model, model_path, and the version that this path stands for now."""


class Unnamed:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """key id -> session."""
        self._samplers: OrderedDict[tuple[str, Weights], str] = OrderedDict()
        """Session and weights -> sampling session."""
        self._numbers: OrderedDict[str, Iterator[int]] = OrderedDict()
        """By sampling session: what is left of this gateway's block."""
        self._seq = itertools.count()

    async def seq_id(self, sampling_session_id: str) -> int:
        """A number of the sampling session that nobody else has."""
        if sampling_session_id not in self._numbers:
            block = await self._store.samplers.join(sampling_session_id)
            self._numbers.setdefault(sampling_session_id, itertools.count(first_of(block)))
        numbers = _used(self._numbers, sampling_session_id)
        return next(numbers)

    async def sampling_session(
        self, weights: Weights, caller: Caller, make: Callable[[str, int], Awaitable[SamplingSession]]
    ) -> str:
        """The caller's sampling session for these weights; `make` makes one from a session and a number in it."""
        session_id = self._sessions.get(caller.key_id)
        if session_id is None or not await self._store.sessions.heartbeat(session_id):
            session_id = await self._session(caller)
        key = (session_id, weights)
        if key not in self._samplers:
            made = await self._store.samplers.add(await make(session_id, next(self._seq)))
            self._samplers.setdefault(key, made.sampling_session_id)
        return _used(self._samplers, key)

    async def _session(self, caller: Caller) -> str:
        session = await self._store.sessions.create(
            owner=caller.owner,
            key_id=caller.key_id,
            idempotency_key=None,
            project_id=None,
            display_name="samples without a session",
            sdk_version=None,
            tags=[],
            user_metadata={},
        )
        self._sessions[caller.key_id] = session.session_id
        return _used(self._sessions, caller.key_id)


def _used(known: OrderedDict[Key, Value], key: Key) -> Value:
    """The value, now the most recently used one; the least recently used one goes when there are too many."""
    known.move_to_end(key)
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)
    return known[key]
