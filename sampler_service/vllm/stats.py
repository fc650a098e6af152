"""vLLM's own counts of its steps, as the sampler's metrics and its speed."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

from sampler_service.core.queue_status import Speed
from sampler_service.metrics import SamplerMetrics


class StepStats(StatLoggerBase):
    """vLLM calls this object for every step, on the event loop."""

    def __init__(self, metrics: SamplerMetrics, speed: Speed, *, cache_bytes: int) -> None:
        """`cache_bytes`: size of vLLM's cache of keys and values, prefix cache included."""
        self._metrics = metrics
        self._cache_bytes = cache_bytes
        self._speed = speed
        metrics.cache.allocated_bytes.set(cache_bytes)
        metrics.cache.limit_bytes.set(cache_bytes)
        self._last: float | None = None
        """Time at which the last step ended; None if there was nothing more to do."""

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        now, metrics = time.perf_counter(), self._metrics
        prefilled = 0
        if iteration_stats is not None:
            prefilled = iteration_stats.prompt_token_stats.computed
            metrics.steps.prefilled_tokens.inc(prefilled)
            metrics.steps.sampled_tokens.inc(iteration_stats.num_generation_tokens)
            metrics.steps.preemptions.inc(iteration_stats.num_preempted_reqs)
        if scheduler_stats is not None:
            metrics.requests.running.set(scheduler_stats.num_running_reqs)
            metrics.cache.used_bytes.set(scheduler_stats.kv_cache_usage * self._cache_bytes)
            if self._last is not None:
                metrics.steps.step_time.observe(now - self._last)
                self._speed.observe(now - self._last, prefilled=prefilled)
            busy = scheduler_stats.num_running_reqs or scheduler_stats.num_waiting_reqs
            self._last = now if busy else None

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM calls it."""
