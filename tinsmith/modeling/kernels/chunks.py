"""Packed sequences cut into chunks of C tokens, for recurrent layers that compute each chunk by matrix products.

Chunks are ordered by their number within the sequence: first the first chunks of all sequences, then the second chunks,
and so on. Longer sequences come first. So the sequences that have an n-th chunk are the first ones among the sequences
that have an (n-1)-th chunk, and a scan over chunks reads and writes consecutive rows only. The last chunk of a sequence
is filled up with zeros.

Shapes: T packed tokens, N chunks, C tokens of a chunk, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


class Chunks:
    """The chunks of the sequences of one packed batch."""

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.size = size
        self.num_sequences = len(lengths)
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        counts = [-(-lengths[n] // size) for n in order]
        self.steps: list[slice] = []
        """Rows of the chunks of each scan step. Step n + 1 continues the first sequences of step n."""
        start = 0
        for step in range(counts[0]):
            active = sum(count > step for count in counts)
            self.steps.append(slice(start, start + active))
            start += active
        self.num_chunks = start
        self.transitions = [
            (slice(rows.start, rows.start + after.stop - after.start), after) for rows, after in pairwise(self.steps)
        ]
        """For each step but the first: the rows of the preceding chunks, whose states it continues, and its own
        rows."""
        self._uniform = lengths[0] if len(set(lengths)) == 1 and lengths[0] % size == 0 else 0
        self._places_T = torch.empty(sum(lengths), dtype=torch.int64)
        if not self._uniform:
            starts = [0]
            for length in lengths:
                starts.append(starts[-1] + length)
            for rank, n in enumerate(order):
                token = torch.arange(lengths[n])
                first = torch.tensor([step.start for step in self.steps[: counts[rank]]])
                self._places_T[starts[n] : starts[n + 1]] = (first[token // size] + rank) * size + token % size
        self._on: dict[torch.device, Tensor] = {}

    def cut(self, x_T: Tensor) -> Tensor:
        """Cuts tokens [T, ...] into chunks [N, C, ...]."""
        if self._uniform:
            x = x_T.unflatten(0, (self.num_sequences, len(self.steps), self.size))
            return x.transpose(0, 1).flatten(0, 1)
        x = x_T.new_zeros(self.num_chunks * self.size, *x_T.shape[1:])
        return x.index_copy_(0, self._places(x_T.device), x_T).unflatten(0, (self.num_chunks, self.size))

    def join(self, y_N_C: Tensor) -> Tensor:
        """Joins chunks [N, C, ...] to tokens [T, ...], without the zeros."""
        if self._uniform:
            return y_N_C.unflatten(0, (len(self.steps), self.num_sequences)).transpose(0, 1).flatten(0, 2)
        return y_N_C.flatten(0, 1).index_select(0, self._places(y_N_C.device))

    def _places(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = self._places_T.to(device)
        return self._on[device]


@lru_cache(maxsize=4)
def chunks_of(lengths: tuple[int, ...], size: int) -> Chunks:
    """The chunks of these sequences. All layers of a pass share them."""
    return Chunks(lengths, size)
