"""The trainer of each run: chosen at the run's creation, stored in its row, and found there again.

All calls of a run go to its trainer, because the run's state and journal are there. Checkpoints lie in a store that all
trainers of a base model share, so any of them can read one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from gateway.clients import Clients, TrainerClient
from gateway.database.store import Store
from gateway.database.tables.sessions import Model
from tinsmith.errors import ModelNotFound, NotReady, ServiceError
from tinsmith.rpc.times import seconds_of
from tinsmith.v1 import trainer_pb2

logger = logging.getLogger(__name__)

_MAX_KNOWN = 100_000
"""Most runs whose trainers are kept in memory."""
_ASK_TIMEOUT_S = 1.0
"""Longest time in which a trainer may tell its load, in seconds."""
_LOOK_S = 2.0
"""Pause between two looks for the trainer of a run whose trainer has not been reached, in seconds."""
_BUSY_S = 10.0
"""Queued work that counts as much as half of the memory for models, in seconds."""


class _Place(NamedTuple):
    base_model: str
    trainer_id: str
    """Id of the run's trainer; empty if the row names none."""


class Placement:
    """Chooses and finds the trainers of runs."""

    def __init__(self, store: Store, clients: Clients, *, timeout_s: float) -> None:
        """`timeout_s`: how long to wait for trainers that have not been reached since the start."""
        self._store = store
        self._clients = clients
        self._timeout_s = timeout_s
        self._known: LRUCache[str, _Place] = LRUCache(_MAX_KNOWN)
        """The places of runs, by model_id, so that a call that waits for its trainer needs no database."""
        self._choosing = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def choose(self, base_model: str, *, but: str | None = None) -> TrainerClient:
        """The trainer of the base model that has most room and least work. Drained trainers are left out, but the only
        trainer of a base model takes runs even when it is drained. `but`: trainer_id of a further trainer that is left
        out.

        Raises NotReady when no trainer can be asked, FailedPrecondition when the trainers of the base model do not
        agree, and InvalidRequest when no trainer serves it.
        """
        serving = await self._clients.settle(lambda: self._clients.serving(base_model), timeout_s=self._timeout_s)
        if len(serving) == 1 and but is None:
            return serving[0]
        self._clients.check_agreement(base_model)
        drained = await self._store.moves.drained()
        serving = [trainer for trainer in serving if trainer.trainer_id not in {*drained, but}]
        if not serving:
            raise NotReady(f"all trainers of {base_model!r} that have been reached are being drained")
        asked = await asyncio.gather(*(self._ask(trainer) for trainer in serving))
        infos = [(trainer, info) for trainer, info in zip(serving, asked, strict=True) if info is not None]
        if not infos:
            addresses = " and ".join(trainer.address for trainer in serving)
            raise NotReady(f"no trainer of {base_model!r} answers: {addresses}")
        coming = await self._store.models.count_coming()
        return least_loaded(infos, coming)

    async def _ask(self, trainer: TrainerClient) -> trainer_pb2.GetTrainerInfoResponse | None:
        try:
            return await trainer.stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), timeout=_ASK_TIMEOUT_S)
        except ServiceError as error:
            logger.info("%s gets no new run now: %s", trainer.address, error.message)
            return None

    async def add(self, model: Model) -> None:
        """Chooses the run's trainer, and adds the run's row with it. A row that exists already stays. Raises the errors
        of `choose`."""
        async with self._choosing:  # the next choice counts this run
            model.trainer_id = (await self.choose(model.base_model)).trainer_id or None
            await self._store.models.add(model)

    async def of_run(self, model_id: str, *, timeout_s: float | None = None) -> TrainerClient:
        """The trainer of the run. Waits until the gateway has reached this trainer once since its start.

        Raises NotReady after `timeout_s` (None: never), ModelNotFound when there is no such run or its trainer is no
        longer in the list, and InvalidRequest when no trainer serves its base model.
        """
        place = self._known.get(model_id) or await self._place(model_id)
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            try:
                trainer = await self._settled(model_id, place, timeout_s=min(left_s, _LOOK_S))
                break
            except NotReady:
                if left_s <= _LOOK_S:
                    raise
            with suppress(SQLAlchemyError):  # the run may have been adopted by another trainer meanwhile
                place = await self._place(model_id, is_newest=True)
        if not trainer.is_connected and self.are_several and self._store.is_shared:
            try:  # another gateway may have moved the run before the trainer went away
                place = await self._place(model_id, is_newest=True)
            except SQLAlchemyError:
                return trainer
            trainer = await self._settled(model_id, place, timeout_s=timeout_s)
        return trainer

    async def _settled(self, model_id: str, place: _Place, *, timeout_s: float | None) -> TrainerClient:
        return await self._clients.settle(
            lambda: self._clients.find_trainer(place.base_model, place.trainer_id, what=model_id), timeout_s=timeout_s
        )

    @property
    def are_several(self) -> bool:
        """Whether there are several trainers, so that runs may move."""
        return len(self._clients.trainers) > 1

    def turn(self, model_id: str) -> asyncio.Lock:
        """The lock under which a move of the run begins, or the run is deleted, so that the two never cross."""
        return self._turns.setdefault(model_id, asyncio.Lock())

    def forget(self, model_id: str) -> None:
        """Drops the run's trainer from memory, because the run moves, or has moved."""
        self._known.pop(model_id, None)

    async def has_moved(self, model_id: str, trainer: TrainerClient) -> bool:
        """Whether a call of the run that this trainer has refused as unknown must be made again, because the run is
        moving, or is at another trainer by now."""
        if not self.are_several:
            return False
        self.forget(model_id)
        try:
            move = await self._store.moves.get(model_id)  # before the row: a move that ends in between changes the row
            row = await self._store.get(Model, model_id)
        except SQLAlchemyError:  # nobody knows, so the call is made again
            return True
        if row is None or row.released_at is not None:
            return False
        is_moving = move is not None and not move.is_done
        return is_moving or (row.trainer_id is not None and row.trainer_id != trainer.trainer_id)

    async def of_checkpoint(self, location: str, base_model: str) -> TrainerClient:
        """A trainer that can read and change the checkpoint at this location: the trainer of the checkpoint's run, or
        another one with the same store while that trainer is away.

        Raises NotReady when no trainer of the base model has been reached yet, and InvalidRequest when none serves it.
        """
        serving = self._clients.serving(base_model)
        if len(serving) == 1:
            return serving[0]
        model_id = location.split("/")[0]
        try:
            own_id = (self._known.get(model_id) or await self._place(model_id)).trainer_id
        except ModelNotFound:  # a copy, an import, or a run that this database does not have
            own_id = ""
        own = next((trainer for trainer in serving if own_id and trainer.trainer_id == own_id), None)
        if own is not None:
            others = [each for each in serving if each is not own and each.store_id == own.store_id]
            serving = [own, *others]
        return next((trainer for trainer in serving if trainer.is_connected), serving[0])

    async def _place(self, model_id: str, *, is_newest: bool = False) -> _Place:
        """The place of a run, read from its row. Raises ModelNotFound, and the errors of `_locate`."""
        row = await self._store.models.get(model_id, is_newest=is_newest or self._store.is_shared)
        if row is None:
            raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
        trainer_id = row.trainer_id
        if trainer_id is None and row.released_at is None:
            trainer_id = await self._locate(row)
        place = _Place(row.base_model, trainer_id or "")
        if trainer_id is not None:
            self._known[model_id] = place
        return place

    async def _locate(self, model: Model) -> str | None:
        """The trainer_id for a run whose row is older than the column `trainer_id`. It is the id of the base model's
        only trainer, or else of the trainer that has the run; None if no such id is found. Raises NotReady when a
        trainer that may have the run cannot be asked, and the errors of `Clients.serving`."""
        serving = await self._clients.settle(lambda: self._clients.serving(model.base_model), timeout_s=self._timeout_s)
        if len(serving) == 1 and not self._clients.has_unreached_trainers:
            return serving[0].trainer_id or None
        for trainer in serving:
            try:
                await trainer.stub.GetModel(trainer_pb2.GetModelRequest(model_id=model.model_id))
            except ModelNotFound:
                continue
            except NotReady as error:
                raise NotReady(f"the trainer at {trainer.address} cannot be asked for {model.model_id}") from error
            except ServiceError as error:
                logger.info("%s has %s, which fails: %s", trainer.address, model.model_id, error.message)
            if trainer.trainer_id:
                await self._store.models.set_trainer(model.model_id, trainer.trainer_id)
            return trainer.trainer_id or None
        if self._clients.has_unreached_trainers:
            raise NotReady(f"the trainer of {model.model_id} has not been reached yet")
        return None


def least_loaded(
    infos: Sequence[tuple[TrainerClient, trainer_pb2.GetTrainerInfoResponse]], coming: dict[str, int]
) -> TrainerClient:
    """The trainer with most room for a further run and least work. `coming`: trainer_id -> number of runs that were
    placed there and that the trainer's figures do not contain yet."""
    num_models = sum(info.num_models for _, info in infos)
    run_bytes = sum(info.reserved_bytes for _, info in infos) / num_models if num_models else 0.0

    def load(found: tuple[TrainerClient, trainer_pb2.GetTrainerInfoResponse]) -> tuple[float, int]:
        _, info = found
        num_coming = coming.get(info.trainer_id, 0)
        reserved = info.reserved_bytes + num_coming * run_bytes
        share = reserved / info.reservable_bytes if info.reservable_bytes else 0.0
        queued_s = seconds_of(info.queued_time)
        busy = queued_s / (queued_s + _BUSY_S)
        return share + busy, info.num_models + num_coming

    return min(infos, key=load)[0]
