"""vLLM's scheduler, which computes in one step only what runs on the same base weights.

A request that waits for other weights keeps its keys and values, and goes on where it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

from sampler_service.vllm import patches
from sampler_service.vllm.picture_inputs import PictureInfo
from sampler_service.vllm.processes import die_with_parent
from sampler_service.vllm.weight_turns import WeightTurns
from sampler_service.vllm.wire import base_weights

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _ByBaseWeights(_Base):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = WeightTurns()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Its output says which base weights the step needs."""
        waiting = sorted([*self.running, *self.waiting], key=lambda request: request.arrival_time)
        chosen = self._turns.choose(list(dict.fromkeys(_base_weights(request) for request in waiting)))
        parked_running = [request for request in self.running if _base_weights(request) != chosen]
        parked_waiting = [request for request in self.waiting if _base_weights(request) != chosen]
        if parked_running:
            self.running = [request for request in self.running if _base_weights(request) == chosen]
        if parked_waiting:
            self.waiting.remove_requests(parked_waiting)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running += parked_running
            for request in parked_waiting:
                self.waiting.add_request(request)
        if not output.total_num_scheduled_tokens:
            self._turns.give_up()  # other requests hold the blocks that it needs
        output.tinsmith_base_weights = chosen
        return output


def _base_weights(request: Any) -> int:
    return base_weights(request.sampling_params.extra_args)


class VersionScheduler(_ByBaseWeights, Scheduler):
    pass


class AsyncVersionScheduler(_ByBaseWeights, AsyncScheduler):
    pass


def make_scheduler(*, vllm_config: Any, **options: Any) -> VersionScheduler | AsyncVersionScheduler:
    """Makes a scheduler of the class that vLLM would take. This runs in the engine's process, and makes that process
    end with its parent, because a sampler that is killed cannot stop it."""
    die_with_parent()
    patches.replace_picture_processor(PictureInfo)
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncVersionScheduler if is_async else VersionScheduler)(vllm_config=vllm_config, **options)
