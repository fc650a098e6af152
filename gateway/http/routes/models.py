"""Models: creating and ending them, and facts about them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway import answers, convert, schemas
from gateway.codec import Request, parse, parse_ids
from gateway.database.tables.sessions import Model
from gateway.gateway import Gateway
from gateway.http.endpoint import POST, SUBMISSION
from gateway.http.receipts import failed_receipt, receipt
from gateway.ids import fingerprint, model_id_of, request_id_of, unload_id_of
from gateway.tenants.access import Caller, refused_id
from gateway.training.submission import Submission
from gateway.views import lora_view
from tinsmith.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotReady,
    SequenceConflict,
    ServiceError,
    Unsupported,
)
from tinsmith.rpc.words import word_of
from tinsmith.v1 import trainer_pb2, types_pb2


async def check_session(gateway: Gateway, session_id: str, *, caller: Caller) -> None:
    """Raises NotFound for an unknown session and FailedPrecondition for an ended one."""
    session = await gateway.tenants.access.session(session_id, caller)
    if session is None:
        raise NotFound(f"session_id: there is no session {session_id!r}")
    if session.ended_at is not None:
        raise FailedPrecondition(f"session_id: session {session_id!r} has ended: {session.end_reason}")


async def create_model(request: Request) -> answers.training.Receipt:
    """A new model."""
    content = await request.json_object()

    async def to_message(model_id: str) -> tuple[trainer_pb2.CreateModelRequest, str | None]:
        asked = parse(schemas.CreateModel, content)
        message = trainer_pb2.CreateModelRequest(
            model_id=model_id,
            base_model=asked.base_model,
            lora_config=convert.lora_config(asked.lora_config or schemas.LoraConfig(), asked.user_metadata or {}),
            optimizer=convert.optimizer(asked.optimizer_config.type),
            user_metadata=asked.user_metadata,
        )
        return message, None

    return await _create(request, "create_model", content, to_message)


class _LoadNew(schemas.LoadWeightsFields, schemas.NewModelIds):
    """The form of load_weights that makes a model."""


async def create_from_checkpoint(request: Request, content: dict[str, Any]) -> answers.training.Receipt:
    """load_weights with session_id: makes a model with the rank, flags and base model of the checkpoint."""
    gateway = request.gateway

    async def to_message(model_id: str) -> tuple[trainer_pb2.CreateModelRequest, str | None]:
        asked = parse(_LoadNew, content)
        if asked.weights_access_token is not None:
            raise Unsupported("weights_access_token: is not supported here")
        checkpoint = await gateway.training.saves.read(asked.path, field="path", caller=request.caller)
        base_model = asked.base_model or checkpoint.base_model
        if not gateway.clients.are_same(base_model, checkpoint.base_model):
            raise InvalidRequest(f"base_model: {base_model!r} is not that of {asked.path}, {checkpoint.base_model!r}")
        message = trainer_pb2.CreateModelRequest(
            model_id=model_id,
            base_model=base_model,
            optimizer=convert.optimizer(asked.optimizer_config.type if asked.optimizer_config is not None else ""),
            from_location=checkpoint.location,
            load_optimizer=asked.optimizer,
            user_metadata=asked.user_metadata,
        )
        return message, checkpoint.path

    return await _create(request, "load_weights", content, to_message)


async def _create(
    request: Request,
    kind: str,
    content: dict[str, Any],
    to_message: Callable[[str], Awaitable[tuple[trainer_pb2.CreateModelRequest, str | None]]],
) -> answers.training.Receipt:
    """Creates a model. `to_message` makes the trainer's request from the new model_id. It returns the request, and the
    path of the checkpoint that is loaded."""
    gateway = request.gateway
    ids = parse_ids(schemas.NewModelIds, content)
    await check_session(gateway, ids.session_id, caller=request.caller)
    model_id = model_id_of(ids.session_id, ids.model_seq_id)
    request_id = request_id_of(model_id, 0)
    # The fingerprint is made of the client's own bytes, because the checkpoint may be gone at a repeat.
    mark = fingerprint(kind, request.raw)
    if await gateway.training.operations.is_repeat(request_id, mark):
        return receipt(request_id, model_id)
    try:
        message, path = await to_message(model_id)
        await gateway.placement.add(
            Model(
                model_id=model_id,
                session_id=ids.session_id,
                base_model=message.base_model,
                optimizer=word_of(types_pb2.Optimizer, message.optimizer) or "adamw",
                user_metadata=dict(message.user_metadata),
                created_at=time.time(),
            )
        )
    except NotReady:
        raise
    except ServiceError as error:
        made = await gateway.store.models.get(model_id)
        if made is not None and made.lora_rank is not None and made.released_at is None:
            # The future of the request that made the model may be forgotten; this refusal must not take its place.
            raise SequenceConflict(
                f"{request_id} was used by another request before; this one was not run ({error})"
            ) from error
        return await failed_receipt(gateway, request_id, model_id, error, kind=kind, mark=mark)
    made = await gateway.store.models.get(model_id)
    if made is not None and made.released_at is not None:
        what = (
            f"model_seq_id: {ids.model_seq_id} is taken: {model_id} has ended, or holds copies and is not trained; "
            "send another"
        )
        return await failed_receipt(gateway, request_id, model_id, AlreadyExists(what), kind=kind, mark=mark)
    await gateway.training.operations.submit(
        Submission.of(
            kind,
            model_id,
            0,
            base_model=message.base_model,
            rpc="CreateModel",
            body=message.SerializeToString(deterministic=True),
            fingerprint=mark,
            path=path,
        )
    )
    return receipt(request_id, model_id)


async def get_info(request: Request, body: schemas.GetInfo) -> answers.training.ModelInfo:
    """Facts about a model."""
    gateway, model_id = request.gateway, body.model_id
    model = await gateway.tenants.access.model(model_id, request.caller)
    if model is None:
        raise ModelNotFound(f"model_id: there is no model {model_id!r}")
    trainer = await gateway.placement.of_run(model_id, timeout_s=gateway.config.submit_timeout_s)
    rank = model.lora_rank
    if rank is None:
        reply = await trainer.stub.GetModel(trainer_pb2.GetModelRequest(model_id=model_id))
        rank = reply.model.lora_config.rank
    is_path = model.base_model.startswith(("/", ".", "~"))
    return {
        "type": "get_info",
        "model_id": model_id,
        "model_name": model.base_model,
        **lora_view(rank),
        "optimizer_config": {"type": model.optimizer},
        "model_data": {
            "arch": trainer.info.architecture if trainer.info is not None else None,
            "model_name": model.base_model,
            "tokenizer_id": gateway.config.tokenizers.get(model.base_model, None if is_path else model.base_model),
        },
    }


async def unload_model(request: Request, body: schemas.UnloadModel) -> answers.training.Receipt:
    """End a model.

    Its accepted work is done first. Its checkpoints and their samplers stay.
    """
    gateway, caller, model_id = request.gateway, request.caller, body.model_id
    if await gateway.tenants.access.model(model_id, caller) is None:
        error = ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
        return receipt(refused_id(caller, error), model_id)
    await gateway.reaper.end_run(model_id)
    return receipt(unload_id_of(model_id), model_id)


routes = [
    POST("/create_model", create_model, errors=(404, *SUBMISSION), takes=schemas.CreateModel),
    POST("/unload_model", unload_model, errors=(429,)),
    POST("/get_info", get_info, errors=(404, 503)),
]
