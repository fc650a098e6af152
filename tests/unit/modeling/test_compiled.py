"""The elementwise parts of a model through torch.compile, on this machine's compiler."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler

from tests.support.models import VOCAB_SIZE
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs

CPU = torch.device("cpu")


@pytest.fixture
def compiled(model_folder: Path) -> BaseModel:
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        pytest.skip(f"torch finds no C++ compiler: {error}")
    return BaseModel.load(model_folder, device=CPU, dtype=torch.float32, kernels="compiled")


def logprobs_and_gradients(base: BaseModel, lengths: list[int]) -> list[Tensor]:
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    adapter = Adapter.create(AdapterConfig(rank=4, seed=1), base.targets, CPU)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(0, 0.1, generator=generator)
    for tensor in adapter.tensors():
        tensor.requires_grad_(True)
    runs = [Run(adapter, slice(0, num_tokens))]
    hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
    named = target_logprobs(base.head, hidden, torch.arange(num_tokens), tokens, runs)
    return [named.detach(), *torch.autograd.grad(named.square().sum(), adapter.tensors())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own, while it compiles
def test_compiled_parts_change_neither_logprobs_nor_gradients_and_no_length_compiles_anything(
    compiled: BaseModel, model_folder: Path
) -> None:
    plain = BaseModel.load(model_folder, device=CPU, dtype=torch.float32, kernels="plain")
    assert "compiled" in str(compiled.kernels)
    logprobs_and_gradients(compiled, [5, 7])
    num_graphs = counters["stats"]["unique_graphs"]
    for lengths in ([9], [3, 3, 20], [64, 2]):
        for ours, theirs in zip(
            logprobs_and_gradients(compiled, lengths), logprobs_and_gradients(plain, lengths), strict=True
        ):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert counters["stats"]["unique_graphs"] == num_graphs > 0
