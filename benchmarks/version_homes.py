"""Counts where the versions of many runs go among many samplers, with the code that chooses: README.md.

    python -m benchmarks version_homes

Nothing is sent and no time is measured. It counts what each sampler holds, the bytes that leave the trainer for a
publish, and the runs whose homes change when one sampler more serves. The baseline is that every version goes to every
sampler by one broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import Counter

from benchmarks.figure import Figure, Report
from trainer_service.weight_sync.samplers import Samplers

VERSION_BYTES = 349 * 1024**2
"""An adapter of rank 32 on every module of an 8B model, in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samplers", type=int, default=64, help="samplers that serve (%(default)s)")
    parser.add_argument("--runs", type=int, default=1000, help="runs with one version each (%(default)s)")
    parser.add_argument("--homes", type=int, default=4, help="samplers of each version (%(default)s)")


async def homes_of(arguments: argparse.Namespace, num_samplers: int) -> list[frozenset[str]]:
    """The homes of each run among this many samplers, by address."""
    addresses = [f"10.0.{n // 256}.{n % 256}:8002" for n in range(num_samplers)]
    samplers = Samplers(addresses, api_key="", silence_s=3, on_change=lambda _: None)
    try:
        for sampler in samplers.all:
            sampler.serving = True
        ranked = (samplers.ranked(f"{n:032x}:train:0", samplers.all) for n in range(arguments.runs))
        return [frozenset(sampler.address for sampler in each[: arguments.homes]) for each in ranked]
    finally:
        await samplers.close()


def run(arguments: argparse.Namespace, report: Report) -> None:
    homes = asyncio.run(homes_of(arguments, arguments.samplers))
    after = asyncio.run(homes_of(arguments, arguments.samplers + 1))
    held = Counter(address for each in homes for address in each)
    counts = sorted(held.values())
    everywhere = [float(arguments.runs)]
    report.add(
        Figure("versions at a sampler, mean", "", [sum(counts) / arguments.samplers], "at every sampler", everywhere)
    )
    report.add(Figure("versions at the fullest sampler", "", [counts[-1]], "at every sampler", everywhere))
    held_bytes, all_bytes = counts[-1] * VERSION_BYTES / 1e9, arguments.runs * VERSION_BYTES / 1e9
    report.add(Figure("their size", "GB", [held_bytes], "at every sampler", [all_bytes]))
    received = VERSION_BYTES * min(arguments.homes, arguments.samplers) / 1e9
    report.add(
        Figure("sent for a publish", "GB", [received], "to every sampler", [VERSION_BYTES * arguments.samplers / 1e9])
    )
    rounds = math.ceil(math.log2(arguments.samplers + 1))
    tree = VERSION_BYTES * rounds / 1e9
    report.add(Figure("of these by the trainer", "GB", [received], f"a tree's root, {rounds} times", [tree]))
    moved = sum(before != now for before, now in zip(homes, after, strict=True))
    report.add(Figure("runs that have another home when one sampler joins", "", [moved]))
