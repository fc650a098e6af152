"""A scheduler with a real journal and an engine that only writes down what it is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from tinsmith.rpc.errors import InvalidRequest, ServiceError
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_records import Body
from trainer_service.engine.faults import is_device_fault
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.scheduling.work import Answer, Operation, RunBatch, Turn, Work


@dataclass(frozen=True)
class FakeDatum:
    length: int
    loss_s: float = 0.0

    @property
    def charge(self) -> int:
        return self.length


@dataclass(frozen=True)
class FakeBatch:
    """Of one datum of `num_tokens`, unless `lengths` says otherwise."""

    name: str
    num_tokens: int = 10
    forward_only: bool = False
    lengths: Sequence[int] = ()
    held_bytes: int = 0
    loss_s: float = 0.0
    """Expected of each datum."""

    @property
    def datums(self) -> Sequence[FakeDatum]:
        return [FakeDatum(length, self.loss_s) for length in self.lengths or [self.num_tokens]]


@dataclass(frozen=True)
class FakeOutput:
    name: str

    def to_proto(self) -> pb.ForwardBackwardResponse:
        return pb.ForwardBackwardResponse(loss_fn_output_type=self.name)


@dataclass(eq=False)
class FakeJob:
    model_id: str
    batch: FakeBatch
    error: ServiceError | None = None
    loss_seconds: float = 0.0
    ran: list[int] = field(default_factory=list)

    def piece(self, indices: Sequence[int]) -> tuple[FakeJob, Sequence[int]]:
        return self, indices


@dataclass
class FakeEngine:
    """What a batch does, its name says: "bad" fails, "explode" raises, "refused" is not begun, "costly" has a loss of
    50 ms."""

    token_budget: int = 100
    calls: list[list[tuple[str, str]]] = field(default_factory=list)
    """For each micro-batch the models and the names of their batches."""
    sizes: list[dict[str, int]] = field(default_factory=list)
    """For each micro-batch the number of datums by the name of the batch."""
    events: list[set[str]] = field(default_factory=list)
    """For each micro-batch the names of its batches, and for each step its model and number, in the order of time."""
    tainted: list[tuple[str, str]] = field(default_factory=list)
    num_begun: int = 0
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

    def begin(self, model_id: str, batch: FakeBatch) -> FakeJob:
        if batch.name == "refused":
            raise InvalidRequest("never fits")
        self.num_begun += 1
        return FakeJob(model_id, batch)

    def run(self, pieces: Sequence[tuple[FakeJob, Sequence[int]]]) -> None:
        assert len({job.batch.forward_only for job, _ in pieces}) == 1
        num_tokens = sum(job.batch.datums[index].length for job, indices in pieces for index in indices)
        assert num_tokens <= self.token_budget or sum(len(indices) for _, indices in pieces) == 1
        self.calls.append([(job.model_id, job.batch.name) for job, _ in pieces])
        self.sizes.append({job.batch.name: len(indices) for job, indices in pieces})
        self.events.append({job.batch.name for job, _ in pieces})
        self._wait()
        if any(job.batch.name == "explode" for job, _ in pieces):
            raise RuntimeError("boom")
        for job, indices in pieces:
            assert job.error is None
            if job.batch.name == "costly":
                time.sleep(0.05)
                job.loss_seconds += 0.05
            job.ran += indices
            if job.batch.name == "bad":
                job.error = InvalidRequest("not finite")

    def finish(self, job: FakeJob) -> FakeOutput | ServiceError:
        self.num_finished += 1
        if job.error is None:
            assert sorted(job.ran) == list(range(len(job.batch.datums)))
            return FakeOutput(job.batch.name)
        if not job.batch.forward_only:
            self.taint(job.model_id, job.error.message, seq_id=0)
        return job.error

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
        batch = FakeBatch(name or f"{model_id}{seq_id}", **settings)
        return await self.accept(model_id, seq_id, "forward_backward", RunBatch(batch), text=batch.name)

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
        async def build() -> Work:
            return work

        body = Body.pack(kind, pb.GetModelRequest(model_id=f"{model_id}/{seq_id}/{text}"))
        held_bytes = work.batch.held_bytes if isinstance(work, RunBatch) else 0
        return await self.scheduler.accept(model_id, seq_id, body, build, held_bytes=held_bytes)

    def queue_length(self) -> float:
        kinds = ("optim_step", "forward_backward")
        return sum(self.registry.get_sample_value("trainer_queue_length", {"kind": kind}) or 0 for kind in kinds)


MakeBench = Callable[..., Awaitable[Bench]]
