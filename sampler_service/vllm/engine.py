"""vLLM behind the protocol of sampler_service/engine.py: its scheduler, its paged cache and its kernels, with our own
requests, versions, draws and scores.

vLLM computes in a process of its own. Here each sequence is one of its requests, so that a move, a stop string or a
cancel ends one sequence and no other; they share the blocks of their prompt. What the worker needs beyond vLLM's own
protocol is in sampler_service/vllm.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampler_service.config import SamplerConfig
from sampler_service.engine import Delta, Generation, Params, QueueStatus, Request, Result, StopCondition
from sampler_service.front import Front
from sampler_service.metrics import SamplerMetrics
from sampler_service.queue_status import status_of
from sampler_service.stops import StopRules
from sampler_service.threads import in_thread
from sampler_service.torch_engine.adapters import Version
from sampler_service.torch_engine.scheduler import PASSING
from sampler_service.torch_engine.scheduler import Sequence as RunningSequence
from sampler_service.torch_engine.scoring import not_finite
from sampler_service.torch_engine.self_check import Comparison
from sampler_service.torch_engine.speed import Speed
from sampler_service.torch_engine.task import Task
from sampler_service.validation import Limits
from sampler_service.vllm.outputs import Drawn, drawn_tokens
from sampler_service.vllm.reference import Reference, Sample, take_reference
from sampler_service.vllm.settings import engine_args, is_installed, set_environment
from sampler_service.vllm.shared_memory import SharedTensor
from sampler_service.vllm.versions import SharedAdapter, WorkerVersions
from sampler_service.vllm.wire import Draws, Scores, extra_args
from tinsmith.modeling.adapter import Adapter, Group, Target
from tinsmith.modeling.base_model import UnsupportedModel
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.modeling.self_check import TOLERANCE, random_adapter
from tinsmith.rpc.errors import Cancelled, EngineDead, NotReady, ServiceError, Unsupported

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One of vLLM's requests: a sequence from its prompt, or from where it moved to another version."""

    task: Task
    sequence: RunningSequence[Task]
    version: Version | None
    generating: asyncio.Task[None]


class VllmEngine(Front):
    """A SamplingEngine. Made by load(), on the event loop that it belongs to."""

    name = "vllm"

    def __init__(
        self, llm: Any, reference: Reference, config: SamplerConfig, metrics: SamplerMetrics, speed: Speed
    ) -> None:
        limits = Limits(
            vocab_size=reference.vocab_size,
            max_context_length=reference.max_context_length,
            max_kv_tokens=reference.sizes.max_kv_tokens,
            max_num_samples=config.max_num_samples,
            max_topk_logprobs=config.max_topk_logprobs,
        )
        super().__init__(config, metrics, limits, StopRules(config.base_model, reference.eos_token_ids))
        self.device = reference.device
        self.eos_token_ids = reference.eos_token_ids
        self.targets: Sequence[Target] = reference.targets
        self.refused_groups: dict[Group, str] = {}
        """Groups whose adapters vLLM does not serve for this model, and why."""
        self._llm: Any = llm
        self._reference = reference
        self._speed = speed
        self._worker = WorkerVersions(self._rpc)
        self._queue: deque[RunningSequence[Task]] = deque()
        """Sequences that wait for a place."""
        self._runs: dict[RunningSequence[Task], Run] = {}
        self._leaving: dict[Run, None] = {}
        """Runs that were cancelled, until vLLM has heard of it."""
        self._names = itertools.count()
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
        llm = await in_thread(lambda: _start(config, reference, metrics, speed))
        engine = cls(llm, reference, config, metrics, speed)
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
        task = await self._accept(request, stream=stream, request_id=request_id)
        first, *others = task.sequences
        has_place = request.on_probation or len(self._runs) < self._config.max_running + PASSING
        if first.passes and not others and has_place:
            self._begin(first)  # it need not wait for running ones to end
        else:
            self._queue.extend(task.sequences)
            self._admit()
        return task.generation

    def describe(self, request_id: str) -> QueueStatus | None:
        return status_of(request_id, list(self._tasks), self._runs, self._speed)

    def full_weights(self, flat: Tensor) -> FullWeights:
        raise Unsupported(
            "lora_config.rank: 0 (all parameters) is not served by the vLLM engine; start the sampler with "
            "--engine torch"
        )

    def make_room(self, version_id: str, num_bytes: int) -> Sequence[Weights]:
        """Returns nothing: the buffers of versions are shared memory, which the worker may still have open."""
        self._store.make_room(version_id, num_bytes)
        self._count_versions()
        return []

    async def install(self, version_id: str, weights: Weights, *, on_probation: bool = False) -> None:
        if not isinstance(weights, Adapter):
            self.full_weights(weights.flat)
            return
        self._check_alive()
        self._store.make_room(version_id, weights.num_bytes)
        shared = await in_thread(lambda: SharedTensor(weights.flat))
        try:
            resident = await self._worker.register(weights, shared)
        except BaseException:
            shared.close()
            raise
        try:
            self._store.install(version_id, resident, on_probation=on_probation)
        except ServiceError:
            self._worker.forget(resident)
            raise
        self._count_versions()

    async def move(self, run_id: str, version_id: str) -> int:
        moved = sum([self._move(task, task.held[-1]) for task in self._behind(run_id, version_id)])
        self._admit()
        return moved

    async def stop(self) -> None:
        """Unfinished requests fail with NotReady; vLLM's process is gone when this returns."""
        self._stopping = True
        if self._health is not None:
            self._health.cancel()
        self._end_all(NotReady("the sampler is shutting down"))
        if self._llm.output_handler is not None:  # or it logs that the process has died
            self._llm.output_handler.cancel()
        llm, self._llm = self._llm, None
        await in_thread(lambda: llm.shutdown(timeout=0))  # it has nothing to save

    @property
    def _answers(self) -> bool:
        """Whether vLLM's process is there."""
        return self._llm is not None and not self._llm.errored

    async def _rpc(self, method: str, *args: Any) -> Any:
        """Calls a method of the worker extension."""
        if not self._answers:
            raise EngineDead("the engine has died; the log has the cause")
        return (await self._llm.collective_rpc(method, args=args))[0]

    # Sequences.

    def _admit(self) -> None:
        """Hands sequences to vLLM, in the order in which they came, while it has places."""
        while self._queue and len(self._runs) < self._config.max_running:
            self._begin(self._queue.popleft())

    def _begin(self, sequence: RunningSequence[Task]) -> None:
        task = sequence.owner
        if not task.admitted:
            task.generation.started_at = time.time()
            self.metrics.queue_time.observe(time.perf_counter() - task.submitted)
            self.metrics.prompt_tokens.inc(len(task.request.prompt))
            self._admitted(task)
        version = task.version_of(sequence)
        generating = asyncio.create_task(self._generate(sequence, version))
        run = Run(task, sequence, version, generating)
        self._runs[sequence] = run
        generating.add_done_callback(lambda _: self._left(run))

    async def _generate(self, sequence: RunningSequence[Task], version: Version | None) -> None:
        """Runs one sequence to its end, or until it is cancelled."""
        task = sequence.owner
        name = f"{next(self._names)}"
        scores = self._scores_of(sequence, name)
        try:
            outputs = self._llm.generate(
                self._prompt(sequence),
                self._sampling_params(sequence, scores),
                name,
                lora_request=None if version is None else _lora_request(version),
            )
            async with aclosing(outputs):
                async for output in outputs:
                    first = not sequence.tokens and output.outputs[0].token_ids
                    if first and sequence.index == 0:
                        self._note_reuse(task, output.num_cached_tokens or 0)
                    if first and scores is not None:
                        await self._take_scores(task, name)
                        scores = None
                    if self._deliver(sequence, output) and not output.finished:
                        break  # vLLM would go on
            if sequence.index not in task.finished:
                reason = f"vLLM ended a sequence early, after {len(sequence.tokens)} tokens"
                self._end(task, ServiceError(reason))
        except Exception as error:
            if self._answers:
                logger.error("a request failed in vLLM", exc_info=error)
                self._end(task, ServiceError(f"the engine failed in this request: {error}; the log has the cause"))
            # else the health check ends everything
        finally:
            if scores is not None and self._answers:
                await self._rpc("tinsmith_take_scores", name)  # nobody wants them any more

    def _scores_of(self, sequence: RunningSequence[Task], name: str) -> Scores | None:
        """What this run scores: the first sequence does it, until it has a token."""
        task = sequence.owner
        if task.scorer is None or sequence.index or sequence.tokens:
            return None
        return Scores.of(task.request, name=name, seed=task.scorer.seed)

    def _note_reuse(self, task: Task, tokens: int) -> None:
        """Prompt tokens that vLLM had computed before."""
        task.cache_hit_tokens = tokens
        self.metrics.prefix_lookups.inc()
        self.metrics.prefix_hits.inc(tokens > 0)
        self.metrics.prefix_hit_tokens.inc(tokens)

    async def _take_scores(self, task: Task, name: str) -> None:
        assert task.scorer is not None
        task.scorer.restore(await self._rpc("tinsmith_take_scores", name))

    def _prompt(self, sequence: RunningSequence[Task]) -> Any:
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

        request = sequence.owner.request
        return tokens_input([*request.prompt.tolist(), *sequence.tokens], cache_salt=request.cache_salt or None)

    def _sampling_params(self, sequence: RunningSequence[Task], scores: Scores | None) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

        task = sequence.owner
        params, topk = task.request.params, min(task.request.topk_sample_logprobs, self.limits.vocab_size)
        draws = Draws(
            key=int(task.keys[sequence.index]),
            first=len(sequence.tokens),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            topk=topk,
        )
        # Every token at once where somebody waits for it, or it may be the last.
        interval = 1 if task.generation.stream or task.request.follow_run else 4 if task.stop.strings else 16
        return SamplingParams(
            max_tokens=sequence.max_length - sequence.length,
            stop_token_ids=sorted(task.stop.token_ids),
            ignore_eos=True,  # stop_token_ids has them
            logprobs=topk,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=interval,
            skip_reading_prefix_cache=True if scores is not None else None,
            extra_args=extra_args(draws, scores),
            skip_clone=True,
        )

    def _deliver(self, sequence: RunningSequence[Task], output: Any) -> bool:
        """True when the sequence has ended, or its request."""
        task = sequence.owner
        topk = min(task.request.topk_sample_logprobs, self.limits.vocab_size)
        new: list[Drawn] = []
        ended = False
        for drawn in drawn_tokens(output.outputs[0], topk):
            if not math.isfinite(drawn.logprob):
                self._end(task, not_finite(task.version_id_of(sequence)))
                return True
            if task.topk:
                task.take_table(sequence, drawn.table_ids, drawn.table_logprobs)
            new.append(drawn)
            if ended := task.take(sequence, drawn.token, drawn.logprob):
                break
        if new and not task.begun:
            task.begun = True
            task.prompt_done = len(task.request.prompt)
            self.metrics.first_token.observe(time.perf_counter() - task.submitted)
        if new and task.generation.stream:
            tokens, logprobs = tuple(one.token for one in new), tuple(one.logprob for one in new)
            task.generation.push(Delta(sequence.index, tokens, logprobs, Drawn.table(new, task.topk)))
        if ended and task.complete:
            self._end(task, _outcome(task))
        return ended

    def _move(self, task: Task, version: Version) -> int:
        """Runs of a request go on with another version; vLLM computes their keys and values anew. Returns how many."""
        task.move(version)
        going_on = [sequence for sequence in task.sequences if sequence.index not in task.finished]
        again = [sequence for sequence in going_on if sequence in self._runs]
        for sequence in going_on:
            task.follow(sequence, has_lane=False)
        for sequence in again:
            self._break_off(self._runs.pop(sequence))
            self._begin(sequence)
        self._release_unused(task)
        return len(going_on)

    def _break_off(self, run: Run) -> None:
        self._leaving[run] = None
        run.generating.cancel()

    def _left(self, run: Run) -> None:
        """vLLM has nothing of the run any more, or will have heard so before anything that is said to it now."""
        self._leaving.pop(run, None)
        if self._runs.get(run.sequence) is run:
            del self._runs[run.sequence]
        self._release_unused(run.task)
        self._admit()

    def _release_unused(self, task: Task) -> None:
        """Lets go of the versions that neither the request nor one of its runs uses."""
        used = {id(run.version) for run in (*self._runs.values(), *self._leaving) if run.task is task}
        if task in self._tasks:
            used.add(id(task.version))
        for version in [version for version in task.held if id(version) not in used]:
            task.held.remove(version)
            self._store.release(version)

    # Requests.

    def _cancel(self, task: Task) -> None:
        self._end(task, Cancelled("the caller has left"))

    def _let_go(self, task: Task) -> None:
        if any(sequence not in self._runs and sequence.index not in task.finished for sequence in task.sequences):
            self._queue = deque(sequence for sequence in self._queue if sequence.owner is not task)
        current = asyncio.current_task()
        for run in [run for run in self._runs.values() if run.task is task and run.generating is not current]:
            del self._runs[run.sequence]
            self._break_off(run)
        self._release_unused(task)

    def _forget(self, version: Version) -> None:
        assert isinstance(version.weights, SharedAdapter)
        self._worker.forget(version.weights)
        self._count_versions()

    # Start and health.

    async def _set_up(self) -> None:
        """Readies the worker, and checks it."""
        await self._rpc("tinsmith_set_up", os.getpid())
        self._health = asyncio.create_task(self._watch())
        if self.targets:
            await self._choose_targets()
        await self._check(self._reference.base)
        for group, sample in self._reference.groups.items():
            if any(target.group == group for target in self.targets):
                await self._check(sample, group)
        await self._check_decoding()
        for one in self.versions():
            self.remove(one.version_id)
        await self._llm.reset_prefix_cache()

    async def _choose_targets(self) -> None:
        """Without the groups that vLLM's class of this model takes no adapters for."""
        names = {target.peft_names[0]: target for target in self.targets if target.num_experts is None}
        for target in self.targets:
            if target.num_experts is not None:
                self._refuse(target.group, f"{target.name} is a tensor of all experts")
        for name in await self._rpc("tinsmith_without_place", list(names)):
            self._refuse(names[name].group, f"vLLM takes no adapter for {names[name].name}")

    def _refuse(self, group: Group, reason: str) -> None:
        if group not in self.refused_groups:
            self.refused_groups[group] = reason
            logger.warning("train_%s is not served by vLLM for this model: %s", group, reason)
            self.targets = [target for target in self.targets if target.group != group]

    async def _check(self, sample: Sample, group: Group | None = None) -> None:
        """Raises UnsupportedModel when vLLM computes the base model otherwise; a group that it computes otherwise is
        refused."""
        version_id = ""
        if sample.config is not None:
            version_id = f"self-check-{group}"
            adapter = random_adapter(sample.config, self._reference.targets, torch.device("cpu"))
            await self.install(version_id, adapter)
        request = Request(
            sample.prompt, version_id, params=Params(max_tokens=1, stop=StopCondition()), prompt_logprobs=True
        )
        result = await (await self.submit(request)).result()
        assert result.prompt.logprobs is not None
        gap = float(np.abs(result.prompt.logprobs[1:] - sample.logprobs).max())
        logger.info("self-check of vLLM, %s: logprobs differ by %.2g at most", group or "base", gap)
        if gap <= self._tolerance:
            return
        reason = (
            f"vLLM's logprobs differ by {gap:.3g} (limit {self._tolerance:g}) from those of the model that is trained"
        )
        if group is None:
            raise UnsupportedModel(f"{self._reference.architecture}: {reason}")
        self._refuse(group, reason)

    async def _check_decoding(self) -> None:
        """Tokens drawn one by one against the same tokens as a prompt, of all versions in one batch."""
        params = Params(max_tokens=4, top_p=0.9, stop=StopCondition())
        version_ids = ["", *(one.version_id for one in self.versions())]
        prompt = self._reference.base.prompt
        requests = [Request(prompt, one, num_samples=2, params=params) for one in version_ids]
        generations = [await self.submit(request) for request in requests[: self._config.max_waiting]]
        for request, generation in zip(requests, generations, strict=False):
            for one in Comparison.of(request, await generation.result()):
                one.check(await (await self.submit(one.request)).result(), tolerance=self._tolerance)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[getattr(torch, self._reference.dtype)]

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_HEALTH_INTERVAL_S)
        if not self._stopping:
            logger.critical("vLLM's process has died; its output is in this log")
            self.died.set()
            self._end_all(EngineDead("the engine has died; the log has the cause"))


def check_installed() -> None:
    """Raises ValueError."""
    if not is_installed():
        raise ValueError(
            'engine: "vllm" needs vLLM, which is not installed here: pip install "tinsmith[vllm]", or take "torch"'
        )


def _start(config: SamplerConfig, reference: Reference, metrics: SamplerMetrics, speed: Speed) -> Any:
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
    stats = StepStats(metrics, speed, cache_bytes=args.kv_cache_memory_bytes)
    try:
        return AsyncLLM.from_engine_args(args, stat_loggers=[lambda _config, _index=0: stats])
    except RuntimeError as error:  # what its process died of is in the log
        raise UnsupportedModel(f"{reference.architecture}: vLLM does not start with it: {error}") from error


def _lora_request(version: Version) -> Any:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    assert isinstance(version.weights, SharedAdapter)
    number = version.weights.number
    return LoRARequest(f"{version.version_id}#{number}", number, f"memory:{number}")


def _outcome(task: Task) -> Result | ServiceError:
    try:
        return task.result()
    except ServiceError as error:
        return error
