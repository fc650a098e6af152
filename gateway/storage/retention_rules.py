"""Decides which checkpoints of a run its retention rules keep. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.database.tables.checkpoints import Checkpoint
from gateway.schemas import RetentionRules

KINDS = {"training": "weights", "sampler": "sampler_weights"}
"""Field of a policy -> kind of a path. Checkpoints for download have no rules."""


KeptAs = Literal["no_rules", "last", "every", "within", "pinned", "published", "in_use"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A checkpoint, and whether a policy keeps it."""

    checkpoint: Checkpoint
    kept_as: list[KeptAs]
    """Reasons to keep the checkpoint. Empty means that it is to be deleted."""


def judge(
    checkpoints: Sequence[Checkpoint], rules: RetentionRules, *, in_use: Collection[str], now: float
) -> list[Judged]:
    """Applies the rules to the checkpoints of one run and kind. The result is ordered, oldest first.

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
