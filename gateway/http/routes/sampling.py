"""Sampling sessions and samples."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway import answers, convert, schemas
from gateway.assets import pointers_of_prompt
from gateway.codec import Request, off_loop, parse, parse_ids
from gateway.database.tables.sessions import SamplingSession
from gateway.gateway import Gateway
from gateway.http.endpoint import GET, POST
from gateway.http.routes.futures import pass_on
from gateway.http.routes.models import check_session
from gateway.ids import fingerprint, is_sampling_session, request_id_of, sampling_session_id_of
from gateway.load import Share
from gateway.tenants.access import Caller, refused_id
from gateway.views import certificate_view
from tinsmith.errors import InvalidRequest, NotFound, NotReady, OutOfCapacity, SequenceConflict, ServiceError
from tinsmith.v1 import sampler_pb2


async def create_sampling_session(
    request: Request, body: schemas.CreateSamplingSession
) -> answers.training.CreatedSampler:
    """A new sampler.

    Its weights are loaded when they are first sampled.
    """
    gateway, caller = request.gateway, request.caller
    await check_session(gateway, body.session_id, caller=caller)
    if body.base_model is None and body.model_path is None:
        raise InvalidRequest("base_model, model_path: send at least one of the two")
    # A repeat is answered even if the checkpoint is gone by now.
    made = await gateway.store.samplers.get(_id_of(body))
    if made is None:
        made = await gateway.store.samplers.add(await _sampling_session(gateway, body, caller=caller))
    # A request without a path means the base model, never an ephemeral save.
    is_same = body.model_path == made.model_path and (body.model_path is not None or not made.location)
    if not is_same or body.base_model not in (None, made.base_model):
        what = made.model_path or made.location or made.base_model
        raise SequenceConflict(f"sampling_session_seq_id: {made.sampling_session_id} samples from {what}")
    return {"type": "create_sampling_session", "sampling_session_id": made.sampling_session_id}


def _id_of(body: schemas.CreateSamplingSession) -> str:
    return sampling_session_id_of(body.session_id, body.sampling_session_seq_id)


async def _sampling_session(
    gateway: Gateway, body: schemas.CreateSamplingSession, *, caller: Caller
) -> SamplingSession:
    limit = gateway.config.max_sampling_sessions
    if not await gateway.store.samplers.take_place(caller.owner, limit=limit):
        raise OutOfCapacity(
            f"{caller.owner!r} has {limit} sampling sessions, which is max_sampling_sessions; those of ended sessions "
            "are forgotten after a while"
        )
    base_model, version_id, location, inflight_run_id = body.base_model, "", "", None
    if body.model_path is not None:
        checkpoint = await gateway.storage.checkpoints.read(
            body.model_path, field="model_path", caller=caller, purpose="sample"
        )
        version_id, location = checkpoint.version_id, checkpoint.location
        inflight_run_id = checkpoint.run_id if checkpoint.inflight else None
        base_model = base_model or checkpoint.base_model
        if not gateway.clients.are_same(base_model, checkpoint.base_model):
            raise InvalidRequest(
                f"base_model: {base_model!r} is not that of {body.model_path}, {checkpoint.base_model!r}"
            )
    assert base_model is not None
    await gateway.clients.settle(
        lambda: gateway.clients.samplers.check_sampled(base_model), timeout_s=gateway.config.submit_timeout_s
    )
    return SamplingSession(
        sampling_session_id=_id_of(body),
        session_id=body.session_id,
        base_model=base_model,
        model_path=body.model_path,
        version_id=version_id,
        location=location,
        created_at=time.time(),
        inflight_run_id=inflight_run_id,
    )


async def join_sampling_session(request: Request, body: schemas.JoinSamplingSession) -> answers.training.JoinedSampler:
    """One more client of a sampler.

    Answers the client's number; its seq_ids begin at 10**9 times this number.
    """
    gateway = request.gateway
    sampling_session_id = body.sampling_session_id
    await _living_session(gateway, sampling_session_id, caller=request.caller)
    client_counter = await gateway.store.samplers.join(sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": client_counter}


async def _living_session(gateway: Gateway, sampling_session_id: str, *, caller: Caller) -> SamplingSession:
    session = await gateway.tenants.access.sampling_session(sampling_session_id, caller)
    if session is None or not gateway.store.samplers.lives(sampling_session_id):
        name = repr(sampling_session_id)
        what = f"there is no {name}" if session is None else f"the session of {name} has ended"
        raise NotFound(f"sampling_session_id: {what}")
    return session


async def get_sampler(request: Request) -> answers.training.SamplerFacts:
    """The weights of a sampler."""
    sampler_id = request.path_params["sampling_session_id"]
    row = await request.gateway.tenants.access.sampling_session(sampler_id, request.caller)
    if row is None:
        raise HTTPException(404, f"there is no sampler {sampler_id!r}")
    return {"sampler_id": sampler_id, "base_model": row.base_model, "model_path": row.model_path}


async def certificate(request: Request) -> answers.checkpoints.Certificate:
    """Certificate of a sampler's version: how far the samplers are from the trainer.

    Tinsmith's own endpoint. The version is the one that a sample would be drawn from now.
    """
    gateway = request.gateway
    sampler_id = request.path_params["sampling_session_id"]
    session = await gateway.tenants.access.sampling_session(sampler_id, request.caller)
    if session is None:
        raise HTTPException(404, f"there is no sampler {sampler_id!r}")
    return certificate_view(await gateway.sampling.certificates.of_sampler(session))


async def _named(gateway: Gateway, content: dict[str, Any], *, caller: Caller) -> dict[str, Any]:
    """The content of a sample, with a sampling session and a seq_id added if it has none."""
    given = parse_ids(schemas.GivenSampleIds, content)
    sampling_session_id = given.sampling_session_id
    if sampling_session_id is None:
        if given.base_model is None and given.model_path is None:
            raise InvalidRequest("sampling_session_id, model_path, base_model: send one of them")
        version_id = ""
        if given.model_path is not None:
            find = gateway.storage.checkpoints.find
            version_id = (await find(given.model_path, field="model_path", caller=caller)).version_id

        async def make(session_id: str, number: int) -> SamplingSession:
            body = schemas.CreateSamplingSession(
                session_id=session_id,
                sampling_session_seq_id=number,
                base_model=given.base_model,
                model_path=given.model_path,
            )
            return await _sampling_session(gateway, body, caller=caller)

        weights = (given.base_model, given.model_path, version_id)
        sampling_session_id = await gateway.sampling.unnamed.sampling_session(weights, caller, make)
        content = {**content, "sampling_session_id": sampling_session_id, "base_model": None, "model_path": None}
    if given.seq_id is None:
        session = await gateway.tenants.access.sampling_session(sampling_session_id, caller)
        is_own = session is not None and gateway.store.samplers.lives(sampling_session_id)
        # A session that cannot be sampled from is refused later, with any seq_id.
        seq_id = await gateway.sampling.unnamed.seq_id(sampling_session_id) if is_own else 0
        content = {**content, "seq_id": seq_id}
    return content


async def asample(request: Request) -> answers.training.SampleReceipt | Response:
    """Samples.

    Idempotent by sampling_session_id and seq_id if they are given.
    """
    gateway, caller = request.gateway, request.caller
    gateway.sampling.places.check(caller.owner)
    content = await request.json_object()
    content = await _named(gateway, content, caller=caller)
    ids = parse_ids(schemas.SampleIds, content)
    well_formed = is_sampling_session(ids.sampling_session_id)
    is_own = well_formed and await gateway.tenants.access.owns(ids.sampling_session_id, caller)
    request_id = request_id_of(ids.sampling_session_id, ids.seq_id) if is_own else ""
    if (elsewhere := await pass_on(request, request_id, is_new=True)) is not None:
        return elsewhere
    has_home = False
    try:
        session = await _living_session(gateway, ids.sampling_session_id, caller=caller)
        has_home = True
        await gateway.sampling.completions.reserve(request_id)
        if named := list(pointers_of_prompt(content)):
            await gateway.assets.fill(named, request.state.body_share)
        num_bytes, config = len(request.raw), gateway.config
        async with request.turn(num_bytes):
            message, is_recorded, mark = await off_loop(
                partial(_message_of, content, version_id=session.version_id, max_num_samples=config.max_num_samples),
                num_bytes=num_bytes,
                config=config,
            )
        hold = None
        # This share outlives the request, because the sample may have to be sent again.
        body_share = Share(gateway.bodies, caller.owner, beside=request.state.body_share)
        if gateway.futures.fingerprint(request_id) is None:
            body_share.take(convert.held_bytes(message))
            try:
                hold = gateway.tenants.limits.sample(caller, message, base_model=session.base_model)
            except ServiceError:
                body_share.release()
                raise
    except (NotReady, OutOfCapacity):
        raise  # the SDK sends it again
    except ServiceError as error:
        mark = fingerprint(request.raw)
        if not has_home:  # the id may belong to another owner, and the client may ask any gateway for the answer
            return _receipt(refused_id(caller, error), num_sequences=0)
        if gateway.futures.fingerprint(request_id) not in (None, mark):
            what = f"{request_id} was used by another sample before; this one was not run ({error})"
            raise SequenceConflict(what) from error
        gateway.futures.fail(request_id, error, fingerprint=mark)
        return _receipt(request_id, num_sequences=0)
    message.cache_salt = caller.cache_salt
    gateway.sampling.samples.submit(
        request_id,
        message,
        session=session,
        fingerprint=mark,
        is_recorded=is_recorded,
        hold=hold,
        body_share=body_share,
    )
    return _receipt(request_id, num_sequences=message.num_samples)


def _message_of(
    content: dict[str, Any], *, version_id: str, max_num_samples: int
) -> tuple[sampler_pb2.SampleRequest, bool, str]:
    """The sampler's request, whether records of the sample are wanted, and the fingerprint of both."""
    body = parse(schemas.Sample, content)
    if body.num_samples > max_num_samples:
        raise InvalidRequest(
            f"num_samples: {body.num_samples} is above this server's max_num_samples {max_num_samples}"
        )
    message = convert.sample_request(body, version_id=version_id)
    recorded = "recorded" if body.record_stability_info else ""
    mark = fingerprint(message.SerializeToString(deterministic=True), recorded)
    return message, bool(recorded), mark


def _receipt(request_id: str, *, num_sequences: int) -> answers.training.SampleReceipt:
    sequence_ids = [f"{request_id}:{i}" for i in range(num_sequences)]
    return {"request_id": request_id, "model_id": None, "sample_sequence_ids": sequence_ids}


routes = [
    POST("/create_sampling_session", create_sampling_session, errors=(404, 422, 503)),
    POST("/join_sampling_session", join_sampling_session, errors=(404,)),
    GET("/samplers/{sampling_session_id}", get_sampler, errors=(404,)),
    GET("/samplers/{sampling_session_id}/certificate", certificate, errors=(400, 404, 503)),
    POST("/asample", asample, errors=(422, 429, 503), takes=schemas.Sample),
]
