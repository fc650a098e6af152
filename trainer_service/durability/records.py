"""Records of the journal: requests and answers, with checksums, and the states of operations and models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain

import xxhash
import zstandard
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tinsmith.errors import ModelLost, ServiceError
from tinsmith.v1 import trainer_pb2

_DATUMS_AT_ONCE = 64
"""Datums of a batch that are serialized in one go."""


class EntryState(IntEnum):
    ACCEPTED = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Body:
    """A request as the journal stores it."""

    kind: str
    digest: bytes
    compressed: bytes

    @classmethod
    def pack(cls, kind: str, request: Message) -> Body:
        data = _serialized(request)
        return cls(kind, _digest(kind, data), zstandard.ZstdCompressor(level=1).compress(data))

    def storing(self, request: Message) -> Body:
        """A body that stores `request` under the digest of this one. `request` is the request of this body, to which
        the trainer has added what a replay needs. A repeat of the request lacks these additions, so the digest does not
        cover them."""
        return replace(self, compressed=Body.pack(self.kind, request).compressed)

    @property
    def num_bytes(self) -> int:
        """Size of the serialized request, uncompressed."""
        return zstandard.frame_content_size(self.compressed)

    def unpack(self) -> bytes:
        """The serialized request. Raises ValueError when it differs from the request that was packed."""
        try:
            data = zstandard.ZstdDecompressor().decompress(self.compressed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        # The trainer adds fields to these requests, such as a seed. Their digest is that of the request as it came.
        if (
            self.kind not in ("create_model", "optim_step", "save_checkpoint")
            and _digest(self.kind, data) != self.digest
        ):
            raise ValueError("its digest does not match")
        return data


@dataclass(frozen=True, slots=True)
class Record:
    """An accepted operation."""

    kind: str
    digest: bytes
    state: EntryState
    outcome: trainer_pb2.WaitResultResponse | ServiceError | None
    """The answer. None before the operation has finished, and when the answer was not kept; DataCorrupted when it is
    damaged."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A live model, as a restart finds it."""

    model_id: str
    cut_seq_id: int
    snapshot_seq_id: int | None
    last_seq_id: int | None
    """seq_id of the newest operation; None when no operation's row is left."""

    @property
    def is_covered(self) -> bool:
        """True when the newest snapshot covers every operation, so that nothing has to run again."""
        return self.snapshot_seq_id is not None and (self.last_seq_id or 0) <= self.snapshot_seq_id


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation in its model's history."""

    seq_id: int
    kind: str
    digest: bytes
    state: EntryState
    num_bytes: int
    """Size of the compressed body, in bytes; 0 when the body was cut."""


def _digest(kind: str, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(kind.encode() + b"\0")
    digest.update(data)
    return digest.digest()


def sum_of(model_id: str, seq_id: int, what: str, data: bytes) -> bytes:
    """Checksum of a request or a result, bound to its place. `what`: a request's kind, or the number of a result's
    state."""
    digest = xxhash.xxh3_64(f"{model_id}\0{seq_id}\0{what}\0".encode())
    digest.update(data)
    return digest.digest()


def result_sum(model_id: str, seq_id: int, state: int, result: bytes) -> bytes:
    """The checksum of an answer."""
    return sum_of(model_id, seq_id, str(int(state)), result)


def lost(model_id: str, reason: str) -> ModelLost:
    """The error of all operations of a model that could not be restored."""
    return ModelLost(
        f"{model_id} was not restored after the trainer's restart: {reason}; resume from a checkpoint "
        "(create_training_client_from_state)",
        model_id=model_id,
    )


def _serialized(request: Message) -> bytes:
    """The deterministic serialization of a request. Many datums are serialized a few at a time, because protobuf holds
    the interpreter's lock while it serializes a message, and the event loop and the compute thread wait for that."""
    if not isinstance(request, trainer_pb2.ForwardBackwardRequest) or len(UnknownFieldSet(request)):
        return request.SerializeToString(deterministic=True)
    starts = range(0, len(request.data), _DATUMS_AT_ONCE)
    after = trainer_pb2.ForwardBackwardRequest(
        loss_fn=request.loss_fn,
        loss_fn_config=request.loss_fn_config,
        forward_only=request.forward_only,
        loss_fn_config_v2=request.loss_fn_config_v2,
        custom_loss=request.custom_loss if request.HasField("custom_loss") else None,
    )
    parts = chain(
        [trainer_pb2.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id)],
        (trainer_pb2.ForwardBackwardRequest(data=request.data[start : start + _DATUMS_AT_ONCE]) for start in starts),
        [after],
    )
    return b"".join(part.SerializeToString(deterministic=True) for part in parts)
