"""Calls of the trainers: an operation's acknowledgement and its reply, also across a restart or a move of the run."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.clients import TrainerClient
from gateway.futures import ran_of
from gateway.placement import Placement
from gateway.training.submission import Submission
from tinsmith.errors import (
    InvalidRequest,
    ModelMoved,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.rpc.server import ACCEPTED, UNREAD
from tinsmith.tasks import Pause
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2

_UNREACHABLE = "the trainer is unreachable; it goes on from its journal when it is back"
_MOVING = "the run moves to another trainer, and goes on there"
_MOVING_S = 0.2
"""Pause before a call of a run that moves, or whose trainer is not ready, is made again, in seconds."""


class TooFarAhead(InvalidRequest):
    """The trainer's refusal of a seq_id that is too far ahead.

    The number stays free, so nothing of the request is kept.
    """


class TrainerCalls:
    """Starts operations on the trainer, and waits for their replies."""

    def __init__(self, placement: Placement, *, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the trainer's acknowledgement, in seconds."""
        self._placement = placement
        self._timeout_s = timeout_s

    async def accept(self, submission: Submission) -> Any:
        """Calls the trainer. Returns the call once the trainer has acknowledged the operation, or once the call has
        failed in a way that a repeat would not change.

        Raises NotReady when there is no acknowledgement in time, OutOfCapacity when the trainer's queue is full,
        TooFarAhead, SequenceConflict when the trainer has another body under this number, and InvalidRequest when the
        trainer has refused the message before it took the number.
        """
        rpc, body, model_id = submission.rpc, submission.request_body, submission.model_id
        lost = NotReady("the trainer did not acknowledge the operation in time; send it again")
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    trainer = await self._placement.of_run(model_id)
                    call = trainer.start(
                        rpc, body, request_id=submission.request_id, wait_for_ready=not self._placement.are_several
                    )
                    try:
                        metadata = await call.initial_metadata()
                    except asyncio.CancelledError:
                        call.cancel()
                        raise
                    is_accepted = ACCEPTED in tuple(metadata)
                    if is_accepted and not call.done():
                        return call
                    await call.code()  # a refusal has no initial metadata, and may seem to have some before it is done
                    error = await _error(call)
                    if isinstance(error, SequenceConflict):
                        raise error
                    if not is_accepted:
                        if isinstance(error, OutOfCapacity):
                            raise error  # the trainer's queue is full: the client has to send the operation again
                        if isinstance(error, InvalidRequest) and error.metadata.get("field") == "seq_id":
                            raise TooFarAhead(error.message, field="seq_id")
                        # Only refusals marked UNREAD are raised: an accepted operation may lack the acknowledgement,
                        # too, because gRPC may drop it if the operation fails at once.
                        if isinstance(error, InvalidRequest) and UNREAD in error.metadata and rpc != "CreateModel":
                            raise error
                    if await self._has_moved(model_id, trainer, error):
                        error = NotReady(f"model {model_id} moves to another trainer; send it again")
                    if not isinstance(error, NotReady):
                        return call
                    lost = error
                    await asyncio.sleep(_MOVING_S)
        except TimeoutError:
            raise lost from None

    async def _has_moved(self, model_id: str, trainer: TrainerClient, error: ServiceError | None) -> bool:
        """Whether a call has failed because its run moves, or has moved, to another trainer."""
        if isinstance(error, ModelMoved):
            self._placement.forget(model_id)
            return True
        return isinstance(error, ModelNotFound | ResultNotFound) and await self._placement.has_moved(model_id, trainer)

    async def reply(self, call: Any, submission: Submission) -> Any:
        """The trainer's reply message; if the call is lost, WaitResult gets it. Raises the operation's error."""
        try:
            async for reply in call:
                submission.ran = ran_of(await call.trailing_metadata())
                return reply
            raise ServiceError(f"the trainer ended {submission.request_id} without a reply")
        except NotReady:
            pass
        except ServiceError:
            submission.ran = ran_of(await call.trailing_metadata())
            raise
        submission.progress.paused(_UNREACHABLE)
        try:
            return await self.wait_result(submission)
        except ResultNotFound as error:
            raise ServiceError(f"the trainer has lost {submission.request_id}: {error.message}") from error
        finally:
            call.cancel()

    async def wait_result(self, submission: Submission) -> Any:
        """The reply of an operation that the trainer accepted before. Waits while the trainer is unreachable.

        Raises ResultNotFound when the trainer does not know the operation, and the error of a failed operation.
        """
        model_id = submission.model_id
        request = pb.WaitResultRequest(model_id=model_id, seq_id=submission.seq_id)
        pause = Pause()
        while True:
            trainer = await self._placement.of_run(model_id)
            call = trainer.stub.WaitResult(request, wait_for_ready=not self._placement.are_several)
            try:
                found = await call
            except ServiceError as error:
                if await self._has_moved(model_id, trainer, error):
                    submission.progress.paused(_MOVING)
                    await asyncio.sleep(_MOVING_S)
                    continue
                if isinstance(error, NotReady):
                    submission.progress.paused(_UNREACHABLE)
                    await pause.wait()
                    continue
                submission.ran = ran_of(await call.trailing_metadata())
                raise
            submission.ran = ran_of(await call.trailing_metadata())
            return getattr(found, found.WhichOneof("result"))

    def watch(self, submission: Submission) -> None:
        """Lets polls of the future ask the trainer, from now on, what the operation waits for."""
        request = pb.DescribeOperationRequest(model_id=submission.model_id, seq_id=submission.seq_id)

        async def ask() -> types_pb2.QueueStatus:
            trainer = await self._placement.of_run(submission.model_id)
            return (await trainer.stub.DescribeOperation(request)).status

        submission.progress.active("the trainer is working on the request")
        submission.ask = ask


async def _error(call: Any) -> ServiceError | None:
    """The error of a call that is done; None when it succeeded."""
    try:
        await call.wait_for_connection()
    except ServiceError as error:
        return error
    return None
