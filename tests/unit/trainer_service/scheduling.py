"""A scheduler with a real journal and an engine that only writes down what it is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.faults import is_device_fault
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Body
from trainer_service.engine.batch import Batch, Datum, MicroBatch, Output
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.operation import Answer, Operation, Turn, Work
from trainer_service.scheduling.scheduler import Scheduler


def fake_batch(
    name: str,
    num_tokens: int = 10,
    *,
    model_id: str = "",
    forward_only: bool = False,
    lengths: Sequence[int] = (),
    held_bytes: int = 0,
    loss_s: float = 0.0,
) -> Batch:
    """A batch of one datum of `num_tokens`, or of datums of `lengths`. The loss is named as the batch.

    `loss_s`: expected time of the loss of each datum, in seconds.
    """
    datums = [Datum(np.zeros(n, np.int32), np.zeros(n, np.int64), {}, loss_s=loss_s) for n in lengths or [num_tokens]]
    return Batch(name, LOSS_FNS["cross_entropy"], {}, forward_only, datums, held_bytes, model_id=model_id)


@dataclass
class FakeEngine:
    """The name of a batch says what becomes of it: "bad" fails, "explode" raises, "refused" is refused, "costly" has a
    loss of 50 ms."""

    token_budget: int = 100
    calls: list[list[tuple[str, str]]] = field(default_factory=list)
    """For each micro-batch the models and the names of their batches."""
    sizes: list[dict[str, int]] = field(default_factory=list)
    """For each micro-batch the number of datums by the name of the batch."""
    events: list[set[str]] = field(default_factory=list)
    """For each micro-batch the names of its batches, and for each step its model and number, in the order of time."""
    tainted: list[tuple[str, str]] = field(default_factory=list)
    num_begun: int = 0
    _ran: dict[Batch, list[int]] = field(default_factory=dict)
    """Indices of the datums that have run."""
    num_finished: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    """Closed by the tests that want operations to pile up."""

    _one: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.gate.set()

    def step(self) -> None:
        """With a closed gate: lets one micro-batch end, and returns when the next one runs."""
        num_micro_batches = len(self.sizes)
        self._one.release()
        self.wait_for_more_than(num_micro_batches)

    def wait_for_more_than(self, num_micro_batches: int) -> None:
        """Begun ones."""
        deadline = time.monotonic() + 5
        while len(self.sizes) <= num_micro_batches:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _wait(self) -> None:
        deadline = time.monotonic() + 10
        while not self.gate.is_set() and time.monotonic() < deadline:
            if self._one.acquire(timeout=0.001):
                return

    @property
    def moves_models(self) -> bool:
        return False

    def go_together(self, model_ids: Sequence[str]) -> bool:
        return True

    def charge(self, batch: Batch) -> None:
        pass

    def run(self, micro_batch: MicroBatch) -> None:
        assert len({batch.forward_only for batch, _ in micro_batch}) == 1
        num_tokens = sum(batch.datums[index].length for batch, indices in micro_batch for index in indices)
        assert num_tokens <= self.token_budget or sum(len(indices) for _, indices in micro_batch) == 1
        self.num_begun += sum(batch not in self._ran for batch, _ in micro_batch)
        self.calls.append([(batch.model_id, batch.loss_fn) for batch, _ in micro_batch])
        self.sizes.append({batch.loss_fn: len(indices) for batch, indices in micro_batch})
        self.events.append({batch.loss_fn for batch, _ in micro_batch})
        self._wait()
        for batch, indices in micro_batch:
            self._ran.setdefault(batch, []).extend(indices)
        if any(batch.loss_fn == "explode" for batch, _ in micro_batch):
            raise RuntimeError("boom")
        for batch, _ in micro_batch:
            assert batch.error is None
            if batch.loss_fn == "costly":
                time.sleep(0.05)
                batch.loss_seconds += 0.05
            if batch.loss_fn in ("bad", "refused"):
                batch.error = InvalidRequest("not finite" if batch.loss_fn == "bad" else "never fits")

    def finish(self, batch: Batch) -> Output | ServiceError:
        self.num_finished += 1
        if batch.error is None:
            assert sorted(self._ran[batch]) == list(range(len(batch.datums)))
            return Output([], {batch.loss_fn: 1.0})
        if not batch.forward_only:
            self.taint(batch.model_id, batch.error.message, seq_id=0)
        return batch.error

    def is_dead(self, error: Exception) -> bool:
        return is_device_fault(error)

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        self.tainted.append((model_id, reason))


@dataclass
class Bench:
    engine: FakeEngine
    journal: Journal
    scheduler: Scheduler
    registry: CollectorRegistry
    ran: list[tuple[str, int]] = field(default_factory=list)

    async def create(self, *model_ids: str) -> None:
        for model_id in model_ids:
            await (await self.step(model_id, 0)).wait()
        self.ran.clear()
        self.engine.events.clear()

    async def batch(self, model_id: str, seq_id: int, name: str = "", **settings: Any) -> Operation:
        batch = fake_batch(name or f"{model_id}{seq_id}", model_id=model_id, **settings)
        return await self.accept(model_id, seq_id, "forward_backward", batch, text=batch.loss_fn)

    async def hold(self, model_id: str, seq_id: int, name: str = "", **settings: Any) -> Operation:
        """A batch, once the engine is in the middle of its first micro-batch, where it stays until the gate opens."""
        self.engine.gate.clear()
        num_micro_batches = len(self.engine.sizes)
        operation = await self.batch(model_id, seq_id, name, **settings)
        await asyncio.to_thread(self.engine.wait_for_more_than, num_micro_batches)
        return operation

    async def step(
        self,
        model_id: str,
        seq_id: int,
        *,
        error: Exception | None = None,
        fault: Exception | None = None,
        text: str = "",
    ) -> Operation:
        """`error` is raised after its turn on the compute thread, `fault` in it."""

        def compute() -> None:
            if fault is not None:
                raise fault
            self.ran.append((model_id, seq_id))
            self.engine.events.append({f"{model_id} {seq_id}"})

        async def work(turn: Turn) -> Answer:
            await turn.run(compute)
            if error is not None:
                raise error
            return Answer(optim_step=pb.OptimStepResponse(metrics={"seq:mean": seq_id}))

        return await self.accept(model_id, seq_id, "optim_step", work, text=text)

    async def accept(self, model_id: str, seq_id: int, kind: str, work: Work, *, text: str = "") -> Operation:
        body = Body.pack(kind, pb.GetModelRequest(model_id=f"{model_id}/{seq_id}/{text}"))
        held_bytes = work.held_bytes if isinstance(work, Batch) else 0
        operation, is_new = await self.scheduler.accept(model_id, seq_id, body, held_bytes=held_bytes)
        if is_new:
            await self.scheduler.begin(operation, work)
        return operation

    def queue_length(self) -> float:
        kinds = ("optim_step", "forward_backward")
        return sum(self.registry.get_sample_value("trainer_queue_length", {"kind": kind}) or 0 for kind in kinds)


MakeBench = Callable[..., Awaitable[Bench]]
