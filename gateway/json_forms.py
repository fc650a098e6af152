"""The JSON form of training batches and results, for SDKs before 0.25; newer ones use protobuf.

The headers of a request decide its form, never the SDK's version. numpy converts each array as a whole. The checks here
cover only what the wire can carry; the trainer checks what the numbers mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway import convert
from gateway.shown import shown_given
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2

Array = npt.NDArray[Any]

EMPTY_LOGPROB = np.float32(-99999.0)
"""Together with token 0, this logprob marks an empty cell of a top-k table."""
_STOP_REASONS = {types_pb2.PUBLIC_STOP_REASON_STOP: "stop", types_pb2.PUBLIC_STOP_REASON_LENGTH: "length"}
_RESULT_DTYPES = {
    types_pb2.DTYPE_FLOAT32: (np.dtype("<f4"), "float32"),
    types_pb2.DTYPE_INT64: (convert.INT64, "int64"),
    types_pb2.DTYPE_INT32: (np.dtype("<i4"), "int64"),
}


# Requests


def key_of(*, forward_only: bool) -> str:
    """The field with the batch, in a body of `forward` or of `forward_backward`."""
    return "forward_input" if forward_only else "forward_backward_input"


def forward_backward(
    content: Mapping[str, Any], *, model_id: str, seq_id: int, forward_only: bool
) -> trainer_pb2.ForwardBackwardRequest:
    """The request of a JSON body of forward_backward or, with `forward_only`, of forward.

    Raises InvalidRequest or Unsupported, naming the field.
    """
    key = key_of(forward_only=forward_only)
    batch = _object(content.get(key), field=key)
    convert.check_fields(content, {key, "model_id", "seq_id", "forward_only"}, field="")
    convert.check_fields(batch, {"data", "loss_fn", "loss_fn_config", "forward_only"}, field=key)
    for asked in (content.get("forward_only"), batch.get("forward_only")):
        if asked is not None and not isinstance(asked, bool):
            raise InvalidRequest(f"forward_only: {shown_given(asked)} is neither true nor false", field="forward_only")
        forward_only = forward_only or bool(asked)
    loss_fn = batch.get("loss_fn")
    if not isinstance(loss_fn, str):
        raise InvalidRequest(f"{key}.loss_fn: {shown_given(loss_fn)} is not the name of a loss", field=f"{key}.loss_fn")
    message = trainer_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only
    )
    for name, value in _object(batch.get("loss_fn_config") or {}, field=f"{key}.loss_fn_config").items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        elif isinstance(value, int | float) and abs(value) <= sys.float_info.max:  # false for NaN
            message.loss_fn_config[name] = message.loss_fn_config_v2[name].number = value  # both, as newer SDKs do
        else:
            where = f"{key}.loss_fn_config.{name}"
            raise InvalidRequest(f"{where}: {shown_given(value)} is neither a number nor a text", field=where)
    for index, value in enumerate(_list(batch.get("data"), field=f"{key}.data")):
        message.data.append(_datum(_object(value, field=f"data[{index}]"), field=f"data[{index}]"))
    return message


def _datum(value: Mapping[str, Any], *, field: str) -> types_pb2.Datum:
    for spans in ("model_input_spans", "loss_fn_input_spans"):
        if value.get(spans):
            raise Unsupported(f"{field}.{spans}: the JSON form has no spans; send protobuf")
    convert.check_fields(
        value, {"model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans"}, field=field
    )
    datum = types_pb2.Datum()
    model_input = _object(value.get("model_input"), field=f"{field}.model_input")
    convert.check_fields(model_input, {"chunks"}, field=f"{field}.model_input")
    for index, chunk in enumerate(_list(model_input.get("chunks"), field=f"{field}.model_input.chunks")):
        name = f"{field}.model_input.chunks[{index}]"
        datum.model_input.append(convert.chunk(dict(_object(chunk, field=name)), field=name))
    for key, tensor in _object(value.get("loss_fn_inputs"), field=f"{field}.loss_fn_inputs").items():
        if tensor is None:  # null means absent, as in all bodies
            continue
        name = f"{field}.loss_fn_inputs.{key}"
        datum.loss_fn_inputs[key].CopyFrom(convert.tensor(_object(tensor, field=name), field=name))
    return datum


def _object(value: Any, *, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: {shown_given(value)} is not an object", field=field)
    return value


def _list(value: Any, *, field: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: {shown_given(value)} is not a list", field=field)
    return value


# Results


def forward_backward_result(body: bytes) -> bytes:
    """A serialized ForwardBackwardResponse as JSON, in which "nan", "inf" and "-inf" are strings."""
    message = trainer_pb2.ForwardBackwardResponse.FromString(body)
    return _dumps(
        {
            "loss_fn_output_type": message.loss_fn_output_type,
            "loss_fn_outputs": [output for record in message.loss_fn_outputs for output in _outputs(record)],
            "metrics": _metrics(message.metrics),
        }
    )


def optim_step_result(message: trainer_pb2.OptimStepResponse) -> bytes:
    return _dumps({"metrics": _metrics(message.metrics)})


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """The metrics for JSON, which has no NaN or infinity: the SDK reads "nan" and "inf" as the numbers that they
    name."""
    return {key: value if math.isfinite(value) else str(value) for key, value in metrics.items()}


def _outputs(record: types_pb2.ArrayRecord) -> list[dict[str, Any]]:
    """One object of tensors for each datum."""
    fields = {name: _split(tensor) for name, tensor in record.fields.items()}
    return [{name: tensors[i] for name, tensors in fields.items()} for i in range(record.num_datums)]


def _split(tensor: types_pb2.BatchedTensor) -> list[dict[str, Any]]:
    values, name, itemsize = _values(tensor.data, tensor.dtype)
    ends = (np.frombuffer(tensor.offsets, convert.INT64) // itemsize).tolist()
    trailing = list(tensor.trailing_shape)
    width = math.prod(trailing)
    return [
        {
            "data": _floats(values[start:end]) if name == "float32" else values[start:end],
            "dtype": name,
            "shape": [(end - start) // width if width else 0, *trailing],
        }
        for start, end in pairwise(ends)
    ]


def _values(data: bytes, dtype: types_pb2.Dtype) -> tuple[Array, str, int]:
    """The values, the public name of their type, and the size of one value on the wire, in bytes."""
    if dtype == types_pb2.DTYPE_BFLOAT16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32), "float32", 2
    kind, name = _RESULT_DTYPES[dtype]
    return np.frombuffer(data, kind), name, kind.itemsize


def _floats(values: Array, *, nan: str | None = "nan") -> Array | list[float | str | None]:
    """The values in a form for orjson, which would write NaN and infinities as null. NaN becomes `nan`, and infinities
    become texts."""
    if np.isfinite(values).all():
        return values
    return [x if math.isfinite(x) else nan if math.isnan(x) else str(x) for x in values.tolist()]


def sample_result(body: bytes) -> bytes:
    """A serialized SampleResponse as JSON; null stands for a prompt logprob that was not computed."""
    message = sampler_pb2.SampleResponse.FromString(body)
    result: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        result["prompt_logprobs"] = _floats(np.frombuffer(message.prompt_logprobs, "<f4"), nan=None)
    if message.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = _topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        result["target_prompt_logprobs"] = _tensor_object(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        alt = message.prompt_alt_tokens
        result["prompt_alt_tokens"] = {"tokens": _tensor_object(alt.tokens), "logprobs": _tensor_object(alt.logprobs)}
    return _dumps(result)


def _sequence(sequence: types_pb2.SampledSequence) -> dict[str, Any]:
    result: dict[str, Any] = {
        "stop_reason": _STOP_REASONS[sequence.public_stop_reason],
        "tokens": np.frombuffer(sequence.tokens, "<i4"),
    }
    if sequence.HasField("logprobs"):
        result["logprobs"] = _floats(np.frombuffer(sequence.logprobs, "<f4"))
    if sequence.HasField("topk_sampled_logprobs"):
        result["topk_logprobs"] = _topk(sequence.topk_sampled_logprobs)
    if sequence.version_spans:  # not in the public API, whose clients ignore names that they do not know
        result["version_spans"] = [
            {"version": span.version_id, "num_tokens": span.num_tokens} for span in sequence.version_spans
        ]
    return result


def _topk(table: types_pb2.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """The (token, logprob) pairs of each position, best first; None for a position without pairs."""
    token_ids = np.frombuffer(table.token_ids, "<i4").reshape(table.length, table.k)
    logprobs = np.frombuffer(table.logprobs, "<f4").reshape(table.length, table.k)
    num_filled = ((token_ids != 0) | (logprobs != EMPTY_LOGPROB)).sum(axis=1)
    return [
        list(zip(tokens[:n], row[:n], strict=True)) if n else None
        for tokens, row, n in zip(token_ids.tolist(), logprobs.tolist(), num_filled.tolist(), strict=True)
    ]


def _tensor_object(tensor: types_pb2.Tensor) -> dict[str, Any]:
    is_sparse = tensor.WhichOneof("layout") == "sparse_csr"
    values, name, _ = _values(tensor.sparse_csr.values if is_sparse else tensor.dense, tensor.dtype)
    result = {"data": _floats(values) if name == "float32" else values, "dtype": name, "shape": list(tensor.shape)}
    if is_sparse:
        result["sparse_crow_indices"] = np.frombuffer(tensor.sparse_csr.crow_indices, convert.INT64)
        result["sparse_col_indices"] = np.frombuffer(tensor.sparse_csr.col_indices, convert.INT64)
    return result


def _dumps(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
