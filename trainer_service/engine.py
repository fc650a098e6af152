"""The training engine: packed batches of many models through one frozen base model.

It knows no protobuf, gRPC, order or journal. Every method runs on the service's one compute thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.lora import Run
from tinsmith.rpc.errors import FailedPrecondition, InvalidRequest, ServiceError
from trainer_service.batch import Batch, Datum, Limits, Output
from trainer_service.job import Job, Piece, whole
from trainer_service.losses import Term
from trainer_service.optimizers import OPTIMIZERS, Optimizer, Params, check_kind, clip_gradient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A copy, in host memory, of an optimizer."""

    kind: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class State:
    """A copy, in host memory, of everything that a checkpoint holds."""

    config: AdapterConfig
    adapter: Adapter
    step: int
    """Optimizer steps that the adapter has seen."""
    optimizer: OptimizerState | None


@dataclass(slots=True)
class _Model:
    adapter: Adapter
    gradient: Adapter
    optimizer_kind: str
    optimizer: Optimizer
    step: int = 0
    tainted: str = ""
    """Why the accumulated gradients are not those that the client thinks; empty when they are."""

    @classmethod
    def of(cls, adapter: Adapter, optimizer_kind: str) -> _Model:
        for tensor in adapter.tensors():
            tensor.requires_grad_(True)
        gradient = adapter.like(torch.zeros_like(adapter.flat))
        return cls(adapter, gradient, optimizer_kind, OPTIMIZERS[optimizer_kind](adapter))

    def clear_gradient(self) -> None:
        self.gradient.flat.zero_()
        self.tainted = ""


@dataclass(frozen=True, slots=True)
class _Item:
    """A datum on its way into a micro-batch."""

    job: Job
    index: int

    @property
    def datum(self) -> Datum:
        return self.job.batch.datums[self.index]

    @property
    def model_id(self) -> str:
        return self.job.model_id


class TrainingEngine:
    """Adapters, their gradients and their optimizers."""

    def __init__(self, base: BaseModel, *, max_tokens_per_microbatch: int) -> None:
        self.base = base
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.limits = Limits(vocab_size=base.vocab_size, max_context_length=base.max_context_length)
        self._models: dict[str, _Model] = {}

    def create_model(self, model_id: str, config: AdapterConfig, optimizer: str) -> None:
        """Raises InvalidRequest for an unknown optimizer, Unsupported for layers that the base model does not have."""
        adapter = Adapter.create(config, self.base.targets, self.base.device)
        self._models[model_id] = _Model.of(adapter, check_kind(optimizer))

    def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def begin(self, model_id: str, batch: Batch) -> Job:
        """A forward_backward of this model, of which nothing has run. Computes nothing."""
        return Job(model_id, batch)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Puts datums of any jobs through the base model, and adds to each model's gradients.

        What does not fit into one micro-batch becomes several. When one fails, each of its jobs runs alone, so that
        only the guilty one fails: its `error` is set, and nothing of this micro-batch is added to its model's gradients.
        """
        for forward_only in (True, False):
            items = [
                _Item(piece.job, index)
                for piece in pieces
                if piece.job.batch.forward_only == forward_only
                for index in piece.indices
            ]
            # One model's datums lie together, and equal lengths too: attention batches them.
            items.sort(key=lambda item: (item.model_id, item.datum.length))
            for micro_batch in self._micro_batches(items):
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

    def _micro_batches(self, items: Iterable[_Item]) -> Iterable[list[_Item]]:
        """Cuts at the token budget; a longer datum goes alone."""
        batch: list[_Item] = []
        num_tokens = 0
        for item in items:
            if batch and num_tokens + item.datum.length > self.max_tokens_per_microbatch:
                yield batch
                batch, num_tokens = [], 0
            batch.append(item)
            num_tokens += item.datum.length
        if batch:
            yield batch

    def _try(self, items: Sequence[_Item]) -> None:
        """Runs a micro-batch, job by job when it fails."""
        items = [item for item in items if item.job.error is None]
        if not items:
            return
        try:
            self._run(items)
        except Exception as error:
            jobs = list(dict.fromkeys(item.job for item in items))
            if len(jobs) > 1:
                for job in jobs:
                    self._try([item for item in items if item.job is job])
            elif isinstance(error, ServiceError):
                jobs[0].error = error
            else:
                logger.exception("forward_backward of %s failed", jobs[0].model_id)
                jobs[0].error = ServiceError(
                    f"forward_backward failed: {type(error).__name__}; the trainer's log has the cause"
                )

    def _run(self, items: Sequence[_Item]) -> None:
        """One pass of the base model. Jobs and gradients change when all of it has succeeded."""
        device = self.base.device
        lengths = [item.datum.length for item in items]
        starts = np.cumsum([0, *lengths])
        tokens_T = torch.from_numpy(np.concatenate([item.datum.tokens_N for item in items])).long().to(device)
        rows_M = np.concatenate([_rows(item.datum, start) for item, start in zip(items, starts, strict=False)])
        targets_M = np.concatenate([item.datum.targets.ravel() for item in items])
        runs = list(self._runs(items, starts))

        hidden_T_H = self.base.hidden_states(tokens_T, positions_of(lengths, device), Packed(lengths), runs)
        logprobs_M = target_logprobs(
            self.base.head,
            hidden_T_H,
            torch.from_numpy(rows_M).to(device),
            torch.from_numpy(targets_M).to(device),
            runs,
        )

        pieces = logprobs_M.split([item.datum.targets.size for item in items])
        shaped = [piece.view(item.datum.targets.shape) for item, piece in zip(items, pieces, strict=True)]
        terms: list[tuple[Job, Term]] = []
        for job, group in groupby(range(len(items)), key=lambda n: items[n].job):
            mine = list(group)
            inputs = [items[n].datum.inputs for n in mine]
            terms.append((job, job.batch.loss.evaluate([shaped[n] for n in mine], inputs, job.batch.loss_config)))
        gradients: list[tuple[_Model, list[Tensor]]] = []
        if torch.is_grad_enabled():
            gradients = list(self._gradients(terms, runs, items))
        largest = _largest([tensor for _, tensors in gradients for tensor in tensors])
        for job, term in terms:
            job.check_finite(term.value, largest)

        for job, term in terms:
            job.add(term)
        for item, logprobs in zip(items, shaped, strict=True):
            item.job.logprobs[item.index] = logprobs.detach().cpu().numpy()
        for model, tensors in gradients:
            torch._foreach_add_(model.gradient.tensors(), tensors)

    def _runs(self, items: Sequence[_Item], starts: np.ndarray) -> Iterable[Run]:
        for model_id, group in groupby(range(len(items)), key=lambda n: items[n].model_id):
            mine = list(group)
            yield Run(self._models[model_id].adapter, slice(int(starts[mine[0]]), int(starts[mine[-1] + 1])))

    def _gradients(
        self, terms: Sequence[tuple[Job, Term]], runs: Sequence[Run], items: Sequence[_Item]
    ) -> Iterable[tuple[_Model, list[Tensor]]]:
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
        norm = clip_gradient(model.gradient.flat, params.grad_clip_norm)
        model.optimizer.step(model.adapter.flat, model.gradient.flat, params)
        model.clear_gradient()
        model.step += 1
        return {"grad_norm:mean": norm}

    def capture(self, model_id: str, *, with_optimizer: bool) -> State:
        model = self._models[model_id]
        return State(
            config=model.adapter.config,
            adapter=model.adapter.like(model.adapter.flat.detach().to("cpu", copy=True)),
            step=model.step,
            optimizer=OptimizerState(model.optimizer_kind, model.optimizer.state()) if with_optimizer else None,
        )

    def restore(self, model_id: str, state: State, *, with_optimizer: bool) -> None:
        """Replaces the adapter's weights, drops its gradients, and restores the optimizer or starts it anew.

        Raises InvalidRequest when the state's configuration is another, or an optimizer is wanted but it holds none or
        one of another kind.
        """
        model = self._models[model_id]
        ours, theirs = model.adapter.config, state.config
        if (ours.rank, ours.groups) != (theirs.rank, theirs.groups):
            raise InvalidRequest(
                f"the checkpoint has rank {theirs.rank} on {sorted(theirs.groups)}, "
                f"this model has rank {ours.rank} on {sorted(ours.groups)}"
            )
        if with_optimizer and state.optimizer is None:
            raise InvalidRequest("the checkpoint holds no optimizer state; load it without the optimizer")
        if with_optimizer and state.optimizer is not None and state.optimizer.kind != model.optimizer_kind:
            raise InvalidRequest(
                f"the checkpoint's optimizer is {state.optimizer.kind!r}, the model's {model.optimizer_kind!r}; "
                "load it without the optimizer"
            )
        model.adapter.flat.copy_(state.adapter.flat)
        model.clear_gradient()
        model.step = state.step
        model.optimizer = OPTIMIZERS[model.optimizer_kind](model.adapter)
        if with_optimizer and state.optimizer is not None:
            model.optimizer.load(state.optimizer.tensors)


def _largest(tensors: list[Tensor]) -> float:
    """The largest magnitude in any of them; NaN when one is NaN."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max().item() if tensors else 0.0


def _rows(datum: Datum, start: int) -> np.ndarray:
    """int64: the packed row of each target, row major."""
    rows = np.arange(start, start + datum.length)
    return rows if datum.targets.ndim == 1 else np.repeat(rows, datum.targets.shape[1])
