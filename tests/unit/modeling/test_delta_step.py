"""One step of the gated delta rule against transformers' own."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.recurrent import _FUNCTIONS

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")


def rules(family: str) -> tuple[Any, Any]:
    """transformers' rule, and the one that its layers call here."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = module.torch_recurrent_gated_delta_rule
    return theirs, partial(_FUNCTIONS["torch_recurrent_gated_delta_rule"], ActiveRuns(), theirs)


def inputs(num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = {"query": (3, num_tokens, 4, 8), "key": (3, num_tokens, 4, 8), "value": (3, num_tokens, 4, 6)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        **made,
        "g": -torch.rand(3, num_tokens, 4, generator=generator),
        "beta": torch.rand(3, num_tokens, 4, generator=generator),
    }


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_transformers_and_changes_the_states_in_place(family: str, normalize: bool) -> None:
    theirs, ours = rules(family)
    lanes = torch.randn(5, 4, 8, 6, generator=torch.Generator().manual_seed(1))
    before, flags = lanes.clone(), {"output_final_state": True, "use_qk_l2norm_in_kernel": normalize}
    with torch.no_grad():
        expected, state = theirs(**inputs(1), initial_state=before[:3], **flags)
        out, left = ours(**inputs(1), initial_state=lanes[:3], **flags)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lanes[:3], state, rtol=1e-5, atol=1e-5)
    assert left.data_ptr() == lanes.data_ptr()
    assert torch.equal(lanes[3:], before[3:])


@pytest.mark.parametrize(
    ("num_tokens", "has_state", "with_gradient"), [(2, True, False), (1, False, False), (1, True, True)]
)
def test_all_else_is_left_to_transformers(num_tokens: int, has_state: bool, with_gradient: bool) -> None:
    theirs, ours = rules("qwen3_5")
    state = torch.randn(3, 4, 8, 6) if has_state else None
    before = None if state is None else state.clone()
    with torch.set_grad_enabled(with_gradient):
        given = {**inputs(num_tokens), "initial_state": state, "output_final_state": True}
        for mine, other in zip(ours(**given), theirs(**given), strict=True):
            assert torch.equal(mine, other)
    assert state is None or (before is not None and torch.equal(state, before))
