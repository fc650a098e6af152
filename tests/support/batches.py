"""Requests for the trainer, from plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2, types_pb2


def datum(tokens: Sequence[int], **inputs: object) -> types_pb2.Datum:
    chunk = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array(tokens, "<i4").tobytes()))
    return types_pb2.Datum(
        model_input=[chunk], loss_fn_inputs={name: from_numpy(np.asarray(value)) for name, value in inputs.items()}
    )


def random_datum(
    length: int, seed: int, *, vocab_size: int, policy: bool = False, positive: bool = False
) -> types_pb2.Datum:
    """Random tokens and targets; with weights, or (policy) advantages and the logprobs of a near-uniform sampler.

    Weights are random, or (positive) ones.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=length)
    targets = rng.integers(vocab_size, size=length)
    if policy:
        return datum(
            tokens.tolist(),
            target_tokens=targets,
            logprobs=rng.normal(-np.log(vocab_size), 0.3, length).astype(np.float32),
            advantages=rng.normal(size=length).astype(np.float32),
        )
    weights = np.ones(length) if positive else rng.normal(size=length)
    return datum(tokens.tolist(), target_tokens=targets, weights=weights.astype(np.float32))


def sparse(rows: int, columns: int, *, dtype: types_pb2.Dtype = types_pb2.DTYPE_INT64) -> types_pb2.Tensor:
    """One value, in the last column of the first row; a hundred bytes on the wire."""
    value = np.array([3]) if dtype == types_pb2.DTYPE_INT64 else np.ones(1, np.float32)
    csr = types_pb2.SparseCsr(
        values=value.tobytes(),
        crow_indices=np.array([0] + [1] * rows).tobytes(),
        col_indices=np.array([columns - 1]).tobytes(),
    )
    return types_pb2.Tensor(sparse_csr=csr, dtype=dtype, shape=[rows, columns])


def wide(columns: int, *, tokens: int = 1, weights: int | None = None) -> types_pb2.Datum:
    """Sparse targets and weights, with so many columns; `weights`: theirs, if not as many."""
    one = datum([1] * tokens)
    one.loss_fn_inputs["target_tokens"].CopyFrom(sparse(tokens, columns))
    weighted = sparse(tokens, columns if weights is None else weights, dtype=types_pb2.DTYPE_FLOAT32)
    one.loss_fn_inputs["weights"].CopyFrom(weighted)
    return one


def request(
    data: Sequence[types_pb2.Datum],
    loss_fn: str = "cross_entropy",
    *,
    model_id: str = "s:train:0",
    seq_id: int = 1,
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> trainer_pb2.ForwardBackwardRequest:
    return trainer_pb2.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        data=data,
        loss_fn=loss_fn,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )
