"""Gradients and optimizer steps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import convert, schemas
from gateway.body import parse, read_forward_backward, read_json
from gateway.gateway import gateway_of
from gateway.submissions import Rpc, rpc_of, submit, submit_json


async def forward_backward(request: Request) -> Response:
    """The client's bytes are ours: the message is parsed to see that it is one, and for its ids."""
    gateway = gateway_of(request)
    batch = await read_forward_backward(request, gateway.config)
    return await submit(
        gateway,
        kind="forward_backward",
        ids=parse(schemas.OperationIds, {"model_id": batch.model_id, "seq_id": batch.seq_id}),
        rpc=batch.error or Rpc("ForwardBackward", batch.body),
        mark=batch.fingerprint,
        num_tokens=batch.num_tokens,
    )


async def optim_step(request: Request) -> Response:
    async def to_rpc(body: schemas.OptimStep) -> Rpc:
        return rpc_of("OptimStep", convert.optim_step(body))

    gateway = gateway_of(request)
    content, body = await read_json(request, gateway.config)
    return await submit_json(gateway, content, body, kind="optim_step", schema=schemas.OptimStep, convert=to_rpc)


routes = [
    Route("/forward_backward", forward_backward, methods=["POST"]),
    Route("/optim_step", optim_step, methods=["POST"]),
]
