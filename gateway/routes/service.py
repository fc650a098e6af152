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
    is_jwt_used = gateway_of(request).tokens.are_used
    return json_response({"proto_compress_fwdbwd": False, "pjwt_auth_enabled": is_jwt_used})


async def client_dynamic_config(request: Request) -> Response:
    return json_response({})


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
