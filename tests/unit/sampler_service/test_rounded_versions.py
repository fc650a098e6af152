"""On a base model in bfloat16, versions are rounded when they arrive, and not in each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.models import make_model, make_recurrent_model, make_sparse_model
from tests.unit.sampler_service.serving import generate, make_adapter, prompt, serving
from tinsmith.modeling.adapter import Adapter


@pytest.mark.parametrize("make", [make_model, make_sparse_model, make_recurrent_model])
async def test_samples_are_those_of_the_version_as_it_came(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(21, seed=1, vocab_size=256)
    async with serving(make(tmp_path), dtype="bfloat16") as engine:
        adapter = make_adapter(engine.targets, seed=1)
        await engine.install("rounded", adapter)
        monkeypatch.setattr(Adapter, "rounded", lambda self, dtype: self)
        await engine.install("as it came", adapter)
        wanted = {"max_tokens": 8, "seed": 1, "num_samples": 3, "prompt_logprobs": True}
        ours, theirs = [await generate(engine, tokens, version_id=name, **wanted) for name in ("rounded", "as it came")]
    for one, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert ours.prompt is not None
    assert theirs.prompt is not None
    np.testing.assert_array_equal(ours.prompt.logprobs, theirs.prompt.logprobs)


async def test_a_rounded_version_takes_half_the_memory_but_for_the_output_layer(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path), dtype="bfloat16") as engine:
        adapter = make_adapter(engine.targets, seed=1)
        await engine.install("v1", adapter)
        (version,) = engine.store.versions()
    unembed = [adapter.weights[target.name] for target in adapter.targets if target.group == "unembed"]
    kept = sum(tensor.nbytes for weights in unembed for tensor in (weights.a_R_I, weights.b_O_R))
    assert kept > 0
    assert version.num_bytes == adapter.flat.nbytes // 2 + kept
    assert adapter.flat.dtype == torch.float32
