"""Opens the configured storage of checkpoints: a local folder, or an object store."""

from __future__ import annotations

import uuid
from pathlib import Path

from trainer_service.metrics import Metrics
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.objects import ObjectStorage
from trainer_service.storage.protocol import Storage


def open_storage(root: str, *, state_dir: Path, metrics: Metrics, min_free_bytes: int | None) -> Storage:
    """Opens the storage at `root`, a path or an s3:// or gs:// URL. `state_dir`: folder of this trainer alone.

    Raises StorageUnusable.
    """
    if "://" not in root:
        return LocalStorage(Path(root), metrics, min_free_bytes=min_free_bytes)
    return ObjectStorage(
        root,
        metrics,
        scratch=state_dir / "checkpoints.scratch",
        writer=_writer_id(state_dir),
        min_free_bytes=min_free_bytes,
    )


def _writer_id(state_dir: Path) -> str:
    """A random id of this state folder, which stays the same at every start."""
    path = state_dir / "writer_id"
    if not path.exists():
        state_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex)
    return path.read_text().strip()
