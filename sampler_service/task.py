"""One request inside the torch engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from sampler_service.adapters import Version
from sampler_service.engine import (
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
)
from sampler_service.prefix_cache import digests_of
from sampler_service.sampling import Rule, UInt64s
from sampler_service.scheduler import Job, Sequence
from sampler_service.scoring import PromptScorer
from sampler_service.stops import StopRule
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import FullWeights

TopkRow = tuple[Ints, Floats]


@dataclass(slots=True, eq=False)
class Task:
    request: Request
    generation: Generation
    version: Version | None
    stop: StopRule
    keys: UInt64s
    """Of each sequence's random stream."""
    scorer: PromptScorer | None
    request_id: str = ""
    sequences: list[Sequence[Task]] = field(default_factory=list)
    """All num_samples, by index."""
    submitted: float = field(default_factory=time.perf_counter)
    planned: bool = False
    """A piece of its prompt has been planned: for the compute thread."""
    admitted: bool = False
    """The same, as the event loop has heard of it."""
    begun: bool = False
    """It has a first token."""
    prompt_done: int = 0
    """Prompt tokens that are there, computed or reused."""
    cache_hit_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    """By index."""
    tables: dict[int, list[TopkRow]] = field(default_factory=dict)
    """Rows of topk_sample_logprobs, by index."""
    _prompt_digests: list[bytes] | None = None

    @property
    def adapter(self) -> Adapter | None:
        """None for the base model, and for a version that replaces all its parameters."""
        weights = None if self.version is None else self.version.weights
        return weights if isinstance(weights, Adapter) else None

    @property
    def parameters(self) -> FullWeights | None:
        """What the version replaces the base model's parameters with; None when it does not."""
        weights = None if self.version is None else self.version.weights
        return weights if isinstance(weights, FullWeights) else None

    @property
    def namespace(self) -> int:
        """In the prefix cache."""
        return 0 if self.version is None else self.version.namespace

    @property
    def rule(self) -> Rule:
        params = self.request.params
        return Rule(params.temperature, params.top_k, params.top_p)

    @property
    def topk(self) -> int:
        return self.request.topk_sample_logprobs

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.request.num_samples

    def tokens_of(self, job: Job[Task], start: int, stop: int) -> Int64s:
        """Tokens start .. stop - 1 of a job: the prompt, and for an interrupted sequence what it has generated."""
        tokens = self.request.prompt if stop <= len(self.request.prompt) else self._tokens(job.sequences[0])
        return tokens[start:stop].astype(np.int64)

    def prompt_digests(self) -> list[bytes]:
        """Of the prompt's full blocks, for the prefix cache."""
        if self._prompt_digests is None:
            self._prompt_digests = digests_of(self.namespace, self.request.prompt)
        return self._prompt_digests

    def digests(self, sequence: Sequence[Task]) -> list[bytes]:
        """Of the full blocks of a sequence's tokens, without the newest, whose keys and values are not computed."""
        if not sequence.tokens:
            return self.prompt_digests()
        return digests_of(self.namespace, self._tokens(sequence)[:-1], self.prompt_digests())

    def _tokens(self, sequence: Sequence[Task]) -> Ints:
        """Prompt and output."""
        prompt = self.request.prompt
        return np.concatenate([prompt, np.array(sequence.tokens, prompt.dtype)])

    def take(self, sequence: Sequence[Task], token: int, logprob: float) -> bool:
        """Adds a token to one of its sequences. True when the sequence has ended."""
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if self.stop.met(sequence.tokens):
            self._finish(sequence, "stop")
        elif sequence.length >= sequence.max_length:
            self._finish(sequence, "length")
        return sequence.index in self.finished

    def take_table(self, sequence: Sequence[Task], token_ids: Ints, logprobs: Floats) -> None:
        """Adds a row of the sequence's top-k table, before its token is taken."""
        self.tables.setdefault(sequence.index, []).append((token_ids, logprobs))

    def _finish(self, sequence: Sequence[Task], reason: StopReason) -> None:
        topk = None
        if self.topk:
            rows = self.tables.pop(sequence.index)
            topk = TopkTable.empty(len(rows), self.topk)
            for n, (token_ids, logprobs) in enumerate(rows):
                topk.token_ids[n, : len(token_ids)] = token_ids
                topk.logprobs[n, : len(logprobs)] = logprobs
        self.finished[sequence.index] = SampledSequence(sequence.tokens, sequence.logprobs, reason, topk)

    def result(self) -> Result:
        """Once complete. Raises ServiceError when a prompt score is no number."""
        sequences = [self.finished[index] for index in range(self.request.num_samples)]
        prompt = PromptScores() if self.scorer is None else self.scorer.result()
        return Result(sequences, prompt, self.cache_hit_tokens)
