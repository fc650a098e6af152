"""Common parts of the figures of a service: clients, batches, and rounds that alternate with a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from benchmarks.figure import Aim, Figure
from benchmarks.processes import Baseline, MeasuredService
from benchmarks.rounds import alternate, ms

RANK = 32
LATENCY_ROUNDS = 4
"""Rounds of a latency figure for each round of a throughput figure."""

Run = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ServiceBench:
    target: MeasuredService
    service: tinker.ServiceClient
    trainer: tinker.TrainingClient
    http: httpx.Client
    hf: Baseline | None
    vocab: int
    context: int
    api_key: str
    loop_threads: int
    """Threads of the baseline loop."""
    repeats: int
    budget_s: float
    rng: np.random.Generator

    def rounds(self, *runs: Run, repeats: int) -> list[list[float]]:
        """The values of each run. A figure takes about `budget_s` seconds at most, but never fewer than MIN_ROUNDS."""
        return alternate(runs, repeats=repeats, budget_s=self.budget_s)

    def latencies(self, *runs: Run) -> list[list[float]]:
        return self.rounds(*runs, repeats=LATENCY_ROUNDS * self.repeats)

    def against_hf(
        self,
        name: str,
        unit: str,
        run: Run,
        theirs: Callable[[Baseline], float],
        *,
        loop: str = "a padded PEFT loop",
        aims: Sequence[Aim] = (),
    ) -> Figure:
        """Rounds of the service and the loop. Each is idle while the other computes."""
        if (hf := self.hf) is None:
            (values,) = self.rounds(run, repeats=self.repeats)
            return Figure(name, unit, values, aims=aims)
        base, values = self.rounds(lambda: theirs(hf), run, repeats=self.repeats)
        return Figure(name, unit, values, loop, base, aims=aims)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(self.vocab, size=count).tolist()

    def prompt(self, length: int) -> types.ModelInput:
        return types.ModelInput.from_ints(self.tokens(length))

    def batch(self, lengths: Sequence[int]) -> list[types.Datum]:
        return [datum(self.tokens(length), self.tokens(length)) for length in lengths]

    def healthz_ms(self) -> float:
        return ms(lambda: self.http.get("/api/v1/healthz").raise_for_status())


def datum(tokens: Sequence[int], target_tokens: Sequence[int]) -> types.Datum:
    """A datum for cross_entropy, with equal weights for all tokens."""
    shape = [len(tokens)]
    targets = types.TensorData(data=list(target_tokens), dtype="int64", shape=shape)
    weights = types.TensorData(data=[1.0] * len(tokens), dtype="float32", shape=shape)
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": targets, "weights": weights})


def forward(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    trainer.forward(data, "cross_entropy").result()


def forward_backward(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    trainer.forward_backward(data, "cross_entropy").result()


def pipelined(trainer: tinker.TrainingClient, data: list[types.Datum], *, count: int) -> None:
    """Submits all batches before it waits for the first."""
    results([trainer.forward_backward(data, "cross_entropy") for _ in range(count)])


def optim_step(trainer: tinker.TrainingClient) -> None:
    trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def train_step(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """Submits both requests before it waits for either."""
    losses = trainer.forward_backward(data, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    losses.result()
    step.result()


def results(futures: Sequence[Any]) -> None:
    for future in futures:
        future.result()


def publish(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    return trainer.save_weights_and_get_sampling_client().result()


def sample(sampler: tinker.SamplingClient, prompts: Sequence[types.ModelInput], *, samples: int, tokens: int) -> int:
    """Submits all prompts at once, and returns the number of sampled tokens."""
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])  # nothing ends a sequence early
    futures = [sampler.sample(prompt, samples, params) for prompt in prompts]
    return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
