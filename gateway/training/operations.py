"""Training operations, from submission to answer.

A submission is a call to the trainer. The call's initial metadata arrives once the operation is in the trainer's
journal; only then does the client get a receipt. A connection that breaks later costs the client nothing: this gateway,
or one that was started in between, fetches the answer with WaitResult as soon as the trainer is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from gateway import json_forms
from gateway.config import GatewayConfig
from gateway.dashboard.history import MetricHistory
from gateway.database.outages import TRY_AGAIN, in_words, until_written
from gateway.database.store import Store
from gateway.database.tables.operations import Operation
from gateway.futures import Answer, Futures, Gone, internal_error
from gateway.ids import operation_of
from gateway.metrics import Metrics
from gateway.placement import Placement
from gateway.tenants.ledger import Ledger
from gateway.training.results import Results
from gateway.training.submission import Submission
from gateway.training.trainer_calls import TooFarAhead, TrainerCalls
from tinsmith.errors import (
    InvalidRequest,
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.received_answers import ReceivedAnswers
from tinsmith.rpc.server import ACCEPTED, REPEATED
from tinsmith.v1 import trainer_pb2 as pb

logger = logging.getLogger(__name__)

_WITHOUT_ROW = ("forward_backward", "optim_step")
"""Endpoints whose answer is made from the trainer's reply alone, without a row of the database."""
_WITH_RESULTS = ("create_model", "load_weights", "save_weights", "save_weights_for_sampler", "save_weights_external")
"""Endpoints whose results go into the database, even when no client asks for the answer."""
_MOST_MODELS = 4096
"""Most models that are kept in `Operations._received`; beyond that the least recently used is forgotten."""


class Operations:
    """Submits training operations to the trainer, and turns its replies into the answers of their futures."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        placement: Placement,
        futures: Futures,
        results: Results,
        store: Store,
        metrics: Metrics,
        ledger: Ledger,
        history: MetricHistory,
        gateway_id: str,
    ) -> None:
        self._gateway_id = gateway_id
        self._received: LRUCache[str, ReceivedAnswers] = LRUCache(_MOST_MODELS)
        """model_id -> the batches whose answers its client has. A model without an entry, such as after a restart of
        the gateway, gets `failure_seen` 0, so its step behind a failed batch is refused."""
        self._config = config
        self._ledger = ledger
        self._history = history
        self._calls = TrainerCalls(placement, timeout_s=config.submit_timeout_s)
        self._futures = futures
        self._results = results
        self._store = store
        self._metrics = metrics

    async def submit(self, submission: Submission) -> None:
        """Submits the operation. Returns when the client may get a receipt: the trainer has the operation in its
        journal, or has refused it for good.

        After an error the client must get no receipt for the number. Raises NotReady when the trainer cannot be
        reached, OutOfCapacity when the model has too many operations in work, TooFarAhead, and SequenceConflict when
        another request has taken the number.
        """
        try:
            await self._submit(submission)
        except (SequenceConflict, TooFarAhead):
            if _is_batch(submission) and submission.model_id in self._received:
                self._received[submission.model_id].unsent(submission.seq_id)
            raise

    def arrives(self, submission: Submission) -> None:
        """Notes that the client has sent a batch or an optim_step. Must be called before `submit`, and before any check
        that refuses the request for now. The client sends such a request again, so it counts as in flight meanwhile."""
        received, seq_id = self._received.get(submission.model_id), submission.seq_id
        if submission.rpc == "OptimStep":
            seen = 0 if received is None else received.step(seq_id)
            submission.body += pb.OptimStepRequest(failure_seen=seen).SerializeToString()
        elif received is not None and _is_batch(submission):
            received.sent(seq_id)

    async def received(self, request_id: str, *, failed: bool, is_gone: Callable[[], Awaitable[bool]]) -> None:
        """Notes that the client is given the answer of this future, unless the client has gone (`is_gone`). Before
        that, waits until a failed answer may be given."""
        if (found := operation_of(request_id)) is not None and (received := self._received.get(found[0])) is not None:
            if failed:
                await received.hold_back(found[1])
            if not await is_gone():
                received.received(found[1], failed=failed)

    async def _submit(self, submission: Submission) -> None:
        request_id = submission.request_id
        self._ledger.touch(submission.model_id)
        known = self._futures.fingerprint(request_id)
        if known is not None and known != submission.fingerprint and not await self._is_same_batch(submission):
            raise _conflict(submission)
        pending = self._futures.pending(request_id)
        if known is None:
            if self._futures.num_pending(submission.model_id) >= self._config.max_pending_operations:
                raise OutOfCapacity(
                    f"model {submission.model_id} has {self._config.max_pending_operations} operations in work, "
                    "which is max_pending_operations; wait for some of them"
                )
            self._ledger.check_room()
            pending = submission
            pending.accepted = asyncio.Future()
            self._futures.start(submission, self._run(submission, pending.accepted))
        if pending is not None and pending.accepted is not None:
            await asyncio.shield(pending.accepted)

    async def _is_same_batch(self, submission: Submission) -> bool:
        """Whether the trainer has this very batch. The bytes may differ, because a map of protobuf has no order."""
        if submission.rpc != "ForwardBackward" or submission.is_completed:
            return False
        try:
            call = await self._calls.accept(submission)
        except (InvalidRequest, SequenceConflict):
            return False
        try:  # a trainer that has forgotten the operation cannot compare
            return ACCEPTED in tuple(await call.initial_metadata())
        finally:
            call.cancel()

    async def is_repeat(self, request_id: str, mark: str) -> bool:
        """Whether this very CreateModel was submitted before, so that a receipt may be given.

        Raises the errors of `submit` while the CreateModel is in work.
        """
        if self._futures.fingerprint(request_id) == mark:
            pending = self._futures.pending(request_id)
            if pending is not None and pending.accepted is not None:
                await asyncio.shield(pending.accepted)
            return True
        operation = await self._store.operations.get(request_id)
        if operation is None or operation.fingerprint != mark:
            return False
        if operation.error is not None:
            return True
        # The row is written before the trainer has the operation; `lora_rank` is set from the trainer's reply.
        model = await self._store.models.get(operation.model_id)
        return model is not None and model.lora_rank is not None

    async def _run(self, submission: Submission, accepted: asyncio.Future[None]) -> Answer:
        try:
            return await self._submit_and_wait(submission, accepted)
        except Exception as error:
            if accepted.done():
                raise
            if isinstance(error, SQLAlchemyError):
                logger.error("%s: the database cannot be used: %s", submission.request_id, in_words(error))
                accepted.set_exception(NotReady(TRY_AGAIN))
            else:
                logger.exception("%s was not accepted", submission.request_id)
                accepted.set_exception(internal_error())
            raise Gone from error  # the client gets no receipt, so it sends the operation again

    async def _submit_and_wait(self, submission: Submission, accepted: asyncio.Future[None]) -> Answer:
        try:
            call = await self._accept(submission)
        except (NotReady, OutOfCapacity, TooFarAhead, SequenceConflict) as error:
            accepted.set_exception(error)
            raise Gone from error
        except asyncio.CancelledError:
            if submission.answer is None:
                accepted.set_exception(NotReady("the gateway is going down"))
            else:  # the model has ended: the client gets a receipt of a failed future
                accepted.set_result(None)
            raise
        except ServiceError:  # no such trainer, or refused before: the client gets a receipt of a failed future
            accepted.set_result(None)
            raise
        if call is not None and REPEATED not in tuple(await call.initial_metadata()):
            self._note(submission)
        if submission.rpc == "ForwardBackward":
            submission.body = b""  # it has up to max_body_bytes, and the answer may take hours
        if call is not None:
            self._metrics.submissions.accept_seconds.observe(time.monotonic() - submission.started_at)
        accepted.set_result(None)
        if call is None:
            return await self._attached(submission)
        self._calls.watch(submission)
        reply = await self._reply(call, submission)
        await self._count(submission)
        self._history.add(
            submission.model_id,
            submission.seq_id,
            reply,
            ran=submission.ran,
            body=submission.body if submission.rpc == "OptimStep" else b"",
            is_forward_only=submission.is_forward_only,
        )
        return await self._answer(submission, reply)

    def _note(self, submission: Submission) -> None:
        """Notes that the trainer has a new operation."""
        rpc, model_id = submission.rpc, submission.model_id
        if rpc == "CreateModel" or (rpc == "OptimStep" and model_id not in self._received):
            self._received[model_id] = ReceivedAnswers(after=submission.seq_id)
        elif model_id in self._received:
            self._received[model_id].accepted(submission.seq_id, is_batch=_is_batch(submission))

    async def _accept(self, submission: Submission) -> Any:
        """The call of the trainer, once the trainer has the operation in its journal.

        None for a repeat that the trainer has with another body, because the content that the gateway adds to the body
        has changed.

        Raises NotReady, OutOfCapacity, TooFarAhead and SequenceConflict as `submit` does. For the repeat of a refused
        operation, raises the refusal.
        """
        known: Operation | None = None
        try:
            if submission.kind not in _WITHOUT_ROW or submission.is_completed or submission.error is not None:
                known = await self._remember(submission)
                if known is not None and known.error is not None and known.fingerprint != submission.fingerprint:
                    raise SequenceConflict(known.error)  # the gateway refused it, without the trainer
            call = await self._calls.accept(submission)
        except TooFarAhead:
            if known is None:
                await self._store.operations.delete(submission.request_id)
            raise
        except InvalidRequest as error:
            if submission.error is not None:
                raise
            submission.refuse(error)  # the number of such a request, one with too many parts perhaps, must be used up
            return await self._accept(submission)
        except SequenceConflict as error:
            if known is None:
                await self._store.operations.delete(submission.request_id)
            if known is None or known.fingerprint != submission.fingerprint:
                raise _conflict(submission, is_given_up=error.metadata.get("kind") == "skip") from error
            if known.error is not None:
                raise InvalidRequest(known.error) from None
            return None
        if known is not None and known.fingerprint != submission.fingerprint:
            await self._store.operations.replace(self._row(submission))  # the trainer never got the stored one
        return call

    async def _reply(self, call: Any, submission: Submission) -> Any:
        """The trainer's reply. Raises the error of a failed operation; the gateway's own refusal comes first."""
        try:
            reply = await self._calls.reply(call, submission)
        except ServiceError as error:
            if submission.kind in _WITH_RESULTS:
                await self._settle(submission)
            raise submission.error or error from error
        if submission.error is not None:
            raise submission.error
        return reply

    async def _count(self, submission: Submission) -> None:
        """Counts the trained tokens as usage of the model's owner."""
        if not submission.num_tokens:
            return
        self._metrics.submissions.trained_tokens.inc(submission.num_tokens)
        self._ledger.train(
            submission.model_id,
            submission.seq_id,
            submission.num_tokens,
            base_model=submission.base_model,
            session_id=submission.session_id,
            is_new=True,
        )
        if submission.hold is not None:
            submission.hold.release()  # the tokens are counted as used now, and must not count as reserved, too
            if submission.hold.is_budgeted:
                await until_written(self._ledger.flush, what="the usage", pausing=submission.progress.paused)

    async def _answer(self, submission: Submission, reply: Any) -> Answer:
        """The client's answer, once the results of the reply are in the database and the operation is settled."""
        submission.ask = None  # the trainer is done with the operation
        if isinstance(reply, pb.ForwardBackwardResponse):
            return Answer(reply.SerializeToString(), json_forms.forward_backward_result)
        if isinstance(reply, pb.OptimStepResponse):
            return Answer(json_forms.optim_step_result(reply))

        async def write() -> Answer:
            row = self._row(submission) if submission.rpc else None
            return await self._results.answer(submission.request_id, submission.model_id, reply, operation=row)

        return await until_written(write, what=submission.request_id, pausing=submission.progress.paused)

    async def _settle(self, submission: Submission) -> None:
        async def settle() -> None:
            await self._store.operations.settle(submission.request_id)

        await until_written(settle, what=submission.request_id, pausing=submission.progress.paused)

    async def _remember(self, submission: Submission) -> Operation | None:
        """Stores the operation. Returns the one that was stored under its id before, if any."""
        if await self._store.operations.add(self._row(submission)):
            return None
        return await self._store.operations.get(submission.request_id)

    def _row(self, submission: Submission) -> Operation:
        return Operation(
            request_id=submission.request_id,
            model_id=submission.model_id,
            kind=submission.kind,
            path=submission.path,
            sampling_session_id=submission.sampling_session_id,
            inflight=submission.inflight,
            error=submission.error.message if submission.error is not None else None,
            fingerprint=submission.fingerprint,
            created_at=time.time(),
            gateway_id=self._gateway_id,
        )

    # Operations that another process submitted

    async def take_over(self) -> None:
        """Attaches to the operations that dead gateways left unsettled, because their results must be stored even if no
        client asks for them. No other gateway takes these operations again, so this method waits while the database
        cannot be used."""
        for request_id in await self._store.operations.take_over(self._gateway_id, kinds=_WITH_RESULTS):
            if self._futures.pending(request_id) is None:
                logger.info("%s was left by a gateway that is gone", request_id)
                with contextlib.suppress(Gone):  # neither the trainer nor the database knows its model
                    await until_written(partial(self.attach, request_id), what=request_id, pausing=lambda _: None)

    async def attach(self, request_id: str) -> None:
        """Makes the future of an operation that this process did not submit.

        Raises Gone when `request_id` is no id of an operation, or when the model is unknown.
        """
        found = operation_of(request_id)
        if found is None or (model := await self._store.models.get(found[0])) is None:
            raise Gone
        if self._futures.pending(request_id) is not None:
            return  # another poll has attached meanwhile
        submission = Submission(
            request_id, "attach", model.model_id, None, seq_id=found[1], base_model=model.base_model
        )
        self._calls.watch(submission)
        self._futures.start(submission, self._attached(submission))

    async def _attached(self, submission: Submission) -> Answer:
        model_id, seq_id = submission.model_id, submission.seq_id
        try:
            reply = await self._calls.wait_result(submission)
        except ResultNotFound as error:
            raise Gone from error
        except ServiceError:
            await self._settle(submission)
            raise
        self._history.add(model_id, seq_id, reply, ran=submission.ran)
        if isinstance(reply, pb.ForwardBackwardResponse):
            num_tokens = round(reply.metrics.get("num_tokens:sum", 0.0))
            where = {"base_model": submission.base_model, "session_id": submission.session_id}
            self._ledger.train(model_id, seq_id, num_tokens, is_new=False, **where)
        return await self._answer(submission, reply)


def _is_batch(submission: Submission) -> bool:
    """Whether ReceivedAnswers counts the submission as a batch: it adds gradients, and clients send its parts at
    once."""
    return submission.adds_gradients and submission.sends_parts_at_once


def _conflict(submission: Submission, *, is_given_up: bool = False) -> SequenceConflict:
    number = f"seq_id {submission.seq_id} of model {submission.model_id}"
    return SequenceConflict(
        f"{number} was refused before, or given up because it had not arrived; this {submission.kind} was not run"
        if is_given_up
        else f"{number} was used by another request before; "
        f"this {submission.kind} has a different body and was not run. The first one keeps its result",
        model_id=submission.model_id,
        seq_id=submission.seq_id,
    )
