"""Decode steps as CUDA graphs.

A decode step of few rows consists of a thousand short kernels, and the host takes longer to start them than the device
to run them. A graph starts all of them at once. It computes with the tensors with which it was captured: the model, the
adapters, the keys and values, and small buffers of this module for what changes from step to step. A step with another
adapter needs another graph, and so does one with many more rows or keys: both numbers are rounded up.

Shapes: B running sequences, R rows of a graph, which are B or more, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sampler_service.torch_engine.kv_cache import power_of_two
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kv_cache import Cached, KVCache
from tinsmith.modeling.logprobs import logits

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Captures the computation of a function. Calling the result repeats the computation, from and to the same tensors."""

MAX_GRAPHS = 16
MAX_ADAPTERS = 8
"""Each adapter adds three kernels to each layer of a graph. Steps with more adapters use grouped products instead."""
MIN_KEYS = 256
"""Least number of keys of a graph, so that all short sequences share one."""
STEPS_BEFORE = 2
"""Number of steps of one kind that are computed without a graph before the next one is captured. Capturing takes about
as long as two steps."""


def why_no_graphs(base: BaseModel) -> str:
    """The reason for which steps of this model are not captured; empty if they are."""
    if base.device.type != "cuda":
        return f"CUDA graphs do not exist on {base.device.type}"
    if base.one_by_one:
        return "the model runs one sequence at a time"
    if base.recurrent:
        return "its layers carry a state from token to token"
    if base.tensor_parallel is not None or base.sharded is not None:
        return "its layers are divided among ranks"
    return ""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step that computes the newest token of each running sequence, in lanes 0 .. B-1 of one cache."""

    cache: KVCache
    tokens_B: Tensor
    positions_B: Tensor
    rotated_B: Tensor
    num_keys: int
    """Number of keys of the longest sequence."""
    runs: Sequence[Run]
    parameters: object
    """The full version whose parameters the model has; None for the model's own."""


@dataclass(slots=True)
class _Buffers:
    """Inputs and output of the graphs for R rows, which share them: one graph runs at a time."""

    tokens_R: Tensor
    positions_R: Tensor
    rotated_R: Tensor
    written_R: Tensor
    """Where the new keys and values go, as in Cached. The rows after the running ones store the first sequence's keys
    and values once more. Nothing else that these rows compute is read."""
    logits_R_V: Tensor

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, device: torch.device) -> _Buffers:
        tokens, positions, rotated, written = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        return cls(tokens, positions, rotated, written, torch.empty(num_rows, vocab_size, device=device))

    def fill(self, step: DecodeStep) -> None:
        count = len(step.tokens_B)
        for buffer, values in (
            (self.tokens_R, step.tokens_B),
            (self.positions_R, step.positions_B),
            (self.rotated_R, step.rotated_B),
        ):
            buffer[:count] = values
            buffer[count:] = values[0]
        torch.arange(count, out=self.written_R[:count])
        self.written_R[count:] = 0


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, with the tensors that it reads besides the model and the buffers."""

    replay: Replay
    cache: KVCache
    generation: int
    runs: Sequence[Run]
    parameters: object

    def reads(self, weights: object) -> bool:
        return weights is self.parameters or any(run.adapter is weights for run in self.runs)


@dataclass(slots=True)
class DecodeGraphs:
    """The graphs of one model. Belongs to the compute thread."""

    base: BaseModel
    capture: Capture
    why_not: str = ""
    """The reason for which no step is captured any more; empty while steps are."""
    _graphs: OrderedDict[Hashable, _Graph] = field(default_factory=OrderedDict)
    """Least recently used first."""
    _buffers: dict[int, _Buffers] = field(default_factory=dict)
    """The buffers, by their number of rows."""
    _latest: Hashable = None
    _repeated: int = 0
    """Number of consecutive steps of the kind `_latest` that were computed without a graph."""

    def __post_init__(self) -> None:
        # Grouped products copy a table to the device in each step, which a graph cannot repeat.
        self.base = replace(self.base, kernels=replace(self.base.kernels, grouped_mm=None))

    def logits(self, step: DecodeStep) -> Tensor | None:
        """The logits of a step, float32 [B, V], valid until the next step. None if the step has no graph and gets none
        now."""
        if self.why_not or len(step.runs) > MAX_ADAPTERS:
            return None
        count = len(step.tokens_B)
        num_rows = min(power_of_two(count), step.cache.num_lanes)
        num_keys = min(power_of_two(max(step.num_keys, MIN_KEYS)), step.cache.capacity)
        runs = _padded(step.runs, count, num_rows)
        key = (num_rows, num_keys, id(step.cache), id(step.parameters), *map(_key, runs))
        graph = self._graphs.get(key)
        if graph is None or graph.generation != step.cache.generation:
            if not self._is_time(key):
                return None
            graph = self._captured(step, num_rows, num_keys, runs)
            if graph is None:
                return None
            self._keep(key, graph)
        self._graphs.move_to_end(key)
        buffers = self._buffers[num_rows]
        buffers.fill(step)
        graph.replay()
        return buffers.logits_R_V[:count]

    def forget(self, weights: object) -> None:
        """Drops the graphs that read the memory of a version that is gone."""
        self._drop(lambda graph: graph.reads(weights))

    def clear(self) -> None:
        """Frees the memory of all graphs."""
        self._graphs.clear()
        self._buffers.clear()
        self._latest, self._repeated = None, 0

    def _is_time(self, key: Hashable) -> bool:
        if key != self._latest:
            self._latest, self._repeated = key, 0
        self._repeated += 1
        return self._repeated > STEPS_BEFORE

    def _captured(self, step: DecodeStep, num_rows: int, num_keys: int, runs: Sequence[Run]) -> _Graph | None:
        base = self.base
        if num_rows not in self._buffers:
            self._buffers[num_rows] = _Buffers.of(num_rows, base.vocab_size, base.device)
        buffers = self._buffers[num_rows]
        buffers.fill(step)  # capturing may compute the step, too

        def compute() -> None:
            layout = Cached(step.cache, buffers.positions_R, [], num_keys=num_keys, written_B=buffers.written_R)
            hidden_R_H = base.hidden_states(buffers.tokens_R, buffers.rotated_R, layout, runs)
            buffers.logits_R_V.copy_(logits(base.head, hidden_R_H, runs))

        try:
            replay = self.capture(compute)
        except torch.OutOfMemoryError:
            self.clear()
            raise
        except Exception as error:  # a model may compute on the host, which no graph can repeat
            logger.warning(
                "decode steps of %s are started one operation at a time from now on, because capturing one in a CUDA "
                "graph failed: %s",
                base.path,
                str(error).partition("\n")[0],
            )
            self.clear()
            self.why_not = str(error) or type(error).__name__
            return None
        return _Graph(replay, step.cache, step.cache.generation, runs, step.parameters)

    def _keep(self, key: Hashable, graph: _Graph) -> None:
        self._drop(lambda other: other.cache is graph.cache and other.generation != graph.generation)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _drop(self, gone: Callable[[_Graph], bool]) -> None:
        for key in [key for key, graph in self._graphs.items() if gone(graph)]:
            del self._graphs[key]


class CudaCapture:
    """Captures graphs that share their memory. They may share it because one graph runs at a time, and none keeps
    anything there but the logits, which lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: torch.cuda.CUDAGraph | None = None
        """A graph that does next to nothing, and keeps the pool alive: a pool exists while some graph uses it."""

    def __call__(self, compute: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._keeper is None:
                compute()  # libraries allocate the memory that they keep for a stream at their first use
                kept = torch.zeros(1, device=current.device)
                self._keeper = self._captured(lambda: kept.zero_())
            graph = self._captured(compute)
        current.wait_stream(self._stream)
        return graph.replay

    def _captured(self, compute: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which receive weights, may allocate memory meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            compute()
        except BaseException:
            _end_broken(graph)
            raise
        graph.capture_end()
        return graph


def _end_broken(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture that an error has broken off. CUDA reports that error again, which is ignored."""
    try:
        graph.capture_end()
    except RuntimeError:
        logger.debug("a broken capture has ended", exc_info=True)


def _padded(runs: Sequence[Run], count: int, num_rows: int) -> list[Run]:
    """The runs for R rows. The run of the last running sequence also covers the rows after it, so that it stays the
    same when a sequence ends."""
    return [
        replace(run, rows=slice(run.rows.start, num_rows))
        if isinstance(run.rows, slice) and run.rows.stop == count
        else run
        for run in runs
    ]


def _key(run: Run) -> Hashable:
    rows = (run.rows.start, run.rows.stop) if isinstance(run.rows, slice) else tuple(run.rows.tolist())
    return id(run.adapter), rows
