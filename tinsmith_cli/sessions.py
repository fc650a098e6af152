"""`tinsmith sessions`: lists the sessions of a running server's clients, and ends sessions and runs."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tinsmith.formatting import columns
from tinsmith_cli import client
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.client import ApiClient

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_RUN = ":train:"
"""Part of a run's id, after the id of its session."""
_PAGE = 200


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sessions", help="clients of a running server, and their runs")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="list the sessions that have not ended",
        description="Lists the sessions of the key's owner that have not ended, newest first. Each ServiceClient has "
        "one session.",
    )
    listing.add_argument("--all", action="store_true", help="include sessions that have ended")
    listing.add_argument(
        "--everyone",
        action="store_true",
        help="list the sessions of all owners, for a key with admin; for others, their own",
    )
    listing.add_argument("--json", action="store_true", help="print the server's JSON")
    client.add_arguments(listing)
    listing.set_defaults(run=run_list)
    ending = actions.add_parser(
        "end",
        help="end sessions or runs",
        description="Ends sessions with all of their runs, or single runs. Operations that were accepted are completed "
        "first, and checkpoints stay.",
    )
    ending.add_argument("ids", nargs="+", metavar="ID", help="id of a session, or of a run, such as SESSION:train:0")
    client.add_arguments(ending)
    ending.set_defaults(run=run_end)


def run_list(arguments: argparse.Namespace) -> int:
    sessions = list(_sessions(ApiClient.of(arguments), everyone=arguments.everyone, with_ended=arguments.all))
    if arguments.json:
        print(json.dumps(sessions, indent=2))
        return 0
    if sessions:
        print(
            columns(
                [
                    [one["session_id"], one["created_at"], one["status"]["type"], one["display_name"] or ""]
                    for one in sessions
                ]
            )
        )
    return 0


def _sessions(server: ApiClient, *, everyone: bool, with_ended: bool) -> Iterator[dict[str, Any]]:
    asked: dict[str, Any] = {"limit": _PAGE, "owner": {"type": "accessible" if everyone else "own"}}
    if not with_ended:
        asked["statuses"] = [{"type": "active"}]
    while True:
        page = server.call("sessions/search", content=asked)
        yield from page["sessions"]
        if page["next_cursor"] is None:
            return
        asked["cursor"] = page["next_cursor"]


def run_end(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    for each in arguments.ids:
        if _RUN in each:
            _end_run(server, each)
        else:
            reason = {"reason": {"type": "interrupted"}, "detail": "ended by tinsmith sessions end"}
            server.call(f"sessions/{urllib.parse.quote(each, safe='')}/finish", content=reason)
        print(f"{each} has ended")
    return 0


def _end_run(server: ApiClient, run_id: str) -> None:
    receipt = server.call("unload_model", content={"model_id": run_id})
    while True:
        answer = server.call("retrieve_future", content={"request_id": receipt["request_id"]})
        if "error" in answer:
            raise UsageError(answer["error"])
        if answer["type"] != "try_again":
            return
