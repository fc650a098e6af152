"""Qwen3.5 in its published form, with recurrent layers and a tower, for vLLM, held against the torch engine in this
process, which is held against transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sampler_service.torch_engine.engine import TorchEngine
from tests.unit.sampler_service.serving import sample
from tests.vllm.client import Service, assert_alone_and_together_the_same, assert_same, tokens_of, torch_sample
from tests.vllm.seeing import make, requests
from tests.vllm.service import VllmService, flags
from tinsmith.modeling.adapter import Adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
FLAGS = {
    "max-lora-rank": 12,
    "max-device-versions": 2,
    "max-kv-tokens": 512,
    "prefix-cache-bytes": 4 * 1024 * 1024,
    "prefill-tokens-per-step": 24,
    "max-running": 8,
}
"""Prompts are computed in pieces, which cut pictures, and go on from the states of the piece before."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "Qwen3_5", num_hidden_layers=4, layer_types=LAYERS)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[VllmService]:
    with VllmService(model, *flags(FLAGS)) as server:
        yield server


async def test_each_request_alone_and_all_in_one_batch_give_what_the_torch_engine_gives(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    assert {target.name.rpartition(".")[2] for target in torch_engine.targets} >= {
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
    }
    await assert_alone_and_together_the_same(service, torch_engine, requests())


async def test_samples_go_on_from_the_states_at_the_end_of_a_common_prompt(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    hits = []
    for seed in range(2):
        request = sample(tokens_of(150, 7), version_id="all", num_samples=6, seed=seed, max_tokens=8)
        found = await service.call("Sample", request)
        assert_same(found, await torch_sample(torch_engine, request))
        hits.append(found.prompt_cache_hit_tokens)
    assert hits == [0, 128]
