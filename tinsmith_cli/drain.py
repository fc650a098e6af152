"""`tinsmith drain`: moves all runs of one trainer to others, so that it can be stopped, or started again."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

from tinsmith.formatting import columns
from tinsmith_cli import client
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.client import ApiClient, Unreachable

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_LOOK_S = 1.0
"""Pause between two requests for the state of a trainer that is drained, in seconds."""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain",
        help="empty a trainer, so that it can be stopped",
        description="Drains one of several trainers of a base model: it gets no new runs, and its runs move to the "
        "other trainers, one after the other, while their clients go on. Waits until the trainer can be stopped, and "
        "says so. Ctrl-C ends the waiting only. Without TRAINER, lists the trainers, or restarts each of them with "
        "--restart. Needs a key with admin, if the server has keys.",
    )
    parser.add_argument("trainer", nargs="?", metavar="TRAINER", help="address or trainer_id of the trainer")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--undo", action="store_true", help="let the trainer take runs again; moved runs do not come back")
    how.add_argument("--no-wait", action="store_true", help="begin to drain the trainer, and return at once")
    how.add_argument(
        "--restart", metavar="COMMAND",
        help="once the trainer is empty, run this shell command, which has to end its process and start another one "
        "(kubectl, systemctl, docker compose); then wait until the trainer serves, and let it take runs again. Without "
        "TRAINER: all trainers, one after the other, such as for an upgrade. The command has the trainer's address in "
        "TINSMITH_TRAINER, and its id in TINSMITH_TRAINER_ID",
    )  # fmt: skip
    parser.add_argument(
        "--until-restart",
        action="store_true",
        help="let the trainer take runs again by itself as soon as another process of it serves; --restart implies it. "
        "For what runs before a process is stopped, such as a preStop hook",
    )
    client.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    name = arguments.trainer
    if arguments.undo and arguments.until_restart:
        raise UsageError("--until-restart: not with --undo, after which the trainer takes runs again at once")
    if name is None:
        for option in ("undo", "no_wait", "until_restart"):
            if getattr(arguments, option):
                raise UsageError(f"TRAINER: missing, which --{option.replace('_', '-')} needs")
        trainers = server.call("trainers")["trainers"]
        if arguments.restart is None:
            _print(trainers)
        else:
            _restart_all(server, trainers, arguments.restart)
    elif arguments.undo:
        _undrain(server, name)
    elif arguments.restart is not None:
        _restart(server, name, arguments.restart)
    else:
        _drain(server, name, waits=not arguments.no_wait, until_restart=arguments.until_restart)
    return 0


def _drain(server: ApiClient, name: str, *, waits: bool = True, until_restart: bool) -> dict[str, Any]:
    """Drains a trainer. With `waits`, returns only when the trainer can be stopped. Returns the trainer's state."""
    one = _one(server.call("trainers/drain", content={"trainer": name, "until_restart": until_restart}), name)
    said = ""
    while not one["can_be_stopped"] and waits:
        said = _say(one, said)
        time.sleep(_LOOK_S)
        try:
            one = _one(server.call("trainers"), name)
        except Unreachable as error:  # the draining goes on when the gateway is back
            one = {**one, "problems": {"the server": str(error)}}
            continue
        if not one["is_drained"]:
            raise UsageError(f"{one['address']} is not being drained any more: somebody has ended it (--undo)")
    _say(one, said)
    return one


def _undrain(server: ApiClient, name: str) -> None:
    one = _one(server.call("trainers/undrain", content={"trainer": name}), name)
    print(f"{one['address']} takes runs again", flush=True)


def _restart_all(server: ApiClient, trainers: list[dict[str, Any]], command: str) -> None:
    """Restarts the trainers, one after the other. A trainer that is drained already stays as it is."""
    for one in trainers:
        if one["state"] != "serving" and not one["is_drained"]:
            raise UsageError(f"{one['address']} does not serve (state: {one['state']}); nothing was drained")
    for one in trainers:
        if one["is_drained"]:
            print(f"{one['address']} was drained before, and is left as it is", flush=True)
        else:
            _restart(server, one["address"], command)


def _restart(server: ApiClient, name: str, command: str) -> None:
    """Drains a trainer, runs the command, and lets the trainer take runs again once its new process serves. Raises
    UsageError if the command fails; the trainer then stays drained."""
    before = _drain(server, name, until_restart=True)
    address = before["address"]
    names = {"TINSMITH_TRAINER": address, "TINSMITH_TRAINER_ID": before["trainer_id"]}
    shell = ["/bin/sh", "-c", command]
    status = subprocess.run(shell, env=os.environ | names, check=False).returncode  # noqa: S603 - the operator's own
    if status != 0:
        raise UsageError(
            f"--restart: {command!r} ended with status {status}; {address} is empty, and takes no runs until its "
            f"process is another one, or `tinsmith drain {address} --undo`"
        )
    print(f"{address}: waiting until its new process serves", flush=True)
    while True:
        try:
            one = _one(server.call("trainers"), address)
        except Unreachable:  # the command may have restarted the gateway, too
            one = before
        if one["boot_id"] != before["boot_id"] and one["state"] == "serving":
            break
        time.sleep(_LOOK_S)
    _undrain(server, address)


def _one(answer: Any, name: str) -> dict[str, Any]:
    """The trainer with the address or id `name` in the server's list of trainers. Raises UsageError without it."""
    found = [one for one in answer["trainers"] if name in (one["address"], one["trainer_id"])]
    if not found:
        raise UsageError(f"TRAINER: the server has no trainer {name!r} any more")
    return found[0]


def _say(one: dict[str, Any], said: str) -> str:
    """Prints the progress of draining the trainer `one`, unless it is the same text as `said`, which was printed last.
    Returns the text."""
    address = one["address"]
    if one["can_be_stopped"]:
        text = f"{address} can be stopped: none of its runs is left there"
    else:
        number = one["num_runs"]
        text = f"{address}: {number} {'run is' if number == 1 else 'runs are'} left"
        if not number:
            text = f"{address}: the last moves are being finished"
    for model_id, why in sorted(one["problems"].items()):
        text += f"\n    {model_id}: {why}"
    if text != said:
        print(text, flush=True)
    return text


def _print(trainers: list[dict[str, Any]]) -> None:
    rows: list[list[str]] = []
    for one in trainers:
        state = "can be stopped" if one["can_be_stopped"] else "draining" if one["is_drained"] else one["state"]
        number = one["num_runs"]
        runs = f"{number} run" if number == 1 else f"{number} runs"
        rows.append([one["address"], one["trainer_id"], state, runs, ", ".join(one["base_models"])])
    if rows:
        print(columns(rows))
