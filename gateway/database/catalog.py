"""Lists of training runs and checkpoints. Expired checkpoints are left out, even before they are deleted."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, SelectBase, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import all_of, rows_of
from gateway.database.store import Store
from gateway.database.tables.checkpoints import DELETED_AT, Checkpoint
from gateway.database.tables.sessions import Model, Session
from gateway.views import DEFAULT_PROJECT


@dataclass(frozen=True, slots=True)
class RunWithCheckpoints:
    """A training run, its owner, and its newest checkpoints: `last` for training, `last_sampler` for samplers."""

    model: Model
    owner: str
    last: Checkpoint | None
    last_sampler: Checkpoint | None


def exists_now() -> ColumnElement[bool]:
    """True for a checkpoint that is pinned or has not expired, and was not deleted."""
    not_deleted = Checkpoint.expires_at != DELETED_AT
    return or_(
        Checkpoint.expires_at.is_(None), Checkpoint.expires_at > time.time(), and_(Checkpoint.pinned, not_deleted)
    )


def in_project(project_id: str) -> ColumnElement[bool]:
    """True for a session of this project; sessions without a project belong to the default one."""
    if project_id == DEFAULT_PROJECT:
        return or_(Session.project_id == project_id, Session.project_id.is_(None))
    return Session.project_id == project_id


class Catalog:
    """Queries for the lists of the API."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def runs(
        self, *, owner: str | None, project_id: str | None, limit: int, offset: int
    ) -> tuple[list[RunWithCheckpoints], int]:
        """One page of runs, newest first, and the number of all. `owner` None means the runs of all owners, and
        `project_id` None those of all projects.

        A run whose creation was refused is left out.
        """
        query = select(Model, Session.owner).join(Session).where(Model.lora_rank.is_not(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        if project_id is not None:
            query = query.where(in_project(project_id))
        page = query.order_by(Model.created_at.desc(), Model.model_id.desc()).limit(limit).offset(offset)
        async with self._store.begin() as db:
            found = [(model, whose) for model, whose in await rows_of(db, page)]
            last = await _last_checkpoints(db, [model.model_id for model, _ in found])
            return [_run(model, whose, last) for model, whose in found], await _count(db, query)

    async def run(self, run_id: str) -> RunWithCheckpoints | None:
        query = select(Model, Session.owner).join(Session).where(Model.model_id == run_id)
        async with self._store.begin() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                return None
            model, owner = found
            return _run(model, owner, await _last_checkpoints(db, [run_id]))

    async def checkpoints_of_run(self, run_id: str, *, kinds: Sequence[str]) -> list[Checkpoint]:
        query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.kind.in_(kinds), exists_now())
        return await self._store.all(query.order_by(Checkpoint.created_at, Checkpoint.path))

    async def size_of_save(self, model: Model, *, kind: str, base_models: Collection[str]) -> int | None:
        """The expected size of a new checkpoint of this run, in bytes. It is the size of the run's newest checkpoint of
        this kind, or else of the largest checkpoint of the same shape, whoever owns that. None when there is no such
        checkpoint.

        `base_models`: all names of the run's base model.
        """
        is_it: list[ColumnElement[bool]] = [Checkpoint.kind == kind]
        if kind == "weights":
            is_it.append(Checkpoint.has_optimizer.is_(True))  # imported checkpoints have no optimizer state
        own = select(Checkpoint.size_bytes).where(Checkpoint.run_id == model.model_id, *is_it)
        same = select(func.max(Checkpoint.size_bytes)).where(
            Checkpoint.base_model.in_(base_models),
            Checkpoint.optimizer == model.optimizer,
            Checkpoint.lora_rank == model.lora_rank,
            Checkpoint.train_unembed == model.train_unembed,
            Checkpoint.train_mlp == model.train_mlp,
            Checkpoint.train_attn == model.train_attn,
            *is_it,
        )
        async with self._store.begin() as db:
            newest = await db.scalar(own.order_by(Checkpoint.created_at.desc()).limit(1))
            return newest if newest is not None else await db.scalar(same)

    async def checkpoints(
        self, *, owner: str, kinds: Sequence[str], limit: int, offset: int
    ) -> tuple[list[Checkpoint], int]:
        """One page of an owner's checkpoints, newest first, and the number of all."""
        query = select(Checkpoint).where(Checkpoint.owner == owner, Checkpoint.kind.in_(kinds), exists_now())
        page = query.order_by(Checkpoint.created_at.desc(), Checkpoint.path.desc()).limit(limit).offset(offset)
        async with self._store.begin() as db:
            return await all_of(db, page), await _count(db, query)


async def _count(db: AsyncSession, query: SelectBase) -> int:
    return await db.scalar(select(func.count()).select_from(query.subquery())) or 0


async def _last_checkpoints(db: AsyncSession, run_ids: Sequence[str]) -> dict[tuple[str, str], Checkpoint]:
    """(run_id, kind) -> the newest checkpoint."""
    place = func.row_number().over(
        partition_by=(Checkpoint.run_id, Checkpoint.kind),
        order_by=(Checkpoint.created_at.desc(), Checkpoint.path.desc()),
    )
    query = select(Checkpoint.path, place.label("place")).where(Checkpoint.run_id.in_(run_ids), exists_now())
    newest = query.subquery()
    rows = select(Checkpoint).join(newest, Checkpoint.path == newest.c.path).where(newest.c.place == 1)
    return {(row.run_id, row.kind): row for row in await all_of(db, rows)}


def _run(model: Model, owner: str, last: dict[tuple[str, str], Checkpoint]) -> RunWithCheckpoints:
    return RunWithCheckpoints(
        model, owner, last.get((model.model_id, "weights")), last.get((model.model_id, "sampler_weights"))
    )
