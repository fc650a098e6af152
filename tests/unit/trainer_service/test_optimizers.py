import math

import pytest
import torch

from tinsmith.rpc.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2
from trainer_service.optimizers import AdamParams, AdamW, clip_gradient


def params(**fields: float) -> AdamParams:
    defaults = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    return AdamParams.from_proto(trainer_pb2.AdamParams(**{**defaults, **fields}))


def test_adamw_equals_torch_bit_for_bit_with_every_field_changing() -> None:
    torch.manual_seed(0)
    ours = torch.randn(1003)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=1.0)
    adam = AdamW(ours)
    for step in range(1, 8):
        gradient = torch.randn(1003)
        settings = {
            "learning_rate": 0.01 * step,
            "beta1": 0.8 + 0.02 * step,
            "beta2": 0.9 + 0.01 * step,
            "eps": 10.0**-step,
            "weight_decay": 0.1 * (step % 3),
        }
        for group in reference.param_groups:
            group.update(
                lr=settings["learning_rate"],
                betas=(settings["beta1"], settings["beta2"]),
                eps=settings["eps"],
                weight_decay=settings["weight_decay"],
            )
        theirs.grad = gradient.clone()
        reference.step()
        adam.step(ours, gradient, params(**settings))
        assert torch.equal(ours, theirs.detach())


def test_one_flat_buffer_equals_a_parameter_for_each_tensor() -> None:
    torch.manual_seed(0)
    sizes = [7, 64, 33, 129]
    flat = torch.randn(sum(sizes))
    parts = [torch.nn.Parameter(part.clone()) for part in flat.split(sizes)]
    reference = torch.optim.AdamW(parts, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    adam = AdamW(flat)
    for _ in range(3):
        gradient = torch.randn_like(flat)
        for part, grad in zip(parts, gradient.split(sizes), strict=True):
            part.grad = grad.clone()
        reference.step()
        adam.step(flat, gradient, params(weight_decay=0.1))
        assert torch.equal(flat, torch.cat([part.detach() for part in parts]))


def test_state_continues_where_it_was_taken() -> None:
    torch.manual_seed(0)
    a = torch.randn(20)
    adam = AdamW(a)
    adam.step(a, torch.randn(20), params())
    b, other = a.clone(), AdamW(a)
    other.load(adam.state())
    gradient = torch.randn(20)
    adam.step(a, gradient, params())
    other.step(b, gradient, params())
    assert torch.equal(a, b)


def test_clip_scales_to_the_limit_and_reports_the_norm_before() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert clip_gradient(gradient, 1.0) == 5.0
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
    for off in (0.0, -1.0, 10.0):
        gradient = torch.tensor([3.0, 4.0])
        assert clip_gradient(gradient, off) == 5.0
        assert gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", -1.0),
        ("weight_decay", math.inf),
        ("grad_clip_norm", math.nan),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"adam_params\.{field}: {value}"):
        params(**{field: value})
