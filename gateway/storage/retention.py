"""Retention policies of runs: reading and setting them, planning and doing their deletions.

A checkpoint that is pinned, published, used by a live sampler, or about to be loaded is never deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, or_, select

from gateway.config import GatewayConfig
from gateway.database.catalog import exists_now
from gateway.database.connection import rows_of
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint, RetentionPolicy
from gateway.database.tables.operations import Operation
from gateway.metrics import Metrics
from gateway.schemas import Policy
from gateway.storage.checkpoints import Checkpoints
from gateway.storage.retention_rules import KINDS, Judged, judge
from gateway.storage.retired_checkpoints import is_sampled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """The policy that applies to a run."""

    policy: Policy
    is_default: bool
    """True if the run has no policy of its own."""


class Retention:
    """Keeps the retention policies of runs, and deletes checkpoints by them."""

    def __init__(self, config: GatewayConfig, *, store: Store, checkpoints: Checkpoints, metrics: Metrics) -> None:
        self._default = config.retention
        self._store = store
        self._checkpoints = checkpoints
        self._metrics = metrics

    async def policy(self, run_id: str) -> RunPolicy:
        row = await self._store.get(RetentionPolicy, run_id)
        return RunPolicy(self._default, True) if row is None else RunPolicy(Policy.model_validate(row.policy), False)

    async def set_policy(self, run_id: str, policy: Policy) -> None:
        """Gives the run its own policy. A policy without rules keeps everything, whatever the default is."""
        row = RetentionPolicy(run_id=run_id, policy=policy.model_dump(exclude_none=True), changed_at=time.time())
        async with self._store.begin() as db:
            await db.merge(row)

    async def use_default(self, run_id: str) -> None:
        async with self._store.begin() as db:
            if (row := await db.get(RetentionPolicy, run_id)) is not None:
                await db.delete(row)

    async def plan(self, run_id: str, policy: Policy) -> list[Judged]:
        """Judges each checkpoint of the run by the policy. The result is ordered by kind, and then oldest first.

        Checkpoints for download are left out, because no rule names them.
        """
        is_this = Checkpoint.run_id == run_id, Checkpoint.kind.in_(KINDS.values()), exists_now()
        async with self._store.begin() as db:
            rows = await rows_of(db, select(Checkpoint, _is_in_use()).where(*is_this))
        in_use = {one.path for one, used in rows if used}
        now = time.time()
        return [
            judged
            for kind in KINDS.values()
            for judged in judge([one for one, _ in rows if one.kind == kind], policy.of(kind), in_use=in_use, now=now)
        ]

    async def prune(
        self, run_id: str, policy: Policy, *, only: Collection[str] | None = None, owner: str | None = None
    ) -> list[Checkpoint]:
        """Deletes the checkpoints that the policy does not keep, and returns them.

        `only`: the paths that may be deleted; None means all. `owner`: the owner whom the audit log names; None means
        the owner of each checkpoint.
        """
        deleted = []
        for judged in await self.plan(run_id, policy):
            one = judged.checkpoint
            if judged.kept_as or (only is not None and one.path not in only):
                continue
            if await self._checkpoints.prune(one, owner=one.owner if owner is None else owner):
                self._metrics.stored.swept_checkpoints.labels("retention").inc()
                deleted.append(one)
        return deleted

    async def prune_all(self) -> None:
        """Prunes every run by its own policy, or by the default policy."""
        own = exists().where(RetentionPolicy.run_id == Checkpoint.run_id)
        concerned = select(Checkpoint.run_id).where(Checkpoint.kind.in_(KINDS.values())).distinct()
        if self._default.keep_all:
            concerned = concerned.where(own)
        run_ids = await self._store.all(concerned)
        for run_id in run_ids:
            policy = (await self.policy(run_id)).policy
            if not policy.keep_all and (deleted := await self.prune(run_id, policy)):
                logger.info("%s: %d checkpoints deleted by its retention policy", run_id, len(deleted))


def _is_in_use() -> ColumnElement[bool]:
    """True for a checkpoint that a live sampler needs, or that an unsettled operation will load."""
    loads = exists().where(
        Operation.path == Checkpoint.path, Operation.kind == "load_weights", Operation.settled_at.is_(None)
    )
    return or_(is_sampled(Checkpoint.location, Checkpoint.version_id), loads)
