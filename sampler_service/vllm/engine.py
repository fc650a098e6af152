"""vLLM as an engine: its scheduler, its paged cache and its kernels, with our own
requests, versions, draws and scores.

vLLM computes in processes of its own. worker.py adds to its workers what vLLM's own protocol lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import abc

from torch import Tensor

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import OpenRequests
from sampler_service.core.queue_status import Progress, Queue, Speed, status_of
from sampler_service.core.request import Generation, QueueStatus, Request, RequestLimits
from sampler_service.core.sequence import StopRules
from sampler_service.core.versions import Version, VersionStore
from sampler_service.metrics import SamplerMetrics
from sampler_service.threads import in_thread
from sampler_service.vllm.full import FullVersion
from sampler_service.vllm.pictures import load_processor
from sampler_service.vllm.reference import Reference, take_reference
from sampler_service.vllm.running import VllmSequences
from sampler_service.vllm.self_check import check_engine
from sampler_service.vllm.shared_memory import SharedTensor
from sampler_service.vllm.start import VllmProcess, check_installed, start
from sampler_service.vllm.versions import SharedAdapter, SharedFull, WorkerVersions, no_full_versions
from tinsmith.errors import EngineDead, ServiceError, Unsupported
from tinsmith.modeling.adapter import VISION, Adapter, Group, Target
from tinsmith.modeling.full_weights import Weights
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.pictures.processing import Processor

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 0.25
_NO_VISION = "the vLLM engine does not serve adapters of the vision tower; a sampler with --engine torch does"


class VllmEngine:
    """A SamplingEngine. Made by load(), on the event loop that it belongs to."""

    name = "vllm"

    def __init__(
        self,
        process: VllmProcess,
        reference: Reference,
        config: SamplerConfig,
        metrics: SamplerMetrics,
        speed: Speed,
        processor: Processor | None,
    ) -> None:
        self.metrics = metrics
        self.limits = RequestLimits(
            vocab_size=reference.vocab_size,
            max_context_length=reference.max_context_length,
            max_kv_tokens=reference.sizes.max_kv_tokens,
            max_num_samples=config.max_num_samples,
            max_topk_logprobs=config.max_topk_logprobs,
        )
        self.store = VersionStore(max_bytes=config.adapter_memory_bytes, metrics=metrics.versions, on_gone=self._forget)
        self.requests = OpenRequests(
            config,
            self.limits,
            StopRules(config.base_model, reference.eos_token_ids),
            self.store,
            metrics.requests,
            cancel=lambda group, error: self.requests.end(group, error),
            release=lambda group: self._sequences.drop(group),
        )
        self._queue = Queue()
        self._process = process
        self._sequences = VllmSequences(
            process, self.requests, self.store, metrics, max_running=reference.max_running, processor=processor
        )
        self.max_running = reference.max_running
        self.device = reference.device
        self.weights_device = "cpu"
        """Versions reach vLLM's processes through shared memory. This process uses no GPU memory, which vLLM's
        processes need."""
        self.eos_token_ids = reference.eos_token_ids
        self.targets: abc.Sequence[Target] = reference.targets
        self.processor = processor
        self.why_no_pictures = reference.why_no_pictures
        self.refused_groups: dict[Group, str] = {VISION: _NO_VISION} if reference.has_tower else {}
        """Groups whose adapters vLLM does not serve for this model, with the reasons."""
        self._reference = reference
        self._refuses_full = ""
        """The reason for which vLLM cannot load other parameters into this model; empty while none is known."""
        self._speed = speed
        self._max_waiting = config.max_waiting
        self._worker = WorkerVersions(process.call)
        self._health: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls, config: SamplerConfig, metrics: SamplerMetrics) -> VllmEngine:
        """Measures the base model with our own code, starts vLLM with it, and holds one against the other.

        Raises ValueError when there is no vLLM for this device, UnsupportedModel for a model that vLLM cannot serve or
        computes differently, and OSError when there is no such model or its files are damaged.
        """
        check_installed()
        reference = await in_thread(lambda: take_reference(config))
        speed = Speed()
        process = await in_thread(lambda: start(config, reference, metrics, speed))
        processor = None if reference.why_no_pictures else load_processor(config.base_model)
        engine = cls(process, reference, config, metrics, speed, processor)
        try:
            await engine._set_up()
        except EngineDead as error:
            await engine.stop()
            raise UnsupportedModel(
                f"{reference.architecture}: vLLM died of its first requests; the log has the cause. "
                'Engine "torch" may serve this model'
            ) from error
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def submit(self, request: Request, *, stream: bool = False, request_id: str = "") -> Generation:
        group = await self.requests.accept(request, stream=stream, request_id=request_id)
        with self.requests.lost_without(group):
            self._sequences.add(group)
        return group.generation

    def describe(self, request_id: str) -> QueueStatus | None:
        waiting = self.requests.waiting
        begun = [group for group in self.requests if group not in waiting]
        progress = Progress.of(begun, self._sequences.running, self._speed)
        return status_of(request_id, self.requests, waiting, progress, self._queue)

    def full_weights(self, flat: Tensor) -> FullVersion:
        if self._refuses_full:
            raise Unsupported(self._refuses_full)
        return FullVersion(self._reference.parameters, flat)

    def memory_for(self, layout: Weights) -> FullVersion | None:
        """Shared memory for all parameters, from which the workers take them. They are never received on a device,
        which has no room for a second copy."""
        return FullVersion.arriving(layout) if isinstance(layout, FullVersion) else None

    def make_room(self, version_id: str, num_bytes: int) -> list[Weights]:
        """Returns no versions, because their buffers are shared memory, which workers may still have open."""
        self.store.make_room(version_id, num_bytes)
        return []

    async def install(
        self, version_id: str, weights: Weights, *, on_probation: bool = False, checksum: str = ""
    ) -> None:
        self.requests.check_alive()
        self.store.make_room(version_id, weights.num_bytes)
        resident = await self._share(weights)
        try:
            self.store.install(version_id, resident, on_probation=on_probation, checksum=checksum)
        except ServiceError:
            self._worker.forget(resident)
            raise

    async def _share(self, weights: Weights) -> SharedAdapter | SharedFull:
        """Once the workers know it. Raises Unsupported when vLLM cannot load such versions of this model."""
        shared = weights.shared if isinstance(weights, FullVersion) else None
        if shared is None:
            shared = await in_thread(lambda: SharedTensor.copy_of(weights.flat))
        try:
            if isinstance(weights, Adapter):
                return await self._worker.register(weights, shared)
            return await self._worker.register_full(self.full_weights(shared.tensor), shared)
        except Unsupported as error:
            self._refuses_full = str(error)
            shared.close()
            raise
        except BaseException:
            shared.close()
            raise

    async def move(self, run_id: str, version_id: str) -> int:
        behind = self.requests.behind(run_id, version_id)
        if not behind:
            return 0
        with self.requests.dying_of_errors():
            return self._sequences.move(behind, behind[0].held[-1])
        raise EngineDead("the engine has died of a move; the log has the cause")

    async def stop(self) -> None:
        """Unfinished requests fail with NotReady; vLLM's process is gone when this returns."""
        self.requests.begin_stop()
        if self._health is not None:
            self._health.cancel()
        self.requests.end_stop()
        await self._process.stop()

    def _forget(self, version: Version) -> None:
        assert isinstance(version.weights, SharedAdapter | SharedFull)
        self._worker.forget(version.weights)

    async def _set_up(self) -> None:
        """Prepares and checks the workers."""
        if (quantization := self._process.llm.model_config.quantization) is not None:
            self._refuses_full = no_full_versions(f"it is quantized ({quantization})")
        await self._process.call("tinsmith_set_up")
        self._health = asyncio.create_task(self._watch())
        await check_engine(self, self._reference, max_waiting=self._max_waiting)
        await self._process.llm.reset_prefix_cache()

    async def without_place(self, peft_names: list[str]) -> list[str]:
        """The names for which vLLM's class of this model takes no adapter."""
        names, *_ = await self._process.call("tinsmith_without_place", list(peft_names))
        return names

    def refuse_pictures(self, reason: str) -> None:
        """Prompts with pictures are refused from now on."""
        self.processor, self.why_no_pictures = None, reason
        logger.warning("pictures are not served by vLLM for this model: %s", reason)

    def refuse_group(self, group: Group, reason: str) -> None:
        """Refuses adapters of a group: its layers are no targets any more."""
        if group not in self.refused_groups:
            self.refused_groups[group] = reason
            logger.warning("train_%s is not served by vLLM for this model: %s", group, reason)
            self.targets = [target for target in self.targets if target.group != group]

    async def _watch(self) -> None:
        with self.requests.dying_of_errors():
            while not self._process.llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
                await asyncio.sleep(_HEALTH_INTERVAL_S)
        logger.critical("vLLM's process has died; its output is in this log")
        self.requests.die(EngineDead("the log has the cause"))
