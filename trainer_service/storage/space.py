"""Free space on the disk: a write that would fill the disk is refused before it begins."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from tinsmith.errors import OutOfCapacity
from trainer_service.metrics import Metrics

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DEFAULT_SHARE = 20
_DEFAULT_MOST_BYTES = 2**30


def least_free_bytes(folder: Path, asked: int | None) -> int:
    """Bytes that must stay free on the disk of an existing folder: `asked`, or if that is None a twentieth of the disk,
    at most 1 GiB."""
    if asked is not None:
        return asked
    return min(shutil.disk_usage(folder).total // _DEFAULT_SHARE, _DEFAULT_MOST_BYTES)


class Space:
    """Free space on the disk of one folder, and the reservations of writes in progress."""

    def __init__(self, folder: Path, *, min_free_bytes: int | None, metrics: Metrics) -> None:
        """`folder`: an existing folder on the disk. `min_free_bytes`: see `least_free_bytes`."""
        self._folder = folder
        self._metrics = metrics
        self.min_free_bytes = least_free_bytes(folder, min_free_bytes)
        self._reserved = 0
        self._num_released = 0
        """Number of reservations that have ended."""
        self._lock = threading.Lock()
        """Guards the two above. The disk is not asked while it is held, because a disk that hangs would stop all."""
        metrics.storage.storage_free_bytes.set_function(lambda: self.free_bytes)

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def check(self, num_bytes: int, *, what: str) -> None:
        """Raises OutOfCapacity when so many bytes do not fit beside the reserved ones. `what`: subject of the
        message."""
        self._take(num_bytes, what, reserves=False)

    @contextlib.contextmanager
    def reserve(self, num_bytes: int, *, what: str) -> Iterator[None]:
        """A context in which these bytes are reserved for the caller. Raises OutOfCapacity."""
        self._take(num_bytes, what, reserves=True)
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= num_bytes
                self._num_released += 1

    def _take(self, num_bytes: int, what: str, *, reserves: bool) -> None:
        """Raises OutOfCapacity when the bytes do not fit. Else reserves them if `reserves`."""
        while True:
            num_released, free = self._num_released, self.free_bytes
            with self._lock:
                if num_released != self._num_released:
                    continue  # bytes that were written under an ended reservation may be missing in both numbers
                others = self._reserved
                if num_bytes + others + self.min_free_bytes <= free:
                    self._reserved += num_bytes if reserves else 0
                    return
            break
        self._metrics.storage.refused_saves.inc()
        promised = f", {others} more are promised to others" if others else ""
        raise OutOfCapacity(
            f"{what} needs {num_bytes} bytes{promised}, and {free} are free under {self._folder}, of which "
            f"{self.min_free_bytes} must stay free (min_free_bytes); delete checkpoints, or make room",
            needed_bytes=str(num_bytes),
            free_bytes=str(free),
            min_free_bytes=str(self.min_free_bytes),
        )

    @contextlib.contextmanager
    def full_disk_said(self) -> Iterator[None]:
        """A context that raises OutOfCapacity when the disk becomes full within it."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if _is_full(error):
                raise OutOfCapacity(f"no space left under {self._folder} ({error})") from error
            raise

    @contextlib.contextmanager
    def scratch(self, parent: Path) -> Iterator[Path]:
        """A context with an empty temporary folder below `parent`. A full disk raises OutOfCapacity."""
        folder = parent / uuid.uuid4().hex
        try:
            with self.full_disk_said():
                folder.mkdir()
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"os error {number}" in str(error) for number in _FULL)  # safetensors passes on the text of Rust's error
