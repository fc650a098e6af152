"""Starting vLLM in a process of its own, and calls to that process."""

from __future__ import annotations

from typing import Any

from sampler_service.config import SamplerConfig
from sampler_service.core.queue_status import Speed
from sampler_service.metrics import SamplerMetrics
from sampler_service.threads import in_thread
from sampler_service.vllm.picture_inputs import PictureInfo
from sampler_service.vllm.reference import Reference
from sampler_service.vllm.settings import engine_args, is_installed, set_environment
from tinsmith.errors import EngineDead
from tinsmith.modeling.pretrained import UnsupportedModel


def check_installed() -> None:
    """Raises ValueError."""
    if not is_installed():
        raise ValueError(
            'engine: "vllm" needs vLLM, which is not installed here: pip install "tinsmith[vllm]", or take "torch"'
        )


class VllmProcess:
    """vLLM's process, by vLLM's own client of it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._is_stopped = False

    @property
    def answers(self) -> bool:
        """Whether the process is alive."""
        return not self._is_stopped and not self.llm.errored

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of the worker extension. Returns one result for each worker; the first worker draws and
        scores. Raises EngineDead."""
        if not self.answers:
            raise EngineDead("the engine has died; the log has the cause")
        return await self.llm.collective_rpc(method, args=args)

    async def stop(self) -> None:
        """Ends the process, and returns when it is gone."""
        self._is_stopped = True
        if self.llm.output_handler is not None:  # otherwise vLLM logs that the process has died
            self.llm.output_handler.cancel()
        await in_thread(lambda: self.llm.shutdown(timeout=0))  # the process has nothing to save


def start(config: SamplerConfig, reference: Reference, metrics: SamplerMetrics, speed: Speed) -> VllmProcess:
    """Blocks until the model is loaded."""
    set_environment(config, device=reference.device)
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    from sampler_service.vllm import patches
    from sampler_service.vllm.stats import StepStats

    if current_platform.is_cpu() != (reference.device == "cpu"):
        raise ValueError(
            f"device: the installed vLLM was built for {current_platform.device_type}, not for {reference.device}; "
            'take engine "torch" there'
        )
    patches.replace_picture_processor(PictureInfo)
    args = AsyncEngineArgs(**engine_args(config, reference))
    stats = StepStats(metrics, speed, cache_bytes=args.kv_cache_memory_bytes * config.tensor_parallel)
    try:
        return VllmProcess(AsyncLLM.from_engine_args(args, stat_loggers=[lambda _config, _index=0: stats]))
    except RuntimeError as error:  # the log has the error of vLLM's process
        raise UnsupportedModel(f"{reference.architecture}: vLLM does not start with it: {error}") from error
