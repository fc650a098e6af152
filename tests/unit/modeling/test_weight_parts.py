"""Ranks that read parts of a model's files have, together, the weights that one reads whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from tests.unit.modeling.test_families import DENSE, FAMILIES, MORE, SPARSE, make
from tinsmith.modeling import weight_parts
from tinsmith.modeling.config import load_config
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.pretrained import load_causal_lm
from tinsmith.modeling.weight_parts import RankMesh, in_parts

CPU = torch.device("cpu")
RANKS = 2
ALL = {**FAMILIES, **MORE}


def read(folder: Path, dtype: torch.dtype, rank: int | None = None) -> PreTrainedModel:
    """The model whole, or the part of one of the ranks that divide each layer's memory."""
    cut = None
    if rank is not None:
        mesh = RankMesh("cpu", [RANKS], [rank], ["data"])
        cut = partial(Division(None, mesh, lambda call: call()).cut, device=CPU)
    model, missing = load_causal_lm(folder, config=load_config(folder), dtype=dtype, cut=cut)
    assert not missing
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_parts_of_all_ranks_are_the_whole(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path, family, ALL[family])
    whole = dict(read(folder, torch.float32).named_parameters())
    divided = [dict(read(folder, torch.float32, rank).named_parameters()) for rank in range(RANKS)]
    for name, weight in whole.items():
        found = [part[name] for part in divided]
        locals_ = [one.to_local() if isinstance(one, DTensor) else one for one in found]
        together = torch.cat(locals_) if isinstance(found[0], DTensor) else locals_[0]
        assert torch.equal(together, weight), name


@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_families_whose_layers_are_linear_are_read_in_parts(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path, family, {**DENSE, **SPARSE}[family])
    assert in_parts(read(folder, torch.float32, 0)) == (family != "GPT2")


def test_weights_that_are_cut_from_larger_ones_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a tensor of gate and up is not the part of the gate."""
    folder = make(tmp_path, "Qwen3", DENSE["Qwen3"])
    assert in_parts(read(folder, torch.float32, 0))
    together = WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(weight_parts, "get_model_conversion_mapping", lambda _: [together])
    assert not in_parts(read(folder, torch.float32, 0))


def test_a_part_is_converted_to_the_type_that_is_computed_in(tmp_path: Path) -> None:
    folder = make(tmp_path, "Qwen3Moe", SPARSE["Qwen3Moe"])
    for rank in range(RANKS):
        model = read(folder, torch.bfloat16, rank)
        assert in_parts(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
