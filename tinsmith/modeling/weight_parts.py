"""Reads from a base model's files only this rank's part of each weight, and gathers whole weights for the self-check.

transformers reads only a part of a weight if the parameter is a DTensor: it takes this rank's rows or columns from the
file, converts only these, and stacks only the rank's own experts where the files hold experts one by one. A model that
was read in parts can still compute its own forward pass, which the self-check needs: each layer then gathers its whole
weights from all ranks while it computes.

The embedding, norms, biases and convolutions are read whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from tinsmith.modeling.experts import is_fused_experts
from tinsmith.modeling.padded import carries_state
from tinsmith.modeling.parallel_ops import Peers
from tinsmith.modeling.quantized import quantized_in_files

_WHOLE_SHARE = 0.1
"""Largest part of the layers' weights that every rank may read whole."""


class RankMesh(DeviceMesh):
    """A mesh of ranks without communication, [ranks that divide the layers' memory, ranks that divide features].
    transformers asks the mesh which part of a weight belongs to this rank."""

    def __init__(self, kind: str, sizes: Sequence[int], coordinates: Sequence[int], names: Sequence[str]) -> None:
        ranks = torch.arange(prod(sizes)).view(*sizes)
        self._names = tuple(names)
        rank = int(ranks[tuple(coordinates)])
        super().__init__(kind, ranks, mesh_dim_names=self._names, _init_backend=False, _rank=rank)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinates = self.get_coordinate()
        assert coordinates is not None
        return coordinates[self._names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0]

    def __eq__(self, other: object) -> bool:
        # Two ranks may be threads of one process, with equal meshes.
        return isinstance(other, RankMesh) and super().__eq__(other) and self._rank == other._rank

    def __hash__(self) -> int:
        return hash((super().__hash__(), self._rank))

    def __getitem__(self, name: Any) -> DeviceMesh:
        index = self._names.index(name)
        return RankMesh(self.device_type, [self.size(index)], [self.get_local_rank(index)], [name])


@dataclass(frozen=True, slots=True)
class WeightParts:
    """The parts of the weights that each rank reads."""

    tensor: Peers | None
    """Ranks that divide the features of each layer; None if they are not divided."""
    mesh: DeviceMesh | None
    """Ranks, in one dimension, that divide the memory of each layer; None if it is not divided."""

    def cut(
        self, model: PreTrainedModel, styles: Mapping[str, int], layers: Sequence[nn.Module], device: torch.device
    ) -> None:
        """Replaces parameters of a model, before its weights are read to `device`, by DTensors that have memory for
        this rank's part only. Changes nothing if the files must be read whole. `styles`: the divided axis of each
        linear layer whose features are divided, by the layer's name."""
        wanted = self._wanted(model, styles, layers)
        if wanted is None:
            return
        rows = 1 if self.mesh is None else self.mesh.size()
        columns = 1 if self.tensor is None else self.tensor.size
        place = 0 if self.mesh is None else self.mesh.get_local_rank(), 0 if self.tensor is None else self.tensor.rank
        mesh = RankMesh(device.type, (rows, columns), place, ("data", "tensor"))
        for name, placements in wanted.items():
            path, _, key = name.rpartition(".")
            parameter = model.get_submodule(path)._parameters[key]
            assert parameter is not None
            empty = _divided(parameter.detach(), mesh, placements)
            model.get_submodule(path)._parameters[key] = nn.Parameter(empty, requires_grad=False)

    def _wanted(
        self, model: PreTrainedModel, styles: Mapping[str, int], layers: Sequence[nn.Module]
    ) -> dict[str, tuple[Placement, Placement]] | None:
        """The placements of each weight that is read in parts, by name: over the ranks that divide memory, and over
        those that divide features. None if the model must be read whole."""
        if quantized_in_files(model.config):
            return None
        inside = {module for layer in layers for module in layer.modules()} if self.mesh is not None else set()
        mixed, owners = _mixed(model), _owners(model)
        found: dict[str, tuple[Placement, Placement]] = {}
        whole = all_weights = 0
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                name, axis = f"{path}.{key}", styles.get(path) if key == "weight" else None
                is_matrix = type(module) is nn.Linear and key == "weight"
                fits = (is_matrix or (is_fused_experts(module) and parameter.ndim == 3)) and owners[parameter] == 1
                fits = fits and not any(re.search(pattern, name) for pattern in mixed)
                placements = self._placements(parameter, axis, inside=module in inside) if fits else None
                if placements is not None:
                    found[name] = placements
                elif axis is not None:
                    return None
                if module in inside:
                    all_weights += parameter.numel()
                    whole += parameter.numel() if placements is None else 0
        return None if whole > _WHOLE_SHARE * all_weights else found

    def _placements(self, parameter: Tensor, axis: int | None, *, inside: bool) -> tuple[Placement, Placement] | None:
        columns: Placement = Replicate()
        size = parameter.shape[0]
        if axis is not None:
            assert self.tensor is not None
            columns = Shard(axis)
            size = size // self.tensor.size if axis == 0 else size
        if not inside:
            return None if axis is None else (Replicate(), columns)
        assert self.mesh is not None
        ranks = self.mesh.size()
        if axis == 0 and self.tensor is not None:
            return (_StridedShard(0, split_factor=self.tensor.size), columns) if size % ranks == 0 else None
        # Each rank must have a row: transformers stacks no empty list of experts.
        return (Shard(0), columns) if -(-size // ranks) * (ranks - 1) < size else None

    def whole(self, weight: Tensor) -> Tensor:
        """The whole weight, gathered from all ranks. All ranks must call this together."""
        if not isinstance(weight, DTensor):
            return weight
        rows, columns = weight.placements
        part = _local(weight)
        shape = list(weight.shape)
        if isinstance(columns, Shard):
            assert self.tensor is not None
            shape[columns.dim] //= self.tensor.size
        if not isinstance(rows, Replicate):
            assert self.mesh is not None
            part = of_rows(part, torch.Size(shape), self.mesh).full_tensor()
        if isinstance(columns, Shard):
            assert self.tensor is not None
            part = torch.cat(list(self.tensor.gather(part.contiguous())), columns.dim)
        return part

    @contextmanager
    def lent(self, model: nn.Module) -> Iterator[None]:
        """Within the block, each module has its whole weights while it computes. All ranks must make the same calls."""
        taken: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}

        def before(module: nn.Module, _: Any) -> None:
            taken[module] = held = _parts_of(module)
            for owner, key, parameter in held:
                owner._parameters[key] = self.whole(parameter)  # type: ignore[assignment]

        def after(module: nn.Module, *_: Any) -> None:
            for owner, key, parameter in taken.pop(module):
                owner._parameters[key] = parameter

        with ExitStack() as stack:
            for module in model.modules():
                if _parts_of(module):
                    stack.callback(module.register_forward_pre_hook(before).remove)
                    stack.callback(module.register_forward_hook(after, always_call=True).remove)
            yield


def _parts_of(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The weights that the module reads and that this rank holds in part, each with its module and name. A layer that
    carries a state may read the weights of the linear layers in it, so these belong to it, too."""
    owners = module.modules() if carries_state(module) else [module]
    return [
        (owner, key, parameter)
        for owner in owners
        for key, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]


def in_parts(model: nn.Module) -> bool:
    """Whether the model holds parts of its weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def move(model: nn.Module, device: torch.device) -> None:
    """Moves a model that was read in parts to a device. On the CPU the parts are copied, because they may be views of
    mapped files."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                local = _local(parameter)
                if device.type == "cpu":
                    local = local.clone()
                kept = DTensor.from_local(
                    local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                )
                module._parameters[key] = nn.Parameter(kept, requires_grad=False)
            elif parameter is not None:
                parameter.data = parameter.data.to(device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def own_features(weight: Tensor, axis: int, peers: Peers) -> Tensor:
    """This rank's features of a weight: a DTensor if the rank holds only some rows of these features."""
    if not isinstance(weight, DTensor):
        return weight.detach().chunk(peers.size, axis)[peers.rank]
    rows, _ = weight.placements
    local = _local(weight)
    if isinstance(rows, Replicate):
        return local
    shape = list(weight.shape)
    shape[axis] //= peers.size
    stride = torch.empty(shape, device="meta").stride()
    placements = (Shard(0), Replicate())
    return DTensor.from_local(local, weight.device_mesh, placements, shape=torch.Size(shape), stride=stride)


def _local(weight: DTensor) -> Tensor:
    return weight.to_local().detach()


def of_rows(local: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """The tensor of shape `shape` whose rows are divided among the ranks of `mesh`. `local`: this rank's rows."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)


def _divided(weight: Tensor, mesh: RankMesh, placements: tuple[Placement, Placement]) -> DTensor:
    local, _ = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    empty = torch.empty(local, dtype=weight.dtype, device="meta")
    return DTensor.from_local(empty, mesh, placements, shape=weight.shape, stride=weight.stride())


def _mixed(model: PreTrainedModel) -> list[str]:
    """Patterns of the names of weights that transformers makes from tensors of the files in such a way that a part of
    the weight needs more than the same part of these tensors."""
    found = []
    for one in get_model_conversion_mapping(model):
        if isinstance(one, WeightConverter) and not _by_experts(one.operations):
            escaped = (re.escape(target) for target in one.target_patterns)
            found += [pattern.replace(r"\*", ".*").replace(r"\\1", ".*") for pattern in escaped]
    return found


def _by_experts(operations: Sequence[ConversionOps]) -> bool:
    """Whether the operations only stack the tensors of single experts in their order, so that a rank can stack its own
    experts alone."""
    first, *others = operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(other, Concatenate) and other.dim >= 1 for other in others)
    )


def _owners(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of modules that hold each parameter; more than one for tied parameters."""
    found: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found[parameter] = found.get(parameter, 0) + 1
    return found
