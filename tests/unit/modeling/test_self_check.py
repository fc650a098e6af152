"""The check at load finds groups whose adapters the packed forward pass computes wrongly."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import VOCAB_SIZE
from tests.support.oracle import Oracle
from tinsmith.errors import Unsupported
from tinsmith.modeling import base_model, whole_layers
from tinsmith.modeling.adapter import GROUPS, Group
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.generation import JoinedLinear
from tinsmith.modeling.lora import LoraLinear
from tinsmith.modeling.reference import adapted
from tinsmith.modeling.self_check import Gaps, only, random_adapter

CPU = torch.device("cpu")


@pytest.mark.parametrize("group", GROUPS)
def test_the_reference_equals_stock_peft_gradients_included(model_folder: Path, tmp_path: Path, group: Group) -> None:
    adapter = random_adapter(only(group, rank=3, seed=1), load(model_folder).targets, CPU)
    tokens = torch.randint(VOCAB_SIZE, (12,))
    oracle = Oracle(model_folder, adapter, tmp_path)
    theirs = oracle.logprobs(tokens.tolist(), tokens)
    expected = oracle.gradients(lambda: oracle.logprobs(tokens.tolist(), tokens).sum())
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    before = model(tokens[None]).logits
    for tensor in adapter.tensors():
        tensor.requires_grad_(True)
    with adapted(model, adapter):
        ours = model(tokens[None]).logits[0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(torch.autograd.grad(ours.sum(), adapter.tensors()), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(tokens[None]).logits, before)  # and it leaves nothing behind


def load(folder: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    return BaseModel.load(folder, device=CPU, dtype=dtype)


def lose_in_own_code(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """As if the layers with this in their names had not been replaced."""
    forward = LoraLinear.forward

    def plain(self: LoraLinear, x: torch.Tensor) -> torch.Tensor:
        if part in self.name:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return forward(self, x)

    monkeypatch.setattr(LoraLinear, "forward", plain)
    monkeypatch.setattr(base_model, "take_over", lambda *_: 0)


def lose_in_training(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    forward, backward, parameters_of = whole_layers.forward, whole_layers.backward, whole_layers.parameters_of

    def kept(layers: Sequence[LoraLinear], runs: Sequence[Run]) -> list[Run]:
        return [] if any(part in layer.name for layer in layers) else list(runs)

    def lossy_parameters(layers: Sequence[LoraLinear], runs: Sequence[Run]) -> list[torch.Tensor]:
        return [tensor for layer in layers for tensor in parameters_of([layer], kept([layer], runs))]

    monkeypatch.setattr(whole_layers, "forward", lambda x, layers, runs: forward(x, layers, kept(layers, runs)))
    monkeypatch.setattr(
        whole_layers,
        "backward",
        lambda x, layers, runs, *others, **options: backward(x, layers, kept(layers, runs), *others, **options),
    )
    monkeypatch.setattr(whole_layers, "parameters_of", lossy_parameters)


def lose_in_generation(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    call = JoinedLinear.__call__

    def without(self: JoinedLinear, x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        return call(self, x, [] if any(part in layer.name for layer in self.layers) else runs)

    monkeypatch.setattr(JoinedLinear, "__call__", without)


LOSSES = [lose_in_own_code, lose_in_training, lose_in_generation]


@pytest.mark.parametrize(
    ("lose", "dtype"), [*((lose, torch.float32) for lose in LOSSES), (lose_in_own_code, torch.bfloat16)]
)
def test_a_group_whose_adapters_are_lost_is_refused_by_name_and_the_others_are_not(
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[pytest.MonkeyPatch, str], None],
    dtype: torch.dtype,
) -> None:
    lose(monkeypatch, "mlp")
    base = load(model_folder, dtype)
    assert base.groups == ["attn", "unembed"]
    assert {target.group for target in base.targets} == {"attn", "unembed"}
    with pytest.raises(Unsupported, match=r"train_mlp: its adapters are computed wrongly here: .* set it to false"):
        base.check_groups({"attn", "mlp"})
    base.check_groups({"attn", "unembed"})


def test_a_gap_as_large_as_what_the_adapter_does_refuses_the_group_within_any_tolerance() -> None:
    gaps = Gaps(base=0.0, groups={"attn": 0.09, "mlp": 0.01}, effects={"attn": 0.1, "mlp": 0.1})
    assert set(gaps.refused(0.5)) == {"attn"}
    assert set(gaps.refused(1e-3)) == {"attn", "mlp"}
    assert set(Gaps(0.0, {"attn": float("nan")}, {"attn": 1.0}).refused(0.5)) == {"attn"}


@pytest.mark.parametrize("lose", LOSSES)
def test_one_layer_of_many_is_enough_to_refuse_its_group(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[pytest.MonkeyPatch, str], None]
) -> None:
    lose(monkeypatch, "1.self_attn.o_proj")
    assert load(model_folder).groups == ["mlp", "unembed"]


def test_a_good_model_has_all_its_groups(model_folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = load(model_folder, dtype)
        assert base.groups == list(GROUPS)
        assert not base.refused_groups
