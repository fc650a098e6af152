"""Receiving side of the weight channel.

A trainer forms a group with its samplers (one for each trainer and epoch), announces a version, sends its buffer in
buckets, and has it installed on probation; once it has been measured, it is confirmed. Whatever fails before that last
step leaves nothing that is served; after a failed transfer the group is dropped and the trainer forms the next epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import grpc.aio
import torch
from torch import Tensor

from sampler_service import convert
from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot, SamplingEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.threads import in_thread
from sampler_service.weights.weight_links import ProbedConnections, check_group, join
from tinsmith.errors import (
    DataCorrupted,
    EngineDead,
    FailedPrecondition,
    InvalidRequest,
    OutOfCapacity,
    ServiceError,
    within,
)
from tinsmith.faults import is_lasting_fault
from tinsmith.lora_config import config_from_proto
from tinsmith.modeling.adapter import Adapter, AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.full_weights import Weights
from tinsmith.quantization import described
from tinsmith.rpc import logs
from tinsmith.v1 import types_pb2 as types
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.v1 import weight_sync_pb2_grpc
from tinsmith.weight_channel.buckets import receive
from tinsmith.weight_channel.transport import Inlet

logger = logging.getLogger(__name__)

_PREPARE_AFTER_S = 0.1

_DTYPES = {types.DTYPE_FLOAT32: torch.float32, types.DTYPE_BFLOAT16: torch.bfloat16}

Context = grpc.aio.ServicerContext[Any, Any]
_Verb = pb.StartWeightUpdateRequest | pb.UpdateWeightsRequest | pb.FinishWeightUpdateRequest


@dataclass(slots=True)
class _Update:
    """A version on its way."""

    version_id: str
    weights: Weights
    """The weights, over the buffer that is being filled."""
    sent_dtype: torch.dtype
    bucket_bytes: int
    started: float
    receiving: bool = False
    received: str = ""
    """Checksum of all received bytes, once they have arrived."""
    in_new_memory: bool = False


@dataclass(slots=True)
class _Link:
    """The connection to one trainer."""

    inlet: Inlet
    update: _Update | None = None

    @property
    def epoch(self) -> int:
        return self.inlet.epoch


class WeightSyncServicer(weight_sync_pb2_grpc.WeightSyncServiceServicer):
    def __init__(self, config: SamplerConfig, slot: EngineSlot, metrics: SamplerMetrics) -> None:
        self.slot = slot
        self._config = config
        self._metrics = metrics
        self._probed = ProbedConnections()
        self._links: dict[str, _Link] = {}
        """The links, by trainer id."""
        self._spare: Tensor | None = None
        """A buffer for the next adapter, in memory that has been used."""
        self._preparing: asyncio.Task[None] | None = None

    async def ProbeWeightTransfer(
        self, request: pb.ProbeWeightTransferRequest, context: Context
    ) -> pb.ProbeWeightTransferResponse:
        return self._probed.probe(request, device=self.slot.get().weights_device)

    async def InitWeightTransfer(
        self, request: pb.InitWeightTransferRequest, context: Context
    ) -> pb.InitWeightTransferResponse:
        check_group(request, device=self.slot.get().weights_device)
        trainer_id = request.trainer_id
        if (link := self._links.get(trainer_id)) is not None:
            if link.epoch >= request.epoch:  # from a time when this process, or the network, had stopped
                raise FailedPrecondition(
                    f"epoch: {request.epoch} is not above that of the present group, {link.epoch}", epoch=link.epoch
                )
            self._drop(trainer_id, link)
        with self._ending_with_device():
            inlet = await join(
                request, self._probed, host=self._config.channel_host, timeout_s=self._config.channel_timeout_s
            )
        link = self._links.get(trainer_id)
        if link is not None and link.epoch > inlet.epoch:  # formed meanwhile
            inlet.close()
            raise FailedPrecondition(f"epoch: {inlet.epoch} is over, that of the present group is {link.epoch}")
        self._links[trainer_id] = _Link(inlet)
        logger.info("joined group %d of trainer %s by %s", inlet.epoch, trainer_id, request.backend)
        return pb.InitWeightTransferResponse()

    async def StartWeightUpdate(
        self, request: pb.StartWeightUpdateRequest, context: Context
    ) -> pb.StartWeightUpdateResponse:
        link = self._link(request)
        if link.update is not None and link.update.receiving:
            raise FailedPrecondition(f"version {link.update.version_id!r} of this trainer is being received")
        link.update = None  # a version that was announced before gives its buffer back
        link.update = self._begin(request, self.slot.get(), device=link.inlet.device)
        return pb.StartWeightUpdateResponse()

    def _begin(self, request: pb.StartWeightUpdateRequest, engine: SamplingEngine, *, device: str) -> _Update:
        if not request.version_id:
            raise InvalidRequest("version_id: is empty", field="version_id")
        if request.base_model not in self._config.model_names:
            raise InvalidRequest(
                f"base_model: {request.base_model!r} is not served here; this sampler has "
                f"{list(self._config.model_names)}",
                field="base_model",
            )
        config = config_from_proto(request.lora_config, max_rank=self._config.max_lora_rank)
        self._check_quantize(request.quantize)
        sent_dtype = _sent_dtype(request, config)
        layout = _layout(config, engine)
        _check_layout(request, layout.specs())
        evicted = [weights.flat for weights in engine.make_room(request.version_id, layout.num_bytes)]
        weights = engine.memory_for(layout)
        if weights is None:
            spare, self._spare = self._spare, None
            try:
                with self._ending_with_device():
                    flat = _buffer(layout.flat, torch.device(device), evicted if spare is None else [*evicted, spare])
            except RuntimeError as error:  # of torch's allocators
                raise OutOfCapacity(
                    f"there is no memory on this sampler for the {layout.num_bytes} bytes of version "
                    f"{request.version_id!r} ({error})"
                ) from error
            weights = layout.like(flat)
        update = _Update(request.version_id, weights, sent_dtype, request.bucket_bytes, time.perf_counter())
        update.in_new_memory = not evicted
        return update

    def _check_quantize(self, theirs: str) -> None:
        """Raises InvalidRequest for a version that belongs to other numbers than those of this sampler's base model."""
        ours = self._config.quantize or ""
        if theirs != ours:
            raise InvalidRequest(
                f"quantize: the trainer's base weights are {described(theirs)}, this sampler's are {described(ours)}; "
                "set TRAINER_QUANTIZE and SAMPLER_QUANTIZE to one value (`tinsmith up --quantize` sets both)",
                field="quantize",
            )

    async def _prepare(self, flat: Tensor) -> None:
        """Prepares memory for the next adapter of this size. It writes to the memory, because its first use may take
        longer than a transfer. It waits at first, so that the canary and the first samples of the newest version are
        not delayed."""
        await asyncio.sleep(_PREPARE_AFTER_S)
        try:
            self._spare = await in_thread(lambda: torch.empty_like(flat).zero_())
        except RuntimeError as error:
            logger.debug("no memory for a spare buffer: %s", error)

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        link, update = self._update(request)
        if update.receiving or update.received:
            raise FailedPrecondition(f"version {update.version_id!r} is being received already")
        flat = update.weights.flat
        update.receiving = True
        try:
            with self._ending_with_device():
                received = await in_thread(
                    lambda: receive(link.inlet, flat, dtype=update.sent_dtype, bucket_bytes=update.bucket_bytes)
                )
        except BaseException as error:
            # The group is dropped even when this call is cancelled, because nobody knows how far the trainer has got.
            self._drop(request.trainer_id, link)
            # The frames of an error live until Python looks for cycles, and would keep the buffer.
            traceback.clear_frames(error.__traceback__)
            link.update = None
            del update, flat
            if isinstance(error, RuntimeError):
                self._metrics.versions.publishes.labels("GROUP_LOST").inc()
                raise FailedPrecondition(
                    f"group {link.epoch} of trainer {request.trainer_id!r} broke while version "
                    f"{request.version_id!r} was received; form the next epoch ({error})"
                ) from error
            raise
        update.receiving = False
        update.received = received
        num_bytes = flat.numel() * update.sent_dtype.itemsize
        self._metrics.versions.publish_bytes.inc(num_bytes)
        return pb.UpdateWeightsResponse(num_bytes=num_bytes)

    async def FinishWeightUpdate(
        self, request: pb.FinishWeightUpdateRequest, context: Context
    ) -> pb.FinishWeightUpdateResponse:
        link, update = self._update(request)
        if not update.received:
            raise FailedPrecondition(f"version {update.version_id!r} has not been received")
        link.update = None
        try:
            with self._ending_with_device():
                await in_thread(link.inlet.check)
        except RuntimeError as error:
            self._drop(request.trainer_id, link)
            self._metrics.versions.publishes.labels("GROUP_LOST").inc()
            raise FailedPrecondition(f"version {update.version_id!r} is not wanted any more: {error}") from error
        self._link(request)  # a newer group may have been formed meanwhile
        try:
            if update.received != request.checksum:
                raise DataCorrupted(
                    f"version {update.version_id!r}: the received buffer has checksum {update.received}, the sent one "
                    f"{request.checksum}"
                )
            await self.slot.get().install(
                update.version_id, update.weights, on_probation=True, checksum=update.received
            )
        except ServiceError as error:
            self._metrics.versions.publishes.labels(error.reason).inc()
            raise
        is_idle = self._preparing is None or self._preparing.done()
        if is_idle and update.in_new_memory and update.weights.config.rank and update.weights.flat.device.type == "cpu":
            self._preparing = asyncio.create_task(self._prepare(update.weights.flat))
        self._metrics.versions.publishes.labels("ok").inc()
        self._metrics.versions.publish_time.observe(time.perf_counter() - update.started)
        logger.info("version %s is here, on probation (%d bytes)", update.version_id, update.weights.num_bytes)
        return pb.FinishWeightUpdateResponse(version_id=update.version_id)

    async def SampleOnProbation(
        self, request: pb.SampleOnProbationRequest, context: Context
    ) -> pb.SampleOnProbationResponse:
        engine = self.slot.get()
        read = partial(
            convert.request_from_proto,
            request.request,
            processor=engine.processor,
            why_no_pictures=engine.why_no_pictures,
            max_tokens=engine.limits.max_length,
            on_probation=True,
        )
        with within("request"):
            # The canary of an adapter on the vision tower has a picture, which is decoded beside the event loop.
            asked = await in_thread(read)
            generation = await engine.submit(asked, stream=False, request_id=logs.request_id.get())
            response = convert.response_to_proto(await generation.result(), request.request)
        logger.info("sample of version %s, which is on probation: ok", asked.version_id)
        return pb.SampleOnProbationResponse(response=response)

    async def ConfirmVersion(self, request: pb.ConfirmVersionRequest, context: Context) -> pb.ConfirmVersionResponse:
        self.slot.get().store.confirm(request.version_id)
        logger.info("version %s is visible", request.version_id)
        return pb.ConfirmVersionResponse()

    async def RemoveVersion(self, request: pb.RemoveVersionRequest, context: Context) -> pb.RemoveVersionResponse:
        self.slot.get().store.remove(request.version_id)
        return pb.RemoveVersionResponse()

    @contextmanager
    def _ending_with_device(self) -> Iterator[None]:
        """A context that lets the engine die when its block meets a fault after which the device can compute no
        more."""
        try:
            yield
        except (RuntimeError, FailedPrecondition) as error:
            cause = error.__cause__ if isinstance(error, FailedPrecondition) else error
            if cause is not None and is_lasting_fault(cause):
                self.slot.get().requests.die(cause)
                raise EngineDead(f"the engine has died: {cause}", computing="no") from error
            raise

    def _link(self, request: _Verb) -> _Link:
        link = self._links.get(request.trainer_id)
        if link is None:
            raise FailedPrecondition(
                f"trainer {request.trainer_id!r} has no group with this sampler; call InitWeightTransfer"
            )
        if link.epoch != request.epoch:
            raise FailedPrecondition(f"epoch: {request.epoch} is not the group that this sampler is in ({link.epoch})")
        return link

    def _update(self, request: pb.UpdateWeightsRequest | pb.FinishWeightUpdateRequest) -> tuple[_Link, _Update]:
        link = self._link(request)
        if link.update is None or link.update.version_id != request.version_id:
            raise FailedPrecondition(f"version {request.version_id!r} was not announced; call StartWeightUpdate")
        return link, link.update

    def _drop(self, trainer_id: str, link: _Link) -> None:
        link.inlet.close()
        if self._links.get(trainer_id) is link:
            del self._links[trainer_id]


def _sent_dtype(request: pb.StartWeightUpdateRequest, config: AdapterConfig) -> torch.dtype:
    """The type in which weights are sent. Raises InvalidRequest for another type, and for a bucket size that does not
    fit it."""
    name = types.Dtype.Name(request.dtype)
    dtype = _DTYPES.get(request.dtype)
    if dtype is None or (config.rank and dtype != torch.float32):
        wanted = "DTYPE_FLOAT32, the type of adapters" if config.rank else "DTYPE_FLOAT32 or DTYPE_BFLOAT16"
        raise InvalidRequest(f"dtype: {name} is not {wanted}", field="dtype")
    if request.bucket_bytes < 0 or request.bucket_bytes % dtype.itemsize:
        raise InvalidRequest(
            f"bucket_bytes: {request.bucket_bytes} is not a whole number of {name} values of {dtype.itemsize} bytes",
            field="bucket_bytes",
        )
    return dtype


def _check_layout(request: pb.StartWeightUpdateRequest, specs: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    sent = [(tensor.name, tuple(tensor.shape)) for tensor in request.tensors]
    if len(sent) != len(specs):
        raise InvalidRequest(f"tensors: {len(sent)} were announced, this base model takes {len(specs)}")
    for ours, theirs in zip(specs, sent, strict=True):
        if ours != theirs:
            raise InvalidRequest(
                f"tensors: {theirs[0]!r} of shape {list(theirs[1])} stands where this base model has {ours[0]!r} "
                f"of shape {list(ours[1])}",
                field="tensors",
            )


def _layout(config: AdapterConfig, engine: SamplingEngine) -> Weights:
    """Weights on the meta device: without memory."""
    if config.rank:
        numel = num_elements(config, chosen_targets(config, engine.targets, engine.refused_groups))
        return Adapter(config, engine.targets, torch.empty(numel, device="meta"))
    layout = engine.full_weights(torch.empty(0, device="meta"))
    numel = sum(prod(shape) for _, shape in layout.specs())
    # The weights have the type that this engine computes in, whatever type is sent.
    return layout.like(torch.empty(numel, dtype=layout.sent_dtype, device="meta"))


def _buffer(like: Tensor, device: torch.device, spare: Sequence[Tensor]) -> Tensor:
    """A spare buffer that fits, or else a new one. The first use of new memory takes longer than receiving a version.

    Raises RuntimeError when there is no memory.
    """
    for flat in spare:
        if (flat.numel(), flat.dtype, flat.device.type) == (like.numel(), like.dtype, device.type):
            return flat.detach()
    return torch.empty_like(like, device=device)
