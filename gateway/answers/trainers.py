"""Answers about the trainers behind the gateway."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class TrainerFacts(TypedDict):
    address: str
    trainer_id: str
    """Empty until the gateway has reached the trainer."""
    boot_id: str
    """Id of the trainer's process, which changes at each start. Empty until the gateway has reached the trainer."""
    base_models: list[str]
    state: Literal["serving", "loading", "gone"]
    is_drained: bool
    """True for a drained trainer, which takes no new runs, and whose runs move to other trainers."""
    can_be_stopped: bool
    """True for a drained trainer that may be stopped: no run would be lost or wait without it."""
    num_runs: int
    num_moving: int
    problems: dict[str, str]
    """The reasons for which runs could not be moved at the last attempt, by model_id."""


class Trainers(TypedDict):
    trainers: list[TrainerFacts]
