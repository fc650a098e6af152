"""Ranks other than 0: each runs the commands of rank 0 (leader.py) on its own engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.cores import Cores
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.rpc.errors import ServiceError
from tinsmith.v1 import trainer_pb2
from trainer_service.engine.batch import Batch, MicroBatch
from trainer_service.engine.budget import Footprint, Plan
from trainer_service.engine.engine import Accumulation, OptimizerState, State, TrainingEngine
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import AdamParams, DimuonParams
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.team import RankTeam
from trainer_service.ranks.wire import Message
from trainer_service.weight_sync.canary import score

logger = logging.getLogger(__name__)

_PARAMS = {cls.kind: cls for cls in (AdamParams, DimuonParams)}


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
        engine = TrainingEngine(base, max_tokens_per_microbatch=budget, team=self._team, **settings)
        self._engine = engine
        self._batches: dict[int, Batch] = {}
        """The batches that have begun, by their numbers."""
        self._calls: dict[str, Callable[[Message], None]] = {
            "follow": self._follow,
            "add_model": self._add_model,
            "create_model": self._create_model,
            "delete_model": lambda message: engine.delete_model(message.fields["model_id"]),
            "probe": lambda message: engine.probe(
                message.fields["model_id"], message.fields["lengths"], checkpointing=message.fields["checkpointing"]
            ),
            "taint": lambda message: engine.taint(**message.fields),
            "optim_step": self._optim_step,
            "restore": self._restore,
            "gather_gradient": lambda message: engine.gather_gradient(message.fields["model_id"]),
            "score": self._score,
        }

    def work(self) -> None:
        while (message := self._group.command(None)).name != "stop":
            if self._cores is not None:
                self._cores.begin()
            try:
                if message.name == "run":
                    self._run(message)
                else:
                    call = self._calls[message.name]
                    self._team.all_or_none(lambda call=call, message=message: call(message))
            except (ServiceError, MemoryError) as error:  # rank 0 raises the same error, and answers with it
                logger.debug("%s: %s", message.name, error)

    def _follow(self, message: Message) -> None:
        footprints = {key: message.fields[key] for key in ("plain", "checkpointed")}
        plan = Plan(
            **{**message.fields, **{key: value and Footprint(**value) for key, value in footprints.items()}},
        )
        self._engine.follow(plan)

    def _add_model(self, message: Message) -> None:
        config = AdapterConfig(**message.fields["config"])
        (flat,) = message.tensors
        base = self._engine.base
        model = ModelState(Adapter(config, base.targets, flat.to(base.device)), message.fields["optimizer"])
        self._engine.add_model(message.fields["model_id"], model)

    def _create_model(self, message: Message) -> None:
        config = AdapterConfig(**message.fields["config"])
        self._engine.create_model(message.fields["model_id"], config, message.fields["optimizer"])

    def _optim_step(self, message: Message) -> None:
        params = _PARAMS[message.fields["kind"]](**message.fields["params"])
        self._engine.optim_step(message.fields["model_id"], params, failure_seen=message.fields["failure_seen"])

    def _restore(self, message: Message) -> None:
        config = AdapterConfig(**message.fields["config"])
        flat, *tensors = message.tensors
        optimizer = None
        if message.fields["optimizer"] is not None:
            kind, names = message.fields["optimizer"]
            optimizer = OptimizerState(kind, dict(zip(names, tensors[: len(names)], strict=True)))
            tensors = tensors[len(names) :]
        accumulation = None
        if message.fields["tainted"] is not None:
            accumulation = Accumulation(tensors[0] if tensors else None, *message.fields["tainted"])
        state = State(config, self._weights(config, flat), message.fields["step"], optimizer, accumulation)
        self._engine.restore(message.fields["model_id"], state, with_optimizer=message.fields["with_optimizer"])

    def _score(self, message: Message) -> None:
        config = message.fields["config"]
        weights = None if config is None else self._weights(AdapterConfig(**config), message.tensors[0])
        sequences = [np.array(tokens, np.int32) for tokens in message.fields["sequences"]]
        with self._team.one_pass():
            score(self._engine.base, weights, sequences)

    def _weights(self, config: AdapterConfig, flat: Tensor) -> Weights:
        base = self._engine.base
        return FullWeights(base, flat) if config.rank == 0 else Adapter(config, base.targets, flat)

    def _run(self, message: Message) -> None:
        micro_batch = self._team.all_or_none(lambda: self._micro_batch(message))
        self._team.all_or_none(lambda: self._engine.run(micro_batch))
        place = self._group.place
        if place.leads(place.rank):
            self._group.send(_results(micro_batch))

    def _micro_batch(self, message: Message) -> MicroBatch:
        """The batches of the message, without results of earlier micro-batches."""
        for number in message.fields["ended"]:
            self._batches.pop(number, None)
        for (number, model_id), request in zip(message.fields["new"], message.tensors, strict=True):
            parsed = trainer_pb2.ForwardBackwardRequest.FromString(request.numpy().tobytes())
            batch = Batch.from_proto(parsed, self._engine.limits, check_loss=False)  # the leader has checked it
            self._batches[number] = replace(batch, request=None, model_id=model_id)
        batches = {number: replace(self._batches[number]) for number, _ in message.fields["micro_batch"]}
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
