"""A forward_backward in progress: its datums run in micro-batches, together with datums of other jobs."""

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
    """One forward_backward and its results so far. Datums may run in any order; the results are complete after all."""

    model_id: str
    batch: Batch
    logprobs: list[Floats] = field(init=False)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss function's own metrics, as sums over the datums that have run."""
    mismatch: Mismatch | None = None
    """Gap between trainer and sampler on the datums that have run; None when no sampling logprobs were given."""
    error: ServiceError | None = None
    """Why the job failed. Its datums that have not run yet are skipped."""
    loss_seconds: float = 0.0
    """Time of the custom loss that its model has not been charged for yet, in seconds. 0 for built-in losses: their
    time is part of a token's cost."""

    @property
    def seq_id(self) -> int:
        """The request's seq_id; 0 for a batch that was not made from a request."""
        return 0 if self.batch.request is None else self.batch.request.seq_id

    def __post_init__(self) -> None:
        self.logprobs = [np.empty(0, np.float32)] * len(self.batch.datums)

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays]) -> Term:
        """The loss of some datums. A custom loss's time is counted even when it fails, as at its time limit."""
        started_s = time.perf_counter()
        try:
            return self.batch.loss.evaluate(logprobs, inputs, self.batch.loss_config)
        finally:
            if self.batch.loss_fn == CUSTOM:
                self.loss_seconds += time.perf_counter() - started_s

    def largest_ratio(self) -> str:
        """Describes the datum with the largest ratio of probabilities, as `describe_ratio` does, once all have run."""
        gaps = [log_ratio(*each) for each in zip(self.logprobs, self.batch.datums, strict=True)]
        return describe_ratio(max(gaps), index=int(np.argmax(gaps)), seq_id=self.seq_id)

    def piece(self, indices: Sequence[int]) -> Piece:
        """The datums at these indices, for a micro-batch."""
        return Piece(self, indices)

    def add(self, term: Term) -> None:
        self.add_sums(term.value, term.metrics, term.mismatch)

    def add_sums(self, loss: float, metrics: Mapping[str, float], mismatch: Mismatch | None) -> None:
        """Adds sums over datums that have run on this rank or another."""
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
    """Indices into job.batch.datums."""


def whole(job: Job) -> Piece:
    """All datums of a job."""
    return Piece(job, range(len(job.batch.datums)))


def _reduced(sums: Mapping[str, float], *, num_datums: int) -> Mapping[str, float]:
    """Reduces sums over the datums: a metric whose key ends in ":mean" becomes the mean, the others stay sums."""
    return {key: value / num_datums if key.endswith(":mean") else value for key, value in sums.items()}


def log_ratio(logprobs: Floats, datum: Datum) -> float:
    """The largest difference, over a datum's targets, between the model's logprob and the sampling logprob.

    Returns -inf when the datum has no sampling logprobs or no difference is finite.
    """
    sampled = datum.inputs.get("logprobs")
    if sampled is None or sampled.shape != logprobs.shape:  # an input of a custom loss may have any shape
        return -math.inf
    gaps = logprobs.astype(np.float64) - sampled
    return float(np.max(gaps, where=np.isfinite(gaps), initial=-math.inf))


def describe_ratio(gap: float, *, index: int, seq_id: int) -> str:
    """Describes the datum with the largest ratio, for the end of an error message. `gap`: its `log_ratio`.

    Returns an empty text when the gap is -inf.
    """
    if gap == -math.inf:
        return ""
    return (
        f". The largest ratio is that of data[{index}] of seq_id {seq_id}: e^{gap:.4g}, the model's own probability of "
        "a target over that which `logprobs` say it was sampled with"
    )
