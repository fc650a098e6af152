"""The CPU's elementwise functions against the plain ones, gradients included."""

import pytest
import torch
from torch import Tensor

from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.cpu import CPU, gemma_factor, normalize, rotate


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    grads = [torch.randn_like(one) for one in ours]
    pairs = zip(
        (*ours, *torch.autograd.grad(ours, inputs, grads)),
        (*theirs, *torch.autograd.grad(theirs, inputs, grads)),
        strict=True,
    )
    for mine, other in pairs:
        assert_near(mine, other)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 48), (1, 5, 3, 16)])
def test_rms_norm_equals_the_plain_one_and_its_gradient_is_right(shape: tuple[int, ...], gemma: bool) -> None:
    x, weight = random(*shape, dtype=torch.float32), random(shape[-1], dtype=torch.float32).detach()
    for size in (1.0, 1e-3):  # where eps decides
        ours, theirs = (f(x * size, weight, 1e-6, gemma=gemma) for f in (CPU.rms_norm, elementwise.rms_norm))
        assert_same((ours,), (theirs,), [x])
    wide = random(2, 3, 8, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: CPU.rms_norm(x, weight[:8].double(), 1e-2, gemma=gemma), wide)


def test_rotary_equals_the_plain_one_and_its_gradient_is_right() -> None:
    def inputs(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        q, k = (random(5, heads, 8, dtype=dtype).transpose(0, 1)[None] for heads in (4, 2))  # as a layer lays them
        angles = random(1, 5, 8, dtype=dtype).detach()  # of both halves, which need not be equal
        return [q.detach().requires_grad_(), k.detach().requires_grad_()], [angles.cos(), angles.sin()]

    (q, k), angles = inputs(torch.float32)
    assert_same(CPU.rotary(q, k, *angles), elementwise.rotary(q, k, *angles), [q, k])
    (q, k), angles = inputs(torch.float64)
    torch.autograd.gradcheck(lambda q, k: CPU.rotary(q, k, *angles), (q, k))


def test_swiglu_equals_the_plain_one_and_its_gradient_is_right() -> None:
    gate, up = random(5, 8, dtype=torch.float32), random(5, 8, dtype=torch.float32)
    assert_same((CPU.swiglu(gate, up),), (elementwise.swiglu(gate, up),), [gate, up])
    torch.autograd.gradcheck(CPU.swiglu, (gate.detach().double().requires_grad_(), random(5, 8, dtype=torch.float64)))


@torch.no_grad()
@pytest.mark.parametrize("gemma", [False, True])
def test_without_gradients_they_compute_the_same(gemma: bool) -> None:
    x, weight = random(1, 5, 8, dtype=torch.float32), random(8, dtype=torch.float32)
    assert_near(CPU.rms_norm(x, weight, 1e-6, gemma=gemma), elementwise.rms_norm(x, weight, 1e-6, gemma=gemma))
    assert_near(CPU.swiglu(x, 2 * x), elementwise.swiglu(x, 2 * x))
    q, k, cos, sin = x[:, None], 2 * x[:, None], x.cos(), x.sin()
    for mine, other in zip(CPU.rotary(q, k, cos, sin), elementwise.rotary(q, k, cos, sin), strict=True):
        assert_near(mine, other)


@pytest.mark.parametrize("gemma", [False, True])
def test_in_bfloat16_they_give_the_bits_of_the_plain_ones(gemma: bool) -> None:
    """Generation and training then differ by no rounding of theirs."""
    x, weight = random(5, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16).detach()
    plain = elementwise.rms_norm(x, weight, 1e-6, gemma=gemma)
    factor = gemma_factor(weight) if gemma else weight
    assert torch.equal(normalize(x, factor, 1e-6)[0], plain)
    assert torch.equal(CPU.rms_norm(x, weight, 1e-6, gemma=gemma), plain)
    assert torch.equal(CPU.swiglu(x, 2 * x), elementwise.swiglu(x, 2 * x))
    angles = random(1, 5, 8, dtype=torch.bfloat16)
    q = x.transpose(0, 1)[None]
    plain, _ = elementwise.rotary(q, q, angles.cos(), angles.sin())
    assert torch.equal(CPU.rotary(q, q, angles.cos(), angles.sin())[0], plain)
    cos, sin = angles.transpose(0, 1).cos(), angles.transpose(0, 1).sin()
    assert torch.equal(rotate(x, cos, sin).transpose(0, 1)[None], plain)
