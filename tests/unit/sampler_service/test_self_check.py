"""A sampler whose decoding is wrong does not serve."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sampler_service.torch_engine import runner
from tests.unit.sampler_service.serving import serving
from tinsmith.modeling import kv_cache
from tinsmith.modeling.pretrained import UnsupportedModel


async def test_decoding_that_is_not_the_model_is_refused_at_load(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kv_cache.masked
    monkeypatch.setattr(kv_cache, "masked", lambda q, *args: real(2 * q, *args))
    with pytest.raises(UnsupportedModel, match="decoding is wrong for this model: tokens drawn from it"):
        async with serving(model_folder):
            pass


async def test_adapters_that_are_lost_in_decoding_are_refused_at_load(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runner.Run

    def without_adapter(adapter: Any, rows: slice | torch.Tensor) -> Any:
        is_decoding = isinstance(rows, slice) and rows.stop - rows.start <= 2  # the two sequences of the check
        return real(adapter, slice(0, 0) if is_decoding else rows)

    monkeypatch.setattr(runner, "Run", without_adapter)
    with pytest.raises(UnsupportedModel, match="tokens drawn from an adapter"):
        async with serving(model_folder):
            pass
