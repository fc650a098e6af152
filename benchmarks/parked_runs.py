"""Parked runs: how long one takes to come back at its next operation, and the services' memory with many runs.

    python -m benchmarks parked_runs --size small
    python -m benchmarks parked_runs --size tiny --known 500 --only memory

"come_back": `--runs` runs take turns through the SDK, with fewer places than runs, so each finds itself parked; the
baseline is the same operation, sent again at once. "memory": resident memory of each service with `--places` runs,
after a step of each, `--known` steps in all; and with `--known` runs, after a step of each new one. All are idle then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import psutil
import tinker

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.processes import MeasuredService, started
from benchmarks.service.bench import datum

_RANK = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--only", nargs="+", choices=("come_back", "memory"), default=["come_back", "memory"])
    parser.add_argument("--runs", type=int, default=8, help="runs that take turns (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--places", type=int, default=16, help="runs in memory at once (%(default)s)")
    parser.add_argument("--known", type=int, default=500, help="runs that are known (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    if "come_back" in arguments.only:
        _come_back(arguments, report)
    if "memory" in arguments.only:
        _memory(arguments, report)


@contextmanager
def _service(arguments: argparse.Namespace, places: int) -> Iterator[tuple[MeasuredService, tinker.ServiceClient]]:
    environment = {"TRAINER_MAX_MODELS": str(places), "GATEWAY_MAX_SESSIONS": "10000"}
    with (
        started(arguments.size, models=arguments.models, environment=environment) as target,
        tinker.ServiceClient(base_url=target.url, api_key="tml-bench") as client,
    ):
        yield target, client


def _new(target: MeasuredService, client: tinker.ServiceClient, number: int) -> list[tinker.TrainingClient]:
    made = [client.create_lora_training_client(target.base_model, rank=_RANK, seed=0) for _ in range(number)]
    return [each.result() for each in made]


def _step(trainers: Sequence[tinker.TrainingClient], data: list[tinker.Datum]) -> None:
    """One step of each, all at once."""
    sent = [trainer.forward_backward(data, "cross_entropy") for trainer in trainers]
    steps = [trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)) for trainer in trainers]
    for future in (*sent, *steps):
        future.result()


def _data() -> list[tinker.Datum]:
    tokens = np.random.default_rng(0).integers(1, 500, size=16).tolist()
    return [datum(tokens, tokens)]


def _come_back(arguments: argparse.Namespace, report: Report) -> None:
    data, came_back_s, in_memory_s = _data(), [], []
    with _service(arguments, 2) as (target, client):
        trainers = [trainer for _ in range(arguments.runs) for trainer in _new(target, client, 1)]
        for trainer in trainers:
            _step([trainer], data)
        for _ in range(arguments.rounds):
            for trainer in trainers:  # the run that was used longest ago, which is parked
                for found_s in (came_back_s, in_memory_s):
                    begin = time.perf_counter()
                    trainer.forward(data, "cross_entropy").result()
                    found_s.append(time.perf_counter() - begin)
    report.add(
        Figure(
            "a parked run's next operation",
            "s",
            came_back_s,
            "a run's in memory",
            in_memory_s,
            [Aim(1, "s", at_most=True, model="small")],
        )
    )


def _memory(arguments: argparse.Namespace, report: Report) -> None:
    data = _data()
    with _service(arguments, arguments.places) as (target, client):
        trainers = _new(target, client, arguments.places)
        for _ in range(0, arguments.known, arguments.places):
            _step(trainers, data)
        few = _resident(target)
        for _ in range(arguments.places, arguments.known, arguments.places):
            _step(_new(target, client, arguments.places), data)
        many = _resident(target)
    few["all services"], many["all services"] = sum(few.values()), sum(many.values())
    for name, before in few.items():
        aims = [Aim(1.05, at_most=True)]
        title = f"{name} with {arguments.known} runs known"
        report.add(Figure(title, "MB", [many[name]], f"with {arguments.places}", [before], aims))


def _resident(target: MeasuredService) -> dict[str, float]:
    """Resident memory of each service, in MB, once it does not change any more."""
    pids = target.service_pids()
    now = dict.fromkeys(pids, 0.0)
    for _ in range(20):
        before, now = now, {name: psutil.Process(pid).memory_info().rss / 1e6 for name, pid in pids.items()}
        if all(abs(now[name] - before[name]) < 0.5 for name in now):
            break
        time.sleep(1)
    return now
