"""One step of Mamba2's state space against transformers' own."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.kernels import delta_step
from tinsmith.modeling.recurrent import _FUNCTIONS

FAMILIES = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
B, H, G, P, N = 3, 4, 2, 6, 5


def steps(family: str) -> tuple[Any, Any]:
    """transformers' step, and the one that its layers call here."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = module.mamba2_selective_state_update
    return theirs, partial(_FUNCTIONS["mamba2_selective_state_update"], ActiveRuns(), theirs)


def inputs() -> dict[str, Any]:
    """As the layers make them: step sizes, A and D are expanded from one number for each head."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": numbers(B, H, P),
        "dt": numbers(B, H, 1).expand(-1, -1, P),
        "A": -numbers(H).exp()[:, None, None].expand(-1, P, N),
        "B": numbers(B, G, N),
        "C": numbers(B, G, N),
        "D": numbers(H)[:, None].expand(-1, P),
        "dt_bias": numbers(H)[:, None].expand(-1, P),
        "dt_softplus": True,
    }


@pytest.mark.parametrize("block_bytes", [1, 400, 1 << 20])
@pytest.mark.parametrize("changed", [{}, {"D": None}, {"dt_bias": None}, {"dt_softplus": False}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_transformers_and_changes_the_states_in_place(
    family: str, changed: dict[str, Any], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_step, "_BLOCK_BYTES", block_bytes)
    theirs, ours = steps(family)
    lanes = torch.randn(5, H, P, N, generator=torch.Generator().manual_seed(1))
    before, given = lanes.clone(), {**inputs(), **changed}
    wanted = lanes.clone()
    with torch.no_grad():
        expected, out = theirs(wanted[:B], **given), ours(lanes[:B], **given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lanes, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(lanes[:B], before[:B])
    assert torch.equal(lanes[B:], before[B:])


CHANGES: dict[str, dict[str, Any]] = {
    "z": {"z": torch.ones(B, H, P)},
    "dt": {"dt": torch.linspace(0, 1, B * H * P).view(B, H, P)},
    "A": {"A": -torch.linspace(0, 1, H * P * N).view(H, P, N)},
    "D": {"D": torch.linspace(0, 1, H * P).view(H, P)},
    "bfloat16": {"B": torch.ones(B, G, N, dtype=torch.bfloat16)},
    "gradient": {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_all_else_is_left_to_transformers(change: str) -> None:
    theirs, ours = steps("nemotron_h")
    given, states = {**inputs(), **CHANGES[change]}, [torch.ones(B, H, P, N) for _ in range(2)]
    with torch.set_grad_enabled(change == "gradient"):
        outputs = [step(state, **given) for step, state in zip((theirs, ours), states, strict=True)]
    assert torch.equal(*outputs)
    assert torch.equal(*states)
