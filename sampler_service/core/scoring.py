"""Logprobs of a prompt's own tokens, computed piece by piece beside its prefill.

The hidden state at row i predicts position i + 1, so the last row of the prompt scores nothing.

Shapes: P prompt tokens, n rows of a chunk, V vocabulary, H hidden, k columns, M named cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sampler_service.core.request import EMPTY_LOGPROB, AltTokens, PromptScores, Request, TopkTable
from sampler_service.core.sampling import pick, scaled_logprobs, stream_keys, uniforms
from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.logprobs import Head, logprob_chunks

ALT_STREAM = 1
"""The random stream of prompt_alt_tokens_k; sequences use stream 0."""


class PromptScorer:
    """Collects the scores of the prompt that a request asked for."""

    def __init__(self, request: Request, *, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.length = length = len(request.prompt)
        last_n = request.prompt_logprobs_last_n
        self._first = 0 if last_n is None else length - last_n - 1
        """First row whose prediction goes into the logprobs and the top-k table."""
        self.logprobs = np.full(length, np.nan, np.float32)
        self.topk = TopkTable.empty(length, request.topk_prompt_logprobs)
        self.targets_M = np.zeros(0 if request.targets is None else len(request.targets.rows_M), np.float32)
        k = request.prompt_alt_tokens_k
        self.alt_tokens = AltTokens(np.zeros((length - 1, k), np.int64), np.zeros((length - 1, k), np.float32))
        self._alt_keys = stream_keys(seed, ALT_STREAM, k)
        self._is_text = np.ones(length, np.bool_)
        """False at the tokens of pictures, which get no row of the top-k table. Their logprob is that of the token that
        stands for a picture. It must be a number: clients multiply it by weights of 0, and 0 x NaN is NaN."""
        for one in request.pictures:
            self._is_text[one.start : one.start + one.picture.num_tokens] = False

    @property
    def first_row(self) -> int:
        """First row whose hidden state is needed. If none is needed: the last row of the prompt, which scores
        nothing."""
        request, rows = self.request, [self.length - 1]
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            rows.append(self._first)
        if request.targets is not None:
            rows.append(int(request.targets.rows_M[request.targets.tokens_M >= 0].min(initial=self.length - 1)))
        if request.prompt_alt_tokens_k:
            rows.append(0)
        return min(rows)

    @property
    def finite(self) -> bool:
        """False when a score is NaN. Valid once all rows are added."""
        scores = [self.targets_M, self.alt_tokens.logprobs]
        if self.request.prompt_logprobs:
            scores.append(self.logprobs[self._first + 1 :])
        return not any(np.isnan(values).any() for values in scores)

    def rows(self, start: int, count: int) -> range:
        """The rows from start .. start + count - 1 that are scored."""
        every_row = self.request.targets is not None or self.request.prompt_alt_tokens_k > 0
        first = start if every_row else max(start, self._first)
        return range(first, min(start + count, self.length - 1))

    def add(self, head: Head, hidden_n_H: Tensor, *, start: int, adapter: Adapter | None) -> None:
        """Rows start .. start + n - 1 of the prompt."""
        rows = self.rows(start, hidden_n_H.shape[0])
        if not rows:
            return
        runs = [] if adapter is None else [Run(adapter, slice(0, len(rows)))]
        for chunk, logprobs_n_V in logprob_chunks(head, hidden_n_H[rows.start - start : rows.stop - start], runs):
            self.add_logprobs(logprobs_n_V, rows.start + chunk.start)

    def add_logprobs(self, logprobs_n_V: Tensor, row: int) -> None:
        """Adds the logprobs of scored rows row .. row + n - 1."""
        end = row + logprobs_n_V.shape[0]
        scored = max(row, self._first)
        if scored < end:
            self._add_own(logprobs_n_V[scored - row :], scored, end)
        targets = self.request.targets
        if targets is not None:
            low, high = np.searchsorted(targets.rows_M, [row, end])
            rows, tokens = targets.rows_M[low:high] - row, targets.tokens_M[low:high]
            where = _tensor(rows, logprobs_n_V), _tensor(np.maximum(tokens, 0), logprobs_n_V)
            self.targets_M[low:high] = np.where(tokens < 0, 0.0, logprobs_n_V[where].cpu().numpy())
        if self.request.prompt_alt_tokens_k:
            self._add_alternatives(logprobs_n_V, row, end)

    def _add_own(self, logprobs_n_V: Tensor, row: int, end: int) -> None:
        request = self.request
        if request.prompt_logprobs:
            tokens = _tensor(request.prompt[row + 1 : end + 1].astype(np.int64), logprobs_n_V)
            own = logprobs_n_V.gather(-1, tokens[:, None])[:, 0].cpu().numpy()
            self.logprobs[row + 1 : end + 1] = own
        if request.topk_prompt_logprobs:
            k = min(request.topk_prompt_logprobs, logprobs_n_V.shape[1])
            values, ids = logprobs_n_V.topk(k)
            self.topk.token_ids[row + 1 : end + 1, :k] = ids.cpu().numpy()
            self.topk.logprobs[row + 1 : end + 1, :k] = values.cpu().numpy()

    def _add_alternatives(self, logprobs_n_V: Tensor, row: int, end: int) -> None:
        temperature = self.request.params.temperature
        if temperature == 0:
            ids = logprobs_n_V.argmax(-1, keepdim=True).expand(-1, self.request.prompt_alt_tokens_k)
        else:
            if temperature != 1:
                column = torch.full_like(logprobs_n_V[:, :1], temperature)
                logprobs_n_V = scaled_logprobs(logprobs_n_V, column)
            counters = np.arange(row, end, dtype=np.uint64)[:, None]
            numbers = _tensor(uniforms(self._alt_keys, counters), logprobs_n_V)
            ids = pick(logprobs_n_V.exp(), numbers)
        self.alt_tokens.tokens[row:end] = ids.cpu().numpy()
        self.alt_tokens.logprobs[row:end] = logprobs_n_V.gather(-1, ids).cpu().numpy()

    def dump(self) -> list[bytes]:
        """The computed scores, for restore() in another process."""
        return [array.tobytes() for array in self._arrays]

    def restore(self, dumped: Sequence[bytes]) -> None:
        for array, data in zip(self._arrays, dumped, strict=True):
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)

    @property
    def _arrays(self) -> list[np.ndarray]:
        topk, alt = self.topk, self.alt_tokens
        return [self.logprobs, topk.token_ids, topk.logprobs, self.targets_M, alt.tokens, alt.logprobs]

    def result(self, version_id: str) -> PromptScores:
        """`version_id`: the version that computed the scores. Raises ServiceError when a score is NaN."""
        request = self.request
        if not self.finite:
            raise not_finite(version_id)
        self.topk.token_ids[~self._is_text], self.topk.logprobs[~self._is_text] = 0, EMPTY_LOGPROB
        return PromptScores(
            logprobs=self.logprobs if request.prompt_logprobs else None,
            topk=self.topk if request.topk_prompt_logprobs else None,
            targets_M=self.targets_M if request.targets is not None else None,
            alt_tokens=self.alt_tokens if request.prompt_alt_tokens_k else None,
        )


def not_finite(version_id: str) -> ServiceError:
    name = f"version {version_id!r}" if version_id else "the base model"
    return ServiceError(
        f"{name} gave logits that are not finite numbers; its weights have probably diverged", version_id=version_id
    )


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
