"""Penalties and biases, which change the logits that a token is drawn from. The logprobs that are returned stay the
model's.

The logit l of token t becomes, in this order:

    l + logit_bias[t]
    l / repetition if l > 0 else l * repetition     where the prompt or the output so far has t
    l - frequency * n                               n: how often the output so far has t
    l - presence                                    where the output so far has t

Then come the temperature, min_p, top_k and top_p, as in vLLM (`v1/sample/sampler.py`; its `apply_penalties` is the
lower three lines). Frequency, presence and bias are OpenAI's (API reference, "Frequency and presence penalties"). The
repetition penalty is CTRL's (arXiv:1909.05858, section 4.1) with the sign of the logit heeded, as in transformers.

Shapes: R rows that sample, A of them whose logits are changed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sampler_service.core.request import Ints, Penalties
from sampler_service.core.sampling import scaled_logprobs


@dataclass(frozen=True, slots=True)
class History:
    """Tokens of a sequence so far."""

    prompt_V: Tensor
    """bool [V]: whether the prompt has the token."""
    counts_V: Tensor
    """float32 [V]: how often the output has the token."""

    @classmethod
    def of(cls, prompt: Ints | Sequence[int], output: Sequence[int], *, vocab_size: int, device: torch.device) -> Self:
        prompt_V = np.zeros(vocab_size, np.bool_)
        prompt_V[prompt] = True
        counts_V = np.bincount(np.array(output, np.int64), minlength=vocab_size).astype(np.float32)
        return cls(torch.from_numpy(prompt_V).to(device), torch.from_numpy(counts_V).to(device))


@dataclass(frozen=True, slots=True)
class Penalized:
    """The rows of a batch whose logits are changed."""

    rows_A: Tensor
    """Indices of these rows, int64, ascending."""
    repetition_A_1: Tensor
    frequency_A_1: Tensor
    presence_A_1: Tensor
    prompt_A_V: Tensor
    counts_A_V: Tensor
    """float32: how often the output has each token. `take` counts each drawn token."""
    biased: tuple[Tensor, Tensor]
    """Row and token, int64, of each cell of [A, V] with a bias."""
    biases: Tensor
    """float32: the bias of each of these cells."""

    @classmethod
    def of(cls, changed: Sequence[tuple[int, Penalties, History]], *, device: torch.device) -> Self:
        """`changed`: (row, penalties, history) of each row whose logits are changed; at least one."""

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        cells = [(a, *each) for a, (_, penalties, _) in enumerate(changed) for each in penalties.logit_bias]
        places = torch.tensor([cell[:2] for cell in cells], dtype=torch.int64, device=device).reshape(-1, 2)
        return cls(
            rows_A=torch.tensor([row for row, *_ in changed], device=device),
            repetition_A_1=column([penalties.repetition for _, penalties, _ in changed]),
            frequency_A_1=column([penalties.frequency for _, penalties, _ in changed]),
            presence_A_1=column([penalties.presence for _, penalties, _ in changed]),
            prompt_A_V=torch.stack([history.prompt_V for *_, history in changed]),
            counts_A_V=torch.stack([history.counts_V for *_, history in changed]),
            biased=(places[:, 0], places[:, 1]),
            biases=torch.tensor([cell[2] for cell in cells], dtype=torch.float32, device=device),
        )

    def logprobs(self, logits_R_V: Tensor, logprobs_R_V: Tensor, temperature_R_1: Tensor | None) -> Tensor:
        """float32 [R, V]: `logprobs_R_V` with the changed rows in place of their own."""
        temperature_A_1 = None if temperature_R_1 is None else temperature_R_1[self.rows_A]
        changed_A_V = scaled_logprobs(self.change(logits_R_V[self.rows_A].float()), temperature_A_1)
        return logprobs_R_V.index_copy(0, self.rows_A, changed_A_V)

    def change(self, logits_A_V: Tensor) -> Tensor:
        """Logits with biases and penalties. May overwrite its argument."""
        # Each cell occurs once in the biases, so assigning is enough.
        logits_A_V[self.biased] += self.biases
        drawn_A_V = self.counts_A_V > 0
        repeated_A_V = torch.where(logits_A_V > 0, logits_A_V / self.repetition_A_1, logits_A_V * self.repetition_A_1)
        logits_A_V = torch.where(self.prompt_A_V | drawn_A_V, repeated_A_V, logits_A_V)
        logits_A_V -= self.frequency_A_1 * self.counts_A_V
        logits_A_V -= self.presence_A_1 * drawn_A_V
        return logits_A_V

    def take(self, tokens_R: Tensor, *, counted_A: Tensor | None = None) -> None:
        """Counts one more token of each row. `counted_A`: 0 for rows whose token was thrown away, 1 for others."""
        tokens_A = tokens_R[self.rows_A]
        ones_A = torch.ones_like(tokens_A) if counted_A is None else counted_A
        self.counts_A_V.scatter_add_(1, tokens_A[:, None], ones_A[:, None].to(self.counts_A_V.dtype))
