"""TrainerService over gRPC: the RPCs on models and their operations. checkpoint_servicer.py has those on checkpoint
files. The call of an operation is acknowledged once the operation is in the journal, and then waits for the answer
(intake.py)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, TypeVar

import grpc.aio

from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import ALL_GROUPS, GROUPS
from tinsmith.pictures.counting import settings_of
from tinsmith.pictures.processing import Processor
from tinsmith.rpc.errors import shortened
from tinsmith.rpc.notes import check_notes
from tinsmith.rpc.paths import check_model_id
from tinsmith.rpc.times import duration
from tinsmith.rpc.words import value_of
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.checkpoint_servicer import CheckpointServicer, noted
from trainer_service.durability.executing import deletion
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Body
from trainer_service.engine.batch import LOSS_FN_NAMES
from trainer_service.engine.optimizers import OPTIMIZERS
from trainer_service.intake import Intake, check_seq_id
from trainer_service.operations.moving import Moving
from trainer_service.storage.locations import Location
from trainer_service.trainer import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_NONCE_BYTES = 6
"""Size of the random number that distinguishes creations of the same model_id, and saves of the same seq_id."""


class TrainerServicer(CheckpointServicer):
    """All RPCs of TrainerService."""

    def __init__(self) -> None:
        self._deleting: dict[str, asyncio.Task[None]] = {}
        """Deletions in progress, by model_id."""

    @cached_property
    def _intake(self) -> Intake:
        return Intake(self._ready)

    @property
    def journal(self) -> Journal:
        """The trainer's journal. Raises NotReady before the models are restored from it."""
        return self._ready.journal

    async def moves(self, model_id: str, call: Callable[[Moving], Coroutine[Any, Any, None]]) -> None:
        """Makes a step of a model's move to another trainer, or from one. Raises NotReady as `journal` does."""
        check_model_id(model_id, field="model_id")
        if (deleting := self._deleting.get(model_id)) is not None:
            await asyncio.wait([deleting])
        trainer = self._ready
        # Cancelling the call does not end the step.
        await asyncio.shield(trainer.scheduler.tasks.spawn(call(trainer.moving)))
        if model_id in trainer.scheduler.models.moved:
            self._intake.forget(model_id)

    async def GetTrainerInfo(self, request: pb.GetTrainerInfoRequest, context: Context) -> pb.GetTrainerInfoResponse:
        trainer = self._ready
        engine = trainer.operations.engine
        full, groups = engine.base.trainable, engine.base.groups
        pace = trainer.scheduler.compute.pace()
        return pb.GetTrainerInfoResponse(
            base_models=trainer.operations.models.base_models,
            max_context_length=engine.limits.max_context_length,
            max_lora_rank=trainer.operations.max_lora_rank,
            vocab_size=engine.limits.vocab_size,
            architecture=engine.base.architecture,
            loss_fns=LOSS_FN_NAMES,
            optimizers=[value_of(types_pb2.Optimizer, kind) for kind in OPTIMIZERS],
            device=engine.base.device.type,
            boot_id=trainer.boot_id,
            full_training=full,
            trainable=full or bool(groups),
            base_weights=trainer.operations.models.base_weights,
            trainable_groups=[] if full else [value_of(types_pb2.AdapterGroup, one) for one in groups],
            refused_groups=[
                pb.RefusedGroup(group=value_of(types_pb2.AdapterGroup, one), reason=engine.base.why_not(one))
                for one in ALL_GROUPS
                if one not in groups and not full and (one in GROUPS or one in engine.base.refused_groups)
            ],
            num_threads=pace.num_threads,
            micro_batch_tokens=pace.micro_batch_tokens,
            tokens_per_second=pace.tokens_per_s,
            one_by_one=engine.base.one_by_one,
            picture_counting=_picture_counting(engine.limits.processor),
            trainer_id=trainer.trainer_id,
            store_id=trainer.checkpoints.storage.store_id,
            fingerprint=trainer.fingerprint,
            reserved_bytes=engine.memory.reserved_bytes,
            reservable_bytes=engine.memory.plan.models_bytes or 0,
            num_models=trainer.scheduler.models.num_known,
            queued_time=duration(trainer.scheduler.queued_s()),
            version_homes=0 if full else trainer.operations.publishing.publisher.sender.config.version_homes,
        )

    async def CreateModel(self, request: pb.CreateModelRequest, context: Context) -> pb.CreateModelResponse:
        operations = self._ready.operations
        if request.creation_id:
            raise InvalidRequest(f"creation_id: {request.creation_id!r}: only the trainer sets it", field="creation_id")
        check_notes(request.user_metadata, field="user_metadata")
        if (deleting := self._deleting.get(request.model_id)) is not None:
            await asyncio.wait([deleting])  # otherwise the deletion would remove the new model's data
        operations.create_model(request)  # a request with errors of its own makes no operation
        if request.from_location:
            location = Location.parse(request.from_location, field="from_location")
            await self.on_checkpoint(noted("servable", location), lambda: operations.check_servable(request))
        else:
            await operations.check_servable(request)

        def pack() -> Body:
            body = Body.pack("create_model", request)
            request.creation_id = secrets.token_hex(_NONCE_BYTES)
            if request.lora_config.rank and not request.lora_config.HasField("seed"):
                request.lora_config.seed = secrets.randbits(31)
            request.base_weights = request.base_weights or operations.models.base_weights
            return body.storing(request)

        answer = await self._intake.operate("create_model", request, 0, pack, context)
        return answer.create_model

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        trainer = self._ready
        await trainer.scheduler.check_held(request.model_id)
        model = trainer.operations.models.get(request.model_id)
        next_seq_id = trainer.scheduler.models[request.model_id].next_seq_id
        return pb.GetModelResponse(model=model.to_proto(next_seq_id=next_seq_id))

    async def DeleteModel(self, request: pb.DeleteModelRequest, context: Context) -> pb.DeleteModelResponse:
        model_id = check_model_id(request.model_id, field="model_id")
        if model_id not in self._deleting:
            task = self._deleting[model_id] = asyncio.create_task(self._delete_model(self._ready, model_id))
            task.add_done_callback(lambda _: self._deleting.pop(model_id))
        await asyncio.shield(self._deleting[model_id])
        return pb.DeleteModelResponse()

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Context) -> pb.ForwardBackwardResponse:
        answer = await self._intake.submit("forward_backward", request, context)
        return answer.forward_backward

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepResponse:
        check_seq_id(request.seq_id)
        failure_seen = self._intake.failure_seen(request.model_id, request.seq_id)
        if request.HasField("failure_seen"):
            failure_seen = request.failure_seen
        request.ClearField("failure_seen")

        def pack() -> Body:
            body = Body.pack("optim_step", request)
            if failure_seen:
                request.failure_seen = failure_seen
                body = body.storing(request)
            return body

        answer = await self._intake.operate("optim_step", request, request.seq_id, pack, context)
        return answer.optim_step

    async def SkipOperation(self, request: pb.SkipOperationRequest, context: Context) -> pb.SkipOperationResponse:
        # The journal keeps no more of the error than callers are told.
        request.reason = shortened(request.reason)
        await self._intake.submit("skip", request, context)
        return pb.SkipOperationResponse()

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        check_seq_id(request.seq_id)
        if request.save_id:
            raise InvalidRequest(f"save_id: {request.save_id!r}: only the trainer sets it", field="save_id")

        def pack() -> Body:
            body = Body.pack("save_checkpoint", request)
            request.save_id = secrets.token_hex(_NONCE_BYTES)
            return body.storing(request)

        answer = await self._intake.operate("save_checkpoint", request, request.seq_id, pack, context)
        return answer.save_checkpoint

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        answer = await self._intake.submit("load_checkpoint", request, context)
        return answer.load_checkpoint

    async def CheckCustomLoss(self, request: pb.CheckCustomLossRequest, context: Context) -> pb.CheckCustomLossResponse:
        await self._intake.check_custom_loss(request)
        return pb.CheckCustomLossResponse()

    async def WaitResult(self, request: pb.WaitResultRequest, context: Context) -> pb.WaitResultResponse:
        operation = await self._ready.scheduler.find(request.model_id, request.seq_id)
        await context.send_initial_metadata(())
        return await self._intake.answer(operation, context)

    async def DescribeOperation(
        self, request: pb.DescribeOperationRequest, context: Context
    ) -> pb.DescribeOperationResponse:
        status = await self._ready.scheduler.describe(request.model_id, request.seq_id)
        expected = None if status.expected_s is None else duration(status.expected_s)
        return pb.DescribeOperationResponse(
            status=types_pb2.QueueStatus(
                running=status.running,
                position=status.position,
                tokens_ahead=status.tokens_ahead,
                expected_time=expected,
                reason=status.reason,
            )
        )

    async def _delete_model(self, trainer: Trainer, model_id: str) -> None:
        await trainer.scheduler.delete(model_id, lambda: trainer.operations.engine.delete_model(model_id))
        self._intake.forget(model_id)
        name = deletion(model_id)
        await trainer.scheduler.executing.turn_to_store(*name)
        with trainer.scheduler.executing.other(name):
            await trainer.operations.delete_files(model_id)


def _picture_counting(processor: Processor | None) -> pb.PictureCounting | None:
    if processor is None:
        return None
    counting = processor.counting
    message = pb.PictureCounting(rule=counting.rule, settings=settings_of(counting))
    if (around := processor.in_chats) is not None:
        message.picture_token = processor.picture_token
        message.before.extend(around[0])
        message.after.extend(around[1])
    return message
