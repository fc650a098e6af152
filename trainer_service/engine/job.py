"""A forward_backward on its way: its datums go through the base model in micro-batches, in company of other jobs'."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinsmith.rpc.errors import ServiceError
from trainer_service.engine.batch import CUSTOM, Batch, Datum, Floats, Output
from trainer_service.objectives.losses import Arrays, Term
from trainer_service.objectives.mismatch import Mismatch


@dataclass(slots=True, eq=False)
class Job:
    """Results arrive in any order of the datums; they are complete when every datum has run."""

    model_id: str
    batch: Batch
    logprobs: list[Floats] = field(init=False)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss's own, as sums over the datums that have run."""
    mismatch: Mismatch | None = None
    """Of their sampled tokens."""
    error: ServiceError | None = None
    """Why it failed. What of it has not run yet is skipped."""
    loss_seconds: float = 0.0
    """Time that its custom loss has taken and that its model has not been charged for; 0 for other losses, whose time
    is in the price of a token."""

    @property
    def seq_id(self) -> int:
        """0 for a batch that no request has brought."""
        return 0 if self.batch.request is None else self.batch.request.seq_id

    def __post_init__(self) -> None:
        self.logprobs = [np.empty(0, np.float32)] * len(self.batch.datums)

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays]) -> Term:
        """The loss of some datums. Its time counts also where it fails: at the end of the time that it may take."""
        started_s = time.perf_counter()
        try:
            return self.batch.loss.evaluate(logprobs, inputs, self.batch.loss_config)
        finally:
            if self.batch.loss_fn == CUSTOM:
                self.loss_seconds += time.perf_counter() - started_s

    def largest_ratio(self) -> str:
        """Which datum of a batch with sampling logprobs has it, once all have run."""
        gaps = [log_ratio(*each) for each in zip(self.logprobs, self.batch.datums, strict=True)]
        return describe_ratio(max(gaps), index=int(np.argmax(gaps)), seq_id=self.seq_id)

    def piece(self, indices: Sequence[int]) -> Piece:
        """Some of its datums, for a micro-batch."""
        return Piece(self, indices)

    def add(self, term: Term) -> None:
        self.add_sums(term.value, term.metrics, term.mismatch)

    def add_sums(self, loss: float, metrics: Mapping[str, float], mismatch: Mismatch | None) -> None:
        """Over datums that have run, here or on another rank."""
        self.loss += loss
        for key, value in metrics.items():
            self.metrics[key] = self.metrics.get(key, 0.0) + value
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch

    def output(self) -> Output:
        return Output(
            logprobs=self.logprobs,
            metrics={
                "loss:sum": self.loss,
                "num_sequences:sum": len(self.batch.datums),
                "num_tokens:sum": self.batch.num_tokens,
                **_reduced(self.metrics, num_datums=len(self.batch.datums)),
                **({} if self.mismatch is None else self.mismatch.metrics()),
            },
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Datums of one job, for one micro-batch."""

    job: Job
    indices: Sequence[int]
    """Into job.batch.datums."""


def whole(job: Job) -> Piece:
    return Piece(job, range(len(job.batch.datums)))


def _reduced(sums: Mapping[str, float], *, num_datums: int) -> Mapping[str, float]:
    """A loss's own metrics: those whose key ends in ":mean" are means over the datums, the others sums."""
    return {key: value / num_datums if key.endswith(":mean") else value for key, value in sums.items()}


def log_ratio(logprobs: Floats, datum: Datum) -> float:
    """The largest p - q of a datum's targets: of the model's own logprob and the sampling one. -inf where there is none
    that is finite."""
    sampled = datum.inputs.get("logprobs")
    if sampled is None or sampled.shape != logprobs.shape:  # an input of a custom loss may have any
        return -math.inf
    gaps = logprobs.astype(np.float64) - sampled
    return float(np.max(gaps, where=np.isfinite(gaps), initial=-math.inf))


def describe_ratio(gap: float, *, index: int, seq_id: int) -> str:
    """Empty where there is none."""
    if gap == -math.inf:
        return ""
    return (
        f". The largest ratio is that of data[{index}] of seq_id {seq_id}: e^{gap:.4g}, the model's own probability of "
        "a target over that which `logprobs` say it was sampled with"
    )
