"""The draw of a step: a token for each of its sequences, from its logits.

Shapes: R rows that sample, M rows with a grammar, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sampler_service.core import sampling
from sampler_service.core.sampling import scaled_logprobs, uniforms
from sampler_service.grammars import Bools
from sampler_service.torch_engine.step import Rows, Step
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.rpc.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of each sampling row, on the host."""

    tokens_R: list[int]
    logprobs_R: list[float]


def draw(step: Step, logits_R_V: Tensor) -> Drawn:
    """A token for each running sequence, and for each sequence of the prompts that end here."""
    running, decoding, device = step.running, step.decoding, logits_R_V.device
    if not step.ending:
        assert decoding is not None
        rows = decoding.rows
    else:
        sequences = step.sampling
        rows = Rows.of(sequences, vocab_size=logits_R_V.shape[1], device=device)
        # num_samples draws from one row.
        counts = [1] * len(running) + [len(piece.job.sequences) for piece in step.ending]
        if len(sequences) > len(counts):
            # With the number of rows: else the host would have to ask the device for it.
            logits_R_V = logits_R_V.repeat_interleave(
                torch.tensor(counts, device=device), 0, output_size=len(sequences)
            )
    masks = _masks(rows, logits_R_V) if rows.with_grammar else None  # first: a GPU computes the logits meanwhile
    logprobs_R_V = scaled_logprobs(logits_R_V, rows.rules.temperature_R_1)
    numbers_R = on_device(torch.from_numpy(uniforms(rows.keys, rows.counters)), device)
    drawn_from_R_V = logprobs_R_V
    if rows.penalized is not None:
        drawn_from_R_V = rows.penalized.logprobs(logits_R_V, logprobs_R_V, rows.rules.temperature_R_1)
    if masks is None:
        tokens_R = sampling.draw(drawn_from_R_V, rows.rules, numbers_R)
    else:
        tokens_R = sampling.draw_masked(drawn_from_R_V, rows.rules, numbers_R, *masks)
    logprobs_R = logprobs_R_V.gather(-1, tokens_R[:, None])[:, 0]
    if rows.topk:
        _take_tables(rows, logprobs_R_V)
    if decoding is not None:
        decoding.advance(tokens_R[: len(running)])
    return Drawn(tokens_R.tolist(), logprobs_R.tolist())


def _masks(rows: Rows, logits_R_V: Tensor) -> tuple[Tensor, Tensor] | None:
    """Indices of the rows with a grammar, int64 [M], and the tokens that may come next there, bool [M, V]; None without
    such rows. A request whose grammar fails draws without it in this step, which is its last."""
    masks: dict[int, Bools] = {}
    for row in rows.with_grammar:
        sequence = rows.sequences[row]
        try:
            matcher = sequence.owner.matcher_of(sequence)
            masks[row] = matcher.allowed(logits_R_V.shape[1])
        except ServiceError as error:
            sequence.owner.failure = sequence.owner.failure or error
    if not masks:
        return None
    device = logits_R_V.device
    return torch.tensor(list(masks), device=device), on_device(torch.from_numpy(np.stack([*masks.values()])), device)


def _take_tables(rows: Rows, logprobs_R_V: Tensor) -> None:
    most = min(max(k for _, k in rows.topk), logprobs_R_V.shape[1])
    wanted = torch.tensor([row for row, _ in rows.topk], device=logprobs_R_V.device)
    values, ids = (x.cpu().numpy() for x in logprobs_R_V[wanted].topk(most))
    for n, (row, k) in enumerate(rows.topk):
        sequence = rows.sequences[row]
        sequence.owner.take_table(sequence, ids[n, :k], values[n, :k])
