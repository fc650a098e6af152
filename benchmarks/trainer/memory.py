"""Present and peak memory."""

from __future__ import annotations

import gc
import resource

import psutil
import torch
from model_work import synchronize

from tinsmith.allocator import give_back_freed_memory


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak on CUDA. On a CPU it does nothing: the peak is that of the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory: on CUDA of tensors, since reset_peak_memory; on a CPU of the process, since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def resident_mb(device: torch.device) -> float:
    """Present memory."""
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device) / 1e6
    gc.collect()
    give_back_freed_memory()  # or new state would find room there and seem to cost nothing
    return psutil.Process().memory_info().rss / 1e6
