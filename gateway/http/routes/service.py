"""Health, metrics, flags for clients, and the capabilities of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.codec import can_use_pyqwest, gateway_of, json_response
from tinsmith.errors import NotReady
from tinsmith.v1 import sampler_pb2, trainer_pb2


async def healthz(request: Request) -> Response:
    """Whether the gateway is ready: 503 until the services that are needed have said what they serve, then 200."""
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
            "pjwt_auth_enabled": gateway.tenants.tokens.are_used,
            "sample_use_retrieve_futures": gateway.config.sample_use_retrieve_futures,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": gateway.config.custom_loss_server_side,
            "use_pyqwest_transport": can_use_pyqwest(request),
        }
    )


async def client_dynamic_config(request: Request) -> Response:
    """Flags that a client reads repeatedly."""
    return json_response({"sample_cancel_enabled": gateway_of(request).config.sample_cancel_enabled})


async def get_server_capabilities(request: Request) -> Response:
    """The base models, under all their names, of the services that have been reached since the start.

    A service that is down keeps its base models here, because requests wait for it. It is asked again when it is back.
    """
    clients = gateway_of(request).clients
    with contextlib.suppress(NotReady):
        await clients.settle(clients.check_all_known, timeout_s=1.0)
    trainers, samplers = list(clients.trainer_infos()), list(clients.samplers.infos())
    names = {name for info in (*trainers, *samplers) for name in info.base_models}
    return json_response({"supported_models": [_supported(name, trainers, samplers) for name in sorted(names)]})


def _supported(
    name: str,
    trainers: Sequence[trainer_pb2.GetTrainerInfoResponse],
    samplers: Sequence[sampler_pb2.GetSamplerInfoResponse],
) -> dict[str, object]:
    """Limits that hold for every service to which a request for this base model may go. `one_by_one` is there only for
    a base model that is trained one sequence at a time, and says why."""
    trainer = next((info for info in trainers if name in info.base_models), None)  # `Clients.find_trainer`'s choice
    trainable = trainer is not None and trainer.trainable
    limits = [info.max_context_length for info in samplers if name in info.base_models]
    sampleable = bool(limits)
    if trainer is not None and (trainable or not sampleable):
        limits.append(trainer.max_context_length)
    slow = {"one_by_one": trainer.one_by_one} if trainer is not None and trainer.one_by_one else {}
    return {
        "model_name": name,
        "max_context_length": min(limits),
        "trainable": trainable,
        "sampleable": sampleable,
        **slow,
    }


routes = [
    Route("/healthz", healthz),
    Route("/client/config", client_config, methods=["POST"]),
    Route("/client/dynamic_config", client_dynamic_config, methods=["POST"]),
    Route("/get_server_capabilities", get_server_capabilities),
]
