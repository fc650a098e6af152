"""python -m benchmarks NAME: measures a part of Tinsmith, or with `all` every figure that has an aim."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from benchmarks import every
from benchmarks.figure import Report

COMMANDS = {
    "all": "every figure that has an aim, by the commands below",
    "service": "a running service, through the SDK",
    "trainer": "the training engine in process: passes, common beginnings, bfloat16, steps",
    "torch_engine": "the torch engine in process: prefix cache, bfloat16",
    "sampler": "sampling through the SDK, against other engines",
    "publish": "new weights to a sampler",
    "durability": "journal and snapshots",
    "journal": "the journal in PostgreSQL against that in a file",
    "ranks": "the trainer on several ranks",
    "starts": "starts of the stack",
    "parked_runs": "runs that are parked: coming back, and the memory of many",
    "moved_runs": "runs that move from trainer to trainer: how long they stand still",
    "left_out_samplers": "a publish while of four samplers one is full, one is dead and one hangs",
    "load": "a thousand samples and two hundred sessions at once",
    "hostile": "waits of 16 good clients beside every hostile request that is known",
    "tenants": "a simulation of many tenants on eight GPUs, with the queue and the placement that serve",
    "version_homes": "where the versions of a thousand runs go among 64 samplers",
    "sdk_floor": "what the SDK costs by itself",
    "sampler_memory": "memory of a sampler over time",
}


def module_of(name: str) -> str:
    """The module of a command, which has `add_arguments` and `run`."""
    return f"benchmarks.{name}.command" if name in ("service", "trainer") else f"benchmarks.{name}"


def measure(name: str, argv: list[str]) -> int:
    """Runs one command."""
    module = importlib.import_module(module_of(name))
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    arguments = parser.parse_args(argv)
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "api_key"}
    if getattr(arguments, "one_rank", False):  # a process of `ranks`, which reports to that command
        module.run(arguments, None)
        return 0
    report = Report(settings, model=getattr(arguments, "model_shape", None) or getattr(arguments, "size", ""))
    with report.kept(arguments.json):
        module.run(arguments, report)
    return 0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    name, argv = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name == "all":
        return every.main(argv)
    if name in COMMANDS:
        return measure(name, argv)
    known = name in ("", "-h", "--help")
    lines = [f"  {command:<16}{what}" for command, what in COMMANDS.items()]
    usage = "usage: python -m benchmarks NAME [--help | arguments]"
    print(usage if known else f"python -m benchmarks: there is no {name!r}", *lines, sep="\n")
    return 0 if known else 2


if __name__ == "__main__":
    sys.exit(main())
