"""What each kind of operation does: a request becomes work for the scheduler. Also the list of live models.

Checkpoints are read before an operation's turn on the compute thread, and written and published after it, from a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.full_weights import config_of
from tinsmith.rpc.errors import (
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
    VersionGone,
)
from tinsmith.rpc.paths import check_model_id, check_name
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from tinsmith.v1.types_pb2 import PublishCertificate
from trainer_service.durability.snapshots import Snapshots
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import State, TrainingEngine
from trainer_service.engine.optimizers import DEFAULT_OPTIMIZER, check_kind, params_from_proto
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.scheduling.work import RunBatch, Turn, Work
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.encryption import Recipient, parse_recipients
from trainer_service.storage.locations import KINDS, Location
from trainer_service.weight_sync import Version
from trainer_service.weight_sync.canary import Scores
from trainer_service.weight_sync.certificate import Certified, Publisher

logger = logging.getLogger(__name__)

_SENT_KINDS = {types_pb2.CHECKPOINT_KIND_SAMPLER, types_pb2.CHECKPOINT_KIND_EPHEMERAL}
"""Kinds that are sent to the samplers when they are saved."""


T = TypeVar("T")


class RunAlone(Protocol):
    async def __call__(self, call: Callable[[], T]) -> T:
        """Makes the call on the compute thread, before the next micro-batch."""
        ...


@dataclass(slots=True)
class Model:
    """What is known of a live model outside the engine."""

    model_id: str
    base_model: str
    config: AdapterConfig
    optimizer: str
    user_metadata: Mapping[str, str]
    step: int = 0

    def to_proto(self, *, next_seq_id: int) -> pb.ModelInfo:
        return pb.ModelInfo(
            model_id=self.model_id,
            base_model=self.base_model,
            lora_config=self.config.to_proto(),
            optimizer=self.optimizer,
            step=self.step,
            next_seq_id=next_seq_id,
            user_metadata=self.user_metadata,
        )

    def snapshot_info(self, seq_id: int, state: State) -> types_pb2.CheckpointInfo:
        """Of its state after that operation."""
        return types_pb2.CheckpointInfo(
            location=f"{self.model_id}/{seq_id}",
            kind=types_pb2.CHECKPOINT_KIND_TRAINING,
            model_id=self.model_id,
            base_model=self.base_model,
            lora_config=state.config.to_proto(),
            version_id=f"{self.model_id}@{seq_id}",
            step=state.step,
            has_optimizer=state.optimizer is not None,
            optimizer=self.optimizer,
            user_metadata=self.user_metadata,
            created_at=time.time(),
        )

    @classmethod
    def of_snapshot(cls, info: types_pb2.CheckpointInfo, state: State) -> Model:
        metadata = dict(info.user_metadata)
        return cls(info.model_id, info.base_model, state.config, info.optimizer, metadata, info.step)


@dataclass(slots=True)
class Operations:
    engine: TrainingEngine
    checkpoints: CheckpointStore
    publisher: Publisher
    run_alone: RunAlone
    """Of the scheduler."""
    base_models: Sequence[str]
    """Public names of the base model."""
    max_lora_rank: int
    snapshots: Snapshots
    models: dict[str, Model] = field(default_factory=dict)
    _publishing: dict[tuple[Location, str], asyncio.Task[Certified]] = field(default_factory=dict)
    _asked_for: set[str] = field(default_factory=set)
    """Versions of live models that were published on demand."""
    _scoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    def create_model(self, request: pb.CreateModelRequest) -> Work:
        """Raises InvalidRequest for what is wrong on the face of it; a checkpoint is looked at in the work."""
        check_model_id(request.model_id, field="model_id")
        if request.optimizer:
            check_kind(request.optimizer)
        if request.base_model or not request.from_location:
            self.check_base_model(request.base_model, field="base_model")
        if request.from_location:
            location = Location.parse(request.from_location, field="from_location")
            if request.HasField("lora_config"):
                raise InvalidRequest("lora_config: must be absent, from_location brings its own", field="lora_config")
            return lambda turn: self._create(turn, request, location=location, config=None)
        if request.load_optimizer:
            raise InvalidRequest("load_optimizer: true needs from_location", field="load_optimizer")
        if not request.HasField("lora_config"):
            raise InvalidRequest("lora_config: missing; a new model needs one", field="lora_config")
        config = self._config(request.lora_config, optimizer=request.optimizer or DEFAULT_OPTIMIZER)
        return lambda turn: self._create(turn, request, location=None, config=config)

    def _config(self, lora_config: types_pb2.LoraConfig, *, optimizer: str) -> AdapterConfig:
        self.engine.check_trainable(lora_config.rank, optimizer)
        return config_of(lora_config, max_rank=self.max_lora_rank)

    async def _create(
        self,
        turn: Turn,
        request: pb.CreateModelRequest,
        *,
        location: Location | None,
        config: AdapterConfig | None,
    ) -> pb.WaitResultResponse:
        base_model, state = request.base_model, None
        optimizer = request.optimizer or DEFAULT_OPTIMIZER
        if location is not None:
            await self._check_extent(location, field="from_location")
            info, state = await self._load(location, with_optimizer=request.load_optimizer, field="from_location")
            base_model = base_model or info.base_model
            if state.optimizer is not None:
                optimizer = request.optimizer or state.optimizer.kind
            config = self._config(info.lora_config, optimizer=optimizer)
        assert config is not None
        model = Model(request.model_id, base_model, config, optimizer, dict(request.user_metadata))

        def create() -> None:
            self.engine.create_model(model.model_id, model.config, optimizer)
            if state is not None:
                self.engine.restore(model.model_id, state, with_optimizer=request.load_optimizer)
                model.step = state.step

        await turn.run(create)
        self.models[model.model_id] = model
        self.snapshots.add(model.model_id)
        if state is not None:
            await self._keep_loaded(turn, model, 0, state, with_optimizer=request.load_optimizer)
        return pb.WaitResultResponse(create_model=pb.CreateModelResponse(model=model.to_proto(next_seq_id=1)))

    def forward_backward(self, request: pb.ForwardBackwardRequest) -> Work:
        try:
            return RunBatch(Batch.from_proto(request, self.engine.limits))
        except ServiceError as error:
            return refused(error) if request.forward_only else self._taint(request.model_id, error)

    def work_of(self, kind: str, data: bytes) -> Work:
        """Of a serialized request that was accepted before a restart."""
        try:
            match kind:
                case "create_model":
                    return self.create_model(pb.CreateModelRequest.FromString(data))
                case "forward_backward":
                    return self.forward_backward(pb.ForwardBackwardRequest.FromString(data))
                case "optim_step":
                    return self.optim_step(pb.OptimStepRequest.FromString(data))
                case "skip":
                    return self.skip(pb.SkipOperationRequest.FromString(data))
                case "save_checkpoint":
                    return self.save_checkpoint(pb.SaveCheckpointRequest.FromString(data), again=True)
                case "load_checkpoint":
                    return self.load_checkpoint(pb.LoadCheckpointRequest.FromString(data))
                case _:
                    raise ServiceError(f"an operation of kind {kind!r} is of a later version")
        except InvalidRequest as error:
            return refused(error)

    def check_custom_loss(self, request: pb.CheckCustomLossRequest) -> None:
        """Raises InvalidRequest for what can be seen without data."""
        CustomLoss.from_proto(request.custom_loss)

    def skip(self, request: pb.SkipOperationRequest) -> Work:
        error = InvalidRequest(request.reason)
        return self._taint(request.model_id, error) if request.gradients_missing else refused(error)

    def _taint(self, model_id: str, error: ServiceError) -> Work:
        async def refuse(turn: Turn) -> pb.WaitResultResponse:
            await turn.run(lambda: self.engine.taint(model_id, error.message))
            raise error

        return refuse

    def optim_step(self, request: pb.OptimStepRequest) -> Work:
        params = params_from_proto(request)
        model_id = request.model_id

        def call() -> tuple[Mapping[str, float], State | None]:
            return self.engine.optim_step(model_id, params), self._snapshot(model_id)

        async def step(turn: Turn) -> pb.WaitResultResponse:
            metrics, state = await turn.run(call)
            model = self.models[model_id]
            model.step += 1
            if state is not None:
                self.snapshots.keep_later(turn, request.seq_id, model.snapshot_info(request.seq_id, state), state)
            return pb.WaitResultResponse(optim_step=pb.OptimStepResponse(metrics=metrics))

        return step

    def _snapshot(self, model_id: str) -> State | None:
        """On the compute thread, after a step: a copy when one is due."""
        if not self.snapshots.is_due(model_id):
            return None
        try:
            return self.engine.capture(model_id, with_optimizer=True)
        except (MemoryError, RuntimeError) as error:  # the step has been made, and its answer must say so
            self.snapshots.skip(model_id, error)
            return None

    async def _keep_loaded(self, turn: Turn, model: Model, seq_id: int, state: State, *, with_optimizer: bool) -> None:
        """A model whose source may be deleted, once it has been loaded: it is to be durable before that is answered."""
        kept = state if with_optimizer else replace(state, optimizer=None)
        await self.snapshots.keep(turn, seq_id, model.snapshot_info(seq_id, kept), kept)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest, *, again: bool = False) -> Work:
        """`again`: it was accepted before a restart, and may have been made."""
        if request.kind not in KINDS:
            raise InvalidRequest(
                f"kind: {request.kind} is not one of TRAINING, SAMPLER, EPHEMERAL, EXTERNAL", field="kind"
            )
        if request.HasField("ttl_seconds") and request.ttl_seconds < 1:
            raise InvalidRequest(f"ttl_seconds: {request.ttl_seconds} must be positive", field="ttl_seconds")
        if request.kind != types_pb2.CHECKPOINT_KIND_EPHEMERAL:
            name = check_name(request.name, field="name")
        elif request.name:
            raise InvalidRequest(f"name: {request.name!r} was given, but an ephemeral one has none", field="name")
        else:
            name = str(request.seq_id)
        recipients = parse_recipients(request.age_recipients, field="age_recipients")
        if recipients and request.kind != types_pb2.CHECKPOINT_KIND_EXTERNAL:
            raise InvalidRequest("age_recipients: only kind EXTERNAL can be encrypted", field="age_recipients")
        location = Location(request.model_id, KINDS[request.kind], name)
        return lambda turn: self._save(turn, request, location, recipients, again=again)

    async def _save(
        self,
        turn: Turn,
        request: pb.SaveCheckpointRequest,
        location: Location,
        recipients: Sequence[Recipient],
        *,
        again: bool,
    ) -> pb.WaitResultResponse:
        model = self.models[request.model_id]
        with_optimizer = request.kind == types_pb2.CHECKPOINT_KIND_TRAINING
        version_id = f"{request.model_id}@{request.seq_id}"
        written = await asyncio.to_thread(self._written, location, version_id) if again else None
        if written is not None:
            return await self._finish_save(written, location)
        if request.overwrite:
            await turn.settled()  # two saves that replace one checkpoint are written in their order
        scores: asyncio.Future[Scores] | None = None
        if request.kind in _SENT_KINDS and self.publisher.has_samplers:
            state, scores = await self._capture_and_score(turn, request.model_id)
        else:
            state = await turn.run(lambda: self.engine.capture(request.model_id, with_optimizer=with_optimizer))
        info = types_pb2.CheckpointInfo(
            location=str(location),
            kind=request.kind,
            model_id=request.model_id,
            base_model=model.base_model,
            lora_config=state.config.to_proto(),
            version_id=version_id,
            step=state.step,
            has_optimizer=with_optimizer,
            optimizer=model.optimizer,
            ttl_seconds=request.ttl_seconds if request.HasField("ttl_seconds") else None,
            user_metadata=request.user_metadata,
        )
        if request.overwrite:
            await asyncio.to_thread(self._keep_replaced, location)
        saving = asyncio.to_thread(
            self.checkpoints.save, info, state, overwrite=request.overwrite, recipients=recipients
        )
        if scores is not None:
            stored, certified = await self._save_and_publish(saving, info, state, scores)
        else:
            stored, certified = await saving, None
        return _saved(stored, certified)

    def _written(self, location: Location, version_id: str) -> types_pb2.CheckpointInfo | None:
        """What this very save has left there, when the trainer ended before it was answered."""
        with contextlib.suppress(CheckpointNotFound, DataCorrupted):
            info = self.checkpoints.info(location)
            return info if info.version_id == version_id and info.location == str(location) else None

    async def _finish_save(self, info: types_pb2.CheckpointInfo, location: Location) -> pb.WaitResultResponse:
        """A version never changes: what samplers may have of it already is what lies in its files."""
        certified: Certified | None = None
        if info.kind in _SENT_KINDS and self.publisher.has_samplers:
            try:
                certified = await self.publish(location, info.version_id)
            except (NotReady, OutOfCapacity) as error:  # a sample that wants it publishes it
                logger.warning("%s is saved, but not published: %s", location, error)
        return _saved(info, certified)

    async def _capture_and_score(self, turn: Turn, model_id: str) -> tuple[State, asyncio.Future[Scores]]:
        """A copy, as soon as it is made: the call goes on with scoring the canary while the copy is stored and sent.

        So a publish asks for the compute thread once.
        """
        loop = asyncio.get_running_loop()
        captured: asyncio.Future[State] = loop.create_future()

        def call() -> Scores:
            state = self.engine.capture(model_id, with_optimizer=False)
            loop.call_soon_threadsafe(lambda: captured.done() or captured.set_result(state))
            return self.engine.score(self.engine.weights(model_id), self.publisher.sequences)

        scores = asyncio.ensure_future(turn.run(call))
        await asyncio.wait({captured, scores}, return_when=asyncio.FIRST_COMPLETED)
        if not captured.done():
            await scores  # raises: there is no copy
        return captured.result(), scores

    def _keep_replaced(self, location: Location) -> None:
        """A version that samplers have may be wanted again when its checkpoint is replaced: its files stay, hidden."""
        with contextlib.suppress(CheckpointNotFound, CheckpointExists, DataCorrupted):
            info = self.checkpoints.info(location)
            hidden = _hidden(location, info.version_id)
            if hidden is not None and (info.kind in _SENT_KINDS or self._was_asked_for(info, location)):
                self.checkpoints.copy(location, hidden, ttl_seconds=None)

    def _was_asked_for(self, info: types_pb2.CheckpointInfo, location: Location) -> bool:
        """Samplers have it: a publish goes on, or one, perhaps before a restart, has left a certificate."""
        if info.version_id in self._asked_for:
            return True
        try:
            self.checkpoints.certificate(location)
        except NotFound:
            return False
        return True

    async def _save_and_publish(
        self,
        saving: Coroutine[Any, Any, types_pb2.CheckpointInfo],
        info: types_pb2.CheckpointInfo,
        state: State,
        scores: asyncio.Future[Scores],
    ) -> tuple[types_pb2.CheckpointInfo, Certified | None]:
        """Both at once. Without files there must be no version; without a sampler that serves it, files are enough."""
        version = Version(info.version_id, info.base_model, state.adapter)
        publishing = asyncio.create_task(self.publisher.publish(version, scores))
        try:
            stored = await saving
        except BaseException:
            await asyncio.wait([publishing])
            await self.publisher.sender.remove(info.version_id)
            raise
        try:
            certified = await publishing
        except (NotReady, OutOfCapacity) as error:  # a sample that wants it publishes it
            logger.warning("%s is saved, but not published: %s", info.location, error)
            return stored, None
        except ServiceError as error:
            raise type(error)(
                f"{info.location} is saved, but a sampler refused it: {error}", **error.metadata
            ) from error
        if certified is not None:
            await self._keep(certified.certificate, info.location)
        return stored, certified

    async def _keep(self, certificate: PublishCertificate, location: str) -> None:
        """With the version's files, whatever it says. Raises VersionRefused."""
        where = Location.parse(location, field="location")
        try:
            await asyncio.to_thread(self.checkpoints.put_certificate, where, certificate)
        except OutOfCapacity as error:  # it is in the answer and in the metrics
            logger.warning("the certificate of %s is not stored: %s", location, error)
        self.publisher.check(certificate, location=location)

    def load_checkpoint(self, request: pb.LoadCheckpointRequest) -> Work:
        location = Location.parse(request.location, field="location")
        return lambda turn: self._restore(turn, request, location)

    async def _restore(
        self, turn: Turn, request: pb.LoadCheckpointRequest, location: Location
    ) -> pb.WaitResultResponse:
        await turn.settled()  # it may be the checkpoint that the operation before is writing
        await self._check_extent(location, field="location")
        info, state = await self._load(location, with_optimizer=request.load_optimizer, field="location")
        await turn.run(lambda: self.engine.restore(request.model_id, state, with_optimizer=request.load_optimizer))
        model = self.models[request.model_id]
        model.step = state.step
        await self._keep_loaded(turn, model, request.seq_id, state, with_optimizer=request.load_optimizer)
        return pb.WaitResultResponse(load_checkpoint=pb.LoadCheckpointResponse(checkpoint=info))

    async def publish(self, location: Location, version_id: str) -> Certified:
        """Sends a stored version to the samplers; calls that want the same one share the work.

        Raises VersionGone when the location holds another version, NotReady when no sampler can be reached or measured,
        and VersionRefused when one is too far from the trainer.
        """
        key = location, version_id
        running = self._publishing.get(key)
        if running is None:
            running = self._publishing[key] = asyncio.create_task(self._publish(location, version_id))
            running.add_done_callback(lambda _: self._publishing.pop(key))
        return await asyncio.shield(running)

    async def _publish(self, location: Location, version_id: str) -> Certified:
        if location.run_id in self.models:
            self._asked_for.add(version_id)
        info, state = await self._find_version(location, version_id)
        scores = asyncio.ensure_future(self._score(state))
        certified = await self.publisher.publish(Version(version_id, info.base_model, state.adapter), scores)
        if certified is None:
            raise NotReady(f"{version_id} cannot be published: no sampler is serving; try again")
        await self._keep(certified.certificate, info.location)
        return certified

    async def _score(self, state: State) -> Scores:
        """One at a time, so that micro-batches wait for one of many at most."""
        async with self._scoring:
            return await self.run_alone(lambda: self.engine.score(state.adapter, self.publisher.sequences))

    async def _find_version(self, location: Location, version_id: str) -> tuple[types_pb2.CheckpointInfo, State]:
        try:
            info, state = await self._load(location, with_optimizer=False, field="location")
            if info.version_id == version_id:
                return info, state
            error: ServiceError = VersionGone(
                f"{location} holds version {info.version_id!r} by now, not {version_id!r}", version_id=version_id
            )
        except CheckpointNotFound as missing:
            error = missing
        hidden = _hidden(location, version_id)
        if hidden is None or not await asyncio.to_thread(self.checkpoints.exists, hidden):
            raise error
        return await self._load(hidden, with_optimizer=False, field="location")

    async def _check_extent(self, location: Location, *, field: str) -> None:
        """Raises InvalidRequest for a checkpoint of a kind that this server does not train, before it is read."""
        info = await asyncio.to_thread(self.checkpoints.info, location)
        rank = info.lora_config.rank
        if rank == 0 and not self.engine.base.trainable:
            raise InvalidRequest(
                f"{field}: {location} holds all parameters, which needs a server started with --full-training; this "
                "one was started without it, and trains adapters",
                field=field,
            )
        if rank != 0 and self.engine.base.trainable:
            raise InvalidRequest(
                f"{field}: {location} holds an adapter (rank {rank}), which needs a server started without "
                "--full-training; this one was started with it, and trains all parameters",
                field=field,
            )

    async def _load(
        self, location: Location, *, with_optimizer: bool, field: str
    ) -> tuple[types_pb2.CheckpointInfo, State]:
        info, state = await asyncio.to_thread(
            self.checkpoints.load, location, self.engine.base, with_optimizer=with_optimizer
        )
        self.check_base_model(info.base_model, field=f"{field} {location}: base_model")
        return info, state

    def check_base_model(self, base_model: str, *, field: str) -> None:
        if base_model not in self.base_models:
            raise InvalidRequest(
                f"{field}: {base_model!r} is not served by this trainer; it serves {', '.join(self.base_models)}",
                field=field,
            )

    def model(self, model_id: str) -> Model:
        if model_id not in self.models:
            raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
        return self.models[model_id]

    async def delete_files(self, model_id: str) -> None:
        """Removes what a model leaves outside the engine: its ephemeral checkpoints, its versions in the samplers."""
        self.models.pop(model_id, None)
        await self.snapshots.forget(model_id)
        self._asked_for -= {version_id for version_id in self._asked_for if version_id.startswith(f"{model_id}@")}
        await asyncio.to_thread(self.checkpoints.delete_ephemeral, model_id)
        await self.publisher.sender.remove_all(f"{model_id}@")


def _saved(info: types_pb2.CheckpointInfo, certified: Certified | None) -> pb.WaitResultResponse:
    return pb.WaitResultResponse(
        save_checkpoint=pb.SaveCheckpointResponse(
            checkpoint=info,
            num_samplers=0 if certified is None else certified.num_samplers,
            certificate=None if certified is None else certified.certificate,
        )
    )


def _hidden(location: Location, version_id: str) -> Location | None:
    """Where a replaced version of a run lies until the run is deleted. None for what is no version of this run."""
    run_id, _, name = version_id.rpartition("@")
    if run_id != location.run_id or not name.isalnum():
        return None
    return Location(run_id, KINDS[types_pb2.CHECKPOINT_KIND_EPHEMERAL], name)


def refused(error: ServiceError) -> Work:
    """The work of a request that validation refused: it fails in its place of the order."""

    async def refuse(turn: Turn) -> pb.WaitResultResponse:
        raise error

    return refuse
