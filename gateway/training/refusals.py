"""Refusals of requests that the trainer need not know of. Each is a failed future, also at other gateways and after a
restart."""

from __future__ import annotations

import time

from gateway.database.store import Store
from gateway.database.tables.operations import Operation
from gateway.futures import Futures
from tinsmith.errors import InvalidRequest, SequenceConflict, ServiceError

_RETENTION_S = 86400.0
"""Time for which refusals are stored, in seconds."""
_MAX_KEPT = 100_000
"""Most refusals of all owners together that are stored. A client whose refusal was deleted sends the request again, and
is refused again. The trainer itself keeps the refusals of training operations."""


class Refusals:
    """Stores refusals, and makes failed futures of them."""

    def __init__(self, store: Store, futures: Futures, *, gateway_id: str) -> None:
        self._store = store
        self._futures = futures
        self._gateway_id = gateway_id

    async def add(self, request_id: str, error: ServiceError, *, group: str, kind: str, mark: str) -> None:
        """Makes a failed future of the id, and stores the refusal.

        `group`: id of the model or session that the request concerns. `mark`: fingerprint of the request, by which a
        repeat is known. Raises SequenceConflict when the id stands for another request.
        """
        known = self._futures.fingerprint(request_id)
        if known is None:
            refusal = Operation(
                request_id=request_id,
                model_id=group,
                kind=kind,
                error=error.message,
                fingerprint=mark,
                created_at=time.time(),
                gateway_id=self._gateway_id,
            )
            if not await self._store.operations.add(refusal):
                operation = await self._store.operations.get(request_id)
                known = None if operation is None else operation.fingerprint
        if known not in (None, mark):
            raise SequenceConflict(f"{request_id} was used by another request before; this one was not run ({error})")
        self._futures.fail(request_id, error, fingerprint=mark)

    async def attach(self, request_id: str) -> bool:
        """Makes a failed future of a stored refusal. Returns False when no refusal is stored under this id."""
        operation = await self._store.operations.get(request_id)
        if operation is None or operation.error is None:
            return False
        self._futures.fail(request_id, InvalidRequest(operation.error), fingerprint=operation.fingerprint)
        return True

    async def forget_old(self) -> None:
        """Deletes refusals that are older than `_RETENTION_S`, and all but the newest `_MAX_KEPT`. The trainer itself
        remembers refused requests that have used up a number."""
        is_refusal = Operation.error.is_not(None)
        await self._store.delete_old(
            Operation.created_at, is_refusal, before=time.time() - _RETENTION_S, keep_newest=_MAX_KEPT
        )
