"""Continuous batching on the modelling code that the trainer runs.

One compute thread repeats: take commands, one step of the batch, deliver its output. A request joins the batch at the
next step and leaves it at its last token. The event loop checks requests, owns the versions and receives results. The
two threads share nothing but the queue of commands, and what they hand over in commands and outputs.

An error that concerns one request fails that request (SequenceGroup.fail). If a step finds no memory, its tokens are
computed anew with fewer sequences at once (Scheduler.retreat). After any other error the state is unknown: the engine
dies, and the process with it, and the gateway sends its requests to another sampler.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import abc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import OpenRequests
from sampler_service.core.queue_status import Progress, Queue, status_of
from sampler_service.core.request import Delta, Generation, Params, QueueStatus, Request, RequestLimits, StopCondition
from sampler_service.core.self_check import Comparison
from sampler_service.core.sequence import SequenceGroup, StateUnknown, StopRules
from sampler_service.core.sizing import Sizes, resolve_device, resolve_dtype
from sampler_service.core.trial import Trial
from sampler_service.core.versions import Version, VersionStore
from sampler_service.eos import eos_token_ids
from sampler_service.metrics import SamplerMetrics
from sampler_service.threads import in_thread
from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS
from sampler_service.torch_engine.runner import Runner
from sampler_service.torch_engine.scheduler import Scheduler, StepOutput
from sampler_service.torch_engine.waiting import Job
from tinsmith.cores import Cores, yield_to_event_loops
from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import Adapter, AdapterConfig, Group, Target
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.self_check import TOLERANCE, random_adapter
from tinsmith.pictures.processing import Processor
from tinsmith.rpc.paths import run_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """Computes the jobs of one request."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request with an error."""

    group: SequenceGroup
    error: ServiceError


@dataclass(frozen=True, slots=True)
class BeginTrial:
    """Computes the prompt of a request, and nothing else."""

    group: SequenceGroup


@dataclass(frozen=True, slots=True)
class EndTrial:
    """Computes all requests again."""

    group: SequenceGroup


@dataclass(frozen=True, slots=True)
class Move:
    """Lets the sequences of some requests go on with another version."""

    groups: list[SequenceGroup]
    version: Version
    future: asyncio.Future[int]
    """Future that comes back in the StepOutput, with the number of sequences that have moved."""


@dataclass(frozen=True, slots=True)
class ForgetVersion:
    """Drops the graphs and prefixes of a version that no request uses any more."""

    namespace: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class ForgetWarmUp:
    """Drops the speed and the prefixes of the requests that warm the engine up."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the compute thread."""


Command = Add | Cancel | BeginTrial | EndTrial | Move | ForgetVersion | ForgetWarmUp | Stop


@contextmanager
def _at(groups: Collection[SequenceGroup]) -> Iterator[None]:
    """A context that turns an error of its block into a StateUnknown with these requests. A StateUnknown and lack of
    memory pass unchanged."""
    try:
        yield
    except (StateUnknown, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise StateUnknown(groups) from error


class TorchEngine:
    """A SamplingEngine. `load` makes it, on the event loop to which it delivers."""

    name = "torch"

    def __init__(
        self,
        base: BaseModel,
        sizes: Sizes,
        limits: RequestLimits,
        config: SamplerConfig,
        metrics: SamplerMetrics,
        cores: Cores,
    ) -> None:
        self.base = base
        self.metrics = metrics
        self.limits = limits
        self.eos_token_ids = eos_token_ids(base.path, base.config)
        self.store = VersionStore(max_bytes=config.adapter_memory_bytes, metrics=metrics.versions, on_gone=self._forget)
        self.requests = OpenRequests(
            config,
            limits,
            StopRules(base.path, self.eos_token_ids),
            self.store,
            metrics.requests,
            cancel=self._cancel,
            release=self._release,
        )
        self._queue = Queue()
        self._progress = Progress()
        """The newest progress that the compute thread has reported."""
        self.scheduler = Scheduler(sizes, metrics=metrics)
        self._runner = Runner(base, self.scheduler.kv.caches, metrics=metrics, cores=cores)
        self._cores = cores
        self._loop = asyncio.get_running_loop()
        self.commands: SimpleQueue[Command] = SimpleQueue()
        """Commands for the compute thread."""
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    @classmethod
    async def load(cls, config: SamplerConfig, metrics: SamplerMetrics) -> TorchEngine:
        """Loads the base model, starts the compute thread and runs a first request through it.

        Raises UnsupportedModel, ValueError for an invalid cores_page, or OSError when there is no such model or its
        files are damaged.
        """
        cores = Cores(config.cores_page, most=config.num_threads, set_threads=torch.set_num_threads)
        logger.info("%s", cores)
        device = torch.device(resolve_device(config.device))
        dtype = resolve_dtype(config.dtype, device)
        base = await in_thread(
            lambda: BaseModel.load(
                config.base_model,
                device=device,
                dtype=dtype,
                prepack=config.prepack,
                quantize=config.quantize,
                pictures=config.pictures,
                pages=config.base_pages,
            )
        )
        if base.why_not_cached:
            raise UnsupportedModel(f"{base.architecture}: the torch engine cannot draw from it: {base.why_not_cached}")
        cores.tokens_per_thread = base.tokens_per_thread
        sizes = Sizes.of(base, config)
        limits = RequestLimits(
            vocab_size=base.vocab_size,
            max_context_length=base.max_context_length,
            max_kv_tokens=sizes.max_kv_tokens,
            max_num_samples=config.max_num_samples,
            max_topk_logprobs=config.max_topk_logprobs,
        )
        logger.info("%s on %s in %s, %s", base.architecture, device, dtype, sizes)
        engine = cls(base, sizes, limits, config, metrics, cores)
        engine._thread.start()
        try:
            await engine._warm_up()
        except UnsupportedModel:
            await engine.stop()
            raise
        return engine

    @property
    def device(self) -> str:
        return self.base.device.type

    @property
    def weights_device(self) -> str:
        return self.base.device.type

    @property
    def targets(self) -> abc.Sequence[Target]:
        return self.base.targets

    @property
    def refused_groups(self) -> abc.Mapping[Group, str]:
        return self.base.refused_groups

    @property
    def processor(self) -> Processor | None:
        return self.base.tower and self.base.tower.processor

    @property
    def why_no_pictures(self) -> str:
        return self.base.why_no_pictures

    @property
    def max_running(self) -> int:
        return self.scheduler.planner.max_running

    async def submit(self, request: Request, *, stream: bool = False, request_id: str = "") -> Generation:
        group = await self.requests.accept(request, stream=stream, request_id=request_id)
        with self.requests.lost_without(group):
            jobs = self._jobs(group)
        if request.on_trial:
            generation = group.generation
            generation.trial = Trial(
                begin=lambda: self.commands.put(BeginTrial(group)),
                end=lambda: self.commands.put(EndTrial(group)),
                expire=lambda: generation.push(Delta(0, [], [])),
            )
        self.commands.put(Add(jobs))
        return group.generation

    def describe(self, request_id: str) -> QueueStatus | None:
        return status_of(request_id, self.requests, self.requests.waiting, self._progress, self._queue)

    def full_weights(self, flat: Tensor) -> FullWeights:
        return FullWeights(self.base, flat)

    def memory_for(self, layout: Weights) -> None:
        """Returns None: a version may be received into any memory, because install() moves it to the device."""

    def make_room(self, version_id: str, num_bytes: int) -> list[Weights]:
        return self.store.make_room(version_id, num_bytes)

    async def install(
        self, version_id: str, weights: Weights, *, on_probation: bool = False, checksum: str = ""
    ) -> None:
        if weights.flat.device != self.base.device:
            flat = await in_thread(lambda: weights.flat.to(self.base.device))
            weights = weights.like(flat)
        if isinstance(weights, Adapter) and self.base.dtype != weights.flat.dtype:
            weights = await in_thread(partial(weights.rounded, self.base.dtype))
        self.store.install(version_id, weights, on_probation=on_probation, checksum=checksum)

    async def move(self, run_id: str, version_id: str) -> int:
        behind = self.requests.behind(run_id, version_id)
        if not behind:
            return 0
        moved: asyncio.Future[int] = self._loop.create_future()
        self.requests.fail_at_end(moved)
        self.commands.put(Move(behind, behind[0].held[-1], moved))
        return await moved

    async def stop(self) -> None:
        """Ends after the step that is being computed; unfinished requests fail with NotReady."""
        self.requests.begin_stop()
        self.commands.put(Stop())
        await in_thread(self._thread.join)
        self.requests.end_stop()

    def _jobs(self, group: SequenceGroup) -> list[Job]:
        """The jobs of a request: one, or several if the samples cannot all run at once. Only the first job scores the
        prompt."""
        sequences = group.sequences
        planner = self.scheduler.planner
        together = min(planner.max_running, planner.max_kv_tokens // sequences[0].need)
        parts = [sequences[n : n + together] for n in range(0, len(sequences), together)]
        length, request = len(group.request.prompt), group.request
        run = f"{run_of(request.version_id)} {request.owner}"
        return [Job(group, length, part, scored=n == 0, run=run) for n, part in enumerate(parts)]

    async def _warm_up(self) -> None:
        """Short requests on the base model and on an adapter, so that no user meets a first-time pause.

        Raises UnsupportedModel when what they draw is not what the model says about it.
        """
        prompt = np.arange(min(BLOCK_TOKENS, self.limits.vocab_size, self.limits.max_length - 4), dtype=np.int32)
        groups = self.base.groups
        config = AdapterConfig(
            rank=1, train_attn="attn" in groups, train_mlp="mlp" in groups, train_unembed="unembed" in groups, seed=0
        )
        version_ids = [""]
        if groups:
            self.store.install("warm-up", random_adapter(config, self.base.targets, self.base.device))
            version_ids.append("warm-up")
        params = Params(max_tokens=2, top_p=0.9, stop=StopCondition())
        requests = [Request(prompt, one, num_samples=2, params=params, prompt_logprobs=True) for one in version_ids]
        for request in requests:  # one after the other: max_waiting may be 1
            for one in Comparison.of(request, await (await self.submit(request)).result()):
                scored = await (await self.submit(one.request)).result()
                one.check(scored, tolerance=TOLERANCE[self.base.dtype])
        self.store.remove("warm-up")
        self.commands.put(ForgetWarmUp())

    def _cancel(self, group: SequenceGroup, error: ServiceError) -> None:
        self.commands.put(Cancel(group, error))

    def _forget(self, version: Version) -> None:
        self.commands.put(ForgetVersion(version.namespace, version.weights))

    def _release(self, group: SequenceGroup) -> None:
        for version in group.held:
            self.store.release(version)
        group.held.clear()

    # The compute thread.

    def _run(self) -> None:
        try:
            yield_to_event_loops()
            going_on = True
            while going_on:
                if self.scheduler.idle:
                    self._cores.end()
                going_on = self._take()
                if not (self.scheduler.idle or self.scheduler.is_held):
                    self._step()
                with _at(self.scheduler.groups):
                    self.scheduler.note_progress()
                    self._post(self.scheduler.take_output())
        except BaseException as error:
            logger.critical("the compute thread has died", exc_info=True)
            self._loop.call_soon_threadsafe(self._died, error, self.scheduler.take_output())

    def _take(self) -> bool:
        """Executes the commands that have come, and waits for one if nothing runs. Returns False when the thread is to
        end after this step."""
        wait = self.scheduler.idle or self.scheduler.is_held
        while wait or not self.commands.empty():
            wait = False
            command = self.commands.get()
            if isinstance(command, Stop):
                return False
            self._execute(command)
        return True

    def _execute(self, command: Command) -> None:
        scheduler = self.scheduler
        match command:
            case Add():
                with _at([command.jobs[0].group]):
                    scheduler.add(command.jobs)
            case Cancel():
                with _at([command.group]):
                    scheduler.cancel(command.group, command.error)
            case BeginTrial():
                scheduler.begin_trial(command.group)
            case EndTrial():
                scheduler.end_trial(command.group)
            case Move():
                with _at(command.groups):
                    scheduler.move(command.groups, command.version, command.future)
            case ForgetVersion():
                scheduler.forget_version(command.namespace)
                self._runner.forget(command.weights)
            case ForgetWarmUp():
                scheduler.forget_warm_up()

    def _step(self) -> None:
        try:
            with _at(self.scheduler.groups):
                batch = self.scheduler.schedule()
            if not (batch.running or batch.pieces):
                return
            drawn = self._runner.run(batch)
            self.scheduler.update(batch, drawn)
            return
        except (torch.OutOfMemoryError, MemoryError) as error:
            logger.warning("a step found no memory; it is tried again with fewer sequences", exc_info=error)
            found = error.with_traceback(None)  # the frames of the error hold tensors
        self._runner.clear()
        self.scheduler.retreat(found)
        self._runner.check_alive()

    def _post(self, output: StepOutput) -> None:
        if output:
            self._loop.call_soon_threadsafe(self._deliver, output)

    # The event loop again.

    def _deliver(self, output: StepOutput) -> None:
        with self.requests.dying_of_errors(), _at(output.groups):
            self._hand_over(output)

    def _hand_over(self, output: StepOutput) -> None:
        self._progress = output.progress or self._progress
        for group, started_at in output.admitted:
            self.requests.admit(group, started_at)
        for group, version in output.left:
            if version in group.held:  # the request may have ended meanwhile
                group.held.remove(version)
                self.store.release(version)
        for moved, num_sequences in output.moved:
            if not moved.done():  # the caller of the move may have left
                moved.set_result(num_sequences)
        for group in output.on_trial:
            if group.generation.trial is not None:
                group.generation.trial.grant()
        for group, delta in output.deltas:
            group.generation.push(delta)
        for group, outcome in output.ended:
            self.requests.end(group, outcome)

    def _died(self, error: BaseException, output: StepOutput) -> None:
        """`output`: output of the step that has failed, which may have begun requests."""
        try:
            for group, started_at in output.admitted:
                self.requests.admit(group, started_at)
        finally:
            self.requests.die(error)
