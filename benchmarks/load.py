"""Measures how a thousand samples at once and two hundred sessions delay clients with small requests: README.md.

python -m benchmarks load --size tiny
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.press import Times, percentile, press
from benchmarks.processes import started


def figures(times: Times) -> list[Figure]:
    rows = [
        Figure("samples per second, all at once", "1/s", [len(times.samples) / max(times.samples)]),
        Figure("one of them, median", "s", [percentile(times.samples, 50)]),
        Figure("one of them, p99", "s", [percentile(times.samples, 99)]),
        Figure("heartbeat, median", "ms", [1e3 * percentile(times.heartbeats, 50)]),
        Figure("heartbeat, p99", "ms", [1e3 * percentile(times.heartbeats, 99)]),
        Figure("heartbeat, slowest", "ms", [1e3 * max(times.heartbeats)], aims=[Aim(1000, "ms", at_most=True)]),
        Figure("trivial request, median", "ms", [1e3 * percentile(times.trivial, 50)]),
        Figure("trivial request, p99", "ms", [1e3 * percentile(times.trivial, 99)]),
        Figure("errors", "", [len(times.errors)], aims=[Aim(0, "", at_most=True)]),
    ]
    if times.sessions:
        rows.append(Figure("new SDK client to its first sample, median", "s", [percentile(times.sessions, 50)]))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="tiny")
    add_models(parser)
    parser.add_argument("--samples", type=int, default=1000, help="samples that one client asks for at once")
    parser.add_argument("--sessions", type=int, default=200, help="number of sessions that are open at the same time")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each sample")
    parser.add_argument("--database-url", default="", help="database of the gateway (default: SQLite)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    environment = {"GATEWAY_DATABASE_URL": arguments.database_url}
    with started(
        arguments.size, models=arguments.models, trainer_threads=1, sampler_threads=1, environment=environment
    ) as target:
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
