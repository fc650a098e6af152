"""The Team of several ranks: divides datums, raises one rank's error on all ranks, and sums gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from tinsmith.errors import ServiceError
from tinsmith.faults import is_device_fault, is_out_of_memory
from tinsmith.modeling.parallel_base import ShardedLayers
from tinsmith.rpc import errors
from trainer_service.engine.batch import Example
from trainer_service.ranks.group import RankGroup, is_of_other_ranks
from trainer_service.ranks.share import balanced
from trainer_service.ranks.wire import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FINE, _FAILED, _OUT_OF_MEMORY = 0, 1, 2
"""A rank's vote on a call. The largest vote of all ranks decides."""


class RankTeam:
    """A Team of several ranks. With `sharded` layers every rank takes part in every pass, even when it has no datums:
    the others need its part of the layers."""

    sees_all = False

    def __init__(self, group: RankGroup, *, sharded: ShardedLayers | None = None) -> None:
        self._group = group
        self._sharded = sharded
        self._tensor_parallel = group.place.tensor_parallel > 1
        self.together = sharded is not None or self._tensor_parallel
        """True when ranks need each other within a pass. They must then agree, before backward, that forward
        succeeded."""
        self._halfway = False
        """True in a pass when forward and losses are done."""
        self._decided = False
        """True when a vote of this pass has failed, so that no further vote follows."""

    @property
    def num_shares(self) -> int:
        return self._group.place.num_rows

    @property
    def is_first(self) -> bool:
        return self._group.place.rank == 0

    def shares(self, examples: Sequence[Example]) -> Sequence[Sequence[Example]]:
        saved = [
            one.batch.shared[one.index] if one.previous == before else 0
            for before, one in zip([None, *examples], examples, strict=False)
        ]
        numbers = balanced([one.batch.charges[one.index] for one in examples], saved, self.num_shares)
        return [[examples[n] for n in share] for share in numbers]

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        return self.shares(examples)[self._group.place.row]

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        self._decided = False
        self._halfway = False
        if self._sharded is not None:
            self._sharded.begin()
        try:
            failure = None
            try:
                yield
            except Exception as error:
                if self._decided:
                    raise
                failure = self._failure(error, together=True)
            if self._sharded is not None:
                self._sharded.catch_up(backward=self._halfway and torch.is_grad_enabled())
            self._vote(failure)
        finally:
            if self._sharded is not None:
                self._sharded.reset()

    def halfway(self) -> None:
        if self._sharded is not None:
            self._sharded.catch_up(backward=False)
        if self.together:
            self._vote(None)
        self._halfway = True

    def all_or_none(self, call: Callable[[], T]) -> T:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = self._failure(error, together=False)
        self._vote(failure)
        return result  # type: ignore[return-value]  # it is there: otherwise the vote has raised

    def sum_(self, tensor: Tensor) -> None:
        self._group.sum_(tensor)

    def _failure(self, error: Exception, *, together: bool) -> ServiceError | MemoryError:
        """The error to tell the other ranks. It does not hold the original's frames and their tensors.

        Ends the process when the ranks cannot agree any more: a rank is lost, this rank's device has a fault, or the
        error came in the middle of a tensor-parallel computation (`together`).
        """
        if isinstance(error, ServiceError):
            return error
        if is_of_other_ranks(error):
            self._group.lost(error)
        if is_device_fault(error):
            logger.exception("this rank has failed")
            self._group.end(f"a fault of its device, after which nothing computes: {error}")
        if together and self._tensor_parallel:
            # The other ranks wait for this one in the middle of a layer, which it can no longer reach.
            logger.exception("this rank has failed within a computation that it shares")
            self._group.end(
                f"{type(error).__name__} within a computation that tensor-parallel ranks do together; if it has run "
                "out of memory, lower max_tokens_per_microbatch"
            )
        if is_out_of_memory(error):
            return MemoryError()
        logger.exception("this rank has failed")
        return ServiceError(f"{type(error).__name__} on rank {self._group.place.rank}; the trainer's log has the cause")

    def _vote(self, failure: ServiceError | MemoryError | None) -> None:
        """Raises on all ranks when one has failed: MemoryError if any rank lacks memory, else the lowest rank's
        error."""
        place = self._group.place
        opinion = _FINE if failure is None else _OUT_OF_MEMORY if isinstance(failure, MemoryError) else _FAILED
        last = place.world_size - 1
        worst, from_last = divmod(self._group.largest(opinion * place.world_size + last - place.rank), place.world_size)
        if worst == _FINE:
            return
        self._decided = True
        if worst == _OUT_OF_MEMORY:
            raise MemoryError("a rank has run out of memory")
        rank = last - from_last
        if rank != place.rank:
            raise _read(self._group.broadcast(None, source=rank))
        assert isinstance(failure, ServiceError)
        self._group.broadcast(_written(failure), source=rank)
        raise failure


def _written(error: ServiceError) -> Message:
    return Message("error", tensors=[torch.frombuffer(bytearray(errors.to_bytes(error)), dtype=torch.uint8)])


def _read(message: Message) -> ServiceError:
    return errors.from_bytes(message.tensors[0].numpy().tobytes())
