"""Figures of a base model in bfloat16, in relation to the same model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.figure import Aim, Figure
from benchmarks.model_work import multiplies_bfloat16
from benchmarks.trainer.bench import TrainerBench
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.engine import TrainingEngine


def bfloat16(bench: TrainerBench) -> Iterator[Figure]:
    """forward_backward with base weights in bfloat16 and adapters in float32, in tokens per second."""
    path, device = Path(bench.engine.base.path), bench.device
    if not path.exists():
        print(f"LEFT OUT: bfloat16; {path} is a shape, and its weights are not stored", flush=True)
        return
    engines = [
        TrainingEngine(
            BaseModel.load(path, device=device, dtype=dtype),
            max_tokens_per_microbatch=bench.engine.memory.plan.token_budget,
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]
    aims = [Aim(1.6, model="medium")] if multiplies_bfloat16() else []
    for engine in engines:
        bench.create("m", engine)
    for name, lengths in bench.shapes.items():
        works, num_tokens = [("m", bench.batch(lengths))], sum(lengths)

        def rate(engine: TrainingEngine, works: list = works, num_tokens: int = num_tokens) -> float:
            return num_tokens / bench.seconds(lambda: bench.forward_backward(works, engine))

        narrow, wide = bench.rounds(*(lambda engine=engine: rate(engine) for engine in engines))
        yield Figure(f"forward_backward in bfloat16, {name}", "tokens/s", narrow, "float32", wide, aims)
