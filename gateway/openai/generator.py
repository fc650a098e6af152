"""Calls of samplers for the OpenAI API: directly over gRPC, without a future.

A request goes to another sampler when one is unreachable or full, and waits for a while when there is none. A version
that no sampler holds is published. When a client leaves, its generation is stopped. The tokens that a stream has sent
by then are counted; for an answer in one piece the gateway has received nothing, and counts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc.aio
from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.dashboard.samples import RecentSamples
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import Progress
from gateway.metrics import Metrics
from gateway.openai.resumption import resumed, with_seed
from gateway.openai.text import Vocabulary
from gateway.openai.tool_calls import Form
from gateway.sampling.publishing import Publishing
from gateway.sampling.replicas import Replica
from gateway.sampling.samples import check_pending
from gateway.sampling.tries import Tries
from gateway.tenants.caller import Caller
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Hold, Limits
from gateway.turns import Turns
from tinsmith.rpc.errors import NotReady, OutOfCapacity, ServiceError, VersionNotLoaded
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.v1 import sampler_pb2 as pb

T = TypeVar("T")
_FORMS: Mapping[int, Form] = {pb.TOOL_CALL_FORMAT_HERMES: "hermes", pb.TOOL_CALL_FORMAT_LLAMA3: "llama3"}
_MAX_SAMPLED = 100_000
"""Most entries of `Generator._sampled`. A forgotten entry is written into the audit log once more."""


@dataclass(frozen=True, slots=True)
class Source:
    """The weights of a request, and its owner."""

    name: str
    """The client's name of the model."""
    base_model: str
    owner: str
    """Owner of the request."""
    version_id: str = ""
    """Empty for the base model."""
    location: str = ""
    """Location of the version at the trainer."""
    follow_run: str = ""
    """The run whose newer versions a generation moves to; empty for a fixed version."""
    caller: Caller | None = None
    """The caller whose budget and rates the request counts against; None: it counts against none."""

    def session(self) -> SamplingSession:
        """A sampling session with these weights, which is not stored."""
        return SamplingSession(base_model=self.base_model, version_id=self.version_id, location=self.location)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The tokenizer of a base model."""

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    tool_calls: Form | None = None
    """Form in which the model writes calls of tools; None when its chat template has no known form."""


class Generator:
    """Samples, tokenizes and reads tokenizers for the OpenAI API."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clients: Clients,
        publishing: Publishing,
        ledger: Ledger,
        limits: Limits,
        recent: RecentSamples,
        metrics: Metrics,
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._config = config
        self._clients = clients
        self._publishing = publishing
        self._ledger = ledger
        self._limits = limits
        self._recent = recent
        self._metrics = metrics
        self._sampled: LRUCache[tuple[str, str], None] = LRUCache(_MAX_SAMPLED)
        """Pairs of an owner and a version that the owner has sampled here."""
        self._running_of: Counter[str] = Counter()
        """owner -> prompts in work."""
        self._tokenizers: dict[str, asyncio.Task[TokenizerInfo]] = {}
        """boot_id of a known sampler -> its tokenizer."""
        self._vocabularies: WeakValueDictionary[bytes, Vocabulary] = WeakValueDictionary()
        """Digest of a tokenizer -> its vocabulary, which all samplers of a base model share."""

    def is_first(self, owner: str, version_id: str) -> bool:
        """Whether the owner samples the version for the first time. Only then the audit log gets an entry."""
        is_new = (owner, version_id) not in self._sampled
        self._sampled[owner, version_id] = None
        return is_new

    # Text

    async def tokenizer(self, source: Source) -> TokenizerInfo:
        """The tokenizer of the base model. Each sampler process is asked once."""
        replica = await self._in_time(self._clients.sampler(source.base_model), source)
        boot_id = replica.info.boot_id if replica.info is not None else ""
        if boot_id not in self._tokenizers:
            self._tokenizers[boot_id] = asyncio.create_task(self._load_tokenizer(source))
        try:
            return await asyncio.shield(self._tokenizers[boot_id])
        except Exception:
            self._tokenizers.pop(boot_id, None)  # another request may succeed
            raise

    async def _load_tokenizer(self, source: Source) -> TokenizerInfo:
        reply = await self._ask_of_text(source, lambda replica: replica.stub.GetTokenizer(pb.GetTokenizerRequest()))
        digest = sha256(reply.tokenizer_json.encode()).digest()
        vocabulary = self._vocabularies.get(digest) or await asyncio.to_thread(Vocabulary, reply.tokenizer_json)
        vocabulary = self._vocabularies.setdefault(digest, vocabulary)
        living = {replica.info.boot_id for replica in self._clients.samplers.all if replica.info is not None}
        for boot_id in self._tokenizers.keys() - living:
            del self._tokenizers[boot_id]
        return TokenizerInfo(vocabulary, tuple(reply.eos_token_ids), _FORMS.get(reply.tool_call_format))

    async def tokenize(self, source: Source, request: pb.TokenizeRequest) -> bytes:
        """The tokens of a text or a chat, int32, little endian."""
        reply = await self._ask_of_text(source, lambda replica: replica.stub.Tokenize(request))
        return reply.tokens

    # Samples

    async def turn(self, source: Source) -> None:
        """Waits for the owner's turn to work on a prompt."""
        await self._turns.take(source.owner)

    @property
    def num_running(self) -> int:
        return self._running_of.total()

    @contextlib.contextmanager
    def place(self, owner: str, *, num_prompts: int = 1) -> Iterator[None]:
        """Counts prompts as samples in work. Held from before the prompts are rendered to the end of the answer.

        Raises OutOfCapacity when too many samples are in work, of the owner or of all owners.
        """
        check_pending(self._config, owner, num_own=self._running_of[owner], num_all=self.num_running)
        self._running_of[owner] += num_prompts
        try:
            yield
        finally:
            self._running_of[owner] -= num_prompts
            if not self._running_of[owner]:
                del self._running_of[owner]

    async def sample(self, source: Source, request: pb.SampleRequest, *, request_id: str) -> pb.SampleResponse:
        metadata = ((REQUEST_ID_METADATA, request_id),)
        tries = Tries(self._clients.samplers, source.base_model)

        async def call(replica: Replica) -> pb.SampleResponse:
            if tries.is_suspect:
                async with aclosing(self._pieces(replica, request, request_id, tries)) as pieces:
                    return [piece.result async for piece in pieces][-1]
            async with tries.at(replica):
                sampling = replica.stub.Sample(request, metadata=metadata)
                return await self._reply(replica, sampling, weight=request.num_samples)

        with self._holding_budget(source, request) as hold:
            response = await self._ask(source, call, request, tries=tries)
            self._remember(source, request, response, request_id)
            num_sampled = sum(len(sequence.tokens) // 4 for sequence in response.sequences)
            num_cached = response.prompt_cache_hit_tokens
            await self._count(source, request, hold, num_sampled=num_sampled, num_cached=num_cached)
        return response

    @contextlib.asynccontextmanager
    async def stream(
        self, source: Source, request: pb.SampleRequest, *, request_id: str
    ) -> AsyncIterator[AsyncIterator[pb.StreamSampleResponse]]:
        """A stream of deltas, and then the result.

        When the context is entered, a sampler has begun; leaving the context stops it. When the sampler is lost in the
        middle, another one goes on.
        """
        num_sampled = num_cached = 0
        is_counted = False
        opened = contextlib.AsyncExitStack()
        tries = Tries(self._clients.samplers, source.base_model)

        async def begin() -> AsyncIterator[pb.StreamSampleResponse]:
            first, rest = await self._ask(
                source, lambda replica: self._begin(replica, request, request_id, tries), request, tries=tries
            )
            opened.push_async_callback(rest.aclose)
            return _chain(first, rest)

        async def again(lost: NotReady) -> AsyncIterator[pb.StreamSampleResponse]:
            await opened.aclose()
            await tries.next()
            return await begin()

        async def pieces(first_try: AsyncIterator[pb.StreamSampleResponse]) -> AsyncIterator[pb.StreamSampleResponse]:
            nonlocal num_sampled, num_cached
            async for piece in resumed(first_try, again, num_samples=request.num_samples):
                num_sampled += len(piece.delta.tokens) // 4
                num_cached = max(num_cached, piece.result.prompt_cache_hit_tokens)
                self._remember(source, request, piece.result, request_id)
                if piece.HasField("result"):
                    await count()
                yield piece

        async def count() -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                await self._count(source, request, hold, num_sampled=num_sampled, num_cached=num_cached)

        with self._holding_budget(source, request) as hold:
            with_seed(request)
            try:
                yield pieces(await begin())
            finally:
                await opened.aclose()
                await count()

    async def _begin(
        self, replica: Replica, request: pb.SampleRequest, request_id: str, tries: Tries
    ) -> tuple[pb.StreamSampleResponse, AsyncGenerator[pb.StreamSampleResponse, None]]:
        """The first piece of a stream, and the others."""
        pieces = self._pieces(replica, request, request_id, tries)
        try:
            first = await anext(pieces, None)
            if first is None:
                raise ServiceError("the sampler ended a stream without an answer")
        except BaseException:
            await pieces.aclose()
            raise
        return first, pieces

    async def _pieces(
        self, replica: Replica, request: pb.SampleRequest, request_id: str, tries: Tries
    ) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        asked = pb.StreamSampleRequest(request=request)
        async with tries.at(replica) as begun:
            call = replica.stub.StreamSample(asked, metadata=((REQUEST_ID_METADATA, request_id),))
            try:
                with self._holding(replica, call, weight=request.num_samples):
                    while (piece := await call.read()) is not grpc.aio.EOF:
                        begun()
                        yield piece
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _holding_budget(self, source: Source, request: pb.SampleRequest) -> Iterator[Hold | None]:
        """Reserves what the request may use of budgets while it is in work. Raises RateLimited and BudgetExceeded."""
        hold = None
        if source.caller is not None:
            hold = self._limits.sample(source.caller, request, base_model=source.base_model)
        try:
            yield hold
        finally:
            if hold is not None:
                hold.release()

    def _remember(
        self, source: Source, request: pb.SampleRequest, response: pb.SampleResponse, request_id: str
    ) -> None:
        if response.sequences:
            self._recent.add(request_id, request, response.sequences, base_model=source.base_model, owner=source.owner)

    async def _count(
        self, source: Source, request: pb.SampleRequest, hold: Hold | None, *, num_sampled: int, num_cached: int
    ) -> None:
        num_prompt = sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt)
        self._metrics.submissions.prompt_tokens.inc(num_prompt)
        self._metrics.submissions.cached_prompt_tokens.inc(num_cached)
        self._metrics.submissions.sampled_tokens.inc(num_sampled)
        whose: Mapping[str, Any] = {
            "base_model": source.base_model,
            "owner": source.owner,
            "key_id": source.caller.key_id if source.caller is not None else "",
        }
        if source.caller is not None:
            self._limits.took(source.caller.key_id, num_sampled)
        self._ledger.use("sampling_prefill", num_prompt - num_cached, **whose)
        self._ledger.use("sampling_prefill_cached", num_cached, **whose)
        self._ledger.use("sampling_sample", num_sampled, **whose)
        if hold is None:
            return
        hold.release()  # the tokens are counted now; held as well, they would count twice
        if hold.is_budgeted:
            with contextlib.suppress(SQLAlchemyError):  # the answer goes out; the ledger logs the error and tries again
                await self._ledger.flush()

    # Waiting

    async def _in_time(self, replica: Awaitable[Replica], source: Source) -> Replica:
        """Waits for a replica. Raises NotReady when there is none within `openai_wait_s`."""
        try:
            async with asyncio.timeout(self._config.openai_wait_s):
                return await replica
        except TimeoutError:
            raise NotReady(f"no sampler of {source.base_model!r} can be reached; try again") from None

    @contextlib.contextmanager
    def _holding(self, replica: Replica, call: Any, *, weight: int = 1) -> Iterator[None]:
        """Counts the call as the replica's work. Raises the call's error as ServiceError."""
        samplers = self._clients.samplers
        try:
            with samplers.holding(replica, call, weight=weight):
                yield
        except NotReady:
            samplers.lost(replica)
            raise

    async def _reply(self, replica: Replica, call: Any, *, weight: int = 1) -> Any:
        with self._holding(replica, call, weight=weight):
            return await call

    async def _ask_of_text(self, source: Source, start: Callable[[Replica], Any]) -> Any:
        """The reply to a call about text. No engine computes it, but it, too, may kill a sampler."""
        tries = Tries(self._clients.samplers, source.base_model)

        async def call(replica: Replica) -> Any:
            async with tries.at(replica):
                return await self._reply(replica, start(replica))

        return await self._ask(source, call, tries=tries)

    async def _ask(
        self,
        source: Source,
        call: Callable[[Replica], Awaitable[T]],
        request: pb.SampleRequest | None = None,
        *,
        tries: Tries,
    ) -> T:
        """Calls samplers until one answers. `request`: routes the call; None: any sampler will do.

        Raises NotReady or OutOfCapacity, the last cause, when none has answered within `openai_wait_s`.
        """
        give_up_at = time.monotonic() + self._config.openai_wait_s
        while True:
            replica = await self._in_time(tries.route(request), source)
            await self.turn(source)  # a request may have a thousand prompts; beginning a call takes a millisecond
            if request is not None:
                self._publishing.top_up(source.session())
            try:
                return await call(replica)
            except (NotReady, OutOfCapacity, VersionNotLoaded) as error:
                cause = error
            remaining_s = give_up_at - time.monotonic()
            if isinstance(cause, VersionNotLoaded):
                provided = await self._provide(source, replica, timeout_s=remaining_s)
                cause = NotReady(f"the weights of {source.name} cannot be sent to the sampler now; try again")
                if provided and remaining_s > 0:
                    await tries.provided()
                    continue
            if remaining_s <= 0:
                raise cause
            await tries.next()

    async def _provide(self, source: Source, replica: Replica, *, timeout_s: float) -> bool:
        """Has the version published. False when it cannot be done now. Raises the trainer's error when it never can."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await self._publishing.provide(source.session(), replica, progress=Progress())
        except TimeoutError:
            return False


async def _chain(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item
