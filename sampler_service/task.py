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
    Request,
    Result,
    SampledSequence,
    StopReason,
    TopkTable,
)
from sampler_service.sampling import Rule, UInt64s
from sampler_service.scheduler import Job, Sequence
from sampler_service.scoring import PromptScorer
from sampler_service.stops import StopRule
from tinsmith.modeling.adapter import Adapter

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
    submitted: float = field(default_factory=time.perf_counter)
    planned: bool = False
    """A piece of its prompt has been planned: for the compute thread."""
    admitted: bool = False
    """The same, as the event loop has heard of it."""
    begun: bool = False
    """It has a first token."""
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    """By index."""
    tables: dict[int, list[TopkRow]] = field(default_factory=dict)
    """Rows of topk_sample_logprobs, by index."""

    @property
    def adapter(self) -> Adapter | None:
        return None if self.version is None else self.version.adapter

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
        prompt = self.request.prompt
        if stop > len(prompt):
            prompt = np.concatenate([prompt, np.array(job.sequences[0].tokens, prompt.dtype)])
        return prompt[start:stop].astype(np.int64)

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
        if self.scorer is None:
            return Result(sequences)
        return Result(sequences, self.scorer.result())
