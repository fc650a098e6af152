"""Examines the training engine: logprobs and gradients for the common tokens, a save and reload, speed and memory.

The engine is used through the same calls that the service makes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tinsmith.errors import ServiceError
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import Adapter, AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.self_check import random_adapter
from tinsmith.sizing import full_bytes
from tinsmith.v1 import types_pb2 as pb
from tinsmith_cli.doctor.coverage import Coverage
from tinsmith_cli.doctor.oracle import gradient_sequences
from tinsmith_cli.doctor.samplers import DrawnSequence
from tinsmith_cli.doctor.subject import ALL, BASE, Example, Logprobs, Subject, Unfit, free, loading
from trainer_service.engine.batch import Batch, Datum
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.measure import Bounds, measure
from trainer_service.engine.memory import host_bytes
from trainer_service.engine.optimizers import AdamParams
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import KINDS, Location

MAX_RANK = 256
"""The service's default for max_lora_rank."""
RANKS = (8, 32, MAX_RANK)
"""Ranks of the adapters whose sizes are shown."""
_MAX_TOKENS = 4096
"""Largest micro-batch with which memory is measured, in tokens."""
_SEQUENCE = 256
"""Length of the sequences with which the speed is measured, in tokens."""
_ALONE = "alone"
_HUGE = 1e6


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Measured speed of forward_backward."""

    tokens_per_s: float
    num_tokens: int
    """Tokens of the micro-batch that was timed."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of micro-batches, sequences and adapters for which the trainer's memory suffices."""

    token_budget: int
    """Most tokens of a micro-batch."""
    longest_sequence: int
    """Longest sequence that can be trained on, in tokens."""
    adapter_bytes: Mapping[int, int]
    """Size of one adapter on all layers in a sampler, by its rank."""
    training_bytes: Mapping[int, int]
    """Size of one adapter in the trainer, with its gradient and moments, by its rank."""
    models_bytes: int
    """Memory for all models in training together, including models that wait in host memory, in bytes."""
    device_bytes: int | None
    """Part of models_bytes on the device, beside one micro-batch. None on a CPU, which has one memory."""


@dataclass(slots=True)
class TrainerFindings:
    """The results of the training engine."""

    coverage: Coverage | None = None
    """The layers that adapters reach; None if the model could not be loaded."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """The compared adapters, in host memory, by name."""
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """Logprobs of every adapter, and of the base model, all in one batch."""
    alone: Logprobs | None = None
    """Logprobs of the adapter `largest` in a batch of its own."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradient of each adapter in the order of the adapter's buffer, by name."""
    drawn: list[tuple[DrawnSequence, Logprobs]] = field(default_factory=list)
    """Sequences that samplers drew, with the trainer's logprobs of them."""
    saved: Path | None = None
    """PEFT folder of the adapter `largest`."""
    is_same_after_load: bool | None = None
    """Whether all tensors of adapter and optimizer were bit-equal after a save and reload."""
    reloaded: Logprobs | None = None
    """Logprobs of the reloaded adapter."""
    failure: str = ""
    """The reason for which later findings are missing."""
    speed: TrainingSpeed | None = None
    capacity: Capacity | None = None

    @property
    def largest(self) -> str:
        """Name of the adapter on the most groups."""
        return ALL if ALL in self.adapters else next(iter(self.adapters), BASE)


def examine(
    subject: Subject, sequences: Sequence[Example], drawn: Sequence[DrawnSequence], scratch: Path
) -> TrainerFindings:
    """Examines the training engine. `drawn`: sequences from the samplers, to be scored. `scratch`: folder for the saved
    adapter. Raises Unloadable for wrong files of the model."""
    found = TrainerFindings()
    try:
        base = loading(subject.path, lambda: load_base(subject))
    except Unfit as error:
        found.failure = str(error)
        return found
    try:
        found.coverage = Coverage.of(base, subject)
        configs = subject.adapters(base.groups)
        found.adapters = {
            name: random_adapter(config, base.targets, torch.device("cpu")) for name, config in configs.items()
        }
        if found.adapters:
            _compare(found, base, sequences, drawn, scratch, quick=subject.quick)
    except ServiceError as error:
        found.failure = error.message
    finally:
        del base
        free(subject.device)
    return found


def load_base(subject: Subject) -> BaseModel:
    """Loads the subject's model as the trainer does. Raises the errors of BaseModel.load."""
    return BaseModel.load(subject.path, device=subject.device, dtype=subject.dtype, quantize=subject.quantize)


def _compare(
    found: TrainerFindings,
    base: BaseModel,
    sequences: Sequence[Example],
    drawn: Sequence[DrawnSequence],
    scratch: Path,
    *,
    quick: bool,
) -> None:
    names = [BASE, *found.adapters]
    together = len(names) * sum(sequence.tokens_N.size for sequence in sequences)
    engine = TrainingEngine(base, max_tokens_per_microbatch=together)  # one micro-batch holds all sequences
    _create(engine, BASE, AdapterConfig(rank=1, seed=0, **_flags(base)), None)
    for name, adapter in found.adapters.items():
        _create(engine, name, adapter.config, adapter)

    outputs = _run(engine, [(name, _batch(sequences, forward_only=True)) for name in names])
    found.logprobs = dict(zip(names, outputs, strict=True))
    (found.alone,) = _run(engine, [(found.largest, _batch(sequences, forward_only=True))])
    found.drawn = [(one, _run(engine, [(one.name, _scoring(one))])[0]) for one in drawn if one.name in found.logprobs]

    few = gradient_sequences(sequences)
    _save_and_reload(found, engine, sequences, few, scratch)
    _run(engine, [(name, _batch(few, forward_only=False)) for name in found.adapters])
    for name, adapter in found.adapters.items():
        found.gradients[name] = _gradient(engine, name, adapter)

    for name in names[:-1]:
        engine.delete_model(name)
    plan = measure(engine, Bounds(max_tokens_per_microbatch=_MAX_TOKENS, max_lora_rank=MAX_RANK))
    engine.follow(plan)
    found.speed = _speed(engine, names[-1], base.max_context_length, seconds=0.5 if quick else 3.0)
    engine.delete_model(names[-1])
    found.capacity = _capacity(engine, plan)


def _flags(base: BaseModel) -> dict[str, bool]:
    return {f"train_{group}": group in base.groups for group in ("attn", "mlp", "unembed")}


def _create(engine: TrainingEngine, name: str, config: AdapterConfig, adapter: Adapter | None) -> None:
    engine.create_model(name, config, "adamw")
    if adapter is not None:
        engine.restore(name, CapturedState(config, adapter, step=0, optimizer=None), with_optimizer=False)


def _batch(sequences: Sequence[Example], *, forward_only: bool) -> Batch:
    datums = [Datum(one.tokens_N.astype(np.int32), one.targets_N, {"weights": one.weights_N}) for one in sequences]
    return Batch("cross_entropy", LOSS_FNS["cross_entropy"], {}, forward_only, datums)


def _scoring(drawn: DrawnSequence) -> Batch:
    whole = np.concatenate([drawn.prompt_P, drawn.tokens_N])
    tokens, targets = whole[:-1].astype(np.int32), whole[1:].astype(np.int64)
    datum = Datum(tokens, targets, {"weights": np.ones(targets.size, np.float32)})
    return Batch("cross_entropy", LOSS_FNS["cross_entropy"], {}, True, [datum])


def _run(engine: TrainingEngine, works: Sequence[tuple[str, Batch]]) -> list[Logprobs]:
    """Logprobs of each batch. Raises the ServiceError of a batch that fails."""
    outputs: list[Logprobs] = []
    for output in engine.forward_backward(works):
        if isinstance(output, ServiceError):
            raise output
        outputs.append(output.logprobs)
    return outputs


def _gradient(engine: TrainingEngine, name: str, adapter: Adapter) -> Tensor:
    """The gradient that reaches an optimizer step. AdamW with betas of 0 subtracts lr g / (|g| + eps), from which g
    follows; with lr and eps equal and huge it is nearly g."""
    engine.optim_step(name, AdamParams(_HUGE, beta1=0.0, beta2=0.0, eps=_HUGE, weight_decay=0.0, grad_clip_norm=0.0))
    after = engine.capture(name, with_optimizer=False).adapter
    step = adapter.flat - after.flat.float()
    return step / (1.0 - step.abs() / _HUGE)


def _save_and_reload(
    found: TrainerFindings, engine: TrainingEngine, sequences: Sequence[Example], few: Sequence[Example], scratch: Path
) -> None:
    _run(engine, [(found.largest, _batch(few, forward_only=False))])
    # A step of size 0: the optimizer has moments to save, and the weights stay as they are.
    engine.optim_step(found.largest, AdamParams(0.0, 0.9, 0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0))
    store = CheckpointStore(scratch, Metrics(CollectorRegistry()))
    try:
        state = engine.capture(found.largest, with_optimizer=True)
        location = Location("doctor:train:0", KINDS[pb.CHECKPOINT_KIND_TRAINING], "checked")
        info = pb.CheckpointInfo(
            location=str(location), kind=pb.CHECKPOINT_KIND_TRAINING, model_id=location.run_id,
            lora_config=config_to_proto(state.config), has_optimizer=True, optimizer=pb.OPTIMIZER_ADAMW,
        )  # fmt: skip
        store.save(info, state, overwrite=False)
        _, loaded = store.load(location, engine.base, with_optimizer=True)
    finally:
        store.close()
    found.saved = scratch / str(location)
    assert state.optimizer is not None
    assert loaded.optimizer is not None
    pairs = [(state.adapter.flat, loaded.adapter.flat)]
    pairs += [(tensor, loaded.optimizer.tensors[key]) for key, tensor in state.optimizer.tensors.items()]
    found.is_same_after_load = all(torch.equal(before, after) for before, after in pairs)
    engine.create_model(_ALONE, loaded.config, "adamw")
    engine.restore(_ALONE, loaded, with_optimizer=True)
    (found.reloaded,) = _run(engine, [(_ALONE, _batch(sequences, forward_only=True))])
    engine.delete_model(_ALONE)


def _speed(engine: TrainingEngine, name: str, context: int, *, seconds: float) -> TrainingSpeed:
    """Speed of forward_backward. The micro-batch is doubled until it takes about `seconds` or reaches the token
    budget."""
    generator = np.random.default_rng(0)
    length = min(_SEQUENCE, context)
    budget = engine.passes.token_budget
    num_tokens = min(length, budget)
    while True:
        batch = _random_batch(generator, engine.base.vocab_size, num_tokens, length)
        started = time.perf_counter()
        _run(engine, [(name, batch)])
        if engine.base.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        if 2 * num_tokens > budget or 3 * elapsed > seconds:
            return TrainingSpeed(num_tokens / elapsed, num_tokens)
        num_tokens *= 2


def _random_batch(generator: np.random.Generator, vocab_size: int, num_tokens: int, length: int) -> Batch:
    whole, rest = divmod(num_tokens, length)
    datums = []
    for size in [length] * whole + ([rest] if rest else []):
        tokens = generator.integers(vocab_size, size=size + 1)
        datums.append(Datum(tokens[:-1].astype(np.int32), tokens[1:], {"weights": np.ones(size, np.float32)}))
    return Batch("cross_entropy", LOSS_FNS["cross_entropy"], {}, False, datums)


def _capacity(engine: TrainingEngine, plan: Plan) -> Capacity:
    base = engine.base
    config = AdapterConfig(rank=1, **_flags(base))
    bytes_per_rank = 4 * num_elements(config, chosen_targets(config, base.targets))  # float32
    return Capacity(
        token_budget=plan.token_budget,
        longest_sequence=engine.limits.max_context_length,
        adapter_bytes={rank: rank * bytes_per_rank for rank in RANKS},
        training_bytes={rank: full_bytes(rank * bytes_per_rank) for rank in RANKS},
        models_bytes=host_bytes() if plan.models_bytes is None else plan.models_bytes,
        device_bytes=None if base.device.type == "cpu" else engine.memory.bytes_beside(plan.token_budget),
    )
