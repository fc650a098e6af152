"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed for what is asked for next, and tells whether it could (only glibc can).

    By default it gives every block above 32 MB back at once, and the end of its heap when that is free. A training step
    asks for hundreds of such blocks, and the system must clear each page anew: up to 10 % of a step's time, and 40 % of
    an elementwise operation's. The process's resident memory then stays at its peak, which is the same as without
    (measured on ragged batches). Call it before other threads start.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena: those of other threads cannot hold large blocks.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER))
    done = [mallopt(name, value) for name, value in settings]
    return all(done)


def give_back_freed_memory() -> None:
    """Gives the system whole pages that nothing uses; without glibc it does nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
