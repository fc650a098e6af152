"""Rows of custom losses: graphs as clients sent them."""

from __future__ import annotations

from sqlalchemy import func, select

from gateway.database.connection import Database
from gateway.database.tables.operations import CustomLoss


class CustomLossRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, loss: CustomLoss) -> None:
        """Adds the loss; a repeat changes nothing."""
        await self._database.add_once(loss)

    async def get(self, loss_id: str) -> CustomLoss | None:
        async with self._database.begin() as db:
            return await db.get(CustomLoss, loss_id)

    async def count(self, session_id: str) -> int:
        query = select(func.count()).select_from(CustomLoss).where(CustomLoss.session_id == session_id)
        async with self._database.begin() as db:
            return await db.scalar(query) or 0
