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
from trainer_service.ranks.roll_call import RollCall
from trainer_service.ranks.wire import Message, Move

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE = timedelta(days=3650)
"""A rank may wait so long for the next command. That rank 0 is gone shows in its closed connection, not here."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Used by one thread at a time. A lost rank ends this process: nothing can be computed without it."""

    place: Place
    idle: dist.ProcessGroup
    """gloo, with no limit of time: for the beginning of the next command, and while the base model is loaded."""
    control: dist.ProcessGroup
    """gloo, whatever computes: for all else within a command."""
    mesh: DeviceMesh
    """[row, rank in its row]."""
    roll_call: RollCall
    timeout: timedelta
    """The longest that a rank waits for another once a command has begun."""

    @classmethod
    def join(cls, place: Place, device: torch.device, *, timeout_s: float) -> RankGroup:
        """Waits for all ranks. `timeout_s` is the longest that one may wait for another within a command."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(dist.rendezvous("env://"))
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        idle = dist.new_group(backend="gloo", timeout=_IDLE)
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(idle, dist.ProcessGroup)
        assert isinstance(control, dist.ProcessGroup)
        shape = place.num_rows, place.tensor_parallel
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        roll_call = RollCall(store, rank=place.rank, world_size=place.world_size)
        roll_call.start()
        return cls(place, idle, control, mesh, roll_call, timeout)

    def division(self) -> Division | None:
        """Of the base model; None when every rank has all of it."""
        row = GroupPeers(self.mesh.get_group("tensor")) if self.place.tensor_parallel > 1 else None
        rows = self.mesh["data"] if self.place.shard_base else None
        return None if row is None and rows is None else Division(row, rows, self.in_turns)

    def in_turns(self, call: Callable[[], T], /) -> T:
        """Makes the call on one rank of each machine after the other: what it needs for a moment is there once.

        That may take as long as it takes: it is for loading.
        """
        results: list[T] = []
        for turn in range(self._largest(self.place.local_world_size, self.idle)):
            if turn == self.place.local_rank:
                results.append(call())
            self._largest(0, self.idle)
        return results[0]

    def command(self, message: Message | None) -> Message:
        """Rank 0's next command on all ranks; the others give None, and wait for it without a limit."""
        begun = False

        def move(tensor: Tensor) -> None:
            nonlocal begun
            group = self.control if begun else self.idle
            work = dist.broadcast(tensor, src=0, group=group, async_op=True)
            assert work is not None
            # To send also waits, until the others receive.
            work.wait() if begun or message is None else work.wait(self.timeout)
            begun = True

        return self._exchange(message, move)

    def broadcast(self, message: Message | None, *, source: int = 0) -> Message:
        """One rank's message on all of them; the others give None."""

        def move(tensor: Tensor) -> None:
            dist.broadcast(tensor, src=source, group=self.control)

        return self._exchange(message, move)

    def _exchange(self, message: Message | None, move: Move) -> Message:
        self.roll_call.step += 1
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
        return self._largest(number, self.control)

    def _largest(self, number: int, group: dist.ProcessGroup) -> int:
        self.roll_call.step += 1
        numbers = torch.tensor([number])
        self._alive(lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group))
        return int(numbers.item())

    def sum_(self, tensor: Tensor) -> None:
        """Adds up over all ranks, in place, on the device of the tensor."""
        self._alive(lambda: dist.all_reduce(tensor))

    def _alive(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # what torch.distributed raises
            self.lost(error)

    def lacks_a_rank(self) -> bool:
        """True when another rank is gone: torchrun then stops this one as an operator would. Takes seconds."""
        return bool(self.roll_call.absent().still)

    def lost(self, error: Exception) -> NoReturn:
        """Ends this process for an error of torch.distributed, and says who is missing."""
        absent = "another rank is lost" if process.stopping.is_set() else self.roll_call.absent()
        self.end(
            f"{absent} (it is waited for at most {self.timeout.total_seconds():g} s, --rank-timeout-s: "
            f"{_first_line(error)})"
        )

    def end(self, reason: str) -> NoReturn:
        """Ends this process, and so the others: torchrun stops those that do not notice."""
        if process.stopping.is_set():
            process.leave(0)
        logger.critical("rank %d of %d ends: %s", self.place.rank, self.place.world_size, reason)
        process.leave(1)


def is_of_other_ranks(error: Exception) -> bool:
    """A collective has failed: another rank is gone, or has not come in time. gloo tells it by its text only."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
