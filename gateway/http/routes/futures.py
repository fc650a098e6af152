"""Answers of submissions, by long polls, and cancellation."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway import answers, schemas
from gateway.codec import Request, negotiate
from gateway.futures import PROTOBUF, Answer, FutureProgress, Gone, explain, failed
from gateway.gateway import Gateway
from gateway.http.endpoint import BINARY, POST
from gateway.ids import Target, is_custom_loss, refusal_of, target_of, unloaded_by
from gateway.sampling import samples
from tinsmith.errors import InvalidRequest


async def pass_on(request: Request, target: Target | str, *, is_new: bool = False) -> Response | None:
    """The answer of the gateway that has these samples; None when this gateway has to answer (`Forwarding.forward`)."""
    forwarding = request.gateway.sampling.forwarding
    return None if forwarding is None else await forwarding.forward(request, request.raw, target, is_new=is_new)


async def retrieve_future(request: Request, body: schemas.RetrieveFuture) -> dict[str, Any] | Response:
    """A result, by a long poll; in protobuf if the header Accept names it.

    A large answer is announced by its size if the client allows that.
    """
    gateway = request.gateway
    request_id = body.request_id
    if not await gateway.tenants.access.owns(request_id, request.caller):
        raise _unknown(request_id)
    if (refused := refusal_of(request_id)) is not None:
        return await negotiate(request, failed(InvalidRequest(refused[1])), gateway.config)
    is_sample = target_of(request_id) is not None
    if is_sample:
        if (elsewhere := await pass_on(request, request_id)) is not None:
            return elsewhere
        gateway.sampling.completions.settle([request_id])
    try:
        found = await _poll(gateway, request_id)
    except Gone:
        raise _unknown(request_id) from None
    if isinstance(found, Answer):
        if not is_sample:
            is_gone = request.is_disconnected
            await gateway.training.operations.received(request_id, failed=found.is_failure, is_gone=is_gone)
        size = len(found.body)
        if body.allow_metadata_only and not found.is_failure and size > gateway.config.metadata_only_bytes:
            return {"status": "complete_metadata", "response_payload_size": size}
        return await negotiate(request, found, gateway.config)
    if (pending := gateway.futures.pending(request_id)) is not None:
        found = await explain(pending)
    return {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": found.state,
        "queue_state_reason": found.reason,
    }


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(
        410, f"request_id: {request_id!r} is unknown, or its answer is no longer kept; submit the request again"
    )


async def _poll(gateway: Gateway, request_id: str) -> Answer | FutureProgress:
    timeout_s = gateway.config.long_poll_s
    try:
        return await gateway.futures.poll(request_id, timeout_s=timeout_s)
    except Gone:
        if await gateway.training.refusals.attach(request_id):
            pass
        elif (model_id := unloaded_by(request_id)) is not None:
            await gateway.reaper.attach_end(request_id, model_id)
        elif is_custom_loss(request_id):
            await gateway.training.custom_losses.attach(request_id)
        else:
            await gateway.training.operations.attach(request_id)
        return await gateway.futures.poll(request_id, timeout_s=timeout_s)


async def retrieve_futures(
    request: Request, body: schemas.RetrieveFutures
) -> answers.training.CompletionPage | Response:
    """The finished samples of a sampler, by a long poll."""
    gateway = request.gateway
    sampling_session_id = body.target.sampling_session_id
    if await gateway.tenants.access.sampling_session(sampling_session_id, request.caller) is None:
        raise HTTPException(404, f"target.sampling_session_id: there is no {sampling_session_id!r}")
    ended = HTTPException(410, f"target.sampling_session_id: the session of {sampling_session_id!r} has ended")
    if not gateway.store.samplers.lives(sampling_session_id):
        raise ended
    target = (sampling_session_id, body.target.cloned_sampler_id)
    if (elsewhere := await pass_on(request, target)) is not None:
        return elsewhere
    mine = [each for each in body.retrieved_request_ids if (of := target_of(each)) and of[0] == sampling_session_id]
    gateway.sampling.completions.settle(mine)
    for request_id in mine:
        gateway.futures.forget(request_id)
    longest_s = gateway.config.long_poll_s
    try:
        completions, cursor = await gateway.sampling.completions.poll(
            target,
            prev_cursor=body.prev_cursor,
            timeout_s=longest_s if body.timeout is None else min(body.timeout, longest_s),
        )
    except Gone:
        raise ended from None
    return {"completions": completions, "cursor": cursor}


async def cancel_future(request: Request, body: schemas.CancelFuture) -> answers.service.Empty | Response:
    """Stop a sample.

    Does nothing for a sample that is done or unknown, and for other work.
    """
    gateway = request.gateway
    request_id = body.request_id
    if not await gateway.tenants.access.owns(request_id, request.caller):
        return {}
    if (elsewhere := await pass_on(request, request_id)) is not None:
        return elsewhere
    gateway.futures.abandon(request_id, kind=samples.KIND)
    gateway.sampling.completions.settle([request_id])
    return {}


routes = [
    POST("/retrieve_future", retrieve_future, errors=(410,), also_answers={PROTOBUF: BINARY}),
    POST("/retrieve_futures", retrieve_futures, errors=(404, 410)),
    POST("/cancel_future", cancel_future),
]
