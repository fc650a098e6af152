"""Moves runs of drained trainers, and runs of lost trainers, to other trainers, one run at a time.

A move has a row in the database (database/tables/moves.py) until it is over. Its steps are:

1. The source, the trainer that has the run, releases it.
2. The target, the trainer that is to have it, adopts it.
3. The run's row in the database names the target.
4. Both trainers forget the move.

Each step may be repeated. A move that has begun is always finished, if need be by a gateway that is started later, so a
run is never left between two trainers. While a run moves, its clients wait as they do for a trainer that restarts.

A trainer that has been away for `adopt_after_s` is lost once another trainer has fenced it. Fencing succeeds only if
both trainers have their journals in one database and the first one is dead. A lost trainer releases nothing: the target
takes the run from the database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gateway.clients import Clients, TrainerClient
from gateway.database.outages import log_failure
from gateway.database.store import Store
from gateway.database.tables.moves import MoveRow, Problem
from gateway.database.tables.sessions import Model
from gateway.high_availability.peers import GatewayPeers
from gateway.metrics import Metrics
from gateway.placement import Placement
from tinsmith.errors import (
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    ModelLost,
    ModelNotFound,
    NotFound,
    NotReady,
    ServiceError,
)
from tinsmith.tasks import set_within, to_its_end
from tinsmith.v1 import trainer_admin_pb2 as pb

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
"""Pause between two looks into the database for moves and drained trainers, in seconds. Another gateway may have
written them there."""
_AGAIN_S = 1.0
"""Pause before a run whose move has failed is tried again, in seconds. It doubles with each attempt."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause between two attempts to move a run, in seconds."""
_STEP_TIMEOUT_S = 600.0
"""Longest time of one call of a trainer, in seconds. A release waits for the operations of the run that have begun."""
_FENCE_TIMEOUT_S = 30.0
"""Longest time of a call that fences a trainer, in seconds."""
_MOST_PROBLEMS = 1000
"""Largest number of runs of a drained trainer whose problems are stored."""
_AT_ONCE = 50
"""Number of runs of a drained trainer that are read from the database at a time."""


@dataclass(slots=True)
class _Failure:
    """A run whose last attempt to move has failed."""

    problem: Problem
    pause_s: float
    """Pause before the next attempt, in seconds."""
    again_s: float
    """Time of the next attempt, by time.monotonic."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A trainer and its runs."""

    trainer: TrainerClient
    num_runs: int
    """Number of runs that this trainer has, as the database says."""
    num_moving: int
    """Number of unfinished moves away from this trainer."""
    is_drained: bool
    """True when the trainer takes no new runs, and its runs move to others."""
    problems: dict[str, Problem]
    """See DrainedTrainer.problems."""
    can_be_stopped: bool
    """True when the trainer is being drained, and no run would be lost or wait without it."""


class RunMover:
    """Makes the moves. Among several gateways behind one database, only the holder of the reaper's lease does so."""

    def __init__(
        self,
        *,
        store: Store,
        clients: Clients,
        placement: Placement,
        peers: GatewayPeers,
        metrics: Metrics,
        adopt_after_s: float,
    ) -> None:
        self._store = store
        self._clients = clients
        self._placement = placement
        self._peers = peers
        self._metrics = metrics
        self._adopt_after_s = adopt_after_s
        self._away_since_s: dict[str, float] = {}
        """Times since which trainers with runs are taken to be away, by trainer_id, on the monotonic clock. A failed
        attempt to fence a trainer sets its time anew."""
        self._lost: set[str] = set()
        """The trainer_ids of lost trainers, in this round."""
        self._wake = asyncio.Event()
        self._failures: dict[str, _Failure] = {}
        """Runs whose last attempt to move has failed, by model_id. A run that its trainer does not have is tried again,
        too, because the trainer may come back with it."""
        self._noted: dict[str, dict[str, Problem]] = {}
        """The problems of each drained trainer that were stored last, by trainer_id."""

    async def run(self) -> None:
        """Moves runs until it is cancelled."""
        while True:
            try:
                await to_its_end(self._round())
            except Exception as error:
                log_failure("moving runs failed", error, by=logger)
            soonest = min([_LOOK_S, *(one.again_s - time.monotonic() for one in self._failures.values())])
            await set_within(self._wake, max(0.1, soonest))
            self._wake.clear()

    # Draining

    async def drain(self, trainer: TrainerClient, *, until_restart: bool = False) -> None:
        """Begins to drain a trainer. With `until_restart` the trainer takes runs again as soon as it has restarted. A
        repeat changes nothing. Raises FailedPrecondition when no other trainer can take its runs, and NotReady when the
        gateway has not reached the trainer yet."""
        if trainer.info is None:
            raise NotReady(f"trainer: {trainer.address} has not been reached yet")
        if not trainer.trainer_id:
            raise FailedPrecondition(f"trainer: {trainer.address} is of a version whose runs cannot move")
        drained = await self._store.moves.drained()
        for base_model in trainer.info.base_models:
            serving = self._clients.serving(base_model)
            if not [one for one in serving if one.trainer_id not in {*drained, trainer.trainer_id}]:
                raise FailedPrecondition(
                    f"trainer: {trainer.address} is the only one that takes runs of {base_model!r}, so nothing can move"
                )
            self._clients.check_agreement(base_model)
        await self._store.moves.drain(trainer.trainer_id, boot_id=trainer.info.boot_id if until_restart else None)
        logger.info("the trainer at %s is being drained", trainer.address)
        self._wake.set()

    async def undrain(self, trainer: TrainerClient) -> None:
        """Lets a trainer take runs again. Moves that have begun are finished all the same."""
        await self._store.moves.undrain(trainer.trainer_id)
        logger.info("the trainer at %s takes runs again", trainer.address)

    async def _round(self) -> None:
        """Finishes the moves that have begun. Then moves the runs of drained and lost trainers, until none is left that
        can be moved now."""
        if not await self._peers.has_lease("reaper"):
            self._failures.clear()
            self._noted.clear()
            self._away_since_s.clear()
            return
        moves = await self._store.moves.all()
        drained = await self._still_drained()
        self._lost = await self._find_lost()
        if not moves and not drained and not self._lost:
            self._failures.clear()
            return
        for move in moves:
            if self._is_due(move.model_id):
                await self._continue(move)
        for trainer_id in sorted(drained | self._lost):
            while models := await self._runs_to_move(trainer_id):
                for model in models:
                    if trainer_id not in self._lost | await self._store.moves.drained():
                        break
                    await self._move(model, trainer_id)
                else:
                    continue
                break
            await self._note_problems(trainer_id)

    async def _still_drained(self) -> set[str]:
        """The trainer_ids of the trainers that are being drained. A trainer that was drained until its restart, and has
        restarted, is undrained here."""
        boots = {one.trainer_id: one.info.boot_id for one in self._clients.trainers if one.info and one.is_connected}
        drained = set[str]()
        for row in await self._store.moves.drained_rows():
            if row.boot_id is not None and boots.get(row.trainer_id, row.boot_id) != row.boot_id:
                await self._store.moves.undrain(row.trainer_id)
                logger.info("the trainer %s has restarted, and takes runs again", row.trainer_id)
            else:
                drained.add(row.trainer_id)
        return drained

    async def _find_lost(self) -> set[str]:
        """The trainer_ids of trainers with runs that have been away for `adopt_after_s` and are fenced."""
        trainers = self._clients.trainers
        present = {one.trainer_id for one in trainers if one.is_connected}
        if not self._adopt_after_s or all(one.is_connected for one in trainers):
            self._away_since_s.clear()
            return set()
        away, now = (await self._store.moves.count_runs()).keys() - present, time.monotonic()
        self._away_since_s = {trainer_id: self._away_since_s.get(trainer_id, now) for trainer_id in away}
        long_away = [one for one, since_s in self._away_since_s.items() if since_s + self._adopt_after_s <= now]
        return {trainer_id for trainer_id in long_away if await self._fence(trainer_id)}

    async def _fence(self, trainer_id: str) -> bool:
        """Asks the connected trainers, one after the other, to fence a trainer that is away. Returns False when none
        could: the trainer is alive, or nobody can adopt its runs. The next attempt is after `adopt_after_s`."""
        why = "no trainer is connected"
        for trainer in self._clients.trainers:
            if not trainer.is_connected or trainer.info is None:
                continue
            try:
                await trainer.admin.FenceTrainer(
                    pb.FenceTrainerRequest(trainer_id=trainer_id), timeout=_FENCE_TIMEOUT_S
                )
                return True
            except ServiceError as error:
                why = error.message
        logger.info("the runs of the trainer %s wait for it: %s", trainer_id, why)
        self._away_since_s[trainer_id] = time.monotonic()
        return False

    async def _note_problems(self, trainer_id: str) -> None:
        """Stores the reasons for which runs of a drained trainer could not be moved, because every gateway may be asked
        for them."""
        runs = await self._store.moves.runs_of(trainer_id, but=set(), limit=_MOST_PROBLEMS)
        problems = {
            run.model_id: self._failures[run.model_id].problem for run in runs if run.model_id in self._failures
        }
        if self._noted.get(trainer_id) != problems:
            await self._store.moves.set_problems(trainer_id, problems)
            self._noted[trainer_id] = problems

    async def _runs_to_move(self, trainer_id: str) -> list[Model]:
        """The next runs of the trainer to be moved: those that neither move already nor wait for another attempt."""
        waiting = {model_id for model_id in self._failures if not self._is_due(model_id)}
        moving = {move.model_id for move in await self._store.moves.all()}
        return await self._store.moves.runs_of(trainer_id, but=waiting | moving, limit=_AT_ONCE)

    def _is_due(self, model_id: str) -> bool:
        failure = self._failures.get(model_id)
        return failure is None or failure.again_s <= time.monotonic()

    def _failed(self, model_id: str, why: str, *, is_gone: bool = False) -> None:
        """Notes a failed attempt to move a run. For `is_gone` see Problem."""
        before, problem = self._failures.get(model_id), Problem(why=why, is_gone=is_gone)
        pause_s = _AGAIN_S if before is None else min(2 * before.pause_s, _LONGEST_PAUSE_S)
        if before is None or before.problem != problem:
            logger.warning("the run %s is not moved yet: %s", model_id, why)
        self._failures[model_id] = _Failure(problem, pause_s, time.monotonic() + pause_s)

    # One move

    async def _move(self, model: Model, source_id: str) -> None:
        """Begins to move a run, to the other trainer with the most room and the least work, and makes all steps."""
        try:
            if source_id not in self._lost:
                self._connected(source_id)
            target = await self._placement.choose(model.base_model, but=source_id)
            self._connected(target.trainer_id)
        except ServiceError as error:
            self._failed(model.model_id, error.message)
            return
        move = MoveRow(
            model_id=model.model_id,
            move_id=uuid4().hex,
            source_id=source_id,
            target_id=target.trainer_id,
            begun_at=time.time(),
            is_released=False,
            is_done=False,
        )
        async with self._placement.turn(model.model_id):
            begun = await self._store.moves.begin(move)
        if begun:
            await self._continue(move)
        else:
            self._failed(model.model_id, "the run has ended, or is moving already")

    async def _continue(self, move: MoveRow) -> None:
        """Makes the remaining steps of a move."""
        try:
            if not move.is_done and not await self._hand_over(move):
                return
            await self._clean_up(move)
        except ServiceError as error:
            self._failed(move.model_id, error.message)
        else:
            self._failures.pop(move.model_id, None)

    async def _hand_over(self, move: MoveRow) -> bool:
        """Makes the steps up to the one at which the run is the target's. Returns False when neither trainer has the
        run, so that nothing can be moved."""
        started = time.monotonic()
        ids = {"model_id": move.model_id, "move_id": move.move_id}
        release = pb.ReleaseModelRequest(**ids, trainer_id=move.target_id)
        adopt = pb.AdoptModelRequest(**ids)
        not_at_source: ServiceError | None = None
        is_lost = move.source_id in self._lost and not move.is_released
        if is_lost:
            adopt.fenced_trainer_id = move.source_id
        elif not move.is_released:
            try:
                await self._call(move.source_id, "ReleaseModel", release)
            except (ModelNotFound, ModelLost) as error:
                # Perhaps the target has it by now: if all trainers have their journals in one database, the source
                # loses the run's rows when the target adopts it.
                not_at_source = error
            else:
                await self._store.moves.note_released(move)
        try:
            await self._call(move.target_id, "AdoptModel", adopt)
        except FailedPrecondition as error:
            if not_at_source is None and not is_lost:
                raise
            await self._store.moves.delete(move)
            if not_at_source is None:
                self._failed(move.model_id, error.message)
            else:
                self._failed(move.model_id, not_at_source.message, is_gone=True)
            return False
        except DataCorrupted:
            await self._call(move.source_id, "ReleaseModel", release)  # the source writes the damaged package again
            raise
        await self._store.moves.finish(move)
        self._placement.forget(move.model_id)
        self._metrics.services.moved_runs.inc()
        self._metrics.services.move_seconds.observe(time.monotonic() - started)
        logger.info(
            "the run %s has moved from the trainer %s to the trainer %s", move.model_id, move.source_id, move.target_id
        )
        return True

    async def _clean_up(self, move: MoveRow) -> None:
        """Makes the last steps of a move whose run is at the target: both trainers delete what they keep for it."""
        forget = pb.ForgetMoveRequest(model_id=move.model_id, move_id=move.move_id)
        await self._call(move.target_id, "ForgetMove", forget)
        if move.source_id in self._lost:  # the target has taken over all rows, also those of a release
            await self._store.moves.delete(move)
            return
        try:
            await self._call(move.source_id, "ForgetMove", forget)
        except NotFound:
            logger.info(
                "the trainer %s is no longer one of this gateway's trainers, so files of the moved run %s stay there",
                move.source_id,
                move.model_id,
            )
        await self._store.moves.delete(move)

    async def _call(self, trainer_id: str, rpc: str, request: Any) -> None:
        """Calls a trainer. Raises NotFound and NotReady as `_connected` does, and NotReady when another gateway makes
        the moves by now."""
        await self._peers.refresh()
        if not await self._peers.has_lease("reaper"):
            raise NotReady("another gateway makes the moves by now")
        trainer = self._connected(trainer_id)
        await getattr(trainer.admin, rpc)(request, timeout=_STEP_TIMEOUT_S)

    def _connected(self, trainer_id: str) -> TrainerClient:
        """The trainer with this id. Raises NotFound when none of this gateway's trainers has the id, and NotReady when
        the trainer cannot be reached now."""
        trainer = next((one for one in self._clients.trainers if one.trainer_id == trainer_id), None)
        if trainer is None and self._clients.has_unreached_trainers:
            raise NotReady(f"the trainer {trainer_id} has not been reached yet")
        if trainer is None:
            raise NotFound(f"the trainer {trainer_id} is none of this gateway's trainers")
        if not trainer.is_connected:
            raise NotReady(f"the trainer at {trainer.address} cannot be reached at the moment")
        return trainer

    async def state(self) -> list[TrainerState]:
        """All of this gateway's trainers, with their runs and moves."""
        counts, moves = await self._store.moves.count_runs(), await self._store.moves.all()
        drained = {row.trainer_id: row for row in await self._store.moves.drained_rows()}
        found: list[TrainerState] = []
        for trainer in self._clients.trainers:
            own = trainer.trainer_id
            row = drained.get(own) if own else None
            num_runs, problems = counts.get(own, 0) if own else 0, row.problems if row is not None else {}
            num_gone = sum(problem["is_gone"] for problem in problems.values())
            num_moving = sum(own == move.source_id for move in moves) if own else 0
            is_empty = row is not None and not num_moving and num_runs <= num_gone
            found.append(TrainerState(trainer, num_runs, num_moving, row is not None, problems, is_empty))
        return found

    def find(self, name: str) -> TrainerClient:
        """The trainer with this address or trainer_id. Raises InvalidRequest, which lists all trainers."""
        found = [one for one in self._clients.trainers if name in (one.address, one.trainer_id) and name]
        if not found:
            known = ", ".join(one.address for one in self._clients.trainers) or "none"
            raise InvalidRequest(
                f"trainer: {name!r} is no address or id of a trainer; this server has {known}", field="trainer"
            )
        return found[0]
