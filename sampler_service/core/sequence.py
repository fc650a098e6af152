"""The sequences of a request while they are drawn, and what ends them.

Shapes: k columns of a top-k table, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from sampler_service.core.penalties import History
from sampler_service.core.request import (
    Delta,
    Floats,
    Generation,
    Int64s,
    Ints,
    PromptScores,
    Request,
    Result,
    SampledSequence,
    StopCondition,
    StopReason,
    TopkTable,
    VersionSpan,
)
from sampler_service.core.sampling import Rule, UInt64s
from sampler_service.core.scoring import PromptScorer
from sampler_service.core.versions import Version
from sampler_service.grammars import Compiled, Matcher
from sampler_service.threads import in_thread
from sampler_service.tokenizer import load_tokenizer
from tinsmith.errors import ServiceError, Unsupported
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import FullWeights
from tinsmith.modeling.tower import positions_with_pictures

logger = logging.getLogger(__name__)

HEADROOM = 256
"""Number of output tokens that a sequence without max_tokens reserves at first."""

PASSING = 4
"""Number of sequences that may run beyond max_running: prompts that stay for one step."""

_MARGIN = 4
"""Number of further tokens that are decoded before the longest match of a stop string. The first tokens of a window may
decode differently, because the tokens before them are missing."""

Decode = Callable[[Iterable[int]], str]
TopkRow = tuple[Ints, Floats]


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop tokens, and strings that the decoded output may not contain without ending there."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    window: int = 0
    """Number of the newest tokens that are decoded. Each token holds at least one byte, so a match that ends now has
    begun within them."""

    @classmethod
    def of_strings(cls, strings: Iterable[str], token_ids: frozenset[int], decode: Decode) -> StopRule:
        strings = tuple(strings)
        return cls(token_ids, strings, decode, max(len(string.encode()) for string in strings) + _MARGIN)

    def met(self, tokens: list[int]) -> bool:
        """True when the newest token completes a stop."""
        if tokens[-1] in self.token_ids:
            return True
        if self.decode is None:
            return False
        text = self.decode(tokens[-self.window :])
        return any(string in text for string in self.strings)


class StateUnknown(Exception):
    """An error after which the engine cannot go on; its `__cause__` says which. Any of these requests may have caused
    it, as may those that are being computed."""

    def __init__(self, groups: Iterable[SequenceGroup]) -> None:
        super().__init__()
        self.groups = list(groups)

    def __str__(self) -> str:
        return str(self.__cause__)


class StopRules:
    """Makes the rules of one model's requests; its tokenizer is loaded when a request has a stop string."""

    def __init__(self, path: str, eos_token_ids: frozenset[int]) -> None:
        self.path = path
        self.eos_token_ids = eos_token_ids
        self._decode: Decode | None = None

    async def rule(self, stop: StopCondition | None) -> StopRule:
        """Raises Unsupported for strings without a tokenizer."""
        if stop is None:
            return StopRule(self.eos_token_ids)
        if not stop.strings and not stop.token_ids:
            return StopRule()
        # The hosted service stops at end-of-sequence beside explicit strings: the cookbook's RoleColonRenderer, which
        # samples with stop strings, reads an end-of-sequence token at the end of answers (tinker-cookbook #339).
        token_ids = self.eos_token_ids.union(stop.token_ids)
        if not stop.strings:
            return StopRule(token_ids)
        if self._decode is None:
            self._decode = await in_thread(lambda: load_decode(self.path))
        return StopRule.of_strings(stop.strings, token_ids, self._decode)


def load_decode(path: str) -> Decode:
    """The tokenizer's decoder, special tokens included. Raises Unsupported when the model has none that is fast."""
    try:
        backend = cast(Any, load_tokenizer(path)).backend_tokenizer
    except Unsupported as error:
        raise Unsupported(
            f"sampling_params.stop.strings: need a tokenizer, and {error}; use stop token ids",
            field="sampling_params.stop.strings",
        ) from error

    def decode(tokens: Iterable[int]) -> str:
        return backend.decode(list(tokens), skip_special_tokens=False)

    return decode


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the num_samples of a request. From its submission to its end it belongs to the engine's compute thread
    (vLLM engine: to the event loop)."""

    group: SequenceGroup
    index: int
    prompt_length: int
    max_length: int
    """Prompt and output."""
    bounded: bool
    """Whether the request has max_tokens."""
    order: int
    """Rank in the order of submission: later sequences have larger numbers."""
    reserved: int = 0
    """Number of cached tokens that are reserved for the sequence."""
    size: int = 0
    """Number of the cache that has the sequence's lane (scheduler.py), once tokens are reserved."""
    lane: int = 0
    """Lane of that cache, while the sequence runs."""
    origin: object = None
    """Identity of the prompt with which the cached tokens begin. Sequences with one origin share these tokens."""
    shared_length: int = 0
    """Number of tokens of that prompt."""
    mixed: bool = False
    """Whether the lane holds keys and values of more than one version."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: SampledSequence | None = None
    """The sequence's part of the answer, once the sequence has ended."""
    version: Version | None = field(init=False)
    """The version that draws the next token; None for the base model."""
    past: tuple[VersionSpan, ...] = ()
    """The spans of tokens that earlier versions have drawn."""
    _table: list[TopkRow] | None = None
    """Rows of topk_sample_logprobs."""
    _matcher: Matcher | None = None
    """The sequence's position in the request's grammar, from the first draw on."""

    def __post_init__(self) -> None:
        self.version = self.group.version

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.tokens)

    @property
    def need(self) -> int:
        """Number of cached tokens to reserve when the sequence is admitted."""
        return self.max_length if self.bounded else min(self.max_length, self.length + HEADROOM)

    @property
    def promised(self) -> int:
        """Number of cached tokens that the sequence has or will get."""
        return self.reserved or self.need

    @property
    def passes(self) -> bool:
        """Whether the sequence ends with its first token, which the prompt's pass gives."""
        return self.max_length <= self.length + 1

    @property
    def expected(self) -> int:
        """Most tokens that the sequence may draw. Without max_tokens, the number that it reserves at first."""
        most = self.max_length - self.prompt_length
        return most if self.bounded else min(most, HEADROOM)

    @property
    def expected_left(self) -> int:
        """Most tokens that the sequence may still draw; never more than `expected`."""
        return min(self.max_length - self.length, self.expected)

    @property
    def version_id(self) -> str:
        return "" if self.version is None else self.version.version_id

    @property
    def adapter(self) -> Adapter | None:
        """None for the base model, and for a version that replaces all its parameters."""
        weights = None if self.version is None else self.version.weights
        return weights if isinstance(weights, Adapter) else None

    @property
    def parameters(self) -> FullWeights | None:
        """The parameters that the version has in place of the base model's; None for an adapter."""
        weights = None if self.version is None else self.version.weights
        return weights if isinstance(weights, FullWeights) else None

    @property
    def namespace(self) -> int:
        """Namespace of the sequence's keys and values in the prefix cache."""
        return 0 if self.version is None else self.version.namespace

    def follow(self, *, has_lane: bool) -> None:
        """Lets the version of the group draw the sequence from the next token on. `has_lane`: whether it goes on from
        the existing keys and values; otherwise these are computed anew."""
        if self.version is self.group.version:
            return
        self.mixed = self.mixed or has_lane
        self.past, self.version = self._spans(), self.group.version

    def begin_anew(self) -> None:
        """Takes the sequence's place away, after a step that broke off: all its tokens will be computed anew."""
        self.reserved = 0
        self.mixed = False
        if self._table is not None:
            del self._table[len(self.tokens) :]  # the row of a token that was not taken
        self.follow(has_lane=False)

    def history(self, *, vocab_size: int, device: torch.device) -> History:
        return History.of(self.group.request.prompt, self.tokens, vocab_size=vocab_size, device=device)

    def all_tokens(self) -> Ints:
        """Prompt and output."""
        prompt = self.group.request.prompt
        return np.concatenate([prompt, np.array(self.tokens, prompt.dtype)])

    def tokens_between(self, start: int, stop: int) -> Int64s:
        """Tokens start .. stop - 1 of prompt and output."""
        prompt = self.group.request.prompt
        return (prompt if stop <= len(prompt) else self.all_tokens())[start:stop].astype(np.int64)

    @property
    def rotation_offset(self) -> int:
        """Difference between the position of a text token for the rotation of queries and keys, and the token's number.
        It is not 0 after pictures, because a picture takes fewer positions than it has tokens."""
        return self.group.rotation_offset

    def rotated_between(self, start: int, stop: int) -> Int64s:
        """Positions of tokens start .. stop - 1 of prompt and output for the rotation, [3, n] (tower.py). For a
        sequence with pictures."""
        prompt = self.group.rotated_3_P
        assert prompt is not None
        output = np.tile(np.arange(max(start, prompt.shape[1]), stop) + self.rotation_offset, (3, 1))
        return np.concatenate([prompt[:, start:stop], output], 1)

    def matcher(self) -> Matcher:
        """Its position in the request's grammar. Raises ServiceError when the grammar fails."""
        if self._matcher is None:
            assert self.group.grammar is not None
            self._matcher = self.group.grammar.matcher()
        self._matcher.take(self.tokens[self._matcher.num_taken :])
        return self._matcher

    def take_row(self, token_ids: Ints, logprobs: Floats) -> None:
        """Adds a row of the sequence's top-k table, before the row's token is taken."""
        if self._table is None:
            self._table = []
        self._table.append((token_ids, logprobs))

    def delta(self, token: int, logprob: float) -> Delta:
        """The delta of a token, for the reader of a stream. Called before the sequence takes the token."""
        return Delta(self.index, (token,), (logprob,), self._topk_table((self._table or [])[-1:]))

    def take(self, token: int, logprob: float) -> bool:
        """Adds a token. True when the sequence has ended."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.group.stop.met(self.tokens):
            self._finish("stop")
        elif self.length >= self.max_length:
            self._finish("length")
        return self.finished is not None

    def _finish(self, reason: StopReason) -> None:
        table, spans = self._topk_table(self._table or []), self._spans() if self.group.request.follow_run else ()
        self._table = self._matcher = None
        self.finished = SampledSequence(self.tokens, self.logprobs, reason, table, spans)
        self.group.num_finished += 1

    def _topk_table(self, rows: list[TopkRow]) -> TopkTable | None:
        """[rows, k]; None when the request did not ask for it."""
        k = self.group.request.topk_sample_logprobs
        if not k:
            return None
        table = TopkTable.empty(len(rows), k)
        for n, (token_ids, logprobs) in enumerate(rows):
            table.token_ids[n, : len(token_ids)] = token_ids
            table.logprobs[n, : len(logprobs)] = logprobs
        return table

    def _spans(self) -> tuple[VersionSpan, ...]:
        """The tokens that each version has drawn, in order."""
        num_newest = len(self.tokens) - sum(span.num_tokens for span in self.past)
        return (*self.past, VersionSpan(self.version_id, num_newest)) if num_newest else self.past


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences. From its submission to its end it belongs to the thread that computes, except for
    fields that never change and fields that are marked as the event loop's."""

    request: Request
    generation: Generation
    """Belongs to the event loop."""
    version: Version | None
    """The version with which the request's sequences begin. A move changes the field, and the sequences follow one by
    one."""
    stop: StopRule
    keys: UInt64s
    """Keys of the sequences' random streams, by index."""
    scorer: PromptScorer | None
    grammar: Compiled | None = None
    """Grammar that the sequences have to follow; None means any text."""
    request_id: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    """All num_samples, by index."""
    submitted: float = field(default_factory=time.perf_counter)
    begun: bool = False
    """Whether the request has a first token."""
    trial_over: bool = False
    """Whether the request's trial is over. The request may lack a first token even then."""
    prompt_done: int = 0
    """Prompt tokens in the cache, computed or reused."""
    cache_hit_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_finished: int = 0
    """Sequences that have ended."""
    failure: ServiceError | None = None
    """An error that concerns this request alone. The request ends with it after the step."""
    held: list[Version] = field(default_factory=list)
    """Versions that the request keeps resident, the newest last. Belongs to the event loop."""
    prompt_digests: dict[int, list[bytes]] = field(default_factory=dict)
    """Digests of the prompt's full blocks, for the prefix cache, by namespace."""
    rotated_3_P: Int64s | None = field(init=False, default=None)
    """Positions of the prompt's tokens for the rotation of queries and keys; None for a prompt without pictures, whose
    positions are the numbers of its tokens."""
    rotation_offset: int = field(init=False, default=0)
    """Difference between the position of a token after the prompt and the token's number."""
    _in_use: list[Version] = field(default_factory=list)
    """Versions that the request's sequences use or will use."""

    def __post_init__(self) -> None:
        if self.request.pictures:
            length = len(self.request.prompt)
            positions = positions_with_pictures([length], self.request.pictures, torch.device("cpu")).numpy()
            self.rotated_3_P, self.rotation_offset = positions, int(positions.max()) + 1 - length
        if self.version is not None:
            self.held.append(self.version)
            self._in_use.append(self.version)

    @property
    def rule(self) -> Rule:
        params = self.request.params
        return Rule(params.temperature, params.top_k, params.top_p, params.min_p)

    @property
    def on_trial(self) -> bool:
        """Whether the prompt has to be computed alone."""
        return self.request.on_trial and not self.begun and not self.trial_over

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finished is None]

    @property
    def complete(self) -> bool:
        return self.num_finished == len(self.sequences)

    def move(self, version: Version) -> None:
        """Lets the request's sequences go on with this version."""
        self.version = version
        self._in_use.append(version)

    def take_unused(self) -> list[Version]:
        """Versions that all sequences of the request have left since the last call."""
        if len(self._in_use) < 2:
            return []
        used = [self.version, *(sequence.version for sequence in self.unfinished)]
        unused = [version for version in self._in_use if version not in used]
        self._in_use = [version for version in self._in_use if version in used]
        return unused

    def forget_versions(self) -> None:
        """Lets go of the versions when the request ends. Requests, sequences and jobs refer to each other, so they stay
        in memory until Python's next full collection, and versions are too large for that."""
        self.version = None
        self._in_use.clear()
        for sequence in self.sequences:
            sequence.version = None

    def fail(self, error: Exception) -> ServiceError:
        """Notes an error that concerns no other request, and returns the error with which the request will end after
        the step."""
        logger.error("a request failed in the engine", exc_info=error)
        self.failure = self.failure or ServiceError(
            f"the engine failed in this request: {error}; the log has the cause"
        )
        return self.failure

    def fail_alone(self, error: BaseException) -> ServiceError:
        """The error of a request that found no memory although only one sequence of it was computed."""
        logger.error("a request found no memory, alone in a step", exc_info=error)
        return ServiceError(
            f"this request is out of memory, although nothing is computed beside one sequence of it ({error}); send a "
            "shorter one, or lower the sampler's max_kv_tokens, tokens_per_step or prefix_cache_bytes"
        )

    def outcome(self) -> Result | ServiceError:
        """The answer, once all sequences have ended; an error when a score of the prompt is NaN."""
        try:
            return self.result()
        except ServiceError as error:
            return error
        except Exception as error:
            return self.fail(error)

    def result(self) -> Result:
        """Raises ServiceError when a score of the prompt is NaN."""
        sequences = [sequence.finished for sequence in self.sequences if sequence.finished is not None]
        first = self.sequences[0]
        computed_by = first.past[0].version_id if first.past else first.version_id
        prompt = PromptScores() if self.scorer is None else self.scorer.result(computed_by)
        return Result(sequences, prompt, self.cache_hit_tokens)
