"""The trainers and samplers, and the base models that they serve.

A service may be down when the gateway starts, and come up later. A task for each trainer asks what it serves whenever a
connection is made, so a trainer that was restarted with another model is noticed. sampling/replicas.py watches the
samplers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from gateway.channel import connect
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.sampling.replicas import Replicas
from tinsmith.errors import FailedPrecondition, InvalidRequest, ModelNotFound, NotReady, ServiceError
from tinsmith.pictures.counting import Counting, counting_of
from tinsmith.rpc.addresses import Addresses
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.rpc.tls import Certificates
from tinsmith.tasks import cancel_all
from tinsmith.v1 import trainer_admin_pb2_grpc, trainer_pb2, trainer_pb2_grpc

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Time after its start for which the gateway waits for all services, even if some base model is served already, in
seconds."""

_TRAINER = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_REPLIES: dict[str, Any] = {
    "CreateModel": trainer_pb2.CreateModelResponse,
    "ForwardBackward": trainer_pb2.ForwardBackwardResponse,
    "OptimStep": trainer_pb2.OptimStepResponse,
    "SkipOperation": trainer_pb2.SkipOperationResponse,
    "SaveCheckpoint": trainer_pb2.SaveCheckpointResponse,
    "LoadCheckpoint": trainer_pb2.LoadCheckpointResponse,
}


class TrainerClient:
    """The connection to a trainer, and the trainer's description of itself."""

    def __init__(self, address: str, *, api_key: str, certificates: Certificates | None) -> None:
        self.address = address
        self.channel = connect(address, api_key=api_key, certificates=certificates)
        self.stub: Any = trainer_pb2_grpc.TrainerServiceStub(self.channel)
        self.admin: Any = trainer_admin_pb2_grpc.TrainerAdminServiceStub(self.channel)
        self.info: trainer_pb2.GetTrainerInfoResponse | None = None
        # The RPCs are unary, but grpc.aio gives the initial metadata of a unary call only together with the reply. On
        # the wire a unary call is a stream of one message, and grpc.aio gives a stream's initial metadata at once.
        self._operations: dict[str, Any] = {
            name: self.channel.unary_stream(
                f"/{_TRAINER}/{name}", request_serializer=list[bytes].pop, response_deserializer=reply.FromString
            )
            for name, reply in _REPLIES.items()
        }

    @property
    def trainer_id(self) -> str:
        """Stable id of the trainer; empty until the trainer has been reached, and for a trainer of a version without
        ids."""
        return self.info.trainer_id if self.info is not None else ""

    @property
    def store_id(self) -> str:
        """Id of the trainer's checkpoint store; empty in the same cases as `trainer_id`."""
        return self.info.store_id if self.info is not None else ""

    @property
    def is_connected(self) -> bool:
        return self.channel.get_state() == grpc.ChannelConnectivity.READY

    @property
    def state(self) -> Literal["serving", "loading", "gone"]:
        if not self.is_connected:
            return "gone"
        return "loading" if self.info is None else "serving"

    def start(self, rpc: str, body: bytes, *, request_id: str, wait_for_ready: bool) -> Any:
        """Starts a call of an RPC that is acknowledged by initial metadata. Iterate the call for its one reply. With
        `wait_for_ready` the call waits for a trainer that is away; otherwise it fails at once."""
        # A call keeps its request until the reply. The list is emptied when the body is serialized, which frees it.
        metadata = ((REQUEST_ID_METADATA, request_id),)
        return self._operations[rpc]([body], metadata=metadata, wait_for_ready=wait_for_ready)

    async def ask(self) -> None:
        """Waits for the connection to the trainer, and asks what the trainer serves. Raises ServiceError."""
        self.info = await self.stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), wait_for_ready=True)


class Clients:
    """Connections to all trainers and samplers."""

    def __init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self._services = config.services
        self._connect = partial(
            TrainerClient, api_key=config.service_key.get_secret_value(), certificates=config.certificates
        )
        self._known: dict[str, TrainerClient] = {}
        """All trainers that were ever listed, by address. A trainer that is no longer listed keeps its connection until
        the gateway stops, because calls may still be in work there."""
        self.trainers: list[TrainerClient] = []
        self._metrics = metrics
        self._changed = asyncio.Condition()
        self.samplers = Replicas(config, changed=self._changed, metrics=metrics, may_join=self._services.may_change)
        self._watches: dict[str, asyncio.Task[None]] = {}
        """The tasks that watch the trainers, by the trainer's address."""
        self._started_s = time.monotonic()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._use(self._services.known)
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [*self._watches.values(), *([self._following] if self._following else [])]
        await cancel_all(tasks)
        for trainer in self._known.values():
            await trainer.channel.close()
        await self.samplers.close()

    async def _follow(self) -> None:
        async for services in self._services.changes():
            await self._use(services)

    async def _use(self, services: Addresses) -> None:
        """Takes up services that are new in the list, and leaves services that are no longer in it."""
        for address in self._watches.keys() - services.trainers:
            self._watches.pop(address).cancel()
            self._known[address].info = None
            self._metrics.services.trainer_up.remove(address)
        for address in services.trainers:
            if address not in self._known:
                self._known[address] = self._connect(address)
            if address not in self._watches:
                self._watches[address] = asyncio.create_task(self._watch(self._known[address]))
        self.trainers = [self._known[address] for address in services.trainers]
        await self.samplers.use(services.samplers)
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self, trainer: TrainerClient) -> None:
        boot_id, is_quiet = "", False
        up = self._metrics.services.trainer_up.labels(trainer.address)
        while True:
            try:
                up.set(0)
                await trainer.ask()
            except ServiceError as error:
                if not is_quiet:
                    logger.info("%s does not say yet what it serves: %s", trainer.address, error.message)
                is_quiet = True
                await asyncio.sleep(0.1)  # the trainer is up, but loading
                continue
            is_quiet = False
            up.set(1)
            if trainer.info is not None and trainer.info.boot_id != boot_id:
                boot_id = trainer.info.boot_id
                logger.info("%s serves %s", trainer.address, ", ".join(trainer.info.base_models))
                self._warn_of_others(trainer.info.base_models)
            async with self._changed:
                self._changed.notify_all()
            await trainer.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    def _warn_of_others(self, base_models: Iterable[str]) -> None:
        """Logs an error when the trainers of one of these base models do not agree."""
        for base_model in base_models:
            try:
                self.check_agreement(base_model)
            except FailedPrecondition as error:
                logger.error("%s", error.message)
                return

    # Services and their base models

    def trainer_infos(self) -> Iterator[trainer_pb2.GetTrainerInfoResponse]:
        return (trainer.info for trainer in self.trainers if trainer.info is not None)

    @property
    def unreached(self) -> list[str]:
        """Addresses of the services that have not said yet what they serve.

        Empty when all trainers have said so and each of their base models has a sampler, because no other sampler is
        needed then.
        """
        trainers = [trainer.address for trainer in self.trainers if trainer.info is None]
        if self._services.may_change:
            trainers += [] if self.trainers else ["a trainer, which has not joined yet"]
            trainers += [] if self.samplers.all else ["a sampler, which has not joined yet"]
        samplers = [sampler.address for sampler in self.samplers.all if sampler.info is None]
        sampled = {name for info in self.samplers.infos() for name in info.base_models}
        if not trainers and sampled and all(sampled.issuperset(info.base_models) for info in self.trainer_infos()):
            return []
        return trainers + samplers

    def of_each_store(self) -> list[TrainerClient]:
        """One trainer for each store of checkpoints, a connected trainer if the store has one. Raises NotReady while a
        trainer has not said yet which store it has."""
        if any(trainer.info is None for trainer in self.trainers):
            raise NotReady("not every trainer has been reached yet")
        stores: dict[str, TrainerClient] = {}
        for trainer in self.trainers:
            key = trainer.store_id or trainer.address
            if key not in stores or (trainer.is_connected and not stores[key].is_connected):
                stores[key] = trainer
        return list(stores.values())

    @property
    def awaited(self) -> list[str]:
        """Addresses of the services without which this gateway is not ready.

        These are the unreached services. After `PATIENCE_S` there are none if some base model can be trained and
        sampled, so that a service that is down keeps nobody from the others.
        """
        is_patient = time.monotonic() < self._started_s + PATIENCE_S
        sampled = {name for info in self.samplers.infos() for name in info.base_models}
        serves = any(info.base_models and sampled.issuperset(info.base_models) for info in self.trainer_infos())
        return [] if serves and not is_patient else self.unreached

    def num_homes(self, base_model: str) -> int:
        """Number of samplers to which the base model's trainers send each version; 0 while no trainer has reported
        it."""
        served = (info for info in self.trainer_infos() if base_model in info.base_models)
        return max((info.version_homes or len(self.samplers.all) for info in served), default=0)

    def check_all_known(self) -> None:
        """Raises NotReady while the gateway awaits a service."""
        if self.awaited:
            raise NotReady("not every service has been reached yet")

    def any_trainer(self) -> TrainerClient:
        """A trainer that has been reached. Raises NotReady when none has."""
        for trainer in self.trainers:
            if trainer.info is not None:
                return trainer
        raise NotReady("no trainer has been reached yet")

    @property
    def has_unreached_trainers(self) -> bool:
        """Whether a trainer in the list has not said yet what it serves, or none has joined yet."""
        return any(trainer.info is None for trainer in self.trainers) or not self.trainers

    def find_trainer(self, base_model: str, trainer_id: str, *, what: str) -> TrainerClient:
        """The trainer with this id; for an empty id, a trainer that serves the base model. `what`: model_id of the run,
        for error texts.

        Raises NotReady while a trainer in the list has not been reached, because it may have this id. Raises
        ModelNotFound when no trainer in the list has the id, and the errors of `serving`.
        """
        if not trainer_id:
            return self.serving(base_model)[0]
        found = [trainer for trainer in self.trainers if trainer.trainer_id == trainer_id]
        if found:
            return next((trainer for trainer in found if trainer.is_connected), found[0])
        if self.has_unreached_trainers:
            raise NotReady(f"the trainer of {what} ({trainer_id}) has not been reached yet")
        serving = self.serving(base_model)
        if len(serving) == 1 and not serving[0].trainer_id:
            return serving[0]  # the trainer went back to a version without ids
        addresses = ", ".join(trainer.address for trainer in self.trainers)
        raise ModelNotFound(
            f"model_id: {what} is at trainer {trainer_id}, which is none of this gateway's trainers ({addresses}); its "
            "checkpoints can be loaded by a new run",
            model_id=what,
        )

    def serving(self, base_model: str) -> list[TrainerClient]:
        """The trainers that serve the base model and have been reached since the start, at least one.

        Raises NotReady when there is none, but a trainer that has not been reached may serve the base model. Raises
        InvalidRequest when no trainer serves it.
        """
        serving = [each for each in self.trainers if each.info is not None and base_model in each.info.base_models]
        if serving:
            return serving
        if not self.trainers and self._services.may_change:
            raise NotReady("no trainer has joined yet")
        if any(trainer.info is None for trainer in self.trainers):
            raise NotReady(f"no trainer that serves {base_model!r} has been reached yet")
        served = sorted({name for info in self.trainer_infos() for name in info.base_models})
        raise InvalidRequest(
            f"base_model: {base_model!r} cannot be trained here; choose one of {', '.join(served) or 'none'}",
            field="base_model",
        )

    def check_agreement(self, base_model: str) -> None:
        """Raises FailedPrecondition when two trainers of the base model have different checkpoint stores, or differ in
        weights or settings that change a run's results. The error gives both values."""
        first, *others = self.serving(base_model)
        for other in others:
            pair = f"base_model: {base_model!r} is served by {first.address} and {other.address}, which"
            assert first.info is not None
            assert other.info is not None
            if not (first.trainer_id and other.trainer_id):
                raise FailedPrecondition(
                    f"{pair} must both be of a version that gives itself an id; one is older", field="base_model"
                )
            if first.trainer_id == other.trainer_id and first.info.boot_id != other.info.boot_id and other.is_connected:
                raise FailedPrecondition(
                    f"{pair} say that they are one trainer, {first.trainer_id}: the state folder of one was copied. "
                    "Remove writer_id from the copy's TRAINER_STATE_DIR",
                    field="base_model",
                )
            if first.store_id != other.store_id:
                raise FailedPrecondition(
                    f"{pair} do not share their checkpoints: the ids of their stores are {first.store_id} and "
                    f"{other.store_id}. Give both the same store in TRAINER_CHECKPOINT_DIR",
                    field="base_model",
                )
            ours, theirs = dict(first.info.fingerprint), dict(other.info.fingerprint)
            for name in sorted(ours.keys() | theirs.keys()):
                if (one := ours.get(name)) != (two := theirs.get(name)):
                    raise FailedPrecondition(
                        f"{pair} do not agree: {name} is {one!r} at the first and {two!r} at the second. A run could "
                        "get other results depending on its trainer: give both the same weights and settings",
                        field="base_model",
                    )

    def counting(self, base_model: str) -> Counting | None:
        """The rule by which pictures count as tokens of this base model; None when no trainer that has been reached
        takes pictures for it."""
        found = self.picture_counting(base_model)
        if found is None:
            return None
        return counting_of(found.rule, found.settings)

    def picture_counting(self, base_model: str) -> trainer_pb2.PictureCounting | None:
        """The message in which the base model's trainer gives that rule; None in the same cases as `counting`."""
        for info in self.trainer_infos():
            if base_model in info.base_models and info.HasField("picture_counting"):
                return info.picture_counting
        return None

    def are_same(self, one: str, other: str) -> bool:
        """Whether both are names of one base model, according to the services that have been reached."""
        infos = (*self.trainer_infos(), *self.samplers.infos())
        return one == other or any(one in info.base_models and other in info.base_models for info in infos)

    def names_of(self, base_model: str) -> set[str]:
        """All names of this base model, according to the services that have been reached."""
        infos = (*self.trainer_infos(), *self.samplers.infos())
        return {base_model}.union(*(info.base_models for info in infos if base_model in info.base_models))

    async def settle(self, find: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Calls `find` until it does not raise NotReady, and returns its result. Raises NotReady after the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while True:
                    try:
                        return find()
                    except NotReady:
                        await self._changed.wait()
        except TimeoutError:
            return find()
