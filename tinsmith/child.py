"""python child.py PARENT COMMAND...: becomes the command, which the kernel kills when process PARENT ends, however it
ends (Linux). A program of its own, because nothing may run between fork and exec of a process that has threads."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """To be called in a child just made by `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606
