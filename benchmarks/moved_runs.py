"""Runs that move: how long a run stands still while it moves to another trainer, through the SDK.

    python -m benchmarks moved_runs --size small

One of `--runs` runs is measured; all train on two trainers, step after step. Each round drains the trainer that has the
measured run, waits until that trainer is empty, and lets it take runs again. The value is the longest wait for a
forward_backward or an optim_step of the measured run in the round; the baseline is the longest one in `--calm-s`
seconds without a move, before the round.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tinker

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.processes import started
from benchmarks.service.bench import datum
from tinsmith_cli.client import ApiClient

_KEY = "tml-bench"
_RANK = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--runs", type=int, default=4, help="runs that train (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="moves of the measured run (%(default)s)")
    parser.add_argument("--calm-s", type=float, default=5.0, help="seconds before each move (%(default)s)")


class _Training(threading.Thread):
    """Trains a run until it is told to end, and keeps the longest wait for an operation."""

    def __init__(self, run: tinker.TrainingClient) -> None:
        super().__init__(daemon=True)
        self.ends = threading.Event()
        self.error: BaseException | None = None
        self._run = run
        self._longest_s = 0.0

    def run(self) -> None:
        tokens = np.random.default_rng(0).integers(1, 500, size=64).tolist()
        data, adam = [datum(tokens, tokens)] * 4, tinker.AdamParams(learning_rate=1e-4)
        try:
            while not self.ends.is_set():
                for send in (
                    lambda: self._run.forward_backward(data, "cross_entropy"),
                    lambda: self._run.optim_step(adam),
                ):
                    begin = time.perf_counter()
                    send().result()
                    self._longest_s = max(self._longest_s, time.perf_counter() - begin)
        except BaseException as error:
            self.error = error

    def longest_s(self) -> float:
        """The longest wait since the last call, in seconds."""
        if self.error is not None:
            raise self.error
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


@contextmanager
def _training(client: tinker.ServiceClient, base_model: str, number: int) -> Iterator[list[_Training]]:
    threads = [
        _Training(client.create_lora_training_client(base_model, rank=_RANK, seed=seed).result())
        for seed in range(number)
    ]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.ends.set()
        for thread in threads:
            thread.join()


def _trainers(server: ApiClient) -> dict[str, dict[str, Any]]:
    return {one["address"]: one for one in server.call("trainers")["trainers"]}


def _move_all(server: ApiClient, source: str) -> None:
    """Moves all runs of the trainer to the other one."""
    server.call("trainers/drain", content={"trainer": source})
    while not _trainers(server)[source]["can_be_stopped"]:
        time.sleep(0.1)
    server.call("trainers/undrain", content={"trainer": source})


def run(arguments: argparse.Namespace, report: Report) -> None:
    with (
        started(arguments.size, models=arguments.models, more_flags=["--trainers", "2"]) as target,
        tinker.ServiceClient(base_url=target.url, api_key=_KEY) as client,
    ):
        server = ApiClient(target.url, _KEY)
        moving_s: list[float] = []
        calm_s: list[float] = []
        with _training(client, target.base_model, arguments.runs) as (measured, *_):
            sources = list(_trainers(server))
            _move_all(server, sources[0])  # from now on, all runs are at the second one
            for _ in range(arguments.rounds):
                sources.reverse()
                measured.longest_s()
                time.sleep(arguments.calm_s)
                calm_s.append(measured.longest_s())
                _move_all(server, sources[0])
                time.sleep(1)  # in which the operation that waited is answered
                moving_s.append(measured.longest_s())
    aims = [Aim(10, "s", at_most=True, model="small")]
    report.add(Figure("the longest wait while a run moves", "s", moving_s, "without a move", calm_s, aims))
