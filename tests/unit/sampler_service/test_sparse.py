"""An adapter of a mixture-of-experts model: published by a trainer, the sampler gives the trainer's logprobs."""

import asyncio
from pathlib import Path

import numpy as np
import torch

from tests.support.models import make_sparse_model
from tests.unit.sampler_service.serving import generate, make_adapter, prompt
from tests.unit.sampler_service.test_weight_sync import Setup, receiving
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs


def trained_logprobs(base: BaseModel, adapter: Adapter, tokens: np.ndarray) -> np.ndarray:
    """As in training: of each token but the first, in one packed pass beside another sequence of the base model."""
    row, length = torch.tensor(tokens.astype(np.int64)), len(tokens) - 1
    runs = [Run(adapter, slice(0, length))]
    with torch.no_grad():
        packed, lengths = torch.cat([row[:-1], row[:9]]), [length, 9]
        hidden = base.hidden_states(packed, positions_of(lengths, base.device), Packed(lengths), runs)
        return target_logprobs(base.head, hidden, torch.arange(length), row[1:], runs).numpy()


async def test_a_published_adapter_of_experts_gives_the_trainers_logprobs(tmp_path: Path) -> None:
    folder = make_sparse_model(tmp_path)
    trainer = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    adapters = {"a": make_adapter(trainer.targets, seed=1), "b": make_adapter(trainer.targets, seed=2, rank=7)}
    async with receiving(folder) as setup:
        await setup.trainer.form()
        for name, adapter in adapters.items():
            await setup.trainer.publish(name, adapter)
        samples = await asyncio.gather(*(drawn(setup, name, seed) for name in adapters for seed in range(2)))
    for name, tokens, logprobs in samples:
        np.testing.assert_allclose(logprobs, trained_logprobs(trainer, adapters[name], tokens), atol=1e-4)
    a, b = (trained_logprobs(trainer, adapter, samples[0][1]) for adapter in adapters.values())
    assert np.abs(a - b).max() > 0.5


async def drawn(setup: Setup, version_id: str, seed: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Prompt and sample of a version, and the logprobs of all but the first token. Several are drawn in one batch."""
    tokens = prompt(11, seed=seed)
    result = await generate(setup.engine, tokens, version_id=version_id, max_tokens=6, seed=seed, prompt_logprobs=True)
    (sequence,) = result.sequences
    whole = np.concatenate([tokens, sequence.tokens])
    assert result.prompt.logprobs is not None
    return version_id, whole, np.concatenate([result.prompt.logprobs[1:], sequence.logprobs])
