"""Provenance for stable_reinforce: turns the spans of a datum into the logprobs that the sampler recorded.

The client's spans say where every token of a datum comes from: the prompt or the output of a sampled sequence. Each
span is checked against the record of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.database.tables.samples import SequenceRecord
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.rpc.tensors import to_numpy
from tinsmith.v1 import trainer_pb2, types_pb2

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_TOLERANCE = 1e-3
"""Largest difference between a logprob that the client sends and the recorded one, in nats."""
_HOW = "sample with record_stability_info=True and attach the spans with Datum.with_provenance"


def sequence_ids(message: trainer_pb2.ForwardBackwardRequest) -> Iterator[str]:
    """The ids of all sequences that the spans of a batch name; repeats are not removed."""
    for datum in message.data:
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
            for span in spans:
                yield span.prompt_tokens.sequence_id or span.sampled_tokens.sequence_id


def resolve(message: trainer_pb2.ForwardBackwardRequest, records: Mapping[str, SequenceRecord]) -> None:
    """Adds `logprobs` and `sampled_mask`, float32 [targets], to each datum. Both are 0 where a target is a prompt
    token.

    Raises InvalidRequest or Unsupported, naming the datum, the field and the position.
    """
    for index, datum in enumerate(message.data):
        _resolve_datum(datum, records, where=f"data[{index}]")


def _resolve_datum(datum: types_pb2.Datum, records: Mapping[str, SequenceRecord], *, where: str) -> None:
    inputs = datum.loss_fn_inputs
    if "sampled_mask" in inputs:
        raise InvalidRequest(f"{where}.loss_fn_inputs.sampled_mask: is made by the server from the spans; leave it out")
    if "target_tokens" not in inputs:
        field = f"{where}.loss_fn_inputs.target_tokens"
        raise InvalidRequest(f"{field}: is missing", field=field)
    targets = _flat(inputs["target_tokens"], field=f"{where}.loss_fn_inputs.target_tokens")
    tokens = _model_input(datum, where=where)
    _targets_of_spans(datum.model_input_spans, tokens, records, padded=False, where=f"{where}.model_input_spans")
    # Clients fill the targets of prompt tokens with zeros, because nothing is trained there.
    parts = _targets_of_spans(
        datum.loss_fn_input_spans, targets, records, padded=True, where=f"{where}.loss_fn_input_spans"
    )
    logprobs = np.concatenate([part.logprobs for part in parts]) if parts else np.zeros(0, _FLOAT32)
    mask = (
        np.concatenate([np.full(len(part.logprobs), part.is_sampled, _FLOAT32) for part in parts])
        if parts
        else logprobs
    )
    if "logprobs" in inputs:
        name = f"{where}.loss_fn_inputs.logprobs"
        _check_same(_flat(inputs["logprobs"], field=name), logprobs, mask, where=name)
    for name, values in (("logprobs", logprobs), ("sampled_mask", mask)):
        tensor = types_pb2.Tensor(dense=values.tobytes(), dtype=types_pb2.DTYPE_FLOAT32, shape=values.shape)
        inputs[name].CopyFrom(tensor)


def _flat(tensor: types_pb2.Tensor, *, field: str) -> npt.NDArray[Any]:
    """The tensor as an array of one dimension. A sparse one has two, and is refused before it takes memory."""
    array = None if tensor.WhichOneof("layout") == "sparse_csr" else to_numpy(tensor, field=field)
    if array is None or array.ndim != 1:
        dimensions = 2 if array is None else array.ndim
        raise InvalidRequest(
            f"{field}: has {dimensions} dimensions; stable_reinforce takes one number for each position",
            field=field.rpartition(".")[2],
        )
    return array


def _model_input(datum: types_pb2.Datum, *, where: str) -> npt.NDArray[Any]:
    pieces = [np.zeros(0, _INT32)]
    for index, chunk in enumerate(datum.model_input):
        if chunk.WhichOneof("kind") != "encoded_text":
            raise Unsupported(f"{where}.model_input[{index}]: stable_reinforce takes tokens only")
        if len(chunk.encoded_text.tokens) % 4:
            raise InvalidRequest(f"{where}.model_input[{index}]: {len(chunk.encoded_text.tokens)} bytes are not int32")
        pieces.append(np.frombuffer(chunk.encoded_text.tokens, _INT32))
    return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class _SpanTargets:
    """Targets of one span."""

    is_sampled: bool
    logprobs: npt.NDArray[np.float32]


def _targets_of_spans(
    spans: Sequence[types_pb2.ProvenanceSpan],
    tokens: npt.NDArray[Any],
    records: Mapping[str, SequenceRecord],
    *,
    padded: bool,
    where: str,
) -> list[_SpanTargets]:
    """The targets of each span. Raises InvalidRequest unless the spans cover all tokens and match the records.

    `padded`: only sampled tokens are compared, since clients put padding in the place of prompt tokens.
    """
    if not spans and len(tokens):
        raise InvalidRequest(f"{where}: stable_reinforce needs to know where each token comes from; {_HOW}")
    lengths = [_origin(span, where=f"{where}[{i}]").length for i, span in enumerate(spans)]
    if sum(lengths) != len(tokens) or any(length < 0 for length in lengths):
        raise InvalidRequest(f"{where}: lengths {lengths[:8]} make {sum(lengths)} positions; there are {len(tokens)}")
    parts, start = [], 0
    for index, span in enumerate(spans):
        length = lengths[index]
        mine = tokens[start : start + length]
        parts.append(_targets_of_span(span, mine, records, padded=padded, start=start, where=f"{where}[{index}]"))
        start += length
    return parts


def _origin(
    span: types_pb2.ProvenanceSpan, *, where: str
) -> types_pb2.PromptProvenanceSpan | types_pb2.SampledProvenanceSpan:
    kind = span.WhichOneof("origin")
    if kind is None:
        raise InvalidRequest(f"{where}: has neither prompt_tokens nor sampled_tokens")
    return span.prompt_tokens if kind == "prompt_tokens" else span.sampled_tokens


def _targets_of_span(
    span: types_pb2.ProvenanceSpan,
    tokens: npt.NDArray[Any],
    records: Mapping[str, SequenceRecord],
    *,
    padded: bool,
    start: int,
    where: str,
) -> _SpanTargets:
    origin = _origin(span, where=where)
    is_sampled = span.WhichOneof("origin") == "sampled_tokens"
    record = records.get(origin.sequence_id)
    if record is None:
        raise InvalidRequest(
            f"{where}: there is no record of sequence {origin.sequence_id!r} in this session, or it has expired; {_HOW}"
        )
    what = "output" if is_sampled else "prompt"
    recorded = np.frombuffer(record.tokens if is_sampled else record.prompt, _INT32)
    end = origin.offset + origin.length
    if origin.offset < 0 or end > len(recorded):
        raise InvalidRequest(
            f"{where}: positions {origin.offset} to {end} are not in the {what} of {origin.sequence_id!r}, "
            f"which has {len(recorded)} tokens"
        )
    recorded = recorded[origin.offset : end]
    if (is_sampled or not padded) and not np.array_equal(recorded, tokens):
        at = int(np.argmax(recorded != tokens))
        raise InvalidRequest(
            f"{where}: position {start + at} holds token {tokens[at]}, but token {origin.offset + at} of the {what} of "
            f"{origin.sequence_id!r} is {recorded[at]}"
        )
    if is_sampled:
        return _SpanTargets(True, np.frombuffer(record.logprobs, _FLOAT32)[origin.offset : end])
    return _SpanTargets(False, np.zeros(origin.length, _FLOAT32))


def _check_same(
    sent: npt.NDArray[Any], recorded: npt.NDArray[np.float32], mask: npt.NDArray[np.float32], *, where: str
) -> None:
    if sent.shape != recorded.shape:
        raise InvalidRequest(f"{where}: shape {list(sent.shape)} is not [{len(recorded)}]", field=where)
    differs = (mask != 0) & ~(np.abs(sent - recorded) <= _TOLERANCE)
    if differs.any():
        at = int(np.argmax(differs))
        raise InvalidRequest(
            f"{where}[{at}]: {sent[at]:g} is not {recorded[at]:g}, which the sampler recorded; leave logprobs out",
            field=where,
        )
