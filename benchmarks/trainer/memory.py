"""Present and peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from benchmarks.model_work import synchronize
from benchmarks.processes import peak_rss_mb
from tinsmith.allocator import give_back_freed_memory

_RESET_PEAK = "5"
"""Written to clear_refs, it makes the peak of the process's memory the present one: proc_pid_clear_refs(5)."""


def added_peak_mb(device: torch.device, work: Callable[[], object]) -> float:
    """Most memory that the work had beside what was there before it: on CUDA of tensors, on a CPU of the process."""
    before = resident_mb(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) / 1e6 - before
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    work()
    return peak_rss_mb(psutil.Process().pid) - before


def resident_mb(device: torch.device) -> float:
    """Present memory."""
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device) / 1e6
    gc.collect()
    give_back_freed_memory()  # or new state would find room there and seem to cost nothing
    return psutil.Process().memory_info().rss / 1e6
