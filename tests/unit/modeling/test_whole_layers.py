"""Whole decoder layers against the code of transformers that they take the place of, gradients included."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.adapters import random_adapter
from tests.support.models import TINY_CONFIG
from tinsmith.modeling import whole_layers
from tinsmith.modeling.adapter_runs import ActiveRuns, PassGradient, Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.kernels.cpu import CPU

LENGTHS = (7, 7, 3, 12, 12)
T = sum(LENGTHS)


def base_of(kind: str, **settings: Any) -> BaseModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**TINY_CONFIG, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.normal_(0.5, 0.2)
    return BaseModel.of(model, path=kind)


def passed(base: BaseModel, runs: list[Run]) -> list[Tensor]:
    """The hidden states, and the gradients of all adapters."""
    tokens = torch.randint(256, (T,), generator=torch.Generator().manual_seed(3))
    hidden = base.hidden_states(tokens, positions_of(LENGTHS, base.device), Packed(LENGTHS), runs)
    factors = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
    inputs = [tensor for run in runs for tensor in run.adapter.tensors()]
    anchors = [run.gradient.anchor for run in runs if run.gradient is not None]
    found = torch.autograd.grad((hidden * factors).sum(), [*anchors, *inputs], allow_unused=True)[len(anchors) :]
    if anchors:
        return [hidden, *(run.gradient.gather(found) for run in runs if run.gradient is not None)]
    both = zip(inputs, found, strict=True)
    return [hidden, *(torch.zeros_like(own) if grad is None else grad for own, grad in both)]


def own_code(base: BaseModel) -> None:
    for module in (base.decoder, *base.layers):
        module.__dict__.pop("forward", None)


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},  # biases
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_whole_layers_equal_their_own_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(kind, **KINDS[kind])
    assert all("forward" in module.__dict__ for module in (base.decoder, *base.layers))
    same_rank = [random_adapter(base.targets, seed=n, rank=4, b_std=0.05) for n in range(2)]
    other = random_adapter(base.targets, seed=2, rank=3, b_std=0.05, train_mlp=False)
    runs = {
        "one": [Run(same_rank[0], slice(0, T))],
        "alike": [Run(one, slice(7 * n, 7 * n + 7)) for n, one in enumerate(same_rank)],
        "others": [Run(same_rank[0], slice(2, 9)), Run(other, slice(17, T))],
        "few": [Run(same_rank[0], slice(0, 7), PassGradient(same_rank[0]))],
        "by number": [Run(other, torch.tensor([3, 1, 30]))],
    }
    calls: list[int] = []
    whole_run = whole_layers.WholeLayer.run
    monkeypatch.setattr(
        whole_layers.WholeLayer, "run", lambda self, *args: calls.append(self.index) or whole_run(self, *args)
    )
    ours = {name: passed(base, some) for name, some in runs.items()}
    assert calls == [0, 1] * len(runs)
    with torch.no_grad():  # which goes through the layers' own code
        base.hidden_states(torch.arange(3), torch.arange(3), Packed([3]), runs["one"][:0])
    assert len(calls) == 2 * len(runs)
    own_code(base)
    for name, some in runs.items():
        theirs = passed(base, [replace(run, gradient=run.gradient and PassGradient(run.adapter)) for run in some])
        for found, expected in zip(ours[name], theirs, strict=True):
            assert (found - expected).norm() <= 2e-5 * expected.norm(), name


@pytest.mark.parametrize("rows", [slice(0, 7), slice(0, T)])
def test_gradients_are_added_where_the_run_says(rows: slice) -> None:
    base = base_of("qwen3")
    mine = random_adapter(base.targets, seed=1, rank=4, b_std=0.05)
    expected = passed(base, [Run(mine, rows)])[1:]
    (_, flat) = passed(base, [Run(mine, rows, PassGradient(mine))])
    torch.testing.assert_close(flat, torch.cat([grad.flatten() for grad in expected]))


def test_layers_that_no_adapter_trains_are_not_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of("qwen3")
    mine = random_adapter(base.targets, seed=1, rank=4, b_std=0.05, train_attn=False)
    calls: list[int] = []
    attend_backward = whole_layers.attend_backward
    monkeypatch.setattr(whole_layers, "attend_backward", lambda *args: calls.append(1) or attend_backward(*args))
    passed(base, [Run(mine, slice(0, T))])
    assert len(calls) == 1  # of two layers: below the first one's feed-forward part nothing is trained


OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.5},
    "olmo2": {},  # norms after, not before
    "gemma2": {},
    "phi3": {},  # q, k and v in one
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_keep_their_own_code(kind: str) -> None:
    base = base_of(kind, **OTHERS[kind])
    assert base.kernels.elementwise is CPU
    assert all("forward" not in layer.__dict__ for layer in base.layers)


def test_a_layer_that_only_looks_alike_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of("qwen3")
    own_code(base)
    kind = type(base.layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **kw: 1.001 * forward(self, hidden_states, **kw))
    assert whole_layers.take_over(base.decoder, base.layers, ActiveRuns()) == 0
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **kw: forward(self, hidden_states.detach(), **kw))
    assert whole_layers.take_over(base.decoder, base.layers, ActiveRuns()) == 0
    monkeypatch.undo()
    assert whole_layers.take_over(base.decoder, base.layers, base.active) == 2


def test_a_decoder_that_does_more_around_its_layers_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of("qwen3")
    own_code(base)
    monkeypatch.setattr(type(base.decoder), "forward", lambda self, **kw: (1.001 * kw["position_ids"][..., None],))
    assert whole_layers.take_over(base.decoder, base.layers, base.active) == 2
    assert "forward" not in base.decoder.__dict__
