"""Calls of samplers for the OpenAI API: straight to gRPC, without a future.

A sampler that is away or full is waited for a while; a version that it does not hold is published to it. What has been
generated is counted, also when the client leaves in the middle, which stops the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from gateway.clients import Clients, Sampler, is_lost
from gateway.config import GatewayConfig
from gateway.futures import Progress
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.openai.text import Vocabulary
from gateway.samples import Pause, Samples
from gateway.tables import SamplingSession
from tinsmith.rpc.errors import NotReady, OutOfCapacity, ServiceError, VersionNotLoaded, from_rpc_error
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.v1 import sampler_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """What is sampled from."""

    name: str
    """As the client calls it."""
    base_model: str
    owner: str
    """Whose request it is."""
    version_id: str = ""
    """Empty for the base model."""
    location: str = ""
    """Where the trainer finds the version again."""

    def session(self) -> SamplingSession:
        """Of no client; it is not stored."""
        return SamplingSession(base_model=self.base_model, version_id=self.version_id, location=self.location)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]


class Generator:
    def __init__(
        self, config: GatewayConfig, *, clients: Clients, samples: Samples, ledger: Ledger, metrics: Metrics
    ) -> None:
        self._config = config
        self._clients = clients
        self._samples = samples
        self._ledger = ledger
        self._metrics = metrics
        self.known_versions: set[str] = set()
        """Those that have been sampled here; whether they may be was checked then."""
        self.num_running = 0
        self._tokenizers: dict[str, asyncio.Task[TokenizerInfo]] = {}  # by boot_id

    # Text

    async def tokenizer(self, source: Source) -> TokenizerInfo:
        """Of the base model; asked for once of each sampler process."""
        sampler = await self._sampler(source)
        boot_id = sampler.info.boot_id if sampler.info is not None else ""
        if boot_id not in self._tokenizers:
            self._tokenizers[boot_id] = asyncio.create_task(self._load_tokenizer(source))
        try:
            return await asyncio.shield(self._tokenizers[boot_id])
        except Exception:
            self._tokenizers.pop(boot_id, None)  # another request may have more luck
            raise

    async def _load_tokenizer(self, source: Source) -> TokenizerInfo:
        request = pb.GetTokenizerRequest()
        reply = await self._ask(source, lambda sampler: sampler.stub.GetTokenizer(request))
        vocabulary = await asyncio.to_thread(Vocabulary, reply.tokenizer_json)
        return TokenizerInfo(vocabulary, tuple(reply.eos_token_ids))

    async def tokenize(self, source: Source, request: pb.TokenizeRequest) -> bytes:
        """int32 tokens, little endian."""
        reply = await self._ask(source, lambda sampler: sampler.stub.Tokenize(request))
        return reply.tokens

    # Samples

    def check_capacity(self) -> None:
        """Raises OutOfCapacity when too many requests are in work."""
        if self.num_running >= self._config.max_pending_samples:
            raise OutOfCapacity(
                f"{self._config.max_pending_samples} requests are in work, which is max_pending_samples; try again"
            )

    async def sample(self, source: Source, request: pb.SampleRequest, *, request_id: str) -> pb.SampleResponse:
        metadata = ((REQUEST_ID_METADATA, request_id),)
        with self._running():
            response = await self._ask(source, lambda sampler: sampler.stub.Sample(request, metadata=metadata))
        num_sampled = sum(len(sequence.tokens) // 4 for sequence in response.sequences)
        self._count(source, request, num_sampled=num_sampled, num_cached=response.prompt_cache_hit_tokens)
        return response

    @contextlib.asynccontextmanager
    async def stream(
        self, source: Source, request: pb.SampleRequest, *, request_id: str
    ) -> AsyncIterator[AsyncIterator[pb.StreamSampleResponse]]:
        """Deltas, then the result. Once it is entered, the sampler has begun; leaving it stops the sampler."""
        metadata = ((REQUEST_ID_METADATA, request_id),)
        asked = pb.StreamSampleRequest(request=request)
        num_sampled = num_cached = 0

        async def begin(sampler: Sampler) -> tuple[Sampler, Any, pb.StreamSampleResponse]:
            call = sampler.stub.StreamSample(asked, metadata=metadata)
            try:
                first = await call.read()
                if first is grpc.aio.EOF:
                    await call.wait_for_connection()
                    raise ServiceError("the sampler ended a stream without an answer")
            except BaseException:
                call.cancel()
                raise
            return sampler, call, first

        async def pieces() -> AsyncIterator[pb.StreamSampleResponse]:
            nonlocal num_sampled, num_cached
            piece = first
            while piece is not grpc.aio.EOF:
                num_sampled += len(piece.delta.tokens) // 4
                num_cached = max(num_cached, piece.result.prompt_cache_hit_tokens)
                yield piece
                try:
                    piece = await call.read()
                except grpc.aio.AioRpcError as error:
                    raise _meaning(error) from error

        with self._running():
            sampler, call, first = await self._ask(source, begin)
            sampler.num_running += 1
            try:
                yield pieces()
            finally:
                sampler.num_running -= 1
                call.cancel()
                self._count(source, request, num_sampled=num_sampled, num_cached=num_cached)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def _count(self, source: Source, request: pb.SampleRequest, *, num_sampled: int, num_cached: int) -> None:
        num_prompt = sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt)
        self._metrics.prompt_tokens.inc(num_prompt)
        self._metrics.sampled_tokens.inc(num_sampled)
        whose: Mapping[str, Any] = {"base_model": source.base_model, "owner": source.owner}
        self._ledger.use("sampling_prefill", num_prompt - num_cached, **whose)
        self._ledger.use("sampling_prefill_cached", num_cached, **whose)
        self._ledger.use("sampling_sample", num_sampled, **whose)

    # Waiting

    async def _sampler(self, source: Source) -> Sampler:
        """Raises NotReady when none comes in time."""
        try:
            async with asyncio.timeout(self._config.openai_wait_s):
                return await self._clients.sampler(source.base_model)
        except TimeoutError:
            raise NotReady(f"no sampler of {source.base_model!r} can be reached; try again") from None

    async def _ask(self, source: Source, call: Callable[[Sampler], Any]) -> Any:
        """The answer of a sampler. After openai_wait_s in vain it raises what stands in the way: NotReady or
        OutOfCapacity."""
        give_up_at = time.monotonic() + self._config.openai_wait_s
        pause = Pause()
        while True:
            sampler = await self._sampler(source)
            sampler.num_running += 1
            try:
                return await call(sampler)
            except grpc.aio.AioRpcError as error:
                cause = _meaning(error)
            finally:
                sampler.num_running -= 1
            remaining_s = give_up_at - time.monotonic()
            if isinstance(cause, VersionNotLoaded):
                published = await self._publish(source, timeout_s=remaining_s)
                cause = NotReady(f"the weights of {source.name} cannot be sent to the sampler now; try again")
                if published and remaining_s > 0:
                    continue
            elif not isinstance(cause, NotReady | OutOfCapacity):
                raise cause
            if remaining_s <= 0:
                raise cause
            await pause.wait()

    async def _publish(self, source: Source, *, timeout_s: float) -> bool:
        """False when it cannot be done now. Raises what the trainer says when it never will."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await self._samples.publish(source.session(), progress=Progress())
        except TimeoutError:
            return False


def _meaning(error: grpc.aio.AioRpcError) -> ServiceError:
    return NotReady(error.details() or "the sampler went away") if is_lost(error) else from_rpc_error(error)
