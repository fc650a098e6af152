"""Tensor parallelism by the model's own plan: ranks that are threads of this process, against the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.support.adapters import random_adapter
from tests.unit.modeling.test_families import DENSE, SPARSE, make
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.kernels.elementwise import EAGER, Elementwise, eager_on_host
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_ops import joined, own_part, replicated, summed
from tinsmith.modeling.parallel_tensor import CannotDivide

T = TypeVar("T")
CPU = torch.device("cpu")
LENGTHS = (7, 3, 12)


@dataclass
class Meeting:
    """Where the threads of one group exchange their tensors."""

    size: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)
        self.tensors = [None] * self.size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        everyone = list(self.tensors)
        self.barrier.wait()
        return everyone


@dataclass
class ThreadPeers:
    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0))

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return self.meeting.exchange(self.rank, tensor)


def on_ranks(size: int, call: Callable[[ThreadPeers], T]) -> list[T]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(call, [ThreadPeers(rank, meeting) for rank in range(size)]))


_loading = threading.Lock()


def load(folder: Path, peers: ThreadPeers | None) -> BaseModel:
    def one_by_one(call: Callable[[], T], /) -> T:
        with _loading:
            return call()

    division = None if peers is None else Division(peers, None, one_by_one)
    return BaseModel.load(folder, device=CPU, dtype=torch.float32, kernels="plain", division=division)


def adapters(base: BaseModel) -> list[Adapter]:
    few = {"train_mlp": False, "train_unembed": False}
    return [random_adapter(base.targets, seed=1, rank=4), random_adapter(base.targets, seed=2, rank=3, **few)]


def step(base: BaseModel) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of all targets, and the gradient of a loss for every A and B of two adapters."""
    generator = torch.Generator().manual_seed(3)
    num_tokens = sum(LENGTHS)
    tokens, targets = torch.randint(base.vocab_size, (2, num_tokens), generator=generator)
    weights = torch.randn(num_tokens, generator=generator)
    first, second = adapters(base)
    runs = [Run(first, slice(0, 10)), Run(second, slice(10, num_tokens))]
    hidden = base.hidden_states(tokens, positions_of(LENGTHS, CPU), Packed(LENGTHS), runs)
    logprobs = base.target_logprobs(hidden, torch.arange(num_tokens), targets, runs)
    parameters = [*first.tensors(), *second.tensors()]
    grads = torch.autograd.grad((weights * logprobs).sum(), parameters, materialize_grads=True)
    return logprobs.detach(), list(grads)


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma3Text", "Qwen2", "Phi3", "Olmo2"])
def test_ranks_together_give_the_logprobs_and_gradients_of_the_whole(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path, family, DENSE[family])
    logprobs, grads = step(load(folder, None))
    parts = on_ranks(2, lambda peers: step(load(folder, peers)))
    for theirs, _ in parts:
        torch.testing.assert_close(theirs, logprobs, rtol=1e-5, atol=1e-5)
    num_divided = 0
    for n, grad in enumerate(grads):
        assert grad.abs().max() > 0
        total = parts[0][1][n] + parts[1][1][n]
        assert (total - grad).norm() <= 1e-5 * grad.norm()
        num_divided += all((part[1][n] - grad).norm() > 1e-2 * grad.norm() for part in parts)
    assert num_divided >= len(grads) - 2  # of the output layer, one rank may have all rows of an adapter


@pytest.mark.parametrize(
    ("family", "settings", "ranks", "message"),
    [
        ("Qwen3", {}, 4, "tensor_parallel: 4 does not divide num_key_value_heads 2 of this model; 2 does"),
        ("Qwen3", {"num_attention_heads": 6}, 4, "4 does not divide num_attention_heads 6 of this model; 3 does"),
        ("Llama", {"intermediate_size": 97}, 2, "2 does not divide the 97 features of .*; set tensor_parallel to 1"),
        ("OPT", DENSE["OPT"], 2, "tensor_parallel: transformers has no plan .tp_plan. for OPTForCausalLM"),
        ("Qwen3Moe", SPARSE["Qwen3Moe"], 2, "'packed_colwise' in the plan of Qwen3MoeForCausalLM; this trainer can do"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_what_would_work(
    family: str, settings: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, family, settings)
    with pytest.raises(CannotDivide, match=message):
        load(folder, ThreadPeers(0, Meeting(ranks)))


def test_products_over_several_ranks_have_the_gradient_of_the_whole() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def whole() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = torch.sin(leaf @ weight)
        return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]

    def by_rows(peers: ThreadPeers) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = torch.sin(summed(own_part(leaf, peers) @ own_part(weight.T, peers).T, peers))
        return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]

    def by_columns(peers: ThreadPeers) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = torch.sin(joined(replicated(leaf, peers) @ own_part(weight, peers), peers))
        return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]

    for divided in (by_rows, by_columns):
        for y, grad in on_ranks(2, divided):
            torch.testing.assert_close(y, whole()[0])
            torch.testing.assert_close(grad, whole()[1])


def test_a_model_that_moves_after_its_check_uses_its_kernels_from_then_on() -> None:
    def only_there(x: Tensor, *_: Any, **__: Any) -> Any:
        assert x.device.type == "meta"
        return x

    there: Any = only_there
    backend = eager_on_host(Elementwise("there", there, there, there))
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    weight, (cos, sin) = torch.ones(4), torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(backend.rms_norm(x, weight, 1e-6, gemma=True), EAGER.rms_norm(x, weight, 1e-6, gemma=True))
    assert torch.equal(backend.swiglu(x, x), EAGER.swiglu(x, x))
    assert torch.equal(backend.rotary(x, x, cos, sin)[0], EAGER.rotary(x, x, cos, sin)[0])
    moved = x.to("meta")
    assert backend.rms_norm(moved, weight, 1e-6, gemma=False) is moved
    assert backend.swiglu(moved, moved) is moved
    assert backend.rotary(moved, moved, cos, sin) is moved
