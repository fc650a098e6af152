"""Divides the memory of a frozen base model among ranks (FSDP2). Each rank holds a part of every decoder layer; a layer
is gathered only while it computes. The embedding, the last norm and the output layer stay whole, because the output
layer is read outside of any module's call.

All ranks must take part in the same gathers. Forward gathers the layers in order, backward in reverse order. A rank may
compute less than the others: it has no datums, its adapters need no gradient below the output layer, or it has failed
half-way. Such a rank takes part in the remaining gathers with `catch_up`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from tinsmith.modeling.weight_parts import of_rows


class _CountedGather(AllGather):
    """FSDP2's default gather, with a counter."""

    def __init__(self) -> None:
        self.count = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.count += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def parameters_outside(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The module's parameters that belong to none of the layers. The result does not refer to the layers' parameters,
    so that their memory can be freed one layer after the other."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in inside]


def _take_rows(layer: nn.Module) -> list[tuple[nn.Module, str, DTensor]]:
    """Replaces the weights of which this rank has read only its own rows by empty weights of the whole shape. Returns
    the module, the name and the rows of each such weight."""
    found = []
    for module in layer.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                found.append((module, key, parameter.detach()))
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[key] = nn.Parameter(empty, requires_grad=False)
    return found


class ShardedLayers:
    """The decoder layers of one rank's base model."""

    def __init__(self, decoder: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        """Shards the layers in place, over the one dimension of `mesh`."""
        outside = set(parameters_outside(decoder, layers))
        self._gather = _CountedGather()
        for layer in layers:
            rows = _take_rows(layer)
            for parameter in layer.parameters():
                parameter.data = parameter.data.contiguous()  # a weight may lie column by column, as GPT-2's do
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            for module, key, part in rows:
                kept = of_rows(part.to_local(), part.shape, mesh)
                module.load_state_dict({key: kept}, strict=False, assign=True)
            cast(FSDPModule, layer).set_custom_all_gather(self._gather)
        fully_shard(decoder, mesh=mesh, ignored_params=outside)
        self._root = cast(FSDPModule, decoder)
        self._layers = [cast(FSDPModule, layer) for layer in layers]

    def begin(self) -> None:
        """Prepares a pass. Must be called before each pass of the base model."""
        self._gather.count = 0

    def catch_up(self, *, backward: bool) -> None:
        """Takes part in the remaining gathers of this pass. `backward`: whether the pass has a backward, too."""
        order = [*self._layers, *self._layers[::-1]] if backward else self._layers
        for layer in order[self._gather.count :]:
            layer.unshard()
            layer.reshard()

    def reset(self) -> None:
        """Resets the state of the pass. To be called on all ranks after a pass that stopped half-way."""
        self._root.reset_iter_state()
