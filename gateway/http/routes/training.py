"""Gradients and optimizer steps."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import convert
from gateway.gateway import Gateway, caller_of, gateway_of
from gateway.http import schemas
from gateway.http.body import Batch, canonical, off_loop, parse, read_forward_backward, read_json
from gateway.http.sdk import sends_parts_at_once
from gateway.tenants.caller import Caller
from gateway.training.references import complete
from gateway.training.submissions import Rpc, no_model, rpc_of, submit, submit_json
from tinsmith.rpc.errors import NotReady, ServiceError


async def forward_backward(request: Request) -> Response:
    """A batch, in protobuf or in the JSON of older SDKs."""
    return await _submit_batch(request, forward_only=False)


async def forward(request: Request) -> Response:
    """A batch without gradients; newer SDKs send forward_backward with forward_only instead."""
    return await _submit_batch(request, forward_only=True)


async def _submit_batch(request: Request, *, forward_only: bool) -> Response:
    gateway, caller = gateway_of(request), caller_of(request)
    at_once = sends_parts_at_once(request)
    with gateway.tenants.limits.reading(caller):
        batch = await read_forward_backward(request, gateway.config, forward_only=forward_only)
        given = parse(schemas.GivenIds, {"model_id": batch.model_id, "seq_id": batch.seq_id or None})
    if given.seq_id is not None:
        return await _submit_numbered(gateway, caller, batch, forward_only=forward_only, at_once=at_once)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if model is None:
        return no_model(gateway, caller, given.model_id, None)
    async with gateway.training.numbers.next(model) as seq_id:
        if not isinstance(batch.message, ServiceError):
            batch.message.seq_id = seq_id
        numbered = replace(batch, seq_id=seq_id)
        return await _submit_numbered(gateway, caller, numbered, forward_only=forward_only, at_once=at_once)


async def _submit_numbered(
    gateway: Gateway, caller: Caller, batch: Batch, *, forward_only: bool, at_once: bool
) -> Response:
    """Submits a batch. `at_once`: the client sends all parts of a batch before it asks for an answer."""
    ids = schemas.OperationIds(model_id=batch.model_id, seq_id=batch.seq_id)
    message = batch.message
    if isinstance(message, ServiceError):
        kind = "forward" if forward_only else "forward_backward"  # refusing a forward loses no gradients
        return await submit(
            gateway, caller, kind=kind, ids=ids, rpc=message, mark=batch.refused_mark, sends_parts_at_once=at_once
        )
    # The fingerprint is of what the client sent, without what the gateway adds below.
    body, mark, num_tokens = await off_loop(
        lambda: canonical(message), num_bytes=batch.num_bytes, config=gateway.config
    )
    kind, rpc = "forward_backward", Rpc("ForwardBackward", body, is_forward_only=message.forward_only)
    if await gateway.tenants.access.model(ids.model_id, caller) is None:  # `complete` reads data of its session
        return no_model(gateway, caller, ids.model_id, None)
    try:
        if await complete(gateway, message, num_bytes=batch.num_bytes):
            body = await off_loop(
                lambda: message.SerializeToString(deterministic=True), num_bytes=batch.num_bytes, config=gateway.config
            )
            rpc = Rpc("ForwardBackward", body, is_forward_only=message.forward_only, is_completed=True)
    except NotReady:
        raise
    except ServiceError as error:
        kind, rpc = "forward" if message.forward_only else kind, error
    return await submit(
        gateway,
        caller,
        kind=kind,
        ids=ids,
        rpc=rpc,
        mark=mark,
        num_tokens=num_tokens,
        sends_parts_at_once=at_once,
    )


async def optim_step(request: Request) -> Response:
    async def to_rpc(body: schemas.OptimStep) -> Rpc:
        return rpc_of("OptimStep", convert.optim_step(body))

    gateway, caller = gateway_of(request), caller_of(request)
    with gateway.tenants.limits.reading(caller):
        content, body = await read_json(request, gateway.config)
    return await submit_json(
        gateway, caller, content, body, kind="optim_step", schema=schemas.OptimStep, convert=to_rpc
    )


routes = [
    Route("/forward_backward", forward_backward, methods=["POST"]),
    Route("/forward", forward, methods=["POST"]),
    Route("/optim_step", optim_step, methods=["POST"]),
]
