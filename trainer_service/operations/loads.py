"""Loads checkpoints into models: checks that this server can train them, and reads them.

A checkpoint is read before the operation's turn on the compute thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tinsmith.errors import InvalidRequest, NotFinite, about
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability.snapshots import Snapshots
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.optimizers import magnitude
from trainer_service.operation import Turn, Work
from trainer_service.operations.models import LiveModels, Model
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location


@dataclass(slots=True)
class Loads:
    """The load_checkpoint operation, and reading checkpoints for other operations."""

    engine: TrainingEngine
    checkpoints: CheckpointStore
    models: LiveModels
    snapshots: Snapshots

    def load_checkpoint(self, request: pb.LoadCheckpointRequest) -> Work:
        """The work of a load_checkpoint. Raises InvalidRequest for a malformed location."""
        location = Location.parse(request.location, field="location")
        return lambda turn: self._load(turn, request, location)

    async def _load(self, turn: Turn, request: pb.LoadCheckpointRequest, location: Location) -> pb.WaitResultResponse:
        await turn.settled()  # an earlier operation of the model may still write this checkpoint
        async with turn.storing():
            info, state = await self.read_to_train(location, with_optimizer=request.load_optimizer, field="location")
        await turn.run(lambda: self.engine.restore(request.model_id, state, with_optimizer=request.load_optimizer))
        model = self.models.get(request.model_id)
        model.step = state.step
        await self.keep(turn, model, request.seq_id, state, with_optimizer=request.load_optimizer)
        return pb.WaitResultResponse(load_checkpoint=pb.LoadCheckpointResponse(checkpoint=info))

    async def read_to_train(
        self, location: Location, *, with_optimizer: bool, field: str
    ) -> tuple[types_pb2.CheckpointInfo, CapturedState]:
        """Reads a checkpoint for training. Raises InvalidRequest for a checkpoint that this server does not train,
        NotFinite for one with numbers that are not finite, and the errors of `read`."""
        await self._check_extent(location, field=field)
        info, state = await self.read(location, with_optimizer=with_optimizer, field=field)
        await self.checkpoints.reads(_check_finite, location, state, field=field)
        return info, state

    async def _check_extent(self, location: Location, *, field: str) -> None:
        """Raises InvalidRequest for a checkpoint of a kind that this server does not train, before it is read."""
        info = await self.checkpoints.reads(self.checkpoints.info, location)
        rank = info.lora_config.rank
        if rank == 0 and not self.engine.base.trainable:
            raise InvalidRequest(
                f"{field}: {location} holds all parameters, which needs a server started with --full-training; this "
                "one was started without it, and trains adapters",
                field=field,
            )
        if rank != 0 and self.engine.base.trainable:
            raise InvalidRequest(
                f"{field}: {location} holds an adapter (rank {rank}), which needs a server started without "
                "--full-training; this one was started with it, and trains all parameters",
                field=field,
            )

    async def read(
        self, location: Location, *, with_optimizer: bool, field: str
    ) -> tuple[types_pb2.CheckpointInfo, CapturedState]:
        """Reads a checkpoint. Raises InvalidRequest when it belongs to another base model or to other base weights, and
        the errors of CheckpointStore.load."""
        try:
            info, state = await self.checkpoints.reads(
                self.checkpoints.load, location, self.engine.base, with_optimizer=with_optimizer
            )
        except InvalidRequest as error:
            error.metadata.setdefault("field", field)
            raise
        with about(field):
            self.models.check_base_model(info.base_model, field=f"{field} {location}: base_model")
            self.models.check_base_weights(info.base_weights, field=f"{field} {location}: base_weights")
        return info, state

    async def keep(self, turn: Turn, model: Model, seq_id: int, state: CapturedState, *, with_optimizer: bool) -> None:
        """Writes a snapshot of a model that was just loaded, before the load is answered: after the answer, the client
        may delete the checkpoint, and a replay could not read it again."""
        kept = state if with_optimizer else replace(state, optimizer=None)
        await self.snapshots.keep(turn, seq_id, model.snapshot_info(seq_id, kept), kept)


def _check_finite(location: Location, state: CapturedState, *, field: str) -> None:
    moments = {} if state.optimizer is None else state.optimizer.tensors
    for name, tensor in {"weights": state.adapter.flat, **moments}.items():
        if not math.isfinite(magnitude([tensor.float()])):
            instead = "an earlier checkpoint" if name == "weights" else "it without the optimizer"
            raise NotFinite(
                f"{field}: {location} has {name} that are not finite, which training cannot repair; load {instead}",
                field=field,
            )
