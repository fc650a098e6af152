"""Common parts of the figures of the engine: models, batches, and rounds that alternate with a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.model_work import ModelWork, Peak, synchronize
from benchmarks.processes import Baseline
from benchmarks.rounds import MIN_ROUNDS
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from trainer_service.engine.batch import Batch, Datum, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.pack import num_shared
from trainer_service.objectives.losses import LOSS_FNS

Run = Callable[[], float]


@dataclass(slots=True)
class TrainerBench:
    engine: TrainingEngine
    rank: int
    shapes: dict[str, list[int]]
    """Lengths of the sequences of a batch, by the name of the shape."""
    num_adapters: int
    num_prompts: int
    """Prompts of shared_prefixes, with 8 samples each."""
    threads: int
    hf: Baseline | None
    work: ModelWork | None
    """None for a model whose useful work has no count here."""
    peak: Peak
    repeats: int
    budget_s: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def device(self) -> torch.device:
        return self.engine.base.device

    def rounds(self, *runs: Run) -> list[list[float]]:
        """The values of each run, one after the other in each round. About `budget_s` seconds, but MIN_ROUNDS at least;
        two rounds before them warm up: the engine's second pass still touches memory that is new to the process."""
        for run in (*runs, *runs):
            run()
        begin, rows = time.perf_counter(), []
        while len(rows) < self.repeats and (len(rows) < MIN_ROUNDS or time.perf_counter() - begin < self.budget_s):
            rows.append([run() for run in runs])
        return [list(column) for column in zip(*rows, strict=True)]

    def create(self, model_id: str, engine: TrainingEngine | None = None) -> str:
        config = AdapterConfig(rank=self.rank, seed=len(model_id))
        (engine or self.engine).create_model(model_id, config, "adamw")
        return model_id

    def adapter(self) -> Adapter:
        """An adapter like those that `create` makes."""
        return Adapter.create(AdapterConfig(rank=self.rank), self.engine.base.targets, self.device)

    def batch(self, lengths: Sequence[int]) -> Batch:
        """A batch of random tokens and targets, all with weight."""
        vocab = self.engine.base.vocab_size
        return self.batch_of([self.rng.integers(vocab, size=length) for length in lengths])

    def batch_of(self, sequences: Sequence[npt.ArrayLike], *, shares: bool = False) -> Batch:
        """A batch of these tokens with random targets, all with weight. `shares`: for an engine that computes common
        beginnings once."""
        loss, vocab = LOSS_FNS["cross_entropy"], self.engine.base.vocab_size
        tokens = [np.asarray(sequence, np.int32) for sequence in sequences]
        datums = [
            Datum(
                tokens_N=one,
                targets=self.rng.integers(vocab, size=one.size),
                inputs={"weights": np.ones(one.size, np.float32)},
            )
            for one in tokens
        ]
        return Batch(
            loss_fn="cross_entropy",
            loss=loss,
            loss_config=loss.config,
            forward_only=False,
            datums=datums,
            shared=num_shared(datums) if shares else (),
        )

    def forward_backward(self, works: Sequence[tuple[str, Batch]], engine: TrainingEngine | None = None) -> None:
        for result in (engine or self.engine).forward_backward(works):
            if not isinstance(result, Output):
                raise result

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall-clock time of a call, up to the end of the device's work, in seconds."""
        synchronize(self.device)
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin
