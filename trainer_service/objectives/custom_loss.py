"""Custom losses: a traced Python function of one datum, sent as a graph and run beside the model's own pass.

The graph is separate from the model's autograd graph. For each datum it computes the loss C from a copy of the logprobs
p in host memory. Its gradient dC/dp becomes a linear loss, sum(dC/dp p), which has the same gradient in the model's
weights. So a batch still takes one pass of the base model, the graph's memory is freed after each datum, and an index
out of range raises an exception instead of ending a GPU's context.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest
from tinsmith.faults import is_out_of_memory
from trainer_service.objectives.custom_loss_cost import CostLimit, LossPace
from trainer_service.objectives.custom_loss_graph import Graph, Node, check_result, parse
from trainer_service.objectives.losses import Arrays, Term

MAX_INPUTS = 16
MAX_NODE_BYTES = 64 * 2**20
"""Limit on the result of one node, for one datum."""
MAX_BYTES = 512 * 2**20
"""Limit on the results of all nodes together, for one datum."""
TIME_LIMIT_S = 10.0
"""Limit on the time of a custom loss in one pass of the base model, and on the processor time of one request's
check."""
CHECKS = LossPace(share=0.2, burst_s=0.25)
"""Limits the processor time of all checks. While checks run, other models' batches take about a quarter longer."""
_SLICE_S = 0.002
"""Processor time of a check after which its limits are examined again, in seconds."""

_MAX_KINDS = 10_000
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Shape = tuple[int, ...]
Deadline = Callable[[Node | None], None]
"""Raises InvalidRequest when the time is over. The message names the node that comes next, if any."""


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A custom loss, ready to run: an Objective."""

    name: str
    inputs: Sequence[Input]
    """"logprobs" first, then the loss_fn_inputs that the graph reads."""
    graph: Graph
    _seconds: dict[Any, float] = field(default_factory=dict, repr=False, compare=False)
    """Expected time of the loss for each combination of shapes and dtypes that check_shapes has seen, in seconds."""

    def check_shapes(self, datums: Sequence[tuple[Shape, Arrays]]) -> list[float]:
        """Runs the graph without data, once for each combination of shapes and dtypes among the datums.

        `datums`: for each the shape of its targets, and its other inputs. The graph's memory and operations depend on
        shapes and dtypes alone, so this bounds them. Returns the expected time of the loss for each datum, in seconds.
        Raises InvalidRequest when a limit is exceeded or the graph cannot run.
        """
        _load_shape_functions()
        if len(self._seconds) > _MAX_KINDS:
            self._seconds.clear()
        expected: list[float] = []
        with _paced() as before_each:
            for logprobs, arrays in datums:
                others = [arrays[one.name] for one in self.inputs[1:]]
                kind = (logprobs, *((array.shape, array.dtype.str) for array in others))
                seconds = self._seconds.get(kind)
                if seconds is None:
                    p = torch.empty(logprobs, device="meta", requires_grad=True)
                    empty = [torch.empty(array.shape, dtype=_dtype(array), device="meta") for array in others]
                    seconds = self._seconds[kind] = self._check([p, *empty], before_each=before_each)
                expected.append(seconds)
        return expected

    def _check(self, inputs: Sequence[Tensor], *, before_each: Callable[[], None]) -> float:
        """Runs the graph on inputs without data. Returns its expected time with data, in seconds."""
        num_bytes = 0

        def bounded(result: Any) -> None:
            nonlocal num_bytes
            size = check_result(result)
            num_bytes += size
            for what, used, limit in (("its result", size, MAX_NODE_BYTES), ("the graph", num_bytes, MAX_BYTES)):
                if used > limit:
                    raise InvalidRequest(f"{what} needs {used} bytes for one datum, this server allows {limit}")

        cost = CostLimit(before_each)
        with torch.device("meta"), cost:  # tensors that the graph creates have no data either
            loss, metrics = self.graph.run(inputs, before=lambda _: before_each(), after=bounded)
        if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.dtype not in _FLOATS:
            raise self._refused(f"the loss must be a scalar tensor of floats, not {_described(loss)}")
        if not loss.requires_grad:
            raise self._refused("the loss does not depend on the logprobs, so it has no gradient")
        for key, value in metrics.items():
            if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise self._refused(f"metric {key!r} must be a scalar, not {_described(value)}")
        if not cost.gradient_is_small(len(self.graph.nodes)):
            with cost:
                self._gradient(loss, inputs[0])
        return cost.seconds

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays], config: Mapping[str, float]) -> Term:
        deadline = self._deadline()
        value, sums = 0.0, dict.fromkeys(self.graph.metrics, 0.0)
        gradients: list[Tensor] = []
        p_M = torch.cat([piece.reshape(-1) for piece in logprobs])
        on_host = p_M.detach().cpu().split([piece.numel() for piece in logprobs])
        for piece, host, arrays in zip(logprobs, on_host, inputs, strict=True):
            p = host.reshape(piece.shape).clone().requires_grad_(torch.is_grad_enabled())
            others = [torch.tensor(arrays[one.name]) for one in self.inputs[1:]]
            loss, metrics = self.graph.run([p, *others], before=deadline, after=lambda _: None)
            value += loss.item()
            for key, metric in metrics.items():
                sums[key] += float(metric.detach() if isinstance(metric, Tensor) else metric)
            if torch.is_grad_enabled():
                gradients.append(self._gradient(loss, p).reshape(-1))
            deadline(None)
        if not gradients:
            return Term(torch.zeros((), dtype=torch.float64, device=p_M.device), value, sums)
        linear = (torch.cat(gradients).to(p_M.device) * p_M).sum(dtype=torch.float64)
        return Term(linear, value, sums)

    def _gradient(self, loss: Tensor, p: Tensor) -> Tensor:
        try:
            (gradient,) = torch.autograd.grad(loss, p)
        except InvalidRequest as error:
            raise self._refused(f"its gradient: {error.message}") from None
        except RuntimeError as error:  # raised for operations without a derivative, among others
            if is_out_of_memory(error):
                raise
            raise self._refused(f"its gradient cannot be computed: {str(error).splitlines()[0][:300]}") from error
        return gradient

    def _deadline(self) -> Deadline:
        end = time.monotonic() + TIME_LIMIT_S

        def check(node: Node | None) -> None:
            if time.monotonic() <= end:
                return
            if node is not None:
                raise self.graph.refused(node, f"was not reached within {TIME_LIMIT_S:g} s, this server's limit")
            raise self._refused(f"was not done within {TIME_LIMIT_S:g} s, this server's limit")

        return check

    def _refused(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"custom loss {self.name!r}: {problem}", field="custom_loss.graph")


@contextmanager
def _paced() -> Iterator[Callable[[], None]]:
    """A context for one check. It yields a function to call before each operation, which sleeps to keep the pace, and
    raises InvalidRequest when the check's time is over."""
    started_s = paid_s = time.thread_time()

    def before_each() -> None:
        nonlocal paid_s
        now = time.thread_time()
        if now - paid_s < _SLICE_S:
            return
        CHECKS.used(now - paid_s)
        paid_s = now
        if now - started_s > TIME_LIMIT_S:
            raise InvalidRequest(
                f"the check of the request's shapes takes more than {TIME_LIMIT_S:g} s of processor time, this "
                "server's limit",
                field="custom_loss",
            )

    try:
        yield before_each
    finally:
        CHECKS.used(time.thread_time() - paid_s)


@lru_cache(maxsize=32)
def build_loss(name: str, inputs: tuple[Input, ...], graph: str) -> CustomLoss:
    """Makes a loss. Raises InvalidRequest for errors that can be found without data.

    Cached: a run sends the same loss with thousands of requests, and each loss caches its checks."""
    _check_inputs(name, inputs)
    return CustomLoss(name, inputs, parse(name, [one.name for one in inputs], graph))


@cache
def _load_shape_functions() -> None:
    """Makes torch load its shape functions, which takes seconds at their first use, outside any check's time limit."""
    torch.ones(1, device="meta").abs()


def _check_inputs(name: str, inputs: Sequence[Input]) -> None:
    def refused(problem: str) -> InvalidRequest:
        return InvalidRequest(f"custom loss {name!r}: inputs: {problem}", field="custom_loss.inputs")

    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise refused(f"{len(inputs)} are outside 1..{MAX_INPUTS}")
    if inputs[0].name != "logprobs" or inputs[0].rank == 0:
        raise refused("the first must be logprobs, of rank 1 or 2")
    for number, one in enumerate(inputs):
        if not _INPUT_NAME.fullmatch(one.name):
            raise refused(f"{one.name[:100]!r} is not a lowercase name")
        if one.rank not in (0, 1, 2):
            raise refused(f"{one.name!r} has rank {one.rank}, which is not 0, 1 or 2")
        if any(one.name == other.name for other in inputs[:number]):
            raise refused(f"{one.name!r} is there twice")


def _dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _described(value: Any) -> str:
    return f"one of shape {list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
