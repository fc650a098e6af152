"""Converts protobuf tensors to numpy and back. No other module knows their byte order and sparse layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidRequest
from tinsmith.rpc.words import choices
from tinsmith.v1 import types_pb2 as pb

Array = npt.NDArray[Any]

_NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_PROTO = {dtype: number for number, dtype in _NUMPY.items()}
_INT64 = np.dtype("<i8")

CHUNK_BYTES = 96
"""Memory of a decoded chunk without its tokens, in bytes. An empty chunk has 4 bytes on the wire."""
MAX_DIMENSIONS = 8
"""Most dimensions of a tensor."""
MAX_ELEMENTS = 64 * 1024 * 1024
"""Largest tensor that a request may describe, in elements. A sparse tensor is small on the wire and large in memory."""


def to_numpy(tensor: pb.Tensor, *, field: str) -> Array:
    """The dense array of a wire tensor; a view of the tensor's bytes where possible. bfloat16 is widened to float32.

    Raises InvalidRequest, naming `field`, for a tensor whose shape, type and bytes do not fit together.
    """
    layout = tensor.WhichOneof("layout")
    if layout == "sparse_csr":
        return _from_csr(tensor, field=field)
    values = _values(tensor.dense, tensor.dtype, field=field)
    shape = tuple(tensor.shape) or values.shape
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{field}.shape: {len(shape)} dimensions, above {MAX_DIMENSIONS}", field=f"{field}.shape")
    if shape == values.shape:
        return values
    if any(n < 0 for n in shape) or prod(shape) != values.size:
        raise InvalidRequest(
            f"{field}: shape {list(shape)} does not hold the {values.size} values that were sent", field=field
        )
    if not values.size and prod(max(1, n) for n in shape) > MAX_ELEMENTS:  # numpy refuses it above 2**63 bytes
        raise InvalidRequest(
            f"{field}.shape: {list(shape)} is above this server's {MAX_ELEMENTS} elements without its zeros",
            field=f"{field}.shape",
        )
    return values.reshape(shape)


def num_elements(tensor: pb.Tensor) -> int:
    """Upper bound of the number of elements of a wire tensor's array. The array is not made."""
    if tensor.WhichOneof("layout") == "sparse_csr":
        return prod(max(0, size) for size in tensor.shape)
    return len(tensor.dense) // (2 if tensor.dtype == pb.DTYPE_BFLOAT16 else _item_bytes(tensor))


def num_bytes(tensor: pb.Tensor) -> int:
    """Upper bound of the number of bytes of a wire tensor's array. The array is not made."""
    return num_elements(tensor) * _item_bytes(tensor)


def _item_bytes(tensor: pb.Tensor) -> int:
    """Size of one element in the array. bfloat16 and unknown types count as float32."""
    return _NUMPY[tensor.dtype].itemsize if tensor.dtype in _NUMPY else 4


def _values(data: bytes, dtype: pb.Dtype, *, field: str) -> Array:
    if dtype == pb.DTYPE_BFLOAT16:
        halves = _frombuffer(data, np.dtype("<u2"), field=field)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if dtype not in _NUMPY:
        raise InvalidRequest(f"{field}.dtype: {dtype} is not one of {choices(pb.Dtype)}", field=f"{field}.dtype")
    return _frombuffer(data, _NUMPY[dtype], field=field)


def _frombuffer(data: bytes, dtype: np.dtype[Any], *, field: str) -> Array:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{field}: {len(data)} bytes are not whole {dtype.name} values", field=field)
    return np.frombuffer(data, dtype)


def sparse_cells(tensor: pb.Tensor, *, field: str) -> tuple[Array, Array, Array]:
    """Rows, columns and values of the cells that a sparse wire tensor stores, row by row. No dense array is made.

    Raises InvalidRequest, naming `field`, for a tensor that is not a valid CSR matrix of at most MAX_ELEMENTS.
    """
    shape = tuple(tensor.shape)
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidRequest(f"{field}: a sparse tensor needs two dimensions, not shape {list(shape)}", field=field)
    if prod(shape) > MAX_ELEMENTS:
        raise InvalidRequest(
            f"{field}: shape {list(shape)} is above this server's {MAX_ELEMENTS} elements", field=field
        )
    rows, cols = shape
    csr = tensor.sparse_csr
    values = _values(csr.values, tensor.dtype, field=field)
    crow = _frombuffer(csr.crow_indices, _INT64, field=f"{field}.crow_indices")
    col = _frombuffer(csr.col_indices, _INT64, field=f"{field}.col_indices")
    if crow.size != rows + 1 or col.size != values.size:
        raise InvalidRequest(
            f"{field}: {values.size} values need {values.size} col_indices and {rows + 1} crow_indices, "
            f"not {col.size} and {crow.size}",
            field=field,
        )
    counts = np.diff(crow)
    if crow[0] != 0 or crow[-1] != values.size or (counts < 0).any():
        raise InvalidRequest(f"{field}.crow_indices: must rise from 0 to {values.size}", field=field)
    if col.size and (col.min() < 0 or col.max() >= cols):
        raise InvalidRequest(
            f"{field}.col_indices: must lie in [0, {cols}), not {col.min()} to {col.max()}", field=field
        )
    return np.repeat(np.arange(rows), counts), col, values


def _from_csr(tensor: pb.Tensor, *, field: str) -> Array:
    rows, columns, values = sparse_cells(tensor, field=field)
    dense = np.zeros(tuple(tensor.shape), values.dtype)
    dense[rows, columns] = values
    return dense


def from_numpy(array: Array) -> pb.Tensor:
    """A dense wire tensor. Floating-point types become float32, and integers other than int32 become int64."""
    array = _wire_array(array)
    return pb.Tensor(dense=array.tobytes(), dtype=_PROTO[array.dtype], shape=array.shape)


def batched(arrays: Sequence[Array]) -> pb.BatchedTensor:
    """One wire tensor for the arrays of many datums, which share their dtype and their shape after the first
    dimension."""
    wire = [_wire_array(array) for array in arrays]
    offsets = np.cumsum([0, *(array.nbytes for array in wire)], dtype="<i8")
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in wire),
        offsets=offsets.tobytes(),
        dtype=_PROTO[wire[0].dtype],
        trailing_shape=wire[0].shape[1:],
    )


def _wire_array(array: Array) -> Array:
    kind = "<f4" if array.dtype.kind == "f" else "<i4" if array.dtype == np.int32 else "<i8"
    return np.ascontiguousarray(array, dtype=kind)


def text_tokens(chunks: Iterable[pb.Chunk], *, field: str) -> npt.NDArray[np.int32]:
    """The joined token ids of a text-only input, [T]. Raises InvalidRequest, naming the chunk, for pictures and
    audio."""
    parts = [chunk_tokens(chunk, field=f"{field}[{index}]") for index, chunk in enumerate(chunks)]
    tokens = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, "<i4"), *parts])
    return tokens.astype(np.int32, copy=False)


def chunk_tokens(chunk: pb.Chunk, *, field: str) -> Array:
    """The token ids of a chunk of text, int32 [T]. Raises InvalidRequest for a chunk of another kind."""
    kind = chunk.WhichOneof("kind")
    if kind != "encoded_text":
        raise InvalidRequest(
            f"{field}: chunk kind {kind or 'unset'!r} is not supported here; use encoded_text", field=field
        )
    return _frombuffer(chunk.encoded_text.tokens, np.dtype("<i4"), field=f"{field}.encoded_text.tokens")


def are_tokens(tokens: Array, vocab_size: int) -> bool:
    """True when all token ids are in [0, vocab_size)."""
    return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


def check_tokens(tokens: Array, vocab_size: int, *, field: str) -> None:
    """Raises InvalidRequest for token ids outside [0, vocab_size), naming the first one."""
    if not are_tokens(tokens, vocab_size):
        bad = (tokens < 0) | (tokens >= vocab_size)
        where = [int(i) for i in np.argwhere(bad)[0]]
        token, position = tokens[tuple(where)], ", ".join(map(str, where))
        raise InvalidRequest(
            f"{field}: token id {token} at position {position} is outside the vocabulary [0, {vocab_size})",
            field=field,
        )
