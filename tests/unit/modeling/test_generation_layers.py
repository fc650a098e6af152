"""Layers without gradients against the layers' own code, which a version of all parameters goes through too."""

from pathlib import Path

import pytest
import torch

from tests.support.models import make_model
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.generation import GenerationLayer
from tinsmith.modeling.self_check import only, random_adapter

LENGTHS = [6, 1, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, [1]], ids=["several rows", "one row"])
def test_they_compute_what_the_layers_own_code_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, prepack: bool, lengths: list[int]
) -> None:
    base = BaseModel.load(make_model(tmp_path), device=torch.device("cpu"), dtype=dtype, prepack=prepack)
    num_rows = sum(lengths)
    tokens = torch.randint(base.vocab_size, (num_rows,), generator=torch.Generator().manual_seed(0))
    attn, mlp = (random_adapter(only(group, rank=2, seed=1), base.targets, base.device) for group in ("attn", "mlp"))
    some_runs = [Run(attn, slice(0, 1))] if num_rows == 1 else [Run(attn, slice(1, 4)), Run(mlp, torch.tensor([0, 5]))]

    taken = []
    run = GenerationLayer.run
    monkeypatch.setattr(GenerationLayer, "run", lambda self, *args: taken.append(self) or run(self, *args))
    for runs in ([], some_runs):
        answers = []
        for current in (True, False):
            monkeypatch.setattr(GenerationLayer, "is_current", current)
            with torch.inference_mode():
                answers.append(base.hidden_states(tokens, positions_of(lengths, base.device), Packed(lengths), runs))
        if dtype == torch.float32:
            torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)
        else:  # equal bits, unless a product adds in another order where it has more columns
            ours, theirs = (answer.float() for answer in answers)
            assert (ours - theirs).norm() <= 0.01 * theirs.norm()
    assert len(taken) == 2 * len(base.layers)
