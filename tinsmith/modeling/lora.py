"""Linear layers with many adapters, of different ranks and targets, in one packed batch.

Shapes: T packed tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.attention import Layout, Packed
from tinsmith.modeling.kernels.grouped_lora import Groups
from tinsmith.modeling.kernels.prepacked import Prepacked
from tinsmith.modeling.pass_gradient import PassGradient
from tinsmith.modeling.projections import Frozen, Layers, project
from tinsmith.modeling.shares import Share, add_rows

if TYPE_CHECKING:
    from tinsmith.modeling.padded import Padded


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the packed batch to which one adapter applies."""

    adapter: Adapter
    rows: slice | Tensor
    """A slice, or int64 [n] row numbers."""
    gradient: PassGradient | None = None
    """Receives the adapter's gradient from layers that support it. If None, autograd returns the gradients."""


@dataclass(slots=True)
class ActiveRuns:
    """The runs of the present forward pass, which the adapted layers of a base model read. Only one compute thread sets
    and reads it."""

    runs: Sequence[Run] = field(default_factory=tuple)
    groups: Groups | None = None
    """The runs in the form for grouped matrix products, if those are used."""
    waiting: Waiting | None = None
    """Outputs that are computed already, for layers that are called next."""
    calls: list[Call] | None = None
    """Calls of adapted layers, recorded while `listening`."""
    layout: Layout | None = None
    """The layout of the pass, for layers that transformers does not hand it to."""
    every_row: bool = False
    """Whether the only run applies to all rows that a layer sees. A layer of a plain model may see more rows than the
    call has tokens: it expands the compressed keys and values of all earlier tokens."""
    padded: Sequence[Padded] = ()
    """The packed sequences as padded batches, for those of these layers that have no code for packed ones."""

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths of the packed sequences; empty in passes over others."""
        return self.layout.lengths if isinstance(self.layout, Packed) else ()

    def clear(self) -> None:
        """Ends the pass. A recording of calls goes on."""
        self.runs, self.groups, self.waiting, self.layout, self.padded = (), None, None, None, ()
        self.every_row = False

    @contextmanager
    def replaced_by(self, other: ActiveRuns) -> Iterator[None]:
        """Within the block, this holds the values of `other`."""
        before = {one.name: getattr(self, one.name) for one in fields(self)}
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of an adapted layer."""

    name: str
    x: Tensor
    version: int
    """Version of x at the call. A tensor that was written in place since then is another input."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Outputs of layers that read the same input as a layer that was called before them."""

    x: Tensor
    version: int
    outputs: dict[str, Tensor]

    def take(self, name: str, x: Tensor) -> Tensor | None:
        """Removes and returns the layer's output for x; None if there is none."""
        return self.outputs.pop(name, None) if self.x is x and self.version == _version(x) else None


def _version(x: Tensor) -> int:
    """Number of in-place writes to x; 0 for inference tensors, which have no counter."""
    return 0 if x.is_inference() else x._version


class LoraLinear(nn.Module):
    """A frozen linear layer. Each active adapter's share is added to the adapter's rows."""

    def __init__(self, base: nn.Linear, name: str, active: ActiveRuns) -> None:
        super().__init__()
        if base.weight.device.type == "cpu":
            # Column-major: a product with some 8 rows (a small decode step) takes a third of the time, and one with
            # many rows takes as long as row-major.
            base.weight.data = base.weight.data.T.contiguous().T
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.active = active
        self.readers: tuple[LoraLinear, ...] = (self,)
        """All layers that read this layer's input, including itself, in the order of their calls."""
        self.prepacked: Prepacked | None = None
        """Prepacked matrices of all readers, in the first reader only."""

    def forward(self, x: Tensor) -> Tensor:
        active = self.active
        if active.calls is not None:
            active.calls.append(Call(self.name, x, _version(x)))
        if active.groups is not None:
            y = active.groups.linear(x.flatten(0, -2), self.weight, self.bias, self.name)
            if y is not None:
                return y.unflatten(0, x.shape[:-1])
        if not torch.is_grad_enabled():
            return self._without_gradient(x)
        if len(self.readers) == 1:
            return _project(x, self.readers)[0]
        y = active.waiting.take(self.name, x) if active.waiting is not None else None
        if y is None:
            outputs = dict(zip((layer.name for layer in self.readers), _project(x, self.readers), strict=True))
            y = outputs.pop(self.name)
            active.waiting = Waiting(x, _version(x), outputs)
        if active.waiting is not None and not active.waiting.outputs:
            active.waiting = None
        return y

    def _without_gradient(self, x: Tensor) -> Tensor:
        """The output, in as few operations as possible: their fixed costs are the time of a decode step of one
        token."""
        active = self.active
        if active.waiting is not None:
            y = active.waiting.take(self.name, x)
            if y is not None:
                if not active.waiting.outputs:
                    active.waiting = None
                return y
        prepacked = self.prepacked
        if prepacked is None or not prepacked.gains(x) or not prepacked.copies(self.weight):
            y = nn.functional.linear(x, self.weight, self.bias)
            self._add_shares(x, y)
            return y
        y, *others = prepacked(x)
        self._add_shares(x, y)
        if others:
            outputs = {}
            for layer, output in zip(self.readers[1:], others, strict=True):
                layer._add_shares(x, output)
                outputs[layer.name] = output
            active.waiting = Waiting(x, _version(x), outputs)
        return y

    def _add_shares(self, x: Tensor, y: Tensor) -> None:
        for run in self.active.runs:
            weights = run.adapter.weights.get(self.name)
            if weights is not None:
                rows = slice(None) if self.active.every_row else run.rows
                low_n_R = x.reshape(-1, x.shape[-1])[rows] @ weights.a_R_I.to(x.dtype).T
                add_rows(y.view(-1, y.shape[-1]), rows, low_n_R, weights.b_O_R.to(x.dtype).T, run.adapter.scaling)


def shares_of(runs: Sequence[Run], names: Sequence[str]) -> list[Share]:
    """The runs' shares for the layers `names`, which read the same input."""
    shares = []
    for run in runs:
        weights = [run.adapter.weights.get(name) for name in names]
        if any(one is not None for one in weights):
            shares.append(Share(run.rows, run.adapter.scaling, weights, names, run.gradient))
    return shares


def _project(x: Tensor, layers: Sequence[LoraLinear]) -> Sequence[Tensor]:
    shares = shares_of(layers[0].active.runs, [layer.name for layer in layers])
    frozen = Layers([Frozen(layer.weight, layer.bias) for layer in layers])
    if not shares:
        return project(x, frozen, [])
    return [y_T_O.unflatten(0, x.shape[:-1]) for y_T_O in project(x.reshape(-1, x.shape[-1]), frozen, shares)]


@contextmanager
def listening(active: ActiveRuns) -> Iterator[list[Call]]:
    """Records the name and the input of every adapted layer that is called in the block."""
    active.calls = calls = []
    try:
        yield calls
    finally:
        active.calls = None


def join_readers(model: nn.Module, calls: Sequence[Call]) -> None:
    """Makes layers that read the same tensor in consecutive `calls` compute together from now on."""
    for _, group in groupby(calls, key=lambda call: (id(call.x), call.version)):
        layers = [model.get_submodule(name) for name in dict.fromkeys(call.name for call in group)]
        if len(layers) > 1 and all(type(layer) is LoraLinear for layer in layers):  # divided layers copy their input
            for layer in layers:
                layer.readers = tuple(layers)  # type: ignore[assignment]


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """Gives adapted layers a prepacked copy of their frozen matrices, for passes without gradient on a CPU.

    To be called after join_readers. Layers that are divided among ranks stay as they are.
    """
    for layer in model.modules():
        if type(layer) is LoraLinear and layer.readers[0] is layer:
            readers = layer.readers
            layer.prepacked = Prepacked([one.weight for one in readers], [one.bias for one in readers])
