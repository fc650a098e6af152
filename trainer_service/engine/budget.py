"""How much fits into memory at once: measured when the trainer starts, on its own forward and backward.

More tokens in a micro-batch are as fast or faster, so memory is the only bound here. How long a micro-batch may take,
so that nobody waits long for the next one, is decided while the trainer serves (scheduling/compute.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
