"""vLLM's outputs, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sampler_service.core.request import Floats, Ints, TopkTable


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token: int
    logprob: float
    table_ids: Ints
    table_logprobs: Floats
    """The token's row of the top-k table, best first."""

    @staticmethod
    def table(drawn: Sequence[DrawnToken], k: int) -> TopkTable | None:
        """The rows of these tokens, of `k` columns; None for 0."""
        if not k:
            return None
        table = TopkTable.empty(len(drawn), k)
        for n, one in enumerate(drawn):
            table.token_ids[n, : len(one.table_ids)] = one.table_ids
            table.logprobs[n, : len(one.table_logprobs)] = one.table_logprobs
        return table


def drawn_tokens(completion: Any, k: int) -> Iterator[DrawnToken]:
    """Tokens of one of vLLM's deltas with flat logprobs. For each token its own logprob comes first, then the best
    k."""
    flat = completion.logprobs
    for token, start, stop in zip(completion.token_ids, flat.start_indices, flat.end_indices, strict=True):
        ids, logprobs = np.array(flat.token_ids[start:stop], np.int32), np.array(flat.logprobs[start:stop], np.float32)
        if stop - start == k + 1:
            yield DrawnToken(token, flat.logprobs[start], ids[1:], logprobs[1:])
        else:  # where vLLM has joined two deltas, a token that is drawn and among the best stands there once
            order = np.argsort(-logprobs, kind="stable")
            yield DrawnToken(token, flat.logprobs[start], ids[order], logprobs[order])
