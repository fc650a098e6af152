"""Calls of samplers for the OpenAI API: directly over gRPC, without a future.

A request waits `openai_wait_s` for a sampler (sampling/drawing.py). When a client leaves, its generation is stopped.
The tokens that a stream has sent by then are counted; for an answer in one piece the gateway has received nothing, and
counts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.database.tables.sessions import SamplingSession
from gateway.load import Pacer
from gateway.openai.call_forms import FORMS
from gateway.openai.resumption import resumed, with_seed
from gateway.openai.text import Vocabulary
from gateway.sampling.drawing import Drawing, Drawings
from gateway.sampling.replicas import Replica
from gateway.tenants.access import Caller
from gateway.tenants.limits import Hold, Limits
from tinsmith.errors import NotReady, ServiceError
from tinsmith.rpc.words import value_of
from tinsmith.threads import in_pool
from tinsmith.tool_calls import ToolCallFormat
from tinsmith.v1 import sampler_pb2 as pb

T = TypeVar("T")
_FORMS: Mapping[int, ToolCallFormat] = {value_of(pb.ToolCallFormat, form): form for form in FORMS}
_TEXTS_AT_ONCE = 2
"""Most texts of one owner that samplers convert at once. A sampler converts one text at a time, in the order of
arrival, and a long text takes seconds."""
_MAX_SAMPLED = 100_000
"""Most entries of `Generator._sampled`. A forgotten entry is written into the audit log once more."""


@dataclass(frozen=True, slots=True)
class Source:
    """The weights of a request, and its owner."""

    name: str
    """The client's name of the model."""
    owner: str
    """Owner of the request."""
    session: SamplingSession
    """A sampling session with these weights, which is not stored."""
    caller: Caller | None = None
    """The caller whose budget and rates the request counts against; None if it counts against none."""

    @property
    def base_model(self) -> str:
        return self.session.base_model

    @property
    def version_id(self) -> str:
        """Empty for the base model."""
        return self.session.version_id


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The tokenizer of a base model."""

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    tool_calls: ToolCallFormat | None = None
    """Form in which the model writes calls of tools; None when its chat template has no known form."""


class Generator:
    """Samples, tokenizes and reads tokenizers for the OpenAI API."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clients: Clients,
        drawings: Drawings,
        limits: Limits,
        pacer: Pacer,
    ) -> None:
        self._pacer = pacer
        self._config = config
        self._clients = clients
        self._drawings = drawings
        self._limits = limits
        self._sampled: LRUCache[tuple[str, str], None] = LRUCache(_MAX_SAMPLED)
        """Pairs of an owner and a version that the owner has sampled here."""
        self._texts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """owner -> places for the owner's texts."""
        self._tokenizers: dict[str, asyncio.Task[TokenizerInfo]] = {}
        """boot_id of a known sampler -> its tokenizer."""
        self._vocabularies: WeakValueDictionary[bytes, Vocabulary] = WeakValueDictionary()
        """Digest of a tokenizer -> its vocabulary, which all samplers of a base model share."""

    def is_first(self, owner: str, version_id: str) -> bool:
        """Whether the owner samples the version for the first time, as far as this gateway knows. The audit log gets an
        entry only then."""
        is_new = (owner, version_id) not in self._sampled
        self._sampled[owner, version_id] = None
        return is_new

    # Text

    async def tokenizer(self, source: Source) -> TokenizerInfo:
        """The tokenizer of the base model. Each sampler process is asked once."""
        replica = await self._drawing(source).route()
        boot_id = replica.info.boot_id if replica.info is not None else ""
        if boot_id not in self._tokenizers:
            self._tokenizers[boot_id] = asyncio.create_task(self._load_tokenizer(source))
        try:
            return await asyncio.shield(self._tokenizers[boot_id])
        except Exception:
            self._tokenizers.pop(boot_id, None)  # another request may succeed
            raise

    async def _load_tokenizer(self, source: Source) -> TokenizerInfo:
        drawing = self._drawing(source)
        request = pb.GetTokenizerRequest()
        reply = await drawing.run(lambda replica: drawing.ask(replica, lambda stub: stub.GetTokenizer, request))
        digest = sha256(reply.tokenizer_json.encode()).digest()
        vocabulary = self._vocabularies.get(digest) or await in_pool(Vocabulary, reply.tokenizer_json)
        vocabulary = self._vocabularies.setdefault(digest, vocabulary)
        living = {replica.info.boot_id for replica in self._clients.samplers.all if replica.info is not None}
        for boot_id in self._tokenizers.keys() - living:
            del self._tokenizers[boot_id]
        return TokenizerInfo(vocabulary, tuple(reply.eos_token_ids), _FORMS.get(reply.tool_call_format))

    async def tokenize(self, source: Source, request: pb.TokenizeRequest) -> bytes:
        """The tokens of a text or a chat, int32, little endian. No engine computes them, but a text may kill a sampler,
        too."""
        drawing = self._drawing(source)

        async def call(replica: Replica) -> pb.TokenizeResponse:
            await self.turn(source)
            async with self._texts.setdefault(source.owner, asyncio.Semaphore(_TEXTS_AT_ONCE)):
                return await drawing.ask(replica, lambda stub: stub.Tokenize, request)

        return (await drawing.run(call)).tokens

    # Samples

    async def turn(self, source: Source) -> None:
        """Waits for the owner's turn to work on a prompt."""
        await self._pacer.turn(source.owner)

    async def sample(self, source: Source, request: pb.SampleRequest, *, request_id: str) -> pb.SampleResponse:
        drawing = self._drawing(source, request, request_id=request_id)

        async def call(replica: Replica) -> pb.SampleResponse:
            await self.turn(source)  # a request may have a thousand prompts; beginning a call takes a millisecond
            return await drawing.sample(replica)

        with self._holding_budget(source, request) as hold:
            response = await drawing.run(call)
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
        drawing = self._drawing(source, request, request_id=request_id)

        async def begin() -> AsyncIterator[pb.StreamSampleResponse]:
            first, rest = await drawing.run(call)
            opened.push_async_callback(rest.aclose)
            return _chain(first, rest)

        async def call(
            replica: Replica,
        ) -> tuple[pb.StreamSampleResponse, AsyncGenerator[pb.StreamSampleResponse, None]]:
            await self.turn(source)
            return await _begun(drawing.stream(replica))

        async def again(lost: NotReady) -> AsyncIterator[pb.StreamSampleResponse]:
            await opened.aclose()
            await drawing.next()
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

    def _drawing(self, source: Source, request: pb.SampleRequest | None = None, *, request_id: str = "") -> Drawing:
        wait_s = self._config.openai_wait_s
        return Drawing(self._drawings, source.session, request, request_id=request_id, wait_s=wait_s)

    @contextlib.contextmanager
    def _holding_budget(self, source: Source, request: pb.SampleRequest) -> Iterator[Hold | None]:
        """A context that reserves the most that the request may use of budgets. Raises RateLimited and
        BudgetExceeded."""
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
            about = {"base_model": source.base_model, "owner": source.owner}
            self._drawings.recent.add(request_id, request, response.sequences, **about)

    async def _count(
        self, source: Source, request: pb.SampleRequest, hold: Hold | None, *, num_sampled: int, num_cached: int
    ) -> None:
        self._drawings.count(
            request,
            hold,
            num_cached=num_cached,
            num_sampled=num_sampled,
            base_model=source.base_model,
            owner=source.owner,
            key_id=source.caller.key_id if source.caller is not None else "",
        )
        if hold is not None and hold.is_budgeted:
            with contextlib.suppress(SQLAlchemyError):  # the answer goes out; the ledger logs the error and tries again
                await self._drawings.ledger.flush()


async def _begun(
    pieces: AsyncGenerator[pb.StreamSampleResponse, None],
) -> tuple[pb.StreamSampleResponse, AsyncGenerator[pb.StreamSampleResponse, None]]:
    """The first piece of a stream, and the others."""
    try:
        first = await anext(pieces, None)
        if first is None:
            raise ServiceError("the sampler ended a stream without an answer")
    except BaseException:
        await pieces.aclose()
        raise
    return first, pieces


async def _chain(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item
