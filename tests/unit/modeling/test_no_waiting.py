"""The host does not wait for its GPU in every layer, chunk or tenant."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import VOCAB_SIZE
from tinsmith.modeling import logprobs
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.grouped_lora import torch_grouped_mm
from tinsmith.modeling.kernels.choice import Kernels
from tinsmith.modeling.logprobs import target_logprobs

CPU = torch.device("cpu")
WAITING = {
    torch.ops.aten._local_scalar_dense,  # .item(), .tolist(), float(), bool()
    torch.ops.aten.nonzero,  # also what a boolean mask as an index does
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten.unique_dim,
    torch.ops.aten.bincount,
}
"""Operators whose result's value or shape the host needs from the device."""


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        masks = any(x.dtype == torch.bool for x in args[1] if x is not None) if _indexes(func) else False
        if masks or func.overloadpacket in WAITING:
            self.waits[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _indexes(func: Any) -> bool:
    return func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def test_the_watch_sees_what_waits() -> None:
    x = torch.arange(4.0)
    with _Watch() as watch:
        _ = x.sum().item(), x[x > 1], x.unique(), x.nonzero()
    assert sum(watch.waits.values()) >= 4


@pytest.mark.parametrize("grouped", [False, True])
def test_no_layer_chunk_or_tenant_waits_for_the_device(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    monkeypatch.setattr(logprobs.Head, "max_rows", 4)
    base = replace(base, kernels=Kernels(grouped_mm=torch_grouped_mm) if grouped else Kernels())
    adapters = [Adapter.create(AdapterConfig(rank=rank), base.targets, CPU) for rank in (4, 8)]
    for tensor in (parameters := [tensor for adapter in adapters for tensor in adapter.tensors()]):
        tensor.requires_grad_(True)
    runs = [Run(adapters[0], slice(0, 20)), Run(adapters[1], slice(20, 50))]
    lengths = [10, 10, 30]
    tokens = torch.randint(VOCAB_SIZE, (50,))
    weights = torch.ones(50)
    weights[5:15] = 0
    with _Watch() as watch:
        hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
        named = target_logprobs(base.head, hidden, torch.arange(50), tokens, runs)
        torch.autograd.grad((named * weights).sum(), parameters)
    assert watch.num_operators > 500
    assert watch.waits == Counter()
