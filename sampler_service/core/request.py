"""A request to generate, its bounds, its answer, and the handle by which its caller waits. No protobuf, no gRPC.

Shapes: P prompt tokens, L tokens of a sequence, k columns of a table, M named cells.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from sampler_service.core.trial import Trial
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.rpc.tensors import CHUNK_BYTES, check_tokens

Ints = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

EMPTY_LOGPROB = -99999.0
"""Logprob of an empty cell of a top-k table; its token is 0."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Ends of a sequence besides the model's end-of-sequence tokens. An empty condition switches those tokens off, too,
    so that nothing ends the sequence."""

    strings: Sequence[str] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes to the logits of a sequence before each draw; `penalties.py` has the formulas."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    """Pairs of a token id and the bias that is added to the token's logit. Each token occurs once."""

    def __bool__(self) -> bool:
        """Whether any logit changes."""
        return bool(self.frequency or self.presence or self.repetition != 1 or self.logit_bias)


@dataclass(frozen=True, slots=True)
class Params:
    """How to draw."""

    max_tokens: int | None = None
    """Most tokens of a sequence; None means as many as context and cache allow."""
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    """Number of the most probable tokens that may be drawn; 0 or below means all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one are not drawn."""
    penalties: Penalties = field(default_factory=Penalties)
    stop: StopCondition | None = None
    """Condition that ends a sequence; None means the model's end-of-sequence tokens."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of a sequence: JSON Schema, or Lark in the dialect of llguidance."""

    form: Literal["json_schema", "lark"]
    text: str

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Targets:
    """Cells to score: token tokens_M[m] at prompt position rows_M[m] + 1. rows_M does not fall; a token -1 scores 0."""

    rows_M: Int64s
    tokens_M: Int64s


_NUMBER_BYTES = 4
_CELL_BYTES = 40
"""Memory of a scored cell, in bytes: its part of the message, its row, its token, its score, and the score in the
answer."""
_SEQUENCE_BYTES = 768
"""Memory of one sequence before it has a token, in bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Ints
    version_id: str = ""
    """Id of the version that generates; empty means the base model."""
    num_samples: int = 1
    params: Params = field(default_factory=Params)
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    targets: Targets | None = None
    prompt_alt_tokens_k: int = 0
    follow_run: str = ""
    """The run that the request follows: between two tokens it moves to the run's newest version. Empty means that the
    request keeps its version to the end."""
    on_probation: bool = False
    """True when the request may use a version on probation. Such a request is accepted even if the queue is full."""
    cache_salt: str = ""
    """The request reuses only prefixes that requests with the same salt have computed."""
    owner: str = ""
    """Owner of the request. Owners take turns, and have equal shares of lanes and cache."""
    on_trial: bool = False
    """True when the prompt must be computed while nothing else is, because the request may have killed another sampler
    (trial.py)."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures in the prompt, each with the number of its first token, in rising order."""
    num_chunks: int = 1
    """Number of parts in which the prompt came. The message is kept until the request ends."""
    grammar: Grammar | None = None
    """Grammar that each sequence has to follow; None means any text. Logprobs are those of the model without it."""

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt is scored."""
        return bool(self.prompt_logprobs or self.topk_prompt_logprobs or self.targets or self.prompt_alt_tokens_k)

    @property
    def num_bytes(self) -> int:
        """Memory that the request takes until its end, with its message and without the tokens of its sequences, in
        bytes."""
        num_cells = 0 if self.targets is None else len(self.targets.rows_M)
        num_rows = 2 * self.topk_prompt_logprobs + 3 * self.prompt_alt_tokens_k + 4
        texts = [*(self.params.stop.strings if self.params.stop else ()), self.grammar.text if self.grammar else ""]
        return (
            4 * sum(map(len, texts))
            + len(self.prompt) * num_rows * _NUMBER_BYTES
            + num_cells * _CELL_BYTES
            + self.num_samples * _SEQUENCE_BYTES
            + self.num_chunks * CHUNK_BYTES
            + sum(one.picture.pixels.nbytes for one in self.pictures)
        )


MAX_BIASES = 1024
"""Most tokens in one logit_bias."""
MAX_STOP_BYTES = 4096
"""Most bytes of the stop strings of one request, in UTF-8. After each drawn token, as many tokens are decoded as the
longest stop string has bytes."""
MAX_STOP_TOKENS = 1024
"""Most tokens in the stop condition of one request."""
MAX_NAME_CHARACTERS = 1000
"""Most characters of version_id, follow_run and cache_salt."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of a request. A request is checked completely before it is queued."""

    vocab_size: int
    max_context_length: int
    max_kv_tokens: int
    max_num_samples: int
    max_topk_logprobs: int

    @property
    def max_length(self) -> int:
        """Longest prompt and output of one sequence."""
        return min(self.max_context_length, self.max_kv_tokens)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, which names the field, its value and the accepted values."""
        length = len(request.prompt)
        if length == 0:
            raise InvalidRequest("prompt: is empty; at least one token is needed", field="prompt")
        check_tokens(request.prompt, self.vocab_size, field="prompt")
        _check_range("num_samples", request.num_samples, 1, self.max_num_samples)
        self._check_params(request.params, length)
        self._check_scores(request, length)

    def _check_params(self, params: Params, length: int) -> None:
        if params.max_tokens is not None and params.max_tokens < 1:
            raise InvalidRequest(
                f"sampling_params.max_tokens: {params.max_tokens} is below 1; leave it out for no limit of your own",
                field="sampling_params.max_tokens",
            )
        wanted = 1 if params.max_tokens is None else params.max_tokens
        field = "sampling_params.max_tokens" if length < self.max_length else "prompt"
        if length + wanted > self.max_context_length:
            raise InvalidRequest(
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{length} + {wanted} > {self.max_context_length}",
                field=field,
            )
        if length + wanted > self.max_kv_tokens:
            raise InvalidRequest(
                "Prompt length plus max_tokens exceeds this sampler's key/value cache (max_kv_tokens): "
                f"{length} + {wanted} > {self.max_kv_tokens}",
                field=field,
            )
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise InvalidRequest(
                f"sampling_params.temperature: {params.temperature} is not a finite number of at least 0",
                field="sampling_params.temperature",
            )
        if params.top_k < -1:
            raise InvalidRequest(
                f"sampling_params.top_k: {params.top_k} is neither a number of tokens nor -1 or 0, all of them",
                field="sampling_params.top_k",
            )
        if not 0 < params.top_p <= 1:
            raise InvalidRequest(
                f"sampling_params.top_p: {params.top_p} is outside (0, 1]", field="sampling_params.top_p"
            )
        if not 0 <= params.min_p <= 1:
            raise InvalidRequest(
                f"sampling_params.min_p: {params.min_p} is outside [0, 1]", field="sampling_params.min_p"
            )
        self._check_penalties(params.penalties)
        if params.stop is not None:
            stop = "sampling_params.stop"
            if "" in params.stop.strings:
                raise InvalidRequest(f"{stop}.strings: an empty one would stop everything", field=f"{stop}.strings")
            num_bytes = sum(len(string.encode()) for string in params.stop.strings)
            if num_bytes > MAX_STOP_BYTES:
                raise InvalidRequest(
                    f"{stop}.strings: {num_bytes} bytes in all are above the limit of {MAX_STOP_BYTES}",
                    field=f"{stop}.strings",
                )
            check_tokens(np.array(params.stop.token_ids, np.int64), self.vocab_size, field=f"{stop}.token_ids")

    def _check_penalties(self, penalties: Penalties) -> None:
        for name, value, low, high in (
            ("frequency_penalty", penalties.frequency, -2, 2),
            ("presence_penalty", penalties.presence, -2, 2),
            ("repetition_penalty", penalties.repetition, 0.01, 100),
        ):
            if not low <= value <= high:
                field = f"sampling_params.{name}"
                raise InvalidRequest(f"{field}: {value} is outside [{low}, {high}]", field=field)
        if len(penalties.logit_bias) > MAX_BIASES:
            raise InvalidRequest(
                f"sampling_params.logit_bias: {len(penalties.logit_bias)} tokens are above {MAX_BIASES}",
                field="sampling_params.logit_bias",
            )
        for token, bias in penalties.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"sampling_params.logit_bias: token id {token} is outside the vocabulary [0, {self.vocab_size})",
                    field="sampling_params.logit_bias",
                )
            if not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"sampling_params.logit_bias: {bias} for token {token} is outside [-100, 100]",
                    field="sampling_params.logit_bias",
                )

    def _check_scores(self, request: Request, length: int) -> None:
        last_n = request.prompt_logprobs_last_n
        if last_n is not None:
            if not request.prompt_logprobs:
                raise InvalidRequest(
                    f"prompt_logprobs_last_n: {last_n} is given without prompt_logprobs", field="prompt_logprobs_last_n"
                )
            _check_range("prompt_logprobs_last_n", last_n, 1, length - 1)
        setting = "this server's max_topk_logprobs"
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            _check_range(name, getattr(request, name), 0, self.max_topk_logprobs, setting=setting)
        if request.targets is not None:
            _check_targets(request.targets, self.vocab_size)


def _check_targets(targets: Targets, vocab_size: int) -> None:
    bad = (targets.tokens_M < -1) | (targets.tokens_M >= vocab_size)
    if bad.any():
        where = int(bad.argmax())
        raise InvalidRequest(
            f"target_prompt_logprobs: token id {targets.tokens_M[where]} in row {targets.rows_M[where]} is neither -1 "
            f"nor in the vocabulary [0, {vocab_size})",
            field="target_prompt_logprobs",
        )


def _check_range(field: str, value: int, low: int, high: int, *, setting: str = "") -> None:
    """`setting`: what `high` comes from."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} is outside {low}..{high}{setting and ', ' + setting}", field=field)


@dataclass(frozen=True, slots=True)
class TopkTable:
    """[rows, k], best first."""

    token_ids: Ints
    logprobs: Floats

    @classmethod
    def empty(cls, rows: int, k: int) -> TopkTable:
        return cls(np.zeros((rows, k), np.int32), np.full((rows, k), EMPTY_LOGPROB, np.float32))

    @classmethod
    def joined(cls, tables: Sequence[TopkTable]) -> TopkTable:
        """The rows of several tables, one after the other."""
        return cls(
            np.concatenate([table.token_ids for table in tables]), np.concatenate([table.logprobs for table in tables])
        )


@dataclass(frozen=True, slots=True)
class AltTokens:
    """Tokens drawn at each position after the first, [P - 1, k]."""

    tokens: Int64s
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt that the request asked for."""

    logprobs: Floats | None = None
    """float32 [P]; NaN at positions without a logprob."""
    topk: TopkTable | None = None
    """[P, k]."""
    targets_M: Floats | None = None
    alt_tokens: AltTokens | None = None


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a sequence that one version has drawn."""

    version_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SampledSequence:
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: StopReason
    topk: TopkTable | None = None
    spans: Sequence[VersionSpan] = ()
    """The versions that drew its tokens, in order; empty without follow_run."""


@dataclass(frozen=True, slots=True)
class Result:
    sequences: Sequence[SampledSequence]
    prompt: PromptScores = PromptScores()
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sequence."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: TopkTable | None = None
    """One row for each token, if the request asked for topk_sample_logprobs."""


def _joined(deltas: Sequence[Delta]) -> Iterable[Delta]:
    """One for each sequence."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    for index, parts in by_index.items():
        tables = [part.topk for part in parts if part.topk is not None]
        yield Delta(
            index,
            [token for part in parts for token in part.tokens],
            [logprob for part in parts for logprob in part.logprobs],
            TopkTable.joined(tables) if tables else None,
        )


class Generation:
    """A submitted request, as its caller sees it. Lives on the event loop."""

    def __init__(self, *, stream: bool, on_cancel: Callable[[], None]) -> None:
        self.stream = stream
        self.started_at: float | None = None
        """Time at which the computation of the request began, in seconds since 1970. The engine sets it."""
        self.trial: Trial | None = None
        """The trial of the prompt; None if the prompt is computed together with others."""
        self._on_cancel = on_cancel
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    async def result(self) -> Result:
        """Waits for the end. Raises the ServiceError that the request failed with. Cancelling the wait cancels the
        generation."""
        try:
            return await self._result
        except asyncio.CancelledError:
            self._on_cancel()
            raise

    def cancel(self) -> None:
        """Cancels the generation."""
        self._on_cancel()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields tokens as they come, until the last one or a failure, which result() raises. A reader that leaves
        early cancels the generation.

        The engine never waits for the reader. A slow reader finds all tokens that came meanwhile in one delta for each
        sequence, so no more waits here than the result will hold.
        """
        ended = False
        try:
            while not ended:
                news = [await self._deltas.get()]
                while not self._deltas.empty():
                    news.append(self._deltas.get_nowait())
                ended = news[-1] is None
                for delta in _joined([delta for delta in news if delta is not None]):
                    yield delta
        finally:
            if not ended:
                self._on_cancel()

    def push(self, delta: Delta) -> None:
        """Called by the engine."""
        self._deltas.put_nowait(delta)

    def finish(self, outcome: Result | ServiceError) -> None:
        """Ends the generation. The engine calls it once."""
        if self.trial is not None:
            self.trial.lapse()
        if not self._result.done():
            if isinstance(outcome, Result):
                self._result.set_result(outcome)
            else:
                self._result.set_exception(outcome)
                self._result.exception()  # a caller that has left is no reason for a warning
        self._deltas.put_nowait(None)


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Progress of a request that waits or runs."""

    running: bool
    position: int
    """Requests before it that have not ended; 0 while it runs."""
    tokens_ahead: int
    """Tokens that those requests still have to compute, prompts and outputs."""
    expected_seconds: float | None
    """Seconds until its end, at the measured speed; None while nothing was measured."""
    reason: str
