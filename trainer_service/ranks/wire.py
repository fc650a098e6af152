"""Messages between ranks: a name, plain fields as JSON, and the bytes of tensors. A message holds no code.

A message is sent as a frame of fixed size with the header's length and its first part, then the rest of the header,
then each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}

Move = Callable[[Tensor], None]
"""Sends a tensor of bytes [n], or receives into it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A command or answer between ranks."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    """In host memory."""

    def send(self, move: Move) -> None:
        kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in self.tensors]
        header = json.dumps([self.name, self.fields, kinds]).encode()
        whole = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        move(_bytes(whole[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")))
        if len(whole) > _FRAME_BYTES:
            move(_bytes(whole[_FRAME_BYTES:]))
        for tensor in self.tensors:
            if tensor.numel():
                move(_view(tensor.detach().contiguous()))

    @classmethod
    def receive(cls, move: Move) -> Message:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        move(frame)
        whole = frame.numpy().tobytes()
        length = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
        if length > _FRAME_BYTES:
            rest = torch.empty(length - _FRAME_BYTES, dtype=torch.uint8)
            move(rest)
            whole += rest.numpy().tobytes()
        name, fields, kinds = json.loads(whole[_LENGTH_BYTES:length])
        tensors = [torch.empty(shape, dtype=_DTYPES[dtype]) for dtype, shape in kinds]
        for tensor in tensors:
            if tensor.numel():
                move(_view(tensor))
        return cls(name, fields, tensors)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _view(tensor: Tensor) -> Tensor:
    """A view of the tensor's memory as bytes [n]."""
    return tensor.view(-1).view(torch.uint8)
