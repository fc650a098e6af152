"""Retention rules, and which checkpoints of a run they keep. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field

from gateway.database.tables.checkpoints import Checkpoint
from gateway.known import Known

KINDS = {"training": "weights", "sampler": "sampler_weights"}
"""Field of a policy -> kind of a path. Checkpoints for download have no rules."""


class Rules(Known):
    """Rules for one kind of checkpoint. A checkpoint that no rule keeps is deleted; without rules all are kept."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    keep_last: int | None = Field(default=None, ge=1, lt=2**31)
    """Number of the newest checkpoints to keep."""
    keep_every_steps: int | None = Field(default=None, ge=1, lt=2**31)
    """Keeps the first checkpoint at or after each multiple of this number of optimizer steps."""
    keep_within_seconds: int | None = Field(default=None, ge=1, lt=2**31)
    """Keeps all checkpoints that are younger than this, in seconds."""

    @property
    def keep_all(self) -> bool:
        return self.keep_last is None and self.keep_every_steps is None and self.keep_within_seconds is None


class Policy(Known):
    """The retention policy of a training run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    training: Rules = Rules()
    """Rules for checkpoints that training resumes from."""
    sampler: Rules = Rules()
    """Rules for checkpoints of sampler weights."""

    @property
    def keep_all(self) -> bool:
        return self.training.keep_all and self.sampler.keep_all

    def of(self, kind: str) -> Rules:
        """The rules for a kind of path: "weights" or "sampler_weights"."""
        return {"weights": self.training, "sampler_weights": self.sampler}[kind]


KeptAs = Literal["no_rules", "last", "every", "within", "pinned", "published", "in_use"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A checkpoint, and whether a policy keeps it."""

    checkpoint: Checkpoint
    kept_as: list[KeptAs]
    """Reasons to keep it. Empty: it is to be deleted."""


def judge(checkpoints: Sequence[Checkpoint], rules: Rules, *, in_use: Collection[str], now: float) -> list[Judged]:
    """Applies the rules to the checkpoints of one run and kind; oldest first.

    `in_use`: paths that a sampler or a load needs. `now`: seconds since 1970.
    """
    oldest_first = sorted(checkpoints, key=lambda one: (one.created_at, one.step, one.path))
    last = {one.path for one in oldest_first[-rules.keep_last :]} if rules.keep_last is not None else set()
    every = set()
    if rules.keep_every_steps is not None:
        firsts: dict[int, Checkpoint] = {}
        for one in sorted(oldest_first, key=lambda one: one.step):
            firsts.setdefault(one.step // rules.keep_every_steps, one)
        every = {one.path for one in firsts.values()}

    def reasons(one: Checkpoint) -> list[KeptAs]:
        within = rules.keep_within_seconds
        checks: dict[KeptAs, bool] = {
            "no_rules": rules.keep_all,
            "last": one.path in last,
            "every": one.path in every,
            "within": within is not None and one.created_at > now - within,
            "pinned": one.pinned,
            "published": one.public,
            "in_use": one.path in in_use,
        }
        return [reason for reason, holds in checks.items() if holds]

    return [Judged(one, reasons(one)) for one in oldest_first]
