"""Journals of trainers whose base models are not served now, so that nobody takes their runs for lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def with_live_runs(trainers: Path, *, served: Collection[Path]) -> dict[Path, int]:
    """Folders below `trainers` that are not served, and how many live runs each has."""
    from trainer_service.durability import stopped  # not there where the command line is installed alone

    journals = [path for path in sorted(trainers.glob("*/journal.sqlite")) if path.parent not in served]
    return {path.parent: count for path in journals if (count := stopped.num_live_runs(path))}
