"""The memory that a request takes, as a message and as a batch, before it is read."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import Message

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import Counting
from tinsmith.pictures.headers import size_of
from tinsmith.rpc import tensors
from tinsmith.v1 import trainer_pb2, types_pb2

_DATUM_BYTES = 1024
"""Memory of a datum's Python objects, without its arrays, in bytes."""
_DATUM_PART_BYTES = 64
"""Memory of a datum in a decoded message, without its parts, in bytes. An empty datum takes 2 bytes on the wire."""
_SPAN_BYTES = 48
"""Memory of a span in a decoded message, in bytes. An empty span takes 2 bytes on the wire."""
_INPUT_BYTES = 192
"""Memory of an input, or of a setting of the loss, in a decoded message, without its values, in bytes. An empty input
takes 13 bytes on the wire."""
_DIMENSION_BYTES = 16
"""Memory of a dimension of a tensor's shape in a decoded message, in bytes. A small dimension takes 1 byte on the
wire."""
_MOST_DECODED = 16
"""Most memory of a decoded message that is no batch, as a multiple of its size on the wire. Such messages are small, or
wrong."""
_PICTURE_BYTES = 1024
"""Memory of a picture's Python objects, without its pixels, in bytes."""
_TARGET_BYTES = 28
"""Memory of one target, in bytes: the target (8), up to three float32 inputs that the loss fills in (12), and its
logprob (4), of which there are two copies while the answer is made (8)."""


def message_bytes(request: Message, num_bytes: int) -> int:
    """Memory of a request as a message, in bytes: its serialized form, which gRPC keeps for as long as the call lasts,
    and its decoded form, in which parts count however small they are on the wire.

    `num_bytes`: size of the serialized form. ByteSize takes a millisecond for each megabyte, and holds the
    interpreter's lock meanwhile.
    """
    if not isinstance(request, trainer_pb2.ForwardBackwardRequest):
        return _MOST_DECODED * num_bytes
    num_inputs = len(request.loss_fn_config) + len(request.loss_fn_config_v2) + len(request.custom_loss.inputs)
    num_chunks = num_spans = num_dimensions = 0
    for datum in request.data:
        num_chunks += len(datum.model_input)
        num_spans += len(datum.model_input_spans) + len(datum.loss_fn_input_spans)
        num_inputs += len(datum.loss_fn_inputs)
        num_dimensions += sum(len(tensor.shape) for tensor in datum.loss_fn_inputs.values())
    return (
        2 * num_bytes
        + _DATUM_PART_BYTES * len(request.data)
        + tensors.CHUNK_BYTES * num_chunks
        + _SPAN_BYTES * num_spans
        + _INPUT_BYTES * num_inputs
        + _DIMENSION_BYTES * num_dimensions
    )


def batch_bytes(
    request: trainer_pb2.ForwardBackwardRequest, counting: Counting | None = None, decoded: int | None = None
) -> int:
    """Upper bound of the memory that the request's batch takes until it is answered, in bytes: the message, the arrays,
    the scaled pictures and the logprobs. `counting`: how the base model's processor scales pictures; None if it takes
    none. `decoded`: the request's `message_bytes`, if they have been computed already."""
    num_bytes = message_bytes(request, request.ByteSize()) if decoded is None else decoded
    for datum in request.data:
        num_bytes += _DATUM_BYTES + sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input)
        if counting is not None:
            num_bytes += sum(
                _picture_bytes(chunk.image, counting) for chunk in datum.model_input if chunk.HasField("image")
            )
        for name, tensor in datum.loss_fn_inputs.items():
            is_target = name == "target_tokens"
            num_bytes += tensors.num_elements(tensor) * _TARGET_BYTES if is_target else tensors.num_bytes(tensor)
    return num_bytes


def _picture_bytes(image: types_pb2.Image, counting: Counting) -> int:
    """Memory of a scaled picture and its tokens, in bytes; 0 for a picture that will be refused."""
    try:
        size = size_of(image.data, image.format, field="")
        width, height = counting.scaled(*size, field="")
        num_tokens = counting.tokens(*size, field="")
    except InvalidRequest:
        return 0
    return _PICTURE_BYTES + width * height * 3 + num_tokens * np.dtype(np.int32).itemsize
