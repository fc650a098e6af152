"""Saves that are on their way, for those who load what they will have made."""

from __future__ import annotations

import time

import orjson

from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.futures import Answer, Futures, Gone
from gateway.storage.checkpoints import Checkpoints
from gateway.tenants.access import Access
from gateway.tenants.auth import Caller
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
        """`Checkpoints.read`, to load it, once every accepted save of the caller's that is about to make it is through:
        as if it had been asked for later. Raises NotReady when that takes long."""
        why = await self._wait(TinkerPath.parse(path, field=field), field=field, caller=caller)
        try:
            return await self._checkpoints.read(path, field=field, caller=caller, purpose="load")
        except CheckpointNotFound as error:
            if not why:
                raise
            raise CheckpointNotFound(f"{error.message}; its save has failed: {why}", field=field) from error

    async def _wait(self, path: TinkerPath, *, field: str, caller: Caller) -> str:
        """Why the last save has failed; empty when it has not, or there was none."""
        if not await self._access.owns(path.run_id, caller):
            return ""
        deadline = time.monotonic() + self._patience_s
        why = ""
        seen: set[str] = set()
        while (request_id := await self._store.operations.saving(path, without=seen)) is not None:
            seen.add(request_id)
            try:
                answer = await self._answer(request_id, timeout_s=max(0.0, deadline - time.monotonic()))
            except Gone:  # it never came to the trainer
                continue
            if answer is None:
                raise NotReady(f"{field}: {path} is still being saved; it can be loaded when that is through")
            why = orjson.loads(answer.body)["error"] if answer.is_failure else ""
        return why

    async def _answer(self, request_id: str, *, timeout_s: float) -> Answer | None:
        """None when it is not there in time. Raises Gone."""
        try:
            found = await self._futures.poll(request_id, timeout_s=timeout_s)
        except Gone:
            await self._operations.attach(request_id)
            found = await self._futures.poll(request_id, timeout_s=timeout_s)
        return found if isinstance(found, Answer) else None
