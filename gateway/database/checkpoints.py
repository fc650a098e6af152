"""Rows of checkpoints that have a public path. An expired checkpoint keeps its row until its files are deleted."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import defer

from gateway.database.connection import Database, Note, all_of
from gateway.database.operations import settle
from gateway.database.tables.checkpoints import DELETED_AT, Checkpoint
from gateway.database.tables.tenants import AuditEvent
from tinsmith.rpc.paths import KINDS


class CheckpointRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, checkpoint: Checkpoint, *, settles: str | None = None, note: Note | None = None) -> None:
        """Adds the checkpoint, or replaces the one at the same path. Without `settles`, a row of the same version is
        left as it is.

        `settles`: id of the operation that made the checkpoint. Nothing is written when it was settled before, because
        the checkpoint may have been deleted since. `note`: writes more in the same transaction.
        """
        names = [column.key for column in Checkpoint.__table__.columns]
        # Columns that are None are left out, so they get their defaults.
        values = {name: value for name in names if (value := getattr(checkpoint, name)) is not None}
        query = self._database.insert(Checkpoint).values(values)
        changed = {name: query.excluded[name] for name in names if name != "path"}
        is_other = None if settles is not None else Checkpoint.version_id != query.excluded.version_id
        query = query.on_conflict_do_update(index_elements=["path"], set_=changed, where=is_other)
        async with self._database.begin() as db:
            if settles is not None and not await settle(db, settles):
                return
            await db.execute(query)
            if note is not None:
                await note(db)

    async def get(self, path: str) -> Checkpoint | None:
        """The checkpoint, also an expired one."""
        return await self._database.get(Checkpoint, path)

    async def expired(self) -> list[Checkpoint]:
        """Checkpoints whose files are to be deleted: expired ones that are not pinned, and deleted ones."""
        async with self._database.begin() as db:
            over = Checkpoint.expires_at <= time.time()
            query = select(Checkpoint).where(over, or_(~Checkpoint.pinned, Checkpoint.expires_at == DELETED_AT))
            return await all_of(db, query.options(defer(Checkpoint.user_metadata)))

    async def count(self) -> dict[str, tuple[int, int]]:
        """Kind of a path -> number of checkpoints and their bytes."""
        sums = select(Checkpoint.kind, func.count(), func.sum(Checkpoint.size_bytes)).group_by(Checkpoint.kind)
        async with self._database.begin() as db:
            found = {kind: (number, int(num_bytes)) for kind, number, num_bytes in await db.execute(sums)}
        return {kind: found.get(kind, (0, 0)) for kind in KINDS}

    async def delete(self, path: str, *, version_id: str) -> bool:
        """Deletes the row. Returns False when it is gone already, or has another version by now."""
        is_this = Checkpoint.path == path, Checkpoint.version_id == version_id
        return await self._database.run(delete(Checkpoint).where(*is_this)) > 0

    async def update(self, path: str, event: AuditEvent | None = None, **facts: Any) -> None:
        """Sets columns of the row at this path. `event`: an entry for the audit log, in the same transaction."""
        async with self._database.begin() as db:
            await db.execute(update(Checkpoint).where(Checkpoint.path == path).values(**facts))
            if event is not None:
                db.add(event)
