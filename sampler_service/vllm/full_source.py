"""The parameters of a full version, as the worker takes them from shared memory. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from sampler_service.vllm.shared_memory import Handle


@dataclass(frozen=True, slots=True)
class FullSource:
    """All parameters of a version, by their names in the base model's files."""

    handle: Handle
    specs: Sequence[tuple[str, Sequence[int], bool]]
    """Name, shape, and whether the matrix lies column by column; in the order of the buffer."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the shared memory."""
        flat, start = self.handle.open(), 0
        for name, shape, by_columns in self.specs:
            part = flat[start : start + prod(shape)]
            start += prod(shape)
            yield name, part.view(*reversed(shape)).T if by_columns else part.view(*shape)

    def others(self, files: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Tensors in the base model's files that are no parameters. Raises ValueError when they name a parameter
        otherwise, as they do with fused experts: vLLM loads by the names in the files."""
        ours = {name for name, _, _ in self.specs}
        others = []
        for name, tensor in files:
            if name in ours:
                ours.discard(name)
            else:
                others.append((name, tensor))
        if ours:
            raise ValueError(
                f"{min(ours)} is one parameter, which the model's files, and vLLM with them, hold under other names"
            )
        return others
