"""Memory: how many tokens fit at once, by measurement, and what to do when memory runs out.

The plan is measured when the trainer starts, on its own forward and backward.

A larger micro-batch is never slower per token, so memory is the only bound here. The compute thread
(scheduling/compute.py) also bounds the time of a micro-batch, so that other models do not wait long for the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from tinsmith.errors import OutOfCapacity
from tinsmith.faults import is_out_of_memory
from tinsmith.formatting import size_text
from tinsmith.modeling.base_model import BaseModel
from tinsmith.sizing import Footprint, Lengths, full_bytes
from trainer_service.engine.memory import device_memory, drop_caches
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.residency import Residency
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

Checkpointing = Literal["auto", "on", "off"]

_RECOVERS_AFTER = 100
"""After this many micro-batches without lack of memory, a lowered token budget is raised again."""
MAX_COMING = 3
"""Most models of a micro-batch that wait in host memory. A model moves with its optimizer, and where many tenants take
turns, micro-batches of many models would spend their time on moves (`python -m benchmarks tenants`)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the engine may use memory, as measured or set. It is the same on every rank of a trainer."""

    token_budget: int
    """Most tokens of a micro-batch, which may need activation checkpointing. A datum longer than this is a micro-batch
    by itself."""
    memory_bytes: int | None = None
    """Memory for adapters, their optimizers and activations together; None when it was not measured."""
    activation_bytes: int | None = None
    """Part of memory_bytes that activations may take."""
    models_bytes: int | None = None
    """Memory for all live models with gradients and optimizers, on the device or the host; None means no limit."""
    adapter_device_bytes: int | None = None
    """Device memory that adapters may take, from the setting of this name; None when it is not set."""
    plain: Footprint | None = None
    """Activations without activation checkpointing; None when they were not measured."""
    checkpointed: Footprint | None = None
    """Activations with activation checkpointing; None when they were not measured."""
    longest_datum: int | None = None
    """Length of the longest datum that fits into memory, in tokens; None when it was not measured."""
    picture_cost: float = 0.0
    """Tokens for which each token of a picture counts more where a run adapts the vision tower, as the tower's
    activations take so much memory. 0 when it was not measured."""

    def needs_checkpointing(self, lengths: Lengths) -> bool:
        if self.plain is None or self.activation_bytes is None:
            return False
        return self.plain.of(lengths) > self.activation_bytes

    def bytes_for_adapters(self, lengths: Lengths, *, checkpointing: bool) -> int | None:
        """Device memory for adapters beside a micro-batch of these sequences, in bytes. None means no limit."""
        if self.memory_bytes is None:
            return self.adapter_device_bytes
        footprint = self.checkpointed if checkpointing else self.plain
        room = self.memory_bytes - (footprint.of(lengths) if footprint is not None and lengths else 0)
        return room if self.adapter_device_bytes is None else min(room, self.adapter_device_bytes)


@dataclass(slots=True)
class Attempt:
    """Observations about memory while one micro-batch and its parts ran."""

    failed_tokens: int | None = None
    """Tokens of the largest part that ran out of memory; None when none did."""
    fitting_tokens: int = 0
    """Tokens of the largest part that ran after another had run out of memory."""
    checkpointed_tokens: int | None = None
    """Tokens of the shortest datum that ran only with activation checkpointing; None when none needed it."""
    gave_up: bool = False
    """True when a datum ran out of memory even alone, so the number of tokens is not the cause."""

    def ran_out(self, tokens: int) -> None:
        self.failed_tokens = max(tokens, self.failed_tokens or 0)

    def succeeded(self, tokens: int) -> None:
        if self.failed_tokens is not None:
            self.fitting_tokens = max(tokens, self.fitting_tokens)

    def needed_checkpointing(self, tokens: int) -> None:
        self.checkpointed_tokens = min(tokens, self.checkpointed_tokens or tokens)


class MemoryBudget:
    """Applies the plan: sizes of micro-batches, which models are on the device, what to do when memory runs out."""

    def __init__(
        self,
        base: BaseModel,
        models: Mapping[str, ModelState],
        plan: Plan,
        residency: Residency,
        *,
        checkpointing: Checkpointing,
        metrics: Metrics,
        fixed: bool,
    ) -> None:
        """`models`: the engine's live models, by id. `fixed`: the token budget stays even when memory runs out.

        Raises ValueError when `checkpointing` is "on" and the base model has no list of layers."""
        self.residency = residency
        self.layers = base.layers
        self.num_layers = base.config.num_hidden_layers
        if checkpointing == "on" and not self.layers:
            raise ValueError(
                f"activation_checkpointing: 'on' is not possible for {base.architecture}: it has no list of "
                f"{self.num_layers} layers; take 'auto' or 'off'"
            )
        self._fixed = fixed
        self._device = base.device
        self._models = models
        self._checkpointing = checkpointing
        self._metrics = metrics
        self._too_long: int | None = None
        """Tokens of the shortest datum that ran only with activation checkpointing; None when none needed it."""
        self._show_memory()
        self.follow(plan)

    @property
    def token_budget(self) -> int:
        return self.plan.token_budget

    @property
    def can_checkpoint(self) -> bool:
        return bool(self.layers) and self._checkpointing != "off"

    @property
    def always_checkpoints(self) -> bool:
        return self._checkpointing == "on"

    def follow(self, plan: Plan) -> None:
        self.plan = plan
        self._planned = plan.token_budget
        self._num_well = 0
        self._metrics.memory.token_budget.set(plan.token_budget)
        self._metrics.memory.model_limit_bytes.set(math.inf if plan.models_bytes is None else plan.models_bytes)

    def _show_memory(self) -> None:
        """Registers the memory metrics. Their functions run on the thread that serves the metrics."""
        metrics, device = self._metrics, self._device

        def held(*, on_host: bool) -> int:
            host = set(self.residency.on_host)
            return sum(model.num_bytes for key, model in list(self._models.items()) if (key in host) == on_host)

        metrics.memory.model_bytes.labels("device").set_function(lambda: held(on_host=False))
        metrics.memory.model_bytes.labels("host").set_function(lambda: held(on_host=True))
        metrics.memory.model_reserved_bytes.set_function(lambda: self.reserved_bytes)
        for state, count in device_memory(device).items():
            metrics.memory.device_bytes.labels(state).set_function(count)

    def needs_checkpointing(self, shares: Sequence[Lengths]) -> bool:
        """Whether a pass needs activation checkpointing. `shares`: lengths of each rank's datums, in tokens."""
        if self._checkpointing != "auto" or not self.layers:
            return self._checkpointing == "on"
        known = self._too_long is not None and max(length for share in shares for length in share) >= self._too_long
        return known or any(self.plan.needs_checkpointing(share) for share in shares)

    def bytes_beside(self, tokens: int) -> int | None:
        """Device memory for adapters beside any micro-batch of at most so many tokens, in bytes. None: no limit."""
        plan = self.plan
        some_checkpoint = plan.needs_checkpointing([tokens])
        left = plan.bytes_for_adapters([tokens], checkpointing=self.always_checkpoints or some_checkpoint)
        if left is None or not some_checkpoint:
            return left
        # Smaller micro-batches run without checkpointing, and may take all memory for activations.
        assert plan.memory_bytes is not None
        assert plan.activation_bytes is not None
        return min(left, plan.memory_bytes - plan.activation_bytes)

    def go_together(self, ids: Sequence[str], *, tokens: int) -> bool:
        """Whether these models and their gradients fit on the device beside a micro-batch of `tokens` tokens, and at
        most `MAX_COMING` of them have to be moved there first."""
        if self.residency.num_on_host(ids) > MAX_COMING:
            return False
        left = self.bytes_beside(tokens)
        if left is None:
            return True
        # Where models cannot be moved to the host, models outside this micro-batch take memory, too.
        resident = ids if self.residency.moves else self._models
        needed = sum(self._models[model_id].num_bytes for model_id in resident)
        return needed + sum(self._models[model_id].growth_bytes for model_id in ids) <= left

    def have_on_device(self, ids: Sequence[str], lengths: Lengths, *, checkpointing: bool) -> None:
        """Moves these models to the device for a pass over datums of these lengths, with memory for their gradients."""
        if not self.residency.moves:
            return
        left = self.plan.bytes_for_adapters(lengths, checkpointing=checkpointing)
        if left is not None and torch.is_grad_enabled():
            left -= sum(self._models[model_id].growth_bytes for model_id in ids)
        self.residency.use(ids, max_bytes=left)

    def have_for_a_step(self, model_id: str) -> None:
        """Moves the model to the device, with memory for its gradient and its optimizer."""
        left = self.plan.bytes_for_adapters([], checkpointing=False)
        missing = full_bytes(self._models[model_id].adapter.num_bytes)
        self.residency.use([model_id], max_bytes=None if left is None else left - missing)

    @property
    def reserved_bytes(self) -> int:
        """Memory that the models take once each has gradients and moments, in bytes. May be read on any thread."""
        return sum(full_bytes(model.adapter.num_bytes) for model in list(self._models.values()))

    @property
    def bytes_left(self) -> float:
        """Bytes that further models may take; infinite without a limit. May be read on any thread."""
        if self.plan.models_bytes is None:
            return math.inf
        return self.plan.models_bytes - self.reserved_bytes

    def check_capacity(self, needed: int, *, rank: int) -> None:
        """Raises OutOfCapacity when `needed` bytes are more than the live models leave. `rank`: for the message.

        A model is counted with its gradient and optimizer from the start: memory must not run out while others train.
        """
        if needed > (left := self.bytes_left):
            raise OutOfCapacity(
                f"lora_config.rank: a model of rank {rank} takes {size_text(needed)} with its gradients and its "
                f"optimizer, and {len(self._models)} live models leave {size_text(max(0, left))} of this trainer's "
                "memory for models; end one, or ask for a smaller rank",
                field="lora_config.rank",
            )

    def ran_out(self, tokens: int, *, keep: Sequence[str]) -> None:
        """Counts and logs a micro-batch that ran out of memory, and frees all memory but that of the models `keep`."""
        self._metrics.memory.out_of_memory.inc()
        logger.warning("out of memory with %d tokens; the token budget is %d", tokens, self.token_budget)
        self._free(keep)

    def learn(self, attempt: Attempt) -> None:
        """Lowers the token budget to the size that fitted after a larger one did not. Raises it again after
        _RECOVERS_AFTER micro-batches without lack of memory.

        An attempt in which a datum found no memory even alone changes nothing. Its cause may be a custom loss that
        takes much memory, or another process, and other models must not become slower for it.
        """
        if self._fixed:
            return
        if attempt.failed_tokens is None:
            self._num_well += 1
            if self._num_well >= _RECOVERS_AFTER:
                self._recover()
            return
        self._num_well = 0
        if attempt.gave_up:
            return
        if attempt.checkpointed_tokens is not None:
            self._too_long = min(attempt.checkpointed_tokens, self._too_long or attempt.checkpointed_tokens)
        if attempt.fitting_tokens < self.token_budget and attempt.failed_tokens <= self.token_budget:
            self._set_budget(max(1, attempt.fitting_tokens))

    def _recover(self) -> None:
        self._num_well = 0
        self._too_long = None
        if self.token_budget < self._planned:
            self._set_budget(min(self._planned, 2 * self.token_budget))

    def _set_budget(self, tokens: int) -> None:
        logger.warning("the token budget is %d now, it was %d", tokens, self.token_budget)
        self.plan = replace(self.plan, token_budget=tokens)
        self._metrics.memory.token_budget.set(tokens)

    def with_memory(self, call: Callable[[], T], *, what: str, keep: Sequence[str] = ()) -> T:
        """Runs `call`, and once more after freeing memory when memory runs out. `keep`: models that stay on the device.

        Raises OutOfCapacity when memory runs out again. `what`: subject of its message.
        """
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

    def _free(self, keep: Sequence[str]) -> None:
        self.residency.offload_all_but(keep)
        drop_caches(self._device)
