"""Full versions in shared memory, as the worker reads them."""

from __future__ import annotations

import pytest
import torch

from sampler_service.vllm.full import FullVersion, Parameters
from sampler_service.vllm.full_source import FullSource
from sampler_service.vllm.shared_memory import Handle, SharedTensor
from tinsmith.errors import OutOfCapacity

LINEAR, NORM = "layers.0.proj.weight", "norm.weight"
SPECS = [(LINEAR, [2, 3], True), (NORM, [2], False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_parameter_is_a_view_in_the_type_and_order_that_it_was_sent_in(dtype: torch.dtype) -> None:
    shared = SharedTensor.copy_of(torch.arange(8.0).to(dtype))
    tensors = dict(FullSource(shared.handle, SPECS).tensors())
    assert tensors[LINEAR].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert tensors[NORM].tolist() == [6, 7]
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_tensors_that_are_no_parameters_are_loaded_with_every_version() -> None:
    files = [(NORM, torch.ones(2)), ("layers.0.bias_correction", torch.ones(1)), (LINEAR, torch.ones(2, 3))]
    others = FullSource(Handle(1, 1, 1), SPECS).others(files)
    assert [name for name, _ in others] == ["layers.0.bias_correction"]


def test_fused_experts_which_the_files_hold_apart_are_refused_by_name() -> None:
    fused = "layers.0.mlp.experts.gate_up_proj"
    files = [(NORM, torch.ones(2)), ("layers.0.mlp.experts.0.gate_proj.weight", torch.ones(2, 3))]
    with pytest.raises(ValueError, match=rf"{fused} is one parameter, .* under other names"):
        FullSource(Handle(1, 1, 1), [(fused, [1, 2, 3], False), SPECS[1]]).others(files)


def test_a_version_arrives_in_shared_memory_which_goes_when_it_is_given_up() -> None:
    layout = FullVersion(Parameters({NORM: (2,)}, frozenset(), torch.bfloat16), torch.empty(0, device="meta"))
    layout = layout.like(torch.empty(2, dtype=layout.sent_dtype, device="meta"))
    arriving = FullVersion.arriving(layout)
    assert arriving.shared is not None
    handle = arriving.shared.handle
    arriving.flat.copy_(torch.tensor([1.0, 2.0]))
    assert handle.open().tolist() == [1, 2]
    del arriving
    with pytest.raises(OSError, match=str(handle.fd)):
        handle.open()


def test_memory_that_is_not_there_is_out_of_capacity_and_says_how_much() -> None:
    with pytest.raises(OutOfCapacity, match=f"no memory on this sampler for {2**62} bytes"):
        SharedTensor((2**60,), torch.float32)
