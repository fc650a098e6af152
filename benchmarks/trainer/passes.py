"""Figures of forward_backward, for one adapter and for many in one call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.figure import Aim, Figure
from benchmarks.trainer.bench import Run, TrainerBench
from benchmarks.trainer.memory import added_peak_mb
from benchmarks.trainer.shapes import HYBRID_SHAPES

_PEFT_AIMS = {
    "16x256": [Aim(1.25, model=model) for model in ("small", *HYBRID_SHAPES)] + [Aim(1.1, model="medium")],
    "ragged": [Aim(3)],
}


def throughput(bench: TrainerBench) -> Iterator[Figure]:
    """forward_backward of one adapter, in real tokens per second (padding does not count) and as a part of peak."""
    model_id = bench.create("throughput")
    for name, lengths in bench.shapes.items():
        works, num_tokens = [(model_id, bench.batch(lengths))], sum(lengths)
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
            aims=_PEFT_AIMS.get(name, ()),
        )
        if bench.work is not None:
            flop = bench.work.flop(lengths, rank=bench.rank)
            yield Figure(
                f"useful work, {name}",
                "GFLOP/s",
                [flop / one / 1e9 for one in ours],
                "matrix-product peak",
                [one / 1e9 for one in peak],
                aims=[Aim(0.45)]
                if bench.device.type == "cuda"
                else [Aim(0.65, model="small"), Aim(0.8, model="medium")],
            )
        added = added_peak_mb(bench.device, lambda works=works: bench.forward_backward(works))
        yield Figure(f"peak memory, {name}", "MB", [added])
    bench.engine.delete_model(model_id)


def co_batching(bench: TrainerBench) -> Iterator[Figure]:
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
            f"{count} adapters x 1 x {length}",
            "ms",
            together,
            f"1 adapter x {count} x {length}",
            alone,
            [Aim(1.15, at_most=True)],
        )
        for model_id, _ in (*many, *one):
            bench.engine.delete_model(model_id)
