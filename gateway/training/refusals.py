"""Refusals that the trainer need not know of: futures that have failed, also at other gateways and after a restart."""

from __future__ import annotations

import time

from gateway.database.store import Store
from gateway.database.tables.operations import Operation
from gateway.futures import Futures
from tinsmith.rpc.errors import InvalidRequest, SequenceConflict, ServiceError

_RETENTION_S = 86400.0
_MAX_KEPT = 100_000
"""Refusals of all owners. Whose refusal has gone sends the request again, and is refused again; of a training operation
the trainer knows it."""


class Refusals:
    def __init__(self, store: Store, futures: Futures, *, gateway_id: str) -> None:
        self._store = store
        self._futures = futures
        self._gateway_id = gateway_id

    async def add(self, request_id: str, error: ServiceError, *, group: str, kind: str, mark: str) -> None:
        """`group`: the model, or what else the request is about; `mark`: of the request, to tell a repeat.

        Raises SequenceConflict when the id stands for another request.
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
        """Makes a future of a refusal that this process did not make. False when there is none."""
        operation = await self._store.operations.get(request_id)
        if operation is None or operation.error is None:
            return False
        self._futures.fail(request_id, InvalidRequest(operation.error), fingerprint=operation.fingerprint)
        return True

    async def forget_old(self) -> None:
        """Those of a day ago; the trainer remembers those that have used up a number."""
        await self._store.operations.delete_refused(before=time.time() - _RETENTION_S, keep_newest=_MAX_KEPT)
