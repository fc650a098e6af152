"""Blocks of vLLM's cache, without vLLM. tests/vllm/test_picture_families.py compares them with vLLM's own."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from sampler_service.config import SamplerConfig
from sampler_service.core.sizing import Sizes, kv_bytes_per_token, measured_cache
from sampler_service.vllm.pages import BLOCK_TOKENS, Pages
from sampler_service.vllm.reference import _measure
from sampler_service.vllm.settings import engine_args
from tests.support.models import make_model, make_recurrent_model
from tests.unit.modeling.test_families import FAMILIES, make
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kv_cache import KVCache
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.recurrent_cache import Key, RecurrentCache


def cache_of(*, token_layers: int, state_layers: int) -> KVCache:
    """A cache of one token, with the sizes of Qwen3.5-4B in bfloat16."""

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    states: dict[Key, torch.Tensor] = {("window", n, 0): made(1, 8192, 4) for n in range(state_layers)}
    states |= {("state", n, 0): made(1, 32, 128, 128) for n in range(state_layers)}
    layers = range(state_layers, state_layers + token_layers)
    keys, values = ({n: made(1, 4, 1, 256) for n in layers} for _ in range(2))
    return KVCache(1, 1, keys, values, RecurrentCache(1, states))


def test_without_states_a_block_has_the_fewest_tokens() -> None:
    cache = cache_of(token_layers=8, state_layers=0)
    pages = Pages.of(cache, kv_part=Fraction(1), num_devices=1)
    assert pages == Pages(BLOCK_TOKENS, BLOCK_TOKENS * 8 * 4096)
    assert pages.bytes_per_lane == 0


@pytest.mark.parametrize(
    ("token_layers", "state_layers", "size", "token_groups", "state_groups"),
    [(8, 24, 8, 1, 3), (10, 12, 12, 1, 1), (8, 12, 8, 1, 2), (4, 1, 1, 4, 1)],
)
def test_a_page_of_keys_and_values_is_as_large_as_a_state(
    token_layers: int, state_layers: int, size: int, token_groups: int, state_groups: int
) -> None:
    cache = cache_of(token_layers=token_layers, state_layers=state_layers)
    pages = Pages.of(cache, kv_part=Fraction(1), num_devices=1)
    state_bytes = 8192 * 4 * 2 + 32 * 128 * 128 * 4  # vLLM's recurrence is in float32
    assert pages.block_tokens % BLOCK_TOKENS == 0
    assert (pages.block_tokens - BLOCK_TOKENS) * 4096 < state_bytes <= pages.block_tokens * 4096
    assert pages.block_bytes == pages.block_tokens * 4096 * size
    assert (pages.token_groups, pages.state_groups) == (token_groups, state_groups)
    assert pages.bytes_per_lane == pages.block_bytes * (2 * state_groups + token_groups)


def test_workers_have_their_parts_of_keys_values_and_states() -> None:
    cache = cache_of(token_layers=8, state_layers=24)
    whole, half = (Pages.of(cache, kv_part=Fraction(1, count), num_devices=count) for count in (1, 2))
    assert half == replace(whole, block_bytes=whole.block_bytes // 2)


def test_the_cache_has_room_for_the_states_of_all_running_sequences(tmp_path: Path) -> None:
    folder = make_recurrent_model(tmp_path)
    config = SamplerConfig(
        base_model=str(folder), device="cpu", max_kv_tokens=1000, prefix_cache_bytes=10**6, max_running=6
    )
    reference = _measure(config)
    pages, args = reference.pages, engine_args(config, reference)
    assert reference.sizes.bytes_per_lane == pages.bytes_per_lane > 0
    blocks = -(-1000 // pages.block_tokens) * pages.token_groups
    blocks += -(-(10**6 + 10 * pages.bytes_per_lane) // pages.block_bytes)
    assert args["block_size"] == pages.block_tokens
    assert args["kv_cache_memory_bytes"] == (blocks + 2) * pages.block_bytes
    assert args["max_num_seqs"] == 10


def test_as_many_sequences_run_as_the_whole_cache_has_states_for() -> None:
    pages = Pages.of(cache_of(token_layers=8, state_layers=24), kv_part=Fraction(1), num_devices=1)
    sizes = Sizes(
        bytes_per_token=8 * 4096, bytes_per_lane=pages.bytes_per_lane, max_running=3, max_kv_tokens=60_000,
        prefix_cache_bytes=10**9, tokens_per_step=8192,
    )  # fmt: skip
    blocks = pages.cache_bytes(sizes) // pages.block_bytes
    assert 3 < pages.most_running(sizes, 64) == blocks // 7 - 4 < 64
    assert pages.most_running(sizes, 5) == 5
    assert pages.most_running(replace(sizes, max_kv_tokens=1, prefix_cache_bytes=0), 64) == 3
    assert Pages(32, 1000).most_running(sizes, 64) == 64


def test_a_model_without_states_has_the_blocks_of_its_tokens(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    reference = _measure(SamplerConfig(base_model=str(folder), device="cpu"))
    assert reference.pages == Pages(BLOCK_TOKENS, BLOCK_TOKENS * kv_bytes_per_token(measured_cache(base)))


@pytest.mark.parametrize(("family", "layers"), [("Jamba", "JambaMambaMixer"), ("Lfm2", "Lfm2ShortConv")])
def test_other_recurrent_layers_are_refused_by_name(family: str, layers: str, tmp_path: Path) -> None:
    config = SamplerConfig(base_model=str(make(tmp_path, family, FAMILIES[family])), device="cpu")
    with pytest.raises(UnsupportedModel, match=f'its layers {layers} carry a state, .* set engine to "torch"'):
        _measure(config)
