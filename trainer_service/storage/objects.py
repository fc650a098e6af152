"""Checkpoints in an object store, through fsspec: s3://BUCKET/PREFIX (s3fs), gs://BUCKET/PREFIX (gcsfs).

    <run>/<kind>/<name>/manifest.json         names the generation that is the checkpoint
    <run>/<kind>/<name>/<generation>/...      the files of one save
    ~tmp/<writer>/<run>/<kind>/<name>/<generation>   a marker: delete these files, unless the manifest names them
    ~store-id                              id of the store

A store writes an object as a whole. So the manifest, which is written last, makes a checkpoint or replaces one.

A marker is written before the first file of a generation, and again before a generation is deleted. So the markers list
all that a dead writer has left. A writer is a trainer with its state folder: when it starts, its markers are those of a
dead process. Markers of other writers are left alone until they are old.

If a generation is being read, it is deleted when its last reader is done. A file is copied to this machine and compared
with the manifest before it is read.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from tinsmith.errors import CheckpointNotFound, DataCorrupted, NotReady, ServiceError
from trainer_service.metrics import Metrics
from trainer_service.storage import manifest
from trainer_service.storage.locations import Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import CERTIFICATE, STORE_ID, TEMPORARY, StorageUnusable, missing, taken
from trainer_service.storage.space import Space
from trainer_service.storage.uses import Uses

logger = logging.getLogger(__name__)

_EXTRAS = {"s3": "s3", "gs": "gcs"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard"}}},
    "gs": {},
}
_FLAT = "flat"
"""Generation, in a marker's name, of a checkpoint whose files lie beside the manifest: it was copied here from a local
folder."""
_ABANDONED_S = 86400.0
"""Age at which a marker of another writer counts as a dead writer's, in seconds."""

_Generation = tuple[Location, str]


class ObjectStorage:
    """The Storage in an object store."""

    def __init__(
        self,
        url: str,
        metrics: Metrics,
        *,
        scratch: Path,
        writer: str,
        min_free_bytes: int | None = None,
        abandoned_s: float = _ABANDONED_S,
    ) -> None:
        """Tries to write and read, then cleans up after dead writers.

        `scratch`: a local folder of this process alone, which is emptied. `abandoned_s`: age at which a marker of
        another writer counts as a dead writer's, in seconds. Raises StorageUnusable.
        """
        protocol, _, rest = url.partition("://")
        self._url = url.rstrip("/")
        self._root = rest.rstrip("/")
        self._writer = writer
        self._metrics = metrics
        self._uses = Uses()
        """Excludes writers from each other only: readers of a replaced checkpoint go on with the old generation."""
        self._bookkeeping = threading.Lock()
        """Guards the two below. No call to the store is made while it is held."""
        self._readers: Counter[tuple[Location, str | None]] = Counter()
        """Number of readers by generation; None stands for readers that have not read the manifest yet."""
        self._unread: set[_Generation] = set()
        """Generations to delete when their last reader is done."""
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._scratch = scratch
        self.space = Space(scratch, min_free_bytes=min_free_bytes, metrics=metrics)
        try:
            self._fs: Any = fsspec.filesystem(protocol, use_listings_cache=False, **_OPTIONS[protocol])
            self._try()
            self.store_id = self._read_store_id()
        except ImportError as error:
            extra = f"pip install 'tinsmith[{_EXTRAS[protocol]}]'"
            raise StorageUnusable(
                f"checkpoint_dir {url} needs a package that is not installed: {extra} ({error})"
            ) from None
        except Exception as error:
            raise StorageUnusable(f"checkpoint_dir {url} cannot be used: {_reason(error)}") from error
        self._sweep(abandoned_s)

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def exists(self, location: Location) -> bool:
        return self._call("exists", self._manifest_key(location))

    def run_ids(self) -> list[str]:
        return [name for name in self._list(self._root) if not name.startswith("~")]

    def names(self, run_id: str, kind: str) -> list[str]:
        return self._list(f"{self._root}/{run_id}/{kind}")

    @contextlib.contextmanager
    def reading(self, location: Location) -> Iterator[Manifest]:
        with contextlib.ExitStack() as stack:
            with self._counted(location, None):
                found = self._read_manifest(location)
                stack.enter_context(self._counted(location, found.folder))
            yield found

    @contextlib.contextmanager
    def files(self, location: Location, found: Manifest, names: Iterable[str]) -> Iterator[Path]:
        names = list(names)
        num_bytes = sum(found.files[name].size_bytes for name in names if name in found.files)
        with self.space.reserve(num_bytes, what=f"reading {location}"), self.scratch() as folder:
            for name in names:
                self._fetch(location, found, name, folder)
            yield folder

    def open_file(self, location: Location, name: str) -> BinaryIO:
        with self.reading(location) as found:
            found.check_has(name, location=str(location))
            with self.files(location, found, [name]) as folder:
                return (folder / name).open("rb")  # an open file stays readable after its folder is deleted

    def certificate(self, location: Location, found: Manifest) -> bytes:
        return self._call("cat_file", self._key(location, found.folder, CERTIFICATE))

    def put_certificate(self, location: Location, version_id: str, content: bytes) -> None:
        with self._uses.writing(location), contextlib.suppress(CheckpointNotFound):
            found = self._read_manifest(location)
            if found.checkpoint.version_id == version_id:
                self._call("pipe_file", self._key(location, found.folder, CERTIFICATE), content)

    def scratch(self) -> AbstractContextManager[Path]:
        return self.space.scratch(self._scratch)

    @contextlib.contextmanager
    def new(self, location: Location, *, overwrite: bool, num_bytes: int) -> Iterator[_ObjectDraft]:
        if not overwrite and self.exists(location):
            raise taken(location)
        generation = uuid.uuid4().hex
        with self.space.reserve(num_bytes, what="it"), self.scratch() as folder:
            self._mark(location, generation)
            try:
                yield _ObjectDraft(self, location, generation, folder, overwrite)
            finally:
                with contextlib.suppress(ServiceError):  # the marker stays, and a later start cleans up
                    self._settle(location, generation)

    def delete(self, location: Location, *, version_id: str = "") -> None:
        try:
            with self._uses.writing(location):
                found = self._read_manifest(location)
                if version_id and found.checkpoint.version_id != version_id:
                    return
                self._mark(location, found.folder)
                self._call("rm_file", self._manifest_key(location))
        except CheckpointNotFound:
            return
        except DataCorrupted:
            self._delete_keys([self._manifest_key(location)])
            self._delete_keys(self._find(self._key(location)))
            return
        self._settle(location, found.folder)

    def delete_all(self, run_id: str, kind: str) -> None:
        """Deletes manifests first, then the files. After a failure, another call deletes what is left."""
        keys = self._find(f"{self._root}/{run_id}/{kind}")
        manifests = [key for key in keys if key.endswith(f"/{manifest.NAME}")]
        self._delete_keys(manifests)
        self._delete_keys([key for key in keys if key not in set(manifests)])

    def upload(self, location: Location, generation: str, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            self._call("put_file", str(path), self._key(location, generation, path.name))

    def copy_file(self, source: Location, found: Manifest, name: str, location: Location, generation: str) -> None:
        """Copies within the store, without the bytes passing through this machine. Raises FileNotFoundError."""
        self._call("cp_file", self._key(source, found.folder, name), self._key(location, generation, name))

    def install(self, new: Manifest, location: Location, *, overwrite: bool) -> None:
        old: str | None = None
        with self._uses.writing(location):
            with contextlib.suppress(CheckpointNotFound, DataCorrupted):
                old = self._read_manifest(location).folder
            if old is not None:
                if not overwrite:
                    raise taken(location)
                self._mark(location, old)
            self._call("pipe_file", self._manifest_key(location), new.to_bytes())
        if old is not None:
            with contextlib.suppress(ServiceError):
                self._settle(location, old)

    # Generations

    def _mark(self, location: Location, generation: str) -> None:
        self._call("pipe_file", self._marker(location, generation), b"")

    def _settle(self, location: Location, generation: str) -> bool:
        """Deletes a marked generation's files, unless the manifest names it, and its marker. While the generation is
        being read, both stay until the last reader is done. Returns True when files were deleted."""
        with self._uses.writing(location):
            try:
                kept = self._read_manifest(location).folder == generation
            except CheckpointNotFound:
                kept = False
            if kept:
                self._delete_keys([self._marker(location, generation)])
                return False
        with self._bookkeeping:
            if self._is_read(location, generation):
                self._unread.add((location, generation))
                return False
        return self._remove(location, generation)

    def _is_read(self, location: Location, generation: str) -> bool:
        return (location, generation) in self._readers or (location, None) in self._readers

    @contextlib.contextmanager
    def _counted(self, location: Location, generation: str | None) -> Iterator[None]:
        """A context that counts as a reader. At its end, generations that only this reader kept are deleted."""
        with self._bookkeeping:
            self._readers[location, generation] += 1
        try:
            yield
        finally:
            with self._bookkeeping:
                self._readers[location, generation] -= 1
                if not self._readers[location, generation]:
                    del self._readers[location, generation]
                going = {one for one in self._unread if one[0] == location and not self._is_read(*one)}
                self._unread -= going
            for one in going:
                with contextlib.suppress(NotReady):  # the marker stays, and a later start cleans up
                    self._remove(*one)

    def _remove(self, location: Location, generation: str) -> bool:
        folder = self._key(location, generation)
        keys = self._find(folder)
        if not generation:  # the files lie beside the manifest and beside the folders of other generations
            keys = [key for key in keys if "/" not in key.removeprefix(f"{folder}/")]
            keys = [key for key in keys if key != self._manifest_key(location)]
        self._delete_keys(keys)
        self._delete_keys([self._marker(location, generation)])
        return bool(keys)

    def _sweep(self, abandoned_s: float) -> None:
        base = f"{self._root}/{TEMPORARY}"
        for key in self._find(base):
            try:
                writer, *parts, generation = key.removeprefix(f"{base}/").split("/")
                location = Location.parse("/".join(parts), field="marker")
                if writer != self._writer and time.time() - self._call("modified", key).timestamp() < abandoned_s:
                    continue
                if writer != self._writer:
                    self._mark(location, "" if generation == _FLAT else generation)
                    self._delete_keys([key])
                if self._settle(location, "" if generation == _FLAT else generation):
                    self._metrics.storage.swept_leftovers.inc()
            except FileNotFoundError:  # its writer, who is alive, has removed the marker meanwhile
                continue
            except (ServiceError, ValueError) as error:
                logger.warning("%s://%s is left where it is: %s", self._url.partition("://")[0], key, error)

    # Objects

    def _key(self, location: Location, *parts: str) -> str:
        return "/".join(part for part in (self._root, str(location), *parts) if part)

    def _manifest_key(self, location: Location) -> str:
        return self._key(location, manifest.NAME)

    def _marker(self, location: Location, generation: str) -> str:
        return f"{self._root}/{TEMPORARY}/{self._writer}/{location}/{generation or _FLAT}"

    def _read_manifest(self, location: Location) -> Manifest:
        try:
            data = self._call("cat_file", self._manifest_key(location))
        except FileNotFoundError:
            raise missing(location) from None
        return Manifest.parse(data, location=str(location))

    def _fetch(self, location: Location, found: Manifest, name: str, folder: Path) -> None:
        key = self._key(location, found.folder, name)
        for is_last in (False, True):
            try:
                self._call("get_file", key, str(folder / name))
                return found.verify(folder / name, location=str(location))
            except FileNotFoundError:
                if not self.exists(location):
                    raise missing(location) from None
                raise found.damaged(name, "it is missing", location=str(location)) from None
            except DataCorrupted:
                if is_last:  # two copies were damaged, so the damage is in the store and not in the transfer
                    raise

    def _find(self, folder: str) -> list[str]:
        return self._call("find", f"{folder}/")

    def _list(self, folder: str) -> list[str]:
        """Names of the objects and folders in a folder."""
        with contextlib.suppress(FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._call("ls", f"{folder}/", False)]
        return []

    def _delete_keys(self, keys: list[str]) -> None:
        if keys:
            with contextlib.suppress(FileNotFoundError):
                self._call("rm", keys)

    def _try(self) -> None:
        probe = f"{self._root}/{TEMPORARY}/{self._writer}/probe"
        self._fs.pipe_file(probe, b"tinsmith")
        self._fs.cat_file(probe)
        self._fs.rm_file(probe)

    def _read_store_id(self) -> str:
        key = f"{self._root}/{STORE_ID}"
        if not self._fs.exists(key):
            made = uuid.uuid4().hex.encode()
            with contextlib.suppress(Exception):  # another trainer may be the first
                self._fs.pipe_file(key, made, mode="create")
            if not self._fs.exists(key):  # the store does not know conditional writes
                self._fs.pipe_file(key, made)
        return self._fs.cat_file(key).decode().strip()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the file system. Raises FileNotFoundError, other OSErrors of this machine (a full disk),
        and NotReady for any other error of the store."""
        try:
            return getattr(self._fs, method)(*arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # each protocol's library has errors of its own
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, PermissionError):
                raise
            raise NotReady(f"{method} in {self._url} failed: {_reason(error)}") from error


class _ObjectDraft:
    def __init__(
        self, storage: ObjectStorage, location: Location, generation: str, folder: Path, overwrite: bool
    ) -> None:
        self._storage = storage
        self._location = location
        self._generation = generation
        self._overwrite = overwrite
        self.folder = folder

    def take(self, source: Location, found: Manifest, name: str) -> None:
        self._storage.copy_file(source, found, name, self._location, self._generation)

    def begin_sync(self) -> None:
        """Does nothing: the folder's disk keeps no checkpoint."""

    def install(self, manifest: Manifest) -> None:
        self._storage.upload(self._location, self._generation, self.folder)
        made = replace(manifest, folder=self._generation)
        self._storage.install(made, self._location, overwrite=self._overwrite)


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError):
        return f"no permission ({error})"
    if "Credential" in name or "Unauthorized" in str(error):
        return f"no credentials, or wrong ones ({error})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket ({error})"
    return f"{name}: {error}"
