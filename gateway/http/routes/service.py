"""Health, metrics, flags for clients, and the capabilities of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway import answers
from gateway.codec import Request, can_use_pyqwest, json_response
from gateway.http.endpoint import GET, POST
from tinsmith.errors import NotReady
from tinsmith.v1 import sampler_pb2, trainer_pb2

_MOST_DATUMS = 4096
"""Most datums that an SDK sends in one request; it divides a larger batch. Behind a divided batch that fails the next
optim_step is refused in any case. So a batch is divided only where a request could be too large."""


async def healthz(request: Request) -> Response:
    """Whether the gateway runs.

    The status is 503 until the services that are needed have said what they serve, then 200.
    """
    if awaited := request.gateway.clients.awaited:
        return json_response({"status": "starting", "waiting_for": awaited}, status=503)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(request.gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def client_config(request: Request) -> answers.service.ClientConfig:
    """Flags that a client reads once."""
    gateway = request.gateway
    return {
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": _MOST_DATUMS,
        "fwdbwd_max_chunk_bytes_count": gateway.config.max_body_bytes // 2,
        "pjwt_auth_enabled": gateway.tenants.tokens.are_used,
        "sample_use_retrieve_futures": gateway.config.sample_use_retrieve_futures,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": gateway.config.custom_loss_server_side,
        "use_pyqwest_transport": can_use_pyqwest(request),
    }


async def client_dynamic_config(request: Request) -> answers.service.DynamicConfig:
    """Flags that a client reads repeatedly."""
    return {"sample_cancel_enabled": request.gateway.config.sample_cancel_enabled}


async def get_server_capabilities(request: Request) -> answers.service.Capabilities:
    """Base models.

    The list has all names of the base models of services that have been reached since the start. A service that is down
    keeps its base models here, because requests wait for it. It is asked again when it is back.
    """
    clients = request.gateway.clients
    with contextlib.suppress(NotReady):
        await clients.settle(clients.check_all_known, timeout_s=1.0)
    trainers, samplers = list(clients.trainer_infos()), list(clients.samplers.infos())
    names = {name for info in (*trainers, *samplers) for name in info.base_models}
    return {"supported_models": [_supported(name, trainers, samplers) for name in sorted(names)]}


def _supported(
    name: str,
    trainers: Sequence[trainer_pb2.GetTrainerInfoResponse],
    samplers: Sequence[sampler_pb2.GetSamplerInfoResponse],
) -> answers.service.SupportedModel:
    """Limits that hold for every service to which a request for this base model may go. `one_by_one` is there only for
    a base model that is trained one sequence at a time, and says why."""
    trainer = next((info for info in trainers if name in info.base_models), None)  # all trainers of it agree
    trainable = trainer is not None and trainer.trainable
    limits = [info.max_context_length for info in samplers if name in info.base_models]
    sampleable = bool(limits)
    if trainer is not None and (trainable or not sampleable):
        limits.append(trainer.max_context_length)
    found: answers.service.SupportedModel = {
        "model_name": name,
        "max_context_length": min(limits),
        "trainable": trainable,
        "sampleable": sampleable,
    }
    if trainer is not None and trainer.one_by_one:
        found["one_by_one"] = trainer.one_by_one
    return found


METRICS = GET("/metrics", metrics, also_answers={"text/plain": {"type": "string"}}, needs_key=False)
routes = [
    GET("/healthz", healthz, answers=answers.service.Health, needs_key=False, unready=answers.service.Health),
    POST("/client/config", client_config),
    POST("/client/dynamic_config", client_dynamic_config),
    GET("/get_server_capabilities", get_server_capabilities),
]
