"""Iterations of reinforcement learning: sample, train, publish; one after the other, or at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import tinker
from tinker import types

from benchmarks.figure import Figure
from benchmarks.processes import Baseline
from benchmarks.rounds import seconds
from benchmarks.service.bench import ServiceBench, publish, results

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 64, 64
ASYNC_NEW_TOKENS = 128
"""Number of new tokens with which sampling takes about as long as training."""

Drawing = tuple[list[int], tinker.APIFuture[types.SampleResponse]]
"""A prompt and its samples."""


def rl_iteration(bench: ServiceBench) -> Iterator[Figure]:
    """One synchronous iteration: samples of the newest weights, a step on them, and the new weights on the sampler. The
    loop generates and trains as much, in one process, and has nothing to publish."""
    clients = [publish(bench.trainer)]

    def iteration() -> float:
        return seconds(lambda: clients.append(_iterate(bench, clients.pop())))

    def loop(hf: Baseline) -> float:
        shape = {"prompts": PROMPTS, "samples": SAMPLES, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        lengths = [PROMPT_TOKENS + NEW_TOKENS - 1] * (PROMPTS * SAMPLES)
        return hf.seconds(do="generate", threads=bench.loop_threads, **shape) + hf.seconds(
            do="train", lengths=lengths, threads=bench.loop_threads
        )

    yield bench.against_hf(
        f"one RL iteration, {PROMPTS}x{SAMPLES}x{NEW_TOKENS}",
        "s",
        iteration,
        loop,
        loop="PEFT generate() and a padded loop",
    )


def async_rl_iteration(bench: ServiceBench) -> Iterator[Figure]:
    """One asynchronous iteration: trainer and sampler compute at the same time, each with half of the cores."""
    clients = [publish(bench.trainer)]
    batches = [_collected(_submitted(bench, clients[0], new_tokens=ASYNC_NEW_TOKENS))]

    def iterate() -> None:
        drawing = _submitted(bench, clients.pop(), new_tokens=ASYNC_NEW_TOKENS)
        clients.append(_trained(bench, batches.pop()))
        batches.append(_collected(drawing))

    (values,) = bench.rounds(lambda: seconds(iterate), repeats=bench.repeats)
    yield Figure(
        f"one asynchronous RL iteration, {PROMPTS}x{SAMPLES}x{ASYNC_NEW_TOKENS}",
        "s",
        values,
    )


def _iterate(bench: ServiceBench, sampler: tinker.SamplingClient) -> tinker.SamplingClient:
    return _trained(bench, _collected(_submitted(bench, sampler, new_tokens=NEW_TOKENS)))


def _submitted(bench: ServiceBench, sampler: tinker.SamplingClient, *, new_tokens: int) -> list[Drawing]:
    """Samples of one iteration."""
    params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])
    prompts = [bench.tokens(PROMPT_TOKENS) for _ in range(PROMPTS)]
    return [(prompt, sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)) for prompt in prompts]


def _collected(drawings: list[Drawing]) -> list[types.Datum]:
    """Waits for the samples."""
    return [
        _datum(prompt, sequence.tokens, sequence.logprobs or [])
        for prompt, drawn in drawings
        for sequence in drawn.result().sequences
    ]


def _trained(bench: ServiceBench, data: list[types.Datum]) -> tinker.SamplingClient:
    """A sampling client of the weights after a step on these samples."""
    losses = bench.trainer.forward_backward(data, "importance_sampling")
    step = bench.trainer.optim_step(types.AdamParams(learning_rate=1e-5))
    results([losses, step])
    return publish(bench.trainer)


def _datum(prompt: list[int], drawn: list[int], logprobs: list[float]) -> types.Datum:
    tokens = prompt + drawn
    before = [0.0] * (len(prompt) - 1)

    def floats(values: list[float]) -> types.TensorData:
        return types.TensorData(data=values, dtype="float32", shape=[len(values)])

    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "logprobs": floats(before + logprobs),
            "advantages": floats(before + [1.0] * len(drawn)),
        },
    )
