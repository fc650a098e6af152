"""The ranks of one trainer, connected: a control group for messages, and groups for what they compute together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_ops import GroupPeers
from trainer_service.ranks import process
from trainer_service.ranks.place import Place
from trainer_service.ranks.wire import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE = timedelta(days=3650)
"""A rank may wait so long for the next message. That a rank is gone shows in its closed connection, not here."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Used by one thread at a time. A lost rank ends this process: nothing can be computed without it."""

    place: Place
    control: dist.ProcessGroup
    """gloo, whatever computes."""
    mesh: DeviceMesh
    """[row, rank in its row]."""

    @classmethod
    def join(cls, place: Place, device: torch.device, *, timeout_s: float) -> RankGroup:
        """Waits for all ranks. `timeout_s` is the longest that one may wait for another within a computation."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=_IDLE)
        assert isinstance(control, dist.ProcessGroup)
        shape = place.num_rows, place.tensor_parallel
        return cls(place, control, init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor")))

    def division(self) -> Division | None:
        """Of the base model; None when every rank has all of it."""
        row = GroupPeers(self.mesh.get_group("tensor")) if self.place.tensor_parallel > 1 else None
        rows = self.mesh["data"] if self.place.shard_base else None
        return None if row is None and rows is None else Division(row, rows, self.in_turns)

    def in_turns(self, call: Callable[[], T], /) -> T:
        """Makes the call on one rank of each machine after the other: what it needs for a moment is there once."""
        results: list[T] = []
        for turn in range(self.largest(self.place.local_world_size)):
            if turn == self.place.local_rank:
                results.append(call())
            self.wait_for_all()
        return results[0]

    def broadcast(self, message: Message | None, *, source: int = 0) -> Message:
        """One rank's message on all of them; the others give None."""

        def move(tensor: Tensor) -> None:
            dist.broadcast(tensor, src=source, group=self.control)

        if message is None:
            return self._alive(lambda: Message.receive(move))
        self._alive(lambda: message.send(move))
        return message

    def send(self, message: Message) -> None:
        """To rank 0."""

        def move(tensor: Tensor) -> None:
            dist.send(tensor, dst=0, group=self.control)

        self._alive(lambda: message.send(move))

    def receive(self, source: int) -> Message:
        def move(tensor: Tensor) -> None:
            dist.recv(tensor, src=source, group=self.control)

        return self._alive(lambda: Message.receive(move))

    def largest(self, number: int) -> int:
        """Of all ranks'."""
        numbers = torch.tensor([number])
        self._alive(lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control))
        return int(numbers.item())

    def wait_for_all(self) -> None:
        self.largest(0)

    def sum_(self, tensor: Tensor) -> None:
        """Adds up over all ranks, in place, on the device of the tensor."""
        self._alive(lambda: dist.all_reduce(tensor))

    def _alive(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # what torch.distributed raises
            self.end(f"another rank is lost ({_first_line(error)})")

    def end(self, reason: str) -> NoReturn:
        """Ends this process, and so the others: torchrun stops those that do not notice."""
        if process.stopping.is_set():
            process.leave(0)
        logger.critical("rank %d of %d ends: %s", self.place.rank, self.place.world_size, reason)
        process.leave(1)


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
