"""Compares the trainer's journal in PostgreSQL with that in a SQLite file.

    python -m benchmarks journal --folder FOLDER

Requests of 10 kB and 1 MB are appended one after the other (median time of one), and 32 at a time (MB/s, with group
commit), in rounds that alternate. Without --url it starts a PostgreSQL of its own, with fsync, in a temporary folder. A
server on another machine adds its network, three times for a request that is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from uuid import uuid4

from prometheus_client import CollectorRegistry

from benchmarks.figure import Figure, Report
from tests.support.postgres import running
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.records import Body
from trainer_service.metrics import Metrics

SIZES = {"10 kB": (10_000, 100), "1 MB": (1_000_000, 12)}
"""Bytes of a request, and requests of a round."""
AT_ONCE = 32


def opened(where: Path | tuple[PostgresDatabase, Path]) -> Journal:
    return Journal(where, max_bytes=2**33, result_retention_s=3600, metrics=Metrics(CollectorRegistry()))


async def times_alone(journal: Journal, model_id: str, bodies: list[Body]) -> list[float]:
    """Time of each append, in seconds."""
    times = []
    for seq_id, body in enumerate(bodies):
        begin = time.perf_counter()
        await journal.append(model_id, seq_id, body)
        times.append(time.perf_counter() - begin)
    return times


async def time_together(journal: Journal, model_id: str, bodies: list[Body]) -> float:
    """Time of all appends, AT_ONCE at a time, in seconds."""
    begin = time.perf_counter()
    await journal.append(model_id, 0, bodies[0])
    places = asyncio.Semaphore(AT_ONCE)

    async def append(seq_id: int) -> None:
        async with places:
            await journal.append(model_id, seq_id, bodies[seq_id])

    await asyncio.gather(*(append(seq_id) for seq_id in range(1, len(bodies))))
    return time.perf_counter() - begin


async def measure(url: str, folder: Path, rounds: int, report: Report) -> None:
    file = opened(folder / "journal.sqlite")
    in_postgres = await asyncio.to_thread(lambda: opened((PostgresDatabase(url, "bench"), folder)))
    journals = (in_postgres, file)
    for name, (size, number) in SIZES.items():
        bodies = [Body("create_model", b"", os.urandom(size)) for _ in range(number)]
        rates: tuple[list[float], list[float]] = ([], [])
        alone: tuple[list[float], list[float]] = ([], [])
        for n in range(rounds + 1):  # the first round is not counted
            for side, journal in enumerate(journals):
                model_id = f"{name.replace(' ', '')}-{n}"
                times = await times_alone(journal, f"{model_id}-alone", bodies)
                together_s = await time_together(journal, f"{model_id}-together", bodies)
                for kind in ("alone", "together"):
                    await journal.delete_model(f"{model_id}-{kind}")
                if n:
                    alone[side].append(1e3 * median(times))
                    rates[side].append(size * number / together_s / 1e6)
        report.add(Figure(f"append of {name}, p50", "ms", alone[0], "SQLite", alone[1]))
        report.add(Figure(f"appends of {name}, {AT_ONCE} at a time", "MB/s", rates[0], "SQLite", rates[1]))
    for journal in journals:
        await asyncio.to_thread(journal.close)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="postgresql://USER:PASSWORD@HOST/NAME (default: a server of its own)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary folder)")


@contextlib.contextmanager
def _database(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running(fsync=True) as cluster:
        yield cluster.new_database().replace("+asyncpg", "")


def run(arguments: argparse.Namespace, report: Report) -> None:
    with _database(arguments.url) as url, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        asyncio.run(measure(url, Path(folder) / uuid4().hex, arguments.rounds, report))
