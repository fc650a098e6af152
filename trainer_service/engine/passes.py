"""Runs micro-batches through the base model, forward and backward. Each is kept whole or not at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest, NotFinite, OutOfCapacity, ServiceError
from tinsmith.faults import is_device_fault, is_out_of_memory
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import PassGradient, Run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_logprobs import full_target_logprobs
from tinsmith.modeling.kernels.transfer import on_device
from trainer_service.engine.activation_checkpointing import checkpointed
from trainer_service.engine.batch import (
    FITS_MEMORY,
    Batch,
    Example,
    MicroBatch,
    Output,
    charges_of,
    describe_ratio,
    log_ratio,
)
from trainer_service.engine.budget import Attempt, MemoryBudget
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import magnitude
from trainer_service.engine.pack import Pack
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import Term

logger = logging.getLogger(__name__)

_GROWN = 1e9
"""Parameters beyond this have diverged: a gradient has products of several of them, which leave float32."""

T = TypeVar("T")


class Team(Protocol):
    """The ranks that compute together, as the engine sees them.

    Every rank makes the same calls in the same order, whatever its share is. An error on one rank is raised on all, so
    that all continue in the same way.
    """

    @property
    def num_shares(self) -> int: ...

    @property
    def is_first(self) -> bool:
        """True on the rank that holds what exists only once, such as gradients that have been summed over the ranks."""
        ...

    @property
    def sees_all(self) -> bool:
        """False when the cause of a failed pass may be known to another rank only."""
        ...

    def shares(self, examples: Sequence[Example]) -> Sequence[Sequence[Example]]:
        """Divides the datums among the ranks. Each share keeps their order; a share may be empty."""
        ...

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The share of this rank."""
        ...

    def one_pass(self) -> AbstractContextManager[None]:
        """A context for one forward and backward pass. If it ends without an error, all ranks may keep the results."""
        ...

    def halfway(self) -> None:
        """Called within a pass, between the losses and the backward pass."""
        ...

    def all_or_none(self, call: Callable[[], T]) -> T:
        """Makes a call that may fail on some ranks, and raises on all ranks when it fails on one."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks, in place. Every rank gets the same bits."""
        ...


class Alone:
    """A Team of one."""

    num_shares = 1
    is_first = True
    sees_all = True

    def shares(self, examples: Sequence[Example]) -> Sequence[Sequence[Example]]:
        return [examples]

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        return examples

    def one_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def halfway(self) -> None:
        pass

    def all_or_none(self, call: Callable[[], T]) -> T:
        return call()

    def sum_(self, tensor: Tensor) -> None:
        pass


class Passes:
    """Runs micro-batches. Results go into the batches, and gradients are added to those of the batches' models.

    The methods run on the compute thread, which is their caller (scheduling/compute.py).
    """

    def __init__(
        self,
        base: BaseModel,
        models: Mapping[str, ModelState],
        memory: MemoryBudget,
        team: Team,
        metrics: Metrics,
        *,
        share_prefixes: bool,
    ) -> None:
        """`share_prefixes`: compute beginnings that datums of a model have in common once."""
        self._base = base
        self._share = share_prefixes
        self._models = models
        self._memory = memory
        self._team = team
        self._agreement = metrics.agreement
        self._phases = metrics.compute.phases
        self._shared_tokens = metrics.compute.shared_tokens
        self._not_finite: list[Batch] = []
        """Batches that made the last pass fail, because their loss or their model's gradient was not finite."""

    @property
    def token_budget(self) -> int:
        """Most tokens of a micro-batch. The budget falls when memory runs out, and recovers later."""
        return self._memory.token_budget

    def go_together(self, model_ids: Sequence[str]) -> bool:
        """Whether a micro-batch may have datums of all these models: see `MemoryBudget.go_together`."""
        return self._memory.go_together(model_ids, tokens=self.token_budget // self._team.num_shares)

    @property
    def moves_models(self) -> bool:
        """Whether models that do not fit on the device wait in host memory."""
        return self._memory.residency.moves

    def is_dead(self, error: Exception) -> bool:
        """True for an error after which nothing can be computed in this process, whichever operation met it."""
        return is_device_fault(error)

    def charge(self, batch: Batch) -> None:
        """Charges a batch for its pictures if its model adapts the vision tower, and fails it if one of its datums can
        then never fit into memory. Called once, before the batch's first datum is taken; on any thread."""
        model, plan = self._models.get(batch.model_id), self._memory.plan
        if model is None or not model.adapter.config.train_vision or not any(one.pictures for one in batch.datums):
            return
        batch.charge_pictures(plan.picture_cost)
        index = int(np.argmax(batch.charges))
        if plan.longest_datum is not None and batch.charges[index] > plan.longest_datum:
            field = f"data[{index}].model_input"
            batch.error = InvalidRequest(
                f"{field}: its {batch.datums[index].length} tokens count as {batch.charges[index]} with the "
                "activations of its pictures in the tower, which this run adapts; this is above "
                f"{plan.longest_datum}, {FITS_MEMORY}",
                field=field,
            )

    def run(self, micro_batch: MicroBatch) -> None:
        """Runs datums of any batches through the base model, and adds to each model's gradients. Either all batches are
        forward_only or none.

        When the micro-batch fails, its batches run apart, so that only the batch that causes the error fails: its
        `error` is set, and its gradient is not added.
        """
        examples = [Example(batch, index) for batch, indices in micro_batch for index in indices]
        # A model's datums must lie together. Equal lengths lie together because attention batches them.
        examples.sort(key=lambda example: (example.model_id, example.datum.length))
        attempt = Attempt()
        with torch.set_grad_enabled(not any(batch.forward_only for batch, _ in micro_batch)):
            self._try(examples, attempt)
        self._memory.learn(attempt)

    def finish(self, batch: Batch) -> Output | ServiceError:
        """Returns the result of a batch whose datums have all run, or the error of a batch that failed.

        A failed batch's gradient is missing from the model's sum, so the model's next optim_step is refused.
        """
        if batch.error is None:
            if batch.mismatch is not None:
                self._agreement.observe(batch.mismatch, loss_fn=batch.loss_fn)
                model = self._models[batch.model_id]
                if not batch.forward_only and batch.mismatch.farthest > model.largest_ratio[0]:
                    model.largest_ratio = batch.mismatch.farthest, batch.largest_ratio()
            return batch.output()
        if not batch.forward_only:
            self.taint(batch.model_id, batch.error.message, seq_id=batch.seq_id)
        return batch.error

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        """Records that the forward_backward `seq_id` has failed: the model's next optim_step fails with `reason`."""
        self._models[model_id].taint(reason, seq_id=seq_id)

    def once(self, batch: Batch, *, checkpointing: bool) -> None:
        """Runs a whole batch in one pass, all of it on every rank, and each datum apart. Raises the pass's error, if
        any."""
        examples = [Example(batch, index) for index in range(len(batch.datums))]
        self._run(examples, examples, checkpointing=checkpointing, share=False)

    def _try(self, examples: Sequence[Example], attempt: Attempt, *, checkpointing: bool = False) -> None:
        """Runs a micro-batch. Runs it in halves when memory runs out, and batch by batch after other errors."""
        examples = [example for example in examples if example.batch.error is None]
        if not examples:
            return
        checkpointing = checkpointing or self._memory.needs_checkpointing(
            [charges_of(share) for share in self._team.shares(examples)]
        )
        self._not_finite = []
        try:
            self._run(examples, self._team.mine(examples), checkpointing=checkpointing, share=self._share)
            attempt.succeeded(num_tokens(examples))
            return
        except Exception as caught:
            if is_device_fault(caught):  # it would fail every other batch, too
                raise
            error = caught
            if is_out_of_memory(error):
                error = MemoryError()  # drops `caught`, whose frames hold tensors, before the next attempt
            elif not isinstance(error, ServiceError) and len({example.batch for example in examples}) == 1:
                logger.exception("forward_backward of %s failed", examples[0].model_id)
        batches = list(dict.fromkeys(example.batch for example in examples))
        if isinstance(error, MemoryError):
            self._try_smaller(examples, attempt, checkpointing=checkpointing)
        elif len(batches) > 1:
            for part in self._apart(examples):
                self._try(part, attempt, checkpointing=checkpointing)
        elif isinstance(error, ServiceError):
            batches[0].error = error
        else:
            batches[0].error = ServiceError(
                f"forward_backward failed: {type(error).__name__}; the trainer's log has the cause"
            )

    def _apart(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Divides a failed micro-batch: each batch that may have caused the error alone, the other batches together."""
        known = self._not_finite if self._team.sees_all else []
        guilty = known or list(dict.fromkeys(example.batch for example in examples))
        others = [example for example in examples if example.batch not in guilty]
        return [others, *([example for example in examples if example.batch is batch] for batch in guilty)]

    def _try_smaller(self, examples: Sequence[Example], attempt: Attempt, *, checkpointing: bool) -> None:
        """Runs examples again that ran out of memory, with no results kept: in halves, or one with checkpointing.

        A single example that still finds no memory fails its batch.
        """
        self._memory.ran_out(num_tokens(examples), keep=model_ids(examples))
        attempt.ran_out(num_tokens(examples))
        if len(examples) > 1:
            for half in halves(examples):
                self._try(half, attempt, checkpointing=checkpointing)
            return
        (example,) = examples
        if not checkpointing and self._memory.can_checkpoint and torch.is_grad_enabled():
            self._try(examples, attempt, checkpointing=True)
            if example.batch.error is None:
                attempt.needed_checkpointing(example.batch.charges[example.index])
            return
        attempt.gave_up = True
        field = f"data[{example.index}].model_input"
        example.batch.error = OutOfCapacity(
            f"{field}: there is no memory for its {example.datum.length} tokens at this moment, even alone", field=field
        )

    def _run(self, examples: Sequence[Example], mine: Sequence[Example], *, checkpointing: bool, share: bool) -> None:
        """Runs one pass of the base model, of which this rank computes `mine`. `share`: compute common beginnings once.

        Batches and gradients change only after the pass has succeeded on all ranks.
        """
        with self._team.one_pass():
            keep = self._compute(mine, checkpointing=checkpointing, share=share)
            if torch.is_grad_enabled():
                # Every rank needs a gradient, because the next step sums them over the ranks.
                for model_id in model_ids(examples):
                    self._models[model_id].need_gradient()
        with self._phases["accumulate"].time():
            keep()

    def _compute(self, examples: Sequence[Example], *, checkpointing: bool, share: bool) -> Callable[[], None]:
        """Runs forward and backward. Returns a function that keeps the results, needs no memory and cannot fail."""
        if not examples:
            self._team.halfway()
            return lambda: None
        device = self._base.device
        with self._phases["pack"].time():
            self._memory.have_on_device(model_ids(examples), charges_of(examples), checkpointing=checkpointing)
            pack = Pack.of(examples, share=share)
            tokens_T, positions = on_device(pack.tokens_T, device), on_device(pack.positions, device)
            runs = [self._run_of(model_id, rows) for model_id, rows in pack.models]
            self._shared_tokens.inc(pack.num_shared)

        with self._phases["forward"].time():
            logprobs_M = self._forward(pack, tokens_T, positions, runs, checkpointing=checkpointing)
            # Losses are many small operations whose values are read one by one, so they run on the host, on one copy.
            pieces = pack.by_datum(logprobs_M.cpu())

        with self._phases["loss"].time():
            shaped = [piece.view(example.datum.targets.shape) for example, piece in zip(examples, pieces, strict=True)]
            terms: list[tuple[Batch, Term]] = []
            for batch, group in groupby(range(len(examples)), key=lambda n: examples[n].batch):
                mine = list(group)
                inputs = [examples[n].datum.inputs for n in mine]
                terms.append((batch, batch.evaluate([shaped[n] for n in mine], inputs)))
        self._team.halfway()
        gradients: list[tuple[ModelState, list[Tensor]]] = []
        if torch.is_grad_enabled():
            with self._phases["backward"].time():
                gradients = list(self._gradients(terms, runs, examples))
                largest = {id(model): magnitude(tensors) for model, tensors in gradients}
            self._check_finite(terms, largest, examples, shaped)
        else:
            self._check_finite(terms, {}, examples, shaped)

        sums = [
            (total.tensors() if self._base.trainable else [total.flat], tensors)
            for total, tensors in ((model.need_gradient(), tensors) for model, tensors in gradients)
        ]
        results = [logprobs.detach().numpy() for logprobs in shaped]

        def keep() -> None:
            for batch, term in terms:
                batch.add(term.value, term.metrics, term.mismatch)
            for example, logprobs in zip(examples, results, strict=True):
                example.batch.logprobs[example.index] = logprobs
            for totals, tensors in sums:
                torch._foreach_add_(totals, tensors)

        return keep

    def _forward(
        self, pack: Pack, tokens_T: Tensor, positions: Tensor, runs: Sequence[Run], *, checkpointing: bool
    ) -> Tensor:
        """The logprobs of the pack's targets, on the device. `tokens_T`, `positions`: those of the pack, on the
        device."""
        adapted = [] if self._base.trainable else runs
        layers = self._memory.layers if checkpointing and torch.is_grad_enabled() else []
        picture_features = None
        if pack.placed:
            assert self._base.tower is not None  # requests.py refuses pictures otherwise
            tower = self._base.tower
            with checkpointed(tower.layers, tower.active) if layers else nullcontext():
                picture_features = tower.features_of(pack.placed, adapted)
        with checkpointed(layers, self._base.active) if layers else nullcontext():
            hidden_T_H = self._base.hidden_states(tokens_T, positions, pack.layout, adapted, picture_features)
        named = torch.from_numpy(pack.rows_M), torch.from_numpy(pack.targets_M)
        if self._base.trainable:
            return full_target_logprobs(self._base.head, hidden_T_H, *(x.to(hidden_T_H.device) for x in named))
        return self._base.target_logprobs(hidden_T_H, *named, runs)

    def _check_finite(
        self,
        terms: Sequence[tuple[Batch, Term]],
        largest: Mapping[int, float],
        examples: Sequence[Example],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Raises an error that describes the first batch whose loss, or whose model's gradient, is not finite.

        `largest`: bound of each model's gradient, by `id` of its ModelState. Two batches of a model with a bad gradient
        both count as failed.
        """
        self._not_finite = [
            batch
            for batch, term in terms
            if not math.isfinite(term.value) or not math.isfinite(largest.get(id(self._models[batch.model_id]), 0.0))
        ]
        if self._not_finite:
            first = self._not_finite[0]
            farthest = magnitude([self._models[first.model_id].adapter.flat.detach()])
            if farthest > _GROWN or any(
                example.batch is first and one.isnan().any() for example, one in zip(examples, logprobs, strict=True)
            ):
                raise NotFinite(
                    f"{first.loss_fn}: the model's own logprobs or their gradients are not numbers, whatever the "
                    f"request holds: its parameters have grown too large (up to {farthest:.3g}). Load a checkpoint "
                    "from before that, and go on with a smaller learning rate"
                )
            loss = sum(term.value for batch, term in terms if batch is first)
            own = [
                (log_ratio(one.detach().numpy(), example.datum), example.index)
                for example, one in zip(examples, logprobs, strict=True)
                if example.batch is first
            ]
            gap, index = max(own)
            suspects, field = "`logprobs` far from the model's own", f"data[{index}].loss_fn_inputs.logprobs"
            if gap == -math.inf:
                suspects, field = "numbers that are too large", "data"
            raise InvalidRequest(
                f"{first.loss_fn}: the loss ({loss}) or its gradient is not finite; the next optim_step will be "
                f"refused. Look for {suspects} in loss_fn_inputs"
                + describe_ratio(gap, index=index, seq_id=first.seq_id),
                field=field,
            )

    def _run_of(self, model_id: str, rows: slice) -> Run:
        """The run of a model's adapter on its rows."""
        adapter: Adapter = self._models[model_id].adapter  # type: ignore[assignment]  # full weights meet no layer
        return Run(adapter, rows, None if self._base.trainable else PassGradient(adapter))

    def _gradients(
        self, terms: Sequence[tuple[Batch, Term]], runs: Sequence[Run], examples: Sequence[Example]
    ) -> Iterable[tuple[ModelState, list[Tensor]]]:
        """Differentiates the sum of the terms. Yields each run's model with its gradient: one flat tensor for an
        adapter, one tensor for each parameter for full weights."""
        total = torch.stack([term.differentiable for _, term in terms]).sum()
        anchors = [run.gradient.anchor for run in runs if run.gradient is not None]
        parameters = [tensor for run in runs for tensor in run.adapter.tensors()]
        inputs = [*anchors, *parameters]
        # Text without pictures depends on no parameter of a run that adapts the vision tower alone.
        found = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
        grads = iter(found[len(anchors) :])
        for model_id, run in zip(dict.fromkeys(example.model_id for example in examples), runs, strict=True):
            kept = run.adapter.tensors()
            mine = [next(grads) for _ in kept]
            if run.gradient is not None:
                yield self._models[model_id], [run.gradient.gather(mine)]
            else:
                pairs = zip(kept, mine, strict=True)
                yield (
                    self._models[model_id],
                    [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs],
                )


def num_tokens(examples: Sequence[Example]) -> int:
    return sum(charges_of(examples))


def model_ids(examples: Iterable[Example]) -> list[str]:
    """The examples' models, each once, in the examples' order."""
    return list(dict.fromkeys(example.model_id for example in examples))


def halves(examples: Sequence[Example]) -> tuple[Sequence[Example], Sequence[Example]]:
    """Two parts with about equally many tokens, each with at least one datum. Raises ValueError for one example."""
    charges = charges_of(examples)
    total, before = sum(charges), 0
    for n, charge in enumerate(charges):
        before += charge
        if 2 * before >= total:
            middle = min(max(1, n + 1), len(examples) - 1)
            return examples[:middle], examples[middle:]
    raise ValueError("a single datum has no halves")
