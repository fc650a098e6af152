"""Calls of the trainer's operations, from acknowledgement to reply, also when the connection breaks in between."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.clients import Clients
from gateway.futures import Pending
from gateway.reports import ran_of
from tinsmith.rpc.errors import (
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.rpc.server import ACCEPTED
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2

_UNREACHABLE = "the trainer is unreachable; it goes on from its journal when it is back"


class TrainerCalls:
    """Starts operations on the trainer, and waits for their replies."""

    def __init__(self, clients: Clients, *, timeout_s: float) -> None:
        """`timeout_s`: how long to wait for the trainer's acknowledgement."""
        self._clients = clients
        self._timeout_s = timeout_s

    async def accept(self, rpc: str, body: bytes, *, base_model: str, request_id: str) -> Any:
        """The call, once the trainer has acknowledged it, or it has failed in a way that a repeat would not change.

        Raises NotReady when there is no acknowledgement in time, OutOfCapacity when the trainer's queue is full, and
        SequenceConflict when the trainer has another body under this number.
        """
        lost = NotReady("the trainer did not acknowledge the operation in time; send it again")
        try:
            async with asyncio.timeout(self._timeout_s):
                trainer = await self._clients.trainer(base_model)
                while True:
                    call = trainer.start(rpc, body, request_id=request_id)
                    try:
                        metadata = await call.initial_metadata()
                    except asyncio.CancelledError:
                        call.cancel()
                        raise
                    if not call.done():
                        return call
                    error = await _error(call)
                    if isinstance(error, SequenceConflict):
                        raise error
                    if isinstance(error, OutOfCapacity) and ACCEPTED not in tuple(metadata):
                        raise error  # the trainer's queue is full: the client has to send the operation again
                    if not isinstance(error, NotReady):
                        return call
                    lost = error
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise lost from None

    async def reply(self, call: Any, *, base_model: str, seq_id: int, pending: Pending) -> Any:
        """The trainer's reply message; if the call is lost, WaitResult gets it. Raises the operation's error."""
        try:
            async for reply in call:
                pending.ran = ran_of(await call.trailing_metadata())
                return reply
            raise ServiceError(f"the trainer ended {pending.request_id} without a reply")
        except NotReady:
            pass
        except ServiceError:
            pending.ran = ran_of(await call.trailing_metadata())
            raise
        pending.progress.paused(_UNREACHABLE)
        try:
            return await self.wait_result(base_model, seq_id, pending=pending)
        except ResultNotFound as error:
            raise ServiceError(f"the trainer has lost {pending.request_id}: {error.message}") from error
        finally:
            call.cancel()

    async def wait_result(self, base_model: str, seq_id: int, *, pending: Pending) -> Any:
        """The reply of an operation that the trainer accepted before; waits while the trainer is unreachable.

        Raises ResultNotFound when the trainer does not know the operation, and the error of a failed operation.
        """
        request = pb.WaitResultRequest(model_id=pending.group, seq_id=seq_id)
        pause_s = 0.1
        while True:
            trainer = await self._clients.trainer(base_model)
            call = trainer.stub.WaitResult(request, wait_for_ready=True)
            try:
                found = await call
            except NotReady:
                pending.progress.paused(_UNREACHABLE)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
                continue
            except ServiceError:
                pending.ran = ran_of(await call.trailing_metadata())
                raise
            pending.ran = ran_of(await call.trailing_metadata())
            return getattr(found, found.WhichOneof("result"))

    def watch(self, pending: Pending, base_model: str, seq_id: int) -> None:
        """From now on polls of the future ask the trainer what the operation waits for."""
        request = pb.DescribeOperationRequest(model_id=pending.group, seq_id=seq_id)

        async def ask() -> types_pb2.QueueStatus:
            trainer = await self._clients.trainer(base_model)
            return (await trainer.stub.DescribeOperation(request)).status

        pending.progress.active("the trainer is working on it")
        pending.ask = ask


async def _error(call: Any) -> ServiceError | None:
    """The error of a call that is done; None when it succeeded."""
    try:
        await call.wait_for_connection()
    except ServiceError as error:
        return error
    return None
