"""Log-probabilities of named tokens. They are computed in chunks, so that only a bounded part of the logits [T, V]
exists at once.

Shapes: T packed tokens, V vocabulary, H hidden, M named tokens (several may share a row), n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.kernels.prepacked import Prepacked
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.lora import add_rows
from tinsmith.sizing import MAX_CHUNK_ELEMENTS

MAX_KEPT_ELEMENTS = {"cpu": 64 * 1024 * 1024, "cuda": 0}
"""Most log-probabilities that are kept from the forward to the backward pass, in elements: 256 MB on a CPU, where
computing them again takes a third of the output layer's time. With a large vocabulary these are few rows. The
log-probabilities of all other rows are computed again."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a base model, frozen."""

    name: str
    weight_V_H: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap), as in Gemma 2."""
    scale: float = 1.0
    """Factor on the logits, as in Cohere and Granite."""
    prepacked: Prepacked | None = None
    """Prepacked copy of weight and bias, for passes without gradient."""

    @property
    def vocab_size(self) -> int:
        return self.weight_V_H.shape[0]

    @torch.no_grad()
    def with_prepacked(self) -> Head:
        """This head with a prepacked copy of its weight. The weight itself stays row by row, because the embedding may
        share it."""
        return replace(self, prepacked=Prepacked([self.weight_V_H], [self.bias_V], by_columns=False))

    @property
    def max_rows(self) -> int:
        """Rows of one chunk."""
        return max(16, MAX_CHUNK_ELEMENTS[self.weight_V_H.device.type] // self.vocab_size)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are projected together: some or all rows of one chunk, with at most one adapter. `run`: index of the
    run with the adapter."""

    rows: slice
    run: int | None


def logits(head: Head, hidden_T_H: Tensor, runs: Sequence[Run]) -> Tensor:
    """The logits, float32 [T, V]. For few rows, because they are not computed in chunks. Not differentiable."""
    with torch.no_grad():
        out = _project(head, hidden_T_H, [])
        for run in runs:
            weights = run.adapter.weights.get(head.name)
            if weights is not None:
                low = hidden_T_H[run.rows].float() @ weights.a_R_I.T
                add_rows(out, run.rows, low, weights.b_O_R.T, run.adapter.scaling)
        return _finish(head, out)


def logprob_chunks(head: Head, hidden_T_H: Tensor, runs: Sequence[Run]) -> Iterator[tuple[slice, Tensor]]:
    """The log-softmax of all rows, chunk by chunk: a slice of rows, and float32 [n, V]. The rows of each run must be a
    slice. Not differentiable."""
    for piece in _pieces(head, hidden_T_H.shape[0], _slices(runs)):
        run = None if piece.run is None else runs[piece.run]
        here = [] if run is None else [Run(run.adapter, slice(0, piece.rows.stop - piece.rows.start))]
        yield piece.rows, logits(head, hidden_T_H[piece.rows], here).log_softmax(-1)


def target_logprobs(head: Head, hidden_T_H: Tensor, rows_M: Tensor, tokens_M: Tensor, runs: Sequence[Run]) -> Tensor:
    """log P(tokens_M[m] | row rows_M[m]) for each m, float32 [M]. Differentiable in the hidden states, and in A and B
    of the adapters' output layers.

    `rows_M`, `tokens_M`: int64 and in host memory, so that the work is cut into chunks without waiting for the device.
    `rows_M` is in ascending order, with repeats. `runs`: their rows must be slices, in order and without overlap.
    """
    adapted = [run for run in runs if head.name in run.adapter.weights]
    parameters: list[Tensor] = []
    for run in adapted:
        weights = run.adapter.weights[head.name]
        parameters += [weights.a_R_I, weights.b_O_R] if run.gradient is None else [run.gradient.anchor]
    tokens_on_device_M = on_device(tokens_M, hidden_T_H.device)
    return _TargetLogprobs.apply(hidden_T_H, rows_M.numpy(), tokens_on_device_M, head, adapted, *parameters)


class _TargetLogprobs(torch.autograd.Function):
    """Forward keeps the log-probabilities of the first chunks, up to MAX_KEPT_ELEMENTS. Backward computes the other
    log-probabilities again. It gathers the rows that have a gradient first, and computes only them: prompt tokens have
    no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_T_H: Tensor,
        rows_M: np.ndarray,
        tokens_M: Tensor,
        head: Head,
        runs: Sequence[Run],
        *parameters: Tensor,
    ) -> Tensor:
        device = hidden_T_H.device
        where_M = on_device(torch.from_numpy(rows_M), device)
        picked_M = torch.empty(rows_M.shape[0], device=device)
        pieces = _pieces(head, hidden_T_H.shape[0], _slices(runs))
        kept: list[Tensor] = []
        num_kept_rows = _num_kept_rows(head, pieces) if any(ctx.needs_input_grad) else 0
        for piece, named in zip(pieces, _named(pieces, rows_M), strict=True):
            raw_n_V = _project(head, hidden_T_H[piece.rows], _lora(piece, head, runs))
            logp_n_V = _log_softmax_(_finish(head, raw_n_V))
            picked_M[named] = logp_n_V[where_M[named] - piece.rows.start, tokens_M[named]]
            if piece.rows.stop <= num_kept_rows:
                kept.append(logp_n_V)
        ctx.save_for_backward(hidden_T_H, tokens_M, *parameters)
        ctx.rows_M, ctx.head, ctx.runs, ctx.kept = rows_M, head, runs, kept
        return picked_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_M,) = grad_outputs
        head, runs = ctx.head, ctx.runs
        kept, ctx.kept = ctx.kept, []  # this backward overwrites them, so a second one computes all of them again
        hidden_T_H, tokens_M, *_ = ctx.saved_tensors  # the parameters are saved so that autograd notices changes
        grad_hidden_T_H = torch.zeros_like(hidden_T_H) if ctx.needs_input_grad[0] else None
        grads = [_gradients(run, head) for run in runs]
        kept_K = (grad_M != 0).cpu().numpy().nonzero()[0]  # the only wait for the device
        active_N, local_K = np.unique(ctx.rows_M[kept_K], return_inverse=True)
        active, local, chosen = (
            on_device(torch.from_numpy(numbers), hidden_T_H.device) for numbers in (active_N, local_K, kept_K)
        )
        grad_K, tokens_K = grad_M[chosen], tokens_M[chosen]
        one_each = len(active_N) == len(kept_K)
        total_N = grad_K if one_each else torch.zeros(len(active_N), device=grad_M.device).index_add_(0, local, grad_K)
        pieces = _backward_pieces(head, kept, active_N, hidden_T_H.shape[0], _slices(runs))
        for (piece, logp_r_V), named in zip(pieces, _named([piece for piece, _ in pieces], local_K), strict=True):
            active_n = active[piece.rows]
            hidden_n_H = hidden_T_H[active_n]
            lora = _lora(piece, head, runs)
            cap_n_V = None
            if logp_r_V is not None:
                whole, first_row = logp_r_V
                rows = active_N[piece.rows] - first_row
                logp_n_V = whole if len(rows) == len(whole) else whole[torch.from_numpy(rows)]
            else:
                logits_n_V = _finish(head, _project(head, hidden_n_H, lora))
                cap_n_V = None if head.softcap is None else 1 - (logits_n_V / head.softcap).square()
                logp_n_V = _log_softmax_(logits_n_V)
            # d(picked)/d(logits) = onehot - softmax, times the gradient. If each row has one target, the gradient is a
            # factor of the row, and is applied to the much smaller results.
            where = (local[named] - piece.rows.start, tokens_K[named])
            factor_n = None
            grad_n_V = logp_n_V.exp_()
            if one_each and cap_n_V is None:
                factor_n = (-head.scale * grad_K[named])[:, None]
                grad_n_V[where] -= 1
            else:
                grad_n_V.mul_(-total_N[piece.rows, None])
                grad_n_V.index_put_(where, grad_K[named], accumulate=True)
                if cap_n_V is not None:
                    grad_n_V.mul_(cap_n_V)
                if head.scale != 1.0:
                    grad_n_V.mul_(head.scale)
            grad_n_H = None
            if grad_hidden_T_H is not None:
                grad_n_H = _product(grad_n_V.to(hidden_T_H.dtype), head.weight_V_H)
            for a_R_H, b_V_R, scaling in lora:
                assert piece.run is not None
                low_n_R = hidden_n_H.float() @ a_R_H.T
                if factor_n is not None:
                    low_n_R.mul_(factor_n)
                grad_low_n_R = (grad_n_V @ b_V_R).mul_(scaling)
                if grad_n_H is not None:
                    grad_n_H.addmm_(grad_low_n_R, a_R_H)
                if factor_n is not None:
                    grad_low_n_R.mul_(factor_n)
                grad_a_R_H, grad_b_V_R = grads[piece.run]
                grad_a_R_H.addmm_(grad_low_n_R.T, hidden_n_H.float())
                grad_b_V_R.T.addmm_(low_n_R.T, grad_n_V, alpha=scaling)
            if grad_hidden_T_H is not None and grad_n_H is not None:
                if factor_n is not None:
                    grad_n_H.mul_(factor_n)
                grad_hidden_T_H[active_n] = grad_n_H.to(hidden_T_H.dtype)
        returned = (grad if run.gradient is None else (None,) for run, grad in zip(runs, grads, strict=True))
        return grad_hidden_T_H, None, None, None, None, *chain.from_iterable(returned)


def _gradients(run: Run, head: Head) -> tuple[Tensor, Tensor]:
    """The tensors to which the gradients of A and B are added."""
    if run.gradient is not None:
        there = run.gradient.of(head.name)
        return there.a_R_I, there.b_O_R
    weights = run.adapter.weights[head.name]
    return torch.zeros_like(weights.a_R_I), torch.zeros_like(weights.b_O_R)


def _num_kept_rows(head: Head, pieces: Sequence[_Piece]) -> int:
    """Number of rows whose log-probabilities are kept. They are the first rows, in whole pieces."""
    if head.softcap is not None:  # backward needs the logits themselves
        return 0
    limit = MAX_KEPT_ELEMENTS[head.weight_V_H.device.type] // head.vocab_size
    return max((piece.rows.stop for piece in pieces if piece.rows.stop <= limit), default=0)


def _backward_pieces(
    head: Head, kept: Sequence[Tensor], active_N: np.ndarray, num_rows: int, runs: Sequence[slice]
) -> list[tuple[_Piece, tuple[Tensor, int] | None]]:
    """Pieces whose rows are slices of active_N. Each piece comes with the kept chunk that holds its rows and the first
    row of this chunk; with None if its log-probabilities are computed again."""
    out: list[tuple[_Piece, tuple[Tensor, int] | None]] = []
    row = 0
    if kept:
        for piece, chunk in zip(_pieces(head, num_rows, runs), kept, strict=False):
            among = _among(active_N, piece.rows)
            if among.stop > among.start:
                out.append((_Piece(among, piece.run), (chunk, piece.rows.start)))
            row = piece.rows.stop
    done = int(np.searchsorted(active_N, row))
    again = [_among(active_N[done:], rows) for rows in runs]
    out += [
        (_Piece(slice(piece.rows.start + done, piece.rows.stop + done), piece.run), None)
        for piece in _pieces(head, len(active_N) - done, again)
    ]
    return out


def _log_softmax_(logits_n_V: Tensor) -> Tensor:
    """log_softmax in place, in one pass through memory. This is correct because the kernel reads a row before it writes
    the row."""
    return torch.log_softmax(logits_n_V, -1, out=logits_n_V)


def _slices(runs: Sequence[Run]) -> list[slice]:
    rows = [run.rows for run in runs if isinstance(run.rows, slice)]
    if len(rows) < len(runs):
        raise TypeError("the head takes runs of consecutive rows")
    return rows


def _among(active_N: np.ndarray, rows: slice) -> slice:
    """The slice of the ascending row numbers active_N that lies in `rows`."""
    first, stop = np.searchsorted(active_N, [rows.start, rows.stop]).tolist()
    return slice(first, stop)


def _pieces(head: Head, num_rows: int, runs: Sequence[slice]) -> list[_Piece]:
    """Pieces of all rows, in order. A piece ends at the border of a run, and after max_rows rows."""
    borders: list[tuple[int, int, int | None]] = []
    start = 0
    for n, rows in enumerate(runs):
        borders += [(start, rows.start, None), (rows.start, rows.stop, n)]
        start = rows.stop
    borders.append((start, num_rows, None))
    return [
        _Piece(slice(first, min(first + head.max_rows, stop)), run)
        for begin, stop, run in borders
        for first in range(begin, stop, head.max_rows)
    ]


def _named(pieces: Sequence[_Piece], rows_M: np.ndarray) -> list[slice]:
    """For each piece, the slice of M whose rows lie in the piece."""
    stops = np.searchsorted(rows_M, [piece.rows.stop for piece in pieces]).tolist()
    return [slice(first, stop) for first, stop in zip([0, *stops], stops, strict=False)]


def _lora(piece: _Piece, head: Head, runs: Sequence[Run]) -> list[tuple[Tensor, Tensor, float]]:
    if piece.run is None:
        return []
    adapter = runs[piece.run].adapter
    weights = adapter.weights[head.name]
    return [(weights.a_R_I, weights.b_O_R, adapter.scaling)]


def _project(head: Head, hidden_n_H: Tensor, lora: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The logits of some rows before scale and softcap, float32 [n, V]. The adapters' share is computed in float32."""
    prepacked = head.prepacked
    if prepacked is not None and prepacked.gains(hidden_n_H) and prepacked.copies(head.weight_V_H):
        out = prepacked.together(hidden_n_H).float()
    else:
        out = _product(hidden_n_H, head.weight_V_H.T)
        if head.bias_V is not None:
            out.add_(head.bias_V)
    for a_R_H, b_V_R, scaling in lora:
        out.addmm_(hidden_n_H.float() @ a_R_H.T, b_V_R.T, alpha=scaling)
    return out


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32. On CUDA the sums of a product in half precision stay float32. Other devices have no such
    product, and round the result to half precision first."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def _finish(head: Head, raw_n_V: Tensor) -> Tensor:
    """Applies scale and softcap to logits, in place."""
    if head.scale != 1.0:
        raw_n_V.mul_(head.scale)
    if head.softcap is not None:
        raw_n_V.div_(head.softcap).tanh_().mul_(head.softcap)
    return raw_n_V
