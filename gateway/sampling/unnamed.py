"""Samples without a sampling session or without a `seq_id`.

A gateway makes a session for each key that samples by `model_path` or `base_model`, and in it a sampling session for
each version that is named. For missing seq_ids the gateway joins the sampling session as one more client. So it has a
block of seq_ids of its own, which no other gateway, earlier process or client uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator

from cachetools import LRUCache

from gateway.database.store import Store
from gateway.database.tables.sessions import SamplingSession
from gateway.ids import first_of
from gateway.tenants.access import Caller

_MAX_KNOWN = 16_384
"""Most entries of each map of `Unnamed`. A forgotten key gets a new session, and a forgotten sampling session a new
block."""

Weights = tuple[str | None, str | None, str]
"""Weights that a sample names: base_model, model_path, and the version_id that the path stands for now."""


class Unnamed:
    """Gives samples the sampling sessions and seq_ids that they lack."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: LRUCache[str, str] = LRUCache(_MAX_KNOWN)
        """key_id -> session_id."""
        self._samplers: LRUCache[tuple[str, Weights], str] = LRUCache(_MAX_KNOWN)
        """session_id and weights -> sampling_session_id."""
        self._numbers: LRUCache[str, Iterator[int]] = LRUCache(_MAX_KNOWN)
        """sampling_session_id -> the unused rest of this gateway's block of seq_ids."""
        self._seq = itertools.count()

    async def seq_id(self, sampling_session_id: str) -> int:
        """A seq_id of the sampling session that no other sample has."""
        if sampling_session_id not in self._numbers:
            block = await self._store.samplers.join(sampling_session_id)
            self._numbers.setdefault(sampling_session_id, itertools.count(first_of(block)))
        return next(self._numbers[sampling_session_id])

    async def sampling_session(
        self, weights: Weights, caller: Caller, make: Callable[[str, int], Awaitable[SamplingSession]]
    ) -> str:
        """Id of the caller's sampling session for these weights.

        `make` is called with a session_id and a number, and returns a new sampling session of it.
        """
        session_id = self._sessions.get(caller.key_id)
        if session_id is None or not await self._store.sessions.heartbeat(session_id):
            session_id = await self._session(caller)
        key = (session_id, weights)
        if key not in self._samplers:
            made = await self._store.samplers.add(await make(session_id, next(self._seq)))
            self._samplers.setdefault(key, made.sampling_session_id)
        return self._samplers[key]

    async def _session(self, caller: Caller) -> str:
        session = await self._store.sessions.create(
            owner=caller.owner,
            key_id=caller.key_id,
            display_name="samples without a session",
        )
        self._sessions[caller.key_id] = session.session_id
        return session.session_id
