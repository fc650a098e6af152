"""Measures, once and before anything is served, what the engine may put through the base model at once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from tinsmith.memory import host_bytes
from tinsmith.modeling.adapter import Adapter, AdapterConfig, chosen_targets, num_elements
from trainer_service.engine.budget import Footprint, Lengths, Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.memory import available_bytes, drop_caches, is_out_of_memory, peak_bytes
from trainer_service.engine.model_state import ModelState, full_bytes

logger = logging.getLogger(__name__)

_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Of the memory that is free. A CPU's is shared with the samplers, the gateway and the cache of files."""
_ACTIVATIONS_SHARE = 0.5
"""Of the memory for training; the other half is for adapters."""
_PINNED_GROWTH = 2
"""torch takes pinned memory in powers of two: at most twice what was asked for."""
_PROBE = ""
"""Id of the model that is probed; no client can choose it."""
_PROBE_RANK = 16
"""Small, so that the adapter's own gradient, whose size does not depend on the tokens, hides nothing."""
_MEMORY_TOKENS = {"cpu": 32, "cuda": 512}
"""Counting on the CPU is exact to the byte; the allocator of CUDA rounds, so more is needed to see through it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the settings say. 0 is: measure it."""

    max_tokens_per_microbatch: int
    max_lora_rank: int
    token_budget: int = 0
    memory_bytes: int = 0
    adapter_device_bytes: int = 0
    ranks_per_machine: int = 1
    """Processes that share the machine's memory, each with its models."""


def measure(engine: TrainingEngine, bounds: Bounds) -> Plan:
    """A plan for this engine on this machine, to be given to `engine.follow`."""
    if engine.base.trainable or not engine.base.targets:
        # A full model's gradients, as large as the model, would hide what its activations take; and where nothing can
        # be trained, there is nothing to measure.
        return Plan(token_budget=bounds.token_budget or bounds.max_tokens_per_microbatch)
    started_s = time.perf_counter()
    device = engine.base.device
    memory_bytes = bounds.memory_bytes or int(_SHARE[device.type] * available_bytes(device)) // _sharing(device, bounds)
    probe = _Probe(engine, bounds.max_lora_rank)
    try:
        activation_bytes = int(memory_bytes * _ACTIVATIONS_SHARE)
        room = _room_for_one(engine, memory_bytes, probe.max_adapter_bytes)
        plain, checkpointed = probe.footprints(room)
        usual = checkpointed if plain is None else plain
        assert usual is not None
        fitting = max(1, usual.longest(activation_bytes - probe.max_adapter_bytes))
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
        models_bytes=_models_bytes(engine, memory_bytes - activation_bytes, bounds),
        adapter_device_bytes=bounds.adapter_device_bytes or None,
        plain=plain,
        checkpointed=checkpointed,
        longest_datum=longest_datum,
    )
    logger.info(
        "token budget at most %d (memory allows %d); %.1f GB for training; activations of a token: %s MB, %s MB with "
        "checkpointing; the longest datum that fits has %d tokens; measured in %.2f s",
        token_budget,
        fitting,
        memory_bytes / 1e9,
        _megabytes(plain),
        _megabytes(checkpointed),
        plan.longest_datum,
        time.perf_counter() - started_s,
    )
    return plan


def _megabytes(footprint: Footprint | None) -> str:
    return "unknown" if footprint is None else f"{footprint.bytes_per_token / 1e6:.3f}"


def _room_for_one(engine: TrainingEngine, memory_bytes: int, max_adapter_bytes: int) -> float:
    """For the activations of one datum that goes alone, of a model of the largest rank.

    Where models can be moved away, it may have all the memory but its own model's; on the CPU the others stay.
    """
    room = memory_bytes * _ACTIVATIONS_SHARE
    if engine.residency.moves:
        room = max(room, memory_bytes - full_bytes(max_adapter_bytes))
    return room - max_adapter_bytes  # the gradient on its way


def _sharing(device: torch.device, bounds: Bounds) -> int:
    return bounds.ranks_per_machine if device.type == "cpu" else 1


def _models_bytes(engine: TrainingEngine, beside_activations: int, bounds: Bounds) -> int:
    """Where models can be moved away, host memory is the limit."""
    if not engine.residency.moves:
        return beside_activations
    return max(beside_activations, int(_SHARE["cpu"] * host_bytes()) // _PINNED_GROWTH // bounds.ranks_per_machine)


class _Probe:
    """A model on every layer, that goes through the engine's own forward and backward."""

    def __init__(self, engine: TrainingEngine, max_rank: int) -> None:
        self._engine = engine
        self._max_rank = max_rank
        base = engine.base
        rank = min(_PROBE_RANK, max_rank)
        groups = {target.group for target in base.targets}
        config = AdapterConfig(
            rank=rank, train_attn="attn" in groups, train_mlp="mlp" in groups, train_unembed="unembed" in groups
        )
        targets = chosen_targets(config, base.targets)
        flat = torch.zeros(num_elements(config, targets), device=base.device)
        model = ModelState(Adapter(config, base.targets, flat), "adamw")
        model.need_gradient()  # it stays from the first run on, and is none of what a run takes
        engine.add_model(_PROBE, model)
        self.max_adapter_bytes = flat.nbytes * max_rank // rank
        # Each layer keeps x A^T, of the rank's width, and backward makes its gradient.
        self._bytes_per_rank = 2 * len(targets) * base.head.weight_V_H.element_size()
        self._max_length = base.max_context_length

    def close(self) -> None:
        self._engine.delete_model(_PROBE)
        drop_caches(self._engine.base.device)

    def run(self, lengths: Lengths, *, checkpointing: bool = False) -> None:
        self._engine.probe(_PROBE, lengths, checkpointing=checkpointing)

    def footprints(self, room_bytes: float) -> tuple[Footprint | None, Footprint | None]:
        """Without and with activation checkpointing; None for what the settings or the model exclude.

        The second one is not measured either when the model's whole context fits without.
        """
        num_tokens = min(_MEMORY_TOKENS[self._engine.base.device.type], max(2, self._max_length // 2))
        while True:
            try:
                return self._footprints(num_tokens, room_bytes)
            except Exception as error:
                if not is_out_of_memory(error) or num_tokens <= 8:
                    raise
            drop_caches(self._engine.base.device)
            num_tokens //= 2

    def _footprints(self, num_tokens: int, room_bytes: float) -> tuple[Footprint | None, Footprint | None]:
        if self._engine.base.device.type == "cuda":  # its libraries keep what they take for their first products
            self.run([num_tokens], checkpointing=self._engine.always_checkpoints)
        plain = checkpointed = None
        if not self._engine.always_checkpoints:
            plain = self._footprint(num_tokens, checkpointing=False, with_pairs=True)
        if self._engine.can_checkpoint and (plain is None or plain.longest(room_bytes) < self._max_length):
            with_pairs = plain is None or plain.bytes_per_pair > 0
            checkpointed = self._footprint(num_tokens, checkpointing=True, with_pairs=with_pairs)
        return plain, checkpointed

    def _footprint(self, num_tokens: int, *, checkpointing: bool, with_pairs: bool) -> Footprint:
        device = self._engine.base.device

        def peak(lengths: Lengths) -> int:
            return peak_bytes(device, lambda: self.run(lengths, checkpointing=checkpointing))

        measured = Footprint.measured(peak, num_tokens, with_pairs=with_pairs)
        more_rank = self._max_rank - min(_PROBE_RANK, self._max_rank)
        layers = self._engine.num_layers if checkpointing else 1
        return Footprint(
            measured.fixed_bytes,
            measured.bytes_per_token + more_rank * self._bytes_per_rank / layers,
            measured.bytes_per_pair,
        )
