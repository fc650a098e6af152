"""Memory: how much is available, and how much a computation takes."""

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


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate on the CPU, while they live.

    torch's CPU allocator keeps no count. The process's resident size does not help: freed blocks stay in it and are
    used again. Temporary memory that a kernel allocates within one operation is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        """Size of the largest single storage."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Live storages by their Python id, which is unique while they live."""
        self._makes: dict[Any, bool] = {}
        """Whether each operation allocates its results. Views and in-place operations do not."""

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
        if key in self._live or storage.device.type == "meta":
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
    """Most bytes that `call` holds at once, beyond those that were held before it."""
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
    """Bytes that can still be allocated on the device. For a CPU: free host memory, within the cgroup's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_bytes()


def device_memory(device: torch.device) -> dict[str, Callable[[], int]]:
    """Functions that read a GPU's memory in bytes: allocated by tensors, reserved by torch, free, and total.

    Returns no functions for a CPU.
    """
    if device.type != "cuda":
        return {}
    return {
        "allocated": lambda: torch.cuda.memory_allocated(device),
        "reserved": lambda: torch.cuda.memory_reserved(device),
        "free": lambda: torch.cuda.mem_get_info(device)[0],
        "total": lambda: torch.cuda.mem_get_info(device)[1],
    }


def drop_caches(device: torch.device) -> None:
    """Returns unused cached memory to the system.

    A live traceback keeps the tensors of its frames: the caller drops exceptions first.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()  # pinned memory that models have come back from
