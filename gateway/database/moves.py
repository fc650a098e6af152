"""Rows of the moves of runs between trainers, and of the trainers that are being drained."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import delete, func, select, update

from gateway.database.connection import Database
from gateway.database.tables.moves import DrainedTrainer, MoveRow, Problem
from gateway.database.tables.sessions import Model


class MoveRows:
    def __init__(self, database: Database, forget: Callable[[str], None]) -> None:
        """`forget`: drops the run's row from memory; see LiveRows.forget."""
        self._database = database
        self._forget = forget

    async def all(self) -> list[MoveRow]:
        """All moves that are in progress, the oldest first."""
        return await self._database.all(select(MoveRow).order_by(MoveRow.begun_at, MoveRow.model_id))

    async def get(self, model_id: str) -> MoveRow | None:
        return await self._database.get(MoveRow, model_id)

    async def begin(self, move: MoveRow) -> bool:
        """Adds the move. Returns False, and changes nothing, when the run is moving already, or is not at the
        source."""
        async with self._database.begin() as db:
            at_source = select(Model.model_id).where(
                Model.model_id == move.model_id, Model.trainer_id == move.source_id, Model.released_at.is_(None)
            )
            if await db.scalar(at_source) is None or await db.get(MoveRow, move.model_id) is not None:
                return False
            db.add(move)
        return True

    async def note_released(self, move: MoveRow) -> None:
        mine = MoveRow.model_id == move.model_id, MoveRow.move_id == move.move_id
        await self._database.run(update(MoveRow).where(*mine).values(is_released=True))

    async def finish(self, move: MoveRow) -> None:
        """Notes that the run is at its target, unless that was noted before."""
        async with self._database.begin() as db:
            mine = MoveRow.model_id == move.model_id, MoveRow.move_id == move.move_id, MoveRow.is_done.is_(False)
            result = await db.execute(update(MoveRow).where(*mine).values(is_done=True))
            if result.rowcount:  # type: ignore[attr-defined]
                query = update(Model).where(Model.model_id == move.model_id, Model.trainer_id == move.source_id)
                await db.execute(query.values(trainer_id=move.target_id))
        self._forget(move.model_id)

    async def delete(self, move: MoveRow) -> None:
        mine = MoveRow.model_id == move.model_id, MoveRow.move_id == move.move_id
        await self._database.run(delete(MoveRow).where(*mine))

    async def runs_of(self, trainer_id: str, *, but: set[str], limit: int) -> list[Model]:
        """Runs that this trainer holds, the oldest first. `but`: model_ids of runs that are left out."""
        query = select(Model).where(Model.trainer_id == trainer_id, Model.released_at.is_(None))
        found = await self._database.all(query.order_by(Model.created_at, Model.model_id).limit(limit + len(but)))
        return [model for model in found if model.model_id not in but][:limit]

    async def count_runs(self) -> dict[str, int]:
        """trainer_id -> number of runs that the trainer holds."""
        query = select(Model.trainer_id, func.count()).where(Model.trainer_id.is_not(None), Model.released_at.is_(None))
        return dict(await self._database.rows(query.group_by(Model.trainer_id)))

    # Drained trainers

    async def drained(self) -> set[str]:
        """The trainer_ids of the trainers that are being drained."""
        return set(await self._database.all(select(DrainedTrainer.trainer_id)))

    async def drain(self, trainer_id: str, *, boot_id: str | None) -> None:
        """Begins to drain the trainer; with `boot_id`, only this process of the trainer. A repeat changes nothing."""
        row = DrainedTrainer(trainer_id=trainer_id, since=time.time(), boot_id=boot_id, problems={})
        await self._database.add_once(row)

    async def drained_rows(self) -> list[DrainedTrainer]:
        return await self._database.all(select(DrainedTrainer))

    async def set_problems(self, trainer_id: str, problems: dict[str, Problem]) -> None:
        query = update(DrainedTrainer).where(DrainedTrainer.trainer_id == trainer_id)
        await self._database.run(query.values(problems=problems))

    async def undrain(self, trainer_id: str) -> None:
        """Lets the trainer take runs again; a repeat changes nothing."""
        await self._database.run(delete(DrainedTrainer).where(DrainedTrainer.trainer_id == trainer_id))
