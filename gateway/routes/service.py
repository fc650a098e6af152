"""What the server is and offers."""

from __future__ import annotations

import contextlib

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import json_response
from gateway.gateway import gateway_of
from tinsmith.rpc.errors import NotReady


async def healthz(request: Request) -> Response:
    """503 until every trainer and sampler has said what it serves; from then on that the gateway runs."""
    if unreached := gateway_of(request).clients.unreached:
        return json_response({"status": "starting", "waiting_for": unreached}, status=503)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(generate_latest(gateway_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def client_config(request: Request) -> Response:
    """Flags that a client reads once."""
    gateway = gateway_of(request)
    return json_response(
        {
            "proto_compress_fwdbwd": False,
            "pjwt_auth_enabled": gateway.tokens.are_used,
            "sample_use_retrieve_futures": gateway.config.sample_use_retrieve_futures,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": gateway.config.custom_loss_server_side,
        }
    )


async def client_dynamic_config(request: Request) -> Response:
    """Flags that a client reads again and again."""
    return json_response({"sample_cancel_enabled": gateway_of(request).config.sample_cancel_enabled})


async def get_server_capabilities(request: Request) -> Response:
    """Every name that a base model is known by, of the services that have been reached since the start."""
    clients = gateway_of(request).clients
    with contextlib.suppress(NotReady):
        await clients.settle(clients.check_all_known, timeout_s=1.0)
    trainable = {name: info.max_context_length for info in clients.trainer_infos() for name in info.base_models}
    sampleable = {name: info.max_context_length for info in clients.sampler_infos() for name in info.base_models}
    models = [
        {
            "model_name": name,
            "max_context_length": min(side[name] for side in (trainable, sampleable) if name in side),
            "trainable": name in trainable,
            "sampleable": name in sampleable,
        }
        for name in sorted(trainable | sampleable)
    ]
    return json_response({"supported_models": models})


routes = [
    Route("/healthz", healthz),
    Route("/client/config", client_config, methods=["POST"]),
    Route("/client/dynamic_config", client_dynamic_config, methods=["POST"]),
    Route("/get_server_capabilities", get_server_capabilities),
]
