"""Measures how long 16 good clients wait, by kind of request, without and with an attack of every hostile request that
is known, all in the same moment: README.md.

    python -m benchmarks hostile

The requests are those of tests/faults/test_hostile.py, which asserts what does not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.press import percentile
from benchmarks.processes import model_folder
from tests.faults.hostile_clients import KEY_FLAGS, Neighbours, attackers, send_all_at_once
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

OPERATIONS = ("forward_backward", "optim_step", "sample")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="tiny")
    add_models(parser)
    parser.add_argument("--quiet-s", type=float, default=10.0, help="seconds before the attack (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    neighbours = Neighbours()
    models = [f"{BASE_MODEL}={model_folder(arguments.size, arguments.models)}"]
    with (
        tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as state,
        Stack(Path(state), base_models=models, flags=KEY_FLAGS, threads=None) as stack,
        neighbours.running(stack),
        attackers(stack) as attack,
    ):
        quiet = time.monotonic()
        time.sleep(arguments.quiet_s)
        began = time.monotonic()
        attack.submit(send_all_at_once).result()
        ended = time.monotonic()
    for error in neighbours.errors:
        print(error, file=sys.stderr)
    report.add(Figure("all hostile requests answered", "s", [ended - began]))
    for operation in OPERATIONS:
        before = [seconds for _, name, seconds in neighbours.during(quiet, began) if name == operation]
        during = [seconds for _, name, seconds in neighbours.during(began, ended) if name == operation]
        for part, what in ((50, "median"), (99, "p99"), (100, "longest")):
            report.add(
                Figure(
                    f"{operation}, {what}",
                    "s",
                    [percentile(during, part)],
                    "without an attack",
                    [percentile(before, part)],
                    [Aim(1, "s", at_most=True)] if part == 100 else [],
                )
            )
    report.add(Figure("errors", "", [len(neighbours.errors)], aims=[Aim(0, "", at_most=True)]))
