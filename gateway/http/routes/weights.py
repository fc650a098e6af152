"""Saving, loading and copying weights, and facts about a checkpoint."""

from __future__ import annotations

from typing import Any

from gateway import answers, schemas
from gateway.codec import Request
from gateway.convert import check_ttl, ttl_of
from gateway.http import openapi_bodies
from gateway.http.endpoint import POST, SUBMISSION
from gateway.http.receipts import counted_if_refused, submit_content, submit_json
from gateway.http.routes.models import check_session, create_from_checkpoint
from gateway.ids import model_id_of, sampling_session_id_of, session_of
from gateway.training.submission import Submission
from gateway.views import lora_view
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.rpc.paths import TinkerPath, check_name
from tinsmith.v1 import trainer_pb2, types_pb2

_ACCESS_TOKEN = "X-Tinker-Weights-Access-Token"  # noqa: S105  # a header's name


async def save_weights(request: Request) -> answers.training.Receipt:
    """Save a model's state."""

    async def to_rpc(save: Submission, body: schemas.SaveWeights) -> None:
        path = TinkerPath(body.model_id, "weights", check_name(body.path, field="path"))
        if body.overwrite:
            await request.gateway.storage.checkpoints.keep_for_samplers(path)
        more = {"overwrite": body.overwrite, "user_metadata": body.user_metadata}
        _saves(save, body, types_pb2.CHECKPOINT_KIND_TRAINING, path, **more)

    return await submit_json(request, "save_weights", schemas.SaveWeights, to_rpc)


async def save_weights_for_sampler(request: Request) -> answers.training.Receipt:
    """Save and publish a model's weights.

    The save has a name, or is ephemeral: then it makes a sampling session and has no path. With kind "inflight", all
    inflight samplers of the run move to these weights.
    """

    async def to_rpc(save: Submission, body: schemas.SaveWeightsForSampler) -> None:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise InvalidRequest("path, sampling_session_seq_id: send exactly one of the two")
        path, sampling_session_id, kind = None, None, types_pb2.CHECKPOINT_KIND_EPHEMERAL
        if body.path is not None:
            path = TinkerPath(body.model_id, "sampler_weights", check_name(body.path, field="path"))
            kind = types_pb2.CHECKPOINT_KIND_SAMPLER
        elif body.sampling_session_seq_id is not None:
            sampling_session_id = sampling_session_id_of(session_of(body.model_id), body.sampling_session_seq_id)
        save.sampling_session_id, save.inflight = sampling_session_id, body.kind == "inflight"
        _saves(save, body, kind, path, user_metadata=body.user_metadata)

    return await submit_json(request, "save_weights_for_sampler", schemas.SaveWeightsForSampler, to_rpc)


async def save_weights_external(request: Request) -> answers.training.Receipt:
    """Save a model's weights for download.

    With age_encryption_recipients each file is encrypted.
    """

    async def to_rpc(save: Submission, body: schemas.SaveWeightsExternal) -> None:
        path = TinkerPath(body.model_id, "external_weights", check_name(body.path, field="path"))
        recipients = body.age_encryption_recipients
        _saves(save, body, types_pb2.CHECKPOINT_KIND_EXTERNAL, path, age_recipients=recipients)

    return await submit_json(request, "save_weights_external", schemas.SaveWeightsExternal, to_rpc)


def _saves(
    save: Submission,
    body: schemas.SaveWeights | schemas.SaveWeightsForSampler | schemas.SaveWeightsExternal,
    kind: types_pb2.CheckpointKind,
    path: TinkerPath | None,
    **fields: Any,
) -> None:
    """Sets the RPC of a save. `fields`: fields of the request that only some kinds have."""
    message = trainer_pb2.SaveCheckpointRequest(
        model_id=body.model_id,
        seq_id=body.seq_id,
        kind=kind,
        name=path.name if path is not None else "",
        ttl=ttl_of(check_ttl(body.ttl_seconds)),
        **fields,
    )
    save.calls("SaveCheckpoint", message)
    save.path = str(path) if path is not None else None


class _LoadInto(schemas.LoadWeightsFields, schemas.OperationIds):
    """The legacy form of load_weights, which loads into an existing model."""


async def load_weights(request: Request) -> answers.training.Receipt:
    """A new model from a checkpoint, or a checkpoint into a model.

    With session_id, a new model is made. With model_id, the weights of that model are replaced.
    """
    gateway, caller = request.gateway, request.caller
    with counted_if_refused(gateway, caller):
        content = await request.json_object()
    if content.get("session_id") is not None:
        gateway.tenants.limits.count(caller)  # a new model is no numbered operation of a run
        return await create_from_checkpoint(request, content)

    async def to_rpc(load: Submission, body: _LoadInto) -> None:
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
            path, location = str(named), named.location  # a load waits for earlier saves of its own run
        else:
            checkpoint = await gateway.training.saves.read(body.path, field="path", caller=caller)
            path, location = checkpoint.path, checkpoint.location
        message = trainer_pb2.LoadCheckpointRequest(
            model_id=body.model_id, seq_id=body.seq_id, location=location, load_optimizer=body.optimizer
        )
        load.calls("LoadCheckpoint", message)
        load.path = path

    return await submit_content(request, content, kind="load_weights", schema=_LoadInto, convert=to_rpc)


async def weights_info(request: Request, body: schemas.WeightsInfo) -> answers.training.WeightsFacts:
    """Facts about a checkpoint."""
    gateway = request.gateway
    path = body.tinker_path
    checkpoint = await gateway.storage.checkpoints.find(path, field="tinker_path", caller=request.caller)
    return {
        "base_model": checkpoint.base_model,
        **lora_view(checkpoint.lora_rank),
        "train_unembed": checkpoint.train_unembed,
        "train_mlp": checkpoint.train_mlp,
        "train_attn": checkpoint.train_attn,
        "optimizer_config": {"type": checkpoint.optimizer},
    }


async def copy_weights(request: Request, body: schemas.CopyWeights) -> answers.training.CopiedWeights:
    """Copy a checkpoint.

    The copy is in a run that cannot be trained, in a new session of a project or in a live session.
    """
    gateway, caller = request.gateway, request.caller
    if body.weights_access_token is not None or _ACCESS_TOKEN in request.headers:
        raise Unsupported(
            f"weights_access_token (header {_ACCESS_TOKEN}): this server issues none; publish the checkpoint"
        )
    if (body.session_id is None) != (body.model_seq_id is None):
        raise InvalidRequest("session_id, model_seq_id: belong together; send both or neither")
    if (body.destination_project_id is None) == (body.session_id is None):
        raise InvalidRequest("destination_project_id, session_id: send exactly one of the two")
    ttl_seconds = check_ttl(body.ttl_seconds)
    if body.session_id is not None:
        await check_session(gateway, body.session_id, caller=caller)
    if body.session_id is not None and body.model_seq_id is not None:
        run_id = model_id_of(body.session_id, body.model_seq_id)
        copy = await gateway.storage.copies.into_run(body.source_path, run_id, ttl_seconds=ttl_seconds, caller=caller)
    else:
        assert body.destination_project_id is not None
        copy = await gateway.storage.copies.into_project(
            body.source_path,
            body.destination_project_id,
            ttl_seconds=ttl_seconds,
            caller=caller,
            idempotency_key=request.idempotency_key,
        )
    return {"tinker_path": copy.path}


routes = [
    POST("/save_weights", save_weights, errors=SUBMISSION, takes=schemas.SaveWeights),
    POST("/save_weights_for_sampler", save_weights_for_sampler, errors=SUBMISSION, takes=schemas.SaveWeightsForSampler),
    POST("/save_weights_external", save_weights_external, errors=SUBMISSION, takes=schemas.SaveWeightsExternal),
    POST("/load_weights", load_weights, errors=(404, *SUBMISSION), takes=openapi_bodies.LoadWeights),
    POST("/weights_info", weights_info, errors=(404, 503)),
    POST("/copy_weights", copy_weights, errors=(403, 404, 422, 503)),
]
