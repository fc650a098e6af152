"""Sequence numbers for training operations that come without a `seq_id`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from cachetools import LRUCache

from gateway.database.tables.sessions import Model
from gateway.futures import Futures
from gateway.high_availability.peers import GatewayPeers
from gateway.placement import Placement
from tinsmith.errors import ModelNotFound, NotReady, ResultNotFound
from tinsmith.v1 import trainer_pb2 as pb

_MAX_HINTS = 10_000
"""Most models whose last given number is kept in memory."""


class Numbers:
    """Gives each operation without a `seq_id` the first number that the trainer's journal does not hold.

    The journal outlives restarts of the gateway and of the trainer, so no number is given twice. Operations of one
    model are submitted one after the other, also by several gateways.
    """

    def __init__(self, placement: Placement, futures: Futures, peers: GatewayPeers, *, timeout_s: float) -> None:
        self._placement = placement
        self._futures = futures
        self._peers = peers
        self._timeout_s = timeout_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._hints: LRUCache[str, int] = LRUCache(_MAX_HINTS)
        """model_id -> number after the last given one. It saves asking the trainer about each queued number."""

    @contextlib.asynccontextmanager
    async def next(self, model: Model) -> AsyncIterator[int]:
        """A free number, reserved until the block ends. The operation must be submitted inside the block.

        Raises NotReady when the trainer cannot be reached.
        """
        lock = self._locks.setdefault(model.model_id, asyncio.Lock())
        async with lock, self._peers.alone(f"numbers of {model.model_id}"):
            number = await self._free(model)
            yield number
            self._hints[model.model_id] = number + 1

    async def _free(self, model: Model) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                trainer = await self._placement.of_run(model.model_id)
                number = await self._next_to_run(trainer.stub, model.model_id)
                if number == 1 and await self._placement.has_moved(model.model_id, trainer):
                    raise NotReady(f"model {model.model_id} moves to another trainer; send it again")
                number = max(number, self._hints.get(model.model_id, 1))
                while await self._is_taken(trainer.stub, model.model_id, number):
                    number += 1
                return number
        except TimeoutError:
            raise NotReady("the trainer cannot be reached to number this operation; send it again") from None

    async def _next_to_run(self, stub: Any, model_id: str) -> int:
        try:
            reply = await stub.GetModel(pb.GetModelRequest(model_id=model_id))
        except ModelNotFound:
            return 1  # the model is still being created
        return max(1, reply.model.next_seq_id)

    async def _is_taken(self, stub: Any, model_id: str, number: int) -> bool:
        if self._futures.pending(f"{model_id}:{number}") is not None:
            return True
        try:
            await stub.DescribeOperation(pb.DescribeOperationRequest(model_id=model_id, seq_id=number))
        except ResultNotFound:
            return False
        return True
