"""One step of a causal convolution against transformers' own."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.recurrent import _FUNCTIONS

FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h", "mamba2", "falcon_h1", "bamba", "granitemoehybrid", "lfm2")


def steps(family: str) -> tuple[Any, Any]:
    """transformers' step, and the one that its layers call here."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = module.causal_conv1d_update
    return theirs, partial(_FUNCTIONS["causal_conv1d_update"], ActiveRuns(), theirs)


def inputs(*, num_tokens: int = 1, num_kept: int = 4, width: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """The new inputs of 3 sequences, a window of 5 lanes, weight and bias."""
    generator = torch.Generator().manual_seed(width)
    shapes = (3, 6, num_tokens), (5, num_kept, 6), (6, width), (6,)
    x, kept, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return x, kept.transpose(1, 2), weight, bias


def run(step: Any, kept: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    x, *others = given
    lanes = kept.clone()
    return step(x, lanes[:3], *others), lanes


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_kept", "width"), [(4, 4), (3, 4), (5, 3), (1, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_transformers_and_changes_the_windows_in_place(
    family: str, num_kept: int, width: int, has_bias: bool, activation: str | None
) -> None:
    theirs, ours = steps(family)
    x, kept, weight, bias = inputs(num_kept=num_kept, width=width)
    for layout in (kept, kept.contiguous()):
        with torch.no_grad():
            given = x, weight, bias if has_bias else None, activation
            expected, wanted = run(theirs, layout, *given)
            out, left = run(ours, layout, *given)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(left, wanted)
        assert not torch.equal(left[:3], layout[:3])


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_step_in_bfloat16_is_as_near_to_the_exact_one_as_transformers(family: str) -> None:
    theirs, ours = steps(family)
    x, kept, weight, bias = inputs(dtype=torch.bfloat16)
    with torch.no_grad():
        exact, _ = run(theirs, kept.double(), x.double(), weight.double(), bias.double(), "silu")
        gaps = [(run(step, kept, x, weight, bias, "silu")[0] - exact).abs().max() for step in (ours, theirs)]
    assert gaps[0] <= 2 * gaps[1]


@pytest.mark.parametrize(
    ("settings", "activation", "with_gradient"),
    [({"num_tokens": 2}, "silu", False), ({}, "gelu", False), ({}, "silu", True)],
)
def test_all_else_is_left_to_transformers(settings: Any, activation: str, with_gradient: bool) -> None:
    theirs, ours = steps("qwen3_5")
    x, kept, weight, bias = inputs(**settings)
    with torch.set_grad_enabled(with_gradient):
        for mine, other in zip(*(run(step, kept, x, weight, bias, activation) for step in (ours, theirs)), strict=True):
            assert torch.equal(mine, other)
