"""What attention is told of a layer's heads. N: query heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """How one layer attends."""

    scale: float
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None means all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), as in Gemma 2."""
    sinks_N: Tensor | None = None
    """One more score for each head that takes probability and gives nothing, as in GPT-OSS."""
