"""Figures of forward_backward, for one adapter and for many in one call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from figure import Figure

from trainer.bench import Bench, Run
from trainer.memory import peak_memory_mb, reset_peak_memory

_PEFT_AIMS = {"16x256": "small 1.25, medium 1.1", "ragged": "3"}


def throughput(bench: Bench) -> Iterator[Figure]:
    """forward_backward of one adapter, in real tokens per second (padding does not count) and as a part of peak."""
    model_id = bench.create("throughput")
    for name, lengths in bench.shapes.items():
        works, num_tokens = [(model_id, bench.batch(lengths))], sum(lengths)
        reset_peak_memory(bench.device)
        runs: list[Run] = [bench.peak, lambda works=works: bench.seconds(lambda: bench.forward_backward(works))]
        if bench.hf is not None:
            runs.append(partial(bench.hf.seconds, do="train", lengths=lengths, threads=bench.threads))
        peak, ours, *theirs = bench.rounds(*runs)
        rates = [num_tokens / one for one in ours]
        loop = [num_tokens / one for one in theirs[0]] if theirs else []
        yield Figure(
            f"forward_backward, {name}",
            "tokens/s",
            rates,
            "a padded PEFT loop" if loop else "",
            loop,
            aim=_PEFT_AIMS.get(name, ""),
        )
        if bench.work is not None:
            flop = bench.work.flop(lengths, rank=bench.rank)
            yield Figure(
                f"useful work, {name}",
                "GFLOP/s",
                [flop / one / 1e9 for one in ours],
                "matrix-product peak",
                [one / 1e9 for one in peak],
                aim="CUDA: over 0.45" if bench.device.type == "cuda" else "small 0.65, medium 0.8",
            )
        yield Figure(f"peak memory, {name}", "MB", [peak_memory_mb(bench.device)])
    bench.engine.delete_model(model_id)


def co_batching(bench: Bench) -> Iterator[Figure]:
    """One sequence for each of many adapters in one call, compared with as many sequences of one adapter."""
    count = bench.num_adapters
    for lengths in bench.shapes.values():
        if len(set(lengths)) > 1:
            continue
        length = lengths[0]
        many = [(bench.create(f"many-{n}"), bench.batch([length])) for n in range(count)]
        one = [(bench.create("one"), bench.batch([length] * count))]
        alone, together = bench.rounds(
            lambda one=one: 1e3 * bench.seconds(lambda: bench.forward_backward(one)),
            lambda many=many: 1e3 * bench.seconds(lambda: bench.forward_backward(many)),
        )
        yield Figure(
            f"{count} adapters x 1 x {length}", "ms", together, f"1 adapter x {count} x {length}", alone, aim="1.15"
        )
        for model_id, _ in (*many, *one):
            bench.engine.delete_model(model_id)
