"""The engine of rank 0. It sends every call that changes something to the other ranks, too (calls.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import OutOfCapacity, ServiceError
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import Weights
from trainer_service.engine.batch import Batch, MicroBatch, Output
from trainer_service.engine.budget import Lengths, MemoryBudget, Plan
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import Params
from trainer_service.engine.passes import Passes
from trainer_service.metrics import Metrics
from trainer_service.objectives.mismatch import Mismatch
from trainer_service.ranks.calls import message_of
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.team import RankTeam
from trainer_service.ranks.wire import Message
from trainer_service.requests import batch_to_bytes
from trainer_service.weight_sync.canary import Pictured, Scores, Tokens

T = TypeVar("T")
P = ParamSpec("P")


class LeadingEngine(TrainingEngine):
    """A TrainingEngine whose work several ranks share, with the methods and results of a single rank's engine.

    A call that changes anything is made on all ranks (calls.py). A call that only reads runs on rank 0 alone: weights,
    moments and step counts are the same on every rank.
    """

    passes: LeadingPasses

    def __init__(self, base: BaseModel, group: RankGroup, *, max_tokens_per_microbatch: int, **settings: Any) -> None:
        """All settings, `max_tokens_per_microbatch` included, are for one rank."""
        self._group = group
        self._ranks = RankTeam(group, sharded=base.sharded)
        budget = max_tokens_per_microbatch * self._ranks.num_shares
        super().__init__(base, max_tokens_per_microbatch=budget, team=self._ranks, **settings)

    def _passes(self) -> LeadingPasses:
        return LeadingPasses(
            self.base,
            self.models,
            self.memory,
            self._ranks,
            self._metrics,
            self._group,
            share_prefixes=self.limits.share_prefixes,
        )

    def stop(self) -> None:
        """Ends the other ranks. Nothing can be computed afterwards."""
        self._group.command(Message("stop"))

    def follow(self, plan: Plan) -> None:
        """Adopts a plan on all ranks. `plan`: as measured for one rank; its token budget is multiplied by the
        shares."""
        self._everywhere(TrainingEngine.follow, replace(plan, token_budget=plan.token_budget * self._ranks.num_shares))

    def add_model(self, model_id: str, model: ModelState) -> None:
        try:
            if isinstance(model.adapter, Adapter):
                self._everywhere(TrainingEngine.add_model, model_id, model)
            else:  # a new full model has the base model's parameters, which every rank has already
                message = message_of(
                    TrainingEngine.create_model, [model_id, model.adapter.config, model.optimizer_kind], {}
                )
                self._group.command(message)
                self._ranks.all_or_none(lambda: super(LeadingEngine, self).add_model(model_id, model))
        except (ServiceError, MemoryError) as error:
            super().delete_model(model_id)
            if isinstance(error, ServiceError):
                raise
            raise OutOfCapacity(f"there is no memory for {model_id} at this moment on every rank") from None

    def delete_model(self, model_id: str) -> None:
        self.passes.forget_model(model_id)
        self._everywhere(TrainingEngine.delete_model, model_id)

    def probe(self, model_id: str, lengths: Lengths, *, checkpointing: bool, num_pictures: int = 0) -> None:
        self._everywhere(
            TrainingEngine.probe, model_id, lengths, checkpointing=checkpointing, num_pictures=num_pictures
        )

    def optim_step(self, model_id: str, params: Params, *, failure_seen: int = 0) -> Mapping[str, float]:
        return self._everywhere(TrainingEngine.optim_step, model_id, params, failure_seen=failure_seen)

    def capture(self, model_id: str, *, with_optimizer: bool, with_accumulation: bool = False) -> CapturedState:
        if with_accumulation:
            self._everywhere(TrainingEngine.gather_gradient, model_id)
        return super().capture(model_id, with_optimizer=with_optimizer, with_accumulation=with_accumulation)

    def restore(self, model_id: str, state: CapturedState, *, with_optimizer: bool) -> None:
        if not with_optimizer:
            state = replace(state, optimizer=None)  # so that it is not sent
        self._everywhere(TrainingEngine.restore, model_id, state, with_optimizer=with_optimizer)

    def score(self, weights: Weights | None, sequences: Sequence[Tokens | Pictured]) -> Scores:
        if not self._ranks.together:
            return super().score(weights, sequences)  # rank 0 has the whole base model
        try:
            return self._everywhere(TrainingEngine.score_together, weights, sequences)
        except MemoryError:
            raise OutOfCapacity("there is no memory for scoring a published version at this moment") from None

    def _everywhere(
        self, call: Callable[Concatenate[TrainingEngine, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Makes a call of calls.py on all ranks. An error on any rank is raised on all."""
        self._group.command(message_of(call, arguments, named))
        return self._ranks.all_or_none(lambda: call(self, *arguments, **named))


class LeadingPasses(Passes):
    """Passes in which all ranks take part. The other ranks make each batch from its request, when it first runs."""

    def __init__(
        self,
        base: BaseModel,
        models: Mapping[str, ModelState],
        memory: MemoryBudget,
        ranks: RankTeam,
        metrics: Metrics,
        group: RankGroup,
        *,
        share_prefixes: bool,
    ) -> None:
        super().__init__(base, models, memory, ranks, metrics, share_prefixes=share_prefixes)
        self._ranks = ranks
        self._group = group
        self._numbers: dict[Batch, int] = {}
        """Numbers of the batches that the other ranks have."""
        self._last_number = 0
        self._ended: list[int] = []
        """Numbers of ended batches, which the other ranks may forget; the next `run` tells them."""

    def run(self, micro_batch: MicroBatch) -> None:
        micro_batch = [(batch, indices) for batch, indices in micro_batch if batch.error is None and indices]
        if not micro_batch:
            return
        self._group.command(self._to_run(micro_batch))
        try:
            self._ranks.all_or_none(lambda: None)  # the others have read the new batches
            self._ranks.all_or_none(lambda: super(LeadingPasses, self).run(micro_batch))
        except (ServiceError, MemoryError) as error:  # outside any single batch: which gradients were added is unknown
            for batch, _ in micro_batch:
                batch.error = error if isinstance(error, ServiceError) else OutOfCapacity(str(error))
            return
        for rank in range(1, self._group.place.world_size):
            if self._group.place.leads(rank):
                _take(self._group.receive(rank), micro_batch)

    def _to_run(self, micro_batch: MicroBatch) -> Message:
        new: list[tuple[int, str]] = []
        requests: list[Tensor] = []
        for batch in dict.fromkeys(batch for batch, _ in micro_batch):
            if batch not in self._numbers:
                self._last_number += 1
                self._numbers[batch] = self._last_number
                new.append((self._last_number, batch.model_id))
                requests.append(torch.frombuffer(bytearray(batch_to_bytes(batch)), dtype=torch.uint8))
        fields = {
            "micro_batch": [(self._numbers[batch], list(indices)) for batch, indices in micro_batch],
            "new": new,
            "ended": self._ended,
        }
        self._ended = []
        return Message("run", fields, requests)

    def finish(self, batch: Batch) -> Output | ServiceError:
        self._forget(batch)
        return super().finish(batch)

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        self._group.command(message_of(TrainingEngine.taint, [model_id, reason], {"seq_id": seq_id}))
        self._ranks.all_or_none(lambda: super(LeadingPasses, self).taint(model_id, reason, seq_id=seq_id))

    def forget_model(self, model_id: str) -> None:
        """Forgets a deleted model's batches."""
        for batch in [batch for batch in self._numbers if batch.model_id == model_id]:
            self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        number = self._numbers.pop(batch, None)
        if number is not None:
            self._ended.append(number)


def _take(results: Message, micro_batch: MicroBatch) -> None:
    """Adds the results of another row to the batches. `results`: from `follower._results`."""
    (logprobs_M,) = results.tensors
    flat_M = logprobs_M.numpy()
    start = 0
    for (batch, _), result in zip(micro_batch, results.fields["batches"], strict=True):
        loss, metrics, mismatch, loss_seconds, indices = result
        batch.add(loss, metrics, None if mismatch is None else Mismatch(**mismatch))
        batch.loss_seconds = max(batch.loss_seconds, loss_seconds)  # rows compute losses at the same time
        for index in indices:
            shape = batch.datums[index].targets.shape
            stop = start + int(np.prod(shape))
            batch.logprobs[index] = flat_M[start:stop].reshape(shape)
            start = stop
