"""Packages: all that a trainer hands over of a model that moves to another trainer.

The trainers share a store of checkpoints. A package lies there below a root of its own, "<checkpoint_dir>/~moving", as
a checkpoint of the kind "weights" whose name is the id of the move. It consists of the files of the model's newest
snapshot (snapshot_files.py) and of `run.sqlite`, which has the model's rows of the journal (run_file.py). A package
exists whole or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import CheckpointNotFound, DataCorrupted, FailedPrecondition, OutOfCapacity
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import types_pb2 as pb
from trainer_service.durability.snapshot_files import load_state, num_bytes_of, save_state
from trainer_service.engine.engine import CapturedState
from trainer_service.storage import manifest
from trainer_service.storage.locations import KINDS, Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import Storage

FOLDER = "~moving"
"""Name of the packages' root, a folder below the root of the checkpoints. No run can have this name."""
ROWS = "run.sqlite"
"""Name of the file with the model's rows of the journal."""
_KIND = KINDS[pb.CHECKPOINT_KIND_TRAINING]


class Packages:
    """Writes, reads and deletes packages. The methods block. They raise NotReady when the store cannot be reached and
    OutOfCapacity when it is full."""

    def __init__(self, storage: Storage) -> None:
        """`storage`: a Storage whose root is the packages' root."""
        self._storage = storage

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A context that gives an empty temporary folder on this machine."""
        with self._storage.scratch() as folder:
            yield folder

    def write(self, move_id: str, info: pb.CheckpointInfo, state: CapturedState, rows: Path) -> None:
        """Writes a package, and returns once it is durable. Replaces an earlier package of the same move. `info` and
        `state`: the snapshot. `rows`: a file made by run_file.py."""
        location = _location(info.model_id, move_id)
        stored = pb.CheckpointInfo()
        stored.CopyFrom(info)
        stored.location = str(location)
        num_bytes = num_bytes_of(state) + rows.stat().st_size
        try:
            with self._storage.new(location, overwrite=True, num_bytes=num_bytes) as draft:
                save_state(draft.folder, state)
                shutil.copyfile(rows, draft.folder / ROWS)
                draft.install(Manifest.of(stored, [manifest.describe(path) for path in sorted(draft.folder.iterdir())]))
        except OSError as error:
            raise OutOfCapacity(f"the package {location} cannot be written: {error}") from error

    def is_intact(self, model_id: str, move_id: str) -> bool:
        """True when the package exists, and all its files are as they were written."""
        location = _location(model_id, move_id)
        try:
            with self._storage.reading(location) as found, self._storage.files(location, found, found.files):
                return True
        except (CheckpointNotFound, DataCorrupted):
            return False

    def read(
        self, model_id: str, move_id: str, base: BaseModel, *, rows: Path
    ) -> tuple[pb.CheckpointInfo, CapturedState]:
        """Reads a package. Returns the snapshot, as `write` got it, and copies the file with the rows to the path
        `rows`. Raises FailedPrecondition when there is no package of this move, and DataCorrupted for damage."""
        location = _location(model_id, move_id)
        try:
            with (
                self._storage.reading(location) as found,
                self._storage.files(location, found, found.files) as folder,
            ):
                shutil.copyfile(folder / ROWS, rows)
                return found.checkpoint, load_state(folder, found, base, name=str(location))
        except CheckpointNotFound:
            raise FailedPrecondition(
                f"move_id: there is no package of {model_id!r} for the move {move_id!r}", field="move_id"
            ) from None
        except OSError as error:
            raise DataCorrupted(f"the package {location} cannot be read: {error}") from error

    def delete(self, model_id: str, move_id: str) -> None:
        """Deletes a package, if it exists."""
        self._storage.delete(_location(model_id, move_id))


def _location(model_id: str, move_id: str) -> Location:
    return Location(model_id, _KIND, move_id)
