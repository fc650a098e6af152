"""Measures every figure that has an aim, each part in a process of its own, and prints them beside their aims.

    python -m benchmarks all                           # a table; takes about an hour on two cores
    python -m benchmarks all --json                    # the same as JSON
    python -m benchmarks all --list
    python -m benchmarks all --only shared-small publish-small

Each part leaves its results in --results. A part that has been measured at this commit on this machine is not measured
again, so a run that was interrupted goes on where it was; --again measures it anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import describe_machine, in_words, spread

_SERVICE = "request_overhead training_throughput sampling rl_iteration publishing"
PARTS: Mapping[str, str] = {
    "shared-small": "trainer --size small --no-baseline --only shared_prefixes --prompts 1 --repeats 3",
    "shared-medium": "trainer --size medium --no-baseline --only shared_prefixes --prompts 1 --repeats 3 --budget-s 30",
    "bfloat16-training": "trainer --size medium --no-baseline --only bfloat16 --shapes 8x256 --repeats 3 --budget-s 20",
    "bfloat16-decode": "torch_engine --size medium --only bfloat16 --repeats 3",
    "training-small": "trainer --size small --only throughput co_batching resident_adapters --repeats 3",
    "training-medium": "trainer --size medium --only throughput --shapes 16x256 --repeats 3",
    "training-qwen3_5": "trainer --model-shape qwen3_5-small --only throughput --shapes 16x256,ragged",
    "training-nemotron_h": "trainer --model-shape nemotron_h-small --only throughput --shapes 16x256,ragged",
    "ranks-small": "ranks --size small --repeats 3",
    "sampling-small": "sampler --size small --only groups mixed first_token --repeats 3",
    "sampling-qwen3_5": "sampler --size qwen3_5-small --only recurrent groups --repeats 3",
    "publish-small": "publish --size small",
    "publish-medium": "publish --size medium --repeats 6",
    "service-tiny": f"service --size tiny --repeats 3 --budget-s 8 --only {_SERVICE} many_samples many_sessions",
    "service-small": f"service --size small --repeats 3 --budget-s 15 --only {_SERVICE}",
    "service-medium": "service --size medium --repeats 3 --budget-s 15 --only publishing",
    "sdk-floor-tiny": "sdk_floor --size tiny --repeats 5",
    "load-tiny": "load --size tiny",
    "tenants": "tenants",
    "starts-small": "starts --size small --starts 4",
    "parked-small": "parked_runs --size small --only come_back --runs 6",
    "parked-tiny": "parked_runs --size tiny --only memory",
    "moved-small": "moved_runs --size small",
    "left-out-tiny": "left_out_samplers --size tiny",
}
"""Arguments of `python -m benchmarks` for each part."""
_BESIDE = "peak memory"
"""Figures of this name are shown although they have no aim."""


def measured(
    parts: Mapping[str, str], results: Path, *, machine: Mapping[str, Any], again: bool
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The report of each part, one after the other; None for a part that failed, whose error is on stderr."""
    results.mkdir(parents=True, exist_ok=True)
    for name, arguments in parts.items():
        file = results / f"{name}.json"
        report = None if again else _stored(file, arguments, machine)
        if report is None:
            begin = time.monotonic()
            command = [sys.executable, "-m", "benchmarks", *arguments.split(), "--json", str(file)]
            # The part prints its progress; the result is in its file.
            ended = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # noqa: S603
            print(f"{name}: {time.monotonic() - begin:.0f} s, exit status {ended}", file=sys.stderr, flush=True)
            if ended == 0:
                report = json.loads(file.read_text()) | {"arguments": arguments}
                file.write_text(json.dumps(report, indent=2) + "\n")
            else:
                file.unlink(missing_ok=True)  # its figures are not complete
        yield name, report


def _stored(file: Path, arguments: str, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run of these arguments on this machine at this commit."""
    if not file.exists():
        return None
    report = json.loads(file.read_text())
    same = report.get("arguments") == arguments and report["machine"] == json.loads(json.dumps(machine))
    return report if same else None


def rows(name: str, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The figures of a part that have an aim, and peak memory."""
    for figure in report["figures"]:
        if figure["aim"] or figure["name"].startswith(_BESIDE):
            yield {"part": name, **figure}


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| part | figure | value | against | ratio, round by round | aim | load |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        against = f"{row['baseline_name']} ({spread(row['baseline'])})" if row["baseline"] else ""
        ratio = f"{spread(row['ratios'])} x" if row["ratios"] else ""
        verdict = "" if row["met"] is None else f"{row['aim']}: {'met' if row['met'] else '**missed**'}"
        yield (
            f"| {row['part']} | {row['name']} | {spread(row['values'])} {row['unit']} | {against} | {ratio} "
            f"| {verdict} | {row['load_average']:.1f} |"
        )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="measure these")
    parser.add_argument("--list", action="store_true", help="print the parts, each with its command, and measure none")
    parser.add_argument("--again", action="store_true", help="measure parts that have results, too")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("~/.cache/tinsmith-bench/results"),
        help="folder of the parts' results (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """The exit status is 1 if a part failed, and 0 if an aim was only missed."""
    arguments = parse_arguments(argv)
    if arguments.list:
        for name in arguments.only:
            print(f"{name}: python -m benchmarks {PARTS[name]}")
        return 0
    return show(
        {name: PARTS[name] for name in arguments.only},
        arguments.results.expanduser(),
        again=arguments.again,
        as_json=arguments.json,
    )


def show(parts: Mapping[str, str], results: Path, *, again: bool, as_json: bool) -> int:
    machine = describe_machine()
    reports = dict(measured(parts, results, machine=machine, again=again))
    found = [row for name, report in reports.items() if report is not None for row in rows(name, report)]
    failed = [name for name, report in reports.items() if report is None]
    if as_json:
        print(json.dumps({"machine": machine, "failed": failed, "figures": found, "parts": reports}, indent=2))
    else:
        print(f"{in_words(machine)}. Median [min-max].\n", *table(found), sep="\n")
        for name in failed:
            print(f"FAILED: {name}: python -m benchmarks {parts[name]}")
    return 1 if failed else 0
