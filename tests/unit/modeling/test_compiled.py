"""The elementwise parts of a layer through torch.compile, on this machine's compiler."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler

from tinsmith.modeling.kernels.compiled import compiled
from tinsmith.modeling.kernels.elementwise import EAGER, Elementwise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backend() -> Elementwise:
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        pytest.skip(f"torch finds no C++ compiler: {error}")
    return compiled(CPU, torch.float32)


def with_gradients(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    return [*outputs, *torch.autograd.grad(torch.stack([y.square().sum() for y in outputs]).sum(), leaves)]


def everything(backend: Elementwise, num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = random(8)
    angles = random(1, num_tokens, 4).repeat(1, 1, 2)
    found: list[Tensor] = []
    for gemma in (False, True):
        found += with_gradients(
            lambda x, gemma=gemma: [backend.rms_norm(x, weight, 1e-6, gemma=gemma)], random(1, num_tokens, 8)
        )
    found += with_gradients(
        lambda gate, up: [backend.swiglu(gate, up)], random(1, num_tokens, 8), random(1, num_tokens, 8)
    )
    found += with_gradients(
        lambda q, k: backend.rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()),
        random(1, num_tokens, 2, 8),
        random(1, num_tokens, 1, 8),
    )
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own, while it compiles
def test_compiled_parts_equal_eager_ones_at_any_length_and_no_length_compiles_anything(backend: Elementwise) -> None:
    everything(backend, 7)
    before = counters["stats"]["unique_graphs"]
    for num_tokens in (5, 33, 128, 2):
        for ours, theirs in zip(everything(backend, num_tokens), everything(EAGER, num_tokens), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == before
