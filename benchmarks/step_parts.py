"""Measures the parts of a decode step of 64 sequences, each alone and in turns: "step" of engine_baseline.py.

The sequences are 8 samples each of 8 prompts, half way through 64+64 tokens; the adapter has rank 32 on every layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from sampler_service.core.sampling import Rule, Rules, draw, scaled_logprobs, stream_keys, uniforms
from sampler_service.core.sizing import measured_cache
from tinsmith.modeling.attention import Heads
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kv_cache import Cached, KVCache, SharedPrompts
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.lora import LoraLinear

PROMPTS, SAMPLES, SHARED, OWN, RANK, ROUNDS = 8, 8, 64, 32, 32, 15
ROWS = PROMPTS * SAMPLES


@torch.inference_mode()
def step_parts(base: BaseModel) -> dict[str, float]:
    """CPU seconds of each part, all layers together: medians of rounds that alternate."""
    parts = {
        "frozen products of the layers": _products(base),
        "output layer and draw": _output(base),
        "attention": _attention(base),
        "an adapter's products": _adapter(base),
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        for name, part in parts.items():
            begin = time.process_time()
            part()
            taken[name].append(time.process_time() - begin)
    return {name: median(times[2:]) for name, times in taken.items()}


def _adapted(base: BaseModel) -> list[LoraLinear]:
    return [layer for layer in base.decoder.modules() if isinstance(layer, LoraLinear)]


def _products(base: BaseModel) -> Callable[[], None]:
    """Matrix products of the adapted layers as in a step: with the prepacked copy, if there is one."""
    first = [layer for layer in _adapted(base) if layer.joined[0] is layer]
    inputs = [torch.randn(ROWS, layer.weight.shape[1], dtype=base.dtype) for layer in first]

    def run() -> None:
        for layer, x_B_I in zip(first, inputs, strict=True):
            if layer.prepacked is not None:
                layer.prepacked.together(x_B_I)
            else:
                for one in layer.joined:
                    torch.nn.functional.linear(x_B_I, one.weight, one.bias)

    return run


def _adapter(base: BaseModel) -> Callable[[], None]:
    shares = []
    for layer in _adapted(base):
        num_out, num_in = layer.weight.shape
        shapes = (ROWS, num_in), (num_in, RANK), (RANK, num_out), (ROWS, num_out)
        shares.append([torch.randn(shape, dtype=base.dtype) for shape in shapes])

    def run() -> None:
        for x_B_I, a_I_R, b_R_O, y_B_O in shares:
            y_B_O.addmm_(x_B_I @ a_I_R, b_R_O)

    return run


def _attention(base: BaseModel) -> Callable[[], None]:
    config = base.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, k, v = (
        torch.randn(ROWS, heads, head_dim, dtype=base.dtype)
        for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    layers = list(measured_cache(base).keys)  # those with attention
    cache = KVCache()
    cache.reserve(ROWS, 2 * SHARED)
    groups = [range(first, first + SAMPLES) for first in range(0, ROWS, SAMPLES)]
    shared = SharedPrompts.of(groups, SHARED, torch.device("cpu"))
    positions_B = torch.full((ROWS,), SHARED + OWN - 1)

    def run() -> None:
        layout = Cached(cache, positions_B, [], shared=shared)
        for layer in layers:
            layout.attend(layer, q, k, v, Heads(head_dim**-0.5))

    return run


def _output(base: BaseModel) -> Callable[[], None]:
    hidden_B_H = torch.randn(ROWS, base.head.weight_V_H.shape[1], dtype=base.dtype)
    rules = Rules.of([Rule(1.0, 0, 1.0)] * ROWS, vocab_size=base.vocab_size, device=torch.device("cpu"))
    keys, counters = stream_keys(0, 0, ROWS), np.arange(ROWS, dtype=np.uint64)

    def run() -> None:
        logprobs_B_V = scaled_logprobs(logits(base.head, hidden_B_H, []), None)
        draw(logprobs_B_V, rules, torch.from_numpy(uniforms(keys, counters)))

    return run
