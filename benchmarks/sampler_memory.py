"""Whether a sampler's memory stays: the torch engine under many small requests, and what its process takes meanwhile.

    python -m benchmarks sampler_memory --size tiny --minutes 5

Requests have random lengths, versions come and go. A line is an interval. "in use" is what C code has of the heap, so
what it is below "heap" is fragmentation; Python's own objects lie elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from prometheus_client import CollectorRegistry

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Figure, Report
from benchmarks.processes import model_folder
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Params, Request, StopCondition
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from tinsmith.allocator import keep_freed_memory
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.self_check import random_adapter

CLIENTS = 16
REQUESTS_OF_A_VERSION = 2
PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 40, 64, 4
"""Largest values of a request."""
SETTINGS = {"prefix_cache_bytes": 8 * 2**20, "adapter_memory_bytes": 64 * 2**20, "max_kv_tokens": 8192}
"""Sizes of the sampler's caches, which are full within a minute."""


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


class Load:
    def __init__(self, engine: TorchEngine) -> None:
        self.num_requests = 0
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._seeds = itertools.count()

    async def client(self, ends: float) -> None:
        engine, draw = self._engine, self._random
        while time.monotonic() < ends:
            seed = next(self._seeds)
            version_id = f"v{seed}"
            config = AdapterConfig(int(draw.choice((4, 8, 16))), seed=seed)
            await engine.install(version_id, random_adapter(config, engine.targets, torch.device("cpu")))
            for _ in range(REQUESTS_OF_A_VERSION):
                prompt = draw.integers(1000, size=draw.integers(1, PROMPT_TOKENS + 1)).astype(np.int32)
                params = Params(max_tokens=int(draw.integers(1, NEW_TOKENS + 1)), stop=StopCondition())
                request = Request(prompt, version_id, num_samples=int(draw.integers(1, SAMPLES + 1)), params=params)
                await (await engine.submit(request)).result()
                self.num_requests += 1
            if draw.random() < 0.5:  # the others are evicted
                engine.store.remove(version_id)

    async def report(self, ends: float, *, interval_s: float) -> list[float]:
        """Resident memory at the end of each interval, in MB."""
        sizes = []
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = MallocInfo
        process, metrics, mb = psutil.Process(), self._engine.metrics, 2**20
        print("| s | requests | RSS MB | heap | in use | lanes | prefixes | versions | Python blocks |")
        print("|---|---|---|---|---|---|---|---|---|")
        started = time.monotonic()
        while time.monotonic() < ends:
            await asyncio.sleep(interval_s)
            heap, resident_mb = libc.mallinfo2(), process.memory_info().rss / mb
            sizes.append(resident_mb)
            gauges = (metrics.cache.allocated_bytes, metrics.cache.prefix_bytes, metrics.versions.resident_bytes)
            caches = " | ".join(f"{gauge._value.get() / mb:.1f}" for gauge in gauges)
            print(
                f"| {time.monotonic() - started:.0f} | {self.num_requests} | {resident_mb:.1f} "
                f"| {heap.arena / mb:.1f} | {heap.uordblks / mb:.1f} | {caches} | {sys.getallocatedblocks()} |",
                flush=True,
            )
        return sizes


async def measure(folder: Path, *, minutes: float, interval_s: float) -> list[float]:
    """Resident memory at the end of each interval, in MB."""
    config = SamplerConfig.model_validate({"base_model": str(folder), "num_threads": 1, **SETTINGS})
    engine = await TorchEngine.load(config, SamplerMetrics(CollectorRegistry()))
    load, ends = Load(engine), time.monotonic() + 60 * minutes
    async with asyncio.TaskGroup() as tasks:
        report = tasks.create_task(load.report(ends, interval_s=interval_s))
        for _ in range(CLIENTS):
            tasks.create_task(load.client(ends))
    await engine.stop()
    return report.result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="tiny")
    add_models(parser)
    parser.add_argument("--minutes", type=float, default=5, help="(%(default)s)")
    parser.add_argument("--interval-s", type=float, default=20, help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    folder = model_folder(arguments.size, arguments.models)
    keep_freed_memory()
    sizes = asyncio.run(measure(folder, minutes=arguments.minutes, interval_s=arguments.interval_s))
    report.add(Figure("resident memory in the second half", "MB", sizes[len(sizes) // 2 :]))
