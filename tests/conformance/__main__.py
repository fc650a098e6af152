"""Runs the cases with several SDK versions, each in an environment of its own, and writes the table.

python -m tests.conformance                                   all versions, against a stack that it starts
python -m tests.conformance --base-url URL --sdk 0.25.0       one version, against a server that runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.conformance.environments import environment
from tests.conformance.kit import FAILED, Outcome
from tests.conformance.report import failures, page

REPOSITORY = Path(__file__).parents[2]
VERSIONS = (
    "0.3.0", "0.5.1", "0.8.1", "0.14.0", "0.16.1", "0.18.2", "0.22.7", "0.24.1", "0.25.0", "0.28.1", "0.30.4", "0.33.1",
    "0.36.0", "0.38.0",
)  # fmt: skip
"""0.3 is the first with sessions: those before it speak another protocol, which this server does not."""
MODES = {
    "": ({}, ""),
    "in JWT mode: ": ({"GATEWAY_JWT_AUTH": "true"}, "^(server cap|forward agrees|sample: several|whoami)|auth status"),
}
"""Settings of our own stack, and what is run with them; the key stands before the features' names in the table."""
LIMIT_S = 1800.0
"""For all cases of one SDK."""


def run_cases(python: Path, base_url: str, *, arguments: list[str]) -> list[Outcome]:
    """The outcomes, in order. A worker that dies leaves a failure in the place of what it did not run."""
    command = [str(python), "-m", "tests.conformance.worker", "--base-url", base_url, *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TINKER_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        output, errors = done.stdout, done.stderr
        what = f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, errors = (error.stdout or b"").decode(), (error.stderr or b"").decode()
        what = f"not done after {LIMIT_S:g} s"
    found = [json.loads(line) for line in output.splitlines()]
    outcomes = [Outcome(**{key: one[key] for key in ("feature", "status", "reason", "seconds")}) for one in found]
    if what or not outcomes:
        outcomes.append(Outcome("all cases are run", FAILED, f"{what} {' '.join(errors.split())[-300:]}"))
    return outcomes


def run_all(
    base_url: str, results: dict[str, list[Outcome]], *, cache: Path, arguments: list[str], mode: str = ""
) -> None:
    """Adds the outcomes of each version, and prints what fails."""
    for version, outcomes in results.items():
        found = run_cases(environment(cache, version), base_url, arguments=arguments)
        outcomes += [replace(outcome, feature=mode + outcome.feature) for outcome in found]
        failed = [outcome for outcome in found if outcome.status == FAILED]
        print(f"{mode}{version}: {len(found) - len(failed)} of {len(found)} cases", flush=True)
        for outcome in failed:
            print(f"  {outcome.feature}: {outcome.reason}", flush=True)


@contextlib.contextmanager
def own_stack(cache: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Address of a stack with a tiny model."""
    from tests.support.stack import Stack, make_base_model

    model = make_base_model(cache / "toy", pretrain_steps=20)
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), base_models=[f"conformance/tiny={model}"], env=settings) as stack,
    ):
        yield stack.base_url


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description="Runs the cases with several SDK versions."
    )
    parser.add_argument("--base-url", help="a server that runs; default: a stack with a tiny model, started for this")
    parser.add_argument("--sdk", action="append", metavar="VERSION", help="repeatable; default: those of the table")
    parser.add_argument("--only", default="", help="features whose name matches this expression")
    parser.add_argument("--api-key", help="default: TINKER_API_KEY, or any")
    parser.add_argument("--base-model", help="default: the first that the server names")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "conformance", help="of environments")
    parser.add_argument("--out", type=Path, help="write the table there, as Markdown")
    args = parser.parse_args()
    arguments: list[str] = []
    for name in ("api_key", "base_model"):
        if value := getattr(args, name):
            arguments += [f"--{name.replace('_', '-')}", value]
    results: dict[str, list[Outcome]] = {version: [] for version in args.sdk or VERSIONS}
    if args.base_url:
        run_all(args.base_url, results, cache=args.cache, arguments=[*arguments, "--only", args.only])
    else:
        for mode, (settings, only) in MODES.items():
            with own_stack(args.cache, settings) as base_url:
                chosen = [*arguments, "--only", args.only or only]
                run_all(base_url, results, cache=args.cache, arguments=chosen, mode=mode)
    if args.out is not None:
        args.out.write_text(page(results))
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
