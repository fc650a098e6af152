"""The commands of `tinsmith`. Nothing here imports torch until a model is made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tinsmith
from tinsmith_cli import checkpoints, drain, journal, keys, make_base_model, make_certificates, sessions, up
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.doctor import command as doctor_command
from tinsmith_cli.planning import command as plan_command

_OWN = ("tinsmith", "tinsmith_cli", "gateway", "trainer_service", "sampler_service")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinsmith", description="Post-training on your own hardware: the Tinker API.")
    parser.add_argument("--version", action="version", version=f"tinsmith {tinsmith.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    up.add_parser(commands)
    make_base_model.add_parser(commands)
    make_certificates.add_parser(commands)
    checkpoints.add_parser(commands)
    sessions.add_parser(commands)
    drain.add_parser(commands)
    keys.add_parser(commands)
    journal.add_parser(commands)
    plan_command.add_parser(commands)
    doctor_command.add_parser(commands)
    return parser


def run(argv: Sequence[str] | None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # `pip install tinsmith` installs the command line without the packages that only services need.
        name = (error.name or "").partition(".")[0]
        if not name or name in _OWN:
            raise
        print(f"tinsmith: the Python package {name} is not installed: pip install 'tinsmith[all]'", file=sys.stderr)
        return 2
