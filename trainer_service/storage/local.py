"""Checkpoints on a local file system: the folder "<root>/<run>/<kind>/<name>/" has the files and their manifest.

A folder is written under a temporary name, synced and then renamed. So a checkpoint exists whole or not at all, even
after a power cut. Its files are never written again, so a copy of a checkpoint may share them (hard links).

A reader opens the folder first, and reads the files through the open folder. So a checkpoint can be replaced or deleted
at any time: its folder gets a temporary name, and is removed when the last reader of the location is done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tinsmith.errors import CheckpointNotFound, DataCorrupted
from trainer_service.metrics import Metrics
from trainer_service.storage import manifest
from trainer_service.storage.locations import Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import CERTIFICATE, STORE_ID, TEMPORARY, StorageUnusable, missing, taken
from trainer_service.storage.space import Space
from trainer_service.storage.uses import Uses

logger = logging.getLogger(__name__)

_REPLACED = "replaced-"
_LARGE_BYTES = 2**20
_OPEN_FOLDERS = Path("/proc/self/fd")
"""Paths of the folders that this process has open. They stay valid when a folder gets another name."""
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}


class LocalStorage:
    """The Storage in a local folder."""

    def __init__(self, root: Path, metrics: Metrics, *, min_free_bytes: int | None = None) -> None:
        """Creates the root, and cleans up after processes that died while they wrote. Raises StorageUnusable."""
        self._root = root
        self._temporary = root / TEMPORARY
        self._metrics = metrics
        self._uses = Uses()
        self._bookkeeping = threading.Lock()
        """Guards the two below. No file is touched while it is held."""
        self._readers: Counter[Location] = Counter()
        self._unread: dict[Location, list[Path]] = {}
        """Folders to remove when the last reader of their location is done."""
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._temporary, os.O_RDONLY)
        except OSError as error:
            raise StorageUnusable(f"the checkpoints' folder {root} cannot be used: {error}") from error
        # A live trainer holds a shared lock. So the exclusive lock is free only when no other trainer uses the root,
        # and all temporary folders are leftovers.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recover()
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        try:
            self.store_id = self._read_store_id()
        except OSError as error:
            raise StorageUnusable(f"the checkpoints' folder {root} cannot be used: {error}") from error
        self.space = Space(root, min_free_bytes=min_free_bytes, metrics=metrics)

    def close(self) -> None:
        """Releases the root for other processes. Nothing may be written afterwards."""
        os.close(self._lock)

    def _read_store_id(self) -> str:
        """Raises OSError."""
        path = self._root / STORE_ID
        if not path.exists():
            written = self._root / f"{STORE_ID}-{uuid.uuid4().hex}"
            written.write_text(uuid.uuid4().hex)
            sync(written)
            try:
                os.link(written, path)
                written.unlink()
            except FileExistsError:  # another trainer was the first
                written.unlink()
            except OSError:  # this file system has no links
                written.rename(path)
            sync(self._root)
        return path.read_text().strip()

    def exists(self, location: Location) -> bool:
        return (self.path(location) / manifest.NAME).exists()

    def run_ids(self) -> list[str]:
        return [path.name for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("~")]

    def names(self, run_id: str, kind: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in (self._root / run_id / kind).iterdir()]
        return []

    @contextlib.contextmanager
    def reading(self, location: Location) -> Iterator[Manifest]:
        with self._counted(location):
            descriptor = self._open(location)
            try:
                # Elsewhere than on Linux, a reader of a checkpoint that is replaced or deleted meanwhile fails.
                opened = _OPEN_FOLDERS / str(descriptor) if _OPEN_FOLDERS.exists() else self.path(location)
                found = self._read_manifest(location, folder=opened)
                yield replace(found, opened=opened)
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def files(self, location: Location, found: Manifest, names: Iterable[str]) -> Iterator[Path]:
        folder = self.folder(location, found)
        for name in names:
            found.verify(folder / name, location=str(location))
        yield folder

    def open_file(self, location: Location, name: str) -> BinaryIO:
        with self.reading(location) as found:
            found.check_has(name, location=str(location))
            try:
                file = (self.folder(location, found) / name).open("rb")
            except FileNotFoundError:
                raise found.damaged(name, "it is missing", location=str(location)) from None
        try:
            found.verify_open(name, file, location=str(location))
        except DataCorrupted:
            file.close()
            raise
        return file

    def certificate(self, location: Location, found: Manifest) -> bytes:
        return (self.folder(location, found) / CERTIFICATE).read_bytes()

    def put_certificate(self, location: Location, version_id: str, content: bytes) -> None:
        with self.scratch() as folder:
            written = folder / CERTIFICATE
            written.write_bytes(content)
            sync(written)
            with self._uses.writing(location), contextlib.suppress(CheckpointNotFound):
                found = self._read_manifest(location)
                if found.checkpoint.version_id == version_id:
                    written.rename(self.folder(location, found) / CERTIFICATE)

    def scratch(self) -> AbstractContextManager[Path]:
        """A temporary folder on the root's file system, so that it can be renamed into place."""
        return self.space.scratch(self._temporary)

    @contextlib.contextmanager
    def new(self, location: Location, *, overwrite: bool, num_bytes: int) -> Iterator[_LocalDraft]:
        if not overwrite and self.exists(location):
            raise taken(location)
        with self.space.reserve(num_bytes, what="it"), self.scratch() as folder:
            yield _LocalDraft(self, location, folder, overwrite)

    def delete(self, location: Location, *, version_id: str = "") -> None:
        with self._uses.writing(location):
            with contextlib.suppress(CheckpointNotFound, DataCorrupted):
                if version_id and self._read_manifest(location).checkpoint.version_id != version_id:
                    return
            aside = self._set_aside(self.path(location))
        self._remove(location, aside)

    def delete_all(self, run_id: str, kind: str) -> None:
        """Deletes the checkpoints one after the other."""
        for name in self.names(run_id, kind):
            self.delete(Location(run_id, kind, name))

    def path(self, location: Location) -> Path:
        return self._root / location.run_id / location.kind / location.name

    def folder(self, location: Location, found: Manifest) -> Path:
        """The folder of the files: that of the manifest, or one below it if the checkpoint was in an object store.
        For a reader it is the folder that was opened, whatever is at the location now."""
        return (found.opened or self.path(location)) / found.folder

    def install(self, folder: Path, location: Location, *, overwrite: bool) -> None:
        for path in folder.iterdir():
            sync(path)
        sync(folder)
        target = self.path(location)
        aside = self._temporary / f"{_REPLACED}{folder.name}"
        with self._uses.writing(location):
            if not overwrite and self.exists(location):
                raise taken(location)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                target.rename(aside)
            try:
                folder.rename(target)
            except OSError:
                if aside.exists():
                    aside.rename(target)
                raise
            aside = self._set_aside(aside)  # under a name from which a later start does not put it back
        for parent in (target.parent, target.parent.parent, self._root):
            sync(parent)
        self._remove(location, aside)

    def _remove(self, location: Location, aside: Path) -> None:
        """Removes a folder that was set aside, if it exists, or leaves that to the location's last reader."""
        with self._bookkeeping:
            if location in self._readers:
                self._unread.setdefault(location, []).append(aside)
                return
        shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def _counted(self, location: Location) -> Iterator[None]:
        """A context that counts as a reader. The last reader removes what was replaced or deleted meanwhile."""
        with self._bookkeeping:
            self._readers[location] += 1
        try:
            yield
        finally:
            unread: list[Path] = []
            with self._bookkeeping:
                self._readers[location] -= 1
                if not self._readers[location]:
                    del self._readers[location]
                    unread = self._unread.pop(location, [])
            for aside in unread:
                shutil.rmtree(aside, ignore_errors=True)

    def _open(self, location: Location) -> int:
        """Opens a checkpoint's folder and returns its descriptor. Raises CheckpointNotFound."""
        path = self.path(location)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with self._uses.writing(location):  # perhaps it is being replaced, and is just between its two renames
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                raise missing(location) from None

    def _set_aside(self, path: Path) -> Path:
        """Moves a folder, if it exists, to a temporary name, from which it can be deleted. Returns the new path."""
        aside = self._temporary / uuid.uuid4().hex
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            sync(path.parent)
        return aside

    def _recover(self) -> None:
        """Puts back checkpoints that were set aside when a process died between the two renames of an overwrite, and
        deletes all other temporary folders."""
        for folder in self._temporary.iterdir():
            if folder.name.startswith(_REPLACED):
                try:
                    data = (folder / manifest.NAME).read_bytes()
                    location = Manifest.parse(data, location=folder.name).checkpoint.location
                except (OSError, DataCorrupted) as error:
                    logger.warning("%s was being replaced and cannot be put back: %s", folder, error)
                    continue
                target = self.path(Location.parse(location, field="location"))
                if not target.exists():
                    folder.rename(target)
                    continue
            shutil.rmtree(folder)
            self._metrics.storage.swept_leftovers.inc()

    def _read_manifest(self, location: Location, *, folder: Path | None = None) -> Manifest:
        """Reads the manifest in a checkpoint's folder. `folder`: None means the folder of the location."""
        try:
            data = ((folder or self.path(location)) / manifest.NAME).read_bytes()
        except FileNotFoundError:
            raise missing(location) from None
        return Manifest.parse(data, location=str(location))


class _LocalDraft:
    def __init__(self, storage: LocalStorage, location: Location, folder: Path, overwrite: bool) -> None:
        self._storage = storage
        self._location = location
        self._overwrite = overwrite
        self.folder = folder

    def take(self, source: Location, found: Manifest, name: str) -> None:
        path = self._storage.folder(source, found) / name
        try:
            os.link(path, self.folder / name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._storage.space.check(path.stat().st_size, what="it")
            shutil.copyfile(path, self.folder / name)

    def begin_sync(self) -> None:
        for path in self.folder.iterdir():
            if path.stat().st_size > _LARGE_BYTES:
                threading.Thread(target=_begin_sync, args=[path], name="sync", daemon=True).start()

    def install(self, manifest: Manifest) -> None:
        manifest.write(self.folder)
        self._storage.install(self.folder, self._location, overwrite=self._overwrite)


def _begin_sync(path: Path) -> None:
    """Errors are those of `install`, which syncs again; after a failed save the file is gone."""
    with contextlib.suppress(OSError):
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
