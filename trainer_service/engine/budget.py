"""How much goes through the base model at once: measured when the trainer starts, on its own forward and backward.

Two things bound a micro-batch. Its activations must fit into memory; and beyond a size, more tokens at once are not
faster, but everybody waits longer for the next micro-batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainer_service.engine.memory import is_out_of_memory

logger = logging.getLogger(__name__)

MIN_TOKENS = 64
"""The smallest size that is tried for speed."""
_NEAR = 0.95
"""Of the best tokens per second: a size this fast is fast enough."""
_USUAL_TOKENS = 256
"""Matrix products of so many rows are near their best speed on every machine that we have seen."""
_PATIENCE_S = 4.0
"""Longest time of a micro-batch of a size that was not tried."""
_SHORT_S = 0.05
"""A micro-batch that takes no longer keeps nobody waiting."""
_REPEAT_BELOW_S = 0.03
_NOISE = 0.005
"""A share of the memory below which a difference between two layouts is the allocator's rounding."""

Lengths = Sequence[int]
"""Of the sequences of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of activations: fixed + per_token * T + per_pair * (the sum of the squared lengths).

    The last term is zero where attention keeps no scores, which is the rule.
    """

    fixed_bytes: float
    bytes_per_token: float
    bytes_per_pair: float

    def of(self, lengths: Iterable[int]) -> int:
        lengths = list(lengths)
        pairs = sum(length * length for length in lengths)
        return math.ceil(self.fixed_bytes + self.bytes_per_token * sum(lengths) + self.bytes_per_pair * pairs)

    def longest(self, num_bytes: float) -> int:
        """The longest sequence whose activations take at most `num_bytes`; 0 when there is none."""
        room = num_bytes - self.fixed_bytes
        if room <= 0:
            return 0
        # The positive root of a L^2 + b L = room, in the form that holds for a = 0, too.
        root = math.sqrt(self.bytes_per_token**2 + 4 * self.bytes_per_pair * room)
        return int(2 * room / (self.bytes_per_token + root))

    @classmethod
    def measured(cls, peak_bytes: Callable[[Lengths], int], num_tokens: int, *, with_pairs: bool = True) -> Footprint:
        """From micro-batches of one sequence of n and of 2n tokens, and (with_pairs) of four that have 2n together.

        The last two differ by nothing but the term in the squares, by 4 n^2 - 4 (n/2)^2 = 3 n^2 of it.
        """
        n = num_tokens
        once, twice = float(peak_bytes([n])), float(peak_bytes([2 * n]))
        squares = twice - peak_bytes([n // 2] * 4) if with_pairs else 0.0
        if squares < _NOISE * twice:
            squares = 0.0
        per_pair = squares / (3 * n * n)
        per_token = (twice - once - per_pair * 3 * n * n) / n
        return cls(once - per_token * n - per_pair * n * n, per_token, per_pair)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was measured, or set. The same on every rank of one trainer."""

    token_budget: int
    """Tokens of a micro-batch. A longer datum goes alone."""
    memory_bytes: int | None = None
    """For adapters, their optimizers and activations together; None is not known."""
    activation_bytes: int | None = None
    """The share of it that activations may take."""
    models_bytes: int | None = None
    """For all live models with their gradients and optimizers, on the device or not; None is no limit."""
    adapter_device_bytes: int | None = None
    """The share of it that adapters may take on the device, when it is set."""
    plain: Footprint | None = None
    checkpointed: Footprint | None = None
    """With activation checkpointing; None when that is off."""
    longest_datum: int | None = None
    """Tokens of the longest datum that fits at all."""

    def needs_checkpointing(self, lengths: Lengths) -> bool:
        if self.plain is None or self.activation_bytes is None:
            return False
        return self.plain.of(lengths) > self.activation_bytes

    def room_for_adapters(self, lengths: Lengths, *, checkpointing: bool) -> int | None:
        """Bytes on the device, beside a micro-batch of these sequences. None is no limit."""
        if self.memory_bytes is None:
            return self.adapter_device_bytes
        footprint = self.checkpointed if checkpointing else self.plain
        room = self.memory_bytes - (footprint.of(lengths) if footprint is not None and lengths else 0)
        return room if self.adapter_device_bytes is None else min(room, self.adapter_device_bytes)


def sizes_up_to(max_tokens: int) -> list[int]:
    """MIN_TOKENS and its doublings, and the largest allowed."""
    sizes = []
    size = MIN_TOKENS
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return [*sizes, max_tokens]


def fastest(
    sizes: Sequence[int],
    run: Callable[[int], object],
    *,
    allowance_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """The smallest of these sizes with nearly the best speed of all, and the tokens per second of the best.

    A larger one up to the usual size is taken where that is short, too: many small requests then share its fixed costs.
    It stops where four times as much was no faster, and where the next size would take longer than is left of the
    allowance. Then a usual size is taken instead of a small one, unless it would keep everybody waiting: what was
    measured is no limit, and a busy machine lets nothing much be measured.
    """
    speeds: dict[int, float] = {}
    started_s = clock()
    for size in sizes:
        if speeds:
            best = max(speeds.values())
            used_s = clock() - started_s
            if used_s + size / best > allowance_s or _flat(list(speeds.values())):
                break
        try:
            speeds[size] = size / _quickest(lambda size=size: run(size), clock)
        except Exception as error:
            if not (speeds and is_out_of_memory(error)):
                raise
            break
    best = max(speeds.values())
    size = next(size for size, speed in speeds.items() if speed >= _NEAR * best)
    short = [more for more, speed in speeds.items() if more <= _USUAL_TOKENS and more / speed <= _SHORT_S]
    untried = [more for more in sizes if max(speeds) < more <= _USUAL_TOKENS and more / best <= _PATIENCE_S]
    return max([size, *short, *untried]), best


def _flat(speeds: Sequence[float]) -> bool:
    """The last two sizes were hardly faster than one before them."""
    return len(speeds) > 2 and max(speeds[:-2]) >= _NEAR * max(speeds)


def _quickest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the quickest of some runs: something else on the machine may disturb one."""
    seconds = []
    while not seconds or (len(seconds) < 3 and sum(seconds) < _REPEAT_BELOW_S):
        started_s = clock()
        run()
        seconds.append(clock() - started_s)
    return min(seconds)
