"""TrainerService over gRPC. An operation's ids are checked and it enters the journal; the call acknowledges that, and
waits for the answer."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc.aio
from google.protobuf.message import Message

from tinsmith.errors import (
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    SequenceConflict,
    ServiceError,
)
from tinsmith.modeling.adapter import GROUPS
from tinsmith.modeling.tower import Tower
from tinsmith.pictures.counting import settings_of
from tinsmith.rpc import tensors
from tinsmith.rpc.arrivals import is_taken_over
from tinsmith.rpc.notes import check_notes
from tinsmith.rpc.paths import check_model_id
from tinsmith.rpc.server import ACCEPTED, RAN
from tinsmith.rpc.times import check_ttl, duration
from tinsmith.rpc.words import value_of
from tinsmith.threads import in_pool_of
from tinsmith.told import Told
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import trainer_pb2_grpc, types_pb2
from trainer_service.durability.executing import Name, arriving, deletion, other_work
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Body
from trainer_service.engine.batch import LOSS_FN_NAMES
from trainer_service.engine.optimizers import OPTIMIZERS
from trainer_service.operation import Answer, Operation, Work
from trainer_service.operations.moving import Moving
from trainer_service.operations.operations import Operations, Request
from trainer_service.operations.publishing import publication
from trainer_service.requests import batch_bytes
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.imports import Importer
from trainer_service.storage.locations import Location

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_PIECE_BYTES = 1024 * 1024
"""Size of the pieces in which a file is streamed."""
_NONCE_BYTES = 6
"""Size of the random number that distinguishes creations of the same model_id, and saves of the same seq_id."""
_MAX_CHECKS_OF_NO_MODEL = 64
"""Most calls of CheckCustomLoss that run or wait at once, also those whose client has left."""
_MANY_DATUMS = 64
"""A batch of more datums counts as large, without adding up its bytes."""
_LARGE_BYTES = 64 * 1024
"""Messages above this size are packed and made into batches on a thread, to keep the event loop free."""
_READER = ThreadPoolExecutor(1, "reader")
"""That thread. It reads one message at a time: it holds the interpreter's lock, for which the compute thread waits."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The parts behind the service, which exist once the base model is loaded."""

    boot_id: str
    operations: Operations
    scheduler: Scheduler
    journal: Journal
    checkpoints: CheckpointStore
    importer: Importer
    moving: Moving
    trainer_id: str
    """Stable id of this trainer, kept in its state folder."""
    fingerprint: Mapping[str, str]
    """What trainers of one base model must have in common, by name."""


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """`trainer` is set when the base model is loaded; until then every call fails with NotReady."""

    trainer: Trainer | None = None

    def __init__(self) -> None:
        self._deleting: dict[str, asyncio.Task[None]] = {}
        """Deletions in progress, by model_id."""
        self._told: dict[str, Told] = {}
        """Failures that callers have been told of, by model_id. It serves callers that send no failure_seen; the
        gateway does."""
        self._num_checks_of_no_model = 0
        """Calls of CheckCustomLoss that run or wait."""
        self._check_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each model_id, so that at most one custom loss of each model is checked at a time. The lock of the
        empty model_id is that of losses which are checked before a model uses them."""

    @property
    def _ready(self) -> Trainer:
        if self.trainer is None:
            raise NotReady("the base model is still being loaded")
        return self.trainer

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
        # A call that is cancelled does not end the step.
        await asyncio.shield(trainer.scheduler.tasks.spawn(call(trainer.moving)))
        if model_id in trainer.scheduler.models.moved:
            self._told.pop(model_id, None)

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
                for one in GROUPS
                if one not in groups and not full
            ],
            num_threads=pace.num_threads,
            micro_batch_tokens=pace.micro_batch_tokens,
            tokens_per_second=pace.tokens_per_s,
            one_by_one=engine.base.one_by_one,
            picture_counting=_picture_counting(engine.base.tower),
            trainer_id=trainer.trainer_id,
            store_id=trainer.checkpoints.store_id,
            fingerprint=trainer.fingerprint,
            reserved_bytes=engine.reserved_bytes,
            reservable_bytes=engine.plan.models_bytes or 0,
            num_models=trainer.scheduler.models.num_known,
            queued_time=duration(trainer.scheduler.queued_s()),
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
            await self._on_checkpoint(_noted("servable", location), lambda: operations.check_servable(request))
        else:
            await operations.check_servable(request)

        def pack() -> Body:
            body = Body.pack("create_model", request)
            # The fields below are stored, so that a replay makes the same model. They are not in the digest, because a
            # repeated request does not have them.
            request.creation_id = secrets.token_hex(_NONCE_BYTES)
            if request.lora_config.rank and not request.lora_config.HasField("seed"):
                request.lora_config.seed = secrets.randbits(31)
            request.base_weights = request.base_weights or operations.models.base_weights
            return replace(body, compressed=Body.pack("create_model", request).compressed)

        answer = await self._operate("create_model", request, 0, pack, context)
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
        answer = await self._submit("forward_backward", request, context)
        return answer.forward_backward

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepResponse:
        _check_seq_id(request.seq_id)
        told = self._told.get(request.model_id)
        failure_seen = 0 if told is None else told.step(request.seq_id)
        if request.HasField("failure_seen"):
            failure_seen = request.failure_seen
        self._drop_idle(request.model_id)
        request.ClearField("failure_seen")

        def pack() -> Body:
            body = Body.pack("optim_step", request)
            if failure_seen:  # stored for a replay, but not in the digest: a repeat may have another value
                request.failure_seen = failure_seen
                body = replace(body, compressed=Body.pack("optim_step", request).compressed)
            return body

        answer = await self._operate("optim_step", request, request.seq_id, pack, context)
        return answer.optim_step

    async def SkipOperation(self, request: pb.SkipOperationRequest, context: Context) -> pb.SkipOperationResponse:
        await self._submit("skip", request, context)
        return pb.SkipOperationResponse()

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        _check_seq_id(request.seq_id)
        if request.save_id:
            raise InvalidRequest(f"save_id: {request.save_id!r}: only the trainer sets it", field="save_id")

        def pack() -> Body:
            body = Body.pack("save_checkpoint", request)
            request.save_id = secrets.token_hex(_NONCE_BYTES)  # stored for a replay, but not in the digest
            return replace(body, compressed=Body.pack("save_checkpoint", request).compressed)

        answer = await self._operate("save_checkpoint", request, request.seq_id, pack, context)
        return answer.save_checkpoint

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        answer = await self._submit("load_checkpoint", request, context)
        return answer.load_checkpoint

    async def PublishCheckpoint(
        self, request: pb.PublishCheckpointRequest, context: Context
    ) -> pb.PublishCheckpointResponse:
        location = Location.parse(request.location, field="location")
        if not request.version_id:
            raise InvalidRequest("version_id: is empty; GetCheckpoint says what the location holds", field="version_id")
        trainer = self._ready
        try:
            certified = await trainer.operations.publishing.publish(location, request.version_id)
        except Exception as error:
            if trainer.scheduler.compute.ends_with(error, publication(location, request.version_id)):
                raise _dead(error) from error
            raise
        return pb.PublishCheckpointResponse(num_samplers=certified.num_samplers, certificate=certified.certificate)

    async def GetCertificate(self, request: pb.GetCertificateRequest, context: Context) -> pb.GetCertificateResponse:
        location = Location.parse(request.location, field="location")
        certificate = await self._reads("certificate", location, self._ready.checkpoints.certificate)
        return pb.GetCertificateResponse(certificate=certificate)

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Context) -> pb.GetCheckpointResponse:
        location = Location.parse(request.location, field="location")
        found = await self._reads("manifest", location, self._ready.checkpoints.manifest)
        return pb.GetCheckpointResponse(checkpoint=found.checkpoint, files=list(found.files.values()))

    async def ReadCheckpointFile(
        self, request: pb.ReadCheckpointFileRequest, context: Context
    ) -> AsyncIterator[pb.ReadCheckpointFileResponse]:
        location = Location.parse(request.location, field="location")
        for field, value in (("offset", request.offset), ("num_bytes", request.num_bytes)):
            if value < 0:
                raise InvalidRequest(f"{field}: {value} must not be negative", field=field)
        checkpoints = self._ready.checkpoints
        name = _noted("open", location, request.name)
        file = await self._on_checkpoint(name, lambda: checkpoints.reads(checkpoints.open_file, location, request.name))
        try:
            if request.offset > (size := file.seek(0, os.SEEK_END)):
                raise InvalidRequest(f"offset: {request.offset} is beyond the file's {size} bytes", field="offset")
            file.seek(request.offset)
            left = request.num_bytes if request.HasField("num_bytes") else sys.maxsize
            while data := await self._on_checkpoint(
                _noted("read", location, f"{request.name} {file.tell()}"),
                partial(checkpoints.reads, file.read, min(left, _PIECE_BYTES)),
            ):
                left -= len(data)
                yield pb.ReadCheckpointFileResponse(data=data)
        finally:
            file.close()

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> pb.VerifyCheckpointResponse:
        location = Location.parse(request.location, field="location")
        files, problems = await self._reads("verify", location, self._ready.checkpoints.verify)
        return pb.VerifyCheckpointResponse(files=files, problems=problems)

    async def ImportCheckpoint(
        self, request_iterator: AsyncIterator[pb.ImportCheckpointRequest], context: Context
    ) -> pb.ImportCheckpointResponse:
        trainer = self._ready
        first = await anext(request_iterator, pb.ImportCheckpointRequest())
        if first.WhichOneof("piece") != "header":
            raise InvalidRequest("header: the first message must hold it", field="header")
        trainer.operations.models.check_base_model(first.header.base_model, field="header.base_model")
        check_notes(first.header.user_metadata, field="header.user_metadata")

        last = pb.ImportCheckpointRequest()

        async def pieces() -> AsyncIterator[bytes]:
            async for request in request_iterator:
                if request.complete:
                    last.CopyFrom(request)
                    return
                if request.WhichOneof("piece") != "archive":
                    raise InvalidRequest("archive: every message between first and last must hold it", field="archive")
                yield request.archive
            raise InvalidRequest("complete: missing in the last message; the archive was cut off", field="complete")

        names: list[Name] = []

        @contextmanager
        def converting(digest: bytes) -> Iterator[None]:
            executing, name = trainer.scheduler.executing, other_work("import archive", digest)
            names.append(name)
            executing.turn_to_store_on_thread(*name)
            with executing.other(name):
                yield

        try:
            return await trainer.importer.run(first.header, pieces(), last=last, converting=converting)
        except Exception as error:
            if names and trainer.scheduler.compute.ends_with(error, names[-1]):
                raise _dead(error) from error
            raise

    async def CopyCheckpoint(self, request: pb.CopyCheckpointRequest, context: Context) -> pb.CopyCheckpointResponse:
        if request.HasField("ttl"):
            check_ttl(request.ttl, field="ttl")
        checkpoints = self._ready.checkpoints
        source = Location.parse(request.source, field="source")
        destination = Location.parse(request.destination, field="destination")
        ttl = request.ttl if request.HasField("ttl") else None
        copied = await self._on_checkpoint(
            _noted("copy", source, str(destination)),
            lambda: checkpoints.writes_to(destination, checkpoints.copy, source, destination, ttl=ttl),
        )
        return pb.CopyCheckpointResponse(checkpoint=copied)

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        location = Location.parse(request.location, field="location")
        checkpoints = self._ready.checkpoints
        await self._on_checkpoint(
            _noted("delete", location, request.version_id),
            lambda: checkpoints.writes_to(location, checkpoints.delete, location, version_id=request.version_id),
        )
        return pb.DeleteCheckpointResponse()

    async def CheckCustomLoss(self, request: pb.CheckCustomLossRequest, context: Context) -> pb.CheckCustomLossResponse:
        if self._num_checks_of_no_model >= _MAX_CHECKS_OF_NO_MODEL:
            raise OutOfCapacity(f"{self._num_checks_of_no_model} custom losses wait to be checked, the most at once")
        scheduler = self._ready.scheduler
        name = other_work("check custom-loss", request.SerializeToString(deterministic=True))
        scheduler.executing.check(*name)
        self._num_checks_of_no_model += 1
        # A call that is cancelled does not end the check on its thread, so it must not end the record of it either.
        await asyncio.shield(scheduler.tasks.spawn(self._check_custom_loss(request, name)))
        return pb.CheckCustomLossResponse()

    async def _check_custom_loss(self, request: pb.CheckCustomLossRequest, name: Name) -> None:
        trainer = self._ready
        try:
            # One at a time, so that models' own checks find threads. No model has the empty id.
            turn = self._check_turns.setdefault("", asyncio.Lock())
            async with turn, trainer.scheduler.executing.stage(*name):
                await in_pool_of(trainer.operations.loss_checks, trainer.operations.check_custom_loss, request)
        finally:
            self._num_checks_of_no_model -= 1
            trainer.scheduler.executing.forget(*name)

    async def WaitResult(self, request: pb.WaitResultRequest, context: Context) -> pb.WaitResultResponse:
        operation = await self._ready.scheduler.find(request.model_id, request.seq_id)
        await context.send_initial_metadata(())
        return await self._answer(operation, context)

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

    async def _reads(self, what: str, location: Location, call: Callable[[Location], T]) -> T:
        """Calls a method that reads a checkpoint, on a thread for reading. For `what` see `_noted`."""
        return await self._on_checkpoint(_noted(what, location), lambda: self._ready.checkpoints.reads(call, location))

    async def _on_checkpoint(self, name: Name, call: Callable[[], Awaitable[T]]) -> T:
        """Reads or writes a checkpoint for a request that is no operation, with a record of it in case the process ends
        meanwhile. Raises ServiceError for a request that has ended the process too often."""
        scheduler = self._ready.scheduler

        async def noted() -> T:
            await scheduler.executing.turn_to_store(*name)
            try:
                with scheduler.executing.other(name):
                    return await call()
            except Exception as error:
                if scheduler.compute.ends_with(error, name):
                    raise _dead(error) from error
                raise

        # A call that is cancelled does not end its thread, so it must not end the record of it either.
        return await asyncio.shield(scheduler.tasks.spawn(noted()))

    async def _submit(
        self,
        kind: str,
        request: pb.ForwardBackwardRequest | pb.SkipOperationRequest | pb.LoadCheckpointRequest,
        context: Context,
    ) -> Answer:
        _check_seq_id(request.seq_id)
        if _adds_gradients(request):
            self._told.setdefault(request.model_id, Told()).sent(request.seq_id)
        return await self._operate(kind, request, request.seq_id, lambda: Body.pack(kind, request), context)

    async def _operate(
        self, kind: str, request: Request, seq_id: int, pack: Callable[[], Body], context: Context
    ) -> Answer:
        """Has an operation accepted, acknowledges it, and waits for its answer. `pack` makes its body."""
        check_model_id(request.model_id, field="model_id")
        accepting = self._ready.scheduler.tasks.spawn(self._accept(kind, request, seq_id, pack))
        try:
            operation = await asyncio.shield(accepting)  # a call that is cancelled leaves no operation without work
        except ServiceError:
            if (told := self._told.get(request.model_id)) is not None:
                told.unsent(seq_id)
                self._drop_idle(request.model_id)
            raise
        is_taken_over()  # the scheduler counts the memory of accepted operations
        await context.send_initial_metadata((ACCEPTED,))
        return await self._answer(operation, context)

    async def _accept(self, kind: str, request: Request, seq_id: int, pack: Callable[[], Body]) -> Operation:
        """Has the scheduler accept an operation, and makes its work while the journal writes.

        A request that cannot be packed, because the trainer ends each time, becomes an operation that fails.
        """
        scheduler, executing = self._ready.scheduler, self._ready.scheduler.executing
        arrival = arriving(kind, request.model_id), seq_id
        on_thread = _is_large(request)
        given_up: ServiceError | None = None
        try:
            executing.check(*arrival)
        except ServiceError as error:
            if not seq_id:  # there is no model, and so nobody waits for this operation
                raise
            given_up = error
            request = pb.SkipOperationRequest(
                model_id=request.model_id,
                seq_id=seq_id,
                reason=error.message,
                gradients_missing=_adds_gradients(request),
            )
            body, needed = Body.pack("skip", request), None
        else:
            async with executing.stage(*arrival):
                body, needed = await self._run(lambda: (pack(), self._batch_bytes(request)), on_thread=on_thread)
        held_bytes = needed  # a batch above the limit is refused, and holds only its body
        if needed is not None and needed > scheduler.held.max_operation_bytes:
            held_bytes = None
        try:
            operation, is_new = await scheduler.accept(request.model_id, seq_id, body, held_bytes=held_bytes)
        except SequenceConflict as error:  # one that was given up is perhaps the repeat of an accepted operation
            raise given_up or error from None
        if is_new:
            work = await self._work_of(operation, request, held_bytes=needed, on_thread=on_thread)
            await scheduler.begin(operation, work)
        elif given_up is None:
            executing.forget(*arrival)  # of a new operation, the scheduler does this once it is in the journal
        return operation

    def _batch_bytes(self, request: Request) -> int | None:
        """Memory that a batch takes until it is answered, in bytes; None for other requests."""
        if not isinstance(request, pb.ForwardBackwardRequest):
            return None
        return batch_bytes(request, self._ready.operations.engine.limits.counting)

    async def _work_of(
        self, operation: Operation, request: Request, *, held_bytes: int | None, on_thread: bool
    ) -> Work:
        """The work of a new operation. A request that cannot be read gets work that fails, too."""
        trainer, model_id, seq_id = self._ready, operation.model_id, operation.seq_id
        custom = isinstance(request, pb.ForwardBackwardRequest) and request.HasField("custom_loss")
        max_bytes = trainer.scheduler.held.max_operation_bytes
        work_of = partial(trainer.operations.work_of, request, held_bytes=held_bytes, max_bytes=max_bytes)
        try:
            trainer.scheduler.executing.check(model_id, seq_id)
            if not custom:
                async with trainer.scheduler.executing.stage(model_id, seq_id):
                    return await self._run(work_of, on_thread=on_thread)
            # Checking a custom loss may take long even for a small message. The lock comes before the stage: a suspect
            # within its stage makes all others wait, so it must not wait for a lock that one of them holds.
            turn = self._check_turns.setdefault(model_id, asyncio.Lock())
            async with turn, trainer.scheduler.executing.stage(model_id, seq_id):
                if not trainer.scheduler.models.is_queued(model_id, seq_id):
                    raise ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id)
                return await in_pool_of(trainer.operations.loss_checks, work_of)
        except ServiceError as error:
            return trainer.operations.refuse(request, error)
        except Exception as caught:
            if trainer.scheduler.compute.ends_with(caught, (model_id, seq_id)):
                raise _dead(caught) from caught
            logger.exception("%s of %s, seq_id %d, cannot be read", operation.kind, model_id, seq_id)
            error = ServiceError("internal error; the trainer's log has the cause")
            return trainer.operations.refuse(request, error)

    async def _run(self, call: Callable[[], T], *, on_thread: bool) -> T:
        if not on_thread:
            return call()
        cores = self._ready.scheduler.cores

        def announced() -> T:
            with cores.reading():
                return call()

        return await in_pool_of(_READER, announced)

    async def _answer(self, operation: Operation, context: Context) -> Answer:
        """The operation's answer. Records for the model's next optim_step that the caller is told of it."""
        failed = False
        try:
            return await _answer(operation, context)
        except ServiceError:
            failed = True
            raise
        finally:
            # Without an outcome the call was cancelled, and its caller is told nothing.
            if operation.outcome.done() and (told := self._told.get(operation.model_id)) is not None:
                told.told(operation.seq_id, failed=failed)
                self._drop_idle(operation.model_id)

    def _drop_idle(self, model_id: str) -> None:
        if (told := self._told.get(model_id)) is not None and told.is_idle:
            del self._told[model_id]

    async def _delete_model(self, trainer: Trainer, model_id: str) -> None:
        self._told.pop(model_id, None)
        await trainer.scheduler.delete(model_id, lambda: trainer.operations.engine.delete_model(model_id))
        name = deletion(model_id)
        await trainer.scheduler.executing.turn_to_store(*name)
        with trainer.scheduler.executing.other(name):
            await trainer.operations.delete_files(model_id)


def _picture_counting(tower: Tower | None) -> pb.PictureCounting | None:
    if tower is None:
        return None
    counting = tower.processor.counting
    message = pb.PictureCounting(rule=counting.rule, settings=settings_of(counting))
    if (around := tower.processor.in_chats) is not None:
        message.picture_token = tower.picture_token
        message.before.extend(around[0])
        message.after.extend(around[1])
    return message


def _is_large(request: Message) -> bool:
    """True when the request must be packed on a thread. A batch's ByteSize is not used, because it encodes the whole
    batch (0.2 s for 64 MB)."""
    if not isinstance(request, pb.ForwardBackwardRequest):
        return request.ByteSize() > _LARGE_BYTES
    if len(request.data) > _MANY_DATUMS:
        return True
    num_bytes = 0
    for datum in request.data:
        if any(chunk.HasField("image") for chunk in datum.model_input):  # which is decoded, whatever its size
            return True
        num_bytes += sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input)
        num_bytes += sum(tensors.num_bytes(tensor) for tensor in datum.loss_fn_inputs.values())
        if num_bytes > _LARGE_BYTES:
            return True
    return False


def _noted(what: str, location: Location, more: str = "") -> Name:
    """Name of a request on a checkpoint, for the record of executions. `what`: one word. `more`: what distinguishes
    requests for the same checkpoint."""
    return other_work(f"{what} {location.run_id}", f"{location} {more}".encode())


def _dead(error: Exception) -> EngineDead:
    """The error of a call that has met a fault of the device. Its caller tries again, after the restart."""
    return EngineDead(f"the trainer ends, because its device has failed, and starts again: {error}")


def _check_seq_id(seq_id: int) -> None:
    if seq_id < 1:
        raise InvalidRequest(f"seq_id: {seq_id} must be 1 or more; 0 is the creation", field="seq_id")


def _adds_gradients(request: Message) -> bool:
    """True when the request adds gradients, or stands for one that would have added some."""
    if isinstance(request, pb.SkipOperationRequest):
        return request.gradients_missing
    return isinstance(request, pb.ForwardBackwardRequest) and not request.forward_only


async def _answer(operation: Operation, context: Context) -> Answer:
    """The answer or the error, with the time of its computation in the trailing metadata."""
    try:
        return await operation.wait()
    finally:
        if operation.ran is not None:
            context.set_trailing_metadata(((RAN, "{:.6f}:{:.6f}".format(*operation.ran)),))
