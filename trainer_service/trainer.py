"""The parts of a trainer behind its gRPC services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_service.durability.journal import Journal
from trainer_service.operations.moving import Moving
from trainer_service.operations.operations import Operations
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.imports import Importer


@dataclass(frozen=True, slots=True)
class Trainer:
    """The parts, which exist once the base model is loaded."""

    boot_id: str
    operations: Operations
    scheduler: Scheduler
    journal: Journal
    checkpoints: CheckpointStore
    importer: Importer
    moving: Moving
    trainer_id: str
    """Stable id of this trainer, kept in its state folder."""
    fingerprint: Mapping[str, str]
    """Properties that trainers of one base model must have in common, by name."""
