"""The journal's data types: requests as they are stored, and operations and models as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import xxhash
import zstandard
from google.protobuf.message import Message

from tinsmith.rpc.errors import ModelLost, ServiceError
from tinsmith.v1 import trainer_pb2


class State(IntEnum):
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
        data = request.SerializeToString(deterministic=True)
        return cls(kind, _digest(kind, data), zstandard.ZstdCompressor(level=1).compress(data))

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
        if self.kind not in ("create_model", "optim_step") and _digest(self.kind, data) != self.digest:
            raise ValueError("its digest does not match")
        return data


@dataclass(frozen=True, slots=True)
class Record:
    """An accepted operation."""

    kind: str
    digest: bytes
    state: State
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
    state: State
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
