"""Settings of the memory of a process: the C library's allocator and Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
_LARGE_BLOCK = 256 * 1024
_thresholds = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20}
"""Thresholds outside of `blocks_at_page_starts`, in bytes: those to which glibc would let them grow by itself. It no
longer does so once a program has set one."""


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
    _thresholds.update({_M_MMAP_THRESHOLD: _NEVER, _M_TRIM_THRESHOLD: _NEVER})
    # One arena for all threads: the arenas of other threads cannot hold large blocks.
    settings = ((_M_ARENA_MAX, 1), *_thresholds.items())
    done = [mallopt(name, value) for name, value in settings]
    return all(done)


@contextmanager
def blocks_at_page_starts() -> Iterator[None]:
    """Within the block, glibc maps each allocation of 256 kB or more by itself. Such memory begins at one place of its
    first page, the same in every process. Does nothing with another C library."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
    try:
        yield
    finally:
        for name, value in _thresholds.items():
            mallopt(name, value)


def exempt_from_collections() -> None:
    """Exempts all objects that exist now from Python's garbage collector.

    A full collection visits all objects and holds the interpreter's lock meanwhile. The modules that a service has
    loaded are 150,000 objects (gateway) to 390,000 (with torch), and visiting them takes 0.08 to 0.2 s. In that time
    neither the event loop nor the compute thread runs.
    """
    gc.collect()  # garbage would stay for ever
    gc.freeze()


@contextmanager
def exempt_imports() -> Iterator[None]:
    """Exempts the objects that are made within the block, by imports, from Python's garbage collector.

    torch, transformers and a service's own modules are 400,000 objects. Collections visit them again and again while
    they are made, which takes a fifth of the imports' processor time. 3 % of these objects are garbage, which stays for
    ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def give_back_freed_memory() -> None:
    """Returns unused pages to the system. Does nothing with another C library than glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
