"""Stores the models, checkpoints and samplers that operations have made, and makes the client's answers.

The fields of the client's request come from the operation's row in the database. So a reply that WaitResult found, also
after a restart, is treated like a reply to the submitting call.
"""

from __future__ import annotations

from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.convert import checkpoint_row
from gateway.database.store import Store
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import Answer
from gateway.sampling.inflight import Inflight
from gateway.storage.checkpoints import event_of
from gateway.tenants.ledger import Ledger
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.rpc.times import seconds_of
from tinsmith.rpc.words import word_of
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2


class Results:
    """Makes and stores the answers of training operations."""

    def __init__(self, store: Store, inflight: Inflight, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._inflight = inflight

    async def answer(self, request_id: str, model_id: str, reply: Any, *, operation: Operation | None = None) -> Answer:
        """Stores the model, checkpoint or sampler of the reply, settles the operation, and returns the client's answer.

        `operation`: the operation as this process stored it. None means that it is read from the database.

        Raises InvalidRequest when the sampling session of a save is taken by another request, and ServiceError for an
        unknown reply, or for a save that the database does not know.
        """
        match reply:
            case pb.CreateModelResponse():
                return await self._created(request_id, model_id, reply, operation)
            case pb.LoadCheckpointResponse():
                return await self._loaded(request_id, model_id, operation)
            case pb.SaveCheckpointResponse():
                return await self._saved(request_id, model_id, reply, operation)
        raise ServiceError(f"the trainer answered with an unknown {type(reply).__name__}")

    async def _created(
        self, request_id: str, model_id: str, reply: pb.CreateModelResponse, operation: Operation | None
    ) -> Answer:
        lora = reply.model.lora_config
        await self._store.models.complete(
            model_id,
            optimizer=word_of(types_pb2.Optimizer, reply.model.optimizer) or "adamw",
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )
        operation = operation or await self._store.operations.get(request_id)
        if operation is not None and operation.kind == "load_weights":
            return await self._loaded(request_id, model_id, operation)
        await self._store.operations.settle(request_id)
        return Answer(orjson.dumps({"type": "create_model", "model_id": model_id}))

    async def _loaded(self, request_id: str, model_id: str, operation: Operation | None) -> Answer:
        operation = operation or await self._store.operations.get(request_id)
        await self._store.operations.settle(request_id)
        path = operation.path if operation is not None else None
        return Answer(orjson.dumps({"type": "load_weights", "path": path, "model_id": model_id}))

    async def _saved(
        self, request_id: str, model_id: str, reply: pb.SaveCheckpointResponse, operation: Operation | None
    ) -> Answer:
        operation = operation or await self._store.operations.get(request_id)
        model = await self._store.models.get(model_id)
        if operation is None or model is None:
            raise ServiceError(f"{request_id}: the database does not know this save; list the model's checkpoints")
        if operation.inflight:
            await self._inflight.move(model_id, reply.checkpoint)
        if operation.sampling_session_id is None:
            row = checkpoint_row(reply.checkpoint, owner=await self._owner(model.session_id))
            row.inflight = operation.inflight

            async def note(db: AsyncSession) -> None:
                await self._ledger.count_checkpoint(
                    db, base_model=row.base_model, session_id=model.session_id, owner=row.owner
                )
                db.add(event_of("checkpoint_create", row, owner=row.owner))

            await self._store.checkpoints.put(row, settles=request_id, note=note)
            size = {"size_bytes": row.size_bytes} if operation.kind == "save_weights_external" else {}
            return Answer(orjson.dumps({"type": operation.kind, "path": row.path, **size}))
        made = SamplingSession(
            sampling_session_id=operation.sampling_session_id,
            session_id=model.session_id,
            base_model=model.base_model,
            model_path=None,
            version_id=reply.checkpoint.version_id,
            location=reply.checkpoint.location,
            created_at=seconds_of(reply.checkpoint.created_at),
            inflight_run_id=model_id if operation.inflight else None,
        )
        row = await self._store.samplers.add(made, settles=request_id)
        if row.version_id != reply.checkpoint.version_id:
            raise InvalidRequest(f"sampling_session_seq_id: {row.sampling_session_id} is taken by another request")
        if row is not made:
            await self._store.operations.settle(request_id)
        answer = {"type": operation.kind, "path": None, "sampling_session_id": operation.sampling_session_id}
        return Answer(orjson.dumps(answer))

    async def _owner(self, session_id: str) -> str:
        session = await self._store.sessions.get(session_id)
        return session.owner if session is not None else ""
