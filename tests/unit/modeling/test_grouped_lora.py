"""Grouped products over the tenants of a batch against one tenant after the other."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.adapters import random_adapter
from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.grouped_lora import Groups, torch_grouped_mm
from tinsmith.modeling.lora import LoraLinear

CPU = torch.device("cpu")
TARGETS = [Target("attn", "attn", 16, 24), Target("mlp", "mlp", 16, 24)]


def tenant(rank: int, **flags: bool) -> Adapter:
    return random_adapter(TARGETS, seed=rank, rank=rank, train_unembed=False, **flags)


def output_and_gradients(
    name: str, runs: list[Run], x_T_I: Tensor, *, grouped: bool, features: int = 24
) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(16, features).to(x_T_I.dtype).requires_grad_(False)
    for tensor in (base.weight, base.bias):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    groups = Groups.of(runs, x_T_I.shape[0], CPU, torch_grouped_mm) if grouped else None
    assert (groups is not None) == grouped
    layer = LoraLinear(base, name, ActiveRuns(runs, groups))
    y = layer(x_T_I[None])
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    inputs = [x_T_I, *(tensor for run in runs for tensor in run.adapter.tensors())]
    return y, list(torch.autograd.grad((y * weights).sum(), inputs, materialize_grads=True))


def rows(num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()


TENANTS = {
    "one rank": lambda: [Run(tenant(16), slice(0, 5)), Run(tenant(16), slice(5, 6)), Run(tenant(16), slice(6, 20))],
    "ranks": lambda: [Run(tenant(16), slice(0, 5)), Run(tenant(3), slice(5, 12)), Run(tenant(20), slice(12, 20))],
    "rows of no tenant": lambda: [Run(tenant(8), slice(2, 5)), Run(tenant(4), slice(9, 17))],
    "other layers": lambda: [Run(tenant(8), slice(0, 9)), Run(tenant(4, train_mlp=False), slice(9, 20))],
}


@pytest.mark.parametrize("layer", ["attn", "mlp"])
@pytest.mark.parametrize("tenants", TENANTS)
def test_grouped_products_equal_one_tenant_after_the_other_gradients_included(tenants: str, layer: str) -> None:
    runs = TENANTS[tenants]()
    y, grads = output_and_gradients(layer, runs, rows(20), grouped=True)
    expected_y, expected_grads = output_and_gradients(layer, runs, rows(20), grouped=False)
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_rows_give_float32_gradients_near_the_float32_ones() -> None:
    runs = TENANTS["ranks"]()
    _, grads = output_and_gradients("attn", runs, rows(20, torch.bfloat16), grouped=True)
    _, expected = output_and_gradients("attn", runs, rows(20), grouped=False)
    assert {grad.dtype for grad in grads[1:]} == {torch.float32}
    for ours, theirs in zip(grads, expected, strict=True):
        if theirs.any():
            assert torch.cosine_similarity(ours.float().ravel(), theirs.ravel(), dim=0) > 0.999
        else:
            assert not ours.any()  # the other layer's


def test_a_tenant_gets_the_same_alone_and_in_company() -> None:
    mine = tenant(16)
    alone = [Run(mine, slice(0, 7))]
    company = [Run(tenant(32), slice(0, 4)), Run(mine, slice(4, 11)), Run(tenant(8), slice(11, 12))]
    x = rows(7).detach()
    crowd = torch.cat([torch.randn(4, 16), x, torch.randn(1, 16)]).requires_grad_()
    y_alone, _ = output_and_gradients("attn", alone, x.clone().requires_grad_(), grouped=False)
    y_company, _ = output_and_gradients("attn", company, crowd, grouped=True)
    torch.testing.assert_close(y_company[0, 4:11], y_alone[0], rtol=1e-5, atol=1e-6)


def test_features_that_the_kernels_cannot_read_go_the_plain_way() -> None:
    targets = [Target("attn", "attn", 16, 20)]
    adapters = [Adapter.create(AdapterConfig(4, train_mlp=False, train_unembed=False), targets, CPU) for _ in range(2)]
    for tensor in [*adapters[0].tensors(), *adapters[1].tensors()]:
        tensor.requires_grad_(True)
    runs = [Run(adapters[0], slice(0, 5)), Run(adapters[1], slice(5, 9))]
    groups = Groups.of(runs, 9, CPU, torch_grouped_mm)
    assert groups is not None
    assert groups.linear(rows(9), LoraLinear(nn.Linear(16, 20), "attn", ActiveRuns())) is None
    y, _ = output_and_gradients("attn", runs, rows(9), grouped=True, features=20)
    assert y.shape == (1, 9, 20)


def test_one_tenant_and_rows_by_number_or_out_of_order_are_not_grouped() -> None:
    assert Groups.of([Run(tenant(4), slice(0, 5))], 5, CPU, torch_grouped_mm) is None
    scattered = [Run(tenant(4), torch.tensor([0, 2])), Run(tenant(4), torch.tensor([1]))]
    assert Groups.of(scattered, 3, CPU, torch_grouped_mm) is None
    turned = [Run(tenant(4), slice(5, 9)), Run(tenant(4), slice(0, 5))]
    assert Groups.of(turned, 9, CPU, torch_grouped_mm) is None
    shared = tenant(1)
    many = [Run(shared, slice(n, n + 1)) for n in range(1024)]
    assert Groups.of(many, 1024, CPU, torch_grouped_mm) is None
    assert Groups.of(many[:1023], 1023, CPU, torch_grouped_mm) is not None


def test_the_groups_are_what_torch_takes() -> None:
    """Offsets are int32 ends; the strides of all four kinds of product are multiples of 16 bytes: torch checks both on
    meta tensors as it does on CUDA."""
    runs = TENANTS["rows of no tenant"]()
    groups = Groups.of(runs, 20, CPU, torch_grouped_mm)
    assert groups is not None
    assert groups.ends_G.tolist() == [2, 5, 9, 17, 20]
    assert groups.scalings_G.tolist() == [0, 4, 0, 8, 0]

    def on_meta(left: Tensor, right: Tensor, ends_G: Tensor) -> Tensor:
        out = torch_grouped_mm(left.to("meta"), right.to("meta"), ends_G.to("meta"))
        return torch.zeros(out.shape, dtype=out.dtype)

    checked = Groups(groups.adapters, groups.ends_G, groups.scalings_G, on_meta)
    x = rows(20, torch.bfloat16)
    layer = LoraLinear(nn.Linear(16, 24, dtype=torch.bfloat16).requires_grad_(False), "attn", ActiveRuns())
    y = checked.linear(x, layer)
    assert y is not None
    torch.autograd.grad(y.sum(), [x, runs[0].adapter.weights["attn"].a_R_I, runs[1].adapter.weights["attn"].b_O_R])
