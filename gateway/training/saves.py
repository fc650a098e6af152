"""Loads of checkpoints whose saves are still in work: the load waits for the save."""

from __future__ import annotations

import orjson

from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.futures import Answer, Futures, Gone
from gateway.storage.checkpoints import Checkpoints
from gateway.tenants.access import Access, Caller
from gateway.training.operations import Operations
from tinsmith.errors import CheckpointNotFound, NotReady
from tinsmith.rpc.paths import TinkerPath


class PendingSaves:
    """Finds checkpoints to load, and waits for those that are still being saved."""

    def __init__(
        self, store: Store, checkpoints: Checkpoints, futures: Futures, operations: Operations, *, patience_s: float
    ) -> None:
        """`patience_s`: longest time for which one request waits for a save, in seconds. The client then asks again."""
        self._store = store
        self._access = Access(store)
        self._checkpoints = checkpoints
        self._futures = futures
        self._operations = operations
        self._patience_s = patience_s

    async def read(self, path: str, *, field: str, caller: Caller) -> Checkpoint:
        """The checkpoint for a load, as `Checkpoints.read` gives it. Waits for a missing checkpoint that an accepted
        save of the caller will make.

        Raises the errors of `Checkpoints.read`, and NotReady when the save takes longer than `patience_s`.
        """
        named = TinkerPath.parse(path, field=field)
        # The save is looked up first, because it may end before the checkpoint is read.
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
        """Waits for the save. Returns the error text of a failed save, else an empty string."""
        try:
            answer = await self._answer(request_id)
        except Gone:  # the save never reached the trainer
            return ""
        if answer is None:
            raise NotReady(f"{what} is still being saved; it can be loaded once the save is done")
        return orjson.loads(answer.body)["error"] if answer.is_failure else ""

    async def _answer(self, request_id: str) -> Answer | None:
        """The answer of the save; None when it takes longer than `patience_s`. Raises Gone for an unknown save."""
        try:
            found = await self._futures.poll(request_id, timeout_s=self._patience_s)
        except Gone:
            await self._operations.attach(request_id)
            found = await self._futures.poll(request_id, timeout_s=self._patience_s)
        return found if isinstance(found, Answer) else None
