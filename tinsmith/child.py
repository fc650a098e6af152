"""python child.py PARENT COMMAND...: replaces itself by the command. On Linux the kernel kills the command when process
PARENT ends, however it ends. This is a program of its own because a process with threads must run no Python code
between fork and exec."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when `parent` ends. To be called in a child that `parent` has just made."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606
