"""Services that are forked from a process which has imported all that they import. The imports of a service take 5 s of
a core, and many tests start services again and again.

    python -P -m tests.support.warm_services SOCKET    # is forked; `start` runs it when it is first needed
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from tinsmith.allocator import exempt_imports
from tinsmith.child import die_with_parent

_PRELOADED = ("trainer_service.service", "sampler_service.service", "gateway.__main__")
_MOST_BYTES = 2**17
_REPOSITORY = Path(__file__).parents[2]


class Forked:
    """A forked process, with the methods of subprocess.Popen that tests use."""

    def __init__(self, argv: Sequence[str], told: IO[bytes]) -> None:
        """`told`: a pipe on which the process writes its id, and the process that it was forked from its status."""
        self.pid = int(told.readline())
        self.returncode: int | None = None
        self._argv = argv
        self._told = told

    def poll(self) -> int | None:
        """Exit status, or minus the number of the signal that ended the process; None while it runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._argv, timeout or 0)
        return status

    def _status(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout_s)[0]:
            with self._told:
                self.returncode = int(self._told.readline())
        return self.returncode


def start(argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes]) -> Forked:
    """Runs `python -P argv`, where `argv` is a script or `-m` and a module, in a session of its own. The kernel kills
    the service when this process ends."""
    order = json.dumps({"argv": [*argv], "env": {**env}}).encode()
    reading, writing = os.pipe()
    told = os.fdopen(reading, "rb", buffering=0)
    with os.fdopen(writing, "wb"):
        socket.send_fds(_server(), [order], [output.fileno(), writing])
    return Forked(argv, told)


@cache
def _server() -> socket.socket:
    """The socket for orders to the process that is forked, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_REPOSITORY)}
    command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], start_new_session=True)

    @atexit.register
    def end() -> None:
        ours.close()
        server.kill()
        server.wait()

    return ours


def _serve(orders: socket.socket) -> None:
    """Forks for each order. Returns in the forked processes."""
    server, running = os.getpid(), dict[int, tuple[int, int]]()
    while True:
        ready, _, _ = select.select([orders, *running], [], [])
        for watched in running.keys() & ready:
            pid, telling = running.pop(watched)
            _, status = os.waitpid(pid, 0)
            with suppress(BrokenPipeError), os.fdopen(telling, "wb") as told:
                told.write(b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(watched)
        if orders not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 2)
        if not message:
            sys.exit()
        output, telling = descriptors
        if pid := os.fork():
            running[os.pidfd_open(pid)] = pid, telling
            os.close(output)
            continue
        os.setsid()
        die_with_parent(server)
        orders.close()
        for watched, (_, other) in running.items():
            os.close(watched)
            os.close(other)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        order = json.loads(message)
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = order["argv"]
        with os.fdopen(telling, "wb") as told:
            told.write(b"%d\n" % os.getpid())
        return


def _preload() -> None:
    with exempt_imports():  # a collection in a forked process would look at all imported objects, and copy their pages
        for module in _PRELOADED:
            importlib.import_module(module)
    del sys.modules["gateway.__main__"]  # it is run as `__main__`


def main() -> None:
    _preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
