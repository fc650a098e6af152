"""Settings of the C library's allocator for freed memory."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for later allocations. Returns False if it could not, as with another C library.

    By default glibc returns every freed block above 32 MB to the system at once, and also the free end of its heap. A
    training step allocates hundreds of such blocks, and the system must clear each of their pages again. That costs up
    to 10 % of a step's time, and 40 % of the time of an elementwise operation. With freed memory kept, the resident
    memory of the process stays at its peak. The peak is as high as without (measured on ragged batches).

    To be called before other threads start.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena for all threads: the arenas of other threads cannot hold large blocks.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER))
    done = [mallopt(name, value) for name, value in settings]
    return all(done)


def give_back_freed_memory() -> None:
    """Returns unused pages to the system. Does nothing with another C library than glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
