"""Sequences of a packed batch as the rows of a padded batch, for layers that carry a state from token to token.

Such a layer (a recurrence, or a convolution over time) does not know where the sequences of a packed batch begin. So it
computes them side by side, in a padded batch. Padding is at the end of a row, where no token sees it. In generation the
next tokens of all running sequences form one padded batch, which needs no padding, and each piece of a prompt forms
another one. Both continue from the states in the cache.

Shapes: T packed tokens, n tokens of some consecutive sequences, B sequences, L tokens of the longest one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.kernels.choice import Kernels
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.kv_cache import Cached, CachedTogether
from tinsmith.modeling.recurrent_cache import LaneStates

_CACHES = ("cache_params", "past_key_values")
"""Names under which layers of transformers take their cache."""
_MOST_PADDING = 1.25
"""Largest ratio of B * L to the tokens of a padded batch. Sequences whose lengths differ more become several
batches."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Consecutive sequences of a packed batch as rows of one length."""

    start: int
    """Row of the sequences' first token in the packed batch."""
    lengths: Sequence[int]
    """Lengths of the sequences, in tokens."""
    places_n: Tensor | None
    """int64: place of each token among the B * L places; None if there is no padding."""
    active: ActiveRuns
    """The adapters' runs, in the padded batch's own rows."""
    states: LaneStates | None = None
    """States from which the sequences continue, and in which their new states are kept. None for whole sequences, whose
    states are not kept."""
    token_by_token: bool = False
    """Whether layers compute one token at a time; only for a single sequence."""

    @classmethod
    def of(
        cls,
        start: int,
        lengths: Sequence[int],
        runs: Sequence[Run],
        kernels: Kernels,
        device: torch.device,
        states: LaneStates | None = None,
        *,
        token_by_token: bool = False,
    ) -> PaddedBatch:
        places_n = None
        longest = max(lengths)
        if min(lengths) < longest:
            places = [torch.arange(length) + row * longest for row, length in enumerate(lengths)]
            places_n = on_device(torch.cat(places), device)
        padded = cls(start, lengths, places_n, ActiveRuns(), states, token_by_token)
        own = [replace(run, rows=padded._rows(run.rows)) for run in runs_within(runs, start, start + sum(lengths))]
        padded.active.runs = own
        padded.active.groups = kernels.groups(own, longest * len(lengths), device)
        return padded

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def pad(self, x_n: Tensor) -> Tensor:
        """Converts tokens [n, ...] in the packed order to padded rows [B, L, ...]."""
        shape = (len(self.lengths), max(self.lengths))
        if self.places_n is None:
            return x_n.unflatten(0, shape)
        return x_n.new_zeros(shape[0] * shape[1], *x_n.shape[1:]).index_copy(0, self.places_n, x_n).unflatten(0, shape)

    def unpad(self, y_B_L: Tensor) -> Tensor:
        """Converts padded rows [B, L, ...] to tokens [n, ...] in the packed order."""
        y = y_B_L.flatten(0, 1)
        return y if self.places_n is None else y.index_select(0, self.places_n)

    def _rows(self, rows: slice | Tensor) -> slice | Tensor:
        """The places in the padded batch of some of the n tokens."""
        if self.places_n is None:
            return rows
        borders = [0, *accumulate(self.lengths)]
        if isinstance(rows, slice) and rows.start in borders and rows.stop in borders:
            longest = max(self.lengths)  # the run may include padding, which is zero and whose gradient is zero
            return slice(borders.index(rows.start) * longest, borders.index(rows.stop) * longest)
        return self.places_n[rows]


def runs_within(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The runs of the rows from `start` to `stop`, numbered from 0."""
    found = []
    for run in runs:
        if isinstance(run.rows, Tensor):
            rows = run.rows[(run.rows >= start) & (run.rows < stop)] - start
            if rows.numel():
                found.append(replace(run, rows=rows))
        elif max(run.rows.start, start) < min(run.rows.stop, stop):
            rows = slice(max(run.rows.start, start) - start, min(run.rows.stop, stop) - start)
            found.append(replace(run, rows=rows))
    return found


def padded_batches(
    lengths: Sequence[int], runs: Sequence[Run], kernels: Kernels, device: torch.device
) -> list[PaddedBatch]:
    """All sequences of a packed batch, in order, in as few padded batches as the bound on padding allows."""
    starts = [0, *accumulate(lengths)]
    return [
        PaddedBatch.of(starts[first], lengths[first:last], runs, kernels, device)
        for first, last in pairwise([*_cuts(lengths), len(lengths)])
    ]


def cached_batches(
    layout: Cached | CachedTogether,
    runs: Sequence[Run],
    kernels: Kernels,
    device: torch.device,
    *,
    token_by_token: bool,
) -> list[PaddedBatch]:
    """Padded batches of a pass in generation: one for the decoding rows of each cache, then one for each piece of a
    prompt.

    `token_by_token`: whether layers that continue from a state take only one token at a time."""
    parts: list[tuple[Sequence[int], LaneStates]] = []
    for one in layout.parts:
        if one.num_decoding:
            parts.append(([1] * one.num_decoding, LaneStates(one.cache.states, one.lanes, begun=True)))
    for one in layout.parts:
        for piece in one.prefills:
            lanes = slice(piece.lane, piece.lane + 1)
            states = LaneStates(one.cache.states, lanes, begun=piece.start > 0, copy=piece.states_after)
            parts.append(([piece.length], states))
    starts = accumulate((sum(lengths) for lengths, _ in parts), initial=0)
    return [
        PaddedBatch.of(
            start, lengths, runs, kernels, device, states,
            token_by_token=token_by_token and states.begun and max(lengths) > 1,
        )
        for start, (lengths, states) in zip(starts, parts, strict=False)
    ]  # fmt: skip


def _cuts(lengths: Sequence[int]) -> Iterator[int]:
    """Index of the first sequence of each padded batch."""
    longest = tokens = count = 0
    for n, length in enumerate(lengths):
        longest, tokens, count = max(longest, length), tokens + length, count + 1
        if n == 0 or longest * count > _MOST_PADDING * tokens:
            yield n
            longest, tokens, count = length, length, 1


def carries_state(layer: nn.Module) -> bool:
    """Whether the layer mixes tokens in another way than by attention: a convolution over time, or a recurrence."""
    return any(isinstance(child, nn.Conv1d) for child in layer.children()) or "Lightning" in type(layer).__name__


def uncached(decoder: nn.Module) -> list[str]:
    """Names of the classes of layers that carry a state and do not take a cache for it."""
    layers = [module for module in decoder.modules() if carries_state(module)]
    without = (layer for layer in layers if not set(_CACHES) & set(inspect.signature(layer.forward).parameters))
    return sorted({type(layer).__name__ for layer in without})


@dataclass(frozen=True, slots=True)
class BatchwiseForward:
    """Forward of a layer that carries a state. It runs the layer once for each batch in `active.padded`, or once on the
    whole input if there are no such batches."""

    inner: Any
    active: ActiveRuns
    packs: bool = False
    """Whether `inner` can compute the packed sequences of `active.lengths` without padding."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("layout", None)  # the layer passes arguments that it does not know to kernels, which would fail
        batches = self.active.padded
        if not batches or (self.packs and self.active.lengths):
            return self.inner(*args, **kwargs)
        parts_of_args = [_parts(value, batches) for value in args]
        parts_by_name = {name: _parts(value, batches) for name, value in kwargs.items()}
        outputs = []
        for n, batch in enumerate(batches):
            with self.active.replaced_by(batch.active):
                named = {name: parts[n] for name, parts in parts_by_name.items()}
                outputs.append(self._of_batch(batch, [parts[n] for parts in parts_of_args], named))
        if isinstance(outputs[0], Tensor):
            return _joined(outputs, batches)
        return _joined([one for one, *_ in outputs], batches), *(None for _ in outputs[0][1:])

    def _of_batch(self, batch: PaddedBatch, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if batch.states is None:
            return self.inner(*args, **kwargs)
        kwargs.update((name, batch.states) for name in _CACHES if name in kwargs)
        if not batch.token_by_token:
            output = self.inner(*args, **kwargs)
            batch.states.keep()
            batch.states.end_layer()
            return output
        outputs = []
        for place in range(batch.num_tokens):  # the batch is one piece of a prompt
            with self.active.replaced_by(ActiveRuns(runs_within(batch.active.runs, place, place + 1))):
                token = [_at(value, place, batch.num_tokens) for value in args]
                named = {name: _at(value, place, batch.num_tokens) for name, value in kwargs.items()}
                output = self.inner(*token, **named)
            batch.states.keep()
            outputs.append(output if isinstance(output, Tensor) else output[0])
        batch.states.end_layer()
        return torch.cat(outputs, 1)


def _parts(value: Any, batches: Sequence[PaddedBatch]) -> Sequence[Any]:
    """An argument for each batch. A tensor with a row for each token of the packed batch is divided."""
    sizes = [batch.num_tokens for batch in batches]
    if isinstance(value, Tensor) and value.shape[:2] == (1, sum(sizes)):
        return [batch.pad(part) for batch, part in zip(batches, value[0].split(sizes), strict=True)]
    if isinstance(value, tuple):
        return list(zip(*(_parts(one, batches) for one in value), strict=True)) or [()] * len(batches)
    return [value] * len(batches)


def _at(value: Any, place: int, num_tokens: int) -> Any:
    """An argument for one token of a sequence."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
        return value[:, place : place + 1]
    if isinstance(value, tuple):
        return tuple(_at(one, place, num_tokens) for one in value)
    return value


def _joined(outputs: Sequence[Tensor], batches: Sequence[PaddedBatch]) -> Tensor:
    parts = [batch.unpad(output) for output, batch in zip(outputs, batches, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]
