"""Rules by which the services divide memory, without torch. Trainer and sampler apply them to the memory that they
measure at their start; `tinsmith plan` applies them to what it knows before a service starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

TRAINING_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of the free memory that training may take. Host memory is shared with samplers, gateway and the page cache."""
ACTIVATIONS_SHARE = 0.5
"""Share of the training memory that activations may take; the rest is for adapters and optimizers."""
PINNED_GROWTH = 2
"""torch rounds a pinned allocation up to a power of two: it takes up to twice the bytes that were asked for."""
MOMENTS = 2
"""Buffers of an adapter's size in AdamW, the optimizer that has the most."""
PROBE_RANK = 16
"""Largest rank of the adapter with which the trainer measures activations."""
MAX_CHUNK_ELEMENTS = {"cpu": 4 * 1024 * 1024, "cuda": 128 * 1024 * 1024}
"""Largest chunk of logits, in elements. 16 MB stay close to the caches of a CPU. A GPU needs large products."""
KV_SHARE, PREFIX_SHARE, STATES_SHARE = 4, 8, 8
"""Divisors of the sampler's free memory: keys and values get a quarter of it, the prefix cache and the recurrent states
an eighth each."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the rank of its slots. An adapter of a lower rank is padded with zeros."""
MAX_LORA_RANK = 256
"""Default of max_lora_rank."""
VLLM_MAX_LORA_RANK = 64
"""Default of max_lora_rank of a sampler with vLLM that does not know its trainer's. Each slot on the device takes the
memory of an adapter of the largest rank, also when its adapter is smaller or there is none. For a model of 8 billion
parameters, four slots take 1.4 GB with this rank and 5.6 GB with 256."""
_NOISE = 0.005
"""A difference between two layouts below this share of their memory is taken for the allocator's rounding."""

Lengths = Sequence[int]
"""Lengths of the sequences of one micro-batch, in tokens."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of activations of T tokens: fixed + per_token * T + per_pair * (sum of the squared sequence lengths).

    The last term is zero where attention keeps no scores, as most models' attention does not.
    """

    fixed_bytes: float
    bytes_per_token: float
    bytes_per_pair: float

    def of(self, lengths: Iterable[int]) -> int:
        lengths = list(lengths)
        pairs = sum(length * length for length in lengths)
        return math.ceil(self.fixed_bytes + self.bytes_per_token * sum(lengths) + self.bytes_per_pair * pairs)

    def longest(self, num_bytes: float) -> int:
        """Length of the longest sequence whose activations take at most `num_bytes`, in tokens; 0 when none does."""
        left_bytes = num_bytes - self.fixed_bytes
        if left_bytes <= 0:
            return 0
        # The positive root of a L^2 + b L = left_bytes, in the form that is valid for a = 0, too.
        root = math.sqrt(self.bytes_per_token**2 + 4 * self.bytes_per_pair * left_bytes)
        return int(2 * left_bytes / (self.bytes_per_token + root))

    @classmethod
    def measured(cls, peak_bytes: Callable[[Lengths], int], num_tokens: int, *, with_pairs: bool = True) -> Footprint:
        """Fits the footprint to measured micro-batches: one sequence of n tokens, one of 2n, and four of n/2.

        The last two have equally many tokens, so they differ only in the sum of squares: 4 n^2 - 4 (n/2)^2 = 3 n^2.
        Without `with_pairs` the third is not measured, and bytes_per_pair is 0.
        """
        n = num_tokens
        once, twice = float(peak_bytes([n])), float(peak_bytes([2 * n]))
        squares = twice - peak_bytes([n // 2] * 4) if with_pairs else 0.0
        if squares < _NOISE * twice:
            squares = 0.0
        per_pair = squares / (3 * n * n)
        per_token = (twice - once - per_pair * 3 * n * n) / n
        return cls(once - per_token * n - per_pair * n * n, per_token, per_pair)


def full_bytes(adapter_bytes: int) -> int:
    """Memory of an adapter in training, in bytes: the adapter, its gradient and its moments."""
    return (2 + MOMENTS) * adapter_bytes


def training_bytes(free_bytes: int, device_type: str) -> int:
    """Memory for adapters, optimizers and activations, in bytes. `free_bytes`: free memory once the base model is
    loaded."""
    return int(TRAINING_SHARE[device_type] * free_bytes)


def max_activation_bytes(memory_bytes: int, adapter_bytes: int, *, moves: bool) -> float:
    """Bytes for the activations of a micro-batch of one datum, of a model with the largest adapter.

    `memory_bytes`: memory for training. `moves`: whether other models can be moved to the host, as on a GPU. If so, the
    activations may take all memory except that of the model itself.
    """
    left_bytes = memory_bytes * ACTIVATIONS_SHARE
    if moves:
        left_bytes = max(left_bytes, memory_bytes - full_bytes(adapter_bytes))
    return left_bytes - adapter_bytes  # the pass's gradient, before it is added to the model's


def models_bytes(memory_bytes: int, host_bytes: int, *, moves: bool, ranks_per_machine: int = 1) -> int:
    """Bytes that all live models of a trainer may take. `moves`: whether idle models can be moved to the host; if so,
    host memory is the limit. `host_bytes`: free host memory."""
    beside_activations = memory_bytes - int(memory_bytes * ACTIVATIONS_SHARE)
    if not moves:
        return beside_activations
    on_host = int(TRAINING_SHARE["cpu"] * host_bytes) // PINNED_GROWTH // ranks_per_machine
    return max(beside_activations, on_host)


def kv_tokens(free_bytes: int, bytes_per_token: int, *, max_running: int, max_context: int) -> int:
    """Default size of the key/value cache, in tokens. `free_bytes`: free memory once the base model is loaded."""
    return max(1, min(free_bytes // KV_SHARE // bytes_per_token, max_running * max_context))


def prefix_cache_bytes(free_bytes: int) -> int:
    """Default size of the prefix cache, in bytes. `free_bytes`: free memory once the base model is loaded."""
    return free_bytes // PREFIX_SHARE


def slot_rank(max_lora_rank: int) -> int:
    """The least of VLLM_RANKS that adapters of rank `max_lora_rank` fit in. Raises ValueError if there is none."""
    for rank in VLLM_RANKS:
        if rank >= max_lora_rank:
            return rank
    raise ValueError(f"max_lora_rank: {max_lora_rank} is above {VLLM_RANKS[-1]}, the largest rank that vLLM serves")
