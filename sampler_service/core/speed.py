"""How fast the engine computes, measured in its own steps."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.1
"""Weight of the newest step."""


@dataclass(slots=True)
class Speed:
    """Exponential moving averages; None while nothing was measured. The compute thread writes, the event loop reads."""

    decode_step_s: float | None = None
    """Seconds of a step that gives every running sequence one token, and computes no prompt."""
    prefill_token_s: float | None = None
    """Seconds of one token of a prompt."""

    def observe(self, seconds: float, *, prefilled: int) -> None:
        """Counts one step, which took `seconds` and computed `prefilled` tokens of prompts. Those tokens took the extra
        time, compared with a step without prompts."""
        if prefilled == 0:
            self.decode_step_s = _average(self.decode_step_s, seconds)
        else:
            share = max(0.0, seconds - (self.decode_step_s or 0.0)) / prefilled
            self.prefill_token_s = _average(self.prefill_token_s, share)

    def seconds(self, *, prompt_tokens: int, steps: float) -> float | None:
        """Expected time of so many prompt tokens and decode steps; None when one of them is wanted and unknown."""
        if (prompt_tokens and self.prefill_token_s is None) or (steps and self.decode_step_s is None):
            return None
        return prompt_tokens * (self.prefill_token_s or 0.0) + steps * (self.decode_step_s or 0.0)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _SHARE * (new - old)
