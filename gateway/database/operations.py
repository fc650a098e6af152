"""Rows of operations: submissions whose results must still be stored, and submissions that were refused."""

from __future__ import annotations

import time
from collections.abc import Collection

from sqlalchemy import ColumnElement, and_, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import Database, Note
from gateway.database.tables.gateways import GatewayRow
from gateway.database.tables.operations import Operation
from tinsmith.rpc.paths import TinkerPath

COPY, IMPORT = "copy_weights", "import_weights"
TRANSFERS = (COPY, IMPORT)
"""Kinds of operations that make checkpoints without a training run. Their request id is the checkpoint's path."""


class OperationRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, operation: Operation) -> bool:
        """Adds the operation. Returns False, and changes nothing, when its id exists already."""
        return await self._database.add_once(operation)

    async def settle(self, request_id: str, *, note: Note | None = None) -> bool:
        """Notes that all results of the operation are stored. Returns False when it was settled before, or is unknown.

        `note`: writes more in the same transaction, unless the operation was settled before.
        """
        async with self._database.begin() as db:
            is_first = await settle(db, request_id)
            if is_first and note is not None:
                await note(db)
            return is_first

    async def replace(self, operation: Operation) -> None:
        async with self._database.begin() as db:
            await db.merge(operation)

    async def take_over(self, gateway_id: str, *, kinds: Collection[str]) -> list[str]:
        """Takes over the unsettled operations of gateways that are gone, and returns their request ids.

        Each operation goes to one gateway only.
        """
        query = update(Operation).where(*_are_left(gateway_id, kinds))
        return await self._database.all(query.values(gateway_id=gateway_id).returning(Operation.request_id))

    async def left(self, gateway_id: str, *, kinds: Collection[str], in_work: Collection[str]) -> list[Operation]:
        """Unsettled operations that no gateway works on: operations of gateways that are gone, and own operations of
        this gateway that are not `in_work`.

        `in_work`: request ids of the operations that this gateway still works on.
        """
        mine = (
            Operation.settled_at.is_(None),
            Operation.kind.in_(kinds),
            Operation.gateway_id == gateway_id,
            Operation.request_id.not_in(in_work),
        )
        query = select(Operation).where(or_(and_(*_are_left(gateway_id, kinds)), and_(*mine)))
        return await self._database.all(query)

    async def delete(self, request_id: str) -> None:
        await self._database.run(delete(Operation).where(Operation.request_id == request_id))

    async def saving(self, path: TinkerPath) -> str | None:
        """The request id of an unsettled save that will make this checkpoint; None when there is none."""
        query = select(Operation.request_id).where(
            Operation.model_id == path.run_id,
            Operation.path == str(path),
            Operation.kind.in_(("save_weights", "save_weights_for_sampler")),
            Operation.error.is_(None),
            Operation.settled_at.is_(None),
        )
        return await self._database.first(query.limit(1))

    async def get(self, request_id: str) -> Operation | None:
        return await self._database.get(Operation, request_id)


def _are_left(gateway_id: str, kinds: Collection[str]) -> tuple[ColumnElement[bool], ...]:
    """Conditions of an unsettled operation whose gateway is gone. `gateway_id`: this gateway, which is never gone."""
    return (
        Operation.settled_at.is_(None),
        Operation.error.is_(None),
        Operation.kind.in_(kinds),
        or_(
            Operation.gateway_id.is_(None),
            Operation.gateway_id.not_in(select(GatewayRow.gateway_id)) & (Operation.gateway_id != gateway_id),
        ),
    )


async def settle(db: AsyncSession, request_id: str) -> bool:
    """Settles the operation in this transaction. Returns False when it was settled before, or is unknown."""
    query = update(Operation).where(Operation.request_id == request_id, Operation.settled_at.is_(None))
    result = await db.execute(query.values(settled_at=time.time()))
    return result.rowcount > 0  # type: ignore[attr-defined]
