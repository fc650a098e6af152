"""A forward_backward: its data, and its results, which it collects while its datums run in micro-batches.

requests.py makes batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tinsmith.errors import ServiceError
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.pictures.counting import Counting
from tinsmith.pictures.processing import Processor
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.objectives.losses import LOSS_FNS, Arrays, Objective, Term
from trainer_service.objectives.mismatch import Mismatch

Floats = npt.NDArray[np.float32]

CUSTOM = "custom"
LOSS_FN_NAMES = (*LOSS_FNS, CUSTOM)

MAX_TARGETS_PER_TOKEN = 1024
"""Default of the setting max_targets_per_token."""

FITS_MEMORY = "what fits into this trainer's memory"
_ELEMENTS_PER_TOKEN = 128
"""This many elements of targets and inputs are charged as one more token. A target with its weight takes about 115
bytes between request and answer, so this many elements take 7 kB; a token of the smallest models takes 14 kB."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest batch and datum that a request may bring."""

    vocab_size: int
    max_context_length: int
    max_datums: int = 4096
    context_reason: str = "this model's context length"
    """Where max_context_length comes from, in the words of an error message."""
    max_targets_per_token: int = MAX_TARGETS_PER_TOKEN
    processor: Processor | None = None
    """The processor of the base model's pictures; None when it takes none."""
    why_no_pictures: str = "it sees text only"
    """Why the base model takes no pictures, when `processor` is None."""
    share_prefixes: bool = False
    """Whether tokens with which several datums of a micro-batch begin are computed only once."""
    longest_datum: int | None = None
    """Largest charge of one datum that fits into memory, in tokens; None means no limit."""

    @property
    def counting(self) -> Counting | None:
        """How the base model's processor scales and counts pictures; None when it takes none."""
        return None if self.processor is None else self.processor.counting

    def bounded(self, longest_datum: int | None) -> BatchLimits:
        """These limits, lowered to the longest datum that fits into memory (in tokens; None means no limit)."""
        if longest_datum is None or longest_datum >= self.max_context_length:
            return replace(self, longest_datum=longest_datum)
        return replace(self, max_context_length=longest_datum, context_reason=FITS_MEMORY, longest_datum=longest_datum)


@dataclass(frozen=True, slots=True)
class Datum:
    """One example: N tokens, each with one target or with K targets."""

    tokens_N: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int64]
    """[N] or [N, K]."""
    inputs: Arrays
    """The other arrays that the loss reads, by name. For a built-in loss each has the targets' shape."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures among the tokens, each with the number of its first token, in rising order."""
    loss_s: float = 0.0
    """Expected time of the custom loss, in seconds. 0 for built-in losses: their time is part of a token's cost."""

    @property
    def length(self) -> int:
        return self.tokens_N.size

    @property
    def charge(self) -> int:
        """Tokens that the datum counts for in turns, micro-batches and memory: its length, more for many targets."""
        return charge_of(self.length, [self.targets.size, *(values.size for values in self.inputs.values())])


def charge_of(num_tokens: int, sizes: Iterable[int]) -> int:
    """Charge of a datum of `num_tokens` tokens. `sizes`: number of elements of each of its other arrays.

    An array with one element for each token adds nothing.
    """
    more = sum(max(0, size - num_tokens) for size in sizes)
    return num_tokens + math.ceil(more / _ELEMENTS_PER_TOKEN)


@dataclass(slots=True, eq=False)
class Batch:
    """One forward_backward: its data, and its results so far.

    Datums may run in any order, together with those of other batches; the results are complete after all. A copy made
    by `dataclasses.replace` has no results.
    """

    loss_fn: str
    loss: Objective
    loss_config: Mapping[str, float]
    """The loss's settings, with defaults filled in."""
    forward_only: bool
    datums: Sequence[Datum]
    held_bytes: int = 0
    """Memory that the batch takes until it is answered, in bytes."""
    request: Any = field(default=None, repr=False)
    """The message that the batch was made from; other ranks make the batch from it too. Most arrays are views of its
    bytes."""
    model_id: str = ""
    seq_id: int = 0
    """The request's seq_id; 0 for a batch that was not made from a request."""
    shared: Sequence[int] = ()
    """For each datum the number of tokens that are not computed if the datum before it is in the same micro-batch,
    because both begin with them. Empty means none."""
    alone: bool = False
    """True when the batch's micro-batches may have no datums of another batch."""
    charges: list[int] = field(init=False, repr=False)
    """Charge of each datum, in tokens, in a micro-batch that has no datum which begins as it does."""
    costs: list[int] = field(init=False, repr=False)
    """Tokens that each datum counts for in its model's turns: its charge, and more for the time of a custom loss."""
    num_taken: int = field(default=0, init=False)
    """Number of datums that have been taken into micro-batches."""
    num_waiting_tokens: int = field(init=False)
    """Costs of the datums that have not been taken, if they run in one micro-batch."""
    logprobs: list[Floats] = field(init=False, repr=False)
    """For each datum that has run its logprobs, with the shape of its targets; empty arrays for the others."""
    loss_sum: float = field(default=0.0, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """The loss function's own metrics, as sums over the datums that have run."""
    mismatch: Mismatch | None = field(default=None, init=False)
    """Gap between trainer and sampler on the datums that have run; None when no sampling logprobs were given."""
    error: ServiceError | None = field(default=None, init=False)
    """Why the batch failed. Its datums that have not run yet are skipped."""
    loss_seconds: float = field(default=0.0, init=False)
    """Time of the custom loss that its model has not been charged for yet, in seconds. 0 for built-in losses: their
    time is part of a token's cost."""

    def __post_init__(self) -> None:
        self.charges = [datum.charge for datum in self.datums]
        self.shared = self.shared or [0] * len(self.datums)
        self.set_costs(self.charges)
        self.logprobs = [np.empty(0, np.float32)] * len(self.datums)

    def set_costs(self, costs: list[int]) -> None:
        """Sets the costs of all datums, before the first is taken."""
        self.costs = costs
        self.num_waiting_tokens = sum(costs) - sum(self.shared)

    def charge_pictures(self, cost: float) -> None:
        """Charges for the activations of pictures in an adapted tower, before the first datum is taken: `cost` tokens
        for each token of a picture. If a datum and the datum before it have a picture in common, a micro-batch encodes
        the picture once."""
        charges, shared, before = [], [], {}
        for datum, charge, saved in zip(self.datums, self.charges, self.shared, strict=True):
            own = {one.picture.digest: one.picture.num_tokens for one in datum.pictures}
            repeated = sum(tokens for digest, tokens in own.items() if digest in before)
            charges.append(charge + math.ceil(cost * sum(own.values())))
            shared.append(saved + math.floor(cost * repeated))
            before = own
        self.charges, self.shared = charges, shared
        self.set_costs(charges)

    def next_cost(self, *, begins: bool) -> int:
        """Cost of the next datum in a micro-batch. `begins`: whether the micro-batch has no datum of this batch yet."""
        return self.costs[self.num_taken] - (0 if begins else self.shared[self.num_taken])

    def rest_cost(self, *, begins: bool) -> int:
        """Cost of all datums that have not been taken, in one micro-batch. `begins`: whether the micro-batch has no
        datum of this batch yet."""
        if not self.num_waiting:
            return 0
        return self.num_waiting_tokens + (self.shared[self.num_taken] if begins else 0)

    def take(self, *, begins: bool) -> int:
        """Takes the next datum into a micro-batch. Returns its cost there."""
        cost = self.next_cost(begins=begins)
        self.num_waiting_tokens -= self.next_cost(begins=False)
        self.num_taken += 1
        return cost

    def charge(self, indices: Sequence[int]) -> int:
        """Tokens that these datums count for in one micro-batch, without the time of their losses. The indices rise."""
        follow = (index for before, index in pairwise(indices) if index == before + 1)
        return sum(self.charges[index] for index in indices) - sum(self.shared[index] for index in follow)

    @property
    def num_waiting(self) -> int:
        """Number of datums that have not been taken into micro-batches."""
        return len(self.datums) - self.num_taken

    @property
    def num_tokens(self) -> int:
        return sum(datum.length for datum in self.datums)

    def with_loss_checked(self) -> Batch:
        """Checks a custom loss on the shapes of every datum, without data, and sets the datums' expected times.

        Returns the batch unchanged when its loss is built in. Raises InvalidRequest for a loss that this server does
        not run on datums of these shapes.
        """
        if not isinstance(self.loss, CustomLoss):
            return self
        expected = self.loss.check_shapes([(datum.targets.shape, datum.inputs) for datum in self.datums])
        datums = [replace(datum, loss_s=seconds) for datum, seconds in zip(self.datums, expected, strict=True)]
        return replace(self, datums=datums)

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays]) -> Term:
        """The loss of some datums. A custom loss's time is counted even when it fails, as at its time limit."""
        started_s = time.perf_counter()
        try:
            return self.loss.evaluate(logprobs, inputs, self.loss_config)
        finally:
            if self.loss_fn == CUSTOM:
                self.loss_seconds += time.perf_counter() - started_s

    def add(self, loss: float, metrics: Mapping[str, float], mismatch: Mismatch | None) -> None:
        """Adds sums over datums that have run on this rank or another."""
        self.loss_sum += loss
        for key, value in metrics.items():
            self.metrics[key] = self.metrics.get(key, 0.0) + value
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch

    def largest_ratio(self) -> str:
        """Describes the datum with the largest ratio of probabilities, as `describe_ratio` does, once all have run."""
        gaps = [log_ratio(*each) for each in zip(self.logprobs, self.datums, strict=True)]
        return describe_ratio(max(gaps), index=int(np.argmax(gaps)), seq_id=self.seq_id)

    def output(self) -> Output:
        """The result, once all datums have run."""
        return Output(
            logprobs=self.logprobs,
            metrics={
                "loss:sum": self.loss_sum,
                "num_sequences:sum": len(self.datums),
                "num_tokens:sum": self.num_tokens,
                **_reduced(self.metrics, num_datums=len(self.datums)),
                **({} if self.mismatch is None else self.mismatch.metrics()),
            },
        )


MicroBatch = Sequence[tuple[Batch, Sequence[int]]]
"""Batches with indices of their datums: what runs in one pass."""


@dataclass(frozen=True, slots=True)
class Example:
    """A datum of a batch, as a part of a micro-batch."""

    batch: Batch
    index: int

    @property
    def datum(self) -> Datum:
        return self.batch.datums[self.index]

    @property
    def model_id(self) -> str:
        return self.batch.model_id

    @property
    def previous(self) -> Example:
        """The datum before this one in its batch. For the first datum, an Example that equals no datum."""
        return Example(self.batch, self.index - 1)


def charges_of(examples: Sequence[Example]) -> list[int]:
    """Tokens that each datum counts for in a micro-batch of these examples. A datum that begins like the datum before
    it in its batch counts only for the tokens after the common beginning."""
    present = set(examples)
    return [
        one.batch.charges[one.index] - (one.batch.shared[one.index] if one.previous in present else 0)
        for one in examples
    ]


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request."""

    logprobs: Sequence[Floats]
    """One array for each datum, with the shape of its targets."""
    metrics: Mapping[str, float]


def _reduced(sums: Mapping[str, float], *, num_datums: int) -> Mapping[str, float]:
    """Reduces sums over the datums: a metric whose key ends in ":mean" becomes the mean, the others stay sums."""
    return {key: value / num_datums if key.endswith(":mean") else value for key, value in sums.items()}


def log_ratio(logprobs: Floats, datum: Datum) -> float:
    """The largest difference, over the targets that a datum trains, between the model's logprob and the sampling
    logprob.

    Returns -inf when the datum has no sampling logprobs or no difference is finite.
    """
    sampled = datum.inputs.get("logprobs")
    if sampled is None or sampled.shape != logprobs.shape:  # an input of a custom loss may have any shape
        return -math.inf
    gaps = logprobs.astype(np.float64) - sampled
    counted = np.isfinite(gaps)
    for name in ("weights", "sampled_mask"):  # losses do not read sampling logprobs where one of these is 0
        if (mask := datum.inputs.get(name)) is not None and mask.shape == gaps.shape:
            counted &= mask != 0
    return float(np.max(gaps, where=counted, initial=-math.inf))


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
