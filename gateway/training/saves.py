"""Saves that are on their way, for those who load what they will have made."""

from __future__ import annotations

import orjson

from gateway.answers import Answer
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.futures import Futures, Gone
from gateway.storage.checkpoints import Checkpoints
from gateway.tenants.access import Access
from gateway.tenants.caller import Caller
from gateway.training.operations import Operations
from tinsmith.rpc.errors import CheckpointNotFound, NotReady
from tinsmith.rpc.paths import TinkerPath


class Saves:
    def __init__(
        self, store: Store, checkpoints: Checkpoints, futures: Futures, operations: Operations, *, patience_s: float
    ) -> None:
        """`patience_s`: how long one request waits; clients come again."""
        self._store = store
        self._access = Access(store)
        self._checkpoints = checkpoints
        self._futures = futures
        self._operations = operations
        self._patience_s = patience_s

    async def read(self, path: str, *, field: str, caller: Caller) -> Checkpoint:
        """`Checkpoints.read`, to load it. One that is not there, and that an accepted save of the caller's is about to
        make, is waited for: as if it had been asked for later. Raises NotReady when that takes long."""
        named = TinkerPath.parse(path, field=field)
        # Asked first: between the two the save may end.
        request_id = await self._store.operations.saving(named)
        try:
            return await self._checkpoints.read(path, field=field, caller=caller, purpose="load")
        except CheckpointNotFound:
            if request_id is None or not await self._access.owns(named.run_id, caller):
                raise
        why = await self._wait(request_id, what=f"{field}: {named}")
        try:
            return await self._checkpoints.read(path, field=field, caller=caller, purpose="load")
        except CheckpointNotFound as error:
            if not why:
                raise
            raise CheckpointNotFound(f"{error.message}; its save has failed: {why}", field=field) from error

    async def _wait(self, request_id: str, *, what: str) -> str:
        """Why the save has failed; empty when it has not."""
        try:
            answer = await self._answer(request_id)
        except Gone:  # it never came to the trainer
            return ""
        if answer is None:
            raise NotReady(f"{what} is still being saved; it can be loaded when that is through")
        return orjson.loads(answer.body)["error"] if answer.is_failure else ""

    async def _answer(self, request_id: str) -> Answer | None:
        """None when it is not there in time. Raises Gone."""
        try:
            found = await self._futures.poll(request_id, timeout_s=self._patience_s)
        except Gone:
            await self._operations.attach(request_id)
            found = await self._futures.poll(request_id, timeout_s=self._patience_s)
        return found if isinstance(found, Answer) else None
