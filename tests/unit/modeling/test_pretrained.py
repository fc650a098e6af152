"""A loaded model has every tensor of its files; stored full weights have all that the files hold."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models import make_model
from tests.unit.modeling.test_families import SPARSE, make
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.config import load_config
from tinsmith.modeling.full_weights import FullWeights, TrainedWeights
from tinsmith.modeling.pretrained import UnsupportedModel

CPU = torch.device("cpu")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def load(folder: Path, *, trainable: bool = False) -> BaseModel:
    return BaseModel.load(folder, device=CPU, dtype=torch.float32, trainable=trainable)


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replaces or adds tensors of the file; None takes one away."""
    file = folder / "model.safetensors"
    changed = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: x for name, x in changed.items() if x is not None}, file, metadata={"format": "pt"})
    return folder


def test_files_of_fewer_layers_than_the_config_says_are_refused_by_name_and_number(tmp_path: Path) -> None:
    folder = make_model(tmp_path, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config.update(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"^11 parameters are not in the files \(model\.layers\.1\.input.*, \."):
        load(folder)


def test_a_head_may_be_absent_where_it_is_tied_and_only_there(tmp_path: Path) -> None:
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    base = load(tied)
    assert base.head.weight_V_H is base.parameters["model.embed_tokens.weight"]
    with pytest.raises(UnsupportedModel, match=r"^1 parameters are not in the files \(lm_head\.weight\)"):
        load(change(make_model(tmp_path / "own"), lm_head__weight=None))


def test_tensors_that_the_model_has_no_use_for_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(change(make_model(tmp_path), model__extra__weight=torch.zeros(2)))
    assert "the model has no use for model.extra.weight" in caplog.text


def test_weights_that_are_no_numbers_are_called_broken(tmp_path: Path) -> None:
    folder = change(make_model(tmp_path), model__norm__weight=torch.full((64,), torch.nan))
    with pytest.raises(UnsupportedModel, match=r"own logprobs are not finite \(nan or inf\).* its weights are broken"):
        load(folder)


def test_full_weights_are_stored_with_the_buffers_that_the_files_of_their_base_model_hold(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "DeepseekV3", SPARSE["DeepseekV3"])
    change(folder, **{BIAS: torch.tensor([0.5, -1.0, 2.0, 0.0])})
    weights = TrainedWeights.take(base := load(folder, trainable=True))
    assert set(base.buffers) == {BIAS}
    weights.flat.mul_(1.1)
    weights.save_model(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(FullWeights.load_model(tmp_path / "saved", base).flat, weights.flat)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(stock.get_buffer(BIAS), expected.get_buffer(BIAS))
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1.1)
        tokens = torch.arange(20)[None]
        assert torch.equal(stock(tokens).logits, expected(tokens).logits)
    change(tmp_path / "saved", **{BIAS: torch.zeros(4)})
    with pytest.raises(InvalidRequest, match=f"do not fit this base model: '{BIAS}' has other values there"):
        FullWeights.load_model(tmp_path / "saved", base)


def test_a_model_that_the_hub_does_not_give_is_refused_with_the_ways_out() -> None:
    with pytest.raises(OSError, match=r"^nobody/nothing: config\.json cannot be read .*name a folder that holds it"):
        load_config("nobody/nothing", local_files_only=True)


def test_a_broken_config_of_a_folder_is_not_taken_for_one_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match="not a valid JSON"):
        load_config(tmp_path)
