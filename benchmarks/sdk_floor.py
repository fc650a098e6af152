"""Measures the cost of the official `tinker` SDK by itself: forward_backward of 8 tokens with a stand-in that answers
at once (canned.py) and with the service, in turns, with the CPU time of each process. README.md says how to read it.

    python -m benchmarks sdk_floor --size tiny
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import tinker
from tinker import types

from benchmarks.canned import stand_in
from benchmarks.command_line import add_models, add_rounds, add_size
from benchmarks.figure import Aim, Figure, Report, usable_cores
from benchmarks.processes import MeasuredService, cpu_seconds, started
from benchmarks.rounds import alternate, ms
from benchmarks.service.bench import RANK, datum, forward_backward, optim_step, pipelined

NUM_REQUESTS = 100
"""Requests of a round. A process's CPU time is counted in units of 10 ms, which is 0.1 ms for each of these
requests."""
_SETTLE_S = 0.5
"""Pause after a round, in seconds, so that writes of the service after its answers count too."""
_CLIENT, _LOOP = "the client", "the client's event loop"
_VOCAB = 2000


@dataclass(frozen=True, slots=True)
class Side:
    """The SDK, and the server that answers it."""

    trainer: tinker.TrainingClient
    clocks: Mapping[str, Callable[[], float]]
    """Clocks of the CPU seconds used so far, by the name of the user: the client, its event loop, each service."""

    def measure(self, run: Callable[[tinker.TrainingClient], float]) -> Cost:
        before = {name: clock() for name, clock in self.clocks.items()}
        wall_ms = run(self.trainer)
        time.sleep(_SETTLE_S)
        cpu_ms = {name: 1e3 * (clock() - before[name]) / NUM_REQUESTS for name, clock in self.clocks.items()}
        return Cost(wall_ms, cpu_ms)


@dataclass(frozen=True, slots=True)
class Cost:
    wall_ms: float
    cpu_ms: Mapping[str, float]
    """CPU time of each request, by the name of its clock, in milliseconds."""

    @property
    def total_cpu_ms(self) -> float:
        return sum(spent for name, spent in self.cpu_ms.items() if name != _LOOP)  # which is part of the client


def floor(service: Side, canned: Side, data: list[types.Datum], arguments: argparse.Namespace) -> Iterator[Figure]:
    def one_alone_ms(trainer: tinker.TrainingClient) -> float:
        return median(ms(lambda: forward_backward(trainer, data)) for _ in range(NUM_REQUESTS))

    def pipelined_ms(trainer: tinker.TrainingClient) -> float:
        return ms(lambda: pipelined(trainer, data, count=NUM_REQUESTS))

    for name, run, aim in (
        ("one alone", one_alone_ms, Aim(12, "ms", at_most=True, model="tiny")),
        (f"{NUM_REQUESTS} pipelined", pipelined_ms, Aim(500, "ms", at_most=True, model="tiny")),
    ):
        ours, theirs = alternate(
            [lambda run=run: service.measure(run), lambda run=run: canned.measure(run)],
            repeats=arguments.repeats,
            budget_s=arguments.budget_s,
        )
        yield from _figures(name, ours, theirs, aim=aim)
    # The SDK's event loop is one thread, and all processes share the cores: no wall time is less than either.
    cores = usable_cores()
    yield _against(
        f"{name}: all CPU by {cores} cores", ours, theirs, lambda cost: cost.total_cpu_ms * NUM_REQUESTS / cores
    )
    yield _against(f"{name}: CPU of {_LOOP}", ours, theirs, lambda cost: cost.cpu_ms[_LOOP] * NUM_REQUESTS)


def _figures(name: str, ours: Sequence[Cost], theirs: Sequence[Cost], *, aim: Aim) -> Iterator[Figure]:
    yield _against(f"{name}: wall", ours, theirs, lambda cost: cost.wall_ms, aims=[aim])
    for user in ours[0].cpu_ms:
        if user in theirs[0].cpu_ms:
            yield _against(f"{name}, each: CPU of {user}", ours, theirs, lambda cost, user=user: cost.cpu_ms[user])
        else:
            yield Figure(f"{name}, each: CPU of {user}", "ms", [cost.cpu_ms[user] for cost in ours])
    for user in theirs[0].cpu_ms.keys() - ours[0].cpu_ms.keys():
        yield Figure(f"{name}, each: CPU of {user}", "ms", [cost.cpu_ms[user] for cost in theirs])
    yield _against(f"{name}, each: CPU of all", ours, theirs, lambda cost: cost.total_cpu_ms)


def _against(
    name: str, ours: Sequence[Cost], theirs: Sequence[Cost], of: Callable[[Cost], float], *, aims: Sequence[Aim] = ()
) -> Figure:
    return Figure(name, "ms", [of(cost) for cost in ours], "the stand-in", [of(cost) for cost in theirs], aims)


def connected(url: str, base_model: str, api_key: str, servers: Mapping[str, int]) -> Side:
    """`servers`: process ids."""
    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    trainer = service.create_lora_training_client(base_model, rank=RANK).result()
    loop_clock = _thread_clock(trainer.holder.get_loop())
    clocks = {_CLIENT: time.process_time, _LOOP: lambda: time.clock_gettime(loop_clock)}
    return Side(trainer, {**clocks, **{name: lambda pid=pid: cpu_seconds(pid) for name, pid in servers.items()}})


def _thread_clock(loop: asyncio.AbstractEventLoop) -> int:
    """The clock of CPU time of the thread that runs this loop."""

    async def thread_id() -> int:
        return threading.get_ident()

    return time.pthread_getcpuclockid(asyncio.run_coroutine_threadsafe(thread_id(), loop).result())


def figures(target: MeasuredService, arguments: argparse.Namespace) -> Iterator[Figure]:
    tokens = np.random.default_rng(0).integers(_VOCAB, size=(2, 8)).tolist()
    data = [datum(*tokens)]
    with stand_in(target.url) as (url, pid):
        login = (target.base_model, arguments.api_key)
        service = connected(target.url, *login, target.service_pids())
        canned = connected(url, *login, {"the stand-in": pid})
        for side in (service, canned):  # the stand-in asks now, and never again
            forward_backward(side.trainer, data)
            optim_step(side.trainer)
        yield from floor(service, canned, data, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="tiny")
    add_models(parser)
    parser.add_argument("--api-key", default="tml-bench")
    add_rounds(parser, repeats=10, budget_s=60.0)


def run(arguments: argparse.Namespace, report: Report) -> None:
    with started(arguments.size, models=arguments.models, trainer_threads=1, sampler_threads=1) as target:
        for figure in figures(target, arguments):
            report.add(figure)
