"""Runs datums of any jobs through the base model, forward and backward. A micro-batch is kept whole or not at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_logprobs import full_target_logprobs
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.lora import Run
from tinsmith.modeling.pass_gradient import PassGradient
from tinsmith.rpc.errors import InvalidRequest, NotFinite, OutOfCapacity, ServiceError
from trainer_service.engine.activation_checkpointing import checkpointed
from trainer_service.engine.batch import Datum
from trainer_service.engine.faults import is_device_fault
from trainer_service.engine.job import Job, Piece, describe_ratio, log_ratio
from trainer_service.engine.memory import is_out_of_memory
from trainer_service.engine.micro_batch import Attempt, Item, cut, halves, model_ids, num_tokens
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import magnitude
from trainer_service.engine.room import Room
from trainer_service.engine.team import Team
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import Term

logger = logging.getLogger(__name__)


class Passes:
    """Runs micro-batches. Results go into the jobs, and gradients are added to those of the jobs' models."""

    def __init__(
        self, base: BaseModel, models: Mapping[str, ModelState], room: Room, team: Team, metrics: Metrics
    ) -> None:
        self._base = base
        self._models = models
        self._room = room
        self._team = team
        self._phases = metrics.compute.phases
        self._not_finite: list[Job] = []
        """Jobs that made the last pass fail, because their loss or their model's gradient was not finite."""

    def run(self, pieces: Sequence[Piece]) -> None:
        """Runs datums of any jobs through the base model, and adds to each model's gradients.

        Datums that do not fit into one micro-batch are cut into several. When a micro-batch fails, its jobs run apart,
        so that only the job that causes the error fails: its `error` is set, and its gradient is not added.
        """

        def go_together(ids: Sequence[str]) -> bool:
            return self._room.go_together(ids, tokens=self._room.token_budget // self._team.num_shares)

        for forward_only in (True, False):
            items = [
                Item(piece.job, index)
                for piece in pieces
                if piece.job.batch.forward_only == forward_only
                for index in piece.indices
            ]
            # A model's datums must lie together. Equal lengths lie together because attention batches them.
            items.sort(key=lambda item: (item.model_id, item.datum.length))
            for micro_batch in cut(items, lambda: self._room.token_budget, go_together):
                with torch.set_grad_enabled(not forward_only):
                    attempt = Attempt()
                    self._try(micro_batch, attempt)
                    self._room.learn(attempt)

    def once(self, job: Job, *, checkpointing: bool) -> None:
        """Runs a whole job in one pass, all of it on every rank. Raises the pass's error, if any."""
        items = [Item(job, index) for index in range(len(job.batch.datums))]
        self._run(items, items, checkpointing=checkpointing)

    def _try(self, items: Sequence[Item], attempt: Attempt, *, checkpointing: bool = False) -> None:
        """Runs a micro-batch. Runs it in halves when memory runs out, and job by job after other errors."""
        items = [item for item in items if item.job.error is None]
        if not items:
            return
        checkpointing = checkpointing or self._room.needs_checkpointing(
            [[item.datum.charge for item in share] for share in self._team.shares(items)]
        )
        self._not_finite = []
        try:
            self._run(items, self._team.mine(items), checkpointing=checkpointing)
            attempt.succeeded(num_tokens(items))
            return
        except Exception as caught:
            if is_device_fault(caught):  # it would fail every other job, too
                raise
            error = caught
            if is_out_of_memory(error):
                error = MemoryError()  # drops `caught`, whose frames hold tensors, before the next attempt
            elif not isinstance(error, ServiceError) and len({item.job for item in items}) == 1:
                logger.exception("forward_backward of %s failed", items[0].model_id)
        jobs = list(dict.fromkeys(item.job for item in items))
        if isinstance(error, MemoryError):
            self._try_smaller(items, attempt, checkpointing=checkpointing)
        elif len(jobs) > 1:
            for part in self._apart(items):
                self._try(part, attempt, checkpointing=checkpointing)
        elif isinstance(error, ServiceError):
            jobs[0].error = error
        else:
            jobs[0].error = ServiceError(
                f"forward_backward failed: {type(error).__name__}; the trainer's log has the cause"
            )

    def _apart(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divides a failed micro-batch: each job that may have caused the error alone, and the other jobs together."""
        known = self._not_finite if self._team.sees_all else []
        guilty = known or list(dict.fromkeys(item.job for item in items))
        others = [item for item in items if item.job not in guilty]
        return [others, *([item for item in items if item.job is job] for job in guilty)]

    def _try_smaller(self, items: Sequence[Item], attempt: Attempt, *, checkpointing: bool) -> None:
        """Runs items again that ran out of memory, whose results were not kept: in halves, or one with checkpointing.

        A single item that still finds no memory fails its job.
        """
        self._room.ran_out(num_tokens(items), keep=model_ids(items))
        attempt.ran_out(num_tokens(items))
        if len(items) > 1:
            for half in halves(items):
                self._try(half, attempt, checkpointing=checkpointing)
            return
        (item,) = items
        if not checkpointing and self._room.can_checkpoint and torch.is_grad_enabled():
            self._try(items, attempt, checkpointing=True)
            if item.job.error is None:
                attempt.needed_checkpointing(item.datum.charge)
            return
        attempt.gave_up = True
        item.job.error = OutOfCapacity(
            f"data[{item.index}].model_input: there is no memory for its {item.datum.length} tokens at this moment, "
            "even alone",
            field=f"data[{item.index}].model_input",
        )

    def _run(self, items: Sequence[Item], mine: Sequence[Item], *, checkpointing: bool) -> None:
        """Runs one pass of the base model, of which this rank computes `mine`.

        Jobs and gradients change only after the pass has succeeded on all ranks.
        """
        with self._team.one_pass():
            keep = self._compute(mine, checkpointing=checkpointing)
            if torch.is_grad_enabled():
                for model_id in model_ids(items):  # every rank needs a gradient: the next step sums them over the ranks
                    self._models[model_id].need_gradient()
        with self._phases["accumulate"].time():
            keep()

    def _compute(self, items: Sequence[Item], *, checkpointing: bool) -> Callable[[], None]:
        """Runs forward and backward. Returns a function that keeps the results, needs no memory and cannot fail."""
        if not items:
            self._team.halfway()
            return lambda: None
        device = self._base.device
        lengths = [item.datum.length for item in items]
        with self._phases["pack"].time():
            charges = [item.datum.charge for item in items]
            self._room.have_on_device(model_ids(items), charges, checkpointing=checkpointing)
            starts = np.cumsum([0, *lengths])
            tokens_N = np.concatenate([item.datum.tokens_N for item in items])
            tokens_T = on_device(torch.from_numpy(tokens_N).long(), device)
            rows_M = np.concatenate([_rows(item.datum, start) for item, start in zip(items, starts, strict=False)])
            targets_M = np.concatenate([item.datum.targets.ravel() for item in items])
            runs = list(self._runs(items, starts))

        with self._phases["forward"].time():
            adapted = [] if self._base.trainable else runs
            layers = self._room.layers if checkpointing and torch.is_grad_enabled() else []
            with checkpointed(layers, self._base.active):
                hidden_T_H = self._base.hidden_states(tokens_T, positions_of(lengths, device), Packed(lengths), adapted)
            named = torch.from_numpy(rows_M), torch.from_numpy(targets_M)
            if self._base.trainable:
                logprobs_M = full_target_logprobs(self._base.head, hidden_T_H, *(x.to(device) for x in named))
            else:
                logprobs_M = self._base.target_logprobs(hidden_T_H, *named, runs)
            # Losses are many small operations whose values are read one by one, so they run on the host, on one copy.
            pieces = logprobs_M.cpu().split([item.datum.targets.size for item in items])

        with self._phases["loss"].time():
            shaped = [piece.view(item.datum.targets.shape) for item, piece in zip(items, pieces, strict=True)]
            terms: list[tuple[Job, Term]] = []
            for job, group in groupby(range(len(items)), key=lambda n: items[n].job):
                mine = list(group)
                inputs = [items[n].datum.inputs for n in mine]
                terms.append((job, job.evaluate([shaped[n] for n in mine], inputs)))
        self._team.halfway()
        gradients: list[tuple[ModelState, list[Tensor]]] = []
        if torch.is_grad_enabled():
            with self._phases["backward"].time():
                gradients = list(self._gradients(terms, runs, items))
                largest = {id(model): magnitude(tensors) for model, tensors in gradients}
            self._check_finite(terms, largest, items, shaped)
        else:
            self._check_finite(terms, {}, items, shaped)

        sums = [
            (total.tensors() if self._base.trainable else [total.flat], tensors)
            for total, tensors in ((model.need_gradient(), tensors) for model, tensors in gradients)
        ]
        results = [logprobs.detach().numpy() for logprobs in shaped]

        def keep() -> None:
            for job, term in terms:
                job.add(term)
            for item, logprobs in zip(items, results, strict=True):
                item.job.logprobs[item.index] = logprobs
            for totals, tensors in sums:
                torch._foreach_add_(totals, tensors)

        return keep

    def _check_finite(
        self,
        terms: Sequence[tuple[Job, Term]],
        largest: Mapping[int, float],
        items: Sequence[Item],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Raises an error that describes the first job whose loss, or whose model's gradient, is not finite.

        `largest`: bound of each model's gradient, by `id` of its ModelState. Two jobs of a model with a bad gradient
        both count as failed.
        """
        self._not_finite = [
            job
            for job, term in terms
            if not math.isfinite(term.value) or not math.isfinite(largest.get(id(self._models[job.model_id]), 0.0))
        ]
        if self._not_finite:
            first = self._not_finite[0]
            if any(item.job is first and one.isnan().any() for item, one in zip(items, logprobs, strict=True)):
                raise NotFinite(
                    f"{first.batch.loss_fn}: the model's own logprobs are not numbers, whatever the request holds: its "
                    "parameters have grown too large. Load a checkpoint from before that, and go on with a smaller "
                    "learning rate"
                )
            loss = sum(term.value for job, term in terms if job is first)
            own = [
                (log_ratio(one.detach().numpy(), item.datum), item.index)
                for item, one in zip(items, logprobs, strict=True)
                if item.job is first
            ]
            gap, index = max(own)
            raise InvalidRequest(
                f"{first.batch.loss_fn}: the loss ({loss}) or its gradient is not finite; the next optim_step will be "
                "refused. Look for sampling logprobs far from the model's own, or too large a learning rate"
                + describe_ratio(gap, index=index, seq_id=first.seq_id)
            )

    def _runs(self, items: Sequence[Item], starts: np.ndarray) -> Iterable[Run]:
        """One run for each model: the packed rows that its adapter is applied to. `starts`: each item's first row."""
        for model_id, group in groupby(range(len(items)), key=lambda n: items[n].model_id):
            mine = list(group)
            rows = slice(int(starts[mine[0]]), int(starts[mine[-1] + 1]))
            adapter: Adapter = self._models[model_id].adapter  # type: ignore[assignment]  # full weights meet no layer
            yield Run(adapter, rows, None if self._base.trainable else PassGradient(adapter))

    def _gradients(
        self, terms: Sequence[tuple[Job, Term]], runs: Sequence[Run], items: Sequence[Item]
    ) -> Iterable[tuple[ModelState, list[Tensor]]]:
        """Differentiates the sum of the terms. Yields each run's model with its gradient: one flat tensor for an
        adapter, one tensor for each parameter for full weights."""
        total = torch.stack([term.differentiable for _, term in terms]).sum()
        anchors = [run.gradient.anchor for run in runs if run.gradient is not None]
        parameters = [tensor for run in runs for tensor in run.adapter.tensors()]
        grads = iter(torch.autograd.grad(total, [*anchors, *parameters], allow_unused=True)[len(anchors) :])
        for model_id, run in zip(dict.fromkeys(item.model_id for item in items), runs, strict=True):
            mine = [next(grads) for _ in run.adapter.tensors()]
            if run.gradient is None:
                kept = run.adapter.tensors()
                mine = [
                    torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(kept, mine, strict=True)
                ]
            yield self._models[model_id], mine if run.gradient is None else [run.gradient.gather(mine)]


def _rows(datum: Datum, start: int) -> np.ndarray:
    """The packed row of each of the datum's targets, in row-major order: int64 [number of targets]."""
    rows = np.arange(start, start + datum.length)
    return rows if datum.targets.ndim == 1 else np.repeat(rows, datum.targets.shape[1])
