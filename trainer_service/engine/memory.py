"""Memory: how much the process may take, how much a computation takes, and what tells that there is none left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tinsmith.memory import host_bytes

_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc")
"""Of the RuntimeError that torch's CPU allocator raises."""
_CUDA_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "[CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
)
"""Of a RuntimeError when others than torch's allocator find nothing: pinned memory, Triton, cuBLAS and the like."""


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operations make on the CPU, from their making to their end.

    The CPU allocator keeps no count of its own, and the process's resident size tells little: freed blocks stay in it,
    and a small model's tensors come out of them. What a kernel takes for its own use within one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        """Of one storage."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """By id, which no other storage has as long as this one lives."""
        self._makes: dict[Any, bool] = {}
        """Of each operation: whether its results are new. Views, and operations in place, make nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        makes = self._makes.get(func)
        if makes is None:
            makes = self._makes[func] = all(returned.alias_info is None for returned in func._schema.returns)
        if makes:
            for tensor in [result] if isinstance(result, Tensor) else _tensors(result):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._live:
            return
        num_bytes = storage.nbytes()
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, num_bytes)

        def free(_: object) -> None:
            self.live_bytes -= num_bytes
            del self._live[key]

        self._live[key] = weakref.ref(storage, free)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """The most that `call` holds at once beyond what was held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with Allocations() as allocations:
        call()
    return allocations.peak_bytes


def available_bytes(device: torch.device) -> int:
    """What could still be allocated: of the device's memory, or of the machine's within the limit of the cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in (*_CPU_MESSAGES, *_CUDA_MESSAGES)
    )


def device_memory(device: torch.device) -> dict[str, Callable[[], int]]:
    """Of a GPU, in bytes: what tensors have allocated, what torch has reserved, what is free, and all. Else nothing."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": lambda: torch.cuda.memory_allocated(device),
        "reserved": lambda: torch.cuda.memory_reserved(device),
        "free": lambda: torch.cuda.mem_get_info(device)[0],
        "total": lambda: torch.cuda.mem_get_info(device)[1],
    }


def drop_caches(device: torch.device) -> None:
    """Gives back what nobody uses. A traceback holds what its frames hold: it must be gone before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()  # pinned memory that models have come back from
