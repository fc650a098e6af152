"""Latent attention in generation: the cache holds one latent vector and the rotated features of each token, and the
sampler gives what the trainer computes from expanded keys and values."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from sampler_service.core.sizing import kv_bytes_per_token, measured_cache
from tests.support.parameters import fast_ones
from tests.unit.modeling.test_families import DELTA, ROUTED, make
from tests.unit.sampler_service.full_versions import make_full
from tests.unit.sampler_service.serving import alone_and_interrupted, generate, make_adapter, serving
from tests.unit.sampler_service.test_recurrent import check, tokens_of
from tinsmith.modeling.base_model import BaseModel

LATENT, ROTATED = 24, 8
SIZES: dict[str, Any] = {
    "q_lora_rank": 20, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4, "head_dim": ROTATED,
}  # fmt: skip
"""All different, so that none can stand for another."""
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**ROUTED, **SIZES},
    "DeepseekV3": {**ROUTED, **SIZES},
    "Glm4MoeLite": {**ROUTED, **SIZES},
    "KimiLinear": {
        **ROUTED, **SIZES, "linear_num_heads": 2, "linear_head_dim": 16, "layer_types": DELTA["layer_types"],
    },
}  # fmt: skip


def load(folder: Path) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_holds_the_latent_vector_and_the_rotated_features_of_a_token(family: str, tmp_path: Path) -> None:
    base = load(make(tmp_path, family, FAMILIES[family]))
    cache = measured_cache(base)
    num_layers = 1 if family == "KimiLinear" else 2
    assert len(cache.keys) == num_layers
    assert cache.values == {}
    assert kv_bytes_per_token(cache) == num_layers * 4 * (LATENT + ROTATED)


@pytest.mark.parametrize("family", fast_ones(FAMILIES, ["DeepseekV3", "KimiLinear"]))
async def test_the_sampler_is_the_trainer(family: str, tmp_path: Path) -> None:
    """Prompts of several lengths in pieces, of two adapters and of the base model, several samples of each, and again
    from the prefix cache."""
    folder = make(tmp_path, family, FAMILIES[family])
    base = load(folder)
    adapters = {
        "": None,
        "a": make_adapter(base.targets, seed=1),
        "b": make_adapter(base.targets, seed=2, rank=7),
    }
    assert any("kv_b_proj" in target.name for target in base.targets)
    asked = [(version_id, tokens_of(length, length)) for length in (3, 11, 42) for version_id in adapters]
    wanted = {"num_samples": 3, "prompt_logprobs": True}
    async with serving(folder, prefill_tokens_per_step=16) as engine:
        for version_id, adapter in adapters.items():
            if adapter is not None:
                await engine.install(version_id, adapter.like(adapter.flat.clone()))
        results = await asyncio.gather(
            *(
                generate(engine, tokens, version_id=version_id, max_tokens=4 + n, seed=n, **wanted)
                for n, (version_id, tokens) in enumerate(asked)
            )
        )
        check(base, [(adapters[name], tokens, result) for (name, tokens), result in zip(asked, results, strict=True)])
        for n, ((version_id, tokens), first) in enumerate(zip(asked, results, strict=True)):
            again = await generate(engine, tokens, version_id=version_id, max_tokens=4 + n, seed=n, num_samples=3)
            assert (again.prompt_cache_hit_tokens > 0) == (len(tokens) > 16)
            for one, other in zip(first.sequences, again.sequences, strict=True):
                assert one.tokens == other.tokens
                np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


async def test_sequences_that_grow_and_are_interrupted_draw_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "DeepseekV3", FAMILIES["DeepseekV3"])
    for one, other in await alone_and_interrupted(folder, monkeypatch):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


async def test_versions_of_all_parameters_use_their_own_projections(tmp_path: Path) -> None:
    folder = make(tmp_path, "DeepseekV3", FAMILIES["DeepseekV3"])
    tokens = tokens_of(12, 0)
    async with serving(folder) as engine:
        for seed in (1, 2):
            await engine.install(f"v{seed}", make_full(engine.base, seed=seed))
        how = {"max_tokens": 8, "seed": 1, "temperature": 0.0}
        alone = [await generate(engine, tokens, version_id=version, **how) for version in ("", "v1", "v2")]
        together = await asyncio.gather(
            *(generate(engine, tokens, version_id=version, **how) for version in ("", "v1", "v2"))
        )
        for one, other in zip(alone, together, strict=True):
            assert one.sequences[0].tokens == other.sequences[0].tokens
            np.testing.assert_allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=2e-5)
        assert len({tuple(one.sequences[0].logprobs) for one in alone}) == 3


def test_a_layer_that_expands_otherwise_keeps_its_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DeepseekV3Attention.expand_kv

    def scaled(self: Any, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        keys, values = own(self, latents, rotated)
        return keys, values * 1.01

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", scaled)
    cache = measured_cache(load(make(tmp_path, "DeepseekV3", FAMILIES["DeepseekV3"])))
    assert kv_bytes_per_token(cache) == 2 * 4 * 4 * (16 + ROTATED + 12)  # 4 heads
