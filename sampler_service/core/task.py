"""One request inside the torch engine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

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
    StopReason,
    TopkTable,
    VersionSpan,
)
from sampler_service.core.sampling import Rule, UInt64s
from sampler_service.core.scoring import PromptScorer
from sampler_service.core.sequence import Sequence
from sampler_service.core.stops import StopRule
from sampler_service.core.versions import Version
from sampler_service.grammars import Compiled, Matcher
from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import FullWeights

logger = logging.getLogger(__name__)

TopkRow = tuple[Ints, Floats]


@dataclass(slots=True)
class Stretch:
    """A part of a sequence that one version draws."""

    version: Version | None
    """None: the base model."""
    start: int
    """Tokens of the output before it."""


@dataclass(slots=True, eq=False)
class Task:
    """A request and its sequences. Belongs to what computes from its submission to its end, but for what is said to
    belong to the event loop, and for what never changes."""

    request: Request
    generation: Generation
    """Belongs to the event loop."""
    version: Version | None
    """The version that its sequences begin with. A move changes it, and the sequences follow one by one."""
    stop: StopRule
    keys: UInt64s
    """Keys of the sequences' random streams, by index."""
    scorer: PromptScorer | None
    grammar: Compiled | None = None
    """Grammar that the sequences have to follow; None means any text."""
    request_id: str = ""
    sequences: list[Sequence[Task]] = field(default_factory=list)
    """All num_samples, by index."""
    submitted: float = field(default_factory=time.perf_counter)
    begun: bool = False
    """Whether it has a first token."""
    prompt_done: int = 0
    """Prompt tokens in the cache, computed or reused."""
    cache_hit_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    failure: ServiceError | None = None
    """An error of this request alone, with which it ends after the step."""
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    """By index."""
    tables: dict[int, list[TopkRow]] = field(default_factory=dict)
    """Rows of topk_sample_logprobs, by index."""
    matchers: dict[int, Matcher] = field(default_factory=dict)
    """Position of each sequence in the grammar, by index."""
    held: list[Version] = field(default_factory=list)
    """Versions that it keeps resident, the newest last. Belongs to the event loop."""
    mixed: set[int] = field(default_factory=set)
    """Sequences, by index, whose lanes hold keys and values of more than one version."""
    _stretches: list[list[Stretch]] = field(init=False)
    """The stretches of each sequence, by index; never empty."""
    _in_use: list[Version] = field(default_factory=list)
    """Versions that its sequences use or will use."""
    prompt_digests: dict[int, list[bytes]] = field(default_factory=dict)
    """Digests of the prompt's full blocks, for the prefix cache, by namespace."""

    def __post_init__(self) -> None:
        self._stretches = [[Stretch(self.version, 0)] for _ in range(self.request.num_samples)]
        if self.version is not None:
            self.held.append(self.version)
            self._in_use.append(self.version)

    def version_of(self, sequence: Sequence[Task]) -> Version | None:
        """The version that draws the sequence's next token; None for the base model."""
        return self._stretches[sequence.index][-1].version

    def version_id_of(self, sequence: Sequence[Task]) -> str:
        return _id_of(self.version_of(sequence))

    def adapter_of(self, sequence: Sequence[Task]) -> Adapter | None:
        """None for the base model, and for a version that replaces all its parameters."""
        version = self.version_of(sequence)
        weights = None if version is None else version.weights
        return weights if isinstance(weights, Adapter) else None

    def parameters_of(self, sequence: Sequence[Task]) -> FullWeights | None:
        """The parameters that the version has in place of the base model's; None for an adapter."""
        version = self.version_of(sequence)
        weights = None if version is None else version.weights
        return weights if isinstance(weights, FullWeights) else None

    def namespace_of(self, sequence: Sequence[Task]) -> int:
        """Namespace of its keys and values in the prefix cache."""
        version = self.version_of(sequence)
        return 0 if version is None else version.namespace

    def move(self, version: Version) -> None:
        """Lets its sequences go on with this version."""
        self.version = version
        self._in_use.append(version)

    def follow(self, sequence: Sequence[Task], *, has_lane: bool) -> None:
        """From its next token on, the sequence is drawn by the task's version. `has_lane`: from the keys and values
        that it has; else they are computed anew."""
        stretches = self._stretches[sequence.index]
        if stretches[-1].version is self.version:
            return
        if has_lane:
            self.mixed.add(sequence.index)
        if stretches[-1].start == len(sequence.tokens):
            stretches.pop()  # it has drawn nothing
        stretches.append(Stretch(self.version, len(sequence.tokens)))

    def take_unused(self) -> list[Version]:
        """Versions that all its sequences have left since the last call."""
        if len(self._in_use) < 2:
            return []
        used = [self.version_of(sequence) for sequence in self.sequences if sequence.index not in self.finished]
        used.append(self.version)
        unused = [version for version in self._in_use if version not in used]
        self._in_use = [version for version in self._in_use if version in used]
        return unused

    def forget_versions(self) -> None:
        """Lets go of the versions when the request ends. Requests, sequences and jobs refer to each other, so they stay
        in memory until Python's next full collection, and versions are too large for that."""
        self.version = None
        self._stretches.clear()
        self._in_use.clear()

    def fail(self, error: Exception) -> None:
        """Notes an error that concerns no other request; the request ends with it after the step."""
        logger.error("a request failed in the engine", exc_info=error)
        self.failure = self.failure or ServiceError(
            f"the engine failed in this request: {error}; the log has the cause"
        )

    @property
    def rule(self) -> Rule:
        params = self.request.params
        return Rule(params.temperature, params.top_k, params.top_p, params.min_p)

    def history(self, sequence: Sequence[Task], *, vocab_size: int, device: torch.device) -> History:
        return History.of(self.request.prompt, sequence.tokens, vocab_size=vocab_size, device=device)

    @property
    def topk(self) -> int:
        return self.request.topk_sample_logprobs

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.request.num_samples

    def tokens_of(self, sequence: Sequence[Task], start: int, stop: int) -> Int64s:
        """Tokens start .. stop - 1 of a sequence: the prompt, then what it has generated."""
        tokens = self.request.prompt if stop <= len(self.request.prompt) else self.all_tokens(sequence)
        return tokens[start:stop].astype(np.int64)

    def all_tokens(self, sequence: Sequence[Task]) -> Ints:
        """Prompt and output."""
        prompt = self.request.prompt
        return np.concatenate([prompt, np.array(sequence.tokens, prompt.dtype)])

    def delta(self, sequence: Sequence[Task], token: int, logprob: float) -> Delta:
        """A token for the reader of a stream, before the sequence takes it."""
        table = self._table(self.tables[sequence.index][-1:]) if self.topk else None
        return Delta(sequence.index, (token,), (logprob,), table)

    def take(self, sequence: Sequence[Task], token: int, logprob: float) -> bool:
        """Adds a token to one of its sequences. True when the sequence has ended."""
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if self.stop.met(sequence.tokens):
            self._finish(sequence, "stop")
        elif sequence.length >= sequence.max_length:
            self._finish(sequence, "length")
        return sequence.index in self.finished

    def matcher_of(self, sequence: Sequence[Task]) -> Matcher:
        """Position of a sequence in the request's grammar. Raises ServiceError when the grammar fails."""
        assert self.grammar is not None
        matcher = self.matchers.get(sequence.index)
        if matcher is None:
            matcher = self.matchers[sequence.index] = self.grammar.matcher()
        matcher.take(sequence.tokens[matcher.num_taken :])
        return matcher

    def take_table(self, sequence: Sequence[Task], token_ids: Ints, logprobs: Floats) -> None:
        """Adds a row of the sequence's top-k table, before its token is taken."""
        self.tables.setdefault(sequence.index, []).append((token_ids, logprobs))

    def _finish(self, sequence: Sequence[Task], reason: StopReason) -> None:
        topk = self._table(self.tables.pop(sequence.index)) if self.topk else None
        self.matchers.pop(sequence.index, None)
        spans = self._spans(sequence) if self.request.follow_run else ()
        self.finished[sequence.index] = SampledSequence(sequence.tokens, sequence.logprobs, reason, topk, spans)

    def _table(self, rows: list[TopkRow]) -> TopkTable:
        table = TopkTable.empty(len(rows), self.topk)
        for n, (token_ids, logprobs) in enumerate(rows):
            table.token_ids[n, : len(token_ids)] = token_ids
            table.logprobs[n, : len(logprobs)] = logprobs
        return table

    def _spans(self, sequence: Sequence[Task]) -> list[VersionSpan]:
        stretches = self._stretches[sequence.index]
        ends = [*(stretch.start for stretch in stretches[1:]), len(sequence.tokens)]
        return [
            VersionSpan(_id_of(stretch.version), end - stretch.start)
            for stretch, end in zip(stretches, ends, strict=True)
        ]

    def result(self) -> Result:
        """The answer, once all sequences have ended. Raises ServiceError when a prompt score is no number."""
        sequences = [self.finished[index] for index in range(self.request.num_samples)]
        computed_by = self._stretches[0][0].version
        prompt = PromptScores() if self.scorer is None else self.scorer.result(_id_of(computed_by))
        return Result(sequences, prompt, self.cache_hit_tokens)


def _id_of(version: Version | None) -> str:
    return "" if version is None else version.version_id
