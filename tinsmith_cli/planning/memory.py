"""Bytes that trainer and sampler take for a model, before they measure it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from tinsmith.quantization import Quantization, bytes_per_parameter
from tinsmith.sizing import (
    ACTIVATIONS_SHARE,
    MAX_CHUNK_ELEMENTS,
    PROBE_RANK,
    Footprint,
    full_bytes,
    models_bytes,
    room_for_one,
)
from tinsmith_cli.planning.shape import Layer, Shape

BYTES_PER_PARAMETER = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
"""Types of the base weights."""
ADAPTER_BYTES = 4
"""Adapters, gradients and moments are float32, and so are weights on the weight channel."""
_LOGIT_BYTES = 10
"""Bytes for each element of a chunk of logits, in the backward pass of the output layer."""
_GATHERED_LAYERS = 2
"""Whole layers that a rank holds while the base model is sharded: the one that computes, and the next."""
_RECOMPUTED = 1.5
"""Bytes of the layer that is computed again with activation checkpointing, in parts of what it keeps without."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a layer keeps for each token until its backward pass, for each feature. Fitted to measurements of
    plain kernels on a CPU; compiled kernels and Liger's keep less."""

    hidden: float
    inner: float
    queries: float
    keys: float


KEPT = {4: Kept(20, 16, 12.5, 15), 2: Kept(16, 8.5, 9, 9)}
"""By the bytes of a number."""


@lru_cache(maxsize=1024)
def base_bytes(shape: Shape, dtype: str, *, quantised: str = "", shards: int = 1, tensor_parallel: int = 1) -> int:
    """Bytes of the base weights on one rank or GPU. `shards`: ranks that divide the memory of each layer.
    `tensor_parallel`: ranks that divide the layers' features."""
    whole = BYTES_PER_PARAMETER[dtype]
    layers = _layers_bytes(shape, dtype, quantised) / tensor_parallel
    if shards > 1:
        largest = layers * max(layer.parameters for layer in shape.layers) / shape.layer_parameters
        layers = layers / shards + _GATHERED_LAYERS * largest
    return int(layers + whole * shape.outside_parameters)


@lru_cache(maxsize=1024)
def read_bytes(shape: Shape, dtype: str, *, shards: int, tensor_parallel: int) -> int:
    """Bytes of host memory in which one of several ranks that divide the base model reads its part of the weights. Its
    part of the largest weight counts twice."""
    whole, parts = BYTES_PER_PARAMETER[dtype], shards * tensor_parallel
    largest = max(matrix.parameters for layer in shape.layers for matrix in layer.matrices)
    return int(whole * ((shape.layer_parameters + largest) / parts + shape.outside_parameters))


def _layers_bytes(shape: Shape, dtype: str, quantised: str) -> float:
    whole = BYTES_PER_PARAMETER[dtype]
    if not quantised:
        return whole * shape.layer_parameters
    rest = shape.layer_parameters - shape.matrix_parameters
    coded = bytes_per_parameter(cast(Quantization, quantised), dtype)
    return coded * shape.matrix_parameters + whole * rest


@lru_cache(maxsize=1024)
def sampler_base_bytes(shape: Shape, dtype: str, *, quantised: str = "", tensor_parallel: int = 1) -> int:
    """Bytes of the base weights on each GPU of a sampler. vLLM divides the embedding and the output layer, too."""
    whole = BYTES_PER_PARAMETER[dtype] * shape.outside_parameters
    return int((_layers_bytes(shape, dtype, quantised) + whole) / tensor_parallel)


@lru_cache(maxsize=1024)
def adapter_bytes(shape: Shape, rank: int, *, vision: bool = False) -> int:
    """Bytes of an adapter of all layers, which are those of a publish; with `vision`, of those of the tower, too."""
    return ADAPTER_BYTES * shape.adapter_elements(rank, vision=vision)


@lru_cache(maxsize=1024)
def slots_bytes(shape: Shape, dtype: str, *, rank: int, count: int, tensor_parallel: int = 1) -> int:
    """Bytes of vLLM's slots for adapters on each GPU. `rank`: the slots' (`tinsmith.sizing.slot_rank`)."""
    return int(BYTES_PER_PARAMETER[dtype] * shape.slot_elements(rank) * count / tensor_parallel)


def kv_bytes_per_token(shape: Shape, dtype: str, *, tensor_parallel: int = 1) -> int:
    """Bytes of a token's keys and values on each GPU of a sampler."""
    return int(BYTES_PER_PARAMETER[dtype]) * shape.kv_elements_of_each(tensor_parallel)


@lru_cache(maxsize=1024)
def activations(
    shape: Shape, dtype: str, *, rank: int, checkpointing: bool, tensor_parallel: int = 1, device_type: str = "cuda"
) -> Footprint:
    """Activations of a micro-batch with an adapter of this rank, as the trainer's probe would find them. The gradient
    of the probe's adapter and a chunk of logits are its fixed part."""
    itemsize = int(BYTES_PER_PARAMETER[dtype])
    kept = [_layer_bytes(shape, layer, itemsize, tensor_parallel) for layer in shape.layers]
    low_rank = 2 * itemsize * rank * len(shape.targets)
    if checkpointing:
        inputs = itemsize * shape.hidden * len(shape.layers)
        per_token = inputs + _RECOMPUTED * max(kept) + low_rank / len(shape.layers)
    else:
        per_token = sum(kept) + low_rank
    fixed = adapter_bytes(shape, min(rank, PROBE_RANK)) + _LOGIT_BYTES * MAX_CHUNK_ELEMENTS[device_type]
    return Footprint(fixed, per_token, 0.0)


def _layer_bytes(shape: Shape, layer: Layer, itemsize: int, tensor_parallel: int) -> float:
    kept, widths = KEPT[itemsize], layer.widths
    divided = kept.inner * widths.inner + kept.queries * widths.queries + kept.keys * widths.keys
    # Each pair of a token and an expert keeps its input and its output.
    return kept.hidden * shape.hidden + 2 * itemsize * shape.hidden * widths.num_pairs + divided / tensor_parallel


@dataclass(frozen=True, slots=True)
class Training:
    """Adapters and sequence lengths for which the trainer's memory suffices, by its own rules."""

    memory_bytes: int
    """Memory for adapters, optimizers and activations of one rank."""
    adapters_on_device: int
    adapters: int
    """Adapters in memory at once, idle ones in host memory. Further ones are parked on the disk."""
    longest: int
    """Longest sequence, in tokens."""

    @classmethod
    def within(
        cls,
        memory_bytes: int,
        shape: Shape,
        dtype: str,
        *,
        rank: int,
        host_bytes: int,
        ranks: int = 1,
        max_models: int,
        tensor_parallel: int = 1,
        device_type: str = "cuda",
    ) -> Training:
        """`host_bytes`: free host memory. `ranks`: the trainer's, all on this machine."""
        moves = device_type == "cuda"
        one = adapter_bytes(shape, rank)
        # As the trainer does, which does not know yet whether runs will adapt the tower.
        room = room_for_one(memory_bytes, adapter_bytes(shape, rank, vision=True), moves=moves)
        longest = max(
            activations(
                shape,
                dtype,
                rank=rank,
                checkpointing=checkpointing,
                tensor_parallel=tensor_parallel,
                device_type=device_type,
            ).longest(room)
            for checkpointing in (False, True)
        )
        beside = memory_bytes - int(memory_bytes * ACTIVATIONS_SHARE)
        in_all = models_bytes(memory_bytes, host_bytes, moves=moves, ranks_per_machine=ranks)
        return cls(
            memory_bytes=memory_bytes,
            adapters_on_device=min(max_models, max(0, beside) // full_bytes(one)),
            adapters=min(max_models, max(0, in_all) // full_bytes(one)),
            longest=min(shape.context, max(0, longest)),
        )


def full_training_bytes(shape: Shape) -> int:
    """Bytes of gradients, moments and float32 weights when all parameters are trained, beside the base model."""
    return full_bytes(ADAPTER_BYTES * shape.parameters)
