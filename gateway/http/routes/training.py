"""The routes of gradients and optimizer steps."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from gateway import answers, convert, schemas
from gateway.codec import Request, off_loop, parse, sends_parts_at_once
from gateway.futures import PROTOBUF
from gateway.gateway import Gateway
from gateway.http import openapi_bodies
from gateway.http.batches import read_batch
from gateway.http.endpoint import BINARY, POST, SUBMISSION
from gateway.http.receipts import counted_if_refused, no_model, submit, submit_json
from gateway.ids import fingerprint
from gateway.tenants.access import Caller
from gateway.training import provenance
from gateway.training.submission import Submission
from tinsmith.errors import NotReady, ServiceError
from tinsmith.v1 import trainer_pb2


async def forward_backward(request: Request) -> answers.training.Receipt:
    """Add gradients of a batch.

    In protobuf, or in the JSON of older SDKs.
    """
    return await _submit_batch(request, forward_only=False)


async def forward(request: Request) -> answers.training.Receipt:
    """The losses of a batch, without gradients; for SDKs before 0.25.

    Newer SDKs send forward_backward with forward_only instead.
    """
    return await _submit_batch(request, forward_only=True)


async def _submit_batch(request: Request, *, forward_only: bool) -> answers.training.Receipt:
    async with AsyncExitStack() as turn:  # the turn of a large body lasts until the trainer has the batch
        return await _submit_read(request, turn, forward_only=forward_only)


async def _submit_read(request: Request, turn: AsyncExitStack, *, forward_only: bool) -> answers.training.Receipt:
    gateway, caller = request.gateway, request.caller
    with counted_if_refused(gateway, caller):
        batch = await read_batch(request, gateway.config, turn, forward_only=forward_only)
        given = parse(schemas.GivenIds, {"model_id": batch.model_id, "seq_id": batch.seq_id or None})
    batch.sends_parts_at_once = sends_parts_at_once(request)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if model is None:
        return no_model(gateway, caller, given.model_id, None)
    batch.num_tokens += convert.tokens_of_pictures(batch.picture_sizes, gateway.clients.counting(model.base_model))
    if given.seq_id is not None:
        return await _submit_numbered(gateway, caller, batch)
    async with gateway.training.numbers.next(model) as seq_id:
        batch.number(seq_id)
        return await _submit_numbered(gateway, caller, batch)


async def _submit_numbered(gateway: Gateway, caller: Caller, batch: Submission) -> answers.training.Receipt:
    if batch.error is None and batch.loss_fn in ("custom", "stable_reinforce"):
        try:
            await _complete(gateway, batch)
        except NotReady:
            raise
        except ServiceError as error:
            if batch.is_forward_only:
                batch.kind = "forward"
            batch.refuse(error)
    return await submit(gateway, caller, batch)


async def _complete(gateway: Gateway, batch: Submission) -> None:
    """Adds the content that a batch only names: the stored loss of a "custom" batch, or the recorded logprobs of a
    "stable_reinforce" batch.

    Raises InvalidRequest or Unsupported, which name the field.
    """
    session_id, num_bytes = batch.session_id, len(batch.body)
    message = await off_loop(
        lambda: trainer_pb2.ForwardBackwardRequest.FromString(batch.body), num_bytes=num_bytes, config=gateway.config
    )
    # The bytes of a repeat may differ. Only the gateway can recognise it, because it changes the body for the trainer.
    batch.fingerprint = fingerprint("forward_backward", message.SerializeToString(deterministic=True))
    if batch.loss_fn == "custom":
        await gateway.training.custom_losses.put_into(message, session_id=session_id)
    else:
        records = await gateway.sampling.records.find(provenance.sequence_ids(message), session_id=session_id)
        await off_loop(lambda: provenance.resolve(message, records), num_bytes=num_bytes, config=gateway.config)
    await off_loop(lambda: batch.calls("ForwardBackward", message), num_bytes=num_bytes, config=gateway.config)
    batch.is_completed = True


async def optim_step(request: Request) -> answers.training.Receipt:
    """Apply the gradients."""

    async def to_rpc(step: Submission, body: schemas.OptimStep) -> None:
        step.calls("OptimStep", convert.optim_step(body))

    return await submit_json(request, "optim_step", schemas.OptimStep, to_rpc)


_batch_post = partial(POST, errors=SUBMISSION, also_takes={PROTOBUF: BINARY})
routes = [
    _batch_post("/forward_backward", forward_backward, takes=openapi_bodies.ForwardBackward),
    _batch_post("/forward", forward, takes=openapi_bodies.Forward),
    POST("/optim_step", optim_step, errors=SUBMISSION, takes=schemas.OptimStep),
]
