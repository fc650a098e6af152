"""Makes requests into work for the scheduler: what each kind of operation does.

Checkpoints are read before an operation's turn on the compute thread. They are written and published after it, from a
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tinsmith.errors import InvalidRequest, ServiceError, about
from tinsmith.faults import is_device_fault
from tinsmith.lora_config import config_from_proto
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.rpc.notes import check_notes
from tinsmith.rpc.paths import check_model_id
from tinsmith.rpc.words import check_known, word_of
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability.snapshots import Snapshots
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.optimizers import DEFAULT_OPTIMIZER
from trainer_service.older_forms import carried_over
from trainer_service.operation import Turn, Work
from trainer_service.operations.loads import Loads
from trainer_service.operations.models import LiveModels, Model
from trainer_service.operations.publishing import Publishing
from trainer_service.operations.saves import Saves
from trainer_service.requests import batch_of, loss_of, params_of
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location
from trainer_service.weight_sync.certificate import Publisher

_MAX_LOSS_CHECKS = 16
"""Most checks of custom losses that run at once, one of each model. All share the time that checks may take."""

Request = (
    pb.CreateModelRequest
    | pb.ForwardBackwardRequest
    | pb.OptimStepRequest
    | pb.SkipOperationRequest
    | pb.SaveCheckpointRequest
    | pb.LoadCheckpointRequest
)
_REQUESTS: Mapping[str, type[Request]] = {
    "create_model": pb.CreateModelRequest,
    "forward_backward": pb.ForwardBackwardRequest,
    "optim_step": pb.OptimStepRequest,
    "skip": pb.SkipOperationRequest,
    "save_checkpoint": pb.SaveCheckpointRequest,
    "load_checkpoint": pb.LoadCheckpointRequest,
}
"""The requests that become operations, by kind."""


def parsed(kind: str, data: bytes) -> Request:
    """A serialized request of the journal. Raises ServiceError for a kind of a later version."""
    if kind not in _REQUESTS:
        raise ServiceError(f"an operation of kind {kind!r} is of a later version")
    return carried_over(_REQUESTS[kind].FromString(data))


class Operations:
    """Validates requests and makes their work. The work runs later, when the scheduler calls it."""

    def __init__(
        self,
        engine: TrainingEngine,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        scheduler: Scheduler,
        models: LiveModels,
        max_lora_rank: int,
        snapshots: Snapshots,
    ) -> None:
        self.engine = engine
        self.max_lora_rank = max_lora_rank
        self.snapshots = snapshots
        self._scheduler = scheduler
        self.models = models
        self.loads = Loads(engine, checkpoints, self.models, snapshots)
        self.publishing = Publishing(engine, checkpoints, publisher, scheduler, self.models, self.loads)
        self._saves = Saves(engine, checkpoints, self.models, self.publishing)
        self.loss_checks = ThreadPoolExecutor(_MAX_LOSS_CHECKS, thread_name_prefix="custom-loss")
        """Threads that check custom losses, which may take long."""

    def work_of(
        self,
        request: Request,
        *,
        again: bool = False,
        held_bytes: int | None = None,
        max_bytes: int | None = None,
    ) -> Work:
        """The work of a request; of an invalid one, work that fails.

        `again`: the request was accepted before a restart. Then the files of a save may exist, and a custom loss is not
        checked (see `with_loss_checked`). For the other arguments see requests.batch_of.
        """
        try:
            match request:
                case pb.ForwardBackwardRequest():
                    limits = self.engine.limits
                    return batch_of(request, limits, held_bytes=held_bytes, max_bytes=max_bytes, check_loss=not again)
                case pb.CreateModelRequest():
                    return self.create_model(request)
                case pb.OptimStepRequest():
                    return self._optim_step(request)
                case pb.SkipOperationRequest():
                    return self._skip(request)
                case pb.SaveCheckpointRequest():
                    if not again:
                        check_notes(request.user_metadata, field="user_metadata")
                    return self._saves.save_checkpoint(request, again=again)
                case pb.LoadCheckpointRequest():
                    return self.loads.load_checkpoint(request)
        except ServiceError as error:
            return self.refuse(request, error)

    def create_model(self, request: pb.CreateModelRequest) -> Work:
        """The work of a create_model. Raises InvalidRequest for errors in the request itself. The work checks the
        checkpoint, if it has one."""
        check_model_id(request.model_id, field="model_id")
        check_known(types_pb2.Optimizer, request.optimizer, field="optimizer")
        if request.base_model or not request.from_location:
            self.models.check_base_model(request.base_model, field="base_model")
        self.models.check_base_weights(request.base_weights, field="base_weights")
        if request.from_location:
            location = Location.parse(request.from_location, field="from_location")
            if request.HasField("lora_config"):
                raise InvalidRequest(
                    "lora_config: must be absent with from_location, whose checkpoint has one", field="lora_config"
                )
            return lambda turn: self._create(turn, request, location=location, config=None)
        if request.load_optimizer:
            raise InvalidRequest("load_optimizer: true needs from_location", field="load_optimizer")
        if not request.HasField("lora_config"):
            raise InvalidRequest("lora_config: missing; a new model needs one", field="lora_config")
        config = self._config(request.lora_config, optimizer=_kind_of(request) or DEFAULT_OPTIMIZER)
        return lambda turn: self._create(turn, request, location=None, config=config)

    async def check_servable(self, request: pb.CreateModelRequest) -> None:
        """Raises InvalidRequest for a new model that samplers could never serve. A model that is restored after a
        restart is not checked, because it was accepted before."""
        if request.model_id in self.models:
            return  # the request is a repeat
        lora_config = request.lora_config
        if request.from_location:
            try:
                location = Location.parse(request.from_location, field="from_location")
                lora_config = (await self.loads.checkpoints.reads(self.loads.checkpoints.info, location)).lora_config
            except ServiceError:
                return  # the creation itself fails with this error
        config = config_from_proto(lora_config, max_rank=lora_config.rank)
        samplers = self.publishing.publisher.sender.samplers
        samplers.check_servable(config, num_bytes=self.engine.version_bytes(config))

    def _config(self, lora_config: types_pb2.LoraConfig, *, optimizer: str) -> AdapterConfig:
        self.engine.check_trainable(lora_config.rank, optimizer)
        return config_from_proto(lora_config, max_rank=self.max_lora_rank)

    async def _create(
        self,
        turn: Turn,
        request: pb.CreateModelRequest,
        *,
        location: Location | None,
        config: AdapterConfig | None,
    ) -> pb.WaitResultResponse:
        base_model, state = request.base_model, None
        optimizer = _kind_of(request) or DEFAULT_OPTIMIZER
        if location is not None:
            async with turn.storing():
                info, state = await self.loads.read_to_train(
                    location, with_optimizer=request.load_optimizer, field="from_location"
                )
            base_model = base_model or info.base_model
            if state.optimizer is not None:
                optimizer = _kind_of(request) or state.optimizer.kind
            with about("from_location"):
                config = self._config(info.lora_config, optimizer=optimizer)
        assert config is not None
        base_weights = self.models.weights_of(config)
        metadata = dict(request.user_metadata)
        model = Model(
            request.model_id, base_model, base_weights, config, optimizer, metadata, creation_id=request.creation_id
        )

        def create() -> None:
            self.engine.create_model(model.model_id, model.config, optimizer)
            if state is not None:
                self.engine.restore(model.model_id, state, with_optimizer=request.load_optimizer)
                model.step = state.step

        await self._scheduler.parking.make_room(lambda: self.engine.has_room_for(model.config))
        await turn.run(create)
        self.models.add(model)
        self.snapshots.add(model.model_id)
        if state is not None:
            await self.loads.keep(turn, model, 0, state, with_optimizer=request.load_optimizer)
        return pb.WaitResultResponse(create_model=pb.CreateModelResponse(model=model.to_proto(next_seq_id=1)))

    def with_loss_checked(self, work: Work) -> Work:
        """The work with its custom loss checked (Batch.with_loss_checked); a work that fails if the check fails."""
        if not isinstance(work, Batch):
            return work
        try:
            return work.with_loss_checked()
        except ServiceError as error:
            assert work.request is not None
            return self.refuse(work.request, error)

    def refuse(self, request: Request, error: ServiceError) -> Work:
        """The work of a request that is not run. It fails in its turn; if it would have added gradients, the next step
        fails, too."""
        if isinstance(request, pb.ForwardBackwardRequest) and not request.forward_only:
            return self._taint(request, error)
        return refused(error)

    def refuse_unread(self, model_id: str, seq_id: int, kind: str, error: ServiceError) -> Work:
        """The work of a request of the journal that cannot be read. Nobody knows whether a forward_backward would have
        added gradients, so the next step fails."""
        if kind in ("forward_backward", "skip"):
            return self._taint(pb.SkipOperationRequest(model_id=model_id, seq_id=seq_id), error)
        return refused(error)

    def check_custom_loss(self, request: pb.CheckCustomLossRequest) -> None:
        """Raises InvalidRequest for errors of a custom loss that can be found without data."""
        loss_of(request.custom_loss)

    def _skip(self, request: pb.SkipOperationRequest) -> Work:
        if not request.reason:
            raise InvalidRequest("reason: is empty; it becomes the error of the operation", field="reason")
        error = InvalidRequest(request.reason)
        return self._taint(request, error) if request.gradients_missing else refused(error)

    def _taint(self, request: pb.ForwardBackwardRequest | pb.SkipOperationRequest, error: ServiceError) -> Work:
        async def refuse(turn: Turn) -> pb.WaitResultResponse:
            await turn.run(lambda: self.engine.taint(request.model_id, error.message, seq_id=request.seq_id))
            raise error

        return refuse

    def _optim_step(self, request: pb.OptimStepRequest) -> Work:
        params = params_of(request)
        if not 0 <= request.failure_seen < request.seq_id:
            raise InvalidRequest(
                f"failure_seen: {request.failure_seen} is no seq_id before this step's, {request.seq_id}; 0 means none",
                field="failure_seen",
            )
        model_id = request.model_id

        def call() -> tuple[Mapping[str, float], CapturedState | None]:
            metrics = self.engine.optim_step(model_id, params, failure_seen=request.failure_seen)
            return metrics, self._snapshot(model_id)

        async def step(turn: Turn) -> pb.WaitResultResponse:
            metrics, state = await turn.run(call)
            model = self.models.get(model_id)
            model.step += 1
            if state is not None:
                self.snapshots.keep_later(turn, request.seq_id, model.snapshot_info(request.seq_id, state), state)
            return pb.WaitResultResponse(optim_step=pb.OptimStepResponse(metrics=metrics))

        return step

    def _snapshot(self, model_id: str) -> CapturedState | None:
        """A copy of the model after a step, if a snapshot is due. Runs on the compute thread."""
        if not self.snapshots.is_due(model_id):
            return None
        try:
            return self.engine.capture(model_id, with_optimizer=True)
        except (MemoryError, RuntimeError) as error:  # the step has been applied, so it must not fail
            if is_device_fault(error):
                raise
            self.snapshots.skip(model_id, error)
            return None

    async def delete_files(self, model_id: str) -> None:
        """Removes a deleted model's data outside the engine: its snapshots, hidden checkpoints and published
        versions."""
        self.models.drop(model_id)
        await self.snapshots.forget(model_id)
        await self.publishing.forget(model_id)


def _kind_of(request: pb.CreateModelRequest) -> str:
    """Name of the optimizer that a request asks for; empty when it asks for none."""
    return word_of(types_pb2.Optimizer, request.optimizer)


def refused(error: ServiceError) -> Work:
    """The work of a refused request, which fails in its turn."""

    async def refuse(turn: Turn) -> pb.WaitResultResponse:
        raise error

    return refuse
