"""Ranks other than 0: each runs the commands of rank 0 (leader.py) on its own engine."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

import torch

from tinsmith.cores import Cores
from tinsmith.errors import ServiceError
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.batch import Batch, MicroBatch
from trainer_service.engine.engine import TrainingEngine
from trainer_service.ranks.calls import make
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.team import RankTeam
from trainer_service.ranks.wire import Message
from trainer_service.requests import batch_from_bytes

logger = logging.getLogger(__name__)


class Follower:
    """Runs the commands of rank 0 until it sends "stop". When rank 0 is lost, the process ends (RankGroup.lost)."""

    def __init__(
        self,
        base: BaseModel,
        group: RankGroup,
        cores: Cores | None = None,
        *,
        max_tokens_per_microbatch: int,
        **settings: Any,
    ) -> None:
        """`settings`: the same as those of rank 0's engine. `cores`: None leaves the number of threads unchanged."""
        self._group = group
        self._cores = cores
        self._team = RankTeam(group, sharded=base.sharded)
        budget = max_tokens_per_microbatch * self._team.num_shares
        self._engine = TrainingEngine(base, max_tokens_per_microbatch=budget, team=self._team, **settings)
        self._batches: dict[int, Batch] = {}
        """The batches that have begun, by their numbers."""

    def work(self) -> None:
        while (message := self._group.command(None)).name != "stop":
            if self._cores is not None:
                self._cores.begin()
            try:
                if message.name == "run":
                    self._run(message)
                else:
                    self._team.all_or_none(lambda message=message: make(message, self._engine))
            except (ServiceError, MemoryError) as error:  # rank 0 raises the same error, and answers with it
                logger.debug("%s: %s", message.name, error)

    def _run(self, message: Message) -> None:
        micro_batch = self._team.all_or_none(lambda: self._micro_batch(message))
        self._team.all_or_none(lambda: self._engine.passes.run(micro_batch))
        place = self._group.place
        if place.leads(place.rank):
            self._group.send(_results(micro_batch))

    def _micro_batch(self, message: Message) -> MicroBatch:
        """The batches of the message, without results of earlier micro-batches."""
        for number in message.fields["ended"]:
            self._batches.pop(number, None)
        for (number, model_id), request in zip(message.fields["new"], message.tensors, strict=True):
            batch = batch_from_bytes(request.numpy().tobytes(), self._engine.limits)
            self._batches[number] = replace(batch, request=None, model_id=model_id)
        batches = {number: replace(self._batches[number]) for number, _ in message.fields["micro_batch"]}
        for batch in batches.values():
            self._engine.passes.charge(batch)
        return [(batches[number], indices) for number, indices in message.fields["micro_batch"]]


def _results(micro_batch: MicroBatch) -> Message:
    """The results of this row: for each part of the micro-batch its loss, metrics, mismatch, custom loss's time and
    computed datums, and the logprobs of all datums end to end.

    All but the datums are sums over a batch. The batch's first part has them; its other parts have zeros.
    """
    told: set[Batch] = set()
    fields, logprobs = [], []
    for batch, indices in micro_batch:
        computed = [index for index in indices if batch.logprobs[index].size]
        logprobs += [torch.from_numpy(batch.logprobs[index].ravel()) for index in computed]
        mismatch = None if batch.mismatch is None else asdict(batch.mismatch)
        first = batch not in told
        told.add(batch)
        sums = (batch.loss_sum, batch.metrics, mismatch, batch.loss_seconds) if first else (0.0, {}, None, 0.0)
        fields.append((*sums, computed))
    return Message("results", {"batches": fields}, [torch.cat([torch.empty(0), *logprobs])])
