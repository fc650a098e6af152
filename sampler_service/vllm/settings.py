"""How vLLM is started: its environment and its arguments, from the sampler's settings and the reference."""

from __future__ import annotations

import os
from importlib.util import find_spec

from sampler_service.config import SamplerConfig
from sampler_service.core.sequence import PASSING
from sampler_service.vllm.reference import Reference
from tinsmith.sizing import slot_rank

_FREE_AT_START = 0.01
"""Part of a GPU's memory that must be free for vLLM to start. It has no other effect, because the size of the cache is
given in bytes. It is small, because a trainer on the same GPU may be loading at that time."""
WORKER_EXTENSION = "sampler_service.vllm.worker.WorkerExtension"
SCHEDULER = "sampler_service.vllm.scheduler.make_scheduler"


def is_installed() -> bool:
    return find_spec("vllm") is not None


def set_environment(config: SamplerConfig, *, device: str) -> None:
    """Sets vLLM's environment variables, before vllm is imported. A variable that the user has set stays, unless the
    engine cannot run with it."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # a single worker runs in the engine's process
        VLLM_USE_V2_MODEL_RUNNER="0",  # worker.py extends the other one
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # workers have nothing to save
    }
    if device == "cpu":
        # Without this setting the first request compiles for seconds, and the engine dies if there is no C++ compiler.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        # By default vLLM takes a NUMA node for each worker, and does not start if there are fewer nodes.
        if config.tensor_parallel > 1:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if config.num_threads:
        defaults["OMP_NUM_THREADS"] = str(max(1, config.num_threads // config.tensor_parallel))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_args(config: SamplerConfig, reference: Reference) -> dict[str, object]:
    """For vLLM's AsyncEngineArgs."""
    sizes, pages, on_cpu = reference.sizes, reference.pages, reference.device == "cpu"
    lanes = reference.max_running + PASSING
    return {
        "model": config.base_model,
        "dtype": reference.dtype,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": min(reference.max_context_length, sizes.max_kv_tokens),
        "block_size": pages.block_tokens,
        "kv_cache_memory_bytes": pages.cache_bytes(sizes),
        "gpu_memory_utilization": _FREE_AT_START,
        "enforce_eager": on_cpu,  # compiled, it starts minutes later and decodes 5 % faster
        "max_num_seqs": lanes,
        "max_num_batched_tokens": max(sizes.tokens_per_step, lanes),
        "enable_prefix_caching": sizes.prefix_cache_bytes > 0,
        "max_logprobs": -1,
        "enable_lora": bool(reference.targets),
        "max_loras": config.max_device_versions,
        "max_cpu_loras": config.max_device_versions,  # others lie in shared memory
        "max_lora_rank": slot_rank(config.max_lora_rank),
        "worker_extension_cls": WORKER_EXTENSION,
        "scheduler_cls": SCHEDULER,
        "generation_config": "vllm",  # no sampling defaults of the model's
        "disable_log_stats": True,
        "enable_log_requests": False,
        **_picture_args(reference),
    }


def _picture_args(reference: Reference) -> dict[str, object]:
    if not reference.picture_tokens:
        return {"language_model_only": reference.has_tower}
    return {
        "mm_processor_kwargs": {"most_tokens": reference.picture_tokens},  # for PictureInfo
        "mm_device_do_normalize": False,  # our processor has done so
        "mm_processor_cache_gb": 0,  # it keeps the output of vLLM's own processor
        "skip_mm_profiling": True,  # reference.py plans the memory of the tower
    }
