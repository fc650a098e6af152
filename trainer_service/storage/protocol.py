"""The interface between the checkpoint store and its storage. There are two storages: local.py and objects.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from tinsmith.errors import CheckpointExists, CheckpointNotFound
from trainer_service.storage.locations import Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.space import Space

TEMPORARY = "~tmp"
"""Folder for unfinished work, below the root. No run can have this name."""
CERTIFICATE = "certificate.json"
STORE_ID = "~store-id"
"""File or object below the root with the id of the store. No run can have this name."""


class StorageUnusable(Exception):
    """The configured storage cannot be used. The message names it and says why."""


class Draft(Protocol):
    """A checkpoint that is being written."""

    folder: Path
    """A folder on this machine, empty at first. Files written into it become the checkpoint's."""

    def take(self, source: Location, found: Manifest, name: str) -> None:
        """Adds a file of another checkpoint, which the caller is reading. Its bytes are not copied where that is
        possible.

        Raises FileNotFoundError when the file is missing.
        """
        ...

    def begin_sync(self) -> None:
        """Starts to bring the files that are in the folder to the disk, which `install` waits for: they can be hashed
        meanwhile."""
        ...

    def install(self, manifest: Manifest) -> None:
        """Makes the checkpoint exist, whole and durable. Raises CheckpointExists."""
        ...


class Storage(Protocol):
    """Stores the files of checkpoints.

    The methods block, and may be called from several threads. All raise NotReady when the storage cannot be reached and
    OutOfCapacity when it is full.
    """

    @property
    def store_id(self) -> str:
        """Random id of the store, made by the first trainer that opened it: 32 hexadecimal digits. All trainers with
        this store have the same."""
        ...

    @property
    def space(self) -> Space:
        """Free space on the disk of this machine that the storage writes to."""
        ...

    def close(self) -> None: ...

    def exists(self, location: Location) -> bool: ...

    def run_ids(self) -> list[str]:
        """Ids of the runs that have checkpoints; also of some that no longer have any."""
        ...

    def names(self, run_id: str, kind: str) -> list[str]:
        """Names of a run's checkpoints of one kind; also of some that were only begun, or are damaged."""
        ...

    def reading(self, location: Location) -> AbstractContextManager[Manifest]:
        """A context in which the checkpoint's files can be read as they were at its beginning, also after the
        checkpoint is replaced or deleted. Nobody waits for its end. Raises CheckpointNotFound, DataCorrupted."""
        ...

    def files(self, location: Location, found: Manifest, names: Iterable[str]) -> AbstractContextManager[Path]:
        """A context with a folder on this machine that has these files of a checkpoint, which the caller is reading.

        Raises DataCorrupted when a file differs from the manifest.
        """
        ...

    def open_file(self, location: Location, name: str) -> BinaryIO:
        """Opens one of the manifest's files. It stays readable when the checkpoint is deleted.

        Raises CheckpointNotFound, NotFound when the manifest has no file of this name, and DataCorrupted when the file
        differs from the manifest.
        """
        ...

    def certificate(self, location: Location, found: Manifest) -> bytes:
        """The certificate of a checkpoint that the caller is reading. Raises FileNotFoundError when it has none."""
        ...

    def put_certificate(self, location: Location, version_id: str, content: bytes) -> None:
        """Stores a version's certificate. Does nothing when the location no longer holds that version."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """A context with an empty temporary folder on this machine. A full disk raises OutOfCapacity."""
        ...

    def new(self, location: Location, *, overwrite: bool, num_bytes: int) -> AbstractContextManager[Draft]:
        """A context for writing a checkpoint. `num_bytes`: bytes that will be written into the draft's folder.

        A draft that is not installed within the context is discarded. Raises CheckpointExists when the location is
        taken and `overwrite` is false.
        """
        ...

    def delete(self, location: Location, *, version_id: str = "") -> None:
        """Deletes a checkpoint, if it exists. Its readers go on, and the last one frees the space. With a `version_id`,
        a checkpoint of another version stays; one whose manifest is damaged is deleted."""
        ...

    def delete_all(self, run_id: str, kind: str) -> None:
        """Deletes all checkpoints of one kind of a run."""
        ...


def missing(location: Location) -> CheckpointNotFound:
    return CheckpointNotFound(f"there is no checkpoint {location}", location=location)


def taken(location: Location) -> CheckpointExists:
    instead = ", or overwrite=true" if location.kind == "weights" else ", or delete it"
    return CheckpointExists(f"checkpoint {location} exists; use another name{instead}", location=location)
