"""A forward_backward on its way: its datums go through the base model in micro-batches, in company of other jobs'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinsmith.rpc.errors import InvalidRequest, ServiceError
from trainer_service.batch import Batch, Datum, Floats, Output
from trainer_service.losses import Term


@dataclass(slots=True, eq=False)
class Job:
    """Results arrive in any order of the datums; they are complete when every datum has run."""

    model_id: str
    batch: Batch
    logprobs: list[Floats] = field(init=False)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss's own, as sums over the datums that have run."""
    error: ServiceError | None = None
    """Why it failed. What of it has not run yet is skipped."""

    def __post_init__(self) -> None:
        self.logprobs = [np.empty(0, np.float32)] * len(self.batch.datums)

    def piece(self, indices: Sequence[int]) -> Piece:
        """Some of its datums, for a micro-batch."""
        return Piece(self, indices)

    def add(self, term: Term) -> None:
        self.loss += term.value
        for key, value in term.metrics.items():
            self.metrics[key] = self.metrics.get(key, 0.0) + value

    def output(self) -> Output:
        return Output(
            logprobs=self.logprobs,
            metrics={
                "loss:sum": self.loss,
                "num_sequences:sum": len(self.batch.datums),
                "num_tokens:sum": self.batch.num_tokens,
                **_reduced(self.metrics, num_datums=len(self.batch.datums)),
            },
        )

    def check_finite(self, loss: float, largest_gradient: float) -> None:
        """Raises InvalidRequest when the share of some datums in the loss, or its gradient, is not finite."""
        if not (math.isfinite(loss) and math.isfinite(largest_gradient)):
            raise InvalidRequest(
                f"{self.batch.loss_fn}: the loss ({loss}) or its gradient is not finite; the next optim_step will be "
                "refused. Look for sampling logprobs far from the model's own, or too large a learning rate"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """Datums of one job, for one micro-batch."""

    job: Job
    indices: Sequence[int]
    """Into job.batch.datums."""

    @property
    def datums(self) -> list[Datum]:
        return [self.job.batch.datums[index] for index in self.indices]

    @property
    def num_tokens(self) -> int:
        return sum(datum.length for datum in self.datums)


def whole(job: Job) -> Piece:
    return Piece(job, range(len(job.batch.datums)))


def _reduced(sums: Mapping[str, float], *, num_datums: int) -> Mapping[str, float]:
    """A loss's own metrics: those whose key ends in ":mean" are means over the datums, the others sums."""
    return {key: value / num_datums if key.endswith(":mean") else value for key, value in sums.items()}
