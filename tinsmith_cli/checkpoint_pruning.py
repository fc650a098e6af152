"""`tinsmith checkpoints prune`: shows the checkpoints that a retention policy would delete, and deletes them."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from typing import TYPE_CHECKING, Any

from tinsmith.formatting import size_text
from tinsmith_cli import client
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.checkpoint_views import print_table, seconds
from tinsmith_cli.client import ApiClient

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_KINDS = ("training", "sampler")


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prune",
        help="delete the checkpoints of a training run that a policy does not keep",
        description="Shows what would be deleted, and deletes it after a yes. A checkpoint stays if any rule keeps it, "
        "if it is pinned or published, or while a live sampler needs it. Without a rule, the run's policy applies.",
    )
    parser.add_argument("run_id", metavar="RUN", help="id of a training run")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    parser.add_argument(
        "--keep-every", type=int, metavar="STEPS", help="keep the first one at or after each multiple of STEPS"
    )
    parser.add_argument(
        "--keep-within", type=seconds, metavar="TIME", help="keep those that are younger, such as 12h or 30d"
    )
    parser.add_argument(
        "--kind", choices=_KINDS, action="append", help="kind of checkpoint to prune, repeatable (default: both kinds)"
    )
    parser.add_argument("--save", action="store_true", help="make the rules the run's policy, which the server applies")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be deleted")
    parser.add_argument("--json", action="store_true", help="print the server's JSON; needs --yes or --dry-run")
    client.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    place = f"training_runs/{urllib.parse.quote(arguments.run_id, safe=':')}/retention"
    policy = _policy(arguments)
    if arguments.save and policy is None:
        raise UsageError("--save: give a rule to save, such as --keep-last 5")
    asked: dict[str, Any] = {} if policy is None else {"policy": policy}
    plan = server.call(f"{place}/prune", content={**asked, "dry_run": True})
    if not arguments.json:
        _print_plan(plan)
    if arguments.dry_run:
        if arguments.json:
            print(json.dumps(plan, indent=2))
        return 0
    if plan["delete"] and not arguments.yes and not _confirmed(len(plan["delete"]), in_json=arguments.json):
        print("nothing was deleted")
        return 1
    if arguments.save:
        server.call(place, content=policy, method="PUT")
    paths = [one["tinker_path"] for one in plan["delete"]]
    done = server.call(f"{place}/prune", content={**asked, "paths": paths}) if paths else {**plan, "deleted": []}
    if arguments.json:
        print(json.dumps(done, indent=2))
        return 0
    gone = done["deleted"]
    print(f"deleted {len(gone)}, {size_text(sum(one['size_bytes'] for one in gone))}")
    missed = set(paths) - {one["tinker_path"] for one in gone}
    for path in sorted(missed):
        print(f"kept after all: {path}")
    if arguments.save:
        print(f"these rules are the policy of {arguments.run_id} from now on")
    return 0


def _policy(arguments: argparse.Namespace) -> dict[str, Any] | None:
    rules = {
        "keep_last": arguments.keep_last,
        "keep_every_steps": arguments.keep_every,
        "keep_within_seconds": arguments.keep_within,
    }
    rules = {name: value for name, value in rules.items() if value is not None}
    if not rules:
        if arguments.kind:
            raise UsageError("--kind: give a rule for it, such as --keep-last 5")
        return None
    return dict.fromkeys(arguments.kind or _KINDS, rules)


def _print_plan(plan: dict[str, Any]) -> None:
    print_table(plan["keep"], why=True)
    num_bytes = sum(one["size_bytes"] for one in plan["delete"])
    print(f"{len(plan['keep'])} stay; {len(plan['delete'])} would be deleted, {size_text(num_bytes)}:")
    print_table(plan["delete"])


def _confirmed(number: int, *, in_json: bool) -> bool:
    if in_json or not sys.stdin.isatty():
        raise UsageError("--yes: needed to delete without a terminal to ask on; --dry-run shows what would be deleted")
    return input(f"delete {number} checkpoints? [y/N] ").strip().lower() in ("y", "yes")
