"""Figures of datums that begin alike, in relation to the same datums computed apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.figure import Aim, Figure
from benchmarks.trainer.bench import TrainerBench
from benchmarks.trainer.memory import added_peak_mb
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import TrainingEngine

Sequences = Sequence[Sequence[int]]


def shared_prefixes(bench: TrainerBench) -> Iterator[Figure]:
    """forward_backward of samples of the same prompts, of conversations turn by turn, and of texts that share nothing,
    in tokens of the datums per second; and the peak of memory that a pass adds to what the process has."""
    base = bench.engine.base
    engines = [
        TrainingEngine(base, max_tokens_per_microbatch=bench.engine.memory.plan.token_budget, share_prefixes=share)
        for share in (True, False)
    ]
    for name, (sequences, least) in _kinds(bench).items():
        batches = [bench.batch_of(sequences, shares=engine.limits.share_prefixes) for engine in engines]
        num_tokens = sum(map(len, sequences))

        def rate(n: int, batches: Sequence[Batch] = batches, num_tokens: int = num_tokens) -> float:
            return num_tokens / bench.seconds(lambda: bench.forward_backward([("m", batches[n])], engines[n]))

        for engine in engines:
            bench.create("m", engine)
        ours, apart = bench.rounds(*(partial(rate, n) for n in range(len(engines))))
        yield Figure(f"shared beginnings, {name}", "tokens/s", ours, "computed apart", apart, [Aim(least)])
        peak, apart_peak = (added_peak_mb(bench.device, partial(rate, n)) for n in range(len(engines)))
        yield Figure(f"peak memory, {name}", "MB", [peak], "computed apart", [apart_peak])
        for engine in engines:
            engine.delete_model("m")


def _kinds(bench: TrainerBench) -> dict[str, tuple[Sequences, float]]:
    """Sequences by their kind, each with the ratio to reach."""
    turns, count = [], bench.num_prompts
    for _ in range(-(-count // 2)):
        talk: list[int] = []
        for _ in range(6):
            talk = [*talk, *_new(bench, 96)]
            turns.append(talk)
    return {
        f"{count} x 8, 512 + 64": (_groups(bench, 512, 64), 3),
        f"{count} x 8, 64 + 256": (_groups(bench, 64, 256), 1.15),
        f"{len(turns) // 6} conversations of 6 turns of 96": (turns, 2),
        f"{2 * count} x 256 without": ([_new(bench, 256) for _ in range(2 * count)], 0.99),
    }


def _groups(bench: TrainerBench, prompt: int, answer: int) -> Sequences:
    prompts = [_new(bench, prompt) for _ in range(bench.num_prompts)]
    return [[*one, *_new(bench, answer)] for one in prompts for _ in range(8)]


def _new(bench: TrainerBench, length: int) -> list[int]:
    return bench.rng.integers(bench.engine.base.vocab_size, size=length).tolist()
