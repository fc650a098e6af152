"""Which engine generates."""

from __future__ import annotations

from typing import Literal

from sampler_service.config import SamplerConfig
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.sizing import resolve_device
from sampler_service.vllm.engine import VllmEngine
from sampler_service.vllm.settings import is_installed


def engine_name(config: SamplerConfig) -> Literal["vllm", "torch"]:
    """On a CPU the torch engine starts sooner, and is no slower for short prompts and groups."""
    if config.engine != "auto":
        return config.engine
    with_vllm = resolve_device(config.device) == "cuda" and is_installed()
    return "vllm" if with_vllm else "torch"


async def load_engine(config: SamplerConfig, metrics: SamplerMetrics) -> TorchEngine | VllmEngine:
    """Raises as the engines' load() do, and ValueError for a division that the torch engine cannot have."""
    if engine_name(config) == "vllm":
        return await VllmEngine.load(config, metrics)
    if config.tensor_parallel > 1:
        raise ValueError(
            f'tensor_parallel: {config.tensor_parallel} is for engine "vllm"; engine "torch" computes on one device'
        )
    return await TorchEngine.load(config, metrics)
