"""Rows of training runs, from their creation to their release."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import delete, or_, select, update

from gateway.database.connection import Database
from gateway.database.sessions import Living
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import Model, Session
from gateway.database.tables.tenants import CountedOperation


class ModelRows:
    def __init__(self, database: Database, living: Living[Model]) -> None:
        self._database = database
        self._living = living

    async def add(self, model: Model) -> None:
        """Adds the model; a repeat changes nothing."""
        await self._database.add_once(model)

    async def get(self, model_id: str, *, is_newest: bool = False) -> Model | None:
        """The model; None for an unknown id.

        The row in memory may be older than the database's if another gateway has changed it. `is_newest` reads the
        database then.
        """
        if is_newest and self._database.is_shared:
            return await self._living.get_newest(model_id)
        return await self._living.get(model_id)

    async def complete(self, model_id: str, **facts: Any) -> None:
        """Sets columns that are known only from the trainer's reply."""
        async with self._database.begin() as db:
            await db.execute(update(Model).where(Model.model_id == model_id).values(**facts))
        self._living.forget(model_id)

    async def move_inflight(
        self, model_id: str, version_id: str, location: str, *, is_newer: Callable[[str, str], bool]
    ) -> bool:
        """Moves the model's inflight samplers to this version. False when they are at it, or at a newer one,
        already."""
        moved = False
        while not moved:
            async with self._database.begin() as db:
                model = await db.get_one(Model, model_id)
                seen = model.inflight_version_id
                if seen is not None and not is_newer(version_id, seen):
                    return False
                unchanged = Model.inflight_version_id.is_(None) if seen is None else Model.inflight_version_id == seen
                query = update(Model).where(Model.model_id == model_id, unchanged)
                result = await db.execute(query.values(inflight_version_id=version_id, inflight_location=location))
                moved = result.rowcount > 0  # type: ignore[attr-defined]
        self._living.forget(model_id)
        return True

    async def end(self, model_id: str) -> None:
        """Ends the run, so that it takes no more operations. A repeat changes nothing."""
        async with self._database.begin() as db:
            query = update(Model).where(Model.model_id == model_id, Model.ended_at.is_(None))
            await db.execute(query.values(ended_at=time.time()))
        self._living.forget(model_id)

    async def unreleased(self) -> list[tuple[Model, Session]]:
        """Models that the trainer still holds, though they or their sessions have ended."""
        has_ended = or_(Session.ended_at.is_not(None), Model.ended_at.is_not(None))
        query = select(Model, Session).join(Session).where(has_ended, Model.released_at.is_(None))
        async with self._database.begin() as db:
            return [(model, session) for model, session in await db.execute(query)]

    async def release(self, model_id: str) -> None:
        """Notes that the trainer has freed the model, and deletes its operations."""
        async with self._database.begin() as db:
            await db.execute(update(Model).where(Model.model_id == model_id).values(released_at=time.time()))
            await db.execute(delete(Operation).where(Operation.model_id == model_id))
            await db.execute(delete(CountedOperation).where(CountedOperation.model_id == model_id))
        self._living.forget(model_id)
