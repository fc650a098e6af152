"""A gateway on a real port, in front of small gRPC services that keep the contract in memory."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.http.server import GatewayServer
from gateway.moving import RunMover
from gateway.reaper import Reaper
from tests.support import batches
from tests.support.databases import lay_migrated_database
from tinsmith.errors import (
    BudgetExceeded,
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    ModelMoved,
    ModelNotFound,
    NotFound,
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
    UnknownLossFn,
    VersionGone,
    VersionNotLoaded,
)
from tinsmith.rpc.server import ACCEPTED, REPEATED, Server
from tinsmith.rpc.times import duration, timestamp
from tinsmith.rpc.tls import Certificates
from tinsmith.v1 import (
    sampler_pb2,
    sampler_pb2_grpc,
    trainer_admin_pb2,
    trainer_admin_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)

BASE_MODEL = "Qwen/Qwen3-8B"
ALIAS = "tinsmith/eight"
VOCAB_SIZE = 100_000
KINDS = {
    types_pb2.CHECKPOINT_KIND_TRAINING: "weights",
    types_pb2.CHECKPOINT_KIND_SAMPLER: "sampler_weights",
    types_pb2.CHECKPOINT_KIND_EPHEMERAL: "ephemeral",
    types_pb2.CHECKPOINT_KIND_EXTERNAL: "external_weights",
}
FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": bytes(range(256)) * 3,
    "optimizer.safetensors": b"o",
}
"""Files of every checkpoint of the fake trainer. Only those of kind TRAINING have the last."""


@dataclass
class FakeModel:
    info: trainer_pb2.ModelInfo
    requests: dict[int, bytes] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


GIVEN_UP = b""
"""In the place of a request that has not arrived."""


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer, trainer_admin_pb2_grpc.TrainerAdminServiceServicer):
    """Its fields are what lies on disk: a restarted one gets the same object."""

    def __init__(self) -> None:
        self.models: dict[str, FakeModel] = {}
        self.orders: dict[str, list[int]] = {}
        """Operations of each model in the order in which they ran."""
        self.checkpoints: dict[str, types_pb2.CheckpointInfo] = {}
        self.failures_seen: list[int | None] = []
        """failure_seen of each optim_step."""
        self.damaged: set[str] = set()
        """Names of files that are not what was written."""
        self.read: list[str] = []
        """Names of files that were sent."""
        self.imported: list[bytes] = []
        """Pieces of the newest import."""
        self.import_bytes = 150
        """Unpacked size of each import."""
        self.deleted_models: list[str] = []
        self.deletion = asyncio.Event()
        """Set by every DeleteModel and DeleteCheckpoint."""
        self.on_deletion: Callable[[], Awaitable[object]] | None = None
        """Is called before the next checkpoint is deleted."""
        self.on_copy: Callable[[], Awaitable[object]] | None = None
        """Is called after each CopyCheckpoint, before its answer."""
        self.published: list[str] = []
        self.certificates: dict[str, types_pb2.PublishCertificate] = {}
        """By version."""
        self.samplers: list[FakeSampler] = []
        self.go = asyncio.Event()
        """Operations wait for it after their acknowledgement."""
        self.go.set()
        self.status = types_pb2.QueueStatus(running=True)
        """Describes every operation that waits."""
        self.checked: list[str] = []
        """Names of the custom losses that were checked; one of the name "bad" is refused."""
        self.is_loading = False
        self.is_full = False
        self.max_queued_operations = 1024
        self.forgotten: set[int] = set()
        """seq_ids whose results have expired."""
        self.trainable_groups = types_pb2.AdapterGroup.values()[1:]
        self.one_by_one = ""
        self.picture_counting: trainer_pb2.PictureCounting | None = None
        self.trainer_id = uuid.uuid4().hex
        self.store_id = "5" * 32
        self.fingerprint = {"base_weights": "ab"}
        self.reserved_bytes = 0
        self.queued_s = 0.0
        self.packages: dict[str, FakeModel] = {}
        """Released models by the id of the move, in the store that trainers share."""
        self.moved: dict[str, tuple[str, str]] = {}
        """Models that were released: the ids of the move and of the trainer that takes them over."""
        self.moving_fails: list[tuple[str, ServiceError]] = []
        """Next errors of the RPCs of moves, before they do anything."""
        self.move_calls: list[str] = []
        """The RPCs of moves that were called."""
        self.lost: dict[str, FakeTrainer] = {}
        """By trainer_id, other trainers in the same database that are dead, so that they can be fenced."""
        self.is_fenced = False
        self.version_homes = 0
        self.boot_id = ""

    async def GetTrainerInfo(self, request: Any, context: Any) -> Any:
        return trainer_pb2.GetTrainerInfoResponse(
            base_models=[BASE_MODEL, ALIAS],
            max_context_length=4096,
            max_lora_rank=64,
            vocab_size=1000,
            architecture="Qwen3ForCausalLM",
            loss_fns=["cross_entropy"],
            device="cpu",
            boot_id=self.boot_id,
            trainable=bool(self.trainable_groups),
            trainable_groups=self.trainable_groups,
            one_by_one=self.one_by_one,
            picture_counting=self.picture_counting,
            version_homes=self.version_homes,
            trainer_id=self.trainer_id,
            store_id=self.store_id,
            fingerprint=self.fingerprint,
            reserved_bytes=self.reserved_bytes,
            reservable_bytes=1000,
            num_models=len(self.models),
            queued_time=duration(self.queued_s),
        )

    # Moves

    def _check_not_moved(self, model_id: str) -> None:
        if model_id in self.moved:
            raise ModelMoved(f"{model_id} moves", trainer_id=self.moved[model_id][1])

    def _step(self, rpc: str) -> None:
        self.move_calls.append(rpc)
        if self.moving_fails and self.moving_fails[0][0] == rpc:
            raise self.moving_fails.pop(0)[1]

    async def ReleaseModel(self, request: Any, context: Any) -> Any:
        self._step("ReleaseModel")
        if request.model_id not in self.moved:
            model = self.models.pop(request.model_id, None)
            if model is None:
                raise ModelNotFound(f"no model {request.model_id}")
            self.moved[request.model_id] = request.move_id, request.trainer_id
            self.packages[request.move_id] = FakeModel(model.info, model.requests, model.results)
            async with model.changed:
                model.changed.notify_all()
        return trainer_admin_pb2.ReleaseModelResponse()

    async def FenceTrainer(self, request: Any, context: Any) -> Any:
        self._step("FenceTrainer")
        if request.trainer_id not in self.lost:
            raise FailedPrecondition(f"no trainer {request.trainer_id}")
        self.lost[request.trainer_id].is_fenced = True
        return trainer_admin_pb2.FenceTrainerResponse()

    async def AdoptModel(self, request: Any, context: Any) -> Any:
        self._step("AdoptModel")
        if request.model_id not in self.models:
            lost = self.lost.get(request.fenced_trainer_id)
            if lost is not None and lost.is_fenced and request.model_id in lost.models:
                model = self.models[request.model_id] = lost.models.pop(request.model_id)
            elif request.move_id in self.packages:
                model = self.models[request.model_id] = self.packages[request.move_id]
            else:
                raise FailedPrecondition(f"no package of {request.model_id}")
            for seq_id in [one for one in model.requests if one not in model.results]:
                asyncio.get_running_loop().create_task(
                    self._execute(model, seq_id, lambda: trainer_pb2.OptimStepResponse(metrics={"moved": 1.0}))
                )
        return trainer_admin_pb2.AdoptModelResponse()

    async def ForgetMove(self, request: Any, context: Any) -> Any:
        self._step("ForgetMove")
        self.packages.pop(request.move_id, None)
        if self.moved.get(request.model_id, ("", ""))[0] == request.move_id:
            del self.moved[request.model_id]
        return trainer_admin_pb2.ForgetMoveResponse()

    async def WaitResult(self, request: Any, context: Any) -> Any:
        self._check_not_moved(request.model_id)
        return await self._wait_result(request, context)

    async def _run(self, request: Any, context: Any, work: Any, *, seq_id: int) -> Any:
        if self.is_loading:
            raise NotReady("loading the base model")
        self._check_not_moved(request.model_id)
        model = self.models.get(request.model_id)
        if model is None:
            raise ModelNotFound(f"no model {request.model_id}")
        if seq_id in self.forgotten:
            raise ResultNotFound(f"seq_id {seq_id} was executed long ago; its result has expired")
        ahead = seq_id - len(model.results)
        if ahead > self.max_queued_operations:
            raise InvalidRequest(f"seq_id: {seq_id} is {ahead} ahead", field="seq_id")
        body = request.SerializeToString(deterministic=True)
        if self.is_full and seq_id not in model.requests:
            raise OutOfCapacity("256 operations are queued")
        metadata = (ACCEPTED, REPEATED) if seq_id in model.requests else (ACCEPTED,)
        if model.requests.setdefault(seq_id, body) != body:
            kind = "skip" if model.requests[seq_id] == GIVEN_UP else ""
            raise SequenceConflict(f"seq_id {seq_id} has another body", kind=kind)
        await context.send_initial_metadata(metadata)
        context.set_trailing_metadata((("x-tinsmith-ran", "1.5:2.5"),))
        asyncio.get_running_loop().create_task(self._execute(model, seq_id, work))
        return await self._result(model, seq_id)

    async def _execute(self, model: FakeModel, seq_id: int, work: Any) -> None:
        await self.go.wait()
        async with model.changed:
            await model.changed.wait_for(lambda: seq_id == 0 or seq_id - 1 in model.results)
            if seq_id not in model.results:
                try:
                    model.results[seq_id] = work()
                except ServiceError as error:
                    model.results[seq_id] = error
                self.orders.setdefault(model.info.model_id, []).append(seq_id)
            model.changed.notify_all()

    async def _result(self, model: FakeModel, seq_id: int) -> Any:
        async with model.changed:
            await model.changed.wait_for(lambda: seq_id in model.results or model.info.model_id not in self.models)
        if seq_id not in model.results:
            self._check_not_moved(model.info.model_id)
            raise ModelNotFound(f"model {model.info.model_id} was deleted")
        result = model.results[seq_id]
        if isinstance(result, ServiceError):
            raise result
        return result

    async def CreateModel(self, request: Any, context: Any) -> Any:
        if self.is_loading:
            raise NotReady("loading the base model")
        lora = request.lora_config
        if request.from_location:
            lora = self._checkpoint(request.from_location).lora_config
        elif not 0 <= lora.rank <= 64:
            raise InvalidRequest(f"lora_config.rank: {lora.rank} is outside 0 .. 64")
        info = trainer_pb2.ModelInfo(
            model_id=request.model_id,
            base_model=request.base_model,
            lora_config=lora,
            optimizer=request.optimizer or types_pb2.OPTIMIZER_ADAMW,
            user_metadata=request.user_metadata,
        )
        self.models.setdefault(request.model_id, FakeModel(info))
        return await self._run(request, context, lambda: trainer_pb2.CreateModelResponse(model=info), seq_id=0)

    async def GetModel(self, request: Any, context: Any) -> Any:
        if request.model_id not in self.models:
            raise ModelNotFound(f"no model {request.model_id}")
        model = trainer_pb2.ModelInfo(next_seq_id=len(self.models[request.model_id].results))
        model.MergeFrom(self.models[request.model_id].info)
        return trainer_pb2.GetModelResponse(model=model)

    async def DeleteModel(self, request: Any, context: Any) -> Any:
        self.deleted_models.append(request.model_id)
        self.deletion.set()
        for location in [one for one in self.checkpoints if one.startswith(f"{request.model_id}/ephemeral/")]:
            del self.checkpoints[location]
        for sampler in self.samplers:
            sampler.versions = {one for one in sampler.versions if not one.startswith(f"{request.model_id}@")}
        model = self.models.pop(request.model_id, None)
        if model is not None:
            async with model.changed:
                model.changed.notify_all()
        return trainer_pb2.DeleteModelResponse()

    async def ForwardBackward(self, request: Any, context: Any) -> Any:
        def work() -> Any:
            if request.loss_fn not in ("cross_entropy", "custom", "stable_reinforce"):
                raise UnknownLossFn(f"loss_fn: {request.loss_fn!r} is not one of cross_entropy")
            data, offsets = b"", [0]
            for datum in request.data:
                num_tokens = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
                data += struct.pack(f"<{num_tokens}f", *[-float(request.seq_id)] * num_tokens)
                offsets.append(len(data))
            logprobs = types_pb2.BatchedTensor(
                data=data, offsets=struct.pack(f"<{len(offsets)}q", *offsets), dtype=types_pb2.DTYPE_FLOAT32
            )
            record = types_pb2.ArrayRecord(
                type_tag="ArrayRecord", fields={"logprobs": logprobs}, num_datums=len(request.data)
            )
            return trainer_pb2.ForwardBackwardResponse(
                loss_fn_output_type="ArrayRecord",
                loss_fn_outputs=[record],
                metrics={"loss:sum": float(len(request.data))},
            )

        return await self._run(request, context, work, seq_id=request.seq_id)

    async def OptimStep(self, request: Any, context: Any) -> Any:
        self.failures_seen.append(request.failure_seen if request.HasField("failure_seen") else None)

        def work() -> Any:
            if request.WhichOneof("params") is None:
                raise InvalidRequest("params: is missing")
            return trainer_pb2.OptimStepResponse(metrics={"grad_norm:mean": float("nan")})

        return await self._run(request, context, work, seq_id=request.seq_id)

    async def SkipOperation(self, request: Any, context: Any) -> Any:
        def work() -> Any:
            raise InvalidRequest(request.reason)

        return await self._run(request, context, work, seq_id=request.seq_id)

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        def work() -> Any:
            name = request.name or f"e{request.seq_id}"
            location = f"{request.model_id}/{KINDS[request.kind]}/{name}"
            if name == "full":
                raise OutOfCapacity("no space left")
            if location in self.checkpoints and not request.overwrite:
                raise CheckpointExists(f"checkpoint {location} exists; use another name")
            model = self.models[request.model_id].info
            info = types_pb2.CheckpointInfo(
                location=location,
                kind=request.kind,
                model_id=request.model_id,
                base_model=model.base_model,
                lora_config=model.lora_config,
                optimizer=model.optimizer,
                encrypted=bool(request.age_recipients),
                version_id=f"{request.model_id}@{request.seq_id}",
                size_bytes=100,
                created_at=timestamp(time.time()),
                step=1,
                has_optimizer=True,
                ttl=request.ttl if request.HasField("ttl") else None,
                user_metadata=request.user_metadata,
            )
            self.checkpoints[location] = info
            if request.kind in (types_pb2.CHECKPOINT_KIND_SAMPLER, types_pb2.CHECKPOINT_KIND_EPHEMERAL):
                for sampler in self.samplers:
                    sampler.versions.add(info.version_id)
            return trainer_pb2.SaveCheckpointResponse(checkpoint=info, num_samplers=len(self.samplers))

        return await self._run(request, context, work, seq_id=request.seq_id)

    def _checkpoint(self, location: str) -> types_pb2.CheckpointInfo:
        if location not in self.checkpoints:
            raise CheckpointNotFound(f"no checkpoint {location}")
        return self.checkpoints[location]

    async def LoadCheckpoint(self, request: Any, context: Any) -> Any:
        def work() -> Any:
            return trainer_pb2.LoadCheckpointResponse(checkpoint=self._checkpoint(request.location))

        return await self._run(request, context, work, seq_id=request.seq_id)

    async def PublishCheckpoint(self, request: Any, context: Any) -> Any:
        if self._checkpoint(request.location).version_id != request.version_id:
            raise VersionGone(f"{request.location} holds another version")
        self.published.append(request.version_id)
        homes = self.samplers[: max(self.version_homes, request.num_samplers) or None]
        for sampler in homes:
            sampler.versions.add(request.version_id)
        return trainer_pb2.PublishCheckpointResponse(num_samplers=len(homes))

    async def GetCertificate(self, request: Any, context: Any) -> Any:
        info = self._checkpoint(request.location)
        if info.version_id not in self.certificates:
            raise NotFound(f"{request.location}: its version was never published")
        return trainer_pb2.GetCertificateResponse(certificate=self.certificates[info.version_id])

    async def GetCheckpoint(self, request: Any, context: Any) -> Any:
        info = self._checkpoint(request.location)
        files = [types_pb2.CheckpointFile(name=name, size_bytes=len(FILES[name])) for name in self._file_names(info)]
        return trainer_pb2.GetCheckpointResponse(checkpoint=info, files=files)

    def _file_names(self, info: types_pb2.CheckpointInfo) -> list[str]:
        is_training = info.kind == types_pb2.CHECKPOINT_KIND_TRAINING
        return [name for name in FILES if is_training or name.startswith("adapter_")]

    async def ReadCheckpointFile(self, request: Any, context: Any) -> Any:
        if request.name not in self._file_names(self._checkpoint(request.location)):
            raise CheckpointNotFound(f"no file {request.name} of {request.location}")
        if request.name in self.damaged:
            raise DataCorrupted(f"{request.location}/{request.name} is damaged")
        self.read.append(request.name)
        content = FILES[request.name][request.offset :]
        if request.HasField("num_bytes"):
            content = content[: request.num_bytes]
        for begin in range(0, len(content), 100):
            yield trainer_pb2.ReadCheckpointFileResponse(data=content[begin : begin + 100])

    async def VerifyCheckpoint(self, request: Any, context: Any) -> Any:
        info = self._checkpoint(request.location)
        names = self._file_names(info)
        problems = {name: f"{request.location}/{name} is damaged" for name in names if name in self.damaged}
        reply = await self.GetCheckpoint(request, context)
        return trainer_pb2.VerifyCheckpointResponse(files=reply.files, problems=problems)

    async def CopyCheckpoint(self, request: Any, context: Any) -> Any:
        if request.destination in self.checkpoints:
            raise CheckpointExists(f"{request.destination} is taken")
        info = types_pb2.CheckpointInfo()
        info.CopyFrom(self._checkpoint(request.source))
        info.location = request.destination
        info.created_at.CopyFrom(timestamp(time.time()))
        info.ClearField("ttl")
        if request.HasField("ttl"):
            info.ttl.CopyFrom(request.ttl)
        self.checkpoints[request.destination] = info
        if self.on_copy is not None:
            await self.on_copy()
        return trainer_pb2.CopyCheckpointResponse(checkpoint=info)

    async def ImportCheckpoint(self, request_iterator: Any, context: Any) -> Any:
        header = (await anext(request_iterator)).header
        if header.location.endswith("/refused"):
            raise InvalidRequest("tensor 'x': DoRA cannot be imported")
        self.imported.clear()
        async for request in request_iterator:
            if request.complete:
                if request.HasField("max_checkpoint_bytes") and request.max_checkpoint_bytes < self.import_bytes:
                    raise BudgetExceeded(f"it has {self.import_bytes} bytes")
                break
            self.imported.append(request.archive)
        else:
            raise InvalidRequest("complete: no message said so")
        info = types_pb2.CheckpointInfo(
            location=header.location,
            kind=types_pb2.CHECKPOINT_KIND_TRAINING,
            model_id=header.location.split("/")[0],
            base_model=header.base_model,
            lora_config=types_pb2.LoraConfig(rank=8, train_attn=True),
            version_id=f"{header.location}@1",
            size_bytes=self.import_bytes,
            created_at=timestamp(time.time()),
            ttl=header.ttl if header.HasField("ttl") else None,
        )
        self.checkpoints[header.location] = info
        return trainer_pb2.ImportCheckpointResponse(checkpoint=info, notes=["bfloat16 was converted to float32"])

    async def DeleteCheckpoint(self, request: Any, context: Any) -> Any:
        if (before := self.on_deletion) is not None:
            self.on_deletion = None
            await before()
        there = self.checkpoints.get(request.location)
        if there is not None and request.version_id in ("", there.version_id):
            del self.checkpoints[request.location]
        self.deletion.set()
        return trainer_pb2.DeleteCheckpointResponse()

    async def CheckCustomLoss(self, request: Any, context: Any) -> Any:
        self.checked.append(request.custom_loss.name)
        if request.custom_loss.name == "bad":
            raise InvalidRequest("graph.nodes[0]: 'os.system' is not an allowed target")
        return trainer_pb2.CheckCustomLossResponse()

    async def DescribeOperation(self, request: Any, context: Any) -> Any:
        model = self.models.get(request.model_id)
        if model is None or request.seq_id not in model.requests:
            raise ResultNotFound(f"no operation {request.seq_id} of {request.model_id}")
        return trainer_pb2.DescribeOperationResponse(status=self.status)

    async def _wait_result(self, request: Any, context: Any) -> Any:
        model = self.models.get(request.model_id)
        if model is None or request.seq_id not in model.requests:
            raise ResultNotFound(f"no operation {request.seq_id} of {request.model_id}")
        result = await self._result(model, request.seq_id)
        for name in ("create_model", "forward_backward", "optim_step", "save_checkpoint", "load_checkpoint"):
            if trainer_pb2.WaitResultResponse.DESCRIPTOR.fields_by_name[name].message_type is result.DESCRIPTOR:
                return trainer_pb2.WaitResultResponse(**{name: result})
        raise AssertionError(result)


class FakeSampler(sampler_pb2_grpc.SamplerServiceServicer):
    def __init__(self) -> None:
        self.versions = {""}
        self.running: Counter[str] = Counter()
        """Sequences that use a version; a move takes them along."""
        self.requests: list[sampler_pb2.SampleRequest] = []
        self.refusals: list[ServiceError] = []
        """Errors of the next samples."""
        self.max_running = 0
        self.moves: list[tuple[str, str]] = []
        """Runs and versions of MoveGenerations."""
        self.moved = asyncio.Event()
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.status = types_pb2.QueueStatus(running=True)
        """Describes every sample that waits."""
        self.go = asyncio.Event()
        self.go.set()

    async def GetSamplerInfo(self, request: Any, context: Any) -> Any:
        return sampler_pb2.GetSamplerInfoResponse(
            base_models=[BASE_MODEL, ALIAS],
            max_context_length=2048,
            max_lora_rank=64,
            engine="fake",
            boot_id="b",
            vocab_size=VOCAB_SIZE,
            max_running=self.max_running,
        )

    async def Sample(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.called.set()
        if self.refusals:
            raise self.refusals.pop()
        if request.version_id not in self.versions:
            raise VersionNotLoaded(f"version {request.version_id} is not resident")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        context.set_trailing_metadata((("x-tinsmith-ran", "3.5:4.5"),))
        num_tokens = sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt)
        sequence = types_pb2.SampledSequence(
            stop_reason=types_pb2.STOP_REASON_LENGTH,
            public_stop_reason=types_pb2.PUBLIC_STOP_REASON_LENGTH,
            tokens=struct.pack("<2i", 5, 6),
            logprobs=struct.pack("<2f", -0.5, -0.25),
            version_spans=[types_pb2.VersionSpan(version_id=request.version_id, num_tokens=2)]
            if request.follow_run
            else None,
        )
        return sampler_pb2.SampleResponse(
            sequences=[sequence] * request.num_samples,
            prompt_logprobs=struct.pack(f"<{num_tokens}f", float("nan"), *[-1.0] * (num_tokens - 1))
            if request.prompt_logprobs
            else None,
        )

    async def StreamSample(self, request: Any, context: Any) -> Any:
        yield sampler_pb2.StreamSampleResponse(result=await self.Sample(request.request, context))

    async def MoveGenerations(self, request: Any, context: Any) -> Any:
        self.moves.append((request.run_id, request.version_id))
        self.moved.set()
        if request.version_id not in self.versions:
            raise VersionNotLoaded(f"version {request.version_id} is not resident")
        behind = {each for each in self.running if each.rpartition("@")[0] == request.run_id}
        self.running[request.version_id] = num_sequences = sum(self.running.pop(each) for each in behind)
        return sampler_pb2.MoveGenerationsResponse(num_sequences=num_sequences)

    async def ListVersions(self, request: Any, context: Any) -> Any:
        infos = [
            sampler_pb2.VersionInfo(version_id=version_id, num_running=self.running[version_id])
            for version_id in sorted(self.versions - {""})
        ]
        return sampler_pb2.ListVersionsResponse(versions=infos)

    async def DescribeRequest(self, request: Any, context: Any) -> Any:
        return sampler_pb2.DescribeRequestResponse(status=self.status)


@dataclass
class Backend:
    """A service that can be killed and started again on its port."""

    servicer: Any
    kind: str
    port: int = 0
    server: Server | None = None
    certificates: Certificates | None = None

    async def start(self) -> None:
        module, add = {
            "trainer": (trainer_pb2, trainer_pb2_grpc.add_TrainerServiceServicer_to_server),
            "sampler": (sampler_pb2, sampler_pb2_grpc.add_SamplerServiceServicer_to_server),
        }[self.kind]
        self.server = Server(f"127.0.0.1:{self.port}", [module.DESCRIPTOR], certificates=self.certificates)
        self.port = self.server.port
        add(self.servicer, self.server.grpc)
        if isinstance(self.servicer, FakeTrainer):
            self.servicer.boot_id = uuid.uuid4().hex  # another process
            trainer_admin_pb2_grpc.add_TrainerAdminServiceServicer_to_server(self.servicer, self.server.grpc)
        await self.server.start()
        await self.server.set_serving(True)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None


class Stack:
    """One gateway, one trainer, one sampler; and more samplers where a test adds them."""

    def __init__(self, state_dir: Path, sampler: FakeSampler | None = None) -> None:
        self.state_dir = state_dir
        self.trainer = FakeTrainer()
        self.sampler = sampler or FakeSampler()
        self.trainer.samplers.append(self.sampler)
        self.trainer_backend = Backend(self.trainer, "trainer")
        self.sampler_backend = Backend(self.sampler, "sampler")
        self.trainer_ports: list[int] | None = None
        """Where the gateway finds the trainers; None: the one."""
        self.sampler_ports: list[int] | None = None
        """Where the gateway finds the samplers; None: the one."""
        # The reaper runs at the start and at the end of a session or run, and again only in tests that wait for it.
        self.settings: dict[str, Any] = {"long_poll_s": 5.0, "submit_timeout_s": 15.0, "reap_interval_s": 1000.0}
        self.server: GatewayServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    @asynccontextmanager
    async def serving(self, **settings: Any) -> AsyncIterator[Self]:
        try:
            await self.trainer_backend.start()
            await self.sampler_backend.start()
            await self.start_gateway(**settings)
            yield self
        finally:
            await self.stop_gateway()
            await self.trainer_backend.stop()
            await self.sampler_backend.stop()

    @property
    def gateway(self) -> Gateway:
        assert self.server is not None
        return self.server.app.state.gateway

    async def start_gateway(self, **settings: Any) -> None:
        self.settings |= settings
        is_new = False
        if not self.settings.get("database_url"):
            is_new = await lay_migrated_database(self.state_dir)
        services: dict[str, Any] = {
            "trainers": [f"127.0.0.1:{port}" for port in self.trainer_ports or [self.trainer_backend.port]],
            "samplers": [f"127.0.0.1:{port}" for port in self.sampler_ports or [self.sampler_backend.port]],
        }
        if "services_file" in self.settings:
            services = {}
        config = GatewayConfig(port=self.port, state_dir=self.state_dir, **services, **self.settings)
        self.server = GatewayServer(config)
        if is_new:
            _leave_out_the_first_rounds(self.gateway)
        await self.gateway.start()
        self._serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            assert not self._serving.done(), self._serving.result()
            await asyncio.sleep(0)
        self.port = self.server.bound_port
        if self.trainer_backend.server is not None and self.sampler_backend.server is not None:
            await self.gateway.clients.settle(lambda: self.gateway.clients.serving(BASE_MODEL))
            await self.gateway.clients.samplers.wait(BASE_MODEL)

    async def stop_gateway(self) -> None:
        if self.server is not None and self._serving is not None:
            self.server.stop()
            await self._serving
            await self.gateway.stop()
            self.server = None

    async def restart_gateway(self, **settings: Any) -> None:
        await self.stop_gateway()
        await self.start_gateway(**settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _leave_out_the_first_rounds(gateway: Gateway) -> None:
    """There is nothing to reap or to move in a new database, and looking for it takes half of the processor time of a
    gateway's start and stop."""
    for part, name in ((gateway.reaper, "round"), (gateway.moving, "_round")):
        _leave_out_the_first(part, name)


def _leave_out_the_first(part: Reaper | RunMover, name: str) -> None:
    plain = getattr(part, name)

    async def first() -> None:
        setattr(part, name, plain)

    setattr(part, name, first)


class Client(httpx.AsyncClient):
    """Raw HTTP, with the steps that most tests begin with."""

    async def call(self, path: str, body: Any, *, status: int = 200) -> Any:
        reply = await self.post(f"/api/v1/{path}", json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def session(self) -> str:
        return (await self.call("create_session", {"type": "create_session"}))["session_id"]

    async def model(self, session_id: str, *, seq: int = 0, **fields: Any) -> str:
        body = {"session_id": session_id, "model_seq_id": seq, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        receipt = await self.call("create_model", body | fields)
        assert (await self.result(receipt))["model_id"] == receipt["model_id"]
        return receipt["model_id"]

    async def forward_backward(self, model_id: str, seq_id: int, *, loss_fn: str = "cross_entropy") -> httpx.Response:
        return await self.post(
            "/api/v1/forward_backward",
            content=batch(model_id, seq_id, loss_fn=loss_fn).SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
        )

    async def poll(self, request_id: str) -> httpx.Response:
        """As an SDK does that reads protobuf."""
        accept = {"accept": "application/x-protobuf, application/json"}
        return await self.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=accept)

    async def result(self, receipt: Any) -> Any:
        """JSON results as they are, protobuf ones as bytes."""
        while True:
            reply = await self.poll(receipt["request_id"])
            assert reply.status_code == 200, reply.text
            if "protobuf" in reply.headers["content-type"]:
                return reply.content
            if (answer := reply.json()).get("type") != "try_again":
                return answer

    async def sampling_session(self, session_id: str, *, seq: int = 0, **fields: Any) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": seq} | (fields or {"base_model": BASE_MODEL})
        return (await self.call("create_sampling_session", body))["sampling_session_id"]


def batch(model_id: str, seq_id: int, *, loss_fn: str = "cross_entropy") -> trainer_pb2.ForwardBackwardRequest:
    return batches.request([batches.datum([1, 2, 3])], loss_fn, model_id=model_id, seq_id=seq_id)


def sample_body(sampling_session_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    body = {
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        "type": "sample",
    }
    return body | fields
