"""The training engine: holds the models that one base model carries, makes and steps them, and copies their state.

passes.py runs their batches. The engine knows no protobuf, no gRPC, no order of operations and no journal. Its methods
run on the service's one compute thread, unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tinsmith.errors import FailedPrecondition, InvalidRequest, ServiceError
from tinsmith.modeling.adapter import Adapter, AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import TrainedWeights, Weights, reload
from tinsmith.modeling.kernels.transfer import in_host_memory
from tinsmith.sizing import full_bytes
from trainer_service.engine.batch import MAX_TARGETS_PER_TOKEN, Batch, BatchLimits, Datum, Example, Output, charges_of
from trainer_service.engine.budget import Checkpointing, Lengths, MemoryBudget, Plan
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import Params, check_kind, clip_gradient
from trainer_service.engine.passes import Alone, Passes, Team, model_ids
from trainer_service.engine.residency import Residency
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.weight_sync.canary import Pictured, Scores, Tokens, score


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A copy of an optimizer's state in host memory."""

    kind: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A copy, in host memory, of the gradients that a model has accumulated since its last step.

    The other fields are those of ModelState.
    """

    gradient: Tensor | None
    """Sum of the gradients, flat [numel]; None when it is zero."""
    tainted: str
    tainted_by: int
    largest_ratio: tuple[float, str] | None = None
    """None in snapshots of earlier releases, and without a ratio that is worth mentioning."""


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A copy of a model in host memory: everything that a checkpoint or a snapshot holds."""

    config: AdapterConfig
    adapter: Weights
    step: int
    """Number of optimizer steps applied to the weights."""
    optimizer: OptimizerState | None
    accumulation: Accumulation | None = None
    """Accumulated gradients, for a model that is parked between two steps. Checkpoints never hold them."""


class TrainingEngine:
    """Holds all models in memory (adapters, gradients, optimizers), trains them and copies their state."""

    def __init__(
        self,
        base: BaseModel,
        *,
        max_tokens_per_microbatch: int,
        max_targets_per_token: int = MAX_TARGETS_PER_TOKEN,
        activation_checkpointing: Checkpointing = "auto",
        deterministic: bool = False,
        share_prefixes: bool = True,
        residency: Residency | None = None,
        metrics: Metrics | None = None,
        team: Team | None = None,
    ) -> None:
        """The token budget, for all ranks together, is `max_tokens_per_microbatch` until `follow` brings another plan.

        `deterministic`: the token budget stays as it is even when memory runs out.
        `share_prefixes`: beginnings that datums of a model have in common are computed once in a micro-batch.

        Raises ValueError when `activation_checkpointing` is "on" and the base model has no list of layers.
        """
        self.base = base
        self.limits = BatchLimits(
            vocab_size=base.vocab_size,
            max_context_length=base.max_context_length,
            max_targets_per_token=max_targets_per_token,
            share_prefixes=share_prefixes and not base.why_not_shared,
            processor=base.tower and base.tower.processor,
            why_no_pictures=base.why_no_pictures,
        )
        self.models: dict[str, ModelState] = {}
        """The state of each live model, by its id. The compute thread changes it."""
        self._base_changed = False
        """True once a full model has taken the base model's own parameters for training."""
        self._team = Alone() if team is None else team
        self._metrics = Metrics(CollectorRegistry()) if metrics is None else metrics
        self.memory = MemoryBudget(
            base,
            self.models,
            Plan(token_budget=max_tokens_per_microbatch),
            Residency.on(base.device) if residency is None else residency,
            checkpointing=activation_checkpointing,
            metrics=self._metrics,
            fixed=deterministic,
        )
        self.passes = self._passes()
        """The passes that run micro-batches. The compute thread calls them directly."""

    def _passes(self) -> Passes:
        return Passes(
            self.base, self.models, self.memory, self._team, self._metrics, share_prefixes=self.limits.share_prefixes
        )

    def follow(self, plan: Plan) -> None:
        """Adopts a plan. Batches with datums that can never fit, by the plan, are refused from now on."""
        self.memory.follow(plan)
        self.limits = self.limits.bounded(plan.longest_datum)

    def create_model(self, model_id: str, config: AdapterConfig, optimizer: str) -> None:
        """Makes a new model, which computes what the base model does.

        Raises InvalidRequest for an unknown optimizer or a rank that this engine does not train, Unsupported for layers
        that the base model does not have, OutOfCapacity when memory does not suffice, and FailedPrecondition for a
        second full model.
        """
        self.check_trainable(config.rank, check_kind(optimizer))
        if config.rank != 0:
            self.base.check_groups(config.groups)
            self.memory.check_capacity(self._bytes_in_training(config), rank=config.rank)
        weights = self.memory.with_memory(lambda: self._new_weights(config), what=f"a model of rank {config.rank}")
        self.add_model(model_id, ModelState(weights, optimizer))

    def has_room_for(self, config: AdapterConfig) -> bool:
        """False when `create_model` would fail for lack of memory now and would succeed with fewer live models.

        May be called on any thread.
        """
        if config.rank == 0:
            return True
        needed, most = self._bytes_in_training(config), self.memory.plan.models_bytes
        return needed <= self.memory.bytes_left or (most is not None and needed > most)

    def _bytes_in_training(self, config: AdapterConfig) -> int:
        """Memory of an adapter with its gradient and its moments, in bytes."""
        numel = num_elements(config, chosen_targets(config, self.base.targets))
        return full_bytes(numel * torch.float32.itemsize)

    def add_model(self, model_id: str, model: ModelState) -> None:
        self.models[model_id] = model
        if model.movable:
            self.memory.residency.add(model_id, model)

    def check_trainable(self, rank: int, optimizer: str) -> None:
        """Raises InvalidRequest for a rank that this engine does not train, or an optimizer that the rank excludes."""
        if rank == 0 and not self.base.trainable:
            raise InvalidRequest(
                "lora_config.rank: 0 means full-parameter training, and this server was started without "
                "--full-training; send a rank of 1 or more",
                field="lora_config.rank",
            )
        if rank != 0 and self.base.trainable:
            raise InvalidRequest(
                f"lora_config.rank: {rank} asks for an adapter, and this server was started with "
                "--full-training: it trains all parameters, of one model at a time; send rank 0",
                field="lora_config.rank",
            )
        if rank == 0 and optimizer != "adamw":
            raise InvalidRequest(
                f"optimizer: {optimizer!r} is for the A and B of adapters; full-parameter training (rank 0) takes "
                "'adamw'",
                field="optimizer",
            )

    def _new_weights(self, config: AdapterConfig) -> Weights:
        """The weights of a new model, which computes what the base model does."""
        if config.rank != 0:
            return Adapter.create(config, self.base.targets, self.base.device)
        if self.models:
            live = next(iter(self.models))
            raise FailedPrecondition(
                f"model {live!r} is live, and a server that trains all parameters (--full-training) has one model at a "
                "time; end its session first",
                model_id=live,
            )
        if self._base_changed:
            reload(self.base)
        self._base_changed = True
        return TrainedWeights.take(self.base)

    def delete_model(self, model_id: str) -> None:
        self.models.pop(model_id, None)
        self.memory.residency.remove(model_id)

    def forward_backward(self, works: Sequence[tuple[str, Batch]]) -> list[Output | ServiceError]:
        """Runs copies of whole batches, where no scheduler divides them. `works`: pairs (model_id, batch).

        Returns one result for each.
        """
        batches = [replace(batch, model_id=model_id) for model_id, batch in works]
        for batch in batches:
            self.passes.charge(batch)
        for forward_only in (True, False):
            examples = [
                Example(batch, index)
                for batch in batches
                if batch.forward_only == forward_only
                for index in range(len(batch.datums))
            ]
            examples.sort(key=lambda example: example.model_id)
            for one in cut(examples, lambda: self.passes.token_budget, self.passes.go_together):
                self.passes.run(
                    [(batch, [each.index for each in group]) for batch, group in groupby(one, key=_batch_of)]
                )
        return [self.passes.finish(batch) for batch in batches]

    def probe(self, model_id: str, lengths: Lengths, *, checkpointing: bool, num_pictures: int = 0) -> None:
        """Runs one forward and backward of sequences of these lengths, so that its memory can be measured. Each begins
        with `num_pictures` different pictures of a typical size.

        The gradients are added to the model's.
        """
        loss = LOSS_FNS["cross_entropy"]
        pictures = () if self.base.tower is None else tuple(self.base.tower.examples(num_pictures))
        datums = [
            Datum(np.zeros(n, np.int32), np.zeros(n, np.int64), {"weights": np.ones(n, np.float32)}, pictures)
            for n in lengths
        ]
        batch = Batch("cross_entropy", loss, {}, forward_only=False, datums=datums, model_id=model_id)
        self.passes.once(batch, checkpointing=checkpointing)

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        """Records that the forward_backward `seq_id` has failed: the model's next optim_step fails with `reason`."""
        self.passes.taint(model_id, reason, seq_id=seq_id)

    def is_tainted(self, model_id: str) -> bool:
        """True when the model's next optim_step will be refused, because a forward_backward has failed."""
        return bool(self.models[model_id].tainted)

    def optim_step(self, model_id: str, params: Params, *, failure_seen: int = 0) -> Mapping[str, float]:
        """Makes a step with the accumulated gradients, zero when there are none, and clears them.

        `failure_seen`: seq_id of the newest failed forward_backward that the client knows of. A failure up to it does
        not refuse the step: the client has begun its batch again since.

        Raises InvalidRequest when `params` are for another kind of optimizer. Raises FailedPrecondition when a
        forward_backward since the last step has failed, and NotFinite when the step would leave the range of float32;
        both clear the gradients. After these errors the parameters and the optimizer are as before.
        """
        model = self.models[model_id]
        if params.kind != model.optimizer_kind:
            raise InvalidRequest(
                f"{params.field}: are for optimizer {params.kind!r}, but the model was made with "
                f"optimizer {model.optimizer_kind!r}",
                field=params.field,
            )
        if model.tainted and not 0 < model.tainted_by <= failure_seen:
            reason, seq_id = model.tainted, model.tainted_by
            model.clear_gradient()
            raise FailedPrecondition(
                f"optim_step was not applied, because a forward_backward before it failed, seq_id {seq_id}; "
                f"its gradients were cleared. The failure: {reason}",
                failed_seq_id=seq_id,
            )
        model.tainted, model.tainted_by = "", 0
        gradient = self._team.all_or_none(
            lambda: self.memory.with_memory(
                lambda: self._prepare_step(model_id), what=f"an optimizer step of {model_id}", keep=[model_id]
            )
        )
        with self._metrics.compute.phases["optimizer"].time():
            try:
                self._team.sum_(gradient.flat)
                norm = self._team.all_or_none(
                    lambda: clip_gradient(gradient.flat, params.grad_clip_norm, hint=model.largest_ratio[1])
                )
                self._apply(model_id, gradient.flat, norm, params)
            finally:
                model.clear_gradient()
        model.step += 1
        return {"grad_norm:mean": norm}

    def _apply(self, model_id: str, gradient: Tensor, norm: float, params: Params) -> None:
        """Makes the step. A step that might leave the range of float32 is tried on copies first.

        Measuring all numbers after every step would take a third of the step's time. So a bound on the numbers is
        carried from step to step. They are measured only when the bound is too large, as before a model's first step.
        """
        model = self.models[model_id]
        if (foreseen := model.foreseen(norm, params)) is None:
            model.look()
            foreseen = model.foreseen(norm, params)
        if foreseen is not None:
            model.need_optimizer().step(model.adapter.flat, gradient, params)
            model.farthest, model.farthest_moment = foreseen
        else:
            trial = self._team.all_or_none(
                lambda: self.memory.with_memory(
                    lambda: model.tried(gradient, params), what=f"an optimizer step of {model_id}", keep=[model_id]
                )
            )
            model.take(trial)
        model.adapter.sync()

    def _prepare_step(self, model_id: str) -> Weights:
        """Allocates the gradient and the optimizer where they are missing, and returns the gradient.

        The step's temporary memory is allocated once on trial, so that memory does not run out in the middle of a step.
        """
        model = self.models[model_id]
        self.memory.have_for_a_step(model_id)
        gradient = model.need_gradient()
        model.need_optimizer()
        torch.empty_like(model.adapter.flat)
        return gradient

    def capture(self, model_id: str, *, with_optimizer: bool, with_accumulation: bool = False) -> CapturedState:
        """Copies a model into host memory."""
        model = self.models[model_id]
        with self._metrics.compute.phases["capture"].time():
            return CapturedState(
                config=model.adapter.config,
                adapter=model.adapter.like(in_host_memory(model.adapter.flat)),
                step=model.step,
                optimizer=self._optimizer_state(model) if with_optimizer else None,
                accumulation=_accumulation(model) if with_accumulation else None,
            )

    def gather_gradient(self, model_id: str) -> None:
        """Sums the accumulated gradients of all ranks into the first rank's gradient, and clears the others'."""
        self.memory.have_for_a_step(model_id)
        gradient = self.models[model_id].need_gradient()
        self._team.sum_(gradient.flat)
        if not self._team.is_first:
            gradient.flat.zero_()

    def version_bytes(self, config: AdapterConfig) -> int:
        """Size of a published version of a model with this configuration, in bytes.

        Raises Unsupported for groups of layers that adapters may not change here.
        """
        self.base.check_groups(config.groups)
        if config.rank == 0:
            return sum(parameter.numel() for parameter in self.base.parameters.values()) * self.base.dtype.itemsize
        return num_elements(config, chosen_targets(config, self.base.targets)) * torch.float32.itemsize

    def weights(self, model_id: str) -> Weights:
        """The model's live weights, not a copy."""
        return self.models[model_id].adapter

    def score(self, weights: Weights | None, sequences: Sequence[Tokens | Pictured]) -> Scores:
        """Scores the sequences with any weights for this base model; None means the base model alone (canary.score).

        Raises OutOfCapacity when there is no memory for it.
        """
        return self.memory.with_memory(lambda: score(self.base, weights, sequences), what="scoring a published version")

    def score_together(self, weights: Weights | None, sequences: Sequence[Tokens | Pictured]) -> Scores:
        """Scores the sequences in one pass of all ranks, each of which must make this call. Raises MemoryError when one
        has no memory for it."""
        with self._team.one_pass():
            return score(self.base, weights, sequences)

    def _optimizer_state(self, model: ModelState) -> OptimizerState:
        """The optimizer's state; before the first step, the state with which that step will begin."""
        optimizer = model.new_optimizer() if model.optimizer is None else model.optimizer
        return OptimizerState(model.optimizer_kind, optimizer.state())

    def restore(self, model_id: str, state: CapturedState, *, with_optimizer: bool) -> None:
        """Replaces the model's weights, step count and gradients by the state's, and its optimizer by the state's
        (`with_optimizer`) or by a new one. Gradients that the state does not hold become zero.

        Raises InvalidRequest when the state has another configuration, or when the optimizer is wanted and the state
        has none or one of another kind.
        """
        model = self.models[model_id]
        ours, theirs = model.adapter.config, state.config
        if (ours.rank, ours.groups) != (theirs.rank, theirs.groups):
            raise InvalidRequest(
                f"location: the checkpoint has {_extent(theirs)}, this model has {_extent(ours)}", field="location"
            )
        if with_optimizer and state.optimizer is None:
            raise InvalidRequest(
                "load_optimizer: the checkpoint holds no optimizer state; load it without the optimizer",
                field="load_optimizer",
            )
        if with_optimizer and state.optimizer is not None and state.optimizer.kind != model.optimizer_kind:
            raise InvalidRequest(
                f"load_optimizer: the checkpoint's optimizer is {state.optimizer.kind!r}, the model's "
                f"{model.optimizer_kind!r}; load it without the optimizer",
                field="load_optimizer",
            )
        model.adapter.flat.copy_(state.adapter.flat)
        model.adapter.sync()
        model.clear_gradient()
        model.farthest = model.farthest_moment = math.inf
        model.step = state.step
        model.optimizer = None
        if with_optimizer and state.optimizer is not None:
            model.need_optimizer().load(state.optimizer.tensors)
        if (accumulation := state.accumulation) is not None:
            model.tainted, model.tainted_by = accumulation.tainted, accumulation.tainted_by
            if accumulation.largest_ratio is not None:
                gap, which = accumulation.largest_ratio
                model.largest_ratio = gap, which
            if accumulation.gradient is not None and self._team.is_first:
                model.need_gradient().flat.copy_(accumulation.gradient)


def cut(
    examples: Iterable[Example], token_budget: Callable[[], int], go_together: Callable[[Sequence[str]], bool]
) -> Iterator[list[Example]]:
    """Cuts examples into micro-batches, in order. A new one begins where an example would exceed the token budget,
    which is read for each example, or where its model may not join the others (`go_together`).

    A datum longer than the budget is a micro-batch by itself.
    """
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        charge = charges_of([*batch[-1:], example])[-1]
        too_long = tokens + charge > token_budget()
        if batch and (too_long or not _may_join(example, batch, go_together)):
            yield batch
            batch, tokens, charge = [], 0, example.batch.charges[example.index]
        batch.append(example)
        tokens += charge
    if batch:
        yield batch


def _may_join(example: Example, batch: Sequence[Example], go_together: Callable[[Sequence[str]], bool]) -> bool:
    return example.model_id == batch[-1].model_id or go_together(model_ids([*batch, example]))


def _batch_of(example: Example) -> Batch:
    return example.batch


def _accumulation(model: ModelState) -> Accumulation | None:
    """A copy of the accumulated gradients; None when they are zero and no batch has failed."""
    gradient = None
    if model.gradient is not None and bool(model.gradient.flat.any()):
        gradient = in_host_memory(model.gradient.flat)
    if gradient is None and not model.tainted:
        return None
    largest_ratio = model.largest_ratio if model.largest_ratio[1] else None
    return Accumulation(gradient, model.tainted, model.tainted_by, largest_ratio)


def _extent(config: AdapterConfig) -> str:
    """Describes, for an error message, what a configuration trains."""
    if config.rank == 0:
        return "all parameters (rank 0)"
    return f"rank {config.rank} on {sorted(config.groups)}"
