"""What a checkpoint store asks of the place where the files lie. There are two: local.py and objects.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from tinsmith.rpc.errors import CheckpointExists
from trainer_service.storage.locations import Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.space import Space

TEMPORARY = "~tmp"
"""Not the name of any run."""
CERTIFICATE = "certificate.json"


class StorageUnusable(Exception):
    """The configured place cannot be used; the message names it and says why."""


class Draft(Protocol):
    """A checkpoint that is being made."""

    folder: Path
    """On this machine, empty at first: what is written into it belongs to the checkpoint."""

    def take(self, source: Location, found: Manifest, name: str) -> None:
        """Adds a file of another checkpoint, which is being read, without a copy of its bytes where that is possible.

        Raises FileNotFoundError when it is not there.
        """
        ...

    def install(self, manifest: Manifest) -> None:
        """Now it is there, as a whole, and durable. Raises CheckpointExists."""
        ...


class Storage(Protocol):
    """The methods block, and may be called from several threads. All raise NotReady when the place cannot be reached,
    OutOfCapacity when it is full."""

    @property
    def space(self) -> Space:
        """Of the disk that is written to on this machine."""
        ...

    def close(self) -> None: ...

    def exists(self, location: Location) -> bool: ...

    def reading(self, location: Location) -> AbstractContextManager[Manifest]:
        """While the block runs, the checkpoint's files stay what they are. Raises CheckpointNotFound, DataCorrupted."""
        ...

    def files(self, location: Location, found: Manifest, names: Iterable[str]) -> AbstractContextManager[Path]:
        """A folder of this machine that has these files of a checkpoint that is being read. Raises DataCorrupted when
        one is not what was written."""
        ...

    def open_file(self, location: Location, name: str) -> BinaryIO:
        """One of the manifest's files, which stays readable when the checkpoint goes.

        Raises NotFound for another name, CheckpointNotFound, and DataCorrupted unless it is what was written.
        """
        ...

    def certificate(self, location: Location, found: Manifest) -> bytes:
        """Of a checkpoint that is being read. Raises FileNotFoundError when there is none."""
        ...

    def put_certificate(self, location: Location, version_id: str, content: bytes) -> None:
        """Does nothing when the version is no longer there."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """An empty folder on this machine, which is gone afterwards."""
        ...

    def new(self, location: Location, *, overwrite: bool, num_bytes: int) -> AbstractContextManager[Draft]:
        """`num_bytes`: what will be written into its folder. What is not installed in the block leaves nothing.

        Raises CheckpointExists when the location is taken and `overwrite` is false.
        """
        ...

    def delete(self, location: Location, *, version_id: str = "") -> None:
        """An unknown one is no error. Given a version, another one stays; what is damaged goes."""
        ...

    def delete_all(self, run_id: str, kind: str) -> None: ...


def taken(location: Location) -> CheckpointExists:
    instead = ", or overwrite=true" if location.kind == "weights" else ", or delete it"
    return CheckpointExists(f"checkpoint {location} exists; use another name{instead}", location=location)
