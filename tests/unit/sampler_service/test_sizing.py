"""Sizes that the engine chooses where the settings leave them open."""

from pathlib import Path

import pytest
import torch

from sampler_service.config import SamplerConfig
from sampler_service.core import sizing
from sampler_service.core.sizing import Sizes
from tests.support.models import make_model
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kernels import prepacked
from tinsmith.modeling.kv_cache import MAX_KEPT_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sizing"))


def sizes_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, prepack: bool, for_pictures: int = 0
) -> Sizes:
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, prepack=prepack)
    monkeypatch.setattr(sizing, "free_bytes_of", lambda device: free_bytes)
    return Sizes.of(base, SamplerConfig(base_model=str(folder), max_running=10**9), for_pictures=for_pictures)


def test_memory_for_buffers_that_grow_is_not_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**30
    plain = sizes_with(folder, monkeypatch, free_bytes=free, prepack=False)
    assert plain.prefix_cache_bytes == (free - MAX_KEPT_BYTES) // 8
    assert plain.max_kv_tokens == (free - MAX_KEPT_BYTES) // 4 // plain.bytes_per_token


def test_memory_for_the_tower_is_not_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, tower = 2**30, 10**8
    sizes = sizes_with(folder, monkeypatch, free_bytes=free, prepack=False, for_pictures=tower)
    assert sizes.prefix_cache_bytes == (free - MAX_KEPT_BYTES - tower) // 8


@pytest.mark.skipif(not prepacked.works(torch.float32, torch.device("cpu")), reason="this build of torch has no oneDNN")
def test_compiled_products_are_not_divided_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**30
    sizes = sizes_with(folder, monkeypatch, free_bytes=free, prepack=True)
    assert sizes.prefix_cache_bytes == (free - MAX_KEPT_BYTES - 5 * prepacked.COMPILED_BYTES) // 8


def test_where_little_is_free_half_of_it_is_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_with(folder, monkeypatch, free_bytes=2**26, prepack=False)
    assert sizes.prefix_cache_bytes == 2**25 // 8
