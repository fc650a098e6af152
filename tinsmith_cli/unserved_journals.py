"""Finds journals of trainers whose base models are not served now, so that users do not think their runs are lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def with_live_runs(trainers: Path, *, served: Collection[Path]) -> dict[Path, int]:
    """Folders below `trainers` that are not in `served` and have live runs, each with the number of these runs."""
    from trainer_service.durability import stopped  # missing if only the command line is installed

    journals = [path for path in sorted(trainers.glob("*/journal.sqlite")) if path.parent not in served]
    return {path.parent: count for path in journals if (count := stopped.num_live_runs(path))}
