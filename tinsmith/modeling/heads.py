"""The settings of attention in one layer.

Shapes: N query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Scale, window, softcap and sinks of one layer's attention."""

    scale: float
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it. With None it sees all tokens before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), as in Gemma 2."""
    sinks_N: Tensor | None = None
    """An extra score for each head, which takes a part of the probability and adds nothing to the output, as in
    GPT-OSS."""
    values_in_keys: bool = False
    """Whether the values are the first features of the keys, so that a cache stores the keys only (latent.py)."""
