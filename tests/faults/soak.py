"""A soak: `tinsmith up`, 16 clients that train, sample, save, load and delete, and random kills, also of clients.

    python -m tests.faults.soak --minutes 30 --folder FOLDER

At the end it prints what the clients did, and writes what each process took to soak.json. It fails unless no client saw
an exception, memory, file descriptors and threads are flat, database and journal are bounded, and nothing is left of
the sessions that have ended. A process is looked at between two kills of it, once it has served for WARM_UP_S, a
sampler also SAMPLER_WARM_UP_REQUESTS, and only where that leaves MEASURED_S: in a run of one minute there is no such
time, and it checks the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import psutil

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack, make_base_model
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

SERVICES = ("trainer_service", "sampler_service", "gateway")
VICTIMS = (*SERVICES, "client")
CLIENT_PROCESSES = 4
THREADS = 4
"""Clients of each."""
INTERVAL_S = 2.0
WARM_UP_S = 90.0
SAMPLER_WARM_UP_REQUESTS = 300
"""Its caches are at their bounds by then: oneDNN's products, lanes, prefixes. Time says little on a busy machine."""
MEASURED_S = 90.0
MEASURED = {"rss": 0, "fds": 2, "threads": 2}
"""Measures that must stay flat, with the growth that is always allowed: a pool starts its threads as it needs them."""
LARGEST_GROWTH = 0.05
LARGEST_SESSION_BYTES = {"database": 6000, "trainer": 6000}
"""Most bytes that an ended session may leave.

In the database it leaves its row, those of its runs and of its usage, and for a day those of its deletions. In the
trainer's folder it leaves nothing, but the folder's size varies by megabytes from minute to minute.
"""
SIZES_WARM_UP_MIN = 6.0
"""Tables with a bound are full by then."""
JOURNAL_MAX_BYTES = 32 * 2**20
LARGEST_TRAINER_BYTES = 2 * JOURNAL_MAX_BYTES
"""The journal, its write-ahead log and the snapshots of the models that live."""
SESSION_TIMEOUT_S = 45.0
"""The runs of a killed client are deleted after that time."""
IDLE_LIMIT_S = 180.0
ENV = {
    "GATEWAY_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S),
    "GATEWAY_REAP_INTERVAL_S": "5",
    "GATEWAY_SPAN_RETENTION_S": "60",
    # Bounded caches and tables are full within the warm-up; with the defaults that would take days or months.
    "GATEWAY_RESULT_CACHE_BYTES": str(4 * 2**20),
    "GATEWAY_ENDED_SESSION_RETENTION_S": "60",
    "GATEWAY_AUDIT_RETENTION_S": "60",
    "GATEWAY_MAX_HISTORY_POINTS": "2000",
    "GATEWAY_MAX_RECENT_SAMPLES": "500",
    "TRAINER_RESULT_RETENTION_S": "120",
    "TRAINER_JOURNAL_MAX_BYTES": str(JOURNAL_MAX_BYTES),
    "TRAINER_MAX_MODELS": "128",
    "SAMPLER_PREFIX_CACHE_BYTES": str(8 * 2**20),
    "SAMPLER_ADAPTER_MEMORY_BYTES": str(64 * 2**20),
}


@dataclass(frozen=True, slots=True)
class Reading:
    at: float
    rss: int
    fds: int
    """Without the connections of clients, which are as many as those keep open: the SDK leaves some to the server."""
    threads: int
    connections: int
    requests: float
    """That a sampler has answered since its start; 0 for others."""


@dataclass(slots=True)
class Life:
    """One process of a service, from one kill to the next."""

    service: str
    pid: int
    readings: list[Reading] = field(default_factory=list)

    def measured(self) -> list[Reading]:
        """Without the warm-up; empty when it did not live long enough."""
        least = SAMPLER_WARM_UP_REQUESTS if self.service == "sampler_service" else 0
        kept = [one for one in self.readings if one.at - self.readings[0].at >= WARM_UP_S and one.requests >= least]
        return kept if kept and kept[-1].at - kept[0].at >= MEASURED_S else []

    def growth(self, what: str) -> tuple[float, float]:
        """Medians of the first third of what was measured, and of the last third."""
        values = [getattr(one, what) for one in self.measured()]
        third = max(1, len(values) // 3)
        return median(values[:third]), median(values[-third:])


class Watch:
    """Reads what the processes of the stack take."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.lives: dict[int, Life] = {}
        self.sizes: list[dict[str, float]] = []

    def look(self) -> None:
        for service, process in processes(self._stack).items():
            try:
                reading = read(process)
                if service == "sampler_service":
                    reading = replace(reading, requests=metric(self._stack, "sampler", "sampler_requests_total"))
            except (psutil.Error, httpx.TransportError, KeyError):
                continue  # it has just been killed, or does not serve yet
            self.lives.setdefault(process.pid, Life(service, process.pid)).readings.append(reading)

    def measure_sizes(self, *, minutes: float) -> None:
        self.sizes.append({"minutes": round(minutes, 1), **sizes(self._stack.state_dir)})


def read(process: psutil.Process) -> Reading:
    with process.oneshot():
        connections, num_fds = process.net_connections(kind="tcp"), process.num_fds()
        served = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        clients = sum(one.laddr.port in served and one.status != psutil.CONN_LISTEN for one in connections)
        rss, threads = process.memory_info().rss, process.num_threads()
    return Reading(time.monotonic(), rss, num_fds - clients, threads, clients, requests=0)


def processes(stack: Stack) -> dict[str, psutil.Process]:
    return {service: process for service in SERVICES for process in stack.processes(service)}


def sizes(state_dir: Path) -> dict[str, float]:
    """In megabytes, and the number of sessions that there have been."""

    def size(folder: str, prefix: str = "") -> float:
        total = 0
        for place, _, names in os.walk(state_dir / folder):  # which, unlike rglob, lets folders go meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(Path(place, name)).st_size if name.startswith(prefix) else 0
        return round(total / 1e6, 2)

    with closing(sqlite3.connect(f"file:{state_dir / 'gateway' / 'gateway.db'}?mode=ro", uri=True)) as database:
        num_sessions = database.execute("SELECT count(*) FROM sessions").fetchone()[0]
    return {
        "sessions": num_sessions,
        "database": size("gateway", "gateway.db"),
        "trainer": size("trainers"),
        "checkpoints": size("checkpoints"),
        "logs": size("logs"),
    }


class ClientProcess:
    def __init__(self, url: str, *, seed: int) -> None:
        # Not a pipe: nobody would empty it, and what waits for that cannot fail any more.
        self._output = tempfile.NamedTemporaryFile("ab")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.soak_clients", url, "--threads", str(THREADS), "--seed", str(seed)],
            env=os.environ | {"TINKER_TELEMETRY": "0"},  # whose loop can lose a cancel on Python 3.11: docs/api.md
            stdin=subprocess.PIPE,
            stdout=self._output,
        )

    def said(self) -> list[str]:
        """The lines that it has printed."""
        return Path(self._output.name).read_text().splitlines()

    def kill(self) -> list[str]:
        """Kills it. Returns the errors that it had printed before."""
        status = self._process.poll()
        self._process.kill()
        self._process.communicate()
        errors = self.said()
        self._output.close()
        return errors if status is None else [*errors, f"a client ended by itself, with status {status}"]

    def begin_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None

    def wait(self, *, timeout_s: float) -> tuple[list[str], dict[str, int]]:
        """Waits for its end. Returns the errors that it has printed, and its counts of what it did."""
        status = self._process.wait(timeout_s)
        lines = self.said()
        counts = json.loads(lines.pop()) if lines and lines[-1].startswith("{") else {}
        return lines + ([f"a client ended with status {status}"] if status else []), counts


class Clients:
    def __init__(self, url: str, rng: random.Random) -> None:
        self._url = url
        self._rng = rng
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []
        self._running = [self._start() for _ in range(CLIENT_PROCESSES)]

    def _start(self) -> ClientProcess:
        return ClientProcess(self._url, seed=self._rng.randrange(10**6))

    def kill_one(self) -> None:
        """Kills the last process: always that one, because the counts of a killed process are lost."""
        self.errors += self._running[-1].kill()
        self._running[-1] = self._start()

    def finish(self, *, timeout_s: float) -> None:
        for process in self._running:
            process.begin_to_end()
        for process in self._running:
            errors, counts = process.wait(timeout_s=timeout_s)
            self.errors += errors
            for what, count in counts.items():
                self.counts[what] = self.counts.get(what, 0) + count

    def close(self) -> None:
        for process in self._running:
            process.kill()


@contextmanager
def clients_of(url: str, rng: random.Random) -> Iterator[Clients]:
    clients = Clients(url, rng)
    try:
        yield clients
    finally:
        clients.close()


def metric(stack: Stack, service: str, name: str) -> float:
    """The sum over its labels; 0 when there is none yet."""
    lines = httpx.get(stack.metrics_url(service), trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)


def num_versions(stack: Stack) -> int:
    with grpc.insecure_channel(stack.samplers[0]) as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        return len(stub.ListVersions(sampler_pb2.ListVersionsRequest(page_size=1000), timeout=10).versions)


def left(stack: Stack) -> dict[str, Any]:
    """Numbers, and names of files, that still belong to sessions. In the end all are 0 or empty."""
    return {
        "models": metric(stack, "trainer", "trainer_models"),
        "futures": metric(stack, "gateway", "gateway_pending_futures"),
        "queued": metric(stack, "trainer", "trainer_queue_length"),
        "sequences": metric(stack, "sampler", "sampler_running_sequences"),
        "connections": max(0, read(processes(stack)["gateway"]).connections - 1),  # this very question's
        "versions": num_versions(stack),
        "unnamed saves": [str(path.relative_to(stack.checkpoints)) for path in stack.checkpoints.glob("*/ephemeral/*")],
    }


def wait_idle(stack: Stack) -> dict[str, Any]:
    """`left` as soon as nothing is left, or after IDLE_LIMIT_S."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        try:
            found = left(stack)
        except (httpx.TransportError, grpc.RpcError, psutil.Error, KeyError):
            found = {"unreachable": 1.0}
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(1)


def soak(
    stack: Stack, *, minutes: float, kill_every_s: tuple[float, float], victims: Sequence[str], rng: random.Random
) -> dict[str, Any]:
    """`kill_every_s`: least and most time between two kills."""
    watch, began, kills = Watch(stack), time.monotonic(), []
    with clients_of(stack.base_url, rng) as clients:
        ends = began + 60 * minutes
        # The last quarter goes without kills, so that each process is seen for long.
        kills_end = began + 60 * minutes * 0.75
        next_kill, next_sizes = began + rng.uniform(*kill_every_s), began
        while (now := time.monotonic()) < ends:
            watch.look()
            if now >= next_sizes:
                watch.measure_sizes(minutes=(now - began) / 60)
                next_sizes = now + 60 * minutes / 10
            if now >= next_kill and now < kills_end:
                victim = rng.choice(victims)
                if victim == "client":
                    clients.kill_one()
                elif (process := processes(stack).get(victim)) is not None:
                    process.kill()
                kills.append(victim)
                print(f"{(now - began) / 60:.1f} min: {victim} is killed", flush=True)
                next_kill = now + rng.uniform(*kill_every_s)
            time.sleep(INTERVAL_S)
        clients.finish(timeout_s=300)
        counts, errors = clients.counts, clients.errors
    remains = wait_idle(stack)
    watch.look()
    watch.measure_sizes(minutes=(time.monotonic() - began) / 60)
    return {
        "counts": counts,
        "errors": errors,
        "kills": {victim: kills.count(victim) for victim in sorted(set(kills))},
        "left": remains,
        "bytes_per_session": {what: round(bytes_per_session(watch.sizes, what)) for what in LARGEST_SESSION_BYTES},
        "sizes_mb": watch.sizes,
        "processes": [describe(life) for life in watch.lives.values()],
        "growths": [
            (life.service, what, *life.growth(what))
            for life in watch.lives.values()
            if life.measured()
            for what in MEASURED
        ],
    }


def describe(life: Life) -> dict[str, Any]:
    first, last = life.readings[0], life.readings[-1]
    return {
        "service": life.service,
        "seconds": round(last.at - first.at),
        "requests": last.requests,
        "measured": {
            "seconds": round(measured[-1].at - measured[0].at),
            "requests": measured[-1].requests - measured[0].requests,
            "growth": {what: [round(value) for value in life.growth(what)] for what in MEASURED},
        }
        if (measured := life.measured())
        else None,
        "rss_mb": [round(one.rss / 1e6) for one in life.readings[:: max(1, len(life.readings) // 8)]],
        "fds": [min(one.fds for one in life.readings), max(one.fds for one in life.readings), last.fds],
        "connections": [max(one.connections for one in life.readings), last.connections],
        "threads": [min(one.threads for one in life.readings), max(one.threads for one in life.readings), last.threads],
    }


def check(result: dict[str, Any]) -> list[str]:
    """The faults found in a result, one line each; empty when it is as it should be."""
    wrong = [f"a client saw: {error}" for error in result["errors"]]
    wrong += [f"left in the end: {what}: {value}" for what, value in result["left"].items() if value]
    wrong += [
        f"{service}: {what} grew from {first:.0f} to {last:.0f} after its warm-up"
        for service, what, first, last in result["growths"]
        if last - first > max(MEASURED[what], LARGEST_GROWTH * first)
    ]
    wrong += [
        f"{what} grew by {left:.0f} bytes with each session"
        for what, largest in LARGEST_SESSION_BYTES.items()
        if (left := bytes_per_session(result["sizes_mb"], what)) > largest
    ]
    wrong += [
        f"the trainer's folder had {size:.0f} MB"
        for size in (one["trainer"] for one in result["sizes_mb"])
        if 1e6 * size > LARGEST_TRAINER_BYTES
    ]
    return wrong


def bytes_per_session(sizes_mb: Sequence[dict[str, float]], what: str) -> float:
    """By how much it grew with each, after its warm-up; 0 in a run without such a time."""
    measured = [one for one in sizes_mb if one["minutes"] >= SIZES_WARM_UP_MIN]
    num_sessions = measured[-1]["sessions"] - measured[0]["sessions"] if measured else 0
    return 1e6 * (measured[-1][what] - measured[0][what]) / num_sessions if num_sessions else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A soak with random kills.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kill-every", type=float, nargs=2, default=(30, 90), metavar=("FROM", "TO"), help="seconds")
    parser.add_argument("--victims", nargs="+", default=VICTIMS, choices=VICTIMS, help="what is killed")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--folder", type=Path, help="where the state and the report go; temporary by default")
    arguments = parser.parse_args(argv)
    print(f"--seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tinsmith-soak-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_base_model(folder / "model", pretrain_steps=20)
        with Stack(folder / "state", base_models=[f"{BASE_MODEL}={model}"], env=ENV) as stack:
            result = soak(
                stack,
                minutes=arguments.minutes,
                kill_every_s=arguments.kill_every,
                victims=arguments.victims,
                rng=random.Random(arguments.seed),
            )
            (folder / "up.txt").write_text(stack.report())
            wrong = check(result)
            if wrong:
                for log in sorted(stack.logs.glob("*.log")):
                    print(f"The end of {log.name}:", *log.read_text().splitlines()[-20:], sep="\n")
        (folder / "soak.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({what: result[what] for what in ("counts", "kills", "left", "bytes_per_session")}))
    print("\n".join(wrong) or "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
