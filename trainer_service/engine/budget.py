"""How many tokens fit into memory at once: measured when the trainer starts, on its own forward and backward.

A larger micro-batch is never slower per token, so memory is the only bound here. The compute thread
(scheduling/compute.py) also bounds the time of a micro-batch, so that other models do not wait long for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_NOISE = 0.005
"""A difference between two layouts below this share of their memory is taken for the allocator's rounding."""

Lengths = Sequence[int]
"""Lengths of the sequences of one micro-batch, in tokens."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of activations of T tokens: fixed + per_token * T + per_pair * (sum of the squared sequence lengths).

    The last term is zero where attention keeps no scores, as most models' attention does not.
    """

    fixed_bytes: float
    bytes_per_token: float
    bytes_per_pair: float

    def of(self, lengths: Iterable[int]) -> int:
        lengths = list(lengths)
        pairs = sum(length * length for length in lengths)
        return math.ceil(self.fixed_bytes + self.bytes_per_token * sum(lengths) + self.bytes_per_pair * pairs)

    def longest(self, num_bytes: float) -> int:
        """Length of the longest sequence whose activations take at most `num_bytes`, in tokens; 0 when none does."""
        room = num_bytes - self.fixed_bytes
        if room <= 0:
            return 0
        # The positive root of a L^2 + b L = room, in the form that is valid for a = 0, too.
        root = math.sqrt(self.bytes_per_token**2 + 4 * self.bytes_per_pair * room)
        return int(2 * room / (self.bytes_per_token + root))

    @classmethod
    def measured(cls, peak_bytes: Callable[[Lengths], int], num_tokens: int, *, with_pairs: bool = True) -> Footprint:
        """Fits the footprint to measured micro-batches: one sequence of n tokens, one of 2n, and four of n/2.

        The last two have equally many tokens, so they differ only in the sum of squares: 4 n^2 - 4 (n/2)^2 = 3 n^2.
        Without `with_pairs` the third is not measured, and bytes_per_pair is 0.
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
    """How the engine may use memory, as measured or set. It is the same on every rank of a trainer."""

    token_budget: int
    """Most tokens of a micro-batch. A datum longer than this is a micro-batch by itself."""
    memory_bytes: int | None = None
    """Memory for adapters, their optimizers and activations together; None when it was not measured."""
    activation_bytes: int | None = None
    """Part of memory_bytes that activations may take."""
    models_bytes: int | None = None
    """Memory for all live models with gradients and optimizers, on the device or the host; None means no limit."""
    adapter_device_bytes: int | None = None
    """Device memory that adapters may take, from the setting of this name; None when it is not set."""
    plain: Footprint | None = None
    """Activations without activation checkpointing; None when they were not measured."""
    checkpointed: Footprint | None = None
    """Activations with activation checkpointing; None when they were not measured."""
    longest_datum: int | None = None
    """Length of the longest datum that fits into memory, in tokens; None when it was not measured."""

    def needs_checkpointing(self, lengths: Lengths) -> bool:
        if self.plain is None or self.activation_bytes is None:
            return False
        return self.plain.of(lengths) > self.activation_bytes

    def room_for_adapters(self, lengths: Lengths, *, checkpointing: bool) -> int | None:
        """Device memory for adapters beside a micro-batch of these sequences, in bytes. None means no limit."""
        if self.memory_bytes is None:
            return self.adapter_device_bytes
        footprint = self.checkpointed if checkpointing else self.plain
        room = self.memory_bytes - (footprint.of(lengths) if footprint is not None and lengths else 0)
        return room if self.adapter_device_bytes is None else min(room, self.adapter_device_bytes)
