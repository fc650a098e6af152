"""Custom losses: graphs that clients have traced. They are stored with the session, and added to batches by `loss_id`.

The gateway does not look into a graph; the trainer checks it.
"""

from __future__ import annotations

import asyncio
import json
import time

import orjson
from sqlalchemy import func, select

from gateway import schemas
from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.database.store import Store
from gateway.database.tables.operations import CustomLoss
from gateway.database.tables.sessions import Session
from gateway.futures import Answer, Futures, Gone, Pending
from gateway.ids import fingerprint
from gateway.training.refusals import Refusals
from tinsmith.errors import InvalidRequest, NotReady, OutOfCapacity, SequenceConflict, ServiceError
from tinsmith.v1 import trainer_pb2

KIND = "create_custom_loss"


def to_message(body: schemas.CreateCustomLoss) -> trainer_pb2.CustomLoss:
    """The loss as a protobuf message. Raises InvalidRequest for a graph with NaN or infinity, which JSON cannot
    hold."""
    try:
        graph = json.dumps(body.graph, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"graph: {error}; write such numbers as text", field="graph") from None
    return trainer_pb2.CustomLoss(
        name=body.name,
        inputs=[trainer_pb2.CustomLossInput(name=each.name, rank=each.rank) for each in body.inputs],
        graph=graph,
    )


class CustomLosses:
    """Creates and stores custom losses, and puts them into batches."""

    def __init__(
        self, config: GatewayConfig, *, store: Store, clients: Clients, futures: Futures, refusals: Refusals
    ) -> None:
        self._config = config
        self._store = store
        self._clients = clients
        self._futures = futures
        self._refusals = refusals

    async def create(self, loss_id: str, message: trainer_pb2.CustomLoss, *, session_id: str) -> None:
        """Lets a trainer check the loss, stores it, and makes the future `loss_id`. The future of a refused loss has
        failed.

        Raises SequenceConflict when the id stands for another loss, and NotReady or OutOfCapacity when no trainer can
        check the loss now.
        """
        content = message.SerializeToString(deterministic=True)
        mark = fingerprint(KIND, content)
        known = await self._store.get(CustomLoss, loss_id)
        if (known is not None and known.message != content) or self._futures.fingerprint(loss_id) not in (None, mark):
            raise SequenceConflict(f"custom_loss_seq_id: {loss_id} is another loss; this one was not stored")
        if self._futures.fingerprint(loss_id) is not None:
            return
        try:
            if known is None:
                await self._check(message, session_id=session_id)
                row = CustomLoss(loss_id=loss_id, session_id=session_id, message=content, created_at=time.time())
                await self._store.add_once(row)
        except (NotReady, OutOfCapacity):
            raise
        except ServiceError as error:
            await self._refusals.add(loss_id, error, group=session_id, kind=KIND, mark=mark)
        else:
            self._futures.start(Pending(loss_id, KIND, session_id, mark), _answer(loss_id))

    async def _check(self, message: trainer_pb2.CustomLoss, *, session_id: str) -> None:
        query = select(func.count()).select_from(CustomLoss).where(CustomLoss.session_id == session_id)
        if await self._store.first(query) >= self._config.max_custom_losses:
            raise InvalidRequest(
                f"session {session_id} has {self._config.max_custom_losses} custom losses, which is max_custom_losses; "
                "create a loss once, and use its handle again"
            )
        whose = await self._store.sessions.whose(session_id)
        if whose is not None:
            mine = select(func.count(CustomLoss.loss_id)).join(Session).where(Session.owner == whose.owner)
            if (number := await self._store.first(mine)) >= (limit := self._config.max_owner_rows):
                raise InvalidRequest(
                    f"the sessions of {whose.owner!r} have {number} custom losses, and may have {limit} in all "
                    "(max_owner_rows); those of an ended session are forgotten after ended_session_retention_s"
                )
        # All trainers apply the same checks, so any of them will do.
        timeout_s = self._config.submit_timeout_s
        trainer = await self._clients.settle(self._clients.any_trainer, timeout_s=timeout_s)
        request = trainer_pb2.CheckCustomLossRequest(custom_loss=message)
        try:
            async with asyncio.timeout(timeout_s):
                await trainer.stub.CheckCustomLoss(request, wait_for_ready=True)
        except TimeoutError:
            raise NotReady(f"the trainer at {trainer.address} cannot be asked now") from None

    async def attach(self, request_id: str) -> None:
        """Makes a future for a stored loss. Raises Gone when no loss is stored under this id."""
        row = await self._store.get(CustomLoss, request_id)
        if row is None:
            raise Gone
        if self._futures.fingerprint(request_id) is None:
            mark = fingerprint(KIND, row.message)
            self._futures.start(Pending(request_id, KIND, row.session_id, mark), _answer(request_id))

    async def put_into(self, message: trainer_pb2.ForwardBackwardRequest, *, session_id: str) -> None:
        """Replaces `loss_id` in the batch by the loss itself. Raises InvalidRequest, which names the field."""
        config = message.loss_fn_config_v2
        if message.loss_fn_config or set(config) != {"loss_id"} or config["loss_id"].WhichOneof("value") != "text":
            given = sorted({*message.loss_fn_config, *config})
            raise InvalidRequest(
                f"loss_fn_config: loss_fn 'custom' takes loss_id, a text, and nothing else; it got {given}",
                field="loss_fn_config",
            )
        loss_id = config["loss_id"].text
        row = None if "\0" in loss_id else await self._store.get(CustomLoss, loss_id)  # PostgreSQL takes no NUL
        if row is None or row.session_id != session_id:
            raise InvalidRequest(
                f"loss_fn_config.loss_id: there is no custom loss {loss_id!r} in session {session_id}; make one with "
                "create_custom_loss",
                field="loss_id",
            )
        message.custom_loss.ParseFromString(row.message)
        config.clear()


async def _answer(loss_id: str) -> Answer:
    return Answer(orjson.dumps({"type": KIND, "loss_id": loss_id}))
