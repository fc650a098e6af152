"""The cost of a custom loss, counted while it runs without data: every operation inside its nodes, and its gradient.

A node's result does not tell its cost: the result of `cosine_similarity` of (n, 1, k) and (1, n, k) has n^2 elements,
but its intermediate tensors have n^2 k.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinsmith.errors import InvalidRequest

MAX_STEP_ELEMENTS = 2**24
"""Limit on the elements of one torch operation inside a node: those of its results, or of its tensors broadcast
together, whichever are more."""
MAX_ELEMENTS = 2**28
"""Limit on the elements of all operations for one datum, its gradient included. It bounds memory, since torch allocates
only results. It bounds time, since no allowed operation takes much more than 10 ns per element (80 ns for _SLOW)."""
SECONDS_PER_ELEMENT = 2e-9
"""Time of a typical operation per element, on one core. compute.py measures by which factor this machine differs."""
SECONDS_PER_OPERATION = 1e-5
"""Time of an operation on few elements, with its part of the gradient."""
_MULTIPLY_ADDS_PER_ELEMENT = 64
"""Multiply-adds of a matrix product that take as long as an elementwise operation on one element."""

_STEPS_OF_A_NODE = 64
"""Upper bound of the operations in one node's gradient; each works on at most as many elements as the largest
tensor."""
_SLOWNESS = 8
"""An operation of _SLOW takes this many times as long per element as others."""

_aten = torch.ops.aten
_SLOW = (_aten.sort, _aten.argsort, _aten.logcumsumexp)
_PRODUCTS = (_aten.mm, _aten.mv, _aten.dot)
_NOT_BROADCAST = (
    *(_aten.cat, _aten.stack, _aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_),
    *(_aten.gather, _aten.scatter, _aten.scatter_add, _aten.scatter_add_, _aten.index_select, _aten.index_add),
    *(_aten.index_add_, _aten.index_select_backward, _aten.value_selecting_reduction_backward),
)


class LossPace:
    """Limits the processor time of all checks of this process together. Checks hold the interpreter's lock, which the
    compute thread and the event loop need too. Thread safe."""

    def __init__(self, *, share: float, burst_s: float) -> None:
        """`share`: the part of one core that checks may use in the long run. `burst_s`: processor time that they may
        use beyond it at once, in seconds."""
        self._share = share
        self._burst_s = burst_s
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        """Processor time that was used beyond the share, in seconds."""
        self._updated_at = time.monotonic()

    def used(self, seconds: float) -> None:
        """Records used processor time, and sleeps while the checks are ahead of their share by more than the burst."""
        with self._lock:
            now = time.monotonic()
            self._ahead_s = max(0.0, self._ahead_s - self._share * (now - self._updated_at)) + seconds
            self._updated_at = now
            pause_s = (self._ahead_s - self._burst_s) / self._share
        if pause_s > 0:
            time.sleep(pause_s)


class CostLimit(TorchDispatchMode):
    """Counts the elements of torch's operations while it is active, and raises InvalidRequest above the limits.

    It works below autograd, so it sees the parts of composite functions.
    """

    def __init__(self, before_each: Callable[[], None]) -> None:
        """`before_each`: called before each operation; may raise InvalidRequest."""
        super().__init__()
        self._before_each = before_each
        self._num_operations = 0
        self._total = 0
        self._largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before_each()
        self._num_operations += 1
        result = func(*args, **(kwargs or {}))
        inputs, results = _tensors((args, kwargs)), _tensors(result)
        self._largest = max(self._largest, *(one.numel() for one in (*inputs, *results)), 0)
        if not func.is_view:
            self._count(func.overloadpacket, inputs, results)
        return result

    @property
    def seconds(self) -> float:
        """Expected time with data of the operations counted so far, in seconds."""
        return self._total * SECONDS_PER_ELEMENT + self._num_operations * SECONDS_PER_OPERATION

    def gradient_is_small(self, num_nodes: int) -> bool:
        """True when the gradient of a graph of `num_nodes` nodes, which has been counted, must be within the limits."""
        return self._total + self._largest * num_nodes * _STEPS_OF_A_NODE <= MAX_ELEMENTS

    def _count(self, operation: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if operation in _PRODUCTS:
            a, b = inputs
            columns = b.shape[1] if b.ndim == 2 else 1
            step = max(a.numel(), b.numel(), a.numel() * columns // _MULTIPLY_ADDS_PER_ELEMENT)
        elif operation in _NOT_BROADCAST:
            step = max((one.numel() for one in inputs), default=0)
        else:
            step = _broadcast([tuple(one.shape) for one in inputs])
        step = max(step, sum(one.numel() for one in results))
        self._largest = max(self._largest, step)
        if operation in _SLOW:
            step *= _SLOWNESS
        self._total += step
        for what, used, limit in (("a step", step, MAX_STEP_ELEMENTS), ("the graph", self._total, MAX_ELEMENTS)):
            if used > limit:
                raise InvalidRequest(
                    f"{what} works on {used} elements for one datum ({operation}), this server allows {limit}"
                )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> int:
    """Number of elements of the broadcast shape; the sum over all shapes when they do not broadcast."""
    rank = max(map(len, shapes), default=0)
    sizes = [{shape[-axis] for shape in shapes if len(shape) >= axis} - {1} for axis in range(1, rank + 1)]
    if any(len(found) > 1 for found in sizes):
        return sum(math.prod(shape) for shape in shapes)
    return math.prod(next(iter(found), 1) for found in sizes)
