"""The training engine: packed batches of many models through one frozen base model.

It knows no protobuf, gRPC, order or journal. Every method runs on the service's one compute thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeVar

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_logprobs import full_target_logprobs
from tinsmith.modeling.full_weights import TrainedWeights, Weights, reload
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.lora import Run
from tinsmith.rpc.errors import FailedPrecondition, InvalidRequest, OutOfCapacity, ServiceError
from trainer_service.activation_checkpointing import checkpointed
from trainer_service.batch import Batch, Datum, Limits, Output
from trainer_service.budget import Lengths, Plan
from trainer_service.job import Job, Piece, whole
from trainer_service.losses import LOSS_FNS, Term
from trainer_service.memory import drop_caches, is_out_of_memory
from trainer_service.metrics import Metrics
from trainer_service.micro_batch import Item, cut, halves, model_ids, num_tokens
from trainer_service.model_state import ModelState, full_bytes
from trainer_service.optimizers import Optimizer, Params, check_kind, clip_gradient
from trainer_service.residency import Residency
from trainer_service.team import Alone, Team

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A copy, in host memory, of an optimizer."""

    kind: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class State:
    """A copy, in host memory, of everything that a checkpoint holds."""

    config: AdapterConfig
    adapter: Weights
    step: int
    """Optimizer steps that the weights have seen."""
    optimizer: OptimizerState | None


Checkpointing = Literal["auto", "on", "off"]


class TrainingEngine:
    """Adapters, their gradients and their optimizers."""

    def __init__(
        self,
        base: BaseModel,
        *,
        max_tokens_per_microbatch: int,
        activation_checkpointing: Checkpointing = "auto",
        residency: Residency | None = None,
        metrics: Metrics | None = None,
        team: Team | None = None,
    ) -> None:
        """Measures nothing: `max_tokens_per_microbatch` is the token budget until `follow` brings another plan.

        The token budget is that of the whole team.

        Raises ValueError when activation checkpointing is asked for and the base model has no list of layers.
        """
        self.base = base
        self.limits = Limits(vocab_size=base.vocab_size, max_context_length=base.max_context_length)
        self.plan = Plan(token_budget=max_tokens_per_microbatch)
        self.residency = Residency.on(base.device) if residency is None else residency
        self._models: dict[str, ModelState] = {}
        self._base_changed = False
        """A full model has trained the base model's own parameters."""
        self._team = Alone() if team is None else team
        self._layers = base.layers
        self._checkpointing = activation_checkpointing
        if activation_checkpointing == "on" and not self._layers:
            raise ValueError(
                f"activation_checkpointing: 'on' cannot be had of {base.architecture}: it has no list of "
                f"{base.config.num_hidden_layers} layers; take 'auto' or 'off'"
            )
        self._too_long: int | None = None
        """Tokens of the shortest datum that ran out of memory without activation checkpointing."""
        self._metrics = Metrics(CollectorRegistry()) if metrics is None else metrics
        self._metrics.token_budget.set(self.token_budget)

    @property
    def token_budget(self) -> int:
        """Tokens that a micro-batch should have. It falls when memory runs out."""
        return self.plan.token_budget

    @property
    def can_checkpoint(self) -> bool:
        return bool(self._layers) and self._checkpointing != "off"

    @property
    def always_checkpoints(self) -> bool:
        return self._checkpointing == "on"

    @property
    def num_layers(self) -> int:
        return self.base.config.num_hidden_layers

    def follow(self, plan: Plan) -> None:
        """From now on. Datums that the plan says can never fit are refused when they are validated."""
        self.plan = plan
        self.limits = self.limits.bounded(plan.longest_datum)
        self._metrics.token_budget.set(plan.token_budget)

    def create_model(self, model_id: str, config: AdapterConfig, optimizer: str) -> None:
        """Raises InvalidRequest for an unknown optimizer, or a rank that this engine does not train, Unsupported for
        layers that the base model does not have, and FailedPrecondition for a second full model."""
        self.check_trainable(config.rank, check_kind(optimizer))
        if config.rank != 0:
            self.base.check_groups(config.groups)
        self._check_capacity(config)
        weights = self._with_room(lambda: self._new_weights(config), what=f"a model of rank {config.rank}")
        self.add_model(model_id, ModelState(weights, optimizer))

    def _check_capacity(self, config: AdapterConfig) -> None:
        """Raises OutOfCapacity when one more model could end the process, in the middle of somebody's training."""
        if self.plan.models_bytes is None or config.rank == 0:
            return
        numel = num_elements(config, chosen_targets(config, self.base.targets))
        needed = full_bytes(numel * torch.float32.itemsize)
        left = self.plan.models_bytes - sum(full_bytes(model.adapter.num_bytes) for model in self._models.values())
        if needed > left:
            raise OutOfCapacity(
                f"lora_config.rank: a model of rank {config.rank} takes {needed / 1e6:.1f} MB with its gradients and "
                f"its optimizer, and {len(self._models)} live models leave {max(0, left) / 1e6:.1f} MB of this "
                "trainer's memory for models; end one, or ask for a smaller rank",
                field="rank",
            )

    def add_model(self, model_id: str, model: ModelState) -> None:
        self._models[model_id] = model
        if model.movable:
            self.residency.add(model_id, model)

    def check_trainable(self, rank: int, optimizer: str) -> None:
        """Raises InvalidRequest, naming what would be right, for a rank that this engine does not train."""
        if rank == 0 and not self.base.trainable:
            raise InvalidRequest(
                "lora_config.rank: 0 means full-parameter training, and this server was started without "
                "--full-training; send a rank of 1 or more",
                field="rank",
            )
        if rank != 0 and self.base.trainable:
            raise InvalidRequest(
                f"lora_config.rank: {rank} asks for an adapter, and this server was started with "
                "--full-training: it trains all parameters, of one model at a time; send rank 0",
                field="rank",
            )
        if rank == 0 and optimizer != "adamw":
            raise InvalidRequest(
                f"optimizer: {optimizer!r} is for the A and B of adapters; full-parameter training (rank 0) takes "
                "'adamw'",
                field="optimizer",
            )

    def _new_weights(self, config: AdapterConfig) -> Weights:
        """Those that a model begins with: it equals the base model."""
        if config.rank != 0:
            return Adapter.create(config, self.base.targets, self.base.device)
        if self._models:
            live = next(iter(self._models))
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
        self._models.pop(model_id, None)
        self.residency.remove(model_id)

    def begin(self, model_id: str, batch: Batch) -> Job:
        """A forward_backward of this model, of which nothing has run. Computes nothing."""
        return Job(model_id, batch)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Puts datums of any jobs through the base model, and adds to each model's gradients.

        What does not fit into one micro-batch becomes several. When one fails, each of its jobs runs alone, so that
        only the guilty one fails: its `error` is set, and nothing of this micro-batch is added to its gradients.
        """
        for forward_only in (True, False):
            items = [
                Item(piece.job, index)
                for piece in pieces
                if piece.job.batch.forward_only == forward_only
                for index in piece.indices
            ]
            # One model's datums lie together, and equal lengths too: attention batches them.
            items.sort(key=lambda item: (item.model_id, item.datum.length))
            for micro_batch in cut(items, lambda: self.token_budget, self._go_together):
                with torch.set_grad_enabled(not forward_only):
                    self._try(micro_batch)

    def finish(self, job: Job) -> Output | ServiceError:
        """The result of a job whose datums have all run, or that has failed.

        After a failure the gradients are not what the client thinks: the model's next optim_step is refused.
        """
        if job.error is None:
            return job.output()
        if not job.batch.forward_only:
            self.taint(job.model_id, job.error.message)
        return job.error

    def forward_backward(self, works: Sequence[tuple[str, Batch]]) -> list[Output | ServiceError]:
        """Begins, runs and finishes batches together: one result for each, in order."""
        jobs = [self.begin(model_id, batch) for model_id, batch in works]
        self.run([whole(job) for job in jobs])
        return [self.finish(job) for job in jobs]

    def probe(self, model_id: str, lengths: Lengths, *, checkpointing: bool) -> None:
        """One forward and backward of sequences of these lengths, for what it takes. The model gets its gradients."""
        loss = LOSS_FNS["cross_entropy"]
        datums = [
            Datum(np.zeros(n, np.int32), np.zeros(n, np.int64), {"weights": np.ones(n, np.float32)}) for n in lengths
        ]
        batch = Batch(loss_fn="cross_entropy", loss=loss, loss_config={}, forward_only=False, datums=datums)
        job = self.begin(model_id, batch)
        items = [Item(job, index) for index in range(len(datums))]
        self._run(items, items, checkpointing=checkpointing)  # all of it on every rank

    def _try(self, items: Sequence[Item], *, checkpointing: bool = False) -> None:
        """Runs a micro-batch: in halves when there is no memory for it, job by job when it fails otherwise."""
        items = [item for item in items if item.job.error is None]
        if not items:
            return
        checkpointing = checkpointing or self._needs_checkpointing(items)
        try:
            self._run(items, self._team.mine(items), checkpointing=checkpointing)
            return
        except Exception as caught:
            error = caught
            if is_out_of_memory(error):
                error = MemoryError()  # `caught` goes with what its frames hold, before anything else is tried
            elif not isinstance(error, ServiceError) and len({item.job for item in items}) == 1:
                logger.exception("forward_backward of %s failed", items[0].model_id)
        jobs = list(dict.fromkeys(item.job for item in items))
        if isinstance(error, MemoryError):
            self._try_smaller(items, checkpointing=checkpointing)
        elif len(jobs) > 1:
            for job in jobs:
                self._try([item for item in items if item.job is job], checkpointing=checkpointing)
        elif isinstance(error, ServiceError):
            jobs[0].error = error
        else:
            jobs[0].error = ServiceError(
                f"forward_backward failed: {type(error).__name__}; the trainer's log has the cause"
            )

    def _try_smaller(self, items: Sequence[Item], *, checkpointing: bool) -> None:
        """After there was no memory for these. Nothing of them has been added to anything."""
        self._ran_out(num_tokens(items), keep=model_ids(items))
        if len(items) > 1:
            for half in halves(items):
                self._try(half, checkpointing=checkpointing)
            return
        (item,) = items
        length = item.datum.length
        if self.can_checkpoint and not checkpointing and torch.is_grad_enabled():
            self._too_long = min(length, self._too_long or length)
            self._try(items, checkpointing=True)
            return
        item.job.error = OutOfCapacity(
            f"data[{item.index}].model_input: there is no memory for its {length} tokens at this moment, even alone",
            field=f"data[{item.index}].model_input",
        )

    def _ran_out(self, tokens: int, *, keep: Sequence[str]) -> None:
        """Lowers the budget, when it allowed so much, and frees what can be freed."""
        self._metrics.out_of_memory.inc()
        lower = max(1, tokens // 2)
        if tokens <= self.token_budget and lower < self.token_budget:
            self.plan = replace(self.plan, token_budget=lower)
            self._metrics.token_budget.set(lower)
        logger.warning("out of memory with %d tokens; the token budget is %d now", tokens, self.token_budget)
        self._free(keep)

    def _free(self, keep: Sequence[str]) -> None:
        self.residency.offload_all_but(keep)
        drop_caches(self.base.device)

    def _with_room(self, call: Callable[[], T], *, what: str, keep: Sequence[str] = ()) -> T:
        """Runs it once more with all that can be freed, when there is no memory. Raises OutOfCapacity if that fails."""
        for last in (False, True):
            try:
                return call()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if last:
                    raise OutOfCapacity(f"there is no memory for {what} at this moment") from None
            self._free(keep)
        raise AssertionError

    def _needs_checkpointing(self, items: Sequence[Item]) -> bool:
        if self._checkpointing != "auto" or not self._layers:
            return self._checkpointing == "on"
        lengths = [[item.datum.length for item in share] for share in self._team.shares(items)]
        known = self._too_long is not None and max(length for share in lengths for length in share) >= self._too_long
        return known or any(self.plan.needs_checkpointing(share) for share in lengths)

    def _go_together(self, ids: Sequence[str]) -> bool:
        """These models may be on the device at once, with their gradients on the way."""
        tokens = self.token_budget // self._team.num_shares
        room = self.plan.room_for_adapters([tokens], checkpointing=self.always_checkpoints)
        needed = sum(self._models[model_id].num_bytes + self._models[model_id].growth_bytes for model_id in ids)
        return not self.residency.moves or room is None or needed <= room

    def _have_on_device(self, items: Sequence[Item], *, checkpointing: bool) -> None:
        room = self.plan.room_for_adapters([item.datum.length for item in items], checkpointing=checkpointing)
        ids = model_ids(items)
        if room is not None and torch.is_grad_enabled():
            room -= sum(self._models[model_id].growth_bytes for model_id in ids)
        self.residency.use(ids, max_bytes=room)

    def _run(self, items: Sequence[Item], mine: Sequence[Item], *, checkpointing: bool) -> None:
        """One pass of the base model, of which this rank computes `mine`.

        Jobs and gradients change when all of it has succeeded, on all ranks.
        """
        with self._team.one_pass():
            keep = self._compute(mine, checkpointing=checkpointing)
            if torch.is_grad_enabled():
                for model_id in model_ids(items):  # the next step adds them up over the ranks
                    self._models[model_id].need_gradient()
        keep()

    def _compute(self, items: Sequence[Item], *, checkpointing: bool) -> Callable[[], None]:
        """Forward and backward of these. What it returns keeps the results, asks for no memory and does not fail."""
        if not items:
            self._team.halfway()
            return lambda: None
        self._have_on_device(items, checkpointing=checkpointing)
        device = self.base.device
        lengths = [item.datum.length for item in items]
        starts = np.cumsum([0, *lengths])
        tokens_T = on_device(torch.from_numpy(np.concatenate([item.datum.tokens_N for item in items])).long(), device)
        rows_M = np.concatenate([_rows(item.datum, start) for item, start in zip(items, starts, strict=False)])
        targets_M = np.concatenate([item.datum.targets.ravel() for item in items])
        runs = list(self._runs(items, starts))

        adapted = [] if self.base.trainable else runs
        layers = self._layers if checkpointing and torch.is_grad_enabled() else []
        with checkpointed(layers, self.base.active):
            hidden_T_H = self.base.hidden_states(tokens_T, positions_of(lengths, device), Packed(lengths), adapted)
        named = torch.from_numpy(rows_M), torch.from_numpy(targets_M)
        if self.base.trainable:
            logprobs_M = full_target_logprobs(self.base.head, hidden_T_H, *(x.to(device) for x in named))
        else:
            logprobs_M = self.base.target_logprobs(hidden_T_H, *named, runs)

        # Losses are many small operations whose values are asked for one by one: that is for the host, from one copy.
        pieces = logprobs_M.cpu().split([item.datum.targets.size for item in items])
        shaped = [piece.view(item.datum.targets.shape) for item, piece in zip(items, pieces, strict=True)]
        terms: list[tuple[Job, Term]] = []
        for job, group in groupby(range(len(items)), key=lambda n: items[n].job):
            mine = list(group)
            inputs = [items[n].datum.inputs for n in mine]
            terms.append((job, job.batch.loss.evaluate([shaped[n] for n in mine], inputs, job.batch.loss_config)))
        self._team.halfway()
        gradients: list[tuple[ModelState, list[Tensor]]] = []
        if torch.is_grad_enabled():
            gradients = list(self._gradients(terms, runs, items))
        largest = _largest([tensor for _, tensors in gradients for tensor in tensors])
        for job, term in terms:
            job.check_finite(term.value, largest)

        sums = [(model.need_gradient().tensors(), tensors) for model, tensors in gradients]
        results = [logprobs.detach().numpy() for logprobs in shaped]

        def keep() -> None:
            for job, term in terms:
                job.add(term)
            for item, logprobs in zip(items, results, strict=True):
                item.job.logprobs[item.index] = logprobs
            for totals, tensors in sums:
                torch._foreach_add_(totals, tensors)

        return keep

    def _runs(self, items: Sequence[Item], starts: np.ndarray) -> Iterable[Run]:
        for model_id, group in groupby(range(len(items)), key=lambda n: items[n].model_id):
            mine = list(group)
            rows = slice(int(starts[mine[0]]), int(starts[mine[-1] + 1]))
            yield Run(self._models[model_id].adapter, rows)  # type: ignore[arg-type]  # full weights meet no layer

    def _gradients(
        self, terms: Sequence[tuple[Job, Term]], runs: Sequence[Run], items: Sequence[Item]
    ) -> Iterable[tuple[ModelState, list[Tensor]]]:
        """The gradient of the terms' sum for each run's model, tensor by tensor."""
        total = torch.stack([term.differentiable for _, term in terms]).sum()
        parameters = [tensor for run in runs for tensor in run.adapter.tensors()]
        grads = iter(torch.autograd.grad(total, parameters, materialize_grads=True))
        for model_id, run in zip(dict.fromkeys(item.model_id for item in items), runs, strict=True):
            yield self._models[model_id], [next(grads) for _ in run.adapter.tensors()]

    def taint(self, model_id: str, reason: str) -> None:
        """Says that a forward_backward of this accumulation has failed: the next optim_step fails with `reason`."""
        self._models[model_id].tainted = reason

    def optim_step(self, model_id: str, params: Params) -> Mapping[str, float]:
        """Applies and clears the gradients. Without any, it is a step with a gradient of zero.

        Raises InvalidRequest when the parameters are not those of the model's optimizer, and FailedPrecondition, which
        clears the gradients, when a forward_backward since the last step has failed.
        """
        model = self._models[model_id]
        if params.kind != model.optimizer_kind:
            raise InvalidRequest(
                f"{params.field}: are for optimizer {params.kind!r}, but the model was made with "
                f"optimizer {model.optimizer_kind!r}",
                field=params.field,
            )
        if model.tainted:
            reason = model.tainted
            model.clear_gradient()
            raise FailedPrecondition(
                "optim_step was not applied, because a forward_backward before it failed; "
                f"its gradients were cleared. The failure: {reason}"
            )
        gradient, optimizer = self._team.all_or_none(
            lambda: self._with_room(
                lambda: self._prepare_step(model_id), what=f"an optimizer step of {model_id}", keep=[model_id]
            )
        )
        self._team.sum_(gradient.flat)
        norm = clip_gradient(gradient.flat, params.grad_clip_norm)
        optimizer.step(model.adapter.flat, gradient.flat, params)
        model.adapter.sync()
        model.clear_gradient()
        model.step += 1
        return {"grad_norm:mean": norm}

    def _prepare_step(self, model_id: str) -> tuple[Weights, Optimizer]:
        """Makes what is missing, and sees that a step's temporaries will find room: half a step must never be."""
        model = self._models[model_id]
        room = self.plan.room_for_adapters([], checkpointing=False)
        self.residency.use([model_id], max_bytes=None if room is None else room - full_bytes(model.adapter.num_bytes))
        prepared = model.need_gradient(), model.need_optimizer()
        torch.empty_like(model.adapter.flat)
        return prepared

    def capture(self, model_id: str, *, with_optimizer: bool) -> State:
        model = self._models[model_id]
        return State(
            config=model.adapter.config,
            adapter=model.adapter.like(model.adapter.flat.detach().to("cpu", copy=True)),
            step=model.step,
            optimizer=self._optimizer_state(model) if with_optimizer else None,
        )

    def _optimizer_state(self, model: ModelState) -> OptimizerState:
        """Of a model that has taken no step: the one that its first step will begin with."""
        optimizer = model.new_optimizer() if model.optimizer is None else model.optimizer
        return OptimizerState(model.optimizer_kind, optimizer.state())

    def restore(self, model_id: str, state: State, *, with_optimizer: bool) -> None:
        """Replaces the adapter's weights, drops its gradients, and restores the optimizer or starts it anew.

        Raises InvalidRequest when the state's configuration is another, or an optimizer is wanted but it holds none or
        one of another kind.
        """
        model = self._models[model_id]
        ours, theirs = model.adapter.config, state.config
        if (ours.rank, ours.groups) != (theirs.rank, theirs.groups):
            raise InvalidRequest(f"the checkpoint has {_extent(theirs)}, this model has {_extent(ours)}")
        if with_optimizer and state.optimizer is None:
            raise InvalidRequest("the checkpoint holds no optimizer state; load it without the optimizer")
        if with_optimizer and state.optimizer is not None and state.optimizer.kind != model.optimizer_kind:
            raise InvalidRequest(
                f"the checkpoint's optimizer is {state.optimizer.kind!r}, the model's {model.optimizer_kind!r}; "
                "load it without the optimizer"
            )
        model.adapter.flat.copy_(state.adapter.flat)
        model.adapter.sync()
        model.clear_gradient()
        model.step = state.step
        model.optimizer = None
        if with_optimizer and state.optimizer is not None:
            model.need_optimizer().load(state.optimizer.tensors)


def _extent(config: AdapterConfig) -> str:
    if config.rank == 0:
        return "all parameters (rank 0)"
    return f"rank {config.rank} on {sorted(config.groups)}"


def _largest(tensors: list[Tensor]) -> float:
    """The largest magnitude in any of them; NaN when one is NaN."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max().item() if tensors else 0.0


def _rows(datum: Datum, start: int) -> np.ndarray:
    """int64: the packed row of each target, row major."""
    rows = np.arange(start, start + datum.length)
    return rows if datum.targets.ndim == 1 else np.repeat(rows, datum.targets.shape[1])
