"""flash-linear-attention's gated delta rule in bfloat16 over packed sequences, against torch in float32 on the CPU.

python -m pytest -m gpu tests/gpu/test_recurrent_kernels.py -rs
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE, MARKS
from tinsmith.modeling.kernels import recurrent_cuda
from tinsmith.modeling.kernels.delta_rule import gated_delta_rule

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE.type != "cuda", reason="the package needs CUDA")]

LENGTHS = [9, 30, 30, 71, 130]
TOLERANCE = 0.02
"""Largest ||ours - expected|| / ||expected||. The package rounds each chunk's state and products to bfloat16."""


def inputs() -> list[Tensor]:
    """Queries, keys, values [T, H, K], decays and strengths [T, H], all of values that bfloat16 has."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    heads = [torch.randn(total, 2, 32, generator=generator) for _ in range(3)]
    decays, strengths = (torch.rand(total, 2, generator=generator) for _ in range(2))
    return [one.bfloat16().float() for one in (*heads, -decays, strengths)]


def assert_near(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    errors = [
        ((one.float().cpu() - other).norm() / other.norm()).item() for one, other in zip(ours, expected, strict=True)
    ]
    assert max(errors) <= TOLERANCE, errors


def test_the_delta_rule_of_flash_linear_attention() -> None:
    pytest.importorskip("fla.ops.gated_delta_rule", reason="flash-linear-attention is not installed")
    here = inputs()
    there = [one.to(DEVICE, torch.float32 if n == 3 else torch.bfloat16) for n, one in enumerate(here)]
    borders = recurrent_cuda.borders_of(LENGTHS, DEVICE)

    def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        function = recurrent_cuda.function("chunk_gated_delta_rule", q)
        assert function is not None
        q, k, v, g, beta = (one[None] for one in (q, k, v, g, beta))
        out, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=borders)
        return out[0]

    with torch.no_grad():
        assert_near([fused(*there)], [gated_delta_rule(*here, LENGTHS)])
    if recurrent_cuda.function("chunk_gated_delta_rule", there[0]) is None:
        return  # the package has no gradient here
    for one in (*here, *there):
        one.requires_grad_()
    factors = torch.randn(here[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    ours = torch.autograd.grad(fused(*there), there, factors.to(there[0]))
    assert_near(ours, torch.autograd.grad(gated_delta_rule(*here, LENGTHS), here, factors))
