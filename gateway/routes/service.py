"""What the server is and offers."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import json_response
from gateway.gateway import gateway_of


async def healthz(request: Request) -> Response:
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(generate_latest(gateway_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def client_config(request: Request) -> Response:
    return json_response({"proto_compress_fwdbwd": False})


async def client_dynamic_config(request: Request) -> Response:
    return json_response({})


async def get_server_capabilities(request: Request) -> Response:
    """Every name that a base model is known by."""
    clients = gateway_of(request).clients
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
