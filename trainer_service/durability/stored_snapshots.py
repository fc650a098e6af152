"""Snapshots in the storage of the checkpoints, for a journal in PostgreSQL: both outlive this machine.

They lie below a root of their own, "<checkpoint_dir>/~snapshots/<id of the journal's tables>", as checkpoints of the
kind "weights" whose name is the seq_id. Their files are those of snapshot_files.py. All trainers with the same database
share the root, so that one can read what another has written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from tinsmith.errors import CheckpointNotFound, DataCorrupted, NotReady
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import types_pb2 as pb
from trainer_service.durability.snapshot_files import load_state, newest_first, num_bytes_of, save_state
from trainer_service.engine.engine import CapturedState
from trainer_service.storage import manifest
from trainer_service.storage.locations import KINDS, Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import Storage

logger = logging.getLogger(__name__)

FOLDER = "~snapshots"
"""Folder of all snapshots below the root of the checkpoints. No run can have this name."""
_KIND = KINDS[pb.CHECKPOINT_KIND_TRAINING]
_READ_AGAIN_S = 1.0
"""Pause between two attempts to read from a storage that cannot be reached, in seconds."""

T = TypeVar("T")


class SnapshotStore(Protocol):
    """Writes, reads and deletes snapshots. There are two: SnapshotFiles and StoredSnapshots.

    The methods block. Several threads may call them, but only one at a time for each model.
    """

    def write(self, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> int:
        """Writes a snapshot. Returns its size in bytes once it is durable. After an OSError or ServiceError nothing is
        left of it."""
        ...

    def seq_ids(self, model_id: str) -> list[int]:
        """seq_ids of a model's snapshots, damaged ones included, the newest first."""
        ...

    def verify(self, model_id: str, seq_id: int) -> pb.CheckpointInfo:
        """Reads a whole snapshot and compares it with its manifest. Raises DataCorrupted, which names the file."""
        ...

    def read(self, model_id: str, seq_id: int, base: BaseModel) -> tuple[pb.CheckpointInfo, CapturedState]:
        """Reads a snapshot's state. Raises DataCorrupted when it cannot be read, or was made for other layers."""
        ...

    def delete(self, model_id: str, seq_ids: Iterable[int]) -> None:
        """Deletes snapshots, those that exist."""
        ...

    def delete_all(self, model_id: str) -> None: ...

    def model_ids(self) -> list[str]:
        """Ids of the models that have snapshots, damaged ones included."""
        ...


class StoredSnapshots:
    """The SnapshotStore in a storage of checkpoints.

    Reading waits for a storage that cannot be reached, however long that takes: a model that could not be read would
    count as lost. What cannot be deleted is left to the next start.
    """

    def __init__(self, storage: Storage) -> None:
        """`storage`: one with the snapshots' root."""
        self._storage = storage

    def write(self, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> int:
        location = _location(info.model_id, seq_id)
        stored = pb.CheckpointInfo()
        stored.CopyFrom(info)
        stored.location = str(location)
        with self._storage.new(location, overwrite=True, num_bytes=num_bytes_of(state)) as draft:
            save_state(draft.folder, state)
            written = Manifest.of(stored, [manifest.describe(path) for path in sorted(draft.folder.iterdir())])
            draft.install(written)
        return written.checkpoint.size_bytes

    def seq_ids(self, model_id: str) -> list[int]:
        return newest_first(_patiently(lambda: self._storage.names(model_id, _KIND)))

    def verify(self, model_id: str, seq_id: int) -> pb.CheckpointInfo:
        def call() -> pb.CheckpointInfo:
            location = _location(model_id, seq_id)
            with self._storage.reading(location) as found, self._storage.files(location, found, found.files):
                return found.checkpoint

        return _read(call, name=f"{model_id}/{seq_id}")

    def read(self, model_id: str, seq_id: int, base: BaseModel) -> tuple[pb.CheckpointInfo, CapturedState]:
        def call() -> tuple[pb.CheckpointInfo, CapturedState]:
            location = _location(model_id, seq_id)
            with (
                self._storage.reading(location) as found,
                self._storage.files(location, found, found.files) as folder,
            ):
                return found.checkpoint, load_state(folder, found, base, name=f"{model_id}/{seq_id}")

        return _read(call, name=f"{model_id}/{seq_id}")

    def delete(self, model_id: str, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._try(lambda seq_id=seq_id: self._storage.delete(_location(model_id, seq_id)), model_id)

    def delete_all(self, model_id: str) -> None:
        self._try(lambda: self._storage.delete_all(model_id, _KIND), model_id)

    def model_ids(self) -> list[str]:
        return sorted(_patiently(self._storage.run_ids))

    def _try(self, call: Callable[[], object], model_id: str) -> None:
        try:
            call()
        except (NotReady, OSError) as error:
            logger.warning("snapshots of %s are not deleted now: %s", model_id, error)


def _location(model_id: str, seq_id: int) -> Location:
    return Location(model_id, _KIND, str(seq_id))


def _read(call: Callable[[], T], *, name: str) -> T:
    try:
        return _patiently(call)
    except (CheckpointNotFound, OSError) as error:
        raise DataCorrupted(f"the snapshot {name} cannot be read: {error}") from None


def _patiently(call: Callable[[], T]) -> T:
    while True:
        try:
            return call()
        except NotReady as error:
            logger.warning("snapshots cannot be read, which is tried again: %s", error)
        time.sleep(_READ_AGAIN_S)
