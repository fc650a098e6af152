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
    """A move in progress. Calls of the run wait until `is_done`. The row is deleted once both trainers have forgotten
    the move."""

    __tablename__ = "moves"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    move_id: Mapped[str]
    """Random id of the move."""
    source_id: Mapped[str]
    """The trainer_id of the trainer that releases the run."""
    target_id: Mapped[str]
    """The trainer_id of the trainer that adopts the run."""
    begun_at: Mapped[float]
    is_released: Mapped[bool]
    """True when the source has released the run. From then on the run can go on without the source."""
    is_done: Mapped[bool]
    """True when the run is at its target. The source and the package have still to be cleaned up then."""


class DrainedTrainer(Base):
    """A trainer that gets no new runs, and whose runs move to others."""

    __tablename__ = "drained_trainers"

    trainer_id: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[float]
    boot_id: Mapped[str | None]
    """Id of the process that is drained, if the trainer is to take runs again after a restart. None means that the
    trainer is drained until it is undrained."""
    problems: Mapped[dict[str, Problem]] = mapped_column(JSON)
    """The problems of the runs that could not be moved at the last attempt, by model_id."""
