"""Opens the configured storage of checkpoints: a local folder, or an object store; and the id of the trainer that uses
it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from trainer_service.metrics import Metrics
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.objects import ObjectStorage
from trainer_service.storage.protocol import Storage, StorageUnusable


def open_storage(
    root: str,
    *,
    state_dir: Path,
    metrics: Metrics,
    min_free_bytes: int | None,
    scratch: str = "checkpoints.scratch",
) -> Storage:
    """Opens the storage at `root`, a path or an s3:// or gs:// URL. `state_dir`: folder of this trainer alone.
    `scratch`: name of a folder there that no other storage uses.

    Raises StorageUnusable.
    """
    if "://" not in root:
        return LocalStorage(Path(root), metrics, min_free_bytes=min_free_bytes)
    return ObjectStorage(
        root,
        metrics,
        scratch=state_dir / scratch,
        writer=trainer_id(state_dir),
        min_free_bytes=min_free_bytes,
    )


def trainer_id(state_dir: Path) -> str:
    """A random id of this state folder, and so of its trainer, which stays the same at every start. Raises
    StorageUnusable."""
    path = state_dir / "writer_id"
    try:
        if not path.exists() or not path.read_text().strip():
            keep_trainer_id(state_dir, uuid.uuid4().hex)
        return path.read_text().strip()
    except OSError as error:
        raise StorageUnusable(f"state_dir: {state_dir} cannot be used: {error}") from error


def keep_trainer_id(state_dir: Path, trainer_id: str) -> None:
    """Makes `trainer_id` the id of this state folder. It is the id of a trainer whose journal is elsewhere, and whose
    last state folder may be lost."""
    state_dir.mkdir(parents=True, exist_ok=True)
    new = state_dir / "writer_id.new"
    with new.open("w") as file:
        file.write(trainer_id)
        file.flush()
        os.fsync(file.fileno())
    new.rename(state_dir / "writer_id")
