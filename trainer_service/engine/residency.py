"""Moves models between device and host memory. The models used last are on the device; the others wait on the host.

A model has two copies only while it moves. On a CPU nothing moves: device and host are the same memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tinsmith.modeling.kernels.transfer import in_host_memory

logger = logging.getLogger(__name__)

Move = Callable[[Tensor], Tensor]
"""A function that copies a tensor to other memory."""


class Movable(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def move(self, move: Move) -> None: ...


class Residency:
    """Models by id. `to_device` and `to_host` copy a tensor; without them every model stays where it is."""

    def __init__(self, *, to_device: Move | None, to_host: Move | None) -> None:
        self.moves = to_device is not None
        """False when device and host are the same memory."""
        self._to_device = to_device
        self._to_host = to_host
        self._on_device: dict[str, Movable] = {}
        """In the order of their last use, the latest at the end."""
        self._on_host: dict[str, Movable] = {}

    @classmethod
    def on(cls, device: torch.device) -> Residency:
        if device.type == "cpu":
            return cls(to_device=None, to_host=None)
        return cls(
            to_device=lambda tensor: tensor.to(device, non_blocking=True),
            to_host=partial(in_host_memory, max_pinned_bytes=math.inf),
        )

    @property
    def on_host(self) -> list[str]:
        return list(self._on_host)

    def num_on_host(self, model_ids: Iterable[str]) -> int:
        """How many of these models `use` would move to the device."""
        return sum(model_id in self._on_host for model_id in model_ids)

    @property
    def device_bytes(self) -> int:
        return sum(model.num_bytes for model in self._on_device.values())

    def add(self, model_id: str, model: Movable) -> None:
        """Registers a model, which is on the device."""
        self._on_device[model_id] = model

    def remove(self, model_id: str) -> None:
        self._on_device.pop(model_id, None)
        self._on_host.pop(model_id, None)

    def use(self, model_ids: Iterable[str], *, max_bytes: int | None) -> None:
        """Moves these models to the device. Other models move to the host, those used longest ago first, until all on
        the device together take at most `max_bytes`; None means no limit.

        These models themselves are never moved to the host, even when they take more than `max_bytes`.
        """
        if self._to_device is None:
            return
        wanted = dict.fromkeys(model_ids)
        for model_id in wanted:
            if model_id in self._on_device:
                self._on_device[model_id] = self._on_device.pop(model_id)
        coming = sum(self._on_host[model_id].num_bytes for model_id in wanted if model_id in self._on_host)
        if max_bytes is not None:
            self._offload(max_bytes - coming, keep=wanted)
        for model_id in wanted:
            if model_id in self._on_host:
                self._on_host[model_id].move(self._to_device)
                self._on_device[model_id] = self._on_host.pop(model_id)

    def offload_all_but(self, model_ids: Iterable[str]) -> None:
        """Moves all other models to the host."""
        self._offload(0, keep=dict.fromkeys(model_ids))

    def _offload(self, max_bytes: int, *, keep: Iterable[str]) -> None:
        if self._to_host is None:
            return
        kept = set(keep)
        held = self.device_bytes
        for model_id in [model_id for model_id in self._on_device if model_id not in kept]:
            if held <= max_bytes:
                return
            model = self._on_device[model_id]
            held -= model.num_bytes
            model.move(self._to_host)
            self._on_host[model_id] = self._on_device.pop(model_id)
            logger.debug("%s waits in host memory", model_id)
