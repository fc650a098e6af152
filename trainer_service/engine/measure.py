"""Measures, once before the trainer serves, how many tokens the engine can run through the base model at once."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

import torch

from tinsmith.faults import is_out_of_memory
from tinsmith.memory import host_bytes
from tinsmith.modeling.adapter import VISION, Adapter, AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.logprobs import Head
from tinsmith.sizing import (
    ACTIVATIONS_SHARE,
    PROBE_RANK,
    Footprint,
    Lengths,
    max_activation_bytes,
    models_bytes,
    training_bytes,
)
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.memory import available_bytes, drop_caches, peak_bytes
from trainer_service.engine.model_state import ModelState

logger = logging.getLogger(__name__)

_PROBE = ""
"""Id of the probe's model; no client can choose it."""
_MEMORY_TOKENS = {"cpu": 32, "cuda": 512}
"""Least tokens of the shorter probe. Counting on the CPU is exact to the byte; CUDA's allocator rounds, so it needs
more."""
_MOST_PROBE_TOKENS = 2048
"""Most tokens of the shorter probe."""
_TOKENS_WITHOUT_CHECKPOINTING = {"cpu": 1, "cuda": 2048}
"""If fewer tokens than this fit at once, micro-batches are made larger, with activation checkpointing. On CUDA a pass
of few tokens takes almost as long as one of many, because the device waits for the host. With 600 tokens at once an
H100 trained 8 billion parameters at 2,400 tokens/s, and at 13,000 with 8,192; recomputing costs a third."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings that bound memory and micro-batches (see TrainerConfig). 0 means not set."""

    max_tokens_per_microbatch: int
    max_lora_rank: int
    token_budget: int = 0
    memory_bytes: int = 0
    adapter_device_bytes: int = 0
    ranks_per_machine: int = 1
    """Trainer processes that share this machine's memory."""


def measure(engine: TrainingEngine, bounds: Bounds) -> Plan:
    """Makes the plan for this engine on this machine; the caller passes it to `engine.follow`.

    Raises ValueError when the memory does not suffice for one token of an adapter of the largest rank.
    """
    if engine.base.trainable or not engine.base.targets:
        # Full training: gradients as large as the model would hide its activations. No targets: nothing is trained.
        return Plan(token_budget=bounds.token_budget or bounds.max_tokens_per_microbatch)
    started_s = time.perf_counter()
    device = engine.base.device
    memory_bytes = bounds.memory_bytes or training_bytes(available_bytes(device), device.type) // _sharing(
        device, bounds
    )
    probe = _Probe(engine, bounds.max_lora_rank)
    try:
        activation_bytes = int(memory_bytes * ACTIVATIONS_SHARE)
        room = max_activation_bytes(memory_bytes, probe.max_adapter_bytes, moves=engine.memory.residency.moves)
        plain, checkpointed = probe.footprints(room)
        picture_cost = probe.picture_cost(plain, checkpointed, memory_bytes)
        left = activation_bytes - probe.max_adapter_bytes
        fitting = 1 if plain is None else max(1, plain.longest(left))
        if checkpointed is not None and (plain is None or fitting < _TOKENS_WITHOUT_CHECKPOINTING[device.type]):
            fitting = max(fitting, checkpointed.longest(left))
        max_tokens = min(bounds.max_tokens_per_microbatch, fitting)
        token_budget = min(bounds.token_budget or max_tokens, max_tokens)
    finally:
        probe.close()
    longest_datum = max(footprint.longest(room) for footprint in (plain, checkpointed) if footprint is not None)
    if longest_datum < 1:
        raise ValueError(
            f"memory_bytes: {memory_bytes} are not enough to train one token of an adapter of rank "
            f"{bounds.max_lora_rank}; give more, or lower max_lora_rank"
        )
    plan = Plan(
        token_budget=token_budget,
        memory_bytes=memory_bytes,
        activation_bytes=activation_bytes,
        models_bytes=models_bytes(
            memory_bytes,
            host_bytes(),
            moves=engine.memory.residency.moves,
            ranks_per_machine=bounds.ranks_per_machine,
        ),
        adapter_device_bytes=bounds.adapter_device_bytes or None,
        plain=plain,
        checkpointed=checkpointed,
        longest_datum=longest_datum,
        picture_cost=picture_cost,
    )
    _log(plan, fitting=fitting, elapsed_s=time.perf_counter() - started_s)
    return plan


def _log(plan: Plan, *, fitting: int, elapsed_s: float) -> None:
    """`fitting`: tokens at once for which there is memory. `elapsed_s`: time that measuring took."""
    if plan.picture_cost:
        logger.info(
            "a picture's token counts %.1f tokens more in a run that adapts the vision tower", plan.picture_cost
        )
    logger.info(
        "token budget at most %d (memory allows %d); %.1f GB for training; activations of a token: %s MB, %s MB with "
        "checkpointing; the longest datum that fits has %d tokens; measured in %.2f s",
        plan.token_budget,
        fitting,
        (plan.memory_bytes or 0) / 1e9,
        _megabytes(plan.plain),
        _megabytes(plan.checkpointed),
        plan.longest_datum,
        elapsed_s,
    )


def _megabytes(footprint: Footprint | None) -> str:
    return "unknown" if footprint is None else f"{footprint.bytes_per_token / 1e6:.3f}"


def _sharing(device: torch.device, bounds: Bounds) -> int:
    return bounds.ranks_per_machine if device.type == "cpu" else 1


def probe_tokens(head: Head) -> int:
    """Tokens of the shorter probe. On CUDA they fill a chunk of logits where that does not take too many tokens. With
    fewer, the chunk would grow with the probe, and its memory would count as activations of each token."""
    device_type = head.weight_V_H.device.type
    least = _MEMORY_TOKENS[device_type]
    return least if device_type == "cpu" else max(least, min(head.max_rows, _MOST_PROBE_TOKENS))


class _Probe:
    """A model with adapters on every layer, which runs through the engine's own forward and backward."""

    def __init__(self, engine: TrainingEngine, max_rank: int) -> None:
        self._engine = engine
        base = engine.base
        groups = {target.group for target in base.targets}
        rank = min(PROBE_RANK, max_rank)
        self._more_rank = max_rank - rank
        self._config = AdapterConfig(
            rank=rank, train_attn="attn" in groups, train_mlp="mlp" in groups, train_unembed="unembed" in groups
        )
        self._add_model(self._config)
        targets = chosen_targets(self._config, base.targets)
        largest = replace(self._config, rank=max_rank, train_vision=VISION in groups)
        self.max_adapter_bytes = torch.float32.itemsize * num_elements(largest, chosen_targets(largest, base.targets))
        # Each adapted layer keeps x A^T, which is as wide as the rank, and backward makes its gradient.
        self._bytes_per_rank = 2 * len(targets) * base.head.weight_V_H.element_size()
        self._max_length = base.max_context_length

    def _add_model(self, config: AdapterConfig) -> None:
        base = self._engine.base
        numel = num_elements(config, chosen_targets(config, base.targets))
        model = ModelState(Adapter(config, base.targets, torch.zeros(numel, device=base.device)), "adamw")
        model.need_gradient()  # made before the first run, so that no measurement includes it
        self._engine.add_model(_PROBE, model)

    def close(self) -> None:
        self._engine.delete_model(_PROBE)
        drop_caches(self._engine.base.device)

    def run(self, lengths: Lengths, *, checkpointing: bool = False, num_pictures: int = 0) -> None:
        self._engine.probe(_PROBE, lengths, checkpointing=checkpointing, num_pictures=num_pictures)

    def footprints(self, room_bytes: float) -> tuple[Footprint | None, Footprint | None]:
        """Measures the footprints without and with activation checkpointing.

        Either is None when the settings or the model exclude it. The second is also None when the model's whole context
        fits without checkpointing. Raises a memory error when not even 8 tokens fit.
        """
        num_tokens = min(probe_tokens(self._engine.base.head), max(2, self._max_length // 2))
        while True:
            try:
                return self._footprints(num_tokens, room_bytes)
            except Exception as error:
                if not is_out_of_memory(error) or num_tokens <= 8:
                    raise
            drop_caches(self._engine.base.device)
            num_tokens //= 2

    def picture_cost(self, plain: Footprint | None, checkpointed: Footprint | None, memory_bytes: int) -> float:
        """Measures Plan.picture_cost, rounded up to eighths. `plain`, `checkpointed`: the footprints of text.
        `memory_bytes`: for training; a picture is taken to need all of it if two find none."""
        base = self._engine.base
        if base.tower is None or all(target.group != VISION for target in base.targets):
            return 0.0
        self._engine.delete_model(_PROBE)
        self._add_model(replace(self._config, train_vision=True))
        num_tokens = base.tower.examples(1)[0].picture.num_tokens
        costs = [0.0]
        for text, checkpointing in ((plain, False), (checkpointed, True)):
            if text is None:
                continue
            try:
                per_token = self._tower_bytes(num_tokens, checkpointing=checkpointing)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                per_token = memory_bytes / num_tokens
            costs.append(per_token / text.bytes_per_token)
        return math.ceil(8 * max(costs)) / 8  # a deterministic trainer must find the same number again

    def _tower_bytes(self, num_tokens: int, *, checkpointing: bool) -> float:
        """Bytes of the tower's activations for each token of pictures of so many tokens, in a run of the largest rank
        that adapts the tower."""
        base = self._engine.base
        assert base.tower is not None

        def peak(count: int, *, seen: bool) -> int:
            """Peak of a datum with so many pictures, or with text in their place."""
            lengths, num_pictures = [count * num_tokens + 1], count if seen else 0
            return peak_bytes(
                base.device, lambda: self.run(lengths, checkpointing=checkpointing, num_pictures=num_pictures)
            )

        if base.device.type == "cuda":  # first use: see _footprints
            self.run([num_tokens + 1], checkpointing=checkpointing, num_pictures=1)
        # The difference of two differences leaves out all that does not grow with the number of pictures.
        measured = (peak(2, seen=True) - peak(1, seen=True) - peak(2, seen=False) + peak(1, seen=False)) / num_tokens
        targets = [target for target in base.targets if target.group == VISION]
        layers = len(base.tower.layers) if checkpointing else 1
        per_row = self._more_rank * 2 * len(targets) * base.head.weight_V_H.element_size() / layers
        return measured + per_row * base.tower.patches_per_token

    def _footprints(self, num_tokens: int, room_bytes: float) -> tuple[Footprint | None, Footprint | None]:
        if self._engine.base.device.type == "cuda":  # first use: CUDA's libraries allocate memory and keep it
            self.run([num_tokens], checkpointing=self._engine.memory.always_checkpoints)
        plain = checkpointed = None
        if not self._engine.memory.always_checkpoints:
            plain = self._footprint(num_tokens, checkpointing=False, with_pairs=True)
        if self._engine.memory.can_checkpoint and (plain is None or plain.longest(room_bytes) < self._max_length):
            with_pairs = plain is None or plain.bytes_per_pair > 0
            checkpointed = self._footprint(num_tokens, checkpointing=True, with_pairs=with_pairs)
        return plain, checkpointed

    def _footprint(self, num_tokens: int, *, checkpointing: bool, with_pairs: bool) -> Footprint:
        device = self._engine.base.device

        def peak(lengths: Lengths) -> int:
            return peak_bytes(device, lambda: self.run(lengths, checkpointing=checkpointing))

        measured = Footprint.measured(peak, num_tokens, with_pairs=with_pairs)
        layers = self._engine.memory.num_layers if checkpointing else 1
        return Footprint(
            measured.fixed_bytes,
            measured.bytes_per_token + self._more_rank * self._bytes_per_rank / layers,
            measured.bytes_per_pair,
        )
