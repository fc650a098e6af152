"""Measures how a thousand samples at once and two hundred sessions delay clients with small requests: README.md.

python benchmarks/bench_load.py --size tiny --json load.json
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from figure import Figure, Report
from load import Times, percentile, press
from processes import started


def figures(times: Times) -> list[Figure]:
    rows = [
        Figure("samples per second, all at once", "1/s", [len(times.samples) / max(times.samples)]),
        Figure("one of them, median", "s", [percentile(times.samples, 50)]),
        Figure("one of them, p99", "s", [percentile(times.samples, 99)]),
        Figure("heartbeat, median", "ms", [1e3 * percentile(times.heartbeats, 50)]),
        Figure("heartbeat, p99", "ms", [1e3 * percentile(times.heartbeats, 99)]),
        Figure("heartbeat, slowest", "ms", [1e3 * max(times.heartbeats)], aim="below 1000"),
        Figure("trivial request, median", "ms", [1e3 * percentile(times.trivial, 50)]),
        Figure("trivial request, p99", "ms", [1e3 * percentile(times.trivial, 99)]),
        Figure("errors", "", [len(times.errors)], aim="0"),
    ]
    if times.sessions:
        rows.append(Figure("new SDK client to its first sample, median", "s", [percentile(times.sessions, 50)]))
    return rows


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are stopped
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "small", "medium"), default="tiny")
    parser.add_argument("--models", type=Path, default=Path("~/.cache/tinsmith-bench"))
    parser.add_argument("--samples", type=int, default=1000, help="samples that one client asks for at once")
    parser.add_argument("--sessions", type=int, default=200, help="number of sessions that are open at the same time")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each sample")
    parser.add_argument("--database-url", default="", help="database of the gateway (default: SQLite)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = Report({name: str(value) for name, value in vars(arguments).items()})
    environment = {"GATEWAY_DATABASE_URL": arguments.database_url}
    with (
        report.kept(arguments.json),
        started(
            arguments.size, models=arguments.models, trainer_threads=1, sampler_threads=1, environment=environment
        ) as target,
    ):
        times = press(
            target.url,
            target.base_model,
            api_key=os.environ.get("TINKER_API_KEY", "tml-bench"),
            num_samples=arguments.samples,
            num_sessions=arguments.sessions,
            num_tokens=arguments.tokens,
        )
        for error in times.errors[:10]:
            print(error, file=sys.stderr)
        for figure in figures(times):
            report.add(figure)


if __name__ == "__main__":
    main()
