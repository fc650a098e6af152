"""Takes operations in: has them accepted, makes their work, acknowledges them, and sends their answers to callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
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
from tinsmith.received_answers import ReceivedAnswers
from tinsmith.rpc import tensors
from tinsmith.rpc.message_memory import is_taken_over
from tinsmith.rpc.paths import check_model_id
from tinsmith.rpc.server import ACCEPTED, RAN, REPEATED
from tinsmith.threads import in_pool_of
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.executing import Name, arriving, other_work
from trainer_service.durability.records import Body
from trainer_service.operation import Answer, Operation, Work
from trainer_service.operations.operations import Request
from trainer_service.reader import Reader
from trainer_service.request_bytes import batch_bytes, message_bytes
from trainer_service.scheduling.compute import internal_error
from trainer_service.trainer import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_MAX_CHECKS_OF_NO_MODEL = 64
"""Most calls of CheckCustomLoss that run or wait at once, also those whose client has left."""
_SPARE_ENTRIES = 64
"""`Intake._received` may have entries for twice the known models, and for this many more. A failed creation leaves an
entry."""
_MANY_DATUMS = 64
"""A batch of more datums counts as large, without adding up its bytes."""
_LARGE_BYTES = 64 * 1024
"""Messages above this size are packed and made into batches on the reader's thread, to keep the event loop free."""
_READER = Reader()


class Intake:
    """Takes operations of all models in, and answers their callers. All methods run on one event loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._received: dict[str, ReceivedAnswers] = {}
        """The batches whose answers callers have, by model_id. It is used for callers that send no failure_seen; the
        gateway always sends one."""
        self._num_checks_of_no_model = 0
        """Calls of CheckCustomLoss that run or wait."""
        self._check_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each model_id, so that at most one custom loss of each model is checked at a time. The lock of the
        empty model_id is that of losses which are checked before a model uses them."""

    def failure_seen(self, model_id: str, seq_id: int) -> int:
        """The failed batch after which the caller of this optim_step has started afresh; see ReceivedAnswers.step."""
        received = self._received.get(model_id)
        return 0 if received is None else received.step(seq_id)

    def forget(self, model_id: str) -> None:
        """Forgets which answers the callers of a model have received, because the model has gone."""
        self._received.pop(model_id, None)

    async def check_custom_loss(self, request: pb.CheckCustomLossRequest) -> None:
        """Checks a custom loss before a model uses it. Raises InvalidRequest, and OutOfCapacity when too many wait."""
        if self._num_checks_of_no_model >= _MAX_CHECKS_OF_NO_MODEL:
            raise OutOfCapacity(f"{self._num_checks_of_no_model} custom losses wait to be checked, the most at once")
        name = other_work("check custom-loss", request.SerializeToString(deterministic=True))
        self._trainer.scheduler.executing.check(*name)
        self._num_checks_of_no_model += 1
        # Cancelling the call does not end the check on its thread, so the record of the check stays until the thread
        # has ended.
        await asyncio.shield(self._trainer.scheduler.tasks.spawn(self._check_custom_loss(request, name)))

    async def _check_custom_loss(self, request: pb.CheckCustomLossRequest, name: Name) -> None:
        trainer = self._trainer
        try:
            # These checks run one at a time, so that checks for models find free threads. No model has the empty id.
            turn = self._check_turns.setdefault("", asyncio.Lock())
            async with turn, trainer.scheduler.executing.stage(*name):
                await in_pool_of(trainer.operations.loss_checks, trainer.operations.check_custom_loss, request)
        finally:
            self._num_checks_of_no_model -= 1
            trainer.scheduler.executing.forget(*name)

    async def submit(
        self,
        kind: str,
        request: pb.ForwardBackwardRequest | pb.SkipOperationRequest | pb.LoadCheckpointRequest,
        context: Context,
    ) -> Answer:
        check_seq_id(request.seq_id)
        return await self.operate(kind, request, request.seq_id, lambda: Body.pack(kind, request), context)

    async def operate(
        self, kind: str, request: Request, seq_id: int, pack: Callable[[], Body], context: Context
    ) -> Answer:
        """Has an operation accepted, acknowledges it, and waits for its answer. `pack` makes its body."""
        check_model_id(request.model_id, field="model_id")
        if _adds_gradients(request) and (received := self._received.get(request.model_id)) is not None:
            received.sent(seq_id)
        accepting = self._trainer.scheduler.tasks.spawn(self._accept_or_forget(kind, request, seq_id, pack))
        accepting.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieve its error in any case
        # The shield keeps a cancelled call from leaving an operation without work.
        operation, is_new = await asyncio.shield(accepting)
        is_taken_over()  # the scheduler counts the memory of accepted operations
        await context.send_initial_metadata((ACCEPTED,) if is_new else (ACCEPTED, REPEATED))
        return await self.answer(operation, context)

    async def _accept_or_forget(
        self, kind: str, request: Request, seq_id: int, pack: Callable[[], Body]
    ) -> tuple[Operation, bool]:
        """See `_accept`. Forgets a batch that is refused for good: its caller does not send it again."""
        try:
            return await self._accept(kind, request, seq_id, pack)
        except ServiceError as error:
            received = self._received.get(request.model_id) if _adds_gradients(request) else None
            if received is not None and not isinstance(error, OutOfCapacity | NotReady):
                received.unsent(seq_id)
            raise

    async def _accept(
        self, kind: str, request: Request, seq_id: int, pack: Callable[[], Body]
    ) -> tuple[Operation, bool]:
        """Has the scheduler accept an operation, and makes its work while the journal writes. Returns the operation,
        and whether it is new.

        A request that cannot be packed, because the trainer ends each time, becomes an operation that fails.
        """
        scheduler, executing = self._trainer.scheduler, self._trainer.scheduler.executing
        arrival = arriving(kind, request.model_id), seq_id
        on_thread = _is_large(request)
        given_up: ServiceError | None = None
        try:
            executing.check(*arrival)
        except ServiceError as error:
            if not seq_id:  # a creation: there is no model yet, so no operation waits for this one
                raise
            given_up = error
            request = pb.SkipOperationRequest(
                model_id=request.model_id,
                seq_id=seq_id,
                reason=error.message,
                gradients_missing=_adds_gradients(request),
            )
            body, needed = Body.pack("skip", request), None
            decoded = message_bytes(request, body.num_bytes)
        else:
            async with executing.stage(*arrival):
                packing = partial(self._packed, request, pack)
                body, needed, decoded = await self._run(packing, on_thread=on_thread)
        held_bytes = needed  # a batch above the limit is refused, and holds only its message
        if needed is not None and needed > scheduler.held.max_operation_bytes:
            held_bytes = None
        try:
            operation, is_new = await scheduler.accept(
                request.model_id, seq_id, body, message_bytes=decoded, held_bytes=held_bytes
            )
        except SequenceConflict as error:  # the request that was given up may repeat an accepted operation
            raise given_up or error from None
        if is_new:
            self._note(kind, request, seq_id)
            work = await self._work_of(operation, request, held_bytes=needed, on_thread=on_thread)
            await scheduler.begin(operation, work)
        if not is_new and given_up is None:
            executing.forget(
                *arrival
            )  # for a new operation the scheduler does this, once the operation is in the journal
        return operation, is_new

    def _note(self, kind: str, request: Request, seq_id: int) -> None:
        """Notes that a new operation has been accepted."""
        model_id, models = request.model_id, self._trainer.scheduler.models
        if kind == "create_model" or (kind == "optim_step" and model_id not in self._received):
            self._received[model_id] = ReceivedAnswers(after=seq_id)
            if len(self._received) > 2 * models.num_known + _SPARE_ENTRIES:
                self._received = {
                    known: received for known, received in self._received.items() if models.is_known(known)
                }
        elif model_id in self._received:
            self._received[model_id].accepted(seq_id, is_batch=_adds_gradients(request))

    async def _work_of(
        self, operation: Operation, request: Request, *, held_bytes: int | None, on_thread: bool
    ) -> Work:
        """The work of a new operation. A request that cannot be read gets work that fails, too."""
        trainer, model_id, seq_id = self._trainer, operation.model_id, operation.seq_id
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
                raise dead(caught) from caught
            logger.exception("%s of %s, seq_id %d, cannot be read", operation.kind, model_id, seq_id)
            return trainer.operations.refuse(request, internal_error())

    async def answer(self, operation: Operation, context: Context) -> Answer:
        """The operation's answer. Records for the model's next optim_step that the caller receives it."""
        received = self._received.get(operation.model_id)
        try:
            answer = await _answer(operation, context)
        except ServiceError:
            if received is not None:
                await received.hold_back(operation.seq_id)
                received.received(operation.seq_id, failed=True)
            raise
        if received is not None:
            received.received(operation.seq_id, failed=False)
        return answer

    def _packed(self, request: Request, pack: Callable[[], Body]) -> tuple[Body, int | None, int]:
        """Three values for a request: its body; the memory that its batch takes until the answer, in bytes (None for a
        request that is no batch); and the memory of its message, in bytes."""
        body = pack()
        decoded = message_bytes(request, body.num_bytes)
        if not isinstance(request, pb.ForwardBackwardRequest):
            return body, None, decoded
        return body, batch_bytes(request, self._trainer.operations.engine.limits.counting, decoded), decoded

    async def _run(self, call: Callable[[], T], *, on_thread: bool) -> T:
        if not on_thread:
            return call()
        scheduler = self._trainer.scheduler
        return await _READER.run(call, cores=scheduler.cores, is_busy=lambda: scheduler.compute.is_busy)


def _is_large(request: Message) -> bool:
    """True when the request must be packed on a thread. A batch's ByteSize is not used, because it encodes the whole
    batch (0.2 s for 64 MB)."""
    if not isinstance(request, pb.ForwardBackwardRequest):
        return request.ByteSize() > _LARGE_BYTES
    if len(request.data) > _MANY_DATUMS:
        return True
    num_bytes = 0
    for datum in request.data:
        if any(chunk.HasField("image") for chunk in datum.model_input):  # a batch has been decoded, whatever its size
            return True
        num_bytes += sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input)
        num_bytes += sum(tensors.num_bytes(tensor) for tensor in datum.loss_fn_inputs.values())
        if num_bytes > _LARGE_BYTES:
            return True
    return False


def dead(error: Exception) -> EngineDead:
    """The error of a call that has met a fault of the device. Its caller tries again, after the restart."""
    return EngineDead(f"the trainer ends, because its device has failed, and starts again: {error}")


def check_seq_id(seq_id: int) -> None:
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
