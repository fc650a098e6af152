"""Clients of the soak: threads that live one session after the other, each of random training, sampling, saves, loads
and deletes.

    python -m tests.faults.soak_clients URL --threads 4 --seed 1

Every exception is printed at once, as one line of JSON with its traceback, so that it is known though this process may
be killed at any time. When stdin is closed they end their sessions, and print what they did as a last line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import math
import random
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

import httpx
import tinker
from tinker import ModelInput, SamplingParams
from tinker.lib.api_future_impl import _APIFuture

from tests.support.examples import BASE_MODEL, batch, random_tokens

ADAM = tinker.AdamParams(learning_rate=1e-3)
RANKS = (4, 8, 16)
MAX_LOADS = 2
"""Most loads of one session: each adds a model."""
END_LIMIT_S = 240.0
"""Time for the sessions in work when all is to end."""


class Report:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[what] += amount

    def failed(self, error: str) -> None:
        error = f"{time.strftime('%X')}: {error}"
        print(error, file=sys.stderr, flush=True)
        with self._lock:
            print(json.dumps(error), flush=True)


@dataclass(slots=True)
class Life:
    """One session."""

    service: tinker.ServiceClient
    rest: tinker.RestClient
    rng: random.Random
    report: Report
    client: tinker.TrainingClient = field(init=False)
    states: list[str] = field(default_factory=list)
    """Saved, with the optimizer."""
    versions: list[str] = field(default_factory=list)
    """Saved for samplers."""
    num_loads: int = 0

    def __post_init__(self) -> None:
        rank, seed = self.rng.choice(RANKS), self.rng.randrange(1000)
        self.client = self.service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed).result()

    def live(self, stop: threading.Event) -> None:
        for _ in range(self.rng.randint(5, 20)):
            if stop.is_set():
                break
            act = self.rng.choice([self.train, self.train, self.train, self.sample, self.save, self.load, self.delete])
            act()
            self.report.count(act.__name__)
        while self.states or self.versions:
            self.delete()

    def train(self) -> None:
        data = batch(self.rng.randrange(1000), lengths=self.rng.choices((5, 9, 17, 33, 65), k=4))
        steps = [
            (self.client.forward_backward(data, "cross_entropy"), self.client.optim_step(ADAM))
            for _ in range(self.rng.randint(1, 5))
        ]
        for forward_backward, step in steps:
            assert math.isfinite(forward_backward.result().metrics["loss:sum"])
            step.result()
            self.report.count("steps")

    def sample(self) -> None:
        """Draws from the current weights."""
        self._draw(self.client.save_weights_and_get_sampling_client().result())

    def save(self) -> None:
        name = f"save-{self.rng.randrange(10**9)}"
        if self.rng.random() < 0.5:
            self.states.append(self.client.save_state(name).result().path)
        else:
            self.versions.append(self.client.save_weights_for_sampler(name).result().path)
            self._draw(self.service.create_sampling_client(self.versions[-1]).result())

    def load(self) -> None:
        if not self.states:
            return
        state = self.rng.choice(self.states)
        if self.num_loads < MAX_LOADS:
            self.num_loads += 1
            self.client = self.service.create_training_client_from_state_with_optimizer(state).result()

    def delete(self) -> None:
        kinds = [paths for paths in (self.states, self.versions) if paths]
        if kinds:
            path = self.rng.choice(kinds).pop()
            self.rest.delete_checkpoint_from_tinker_path(path).result()

    def _draw(self, sampler: tinker.SamplingClient) -> None:
        prompt = ModelInput.from_ints(random_tokens(self.rng.randint(1, 40), self.rng.randrange(1000)))
        max_tokens = self.rng.randint(1, 64)
        drawn = sampler.sample(prompt, self.rng.randint(1, 4), SamplingParams(max_tokens=max_tokens, stop=[])).result()
        assert all(len(sequence.tokens) == max_tokens for sequence in drawn.sequences)
        self.report.count("tokens", sum(len(sequence.tokens) for sequence in drawn.sequences))


def live_on(url: str, rng: random.Random, report: Report, stop: threading.Event) -> None:
    try:
        rest = tinker.RestClient(base_url=url, api_key="tml-soak")
    except Exception:
        report.failed(traceback.format_exc())
        return
    while not stop.is_set():
        try:
            with tinker.ServiceClient(base_url=url, api_key="tml-soak") as service:
                Life(service, rest, rng, report).live(stop)
            report.count("lives")
        except Exception:
            report.failed(traceback.format_exc())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("tinker").setLevel(logging.ERROR)  # each retry is a warning
    report, stop = Report(), threading.Event()
    threads = [
        threading.Thread(
            target=live_on, args=(arguments.url, random.Random(arguments.seed * 1000 + n), report, stop), daemon=True
        )
        for n in range(arguments.threads)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    deadline = time.monotonic() + END_LIMIT_S
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    if left := sum(thread.is_alive() for thread in threads):
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        waiting = "".join(f"\n{task!r}" for task in tasks if not task.done())
        report.failed(f"{left} sessions did not end in {END_LIMIT_S:g} s; the SDK waits for:{waiting}")
        for request_id in [one.request_id for one in gc.get_objects() if isinstance(one, _APIFuture)]:
            found = httpx.post(
                f"{arguments.url}/api/v1/retrieve_future",
                headers={"X-API-Key": "tml-soak"},
                json={"request_id": request_id, "allow_metadata_only": True},
                timeout=60,
                trust_env=False,
            )
            report.failed(f"{request_id}: {found.status_code} {found.text[:300]}")
    print(json.dumps(report.counts), flush=True)


if __name__ == "__main__":
    main()
