"""Rows of settings: named values that all gateways behind one database share."""

from __future__ import annotations

from sqlalchemy import update

from gateway.database.connection import Database
from gateway.database.tables.gateways import Setting


class SettingRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, name: str, *, default: str) -> str:
        """The value of a setting. A setting without a value gets `default` first."""
        await self._database.add_once(Setting(name=name, value=default))
        async with self._database.begin() as db:
            return (await db.get_one(Setting, name)).value

    async def swap(self, name: str, *, old: str, new: str) -> bool:
        """Sets the value if it is `old`. Returns False when another gateway has changed the value meanwhile."""
        query = update(Setting).where(Setting.name == name, Setting.value == old)
        return await self._database.run(query.values(value=new)) > 0
