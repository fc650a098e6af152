"""A scheduler with a real journal and an engine that only writes down what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from tinsmith.rpc.errors import InvalidRequest, ServiceError
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.journal import Body, Journal
from trainer_service.scheduler import Scheduler
from trainer_service.work import Answer, Operation, RunBatch, Turn, Work


@dataclass(frozen=True)
class FakeBatch:
    name: str
    num_tokens: int = 10
    forward_only: bool = False


@dataclass(frozen=True)
class FakeOutput:
    name: str

    def to_proto(self) -> pb.ForwardBackwardResponse:
        return pb.ForwardBackwardResponse(loss_fn_output_type=self.name)


@dataclass
class FakeEngine:
    calls: list[list[tuple[str, str]]] = field(default_factory=list)
    tainted: list[tuple[str, str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """Closed by the tests that want operations to pile up."""

    def __post_init__(self) -> None:
        self.gate.set()

    def forward_backward(self, works: Sequence[tuple[str, Any]]) -> list[FakeOutput | ServiceError]:
        self.gate.wait(10)
        self.calls.append([(model_id, batch.name) for model_id, batch in works])
        if any(batch.name == "explode" for _, batch in works):
            raise RuntimeError("boom")
        return [InvalidRequest("not finite") if batch.name == "bad" else FakeOutput(batch.name) for _, batch in works]

    def taint(self, model_id: str, reason: str) -> None:
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

    async def batch(self, model_id: str, seq_id: int, name: str = "", **settings: Any) -> Operation:
        batch = FakeBatch(name or f"{model_id}{seq_id}", **settings)
        return await self.accept(model_id, seq_id, "forward_backward", RunBatch(batch), text=batch.name)

    async def step(self, model_id: str, seq_id: int, *, error: Exception | None = None, text: str = "") -> Operation:
        async def work(turn: Turn) -> Answer:
            await turn.run(lambda: self.ran.append((model_id, seq_id)))
            if error is not None:
                raise error
            return Answer(optim_step=pb.OptimStepResponse(metrics={"seq:mean": seq_id}))

        return await self.accept(model_id, seq_id, "optim_step", work, text=text)

    async def accept(self, model_id: str, seq_id: int, kind: str, work: Work, *, text: str = "") -> Operation:
        async def build() -> Work:
            return work

        body = Body.pack(kind, pb.GetModelRequest(model_id=f"{model_id}/{seq_id}/{text}"))
        return await self.scheduler.accept(model_id, seq_id, body, build)

    def queue_length(self) -> float:
        kinds = ("optim_step", "forward_backward")
        return sum(self.registry.get_sample_value("trainer_queue_length", {"kind": kind}) or 0 for kind in kinds)


MakeBench = Callable[..., Awaitable[Bench]]
