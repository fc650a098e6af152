"""Tables of the moves of runs between trainers."""

from __future__ import annotations

from sqlalchemy import JSON
from sqlalchemy.orm import Mapped, mapped_column
from typing_extensions import TypedDict

from gateway.database.tables.base import Base


class Problem(TypedDict):
    """Why a run of a drained trainer could not be moved."""

    why: str
    is_gone: bool
    """True when the trainer does not have the run, so that nothing of it can be lost with the trainer."""


class MoveRow(Base):
    """A move in progress. Calls of its run wait until it is done; the row goes once nothing is left of the move."""

    __tablename__ = "moves"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    move_id: Mapped[str]
    """Random id of the move."""
    source_id: Mapped[str]
    """The trainer_id of the trainer that releases the run."""
    target_id: Mapped[str]
    """The trainer_id of the trainer that adopts it."""
    begun_at: Mapped[float]
    is_released: Mapped[bool]
    """The source has released the run, so that it is not needed any more for the run to go on."""
    is_done: Mapped[bool]
    """The run is at its target, and the source and the package have still to be cleaned up."""


class DrainedTrainer(Base):
    """A trainer that gets no new runs, and whose runs move to others."""

    __tablename__ = "drained_trainers"

    trainer_id: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[float]
    boot_id: Mapped[str | None]
    """The trainer's process that is drained: the next one takes runs again. None: every one is, until that is ended."""
    problems: Mapped[dict[str, Problem]] = mapped_column(JSON)
    """For each run that could not be moved at the last attempt, by model_id."""
