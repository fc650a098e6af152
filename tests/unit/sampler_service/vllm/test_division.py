"""Values that tensor_parallel accepts and refuses; without vLLM, and with stand-ins for GPUs."""

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import PretrainedConfig

from sampler_service.choice import load_engine
from sampler_service.config import SamplerConfig
from sampler_service.core.sizing import Sizes, kv_bytes_per_token, measured_cache
from sampler_service.metrics import SamplerMetrics
from sampler_service.vllm.division import Devices, check_division, kv_part, sizes_of_each
from sampler_service.vllm.pages import BLOCK_TOKENS
from sampler_service.vllm.reference import _measure
from sampler_service.vllm.settings import engine_args, set_environment
from tests.support.models import make_model
from tinsmith.modeling.base_model import BaseModel

GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("division"))


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)


def heads(queries: int, keys: int) -> PretrainedConfig:
    return PretrainedConfig.from_dict({"num_attention_heads": queries, "num_key_value_heads": keys})


@pytest.mark.parametrize(("queries", "keys", "size"), [(64, 8, 8), (64, 8, 16), (4, 1, 4), (12, 4, 2)])
def test_heads_that_can_be_divided(queries: int, keys: int, size: int) -> None:
    check_division(heads(queries, keys), size)


@pytest.mark.parametrize(
    ("queries", "keys", "size", "message"),
    [(4, 2, 3, "3 does not .*num_attention_heads 4.*; 2 does"), (12, 4, 6, "6 does not .*heads 4.; 4 does")],
)
def test_heads_that_cannot(queries: int, keys: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel: {message}"):
        check_division(heads(queries, keys), size)


def test_heads_of_recurrent_layers_are_divided_too() -> None:
    config = PretrainedConfig.from_dict(
        {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    )
    check_division(config, 2)
    with pytest.raises(ValueError, match=r"4 does not .*linear_num_key_heads 2, linear_num_value_heads 4.; 2 does"):
        check_division(config, 4)


def test_each_worker_keeps_its_heads_of_keys_and_values_and_one_at_least() -> None:
    assert [kv_part(heads(64, 8), size) for size in (1, 4, 8, 16)] == [
        1,
        Fraction(1, 4),
        Fraction(1, 8),
        Fraction(1, 8),
    ]
    latent = PretrainedConfig.from_dict({"num_key_value_heads": 64, "kv_lora_rank": 512})
    assert kv_part(latent, 8) == 1


def see_gpus(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * GB))


def test_the_fullest_gpu_counts_of_those_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 70 * GB, 40 * GB, 1 * GB)
    assert Devices.of("cuda", 2) == Devices("cuda", 2, 40 * GB)
    with pytest.raises(ValueError, match="tensor_parallel: 4 needs as many GPUs, and 3 can be seen"):
        Devices.of("cuda", 4)


def test_a_worker_divides_what_its_part_of_the_weights_leaves(base: BaseModel) -> None:
    weights = sum(parameter.nbytes for parameter in base.parameters.values()) // 2
    config = SamplerConfig(base_model="m", max_running=10**9)
    sizes = sizes_of_each(base, config, Devices("cuda", 2, weights + GB))
    whole = Sizes.of(base, config)
    assert base.config.num_key_value_heads % 2 == 0
    assert sizes.bytes_per_token == whole.bytes_per_token // 2
    assert (sizes.max_kv_tokens, sizes.prefix_cache_bytes) == (GB // 4 // sizes.bytes_per_token, GB // 8)
    assert sizes.tokens_per_step == 8192
    with pytest.raises(ValueError, match=f"tensor_parallel: 2 workers have {weights} bytes of weights each"):
        sizes_of_each(base, config, Devices("cuda", 2, weights))


def test_a_model_that_cannot_be_divided_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "load", None)
    with pytest.raises(ValueError, match="tensor_parallel: 3 does not divide"):
        _measure(SamplerConfig(base_model=str(folder), device="cpu", tensor_parallel=3))


def test_on_several_gpus_the_reference_is_taken_on_the_cpu_where_there_is_room_for_the_whole_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 40 * GB, 40 * GB)
    reference = _measure(SamplerConfig(base_model=str(folder), device="cuda", tensor_parallel=2))
    assert (reference.device, reference.dtype) == ("cuda", "bfloat16")
    # A trainer that loads beside it may leave less free memory when vLLM starts; vLLM must start all the same.
    assert engine_args(SamplerConfig(base_model=str(folder)), reference)["gpu_memory_utilization"] == 0.01
    assert reference.sizes.prefix_cache_bytes == pytest.approx(40 * GB / 8, rel=1e-3)
    assert set(reference.groups) == {"attn", "mlp", "unembed"}


async def test_the_torch_engine_refuses_it_by_name() -> None:
    config = SamplerConfig(base_model="m", device="cpu", tensor_parallel=2)
    with pytest.raises(ValueError, match='tensor_parallel: 2 is for engine "vllm"'):
        await load_engine(config, SamplerMetrics(CollectorRegistry()))


def test_vllm_is_told_of_it(base: BaseModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_kv_tokens": 1000, "prefix_cache_bytes": 0, "num_threads": 5}
    config = SamplerConfig(base_model=str(folder), device="cpu", tensor_parallel=2, **settings)
    reference = _measure(config)
    args = engine_args(config, reference)
    assert args["tensor_parallel_size"] == 2
    num_blocks = -(-1000 // BLOCK_TOKENS) + 2
    assert args["kv_cache_memory_bytes"] == num_blocks * BLOCK_TOKENS * reference.sizes.bytes_per_token  # of each
    assert reference.sizes.bytes_per_token == kv_bytes_per_token(measured_cache(base)) // 2
    monkeypatch.setattr(os, "environ", {})
    set_environment(config, device="cpu")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
