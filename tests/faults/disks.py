"""Disks that a test can fill and empty again."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from tests.faults.cluster import Process

_PIECE_BYTES = 256 * 1024


class Disk(Protocol):
    def fill(self) -> None:
        """No file on it can grow from now on."""

    def empty(self) -> None:
        """There is room again."""


class SmallDisk:
    """A file system of its own, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as filler:
            piece = bytes(_PIECE_BYTES)
            while piece:
                try:
                    filler.write(piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece = piece[: len(piece) // 2]

    def empty(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    """Mounted at `folder`; raises PermissionError for who may not mount."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise PermissionError(mounted.stderr.strip())
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class SizeLimit:
    """A limit of file sizes for one process: its every write to a file fails, with EFBIG. Any user can set it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def fill(self) -> None:
        psutil.Process(self._process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))

    def empty(self) -> None:
        psutil.Process(self._process.pid).rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
