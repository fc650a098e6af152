"""Training: throughput of batches and steps, of one client and of several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.figure import Aim, Figure
from benchmarks.rounds import ms, seconds
from benchmarks.service.bench import ServiceBench, forward_backward, optim_step, train_step


def training_throughput(bench: ServiceBench) -> Iterator[Figure]:
    """forward_backward in real tokens per second: padding does not count."""
    ragged = np.exp(bench.rng.uniform(np.log(16), np.log(1024), size=16)).astype(int).clip(max=bench.context).tolist()
    aims = {"16x256": [Aim(1.25, model="small")], "16 of 16..1024": [Aim(3)]}
    for name, lengths in {"16x256": [256] * 16, "8x1024": [1024] * 8, "16 of 16..1024": ragged}.items():
        if max(lengths) > bench.context:
            print(f"forward_backward, {name}: skipped, the context is {bench.context} tokens", flush=True)
            continue
        yield _forward_backward_rate(bench, name, lengths, aims=aims.get(name, ()))


def _forward_backward_rate(bench: ServiceBench, name: str, lengths: list[int], *, aims: Sequence[Aim]) -> Figure:
    data, num_tokens = bench.batch(lengths), sum(lengths)
    return bench.against_hf(
        f"forward_backward, {name}",
        "tokens/s",
        lambda: num_tokens / seconds(lambda: forward_backward(bench.trainer, data)),
        lambda hf: num_tokens / hf.seconds(do="train", lengths=lengths, threads=bench.loop_threads),
        aims=aims,
    )


def pipelined_step(bench: ServiceBench) -> Iterator[Figure]:
    """forward_backward and optim_step submitted together, against one after the other."""
    data = bench.batch([256] * 4)
    losses, step, together = bench.rounds(
        lambda: ms(lambda: forward_backward(bench.trainer, data)),
        lambda: ms(lambda: optim_step(bench.trainer)),
        lambda: ms(lambda: train_step(bench.trainer, data)),
        repeats=2 * bench.repeats,
    )
    one_by_one = [first + second for first, second in zip(losses, step, strict=True)]
    yield Figure("pipelined step, 4x256", "ms", together, "one after the other", one_by_one)


def four_adapters(bench: ServiceBench) -> Iterator[Figure]:
    """Four clients at once, each with its own adapter, against one client that does all of it in sequence."""
    data, base_model = bench.batch([256] * 4), bench.target.base_model
    creating = [bench.service.create_lora_training_client(base_model, rank=rank) for rank in (8, 16, 32, 64)]
    trainers = [future.result() for future in creating]
    num_tokens = len(trainers) * 4 * 256

    def in_sequence() -> None:
        for _ in trainers:
            train_step(bench.trainer, data)

    with ThreadPoolExecutor(len(trainers)) as threads:
        alone, at_once = bench.rounds(
            lambda: num_tokens / seconds(in_sequence),
            lambda: (
                num_tokens / seconds(lambda: list(threads.map(lambda trainer: train_step(trainer, data), trainers)))
            ),
            repeats=bench.repeats,
        )
    yield Figure("four adapters at once, 4x256 each", "tokens/s", at_once, "one adapter in sequence", alone)
