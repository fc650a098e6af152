"""Iterations of reinforcement learning: sample, train, publish."""

from __future__ import annotations

from collections.abc import Iterator

import tinker
from figure import Figure
from processes import Baseline
from rounds import seconds
from tinker import types

from service.bench import Bench, publish, results

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 64, 64


def rl_iteration(bench: Bench) -> Iterator[Figure]:
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


def _iterate(bench: Bench, sampler: tinker.SamplingClient) -> tinker.SamplingClient:
    params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
    prompts = [bench.tokens(PROMPT_TOKENS) for _ in range(PROMPTS)]
    drawn = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
    data = [
        _datum(prompt, sequence.tokens, sequence.logprobs or [])
        for prompt, future in zip(prompts, drawn, strict=True)
        for sequence in future.result().sequences
    ]
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
