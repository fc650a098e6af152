"""Sizes of caches and steps, from the settings and, where these leave it open, from the free memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sampler_service.config import SamplerConfig
from sampler_service.core.sequence import PASSING
from tinsmith.memory import host_bytes
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kernels.prepacked import COMPILED_BYTES
from tinsmith.modeling.kv_cache import MAX_KEPT_BYTES, Cached, KVCache, Prefill
from tinsmith.sizing import STATES_SHARE, kv_tokens, prefix_cache_bytes

_PRODUCT_SHAPES = 5
"""Matrix products of different shapes in a model of the Llama family: queries with keys and values, out, gate with up,
down, head."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes for one device."""

    bytes_per_token: int
    """Bytes of a token's keys and values."""
    bytes_per_lane: int
    """Bytes of the states that recurrent layers keep for a running sequence; 0 without such layers."""
    max_running: int
    """Most sequences that generate at once."""
    max_kv_tokens: int
    prefix_cache_bytes: int
    tokens_per_step: int

    @classmethod
    def of(
        cls, base: BaseModel, config: SamplerConfig, *, for_pictures: int = 0, bytes_per_lane: int | None = None
    ) -> Sizes:
        """Measures sizes once the model is loaded. `for_pictures`: bytes that the vision tower needs beside the model.
        `bytes_per_lane`: None means the size in which the torch engine keeps states."""
        free_bytes = _to_divide(free_bytes_of(base.device), base, for_pictures)
        cache = measured_cache(base)
        return cls.within(
            free_bytes,
            base,
            config,
            bytes_per_token=kv_bytes_per_token(cache),
            bytes_per_lane=cache.states.num_bytes() if bytes_per_lane is None else bytes_per_lane,
            device_type=base.device.type,
        )

    @classmethod
    def within(
        cls,
        free_bytes: int,
        base: BaseModel,
        config: SamplerConfig,
        *,
        bytes_per_token: int,
        bytes_per_lane: int = 0,
        device_type: str,
    ) -> Sizes:
        """Sizes for a device with `free_bytes` to divide. States get at most an eighth of them."""
        fitting = kv_tokens(
            free_bytes, bytes_per_token, max_running=config.max_running, max_context=base.max_context_length
        )
        lanes = free_bytes // STATES_SHARE // bytes_per_lane if bytes_per_lane else config.max_running + PASSING
        prefix_bytes = config.prefix_cache_bytes
        if base.one_by_one:
            prefix_bytes = 0  # a cache of transformers cannot be joined from blocks
        return cls(
            bytes_per_token=bytes_per_token,
            bytes_per_lane=bytes_per_lane,
            max_running=max(1, min(config.max_running, lanes - PASSING)),
            max_kv_tokens=config.max_kv_tokens or fitting,
            prefix_cache_bytes=prefix_cache_bytes(free_bytes) if prefix_bytes is None else prefix_bytes,
            tokens_per_step=tokens_per_step(config, device_type),
        )


@torch.inference_mode()
def measured_cache(base: BaseModel) -> KVCache:
    """A cache with one lane of one token. Models differ in what their layers store."""
    cache = KVCache()
    cache.reserve(1, 1)
    zero = torch.zeros(1, dtype=torch.int64, device=base.device)
    base.hidden_states(zero, zero, Cached(cache, zero[:0], [Prefill(0, 0, 1)]), [])
    return cache


def kv_bytes_per_token(cache: KVCache) -> int:
    """Bytes of keys and values in a cache of one token; at least 1, for models without attention."""
    return max(1, cache.num_bytes() - cache.states.num_bytes())


def tokens_per_step(config: SamplerConfig, device_type: str) -> int:
    """Most prompt tokens that one step computes."""
    return config.prefill_tokens_per_step or (8192 if device_type == "cuda" else 512)


def resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[dtype] if dtype != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32


def _to_divide(free_bytes: int, base: BaseModel, more: int) -> int:
    """Bytes that remain after everything without a setting has grown to its bound, and after `more`; at least half of
    `free_bytes`."""
    compiled = _PRODUCT_SHAPES * COMPILED_BYTES if base.head.prepacked is not None else 0
    return max(free_bytes // 2, free_bytes - MAX_KEPT_BYTES - compiled - more)


def free_bytes_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_bytes()
