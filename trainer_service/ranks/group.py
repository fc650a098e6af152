"""The connected ranks of one trainer: gloo groups for messages, and a device mesh for common computations."""

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
"""Longest wait for the next command. It is practically unlimited."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Communication with the other ranks, for one thread at a time.

    When a rank is lost, the methods end this process, because nothing can be computed without that rank.
    """

    place: Place
    idle: dist.ProcessGroup
    """gloo group without a time limit: for the beginning of the next command, and while the base model is loaded. A
    rank that is lost meanwhile closes its connection, or gives no more signs of life (`roll_call`)."""
    control: dist.ProcessGroup
    """gloo group with a time limit, on every device: for all other messages of a command."""
    mesh: DeviceMesh
    """Mesh [rows, ranks of a row]."""
    roll_call: RollCall
    timeout: timedelta
    """Longest time that a rank waits for another within a command."""

    @classmethod
    def join(cls, place: Place, device: torch.device, *, timeout_s: float) -> RankGroup:
        """Connects this rank, and waits for all others. `timeout_s`: longest wait for a rank within a command."""
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
        # The roll call waits twice as long, because a rank that is missing within a command is noticed after
        # `timeout_s` without it, and the log then says more.
        roll_call = RollCall(store, rank=place.rank, world_size=place.world_size, longest_s=2 * timeout_s)
        group = cls(place, idle, control, mesh, roll_call, timeout)
        roll_call.start(group.end)
        return group

    def division(self) -> Division | None:
        """How the base model is divided among the ranks; None when every rank has all of it."""
        row = GroupPeers(self.mesh.get_group("tensor")) if self.place.tensor_parallel > 1 else None
        rows = self.mesh["data"] if self.place.shard_base else None
        return None if row is None and rows is None else Division(row, rows, self.in_turns)

    def in_turns(self, call: Callable[[], T], /) -> T:
        """Makes the call on the ranks of each machine one after the other, so that temporary memory is taken only once.

        It has no time limit: the call loads the base model.
        """
        results: list[T] = []
        for turn in range(self._largest(self.place.local_world_size, self.idle)):
            if turn == self.place.local_rank:
                results.append(call())
            self._largest(0, self.idle)
        return results[0]

    def command(self, message: Message | None) -> Message:
        """Sends rank 0's next command to all ranks, and returns it. Other ranks pass None, and wait without a limit."""
        begun = False

        def move(tensor: Tensor) -> None:
            nonlocal begun
            group = self.control if begun else self.idle
            work = dist.broadcast(tensor, src=0, group=group, async_op=True)
            assert work is not None
            # Sending also waits, until the other ranks receive: rank 0 limits that wait, too.
            work.wait() if begun or message is None else work.wait(self.timeout)
            begun = True

        return self._exchange(message, move)

    def broadcast(self, message: Message | None, *, source: int = 0) -> Message:
        """Sends a message of the rank `source` to all ranks, and returns it. The other ranks pass None."""

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
        """Sends a message to rank 0."""

        def move(tensor: Tensor) -> None:
            dist.send(tensor, dst=0, group=self.control)

        self._alive(lambda: message.send(move))

    def receive(self, source: int) -> Message:
        def move(tensor: Tensor) -> None:
            dist.recv(tensor, src=source, group=self.control)

        return self._alive(lambda: Message.receive(move))

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return self._largest(number, self.control)

    def _largest(self, number: int, group: dist.ProcessGroup) -> int:
        self.roll_call.step += 1
        numbers = torch.tensor([number])
        self._alive(lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group))
        return int(numbers.item())

    def sum_(self, tensor: Tensor) -> None:
        """Sums a tensor over all ranks, in place, on the tensor's device."""
        self._alive(lambda: dist.all_reduce(tensor))

    def _alive(self, call: Callable[[], Any]) -> Any:
        """Makes a call of torch.distributed; when it fails, a rank is lost and this process ends."""
        try:
            return call()
        except RuntimeError as error:  # what torch.distributed raises
            self.lost(error)

    def lacks_a_rank(self) -> bool:
        """True when the process of another rank is gone or stopped. Takes seconds.

        It tells a lost rank from an operator's request to stop: torchrun sends this process the same signal for both.
        """
        return bool(self.roll_call.absent().still)

    def lost(self, error: Exception) -> NoReturn:
        """Ends this process after an error of torch.distributed, and logs which ranks are missing."""
        absent = "another rank is lost" if process.stopping.is_set() else self.roll_call.absent()
        self.end(
            f"{absent} (ranks wait at most {self.timeout.total_seconds():g} s, --rank-timeout-s: {_first_line(error)})"
        )

    def end(self, reason: str) -> NoReturn:
        """Ends this process. The other ranks notice and end, too; torchrun stops those that do not."""
        if process.stopping.is_set():
            process.leave(0)
        logger.critical("rank %d of %d ends: %s", self.place.rank, self.place.world_size, reason)
        process.leave(1)


def is_of_other_ranks(error: Exception) -> bool:
    """True for the error of a failed collective: another rank is gone, or did not come in time.

    gloo's errors have no type of their own and are known by their text.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
