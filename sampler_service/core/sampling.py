"""Pure functions on logits: temperature, min-p, top-k, top-p, and reproducible draws.

A draw is the inverse of the cumulative distribution at one uniform number, and that number is a hash of the sequence's
key and of the token's index. So a row's tokens do not depend on the other rows of its batch.

Shapes: R rows, V vocabulary, C rows that cut their distribution, N columns, k draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TINY_TEMPERATURE = 1e-30


def _mix(z: UInt64s) -> UInt64s:
    """The output function of SplitMix64: every bit of the input changes half of the output's."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(seed: int, stream: int, count: int) -> UInt64s:
    """uint64 [count]: keys of independent random streams. `stream` tells apart the uses of one seed."""
    # The low 64 bits are taken, because seeds may be negative.
    start = _mix(np.array([seed & (2**64 - 1)], np.uint64) + _GOLDEN * np.array([stream + 1], np.uint64))
    return _mix(start + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def uniforms(keys: UInt64s, counters: UInt64s) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), of the broadcast shape: number `counter` of stream `key`."""
    return (_mix(keys + _GOLDEN * counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Rule:
    """One row's way to draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The rows' rules as tensors; None where no row needs that step."""

    temperature_R_1: Tensor | None
    """The temperature of each row; 1 for greedy rows, whose logprobs are those of the unscaled logits."""
    greedy_R: Tensor | None
    all_greedy: bool
    cut_C: Tensor | None
    """Rows with a min-p, a top-k or a top-p."""
    min_p_C_1: Tensor | None
    top_k_C_1: Tensor | None
    top_p_C_1: Tensor | None

    @classmethod
    def of(cls, rules: Sequence[Rule], *, vocab_size: int, device: torch.device) -> Rules:
        greedy = [rule.temperature == 0 for rule in rules]
        temperatures = [max(rule.temperature, _TINY_TEMPERATURE) if rule.temperature else 1.0 for rule in rules]
        top_k = [rule.top_k if 0 < rule.top_k < vocab_size else vocab_size for rule in rules]
        cut = [
            n
            for n, rule in enumerate(rules)
            if not greedy[n] and (rule.min_p > 0 or top_k[n] < vocab_size or rule.top_p < 1.0)
        ]
        return cls(
            temperature_R_1=None
            if all(temperature == 1.0 for temperature in temperatures)
            else torch.tensor(temperatures, device=device)[:, None],
            greedy_R=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            cut_C=torch.tensor(cut, device=device) if cut else None,
            min_p_C_1=torch.tensor([rules[n].min_p for n in cut], dtype=torch.float32, device=device)[:, None]
            if cut
            else None,
            top_k_C_1=torch.tensor([top_k[n] for n in cut], device=device)[:, None] if cut else None,
            # A row without top-p gets a number above 1, so that rounding does not cut the tail.
            top_p_C_1=torch.tensor([rules[n].top_p if rules[n].top_p < 1 else 2.0 for n in cut], device=device)[:, None]
            if cut
            else None,
        )


def scaled_logprobs(logits_R_V: Tensor, temperature_R_1: Tensor | None) -> Tensor:
    """log_softmax(logits / temperature), float32 [R, V]. A row with a logit that is no number becomes NaN."""
    if temperature_R_1 is not None:
        # The largest logit is subtracted first, so that a tiny temperature gives a sharp distribution and not infinity.
        logits_R_V = (logits_R_V - logits_R_V.amax(-1, keepdim=True)).div_(temperature_R_1)
    return logits_R_V.log_softmax(-1)


def masked(logprobs_M_V: Tensor, allowed_M_V: Tensor) -> Tensor:
    """float [M, V]: the logprobs of the allowed tokens; -inf for the others. The most probable allowed token gets 0, so
    that a token can be drawn however improbable all allowed ones are."""
    logprobs_M_V = logprobs_M_V.masked_fill(~allowed_M_V, float("-inf"))
    return logprobs_M_V - logprobs_M_V.amax(-1, keepdim=True)


def draw(logprobs_R_V: Tensor, rules: Rules, uniforms_R: Tensor) -> Tensor:
    """int64 [R]: one token for each row. A row of NaN gets some token of the vocabulary."""
    if rules.all_greedy:
        return logprobs_R_V.argmax(-1)
    weights_R_V = logprobs_R_V.exp()
    if rules.cut_C is not None:
        weights_R_V[rules.cut_C] = _cut(weights_R_V[rules.cut_C], rules)
    tokens_R = pick(weights_R_V, uniforms_R[:, None])[:, 0]
    if rules.greedy_R is not None:
        tokens_R = torch.where(rules.greedy_R, logprobs_R_V.argmax(-1), tokens_R)
    return tokens_R


def draw_masked(logprobs_R_V: Tensor, rules: Rules, uniforms_R: Tensor, rows_M: Tensor, allowed_M_V: Tensor) -> Tensor:
    """int64 [R]: one token for each row, and an allowed one in `rows_M`, the rows with a grammar. Leaves the logprobs
    as they are: a token is reported with its logprob without the grammar."""
    logprobs_M_V = logprobs_R_V[rows_M]
    logprobs_R_V[rows_M] = masked(logprobs_M_V, allowed_M_V)
    tokens_R = draw(logprobs_R_V, rules, uniforms_R)
    logprobs_R_V[rows_M] = logprobs_M_V
    return tokens_R


def pick(weights_R_N: Tensor, uniforms_R_k: Tensor) -> Tensor:
    """int64 [R, k]: columns, drawn in proportion to their weights. A column of weight 0 is never drawn."""
    cumulative_R_N = weights_R_N.cumsum(-1)
    total_R_1 = cumulative_R_N[:, -1:]
    thresholds = (uniforms_R_k * total_R_1).to(cumulative_R_N.dtype)
    # Rounding must not make a number reach the total, because no column lies above it.
    thresholds = torch.minimum(thresholds, torch.nextafter(total_R_1, torch.zeros_like(total_R_1)))
    return torch.searchsorted(cumulative_R_N, thresholds, right=True).clamp_(max=weights_R_N.shape[1] - 1)


def _cut(weights_C_V: Tensor, rules: Rules) -> Tensor:
    """Sets weights to 0: those below min_p times the largest, then all but the top_k, then all but the smallest set
    that reaches top_p of the rest. Ties at the border stay.

    Only values are sorted, not ids: the draw goes through the vocabulary in its own order.
    """
    assert rules.min_p_C_1 is not None
    assert rules.top_k_C_1 is not None
    assert rules.top_p_C_1 is not None
    tops = _sorted(weights_C_V)
    least = torch.maximum(tops.gather(-1, rules.top_k_C_1 - 1), rules.min_p_C_1 * tops[:, :1])
    tops.masked_fill_(tops < least, 0.0)
    mass = tops.cumsum(-1)
    kept = (mass - tops < rules.top_p_C_1 * mass[:, -1:]).sum(-1, keepdim=True)
    least = torch.maximum(least, tops.gather(-1, (kept - 1).clamp_(min=0)))
    return weights_C_V.masked_fill(weights_C_V < least, 0.0)


def _sorted(weights_C_V: Tensor) -> Tensor:
    """Largest first."""
    if weights_C_V.is_cuda:
        return weights_C_V.sort(descending=True).values
    # On a CPU NumPy sorts values some ten times faster than torch sorts values with their places.
    return torch.from_numpy(np.sort(weights_C_V.numpy(), axis=-1)).flip(-1)
