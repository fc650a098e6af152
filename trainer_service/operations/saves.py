"""Saves checkpoints: copies the model in the operation's turn, then writes the copy and sends it to samplers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.errors import CheckpointNotFound, DataCorrupted, InvalidRequest, NotReady, OutOfCapacity
from tinsmith.lora_config import config_to_proto
from tinsmith.rpc.paths import check_name
from tinsmith.rpc.times import check_ttl
from tinsmith.rpc.words import choices
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.engine import TrainingEngine
from trainer_service.operation import Turn, Work
from trainer_service.operations.models import LiveModels
from trainer_service.operations.publishing import Publishing
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.encryption import Recipient, parse_recipients
from trainer_service.storage.locations import KINDS, Location
from trainer_service.weight_sync.canary import Scores
from trainer_service.weight_sync.certificate import Certified

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Saves:
    """The save_checkpoint operation."""

    engine: TrainingEngine
    checkpoints: CheckpointStore
    models: LiveModels
    publishing: Publishing
    _being_replaced: set[Location] = field(default_factory=set)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest, *, again: bool) -> Work:
        """The work of a save. `again`: the request was accepted before a restart, and its files may exist.

        Raises InvalidRequest.
        """
        if request.kind not in KINDS:
            raise InvalidRequest(
                f"kind: {request.kind} is not one of {choices(types_pb2.CheckpointKind)}", field="kind"
            )
        if request.HasField("ttl"):
            check_ttl(request.ttl, field="ttl")
        if request.kind != types_pb2.CHECKPOINT_KIND_EPHEMERAL:
            name = check_name(request.name, field="name")
        elif request.name:
            raise InvalidRequest(f"name: {request.name!r} was given, but an ephemeral one has none", field="name")
        else:
            name = str(request.seq_id)
        recipients = parse_recipients(request.age_recipients, field="age_recipients")
        if recipients and request.kind != types_pb2.CHECKPOINT_KIND_EXTERNAL:
            raise InvalidRequest(
                "age_recipients: only CHECKPOINT_KIND_EXTERNAL can be encrypted", field="age_recipients"
            )
        location = Location(request.model_id, KINDS[request.kind], name)
        return lambda turn: self._save(turn, request, location, recipients, again=again)

    async def _save(
        self,
        turn: Turn,
        request: pb.SaveCheckpointRequest,
        location: Location,
        recipients: Sequence[Recipient],
        *,
        again: bool,
    ) -> pb.WaitResultResponse:
        if request.overwrite or location in self._being_replaced:
            # Earlier operations are answered first. If a restart ran an earlier save or load of this location again, it
            # would find another checkpoint there.
            await turn.earlier_stored()
        if not request.overwrite:
            return await self._write(turn, request, location, recipients, again=again)
        self._being_replaced.add(location)
        try:
            return await self._write(turn, request, location, recipients, again=again)
        finally:
            self._being_replaced.discard(location)

    async def _write(
        self,
        turn: Turn,
        request: pb.SaveCheckpointRequest,
        location: Location,
        recipients: Sequence[Recipient],
        *,
        again: bool,
    ) -> pb.WaitResultResponse:
        model = self.models.get(request.model_id)
        with_optimizer = request.kind == types_pb2.CHECKPOINT_KIND_TRAINING
        version_id = model.version(request.seq_id, save_id=request.save_id)
        if again:
            async with turn.storing():
                written = await self.checkpoints.reads(self._written, location, version_id)
                if written is not None:
                    return await self._finish(written, location)
        scores: asyncio.Future[Scores] | None = None
        if self.publishing.sends(request.kind):
            state, scores = await self.publishing.capture_and_score(turn, request.model_id)
        else:
            state = await turn.run(lambda: self.engine.capture(request.model_id, with_optimizer=with_optimizer))
        info = types_pb2.CheckpointInfo(
            location=str(location),
            kind=request.kind,
            model_id=request.model_id,
            base_model=model.base_model,
            base_weights=model.base_weights,
            lora_config=config_to_proto(state.config),
            version_id=version_id,
            step=state.step,
            has_optimizer=with_optimizer,
            optimizer=model.optimizer_kind,
            ttl=request.ttl if request.HasField("ttl") else None,
            user_metadata=request.user_metadata,
        )
        if request.overwrite:
            async with turn.storing():
                await self.checkpoints.writes(self.publishing.keep_replaced, location)

        async def save() -> types_pb2.CheckpointInfo:
            async with turn.storing():
                return await self.checkpoints.writes_to(
                    location, self.checkpoints.save, info, state, overwrite=request.overwrite, recipients=recipients
                )

        if scores is not None:
            stored, certified = await self.publishing.with_save(save, info, state, scores)
        else:
            stored, certified = await save(), None
        return _saved(stored, certified)

    def _written(self, location: Location, version_id: str) -> types_pb2.CheckpointInfo | None:
        """The checkpoint at this location if this very save has written it, before the trainer ended; else None."""
        with contextlib.suppress(CheckpointNotFound, DataCorrupted):
            info = self.checkpoints.info(location)
            return info if info.version_id == version_id and info.location == str(location) else None

    async def _finish(self, info: types_pb2.CheckpointInfo, location: Location) -> pb.WaitResultResponse:
        """Publishes and answers a save whose files exist. Samplers may have the version already: a version never
        changes, so they have what is in the files."""
        certified: Certified | None = None
        if self.publishing.sends(info.kind):
            try:
                certified = await self.publishing.publish(location, info.version_id)
            except (NotReady, OutOfCapacity) as error:  # the first sample that needs the version publishes it
                logger.warning("%s is saved, but not published: %s", location, error)
        return _saved(info, certified)


def _saved(info: types_pb2.CheckpointInfo, certified: Certified | None) -> pb.WaitResultResponse:
    return pb.WaitResultResponse(
        save_checkpoint=pb.SaveCheckpointResponse(
            checkpoint=info,
            num_samplers=0 if certified is None else certified.num_samplers,
            certificate=None if certified is None else certified.certificate,
        )
    )
