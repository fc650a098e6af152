"""Moves models between trainers: the source releases a model, and the target adopts it. Every trainer can be either.

A release stops the model between two operations, and parks it, so that a snapshot covers all operations that have run.
Then it writes a package into the store of checkpoints: the snapshot, and the model's rows of the journal. At last the
journal records that the model has moved. An adoption copies the snapshot and the rows into the target's own files and
journal, which then has a parked model. The model comes back by the code that restores models after a restart, and its
accepted operations run.

A trainer has a model exactly while its journal has the model as live. The source's journal gives the model up once the
package is durable. Only after that the target's journal takes the model, in one transaction. So at most one trainer has
the model at any moment. A crash loses nothing: each step can be repeated, and a repeat of a finished step changes
nothing. Only the target that the release has named can adopt the model, so the gateway repeats `adopt` until it
succeeds.

A lost trainer releases nothing. If its journal lies in the same database as this trainer's, its snapshots are in the
same place, too. Another trainer fences it, and then takes over the rows of its models where they are, without a
package. Each model comes back as it would have at the restart of the lost trainer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from tinsmith.errors import DataCorrupted, FailedPrecondition, OutOfCapacity
from tinsmith.threads import in_pool
from trainer_service.durability import run_file
from trainer_service.durability.executing import other_work
from trainer_service.durability.journal import Journal
from trainer_service.durability.packages import ROWS, Packages
from trainer_service.durability.run_file import Move
from trainer_service.operations.restore import Restorer, moved
from trainer_service.scheduling.withholding import resume, withhold
from trainer_service.storage.protocol import Storage

logger = logging.getLogger(__name__)


class Moving:
    """Releases and adopts models. All methods run on one event loop, and must not be cancelled."""

    def __init__(self, restorer: Restorer, open_storage: Callable[[], Storage], *, trainer_id: str) -> None:
        """`open_storage`: opens a Storage with the packages' root; it is called at the first move. `trainer_id`: the id
        of this trainer."""
        self._restorer = restorer
        self._journal: Journal = restorer.journal
        self._scheduler = restorer.scheduler
        self._open_storage = open_storage
        self._opening = asyncio.Lock()
        self._packages: Packages | None = None
        self._trainer_id = trainer_id
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def release(self, model_id: str, move: Move) -> None:
        """Releases a model. Returns once the model's package is durable and this trainer has given the model up.

        Raises ModelNotFound and ModelLost for a model that this trainer does not have, and FailedPrecondition for a
        model that was released in another move. Raises OutOfCapacity or NotReady when the package cannot be written;
        then the model goes on at this trainer.
        """
        async with self._turn(model_id):
            packages = await self._opened()
            earlier = (await self._journal.moved.all()).get(model_id)
            if earlier is not None and earlier != move:
                raise FailedPrecondition(f"model_id: {model_id!r} was released in another move, {earlier.move_id}")
            if earlier is not None:
                if not await in_pool(packages.is_intact, model_id, move.move_id):
                    await self._pack(packages, model_id, move)
                return
            is_known = self._scheduler.models.is_known(model_id)
            if not is_known and await in_pool(packages.is_intact, model_id, move.move_id):
                return  # it was released before, and the target, in the same database, has taken over its rows
            await self._release(packages, model_id, move)

    async def _release(self, packages: Packages, model_id: str, move: Move) -> None:
        started = time.perf_counter()
        await self._have_intact_snapshot(model_id)
        last = await withhold(self._scheduler, model_id, moved(model_id, move))
        try:
            if last is not None:
                await self._restorer.put_away(model_id, last)
            await self._pack(packages, model_id, move)
        except Exception as error:
            logger.warning("the model %s cannot be released, and goes on here: %s", model_id, error)
            await self._restorer.free(model_id)
            model = await self._journal.live_model(model_id)
            resume(self._scheduler, model_id, is_covered=model is None or model.is_covered)
            if isinstance(error, OSError):
                raise OutOfCapacity(f"{model_id} cannot be released: {error}") from error
            raise
        await self._journal.moved.release(model_id, move)
        self._scheduler.models.remove(model_id)
        self._restorer.metrics.durability.released_models.inc()
        self._restorer.metrics.durability.release_seconds.observe(time.perf_counter() - started)
        logger.info("the model %s is released for the trainer %s", model_id, move.trainer_id)

    async def _have_intact_snapshot(self, model_id: str) -> None:
        """Brings a parked model back into memory if its newest snapshot is damaged. It is made from an earlier snapshot
        and the journal, and then gets a new snapshot as it is released."""
        model = await self._journal.live_model(model_id)
        if model is None or model.snapshot_seq_id is None or model_id not in self._scheduler.models.parked:
            return
        try:
            await in_pool(self._restorer.snapshots.files.verify, model_id, model.snapshot_seq_id)
        except DataCorrupted as error:
            logger.error("the snapshot %s/%d is damaged: %s", model_id, model.snapshot_seq_id, error)
            await self._scheduler.check_held(model_id)

    async def _pack(self, packages: Packages, model_id: str, move: Move) -> None:
        """Writes the package of a model that is not in memory. The model is withheld, or was released before."""
        base = self._restorer.operations.engine.base
        with packages.scratch() as folder:
            rows = folder / ROWS
            await self._journal.moved.export(model_id, rows, move)
            _, _, seq_id = await in_pool(run_file.move_of, rows, model_id)
            files = self._restorer.snapshots.files
            await in_pool(files.verify, model_id, seq_id)
            info, state = await in_pool(files.read, model_id, seq_id, base)
            await in_pool(packages.write, move.move_id, info, state, rows)

    async def adopt(self, model_id: str, move_id: str, *, fenced_trainer_id: str = "") -> None:
        """Adopts a model. Returns once this trainer has its snapshot, and its rows in the journal. The model is parked
        then, and is brought back at once if accepted operations wait. `fenced_trainer_id`: the lost trainer that had
        the model, unless it had released it.

        Raises FailedPrecondition when there is no package of this move, or the package is for another trainer, NotReady
        when the lost trainer was started again, InvalidRequest when the model was trained on other base weights, and
        DataCorrupted when the package is damaged.
        """
        async with self._turn(model_id):
            if model_id in self._scheduler.models.moved:
                raise FailedPrecondition(f"model_id: {model_id!r} was released by this trainer", model_id=model_id)
            if self._scheduler.models.is_known(model_id):
                return
            model = await self._journal.live_model(model_id)
            if model is None:
                if fenced_trainer_id and await self._journal.moved.take_over(model_id, fenced_trainer_id):
                    self._restorer.metrics.durability.adopted_models.inc()
                    logger.info("%s is adopted from the trainer %s, which is lost", model_id, fenced_trainer_id)
                else:
                    await self._adopt(await self._opened(), model_id, move_id)
                model = await self._journal.live_model(model_id)
            if model is not None:
                resume(self._scheduler, model_id, is_covered=model.is_covered)

    async def _adopt(self, packages: Packages, model_id: str, move_id: str) -> None:
        started = time.perf_counter()
        operations, files = self._restorer.operations, self._restorer.snapshots.files
        executing, name = self._scheduler.executing, other_work(f"adopt {model_id}", move_id.encode())
        await executing.turn_to_store(*name)
        with executing.other(name), packages.scratch() as folder:
            rows = folder / ROWS
            info, state = await in_pool(packages.read, model_id, move_id, operations.engine.base, rows=rows)
            move, _, seq_id = await in_pool(run_file.move_of, rows, model_id)
            if move != Move(move_id, self._trainer_id):
                raise FailedPrecondition(
                    f"move_id: the package of {model_id!r} for the move {move_id!r} is for the trainer "
                    f"{move.trainer_id}, and this one is {self._trainer_id}",
                    field="move_id",
                )
            operations.models.check_base_model(info.base_model, field="base_model")
            operations.models.check_base_weights(info.base_weights, field="base_weights")
            info.location = f"{model_id}/{seq_id}"
            try:
                num_bytes = await in_pool(files.write, seq_id, info, state)
            except OSError as error:
                raise OutOfCapacity(f"the snapshot of {model_id} cannot be written: {error}") from error
            await self._journal.moved.adopt(model_id, rows, snapshot_bytes=num_bytes)
        self._restorer.metrics.durability.adopted_models.inc()
        self._restorer.metrics.durability.adopt_seconds.observe(time.perf_counter() - started)
        logger.info("the model %s is adopted; its snapshot is that after seq_id %d", model_id, seq_id)

    async def forget(self, model_id: str, move_id: str) -> None:
        """Deletes what is left of a move that has ended: the package, and at the source the model's rows and
        snapshots."""
        async with self._turn(model_id):
            if await self._journal.moved.forget(model_id, move_id):
                await in_pool(self._restorer.snapshots.files.delete_all, model_id)
                self._scheduler.executing.forget_model(model_id)
            self._scheduler.models.forget_moved(model_id, move_id)
            packages = await self._opened()
            await in_pool(packages.delete, model_id, move_id)

    async def _opened(self) -> Packages:
        async with self._opening:
            if self._packages is None:
                self._packages = Packages(await in_pool(self._open_storage))
            return self._packages

    def _turn(self, model_id: str) -> asyncio.Lock:
        return self._turns.setdefault(model_id, asyncio.Lock())
