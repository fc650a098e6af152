"""One copy of a base model's weights in host memory for all services of a machine.

Trainers and samplers read the base model's files, and lay the weights out in the same way. So the machine's memory
holds the same bytes several times. Here the first service writes its bytes into a file of memory (memfd), which
`tinsmith up` makes. The other services compare their bytes with the file. Each service then maps the file's pages at
the addresses of its own pages, which the kernel frees. No tensor changes. The mapping is private (MAP_PRIVATE): a
service that wrote to a weight would get its own page again, and no other service would see the change.

Two weights can have the same pages only if they begin at the same place of a page. Weights that were allocated within
`blocks_at_page_starts` (tinsmith/allocator.py) do.

The file is a list of records, each a page with a head (`_HEAD`) and then the bytes of whole pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from tinsmith.formatting import size_text
from tinsmith.modeling.lora import LoraLinear

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_HEAD = struct.Struct("<32sQ")
"""Head of a record: the key of its block, and the number of bytes."""
_MIN_BYTES = 256 * 1024
"""Smaller blocks keep their own pages."""
_LOCK_S = 600.0
"""Longest wait for the file's lock, in seconds. A service that was stopped (SIGSTOP) keeps its lock."""
_PRIVATE, _POPULATE = 0x02, 0x8000
"""Flags of Linux's mmap(2). Python's module mmap gives no addresses."""
_MAY_MOVE, _TO_ADDRESS = 1, 2
"""Flags of Linux's mremap(2)."""
_FAILED = ctypes.c_void_p(-1).value
FILE_NAME = "base-pages"
"""Name of the file of memory, as `tinsmith up` makes it."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The whole pages within the memory of a weight, or of several weights that are views of one memory."""

    key: bytes
    """Digest of the model, the weight's name and layout, and its place in the first page. Blocks with one key should
    have the same bytes."""
    start: int
    """Address of the first byte."""
    num_bytes: int

    @classmethod
    def of(cls, name: str, address: int, num_bytes: int) -> _Block:
        start, stop = -(-address // _PAGE) * _PAGE, (address + num_bytes) // _PAGE * _PAGE
        key = sha256(f"{name}, {start - address}, {num_bytes}".encode()).digest()
        return cls(key, start, stop - start)


def can_share(path: str, device: torch.device, *, trainable: bool, divided: bool) -> bool:
    """Whether services can share the pages of a model's weights. `path`: the file of memory; empty if there is none. A
    trainable model cannot be shared because its parameters change; a divided model, because its weights are not plain
    tensors."""
    return bool(path) and device.type == "cpu" and not trainable and not divided


def share_base(base: BaseModel, path: str) -> int:
    """Replaces the pages of the base model's frozen weights, and of their prepacked copies, by pages of the file of
    memory at `path` that hold the same bytes. Returns the number of bytes in replaced pages.

    Nothing may use the model meanwhile. The model must be one that `can_share` allows. An OSError is logged, for
    example when memory is full, and the remaining weights keep their own pages.
    """
    num_shared = 0
    try:
        with _locked(path) as file:
            places = dict(_places(file))
            for block in _blocks(base):
                if block.key not in places:
                    places[block.key] = _append(file, block)
                if _map(file, places[block.key], block):
                    num_shared += block.num_bytes
    except OSError as error:
        logger.warning("the base model's weights are not all shared with other services: base_pages: %s", error)
    else:
        logger.info("%s of the base model's weights are in pages that services share", size_text(num_shared))
    return num_shared


def _blocks(base: BaseModel) -> Iterator[_Block]:
    seen: set[int] = set()
    blocks = []
    for name, weight in base.parameters.items():
        memory = weight.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            layout = f"{base.weights_sum} {name} {weight.dtype} {weight.stride()}"
            blocks.append(_Block.of(layout, memory.data_ptr(), memory.nbytes()))
    packed = {
        layer.name: layer.prepacked
        for layer in base.decoder.modules()
        if isinstance(layer, LoraLinear) and layer.prepacked is not None
    }
    if base.head.prepacked is not None:
        packed["head"] = base.head.prepacked
    blocks += [_Block.of(f"{base.weights_sum} {name} prepacked", *copy.memory) for name, copy in packed.items()]
    return (block for block in blocks if block.num_bytes >= _MIN_BYTES)


@contextmanager
def _locked(path: str) -> Iterator[int]:
    """Opens and locks the file, so that no other service uses it within the block. Raises OSError unless `path` is a
    file of memory with the name FILE_NAME, because any other file would be overwritten. Raises TimeoutError if others
    hold the lock for _LOCK_S."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{FILE_NAME}"):
            raise OSError(f"{path!r} is no file of memory that tinsmith up has made")
        _lock(file)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing would not unlock: the mappings keep the file open
        os.close(file)


def _lock(file: int) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"another service has used the file for {_LOCK_S:g} s")
        time.sleep(0.05)


def _places(file: int) -> Iterator[tuple[bytes, int]]:
    """The key of each record, and the place in the file where its bytes begin. Cuts off a record without a head, which
    a service leaves that is killed while it writes."""
    place, end = 0, os.fstat(file).st_size
    while place < end:
        key, num_bytes = _HEAD.unpack(os.pread(file, _HEAD.size, place))
        if not num_bytes:
            os.ftruncate(file, place)
            return
        yield key, place + _PAGE
        place += _PAGE + num_bytes


def _append(file: int, block: _Block) -> int:
    """Appends a record, and returns the place where its bytes begin. After an OSError the file is as before."""
    end = os.fstat(file).st_size
    memory = memoryview((ctypes.c_char * block.num_bytes).from_address(block.start))
    try:
        written = 0
        while written < block.num_bytes:
            written += os.pwrite(file, memory[written:], end + _PAGE + written)
        os.pwrite(file, _HEAD.pack(block.key, block.num_bytes), end)
    except OSError:
        os.ftruncate(file, end)
        raise
    return end + _PAGE


def _map(file: int, place: int, block: _Block) -> bool:
    """Maps the block's pages from the file, at `place`. Returns False, and maps nothing, if the file has other bytes
    there."""
    libc, num_bytes = _libc(), block.num_bytes
    # The mapping is read-only at first: populating a writable one would make private copies of its pages.
    theirs = libc.mmap(None, num_bytes, mmap.PROT_READ, _PRIVATE | _POPULATE, file, place)
    if theirs == _FAILED:
        raise _error()
    if libc.memcmp(theirs, block.start, num_bytes):
        libc.munmap(theirs, num_bytes)
        return False
    # The move comes last, because it frees the weight's own pages.
    if (
        libc.mprotect(theirs, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        or libc.mremap(theirs, num_bytes, num_bytes, _MAY_MOVE | _TO_ADDRESS, block.start) == _FAILED
    ):
        error = _error()
        libc.munmap(theirs, num_bytes)
        raise error
    return True


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return libc
