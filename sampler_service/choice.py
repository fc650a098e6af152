"""Which engine generates, and why."""

from __future__ import annotations

from sampler_service.config import SamplerConfig
from sampler_service.core.sizing import resolve_device
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.vllm.engine import VllmEngine
from sampler_service.vllm.settings import is_installed
from tinsmith.cores import Cores
from tinsmith.sizing import VLLM_MAX_LORA_RANK


def settled(config: SamplerConfig) -> tuple[SamplerConfig, str]:
    """The settings, with the engine and its defaults in place of what they leave open, and the reason for the choice of
    the engine."""
    update: dict[str, object] = {}
    update["engine"], why = _engine(config)
    if update["engine"] == "vllm" and "max_lora_rank" not in config.model_fields_set:
        update["max_lora_rank"] = VLLM_MAX_LORA_RANK
    return config.model_copy(update=update), why


def _engine(config: SamplerConfig) -> tuple[str, str]:
    """On a CPU the torch engine starts sooner, and is no slower for short prompts and groups."""
    if config.engine != "auto":
        return config.engine, "the setting engine names it"
    if config.quantize is not None:
        return "torch", f"the setting quantize is {config.quantize}, which vLLM cannot do"
    if resolve_device(config.device) != "cuda":
        found = "the setting device is" if config.device == "cpu" else "no CUDA device was found, so the device is"
        return "torch", f'{found} "cpu", where engine "auto" takes torch'
    if is_installed():
        return "vllm", 'the device is "cuda" and vLLM is installed, so engine "auto" takes vLLM'
    return "torch", (
        'engine "auto" would take vLLM on this "cuda" device, but vLLM is not installed: pip install "tinsmith[vllm]"'
    )


async def load_engine(config: SamplerConfig, metrics: SamplerMetrics) -> TorchEngine | VllmEngine:
    """Loads the engine. `config`: from `settled`. Raises the errors of the engines' load(), and ValueError for a
    division that the torch engine cannot have."""
    if config.engine == "vllm":
        # vLLM's number of threads is fixed while it runs, and vLLM does not report when it computes. So it always takes
        # its share.
        cores = Cores(config.cores_page, most=config.num_threads, set_threads=lambda _: None, fixed=True)
        cores.begin()
        config = config.model_copy(update={"num_threads": cores.threads})
        return await VllmEngine.load(config, metrics)
    if config.tensor_parallel > 1:
        raise ValueError(
            f'tensor_parallel: {config.tensor_parallel} is for engine "vllm"; engine "torch" computes on one device'
        )
    return await TorchEngine.load(config, metrics)
