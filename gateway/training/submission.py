"""The record of a training operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from gateway.futures import Pending
from gateway.ids import request_id_of
from tinsmith.errors import ServiceError
from tinsmith.v1 import trainer_pb2 as pb


@dataclass(slots=True, eq=False, kw_only=True)
class Submission(Pending):
    """One training operation, from its route to its answer. `kind` is the endpoint, and `group` is the model."""

    seq_id: int
    base_model: str = ""
    """Base model of the run; set when the operation is admitted."""
    rpc: str = ""
    """The trainer's RPC; empty for an operation that another process submitted."""
    body: bytes = b""
    """The RPC's request. The body of a batch is emptied once the trainer has it in its journal."""
    path: str | None = None
    """Tinker path that the operation loads or saves."""
    sampling_session_id: str | None = None
    """The sampling session that an ephemeral save makes; None for other operations."""
    inflight: bool = False
    """True for a save with kind "inflight"."""
    loss_fn: str = ""
    picture_sizes: Sequence[tuple[int, int]] = ()
    """Width and height of the pictures whose tokens are not in `num_tokens`, because they depend on the base model."""
    is_forward_only: bool = False
    """True for a batch that adds no gradients."""
    sends_parts_at_once: bool = True
    """True if the client sends all parts of a large batch before it asks for the answer of any part."""
    is_completed: bool = False
    """True if the gateway has added content that the client only names, such as a custom loss. A repeat may then have
    another body."""
    error: ServiceError | None = None
    """The reason for which the gateway refuses the operation. The trainer then gets a SkipOperation, because the number
    is used up."""

    @classmethod
    def of(cls, kind: str, model_id: str, seq_id: int, *, fingerprint: str | None = None, **fields: Any) -> Submission:
        return cls(request_id_of(model_id, seq_id), kind, model_id, fingerprint, seq_id=seq_id, **fields)

    @property
    def model_id(self) -> str:
        return self.group

    @property
    def adds_gradients(self) -> bool:
        """True also for a refused batch that was meant to add gradients."""
        return self.kind == "forward_backward" and not self.is_forward_only

    def calls(self, rpc: str, request: Message) -> None:
        """Makes the operation this RPC of the trainer, with this request."""
        self.rpc, self.body = rpc, request.SerializeToString(deterministic=True)

    def refuse(self, error: ServiceError) -> None:
        """Makes the operation fail with this error. The trainer only learns that the number is used up."""
        self.error = error
        self.rpc, self.body = "SkipOperation", b""
        self.path, self.sampling_session_id, self.inflight, self.is_completed = None, None, False, False

    def number(self, seq_id: int) -> None:
        """Gives a number to a batch that came without one."""
        self.seq_id, self.request_id = seq_id, request_id_of(self.model_id, seq_id)
        if self.error is None:  # protobuf merges concatenated messages, so appended fields belong to the request
            self.body += pb.ForwardBackwardRequest(seq_id=seq_id).SerializeToString()

    @property
    def request_body(self) -> bytes:
        """The serialized request of the RPC."""
        if self.error is None:
            return self.body
        return pb.SkipOperationRequest(
            model_id=self.model_id,
            seq_id=self.seq_id,
            reason=self.error.message,
            gradients_missing=self.adds_gradients,
        ).SerializeToString()
