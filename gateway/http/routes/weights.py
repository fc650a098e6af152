"""Saving, loading, and what a saved state is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.convert import check_ttl
from gateway.gateway import caller_of, gateway_of
from gateway.http import schemas
from gateway.http.body import parse, read_json
from gateway.http.errors import json_response
from gateway.http.routes.models import check_session, create_from_checkpoint
from gateway.training.submissions import Rpc, rpc_of, submit_json
from gateway.views import lora_view
from tinsmith.rpc.errors import InvalidRequest, Unsupported
from tinsmith.rpc.paths import TinkerPath, check_name
from tinsmith.v1 import trainer_pb2, types_pb2

_ACCESS_TOKEN = "X-Tinker-Weights-Access-Token"  # noqa: S105  # a header's name


async def save_weights(request: Request) -> Response:
    async def to_rpc(body: schemas.SaveWeights) -> Rpc:
        path = TinkerPath(body.model_id, "weights", check_name(body.path, field="path"))
        if body.overwrite:
            await gateway.checkpoints.keep_for_samplers(path)
        message = trainer_pb2.SaveCheckpointRequest(
            model_id=body.model_id,
            seq_id=body.seq_id,
            kind=types_pb2.CHECKPOINT_KIND_TRAINING,
            name=path.name,
            overwrite=body.overwrite,
            ttl_seconds=check_ttl(body.ttl_seconds),
            user_metadata=body.user_metadata,
        )
        return rpc_of("SaveCheckpoint", message, path=str(path))

    gateway, caller = gateway_of(request), caller_of(request)
    content, body = await read_json(request, gateway.config)
    return await submit_json(
        gateway, caller, content, body, kind="save_weights", schema=schemas.SaveWeights, convert=to_rpc
    )


async def save_weights_for_sampler(request: Request) -> Response:
    """Named, or ephemeral: then it makes a sampling session and has no path. With kind "inflight" all samplers of the
    run that were made of such a save follow it to these weights."""

    async def to_rpc(body: schemas.SaveWeightsForSampler) -> Rpc:
        inflight = body.kind == "inflight"
        message = trainer_pb2.SaveCheckpointRequest(
            model_id=body.model_id,
            seq_id=body.seq_id,
            ttl_seconds=check_ttl(body.ttl_seconds),
            user_metadata=body.user_metadata,
        )
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise InvalidRequest("path, sampling_session_seq_id: send exactly one of the two")
        if body.path is not None:
            message.kind = types_pb2.CHECKPOINT_KIND_SAMPLER
            message.name = check_name(body.path, field="path")
            path = str(TinkerPath(body.model_id, "sampler_weights", body.path))
            return rpc_of("SaveCheckpoint", message, path=path, inflight=inflight)
        message.kind = types_pb2.CHECKPOINT_KIND_EPHEMERAL
        session_id = body.model_id.rpartition(":train:")[0]
        sampling_session_id = f"{session_id}:sample:{body.sampling_session_seq_id}"
        return rpc_of("SaveCheckpoint", message, sampling_session_id=sampling_session_id, inflight=inflight)

    gateway, caller = gateway_of(request), caller_of(request)
    content, body = await read_json(request, gateway.config)
    kind, schema = "save_weights_for_sampler", schemas.SaveWeightsForSampler
    return await submit_json(gateway, caller, content, body, kind=kind, schema=schema, convert=to_rpc)


async def save_weights_external(request: Request) -> Response:
    """Files for download; with age_encryption_recipients each of them is encrypted."""

    async def to_rpc(body: schemas.SaveWeightsExternal) -> Rpc:
        path = TinkerPath(body.model_id, "external_weights", check_name(body.path, field="path"))
        message = trainer_pb2.SaveCheckpointRequest(
            model_id=body.model_id,
            seq_id=body.seq_id,
            kind=types_pb2.CHECKPOINT_KIND_EXTERNAL,
            name=path.name,
            ttl_seconds=check_ttl(body.ttl_seconds),
            age_recipients=body.age_encryption_recipients,
        )
        return rpc_of("SaveCheckpoint", message, path=str(path))

    gateway, caller = gateway_of(request), caller_of(request)
    content, body = await read_json(request, gateway.config)
    kind, schema = "save_weights_external", schemas.SaveWeightsExternal
    return await submit_json(gateway, caller, content, body, kind=kind, schema=schema, convert=to_rpc)


class _LoadInto(schemas.LoadWeights, schemas.OperationIds):
    """The legacy form: into a model that exists."""


async def load_weights(request: Request) -> Response:
    """With session_id it creates the model from the checkpoint; with model_id it replaces that model's weights."""
    gateway, caller = gateway_of(request), caller_of(request)
    content, body = await read_json(request, gateway.config)
    if content.get("session_id") is not None:
        return await create_from_checkpoint(gateway, content, body, caller=caller)

    async def to_rpc(body: _LoadInto) -> Rpc:
        for field, value in (
            ("weights_access_token", body.weights_access_token),
            ("base_model", body.base_model),
            ("user_metadata", body.user_metadata),
            ("optimizer_config", body.optimizer_config),
        ):
            if value is not None:
                raise Unsupported(f"{field}: cannot be set when weights are loaded into a model that exists")
        named = TinkerPath.parse(body.path, field="path")
        if named.run_id == body.model_id and await gateway.store.operations.saving(named) is not None:
            path, location = str(named), named.location  # the trainer waits for the saves of the same run before a load
        else:
            checkpoint = await gateway.saves.read(body.path, field="path", caller=caller)
            path, location = checkpoint.path, checkpoint.location
        message = trainer_pb2.LoadCheckpointRequest(
            model_id=body.model_id, seq_id=body.seq_id, location=location, load_optimizer=body.optimizer
        )
        return rpc_of("LoadCheckpoint", message, path=path)

    return await submit_json(
        gateway, caller_of(request), content, body, kind="load_weights", schema=_LoadInto, convert=to_rpc
    )


async def weights_info(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    path = parse(schemas.WeightsInfo, content).tinker_path
    checkpoint = await gateway.checkpoints.find(path, field="tinker_path", caller=caller_of(request))
    return json_response(
        {
            "base_model": checkpoint.base_model,
            **lora_view(checkpoint.lora_rank),
            "train_unembed": checkpoint.train_unembed,
            "train_mlp": checkpoint.train_mlp,
            "train_attn": checkpoint.train_attn,
            "optimizer_config": {"type": checkpoint.optimizer},
        }
    )


async def copy_weights(request: Request) -> Response:
    """The copy belongs to a run that cannot be trained: in a new session of a project, or in a live session."""
    gateway, caller = gateway_of(request), caller_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.CopyWeights, content)
    if body.weights_access_token is not None or _ACCESS_TOKEN in request.headers:
        raise Unsupported(
            f"weights_access_token (header {_ACCESS_TOKEN}): this server issues none; publish the checkpoint"
        )
    if (body.session_id is None) != (body.model_seq_id is None):
        raise InvalidRequest("session_id, model_seq_id: go together")
    if (body.destination_project_id is None) == (body.session_id is None):
        raise InvalidRequest("destination_project_id, session_id: send exactly one of the two")
    ttl_seconds = check_ttl(body.ttl_seconds)
    if body.session_id is not None:
        await check_session(gateway, body.session_id, caller=caller)
    if body.destination_project_id is not None:
        copy = await gateway.copies.into_project(
            body.source_path,
            body.destination_project_id,
            ttl_seconds=ttl_seconds,
            caller=caller,
            idempotency_key=request.headers.get("x-idempotency-key"),
        )
    else:
        run_id = f"{body.session_id}:train:{body.model_seq_id}"
        copy = await gateway.copies.into_run(body.source_path, run_id, ttl_seconds=ttl_seconds, caller=caller)
    return json_response({"tinker_path": copy.path})


routes = [
    Route("/save_weights", save_weights, methods=["POST"]),
    Route("/save_weights_for_sampler", save_weights_for_sampler, methods=["POST"]),
    Route("/save_weights_external", save_weights_external, methods=["POST"]),
    Route("/load_weights", load_weights, methods=["POST"]),
    Route("/weights_info", weights_info, methods=["POST"]),
    Route("/copy_weights", copy_weights, methods=["POST"]),
]
