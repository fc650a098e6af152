import math

import pytest
import torch

from tinsmith.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2
from trainer_service.engine.newton_schulz import frobenius, orthogonalize
from trainer_service.engine.optimizers import AdamParams, AdamW, Dimuon, DimuonParams, clip_gradient
from trainer_service.requests import params_of


def params(**fields: float) -> AdamParams:
    defaults = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    one = params_of(trainer_pb2.OptimStepRequest(adam_params=trainer_pb2.AdamParams(**{**defaults, **fields})))
    assert isinstance(one, AdamParams)
    return one


def test_adamw_equals_torch_s_fused_one_bit_for_bit_with_every_field_changing() -> None:
    torch.manual_seed(0)
    ours = torch.randn(1003)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=1.0, fused=True)
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


def test_one_flat_buffer_equals_the_default_adamw_with_a_parameter_for_each_tensor() -> None:
    torch.manual_seed(0)
    sizes = [7, 64, 33, 129]
    flat = torch.randn(sum(sizes))
    parts = [torch.nn.Parameter(part.clone()) for part in flat.split(sizes)]
    reference = torch.optim.AdamW(parts, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1, foreach=False)
    adam = AdamW(flat)
    for _ in range(3):
        gradient = torch.randn_like(flat)
        for part, grad in zip(parts, gradient.split(sizes), strict=True):
            part.grad = grad.clone()
        reference.step()
        adam.step(flat, gradient, params(weight_decay=0.1))
        torch.testing.assert_close(flat, torch.cat([part.detach() for part in parts]), rtol=1e-6, atol=1e-7)


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


def test_the_norm_of_a_large_matrix_is_exact() -> None:
    matrices = torch.randn(1, 256, 20_000, generator=torch.Generator().manual_seed(0))
    assert frobenius(matrices).item() == pytest.approx(matrices.double().norm().item(), rel=1e-6)


def test_the_norm_of_a_large_gradient_is_exact_and_clipping_keeps_to_it() -> None:
    gradient = torch.randn(5_000_001, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().norm().item()
    assert clip_gradient(gradient, 1.0) == pytest.approx(exact, rel=1e-6)
    assert gradient.double().norm().item() == pytest.approx(1.0, rel=1e-6)


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


SHAPES = ((4, 10), (12, 4), (4, 4), (4, 12), (3, 4))
"""A and B matrices of rank 4; the last is narrower than the rank."""


def dimuon_params(**fields: float) -> DimuonParams:
    given = trainer_pb2.DimuonParams(**{"learning_rate": 0.1, "beta1": 0.9, **fields})
    one = params_of(trainer_pb2.OptimStepRequest(dimuon_params=given))
    assert isinstance(one, DimuonParams)
    return one


def matrices(flat: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(s) for part, s in zip(flat.split([math.prod(s) for s in SHAPES]), SHAPES, strict=True)]


@pytest.fixture
def flat() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(sum(math.prod(shape) for shape in SHAPES))


def test_orthogonalize_gives_the_polar_factor() -> None:
    torch.manual_seed(0)
    for n in (4, 9, 200):
        matrix = torch.randn(3, 4, n)
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        for scale in (1.0, 1e-25, 1e25):
            torch.testing.assert_close(orthogonalize(scale * matrix), u @ vt, atol=1e-3, rtol=0)


def test_orthogonalize_keeps_the_null_space_and_lifts_small_singular_values() -> None:
    u, v = (torch.linalg.qr(torch.randn(n, 4, generator=torch.Generator().manual_seed(n))).Q for n in (4, 50))
    out = u.mT @ orthogonalize((u * torch.tensor([1.0, 0.1, 1e-2, 0.0])) @ v.mT[None])[0] @ v
    torch.testing.assert_close(out, torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])), atol=1e-3, rtol=0)
    assert not orthogonalize(torch.zeros(1, 4, 5)).any()


def test_dimuon_moves_each_matrix_by_an_orthogonal_update_of_norm_sqrt_rank(flat: torch.Tensor) -> None:
    before, gradient = flat.clone(), torch.randn_like(flat)
    dimuon = Dimuon(flat, SHAPES, rank=4)
    dimuon.step(flat, gradient, dimuon_params())
    for moved, grad in zip(matrices((before - flat) / 0.1), matrices(gradient), strict=True):
        torch.testing.assert_close(moved.norm(), torch.tensor(2.0), atol=1e-4, rtol=0)
        u, _, vt = torch.linalg.svd(grad, full_matrices=False)
        torch.testing.assert_close(moved, u @ vt * 2.0 / math.sqrt(min(grad.shape)), atol=5e-3, rtol=0)


def test_dimuon_takes_each_experts_matrix_for_itself(flat: torch.Tensor) -> None:
    flat, gradient = flat[:96].clone(), torch.randn(96)
    stacked, plain = flat.clone(), flat.clone()
    Dimuon(stacked, [(4, 10), (2, 4, 7)], rank=4).step(stacked, gradient, dimuon_params())
    Dimuon(plain, [(4, 10), (4, 7), (4, 7)], rank=4).step(plain, gradient, dimuon_params())
    assert torch.equal(stacked, plain)
    assert not torch.equal(stacked, flat)


def test_dimuon_averages_gradients_and_has_no_weight_decay(flat: torch.Tensor) -> None:
    first, second = torch.randn_like(flat), torch.randn_like(flat)
    dimuon = Dimuon(flat, SHAPES, rank=4)
    dimuon.step(flat, first, dimuon_params(beta1=0.9))
    dimuon.step(flat, second, dimuon_params(beta1=0.5))
    torch.testing.assert_close(dimuon.momentum, 0.5 * (0.1 * first) + 0.5 * second)
    before = flat.clone()
    Dimuon(flat, SHAPES, rank=4).step(flat, torch.zeros_like(flat), dimuon_params(learning_rate=1.0))
    assert torch.equal(flat, before)


def test_dimuon_does_not_depend_on_the_scale_of_the_gradient_or_on_its_neighbours(flat: torch.Tensor) -> None:
    gradient, other = torch.randn_like(flat), flat.clone()
    Dimuon(flat, SHAPES, rank=4).step(flat, gradient, dimuon_params())
    scaled = torch.cat([gradient[:40] * 1e-12, torch.zeros(flat.numel() - 40)])
    Dimuon(other, SHAPES, rank=4).step(other, scaled, dimuon_params())
    torch.testing.assert_close(other[:40], flat[:40], atol=1e-5, rtol=0)


def test_dimuon_state_continues_where_it_was_taken(flat: torch.Tensor) -> None:
    dimuon = Dimuon(flat, SHAPES, rank=4)
    dimuon.step(flat, torch.randn_like(flat), dimuon_params())
    copy, other = flat.clone(), Dimuon(flat, SHAPES, rank=4)
    state = dimuon.state()
    assert set(state) == {"momentum"}
    other.load(state)
    gradient = torch.randn_like(flat)
    dimuon.step(flat, gradient, dimuon_params())
    other.step(copy, gradient, dimuon_params())
    assert torch.equal(flat, copy)


@pytest.mark.parametrize(("field", "value"), [("learning_rate", -1.0), ("beta1", 1.0), ("grad_clip_norm", math.inf)])
def test_a_dimuon_field_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"dimuon_params\.{field}: {value} is outside"):
        dimuon_params(**{field: value})


def test_a_step_needs_parameters() -> None:
    request = trainer_pb2.OptimStepRequest(dimuon_params=trainer_pb2.DimuonParams(learning_rate=0.5, beta1=0.1))
    assert params_of(request) == DimuonParams(0.5, 0.1, 0.0)
    with pytest.raises(InvalidRequest, match="params: missing"):
        params_of(trainer_pb2.OptimStepRequest())
