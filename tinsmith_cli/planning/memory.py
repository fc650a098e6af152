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
    max_activation_bytes,
    models_bytes,
)
from tinsmith_cli.planning.shape import Layer, Shape

BYTES_PER_PARAMETER = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
"""Bytes of a base weight, by type."""
ADAPTER_BYTES = 4
"""Bytes of a number of an adapter, a gradient or a moment, and of a weight on the weight channel: all are float32."""
_LOGIT_BYTES = 10
"""Bytes for each element of a chunk of logits, in the backward pass of the output layer."""
_GATHERED_LAYERS = 2
"""Number of whole layers that a rank holds while the base model is sharded: the layer that computes, and the next."""
_RECOMPUTED = 1.5
"""Activation checkpointing computes one layer again at a time. This layer takes this many times the bytes that it keeps
without checkpointing."""


@dataclass(frozen=True, slots=True)
class BytesPerFeature:
    """Bytes that a layer keeps until its backward pass, for each token and feature, by the kind of feature (see
    Widths). Fitted to measurements of plain kernels on a CPU; compiled kernels and Liger's keep less."""

    hidden: float
    inner: float
    queries: float
    keys: float


KEPT = {4: BytesPerFeature(20, 16, 12.5, 15), 2: BytesPerFeature(16, 8.5, 9, 9)}
"""Kept bytes, by the size of a number in bytes."""


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
    """Bytes of host memory that a rank takes while it reads its part of a base model that is divided among ranks. The
    rank's part of the largest weight counts twice."""
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
    """Bytes of an adapter on all layers of text, which are also the bytes of a publish. `vision`: also on those of the
    tower."""
    return ADAPTER_BYTES * shape.adapter_elements(rank, vision=vision)


@lru_cache(maxsize=1024)
def slots_bytes(shape: Shape, dtype: str, *, rank: int, count: int, tensor_parallel: int = 1) -> int:
    """Bytes of vLLM's slots for adapters on each GPU. `rank`: rank of the slots (`tinsmith.sizing.slot_rank`). `count`:
    number of slots."""
    return int(BYTES_PER_PARAMETER[dtype] * shape.slot_elements(rank) * count / tensor_parallel)


def kv_bytes_per_token(shape: Shape, dtype: str, *, tensor_parallel: int = 1) -> int:
    """Bytes of a token's keys and values on each GPU of a sampler."""
    return int(BYTES_PER_PARAMETER[dtype]) * shape.kv_elements_of_each(tensor_parallel)


@lru_cache(maxsize=1024)
def activations(
    shape: Shape, dtype: str, *, rank: int, checkpointing: bool, tensor_parallel: int = 1, device_type: str = "cuda"
) -> Footprint:
    """Foreseen result of the trainer's measurement of activations, with an adapter of this rank. Its fixed part is the
    gradient of the measuring adapter and a chunk of logits."""
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
class TrainingCapacity:
    """Adapters and sequence lengths for which the trainer's memory suffices, by its own rules."""

    memory_bytes: int
    """Memory for adapters, optimizers and activations of one rank."""
    adapters_on_device: int
    """Number of adapters on the device at once."""
    adapters: int
    """Number of adapters in memory at once, including idle ones in host memory. Further adapters are parked on the
    disk."""
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
    ) -> TrainingCapacity:
        """The training for which `memory_bytes` suffice. `host_bytes`: free host memory. `ranks`: number of ranks on
        this machine, which divide the host memory."""
        moves = device_type == "cuda"
        one = adapter_bytes(shape, rank)
        # The adapter includes the tower here, as in the trainer, which does not know yet whether runs will adapt it.
        most_bytes = max_activation_bytes(memory_bytes, adapter_bytes(shape, rank, vision=True), moves=moves)
        longest = max(
            activations(
                shape,
                dtype,
                rank=rank,
                checkpointing=checkpointing,
                tensor_parallel=tensor_parallel,
                device_type=device_type,
            ).longest(most_bytes)
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
