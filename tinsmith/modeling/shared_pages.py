"""One copy of a base model's weights in host memory for all services of a machine.

Trainers and samplers read the base model's files, and lay the weights out in the same way. So their memory holds the
same bytes several times. Here the first of them writes its bytes into a file of memory, which `tinsmith up` makes. The
others compare their bytes with the file's. Each maps the file's pages at the addresses of its own pages, which the
kernel then frees. No tensor changes. The mapping is private (MAP_PRIVATE): a service that wrote to a weight would get
its own page again, and no other service would see the change.

Two weights can have the same pages only if they begin at the same place of a page. Those that were allocated within
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
"""The key of a record's block, and the number of bytes."""
_MIN_BYTES = 256 * 1024
"""Smaller blocks keep their own pages."""
_LOCK_S = 600.0
"""Longest wait for other services to be done with the file, in seconds. One that was stopped keeps its lock."""
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
    """Whether the pages of a model's weights can be those of other services. Parameters that are all trained change,
    and the memory of a divided model is not that of plain tensors."""
    return bool(path) and device.type == "cpu" and not trainable and not divided


def share_base(base: BaseModel, path: str) -> int:
    """Maps the pages of the file of memory at `path` in place of the pages with the base model's frozen weights and
    their prepacked copies, where the bytes are the same. Returns the number of bytes in such pages.

    Nothing may use the model meanwhile. It must be one that `can_share` allows. An OSError, such as for memory that is
    full, is logged, and the remaining weights keep their own pages.
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
    """The open file, which no other service uses within the block. Raises OSError for a path that is no file of memory
    with FILE_NAME, because another file would be overwritten, and TimeoutError if others use it for _LOCK_S."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{FILE_NAME}"):
            raise OSError(f"{path!r} is no file of memory that tinsmith up has made")
        _lock(file)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # the mappings keep the file open, and would keep its lock
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
    """The key of each record, and where in the file its bytes begin. Cuts off a record without a head: the service that
    wrote it was killed meanwhile."""
    place, end = 0, os.fstat(file).st_size
    while place < end:
        key, num_bytes = _HEAD.unpack(os.pread(file, _HEAD.size, place))
        if not num_bytes:
            os.ftruncate(file, place)
            return
        yield key, place + _PAGE
        place += _PAGE + num_bytes


def _append(file: int, block: _Block) -> int:
    """Appends a record, and returns where its bytes begin. After an OSError the file is as before."""
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
    """Maps the block's pages from the file. Returns False, and maps nothing, if the file has other bytes there."""
    libc, num_bytes = _libc(), block.num_bytes
    # Populating a mapping that may be written would make private copies of its pages.
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
