"""`tinsmith plan MODEL`: shows the GPUs and the memory that each service would get, and starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from tinsmith_cli.base_models import UsageError, resolve
from tinsmith_cli.planning.config_files import find
from tinsmith_cli.planning.constraints import FLAGS, constraints_of, usable
from tinsmith_cli.planning.described import FORM, described
from tinsmith_cli.planning.machine import see
from tinsmith_cli.planning.plan import DoesNotFit
from tinsmith_cli.planning.planner import plan
from tinsmith_cli.planning.report import as_json, as_text
from tinsmith_cli.settings import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="show which GPUs and how much memory a model gets, and start nothing",
        description="Shows how `tinsmith up` with the same flags would divide GPUs and memory of this machine, or of "
        "another one, between trainer and samplers, from the model's config.json; no weights are loaded. TRAINER_* and "
        "SAMPLER_* in the environment count as they do there. Exit status: 0 it fits, 1 it does not, and the smallest "
        "change that would make it fit is named, 2 a mistake in the command line.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder, or hub id such as Qwen/Qwen3-8B")
    parser.add_argument(
        "--machine", metavar="TEXT|FILE",
        help=f"plan for another machine: 8xH100, or 2x48GB,cores=32,memory=256GB ({FORM}; default: 16 cores for each "
        "GPU, and twice the GPUs' memory), or a file with what --json printed there",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the plan as JSON, in bytes and tokens")
    Settings.add_flags(parser, only=FLAGS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, or the reason for which the model does not fit. Raises UsageError."""
    settings = Settings.of(arguments)
    model = resolve(arguments.model, spec=arguments.model, flag="MODEL")
    machine = usable(see() if arguments.machine is None else described(arguments.machine), settings)
    constraints = constraints_of(settings, machine, os.environ)
    try:
        planned = plan(model, find(model, fetch=True), machine, constraints)
    except DoesNotFit as error:
        if arguments.json:
            print(json.dumps({"fits": False, "model": model, "reason": error.reason, "change": error.change}, indent=2))
        else:
            print(f"tinsmith: {model} does not fit: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        if arguments.json:
            print(json.dumps({"fits": False, "model": model, "reason": str(error), "change": ""}, indent=2))
        raise
    print(json.dumps(as_json(planned), indent=2) if arguments.json else as_text(planned))
    return 0
