"""Simulates many tenants on eight GPUs, with the trainer's own fair queue and the gateway's own placement: README.md.

    python -m benchmarks tenants

Nothing is trained. A clock of its own moves from one micro-batch to the next. The trainer's choice of datums
(DeficitRoundRobin), the models that it keeps on the device (Residency), the most models that it moves for a micro-batch
and the gateway's choice of a trainer (least_loaded) are the code that serves. The times of a pass and of a move are
figures of an H100 with a model of 8 billion parameters and adapters of rank 32.

A tenant has one run after the other. It has a batch to send at random moments, and at most two at the trainer; the
others wait at the client. What the tenants send in the mean is divided among them by a Pareto distribution.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.figure import Aim, Figure, Report
from benchmarks.press import percentile
from gateway.placement import least_loaded
from tinsmith.rpc.times import duration
from tinsmith.v1 import trainer_pb2
from trainer_service.engine.batch import Batch, Datum
from trainer_service.engine.budget import MAX_COMING
from trainer_service.engine.residency import Residency
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.scheduling.packing import DeficitRoundRobin

NUM_GPUS = 8
TOKENS_PER_S = 13_000
"""Training speed of one GPU (README.md, "On one GPU")."""
PASS_S = 0.2
"""Least time of a pass, however few tokens it has, in seconds."""
SHARED_PASS_S = 0.5
"""Time that a micro-batch takes while several models are at work, in seconds, as the trainer aims for on CUDA."""
MOST_TOKENS = 16_384
"""Most tokens of a micro-batch on each GPU."""
RUN_BYTES = 92_000_000 * 16
"""An adapter with its gradient and two moments, in float32."""
MOVE_BYTES_PER_S = 50e9
"""Speed between a GPU and page-locked host memory; each GPU of a trainer has its own copy of an adapter."""
DEVICE_BYTES = 40_000_000_000
"""Memory of a GPU for adapters, beside the base model and activations."""
DATUM_TOKENS = 512
MOST_SENT = 2
"""Batches that a client has at the trainer at once; the next one is sent when one of them is answered."""
SMALL_TOKENS = 4096
"""Most tokens of a small job."""
RUN_S = 600.0
"""Mean life of a run, in seconds."""
WARM_S = 300.0
"""Time before the measurement, in seconds."""


class _Adapter:
    """A model, which takes memory on the device or on the host."""

    num_bytes = RUN_BYTES

    def move(self, move: Callable[[Any], Any]) -> None:
        move(None)


@dataclass(eq=False)
class BatchAndStep:
    """A batch and the step after it."""

    tenant: Tenant
    batch: Batch
    came_s: float
    tokens: int


class SimulatedTrainer:
    """One trainer, which computes one micro-batch after the other on its GPUs."""

    def __init__(self, number: int, num_gpus: int) -> None:
        self.trainer_id = str(number)
        self.num_gpus = num_gpus
        self.rate = TOKENS_PER_S * num_gpus
        self.ring = DeficitRoundRobin()
        self.jobs: dict[Batch, BatchAndStep] = {}
        self.runs: set[str] = set()
        self.queued_tokens = 0
        self.is_busy = False
        self.num_moves = 0
        self.residency = Residency(to_device=self._count, to_host=self._count)

    def _count(self, _: Any) -> Any:
        self.num_moves += 1

    def info(self) -> trainer_pb2.GetTrainerInfoResponse:
        return trainer_pb2.GetTrainerInfoResponse(
            trainer_id=self.trainer_id,
            reserved_bytes=len(self.runs) * RUN_BYTES,
            reservable_bytes=2_000_000_000_000,
            num_models=len(self.runs),
            queued_time=duration(self.queued_tokens / self.rate),
        )

    def begin_run(self, run: str) -> None:
        self.runs.add(run)
        self.residency.use([], max_bytes=DEVICE_BYTES - RUN_BYTES)
        self.residency.add(run, _Adapter())

    def end_run(self, run: str) -> None:
        self.runs.discard(run)
        self.residency.remove(run)

    def add(self, job: BatchAndStep) -> None:
        self.jobs[job.batch] = job
        self.queued_tokens += job.tokens
        self.ring.add(job.batch)

    def go_together(self, runs: Sequence[str]) -> bool:
        """The rule of MemoryBudget.go_together."""
        return self.residency.num_on_host(runs) <= MAX_COMING and len(runs) * RUN_BYTES <= DEVICE_BYTES

    def compute(self) -> tuple[float, list[BatchAndStep]]:
        """Takes the next micro-batch. Returns its time, in seconds, and the jobs that it ends."""
        budget = self.num_gpus * MOST_TOKENS if self.ring.is_crowded else int(self.rate * SHARED_PASS_S)
        taken = self.ring.next_micro_batch(budget, self.go_together)
        tokens = sum(len(indices) for _, indices in taken) * DATUM_TOKENS
        self.queued_tokens -= tokens
        before = self.num_moves
        self.residency.use([batch.model_id for batch, _ in taken], max_bytes=DEVICE_BYTES)
        moving_s = (self.num_moves - before) * RUN_BYTES / MOVE_BYTES_PER_S
        ended = [self.jobs.pop(batch) for batch, _ in taken if not batch.num_waiting]
        return moving_s + max(PASS_S, tokens / self.rate), ended


@dataclass
class Tenant:
    """A client whose batches come in the mean `rate` times a second, with `tokens` tokens in the median."""

    rate: float
    tokens: float
    run: str = ""
    trainer: SimulatedTrainer | None = None
    num_runs: int = 0
    ends_s: float = 0.0
    num_late: int = 0
    """Batches that wait at the client, because it has sent MOST_SENT."""
    num_sent: int = 0
    """Batches without an answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    throughput: float
    """Computed tokens in parts of what the GPUs can compute."""
    small_s: Sequence[float]
    """Time from the sending of each small job to its end, in seconds."""


def simulate(num_tenants: int, num_trainers: int, *, load: float, seconds: float, seed: int) -> Outcome:
    rng = random.Random(seed)  # noqa: S311
    capacity = NUM_GPUS * TOKENS_PER_S
    trainers = [SimulatedTrainer(number, NUM_GPUS // num_trainers) for number in range(num_trainers)]
    tenants = _tenants(num_tenants, load * capacity, rng)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    counter = iter(range(10**12))
    small: list[float] = []
    computed = 0

    def at(when: float, what: Callable[[float], None]) -> None:
        heappush(events, (when, next(counter), what))

    def work(trainer: SimulatedTrainer, now: float) -> None:
        if trainer.is_busy or not trainer.ring:
            return
        trainer.is_busy = True
        took, ended = trainer.compute()
        at(now + took, lambda now: over(trainer, ended, now))

    def over(trainer: SimulatedTrainer, ended: list[BatchAndStep], now: float) -> None:
        nonlocal computed
        trainer.is_busy = False
        for job in ended:
            job.tenant.num_sent -= 1
            if job.tenant.num_late:
                job.tenant.num_late -= 1
                send(job.tenant, now)
            if now > WARM_S:
                computed += job.tokens
                if job.tokens <= SMALL_TOKENS and job.came_s > WARM_S:
                    small.append(now - job.came_s)
        work(trainer, now)

    def come(tenant: Tenant, now: float) -> None:
        at(now + rng.expovariate(tenant.rate), lambda now: come(tenant, now))
        if tenant.num_sent < MOST_SENT:
            send(tenant, now)
        else:
            tenant.num_late += 1

    def send(tenant: Tenant, now: float) -> None:
        trainer = tenant.trainer
        if trainer is None or (now >= tenant.ends_s and not tenant.num_sent):
            if trainer is not None:
                trainer.end_run(tenant.run)
            tenant.num_runs += 1
            tenant.run = f"{id(tenant)}-{tenant.num_runs}"
            infos = [(SimpleNamespace(trainer=trainer), trainer.info()) for trainer in trainers]
            tenant.trainer = trainer = least_loaded(infos, {}).trainer  # type: ignore[arg-type,attr-defined]
            trainer.begin_run(tenant.run)
            tenant.ends_s = now + rng.expovariate(1 / RUN_S)
        num_datums = max(1, round(tenant.tokens * rng.lognormvariate(0, 0.5) / DATUM_TOKENS))
        batch = Batch("cross_entropy", _LOSS, {}, False, [_DATUM] * num_datums, model_id=tenant.run)
        tenant.num_sent += 1
        trainer.add(BatchAndStep(tenant, batch, now, num_datums * DATUM_TOKENS))
        work(trainer, now)

    for tenant in tenants:
        at(rng.expovariate(tenant.rate), lambda now, tenant=tenant: come(tenant, now))
    while events and events[0][0] < WARM_S + seconds:
        now, _, what = heappop(events)
        what(now)
    return Outcome(computed / seconds / capacity, small)


_DATUM = Datum(np.zeros(DATUM_TOKENS, np.int32), np.zeros(DATUM_TOKENS, np.int64), {})
_LOSS = LOSS_FNS["cross_entropy"]


def _tenants(number: int, tokens_per_s: float, rng: random.Random) -> list[Tenant]:
    """Tenants that together send so many tokens a second."""
    weights = [min(rng.paretovariate(1.1), 0.03 * number) for _ in range(number)]
    sizes = [rng.lognormvariate(np.log(8192), 1.5) for _ in range(number)]
    share = tokens_per_s / sum(weights)
    mean = float(np.exp(0.5**2 / 2))
    return [
        Tenant(rate=weight * share / (size * mean), tokens=size) for weight, size in zip(weights, sizes, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", type=float, default=0.9, help="offered, in parts of the capacity (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="simulated time, in seconds (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of simulations of each case (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    capacity = NUM_GPUS * TOKENS_PER_S
    for num_tenants in (1000, 64):
        pool: list[Outcome] = []
        for num_trainers in (1, 2, 4, 8):
            outcomes = [
                simulate(num_tenants, num_trainers, load=arguments.load, seconds=arguments.seconds, seed=seed)
                for seed in range(arguments.seeds)
            ]
            pool = pool or outcomes
            many, few = num_tenants == 1000 and num_trainers > 1, num_tenants == 64 and num_trainers > 1
            name = f"{num_tenants} tenants, {num_trainers} {'trainer' if num_trainers == 1 else 'trainers'}"
            throughput = [capacity * one.throughput for one in outcomes]
            report.add(
                Figure(
                    f"{name}: trained",
                    "tokens/s",
                    throughput,
                    "one trainer",
                    [capacity * one.throughput for one in pool],
                    aims=[Aim(0.85 * capacity, "tokens/s")] if many else [Aim(0.85)] if few else [],
                )
            )
            report.add(
                Figure(
                    f"{name}: small jobs, p99",
                    "s",
                    [percentile(one.small_s, 99) for one in outcomes],
                    "one trainer",
                    [percentile(one.small_s, 99) for one in pool],
                    aims=[Aim(30.0, "s", at_most=True)] if many else [Aim(1.15, at_most=True)] if few else [],
                )
            )
