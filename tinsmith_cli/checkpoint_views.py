"""`tinsmith checkpoints list|show|verify|pin|unpin`: shows, verifies and pins checkpoints of a running server."""

from __future__ import annotations

import argparse
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tinsmith.formatting import columns, size_text
from tinsmith.rpc.paths import SCHEME
from tinsmith_cli import client
from tinsmith_cli.client import ApiClient

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_PAGE = 1000
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_HIDDEN = {"checkpoint_id", "files"}


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = actions.add_parser("list", help="your checkpoints, or those of a training run")
    listing.add_argument("run_id", nargs="?", metavar="RUN", help="id of a training run (default: all of yours)")
    listing.set_defaults(run=_list)
    showing = actions.add_parser("show", help="everything that the server knows about a checkpoint")
    showing.add_argument("path", metavar="PATH", help="tinker:// path")
    showing.set_defaults(run=_show)
    verifying = actions.add_parser(
        "verify",
        help="read checkpoints and compare them with their checksums",
        description="Has the trainer read every file of the checkpoints. Exits with 1 when one is damaged.",
    )
    verifying.add_argument(
        "what", nargs="+", metavar="PATH_OR_RUN", help="tinker:// path, or id of a training run: all of its checkpoints"
    )
    verifying.set_defaults(run=_verify)
    for name, method, text in (
        ("pin", "POST", "keep a checkpoint, regardless of its TTL and of retention policies"),
        ("unpin", "DELETE", "let TTL and retention policies apply to a checkpoint again"),
    ):
        pinning = actions.add_parser(name, help=text)
        pinning.add_argument("path", metavar="PATH", help="tinker:// path")
        pinning.set_defaults(run=_pin, method=method)
    for parser in (listing, showing, verifying):
        parser.add_argument("--json", action="store_true", help="print the server's JSON")
    for name in ("list", "show", "verify", "pin", "unpin"):
        client.add_arguments(actions.choices[name])


def _list(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    found = list(_all(server) if arguments.run_id is None else of_run(server, arguments.run_id))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(found)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = ApiClient.of(arguments).checkpoint(arguments.path)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    rows = [[name, "-" if value is None else str(value)] for name, value in found.items() if name not in _HIDDEN]
    rows += [["file", f"{one['name']}  {one['size_bytes']} bytes  SHA-256 {one['sha256']}"] for one in found["files"]]
    print(columns(rows))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    paths = [
        path
        for what in arguments.what
        for path in ([what] if what.startswith(SCHEME) else [one["tinker_path"] for one in of_run(server, what)])
    ]
    answers, is_intact = [], True
    for path in paths:
        answer = server.checkpoint(path, "verify")
        answers.append(answer)
        is_intact &= answer["intact"]
        if not arguments.json:
            num_bytes = sum(file["size_bytes"] for file in answer["files"])
            state = f"intact, {len(answer['files'])} files, {size_text(num_bytes)}" if answer["intact"] else "DAMAGED"
            print(f"{path}  {state}", flush=True)
            for problem in filter(None, [answer["problem"], *(file["problem"] for file in answer["files"])]):
                print(f"  {problem}")
    if arguments.json:
        print(json.dumps(answers, indent=2))
    return 0 if is_intact else 1


def _pin(arguments: argparse.Namespace) -> int:
    ApiClient.of(arguments).checkpoint(arguments.path, "pin", method=arguments.method)
    return 0


def _all(server: ApiClient) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        answer = server.call(f"checkpoints?{urllib.parse.urlencode({'limit': _PAGE, 'offset': offset})}")
        yield from answer["checkpoints"]
        offset += _PAGE
        if offset >= answer["cursor"]["total_count"]:
            return


def of_run(server: ApiClient, run_id: str) -> Iterable[dict[str, Any]]:
    """The run's checkpoints, oldest first."""
    return server.call(f"training_runs/{urllib.parse.quote(run_id, safe=':')}/checkpoints")["checkpoints"]


def print_table(checkpoints: Iterable[Mapping[str, Any]], *, why: bool = False) -> None:
    """Prints checkpoints as a table. `why`: also prints the reasons for which each checkpoint is kept."""
    rows = []
    for one in checkpoints:
        notes = ["published"] if one["public"] else []
        if one["expires_at"] is not None:
            notes.append(f"expires {one['expires_at'][:19]}Z")
        if why:
            notes.append(f"kept: {', '.join(one['kept_as'])}")
        rows.append([one["tinker_path"], size_text(one["size_bytes"]), f"{one['time'][:19]}Z", "; ".join(notes)])
    if rows:
        print(columns(rows))


def seconds(text: str) -> int:
    """The time in an argument such as 90m, in seconds."""
    match = re.fullmatch(r"(\d+)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 3600, 90m, 12h or 30d")
    return int(match[1]) * _UNITS_S[match[2]]
