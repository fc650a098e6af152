"""The runs of a packed batch: the rows to which each adapter applies, and the buffer that gets its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, LoraWeights
from tinsmith.modeling.attention import Layout, Packed

if TYPE_CHECKING:
    from tinsmith.modeling.grouped_lora import Groups
    from tinsmith.modeling.padded import PaddedBatch


class PassGradient:
    """The gradient of one adapter in one backward pass, in one flat buffer.

    Layers that are differentiated by hand add the gradients of A and B to this buffer, and return none to autograd.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._sum: Adapter | None = None
        """The buffer. It is made at the first gradient, so that it takes no memory during the forward pass."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Input of layers that are differentiated by hand, in place of A and B, so that autograd runs their backward.
        It gets no gradient."""

    def of(self, name: str) -> LoraWeights:
        """The gradients of A and B of the layer `name`, as views of the buffer, to which callers add."""
        return self._need_sum().weights[name]

    def gather(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The whole gradient, float32 [numel]. `grads`: gradients that autograd computed, in the order of the adapter's
        tensors; None for tensors whose gradient was added to the buffer, or that have none."""
        found = [grad for grad in grads if grad is not None]
        if len(found) == len(grads) and self._sum is None:
            # A single operation: on CUDA, one operation for each of 500 tensors takes longer than the products.
            self._sum = self._adapter.like(torch.cat([grad.flatten() for grad in found]))
        elif found:
            own = [one for one, grad in zip(self._need_sum().tensors(), grads, strict=True) if grad is not None]
            torch._foreach_add_(own, found)
        return self._need_sum().flat

    def _need_sum(self) -> Adapter:
        if self._sum is None:
            self._sum = self._adapter.like(torch.zeros_like(self._adapter.flat))
        return self._sum


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the packed batch to which one adapter applies. The runs of a batch do not overlap."""

    adapter: Adapter
    rows: slice | Tensor
    """A slice, or int64 [n] row numbers."""
    gradient: PassGradient | None = None
    """Receives the adapter's gradient from layers that support it. If None, autograd returns the gradients."""
    rounded: Adapter | None = None
    """The adapter in the type of the layers, if it was rounded for the whole pass. If None, each layer rounds its A
    and B."""

    def weights(self, name: str) -> LoraWeights | None:
        """A and B of the layer `name` for its product; None if the adapter does not change the layer."""
        return (self.rounded or self.adapter).weights.get(name)

    def rounded_for(self, dtype: torch.dtype) -> Run:
        """This run, with the adapter in `dtype`."""
        if self.adapter.flat.dtype == dtype:
            return self
        with torch.no_grad():
            return replace(self, rounded=self.adapter.rounded(dtype))


@dataclass(slots=True)
class ActiveRuns:
    """The runs of the present forward pass, which the adapted layers of a base model read. Belongs to one compute
    thread."""

    runs: Sequence[Run] = field(default_factory=tuple)
    groups: Groups | None = None
    """The runs in the form for grouped matrix products, if those are used."""
    layout: Layout | None = None
    """The layout of the pass, for layers that do not get it as an argument."""
    every_row: bool = False
    """Whether the only run applies to all rows that a layer sees. A layer of a plain model may see more rows than the
    call has tokens: it expands the compressed keys and values of all earlier tokens."""
    padded: Sequence[PaddedBatch] = ()
    """The packed sequences as padded batches, for layers that carry a state and have no code for packed sequences."""

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths of the packed sequences; empty in a pass with another layout."""
        return self.layout.lengths if isinstance(self.layout, Packed) else ()

    def clear(self) -> None:
        """Ends the pass."""
        self.runs, self.groups, self.layout, self.every_row, self.padded = (), None, None, False, ()

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
