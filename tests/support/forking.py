"""Processes that are forked from one that has imported the SDK and the gateway, which takes some seconds of a core.
A command on its own also obeys variables that the interpreter reads at its start, such as PYTHONUNBUFFERED."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.without_torch", "pytest", "tinker.cli.__main__", "gateway.__main__"])
_LIMIT_S = 200


@dataclass(frozen=True)
class Done:
    status: int
    output: str


def _run(files: tuple[Path, Path], env: Mapping[str, str], function: Callable[..., object], *arguments: Any) -> None:
    os.setsid()  # without a terminal, which getpass would prefer to stdin
    for file, flags, streams in zip(files, (os.O_RDONLY, os.O_WRONLY), ((0,), (1, 2)), strict=True):
        opened = os.open(file, flags)
        for stream in streams:
            os.dup2(opened, stream)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(env)
    function(*arguments)


def command(package: str, argv: Sequence[str] = ()) -> None:
    """As `python -m package`."""
    if sys.modules.get("torch") is None:
        sys.modules.pop("torch", None)
    sys.argv = [package, *argv]
    importlib.import_module(f"{package}.__main__").main()


async def run(
    function: Callable[..., object], *arguments: Any, env: Mapping[str, str] | None = None, given: str = ""
) -> Done:
    """Calls a function of a module in a process of its own, which has this environment and finds `given` in stdin."""
    with tempfile.TemporaryDirectory() as folder:
        given_file, output = Path(folder) / "given", Path(folder) / "output"
        given_file.write_text(given)
        output.touch()
        process = FORKS.Process(
            target=_run, args=((given_file, output), dict(env or os.environ), function, *arguments), daemon=True
        )
        try:
            await asyncio.to_thread(process.start)
            await asyncio.to_thread(process.join, _LIMIT_S)
            assert process.exitcode is not None, f"not after {_LIMIT_S} s: {output.read_text()}"
            return Done(process.exitcode, output.read_text())
        finally:
            process.kill()
            process.join()
            process.close()
