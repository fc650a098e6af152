"""Starting vLLM, in a process of its own."""

from __future__ import annotations

from typing import Any

from sampler_service.config import SamplerConfig
from sampler_service.core.speed import Speed
from sampler_service.metrics import SamplerMetrics
from sampler_service.vllm.reference import Reference
from sampler_service.vllm.settings import engine_args, is_installed, set_environment
from tinsmith.modeling.base_model import UnsupportedModel


def check_installed() -> None:
    """Raises ValueError."""
    if not is_installed():
        raise ValueError(
            'engine: "vllm" needs vLLM, which is not installed here: pip install "tinsmith[vllm]", or take "torch"'
        )


def start(config: SamplerConfig, reference: Reference, metrics: SamplerMetrics, speed: Speed) -> Any:
    """Blocks until the model is loaded."""
    set_environment(config, device=reference.device)
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    from sampler_service.vllm.stats import StepStats

    if current_platform.is_cpu() != (reference.device == "cpu"):
        raise ValueError(
            f"device: the installed vLLM was built for {current_platform.device_type}, not for {reference.device}; "
            'take engine "torch" there'
        )
    args = AsyncEngineArgs(**engine_args(config, reference))
    stats = StepStats(metrics, speed, cache_bytes=args.kv_cache_memory_bytes * config.tensor_parallel)
    try:
        return AsyncLLM.from_engine_args(args, stat_loggers=[lambda _config, _index=0: stats])
    except RuntimeError as error:  # what its process died of is in the log
        raise UnsupportedModel(f"{reference.architecture}: vLLM does not start with it: {error}") from error
