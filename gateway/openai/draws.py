"""A prompt and the choices drawn for it: from a request's fields to tokens, text and log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from gateway.convert import check_int32, fold_seed
from gateway.json_forms import EMPTY_LOGPROB
from gateway.openai.generator import Generator, Source, TokenizerInfo
from gateway.openai.schemas import Generate
from gateway.openai.text import TextStream
from tinsmith.threads import in_pool_of
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

_MANY_TOKENS = 1024
"""Text of more tokens than this is made in `_THREAD`, because it would block the event loop."""
_THREAD = ThreadPoolExecutor(1, "text")
"""One thread only, because several would keep the interpreter's lock from the event loop."""

_owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""owner -> lock, so that each owner has at most one piece of work in `_THREAD`."""

T = TypeVar("T")
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token in a list of log-probabilities."""

    token: int
    logprob: float | None
    """Log-probability of the token, in nats; None for a prompt's first token."""
    top: Sequence[tuple[int, float]]
    """The most probable tokens and their logprobs, best first."""
    offset: int
    """Position of the token's text in the text of the choice, in characters."""


@dataclass(slots=True)
class Update:
    """New text and tokens of a choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    spans: Sequence[tuple[str, int]] = ()
    """(version_id, number of tokens that this version has drawn), at the end of a choice that follows a run."""


@dataclass(slots=True)
class AnswerUsage:
    """Token counts of an answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: AnswerUsage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def sample_request(
    body: Generate,
    source: Source,
    tokenizer: TokenizerInfo,
    prompt: bytes,
    *,
    max_tokens: int | None,
    topk: int = 0,
    prompt_logprobs: bool = False,
) -> pb.SampleRequest:
    """The request for the sampler. `prompt`: int32 tokens, little endian.

    The sampler adds the client's stop strings and tokens to the model's end-of-sequence tokens.
    """
    stop = None
    if body.stop_strings or body.stop_tokens or body.stop_token_ids:
        token_ids = [check_int32(token, field="stop") for token in body.stop_tokens]
        token_ids += [check_int32(token, field="stop_token_ids") for token in body.stop_token_ids or ()]
        stop = pb.StopCondition(strings=body.stop_strings, token_ids=token_ids)
    topk = check_int32(topk, field="logprobs")
    return pb.SampleRequest(
        cache_salt=source.caller.cache_salt if source.caller is not None else "",
        prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=prompt))],
        num_samples=check_int32(body.num_choices, field="n"),
        sampling_params=pb.SamplingParams(
            max_tokens=None if max_tokens is None else check_int32(max_tokens, field="max_tokens"),
            seed=None if body.seed is None else fold_seed(body.seed),
            temperature=body.temperature,
            top_k=check_int32(body.top_k or 0, field="top_k"),
            top_p=body.top_p,
            min_p=body.min_p or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=body.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            stop=stop,
        ),
        topk_sample_logprobs=topk,
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk if prompt_logprobs else 0,
    )


async def text_off_loop(work: Callable[[], T], *, num_tokens: int) -> T:
    """The result of `work` on this number of tokens. For more than _MANY_TOKENS, `work` runs in `_THREAD`."""
    if num_tokens <= _MANY_TOKENS:
        return work()
    return await in_pool_of(_THREAD, work)


Tops = Sequence[Sequence[tuple[int, float]]]


class _Choice:
    """The text of one sequence, token by token. With an echo, the text begins with that of the prompt."""

    def __init__(self, index: int, text: TextStream, prompt_text: TextStream | None, *, with_entries: bool) -> None:
        self.num_tokens = 0
        self._with_entries = with_entries
        self.index = index
        self._text = text
        self._prompt_text = prompt_text
        self._start = 0

    @property
    def has_echo(self) -> bool:
        """Whether an echo of the prompt is wanted, and was not given yet."""
        return self._prompt_text is not None

    def echo(self, tokens: Sequence[int], logprobs: Sequence[float | None], tops: Tops) -> Update:
        """An update with the prompt; empty when no echo is wanted, or the echo was given before."""
        update = Update(self.index)
        if self._prompt_text is not None:
            _push(update, self._prompt_text, tokens, logprobs, tops, with_entries=self._with_entries)
            update.text += self._prompt_text.flush()
            self._start = len(update.text)
            self._prompt_text = None
        return update

    def push(self, update: Update, tokens: Sequence[int], logprobs: Sequence[float], tops: Tops) -> None:
        _push(update, self._text, tokens, logprobs, tops, start=self._start, with_entries=self._with_entries)
        update.tokens += tokens
        self.num_tokens += len(tokens)

    def finish(self, update: Update, reason: FinishReason) -> None:
        update.text += self._text.flush()
        update.finish_reason = "stop" if self._text.stopped else reason


def _push(
    update: Update,
    text: TextStream,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Tops,
    *,
    start: int = 0,
    with_entries: bool,
) -> None:
    pieces = [update.text]  # joined once at the end: adding each piece would copy the whole text for each token
    if not with_entries:  # millions of entries would slow down every garbage collection
        pieces += map(text.push, tokens)
        tokens = ()
    for token, logprob, top in zip(tokens, logprobs, tops, strict=with_entries):
        offset = text.num_chars
        pieces.append(text.push(token))
        # A token of a stop string begins where the text ends.
        update.entries.append(LogprobEntry(token, logprob, top, start + min(offset, text.num_chars)))
    update.text = "".join(pieces)


class Draw:
    """The choices of one prompt, numbered from `first_index`."""

    def __init__(
        self,
        generator: Generator,
        source: Source,
        tokenizer: TokenizerInfo,
        request: pb.SampleRequest,
        prompt: bytes,
        *,
        request_id: str,
        first_index: int = 0,
        scores_only: bool = False,
        echo: bool = False,
        prompt_text: str = "",
        shown: Sequence[int] = (),
        with_entries: bool = True,
    ) -> None:
        """`prompt`: int32 tokens of the request's prompt, little endian.

        `scores_only`: True if drawn tokens are thrown away. `echo`: True if the text begins with the prompt, including
        special tokens that occur in `prompt_text`. `shown`: special tokens whose text is part of the output.
        `with_entries`: True if updates have an entry for each token."""
        self.usage = AnswerUsage()
        """Token counts, which are complete once the draw is over."""
        self.prompt: list[int] = np.frombuffer(prompt, _INT32).tolist()
        self._generator = generator
        self.source = source
        self._request = request
        self.request_id = request_id
        self._scores_only = scores_only
        self._num_echoed = len(self.prompt) * request.num_samples if echo else 0
        # Scores of the prompt belong first, but come only with the result. So nothing can be shown before the result.
        self._waits = bool(request.prompt_logprobs or scores_only)
        vocabulary = tokenizer.vocabulary
        stop = request.sampling_params.stop
        stops = tuple(stop.strings)  # a copy: protobuf decodes the strings at each access
        hidden = {*tokenizer.eos_token_ids, *stop.token_ids}
        in_prompt = [token for token in vocabulary.special if echo and vocabulary.text_of(token) in prompt_text]
        self._choices = [
            _Choice(
                first_index + n,
                TextStream(vocabulary, stops=stops, hidden=hidden, shown=shown),
                TextStream(vocabulary, shown=in_prompt) if echo else None,
                with_entries=with_entries,
            )
            for n in range(request.num_samples)
        ]

    async def result(self) -> list[Update]:
        """Draws the choices. Returns one update for each choice, which holds all of the choice."""
        response = await self._generator.sample(self.source, self._request, request_id=self.request_id)
        return await self._updates_of(response)

    @contextlib.asynccontextmanager
    async def updates(self) -> AsyncIterator[AsyncIterator[Update]]:
        """Draws the choices, as a stream of updates. When the context is entered, the sampler has begun."""
        async with self._generator.stream(self.source, self._request, request_id=self.request_id) as pieces:
            yield self._updates(pieces)

    async def _updates(self, pieces: AsyncIterator[pb.StreamSampleResponse]) -> AsyncIterator[Update]:
        async for piece in pieces:
            if piece.HasField("result"):
                for update in await self._updates_of(piece.result):
                    yield update
            elif not self._waits:
                delta = piece.delta
                tokens = np.frombuffer(delta.tokens, _INT32).tolist()
                logprobs = np.frombuffer(delta.logprobs, _FLOAT32).tolist()
                choice = self._choices[delta.index]
                update = await self._echo(choice)
                choice.push(update, tokens, logprobs, _rows(delta.topk_sampled_logprobs, len(tokens)))
                yield update

    async def _echo(self, choice: _Choice) -> Update:
        """An update with the prompt, without log-probabilities; empty when no echo is wanted, or the echo was given
        before."""
        if not choice.has_echo:
            return Update(choice.index)
        num_prompt = len(self.prompt)
        return await self._off_loop(
            lambda: choice.echo(self.prompt, [None] * num_prompt, [()] * num_prompt), num_tokens=num_prompt
        )

    async def _updates_of(self, response: pb.SampleResponse) -> list[Update]:
        num_sampled = sum(len(sequence.tokens) // _INT32.itemsize for sequence in response.sequences)
        return await self._off_loop(lambda: list(self._finished(response)), num_tokens=self._num_echoed + num_sampled)

    async def _off_loop(self, work: Callable[[], T], *, num_tokens: int) -> T:
        """Works as `text_off_loop` does, but on one piece of work of each owner at a time, so that no owner fills the
        queue."""
        if num_tokens <= _MANY_TOKENS:
            await self._generator.turn(self.source)  # a thousand prompts may get here at once
            return work()
        async with _owners.setdefault(self.source.owner, asyncio.Lock()):
            return await text_off_loop(work, num_tokens=num_tokens)

    def _finished(self, response: pb.SampleResponse) -> Iterator[Update]:
        """The last update of each choice: the tokens that no delta has delivered, and the finish reason."""
        num_prompt = len(self.prompt)
        prompt_logprobs: list[float | None] = [None] * num_prompt
        if response.HasField("prompt_logprobs"):
            values = np.frombuffer(response.prompt_logprobs, _FLOAT32).tolist()
            prompt_logprobs = [None if math.isnan(value) else value for value in values]
        for choice, sequence in zip(self._choices, response.sequences, strict=True):
            update = choice.echo(self.prompt, prompt_logprobs, _rows(response.topk_prompt_logprobs, num_prompt))
            if self._scores_only:
                choice.finish(update, "length")
            else:
                seen = choice.num_tokens
                tokens = np.frombuffer(sequence.tokens, _INT32).tolist()
                logprobs = np.frombuffer(sequence.logprobs, _FLOAT32).tolist()
                tops = _rows(sequence.topk_sampled_logprobs, len(tokens))
                choice.push(update, tokens[seen:], logprobs[seen:], tops[seen:])
                choice.finish(update, "stop" if sequence.stop_reason == types_pb2.STOP_REASON_STOP else "length")
                update.spans = [(span.version_id, span.num_tokens) for span in sequence.version_spans]
            yield update
        num_sampled = sum(choice.num_tokens for choice in self._choices)
        self.usage = AnswerUsage(num_prompt, response.prompt_cache_hit_tokens, num_sampled)


def _rows(table: types_pb2.TopkLogprobs, length: int) -> Tops:
    """The rows of a top-k table [length, k], without empty cells; empty rows when there is no table."""
    if not table.k:
        return [()] * length
    token_ids = np.frombuffer(table.token_ids, _INT32).reshape(table.length, table.k).tolist()
    logprobs = np.frombuffer(table.logprobs, _FLOAT32).reshape(table.length, table.k).tolist()
    return [
        [(token, logprob) for token, logprob in zip(*row, strict=True) if logprob > EMPTY_LOGPROB]
        for row in zip(token_ids, logprobs, strict=True)
    ]
