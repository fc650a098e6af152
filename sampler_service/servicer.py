"""SamplerService over gRPC. Each RPC parses its request, makes one call of the engine, and replies."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import grpc.aio

from sampler_service import convert, large
from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.core.request import Generation, Result
from sampler_service.core.trial import Trial
from sampler_service.core.versions import VersionInfo
from sampler_service.tokenizer import ChatTokenizer, TokenizerSlot
from tinsmith.errors import InvalidRequest, NotFound, ServiceError, within
from tinsmith.lora_config import config_to_proto
from tinsmith.model_input import has_pictures
from tinsmith.modeling.adapter import groups_of
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.auth import ALONE, PROMPT_ALONE, KeyRing, given_key
from tinsmith.rpc.message_memory import is_taken_over
from tinsmith.rpc.server import RAN
from tinsmith.rpc.words import value_of
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import sampler_pb2_grpc, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 1000
_MANY_TOKENS = 65_536
"""An answer of more sampled tokens is made on a thread, because each token takes 60 ns."""
_TEXTS_AT_ONCE = 2
"""Texts of one key that wait or are converted; further ones wait for these. One text is converted at a time."""


class SamplerServicer(sampler_pb2_grpc.SamplerServiceServicer):
    def __init__(self, config: SamplerConfig, slot: EngineSlot, tokenizer: TokenizerSlot) -> None:
        self.slot = slot
        self.tokenizer = tokenizer
        self._config = config
        self.boot_id = uuid4().hex
        self._texts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Name of a caller's key -> places for the caller's texts."""
        self._admins = KeyRing(config.admin_keys) if config.accepted_keys else None
        """Keys of callers who send others' requests, as gateways do; None if nobody needs a key."""

    async def GetSamplerInfo(self, request: pb.GetSamplerInfoRequest, context: Context) -> pb.GetSamplerInfoResponse:
        engine = self.slot.get()
        return pb.GetSamplerInfoResponse(
            base_models=self._config.model_names,
            max_context_length=engine.limits.max_length,
            max_lora_rank=self._config.max_lora_rank,
            max_version_bytes=self._config.adapter_memory_bytes,
            vocab_size=engine.limits.vocab_size,
            max_running=engine.max_running,
            engine=engine.name,
            device=engine.device,
            boot_id=self.boot_id,
            adapter_groups=[value_of(types_pb2.AdapterGroup, group) for group in groups_of(engine.targets)],
        )

    async def Sample(self, request: pb.SampleRequest, context: Context) -> pb.SampleResponse:
        arrived_at = time.time()
        with _failure_logged(request):
            async with self._submitted(request, context, stream=False) as generation:
                result = await generation.result()
        _record(request, generation, result, arrived_at)
        if generation.started_at is not None:
            context.set_trailing_metadata(((RAN, f"{generation.started_at:.6f}:{time.time():.6f}"),))
        return await _response(result, request)

    async def StreamSample(
        self, request: pb.StreamSampleRequest, context: Context
    ) -> AsyncIterator[pb.StreamSampleResponse]:
        arrived_at = time.time()
        with within("request"), _failure_logged(request.request):
            async with self._submitted(request.request, context, stream=True) as generation:
                async with aclosing(generation.deltas()) as deltas:
                    async for delta in deltas:
                        news = convert.delta_to_proto(delta) if delta.tokens else None
                        yield pb.StreamSampleResponse(delta=news)
                        if generation.trial is not None:  # the caller has the first piece
                            generation.trial.end()
                result = await generation.result()
        _record(request.request, generation, result, arrived_at)
        yield pb.StreamSampleResponse(result=await _response(result, request.request))

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Context) -> pb.DescribeRequestResponse:
        if not request.request_id:
            raise InvalidRequest("request_id: is empty; it is the x-request-id of a call", field="request_id")
        status = self.slot.get().describe(request.request_id)
        if status is None:
            raise NotFound(
                f"no Sample or StreamSample with the x-request-id {request.request_id!r} waits or runs here",
                request_id=request.request_id,
            )
        return pb.DescribeRequestResponse(status=convert.status_to_proto(status))

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> pb.GetTokenizerResponse:
        eos_token_ids = sorted(self.slot.get().eos_token_ids)
        async with self._turn(context):
            return await self.tokenizer.run(
                lambda tokenizer: pb.GetTokenizerResponse(
                    tokenizer_json=tokenizer.json,
                    has_chat_template=tokenizer.has_chat_template,
                    eos_token_ids=eos_token_ids,
                    tool_call_format=value_of(pb.ToolCallFormat, tokenizer.tool_call_format or ""),
                )
            )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        special = request.add_special_tokens
        match request.WhichOneof("input"):
            case "text":
                work = partial(ChatTokenizer.tokens, text=request.text, add_special_tokens=special)
            case "chat" if special:
                raise InvalidRequest(
                    "add_special_tokens: is for text; a chat has the special tokens of its template",
                    field="add_special_tokens",
                )
            case "chat":
                work = partial(ChatTokenizer.chat_tokens, chat=convert.chat_from_proto(request.chat))
            case _:
                raise InvalidRequest("input: needs a text or a chat", field="input")
        with within("chat") if request.WhichOneof("input") == "chat" else nullcontext():
            async with self._turn(context):
                return convert.tokens_to_proto(await self.tokenizer.run(work))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        if request.page_size < 0:
            raise InvalidRequest(f"page_size: {request.page_size} is below 0", field="page_size")
        versions = self.slot.get().store.versions()
        # The token is the last id of the page before, so that a version that leaves meanwhile moves nothing.
        first = bisect.bisect_right([version.version_id for version in versions], request.page_token)
        page = versions[first : first + (request.page_size or DEFAULT_PAGE_SIZE)]
        more = first + len(page) < len(versions)
        return pb.ListVersionsResponse(
            versions=[_version(version) for version in page],
            next_page_token=page[-1].version_id if more else "",
        )

    async def MoveGenerations(self, request: pb.MoveGenerationsRequest, context: Context) -> pb.MoveGenerationsResponse:
        for field in ("run_id", "version_id"):
            if not getattr(request, field):
                raise InvalidRequest(f"{field}: is empty", field=field)
        num_sequences = await self.slot.get().move(request.run_id, request.version_id)
        return pb.MoveGenerationsResponse(num_sequences=num_sequences)

    @asynccontextmanager
    async def _turn(self, context: Context) -> AsyncIterator[None]:
        """A context of a call about text, which has the sampler to itself if the caller asks for that."""
        room, owner = self.slot.get().requests.room, self._owner(context)
        if owner is not None:
            async with self._texts.setdefault(owner, asyncio.Semaphore(_TEXTS_AT_ONCE)), room.beside_others():
                yield
        elif not _is_alone(context):
            async with room.beside_others():
                yield
        else:
            async with room.alone():
                await context.send_initial_metadata((ALONE,))
                yield

    @asynccontextmanager
    async def _submitted(
        self, request: pb.SampleRequest, context: Context, *, stream: bool
    ) -> AsyncIterator[Generation]:
        """A context with the generation, which has the sampler to itself, to its end or until its first token, if the
        caller asks for that."""
        room = self.slot.get().requests.room
        if _is_alone(context):
            async with room.alone():
                await context.send_initial_metadata((ALONE,))
                yield await self._submit(request, context, stream=stream)
        else:
            asks_for_trial = PROMPT_ALONE in tuple(context.invocation_metadata() or ())
            on_trial = stream and asks_for_trial and self._owner(context) is None
            async with room.beside_others():
                generation = await self._submit(request, context, stream=stream, on_trial=on_trial)
            if generation.trial is None:
                yield generation  # a stream's reader may be slow; the engine counts the request until it has ended
            else:
                async with self._tried(generation, generation.trial, context):
                    yield generation

    @asynccontextmanager
    async def _tried(self, generation: Generation, trial: Trial, context: Context) -> AsyncIterator[None]:
        """A context in which the prompt is computed alone, once its turn has come and the caller has been told."""
        try:
            try:
                if await trial.granted():
                    room = self.slot.get().requests.room
                    trial.at_end(room.reopen)
                    if await room.hold():
                        await context.send_initial_metadata((PROMPT_ALONE,))
                    trial.begin()
            except asyncio.CancelledError:
                generation.cancel()
                raise
            yield
        finally:
            trial.end()

    async def _submit(
        self, request: pb.SampleRequest, context: Context, *, stream: bool, on_trial: bool = False
    ) -> Generation:
        engine = self.slot.get()
        read = partial(
            convert.request_from_proto,
            request,
            processor=engine.processor,
            why_no_pictures=engine.why_no_pictures,
            max_tokens=engine.limits.max_length,
            owner=self._owner(context),
        )
        asked = await large.run(read) if _may_be_large(request) else read()
        if on_trial:
            asked = replace(asked, on_trial=True)
        generation = await self.slot.get().submit(asked, stream=stream, request_id=logs.request_id.get())
        is_taken_over()  # the engine counts the memory of requests that wait or run
        return generation

    def _owner(self, context: Context) -> str | None:
        """A name for the caller's key; None for a caller who sends others' requests."""
        metadata = tuple(context.invocation_metadata() or ())
        key = given_key({name: value for name, value in metadata if isinstance(value, str)})
        if self._admins is None or self._admins.find(key) is not None:
            return None
        return hashlib.sha256(key.encode()).hexdigest()[:32]


def _is_alone(context: Context) -> bool:
    return ALONE in tuple(context.invocation_metadata() or ())


async def _response(result: Result, request: pb.SampleRequest) -> pb.SampleResponse:
    write = partial(convert.response_to_proto, result, request)
    num_sampled = sum(len(sequence.tokens) for sequence in result.sequences)
    return await large.run(write) if num_sampled > _MANY_TOKENS or _may_be_large(request) else write()


def _may_be_large(request: pb.SampleRequest) -> bool:
    """Whether a message is large. Its ByteSize is not used, because that takes 0.2 s for 64 MB."""
    return request.HasField("target_prompt_logprobs") or has_pictures(request.prompt)


@contextmanager
def _failure_logged(request: pb.SampleRequest) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        logger.info("sample of %s: %s: %s", _source(request), error.reason, error.message)
        raise


def _record(request: pb.SampleRequest, generation: Generation, result: Result, arrived_at: float) -> None:
    """Logs the end of a request, and records for tracing how long it has waited and how long it was computed."""
    ended_at = time.time()
    logger.info(
        "sample of %s: ok, %d tokens in %d sequences, after %.3f s",
        _source(request),
        sum(len(sequence.tokens) for sequence in result.sequences),
        len(result.sequences),
        ended_at - arrived_at,
    )
    if (trace := tracing.current()) is not None and generation.started_at is not None:
        tracing.record("queue", trace, start=arrived_at, end=generation.started_at)
        tracing.record("generate", trace, start=generation.started_at, end=ended_at)


def _source(request: pb.SampleRequest) -> str:
    return f"version {request.version_id!r}" if request.version_id else "the base model"


def _version(version: VersionInfo) -> pb.VersionInfo:
    return pb.VersionInfo(
        version_id=version.version_id,
        lora_config=config_to_proto(version.config),
        size_bytes=version.num_bytes,
        num_running=version.num_running,
    )
