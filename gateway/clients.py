"""The trainers and samplers, and the base models that they serve.

A service may be down when the gateway starts, and come up later. A task for each trainer asks what it serves whenever a
connection is made, so a trainer that was restarted with another model is noticed. sampling/replicas.py watches the
samplers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from gateway.channel import connect
from gateway.metrics import Metrics
from gateway.sampling.replicas import Replica, Replicas
from tinsmith.errors import FailedPrecondition, InvalidRequest, NotReady, ServiceError
from tinsmith.pictures.counting import Counting, counting_of
from tinsmith.rpc.addresses import Addresses, address_changes
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.rpc.tls import Certificates
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TRAINER = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_REPLIES: dict[str, Any] = {
    "CreateModel": trainer_pb2.CreateModelResponse,
    "ForwardBackward": trainer_pb2.ForwardBackwardResponse,
    "OptimStep": trainer_pb2.OptimStepResponse,
    "SkipOperation": trainer_pb2.SkipOperationResponse,
    "SaveCheckpoint": trainer_pb2.SaveCheckpointResponse,
    "LoadCheckpoint": trainer_pb2.LoadCheckpointResponse,
}


class Trainer:
    """The connection to a trainer, and what it serves."""

    def __init__(self, address: str, *, api_key: str, certificates: Certificates | None) -> None:
        self.address = address
        self.channel = connect(address, api_key=api_key, certificates=certificates)
        self.stub: Any = trainer_pb2_grpc.TrainerServiceStub(self.channel)
        self.info: trainer_pb2.GetTrainerInfoResponse | None = None
        # The RPCs are unary, but grpc.aio gives the initial metadata of a unary call only together with the reply. On
        # the wire a unary call is a stream of one message, and grpc.aio gives a stream's initial metadata at once.
        self._operations: dict[str, Any] = {
            name: self.channel.unary_stream(
                f"/{_TRAINER}/{name}", request_serializer=list[bytes].pop, response_deserializer=reply.FromString
            )
            for name, reply in _REPLIES.items()
        }

    def start(self, rpc: str, body: bytes, *, request_id: str) -> Any:
        """Starts a call of an RPC that is acknowledged by initial metadata. Iterate it for its one reply."""
        # A call keeps its request until the reply. The list is emptied when the body is serialized, which frees it.
        return self._operations[rpc]([body], metadata=((REQUEST_ID_METADATA, request_id),), wait_for_ready=True)

    async def ask(self) -> None:
        """Asks what the trainer serves; waits for its connection."""
        self.info = await self.stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), wait_for_ready=True)


class Clients:
    """Connections to all trainers and samplers."""

    def __init__(
        self,
        *,
        services: Addresses,
        metrics: Metrics,
        api_key: str = "",
        certificates: Certificates | None = None,
        sampler_timeout_s: float = 3.0,
        sampler_load_factor: float = 1.25,
        has_peers: bool = False,
        services_file: Path | None = None,
    ) -> None:
        """`services`: the addresses at the start. `api_key`: sent to all services, unless it is empty. `has_peers`:
        other gateways use the samplers, too. `services_file`: where the addresses may change."""
        self._services = services
        self._services_file = services_file
        self._connect = partial(Trainer, api_key=api_key, certificates=certificates)
        self._known: dict[str, Trainer] = {}
        """All trainers that were ever listed, by address. One that is listed no more keeps its connection, on which
        calls may still be in work, until the gateway stops."""
        self._trainers: list[Trainer] = []
        self._metrics = metrics
        self._changed = asyncio.Condition()
        self.samplers = Replicas(
            changed=self._changed,
            metrics=metrics,
            api_key=api_key,
            certificates=certificates,
            timeout_s=sampler_timeout_s,
            load_factor=sampler_load_factor,
            are_shared=has_peers,
            may_join=services_file is not None,
        )
        self._watches: dict[str, asyncio.Task[None]] = {}
        """By address of the trainer."""
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._use(self._services)
        if self._services_file is not None:
            self._following = asyncio.create_task(self._follow(self._services_file))

    async def close(self) -> None:
        tasks = [*self._watches.values(), *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for trainer in self._known.values():
            await trainer.channel.close()
        await self.samplers.close()

    async def _follow(self, services_file: Path) -> None:
        async for services in address_changes(services_file, self._services):
            await self._use(services)

    async def _use(self, services: Addresses) -> None:
        """Takes up the services that are new in the list, and leaves those that are no longer in it."""
        for address in self._watches.keys() - services.trainers:
            self._watches.pop(address).cancel()
            self._known[address].info = None
            self._metrics.services.trainer_up.remove(address)
        for address in services.trainers:
            if address not in self._known:
                self._known[address] = self._connect(address)
            if address not in self._watches:
                self._watches[address] = asyncio.create_task(self._watch(self._known[address]))
        self._trainers = [self._known[address] for address in services.trainers]
        await self.samplers.use(services.samplers)
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self, trainer: Trainer) -> None:
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
        """Logs an error when two trainers serve one of these base models."""
        for base_model in base_models:
            try:
                self.find_trainer(base_model)
            except FailedPrecondition as error:
                logger.error("%s", error.message)
                return

    # Services and their base models

    @property
    def trainers(self) -> list[Trainer]:
        return self._trainers

    def trainer_infos(self) -> Iterator[trainer_pb2.GetTrainerInfoResponse]:
        return (trainer.info for trainer in self._trainers if trainer.info is not None)

    @property
    def unreached(self) -> list[str]:
        """Addresses of the services that have not said yet what they serve.

        Empty when all trainers have said so, and each of their base models has a sampler: the others are not needed.
        """
        trainers = [trainer.address for trainer in self._trainers if trainer.info is None]
        if self._services_file is not None:
            trainers += [] if self._trainers else ["a trainer, which has not joined yet"]
            trainers += [] if self.samplers.all else ["a sampler, which has not joined yet"]
        samplers = [sampler.address for sampler in self.samplers.all if sampler.info is None]
        sampled = {name for info in self.samplers.infos() for name in info.base_models}
        if not trainers and sampled and all(sampled.issuperset(info.base_models) for info in self.trainer_infos()):
            return []
        return trainers + samplers

    def all_trainers(self) -> list[Trainer]:
        """All trainers. Raises NotReady while one of them has not said yet what it serves."""
        if any(trainer.info is None for trainer in self._trainers):
            raise NotReady("not every trainer has been reached yet")
        return self._trainers

    def check_all_known(self) -> None:
        """Raises NotReady while a service that may be needed has not said yet what it serves."""
        if self.unreached:
            raise NotReady("not every service has been reached yet")

    def any_trainer(self) -> Trainer:
        """A trainer that has been reached. Raises NotReady when none has."""
        for trainer in self._trainers:
            if trainer.info is not None:
                return trainer
        raise NotReady("no trainer has been reached yet")

    def find_trainer(self, base_model: str) -> Trainer:
        """The trainer that serves the base model.

        Raises NotReady while a trainer that has not been reached may serve it, FailedPrecondition when two serve it,
        else InvalidRequest.
        """
        serving = [each for each in self._trainers if each.info is not None and base_model in each.info.base_models]
        if len(serving) > 1:
            # A run's state and journal are at one trainer, and requests to the other one would fail.
            addresses = " and ".join(trainer.address for trainer in serving)
            raise FailedPrecondition(
                f"base_model: {base_model!r} is served by {addresses}. A run lives at one trainer, and this gateway "
                "cannot tell which: leave one trainer for each base model in its setting trainers (GATEWAY_TRAINERS)",
                field="base_model",
            )
        if serving:
            return serving[0]
        if not self._trainers and self._services_file is not None:
            raise NotReady("no trainer has joined yet")
        if any(trainer.info is None for trainer in self._trainers):
            raise NotReady(f"no trainer that serves {base_model!r} has been reached yet")
        served = sorted({name for info in self.trainer_infos() for name in info.base_models})
        raise InvalidRequest(
            f"base_model: {base_model!r} cannot be trained here; choose one of {', '.join(served) or 'none'}",
            field="base_model",
        )

    def counting(self, base_model: str) -> Counting | None:
        """How the pictures of this base model are counted; None when no trainer that has been reached takes any."""
        found = self.picture_counting(base_model)
        if found is None:
            return None
        return counting_of(found.rule, found.settings)

    def picture_counting(self, base_model: str) -> trainer_pb2.PictureCounting | None:
        """What the trainer says of pictures for this base model; None as in `counting`."""
        for info in self.trainer_infos():
            if base_model in info.base_models and info.HasField("picture_counting"):
                return info.picture_counting
        return None

    def are_same(self, one: str, other: str) -> bool:
        """Whether both are names of one base model, as far as the services have said."""
        infos = (*self.trainer_infos(), *self.samplers.infos())
        return one == other or any(one in info.base_models and other in info.base_models for info in infos)

    def names_of(self, base_model: str) -> set[str]:
        """All names of this base model, as far as the services have said."""
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

    async def trainer(self, base_model: str) -> Trainer:
        """`find_trainer`, but waits where that raises NotReady. Raises InvalidRequest."""
        return await self.settle(lambda: self.find_trainer(base_model))

    async def sampler(self, base_model: str) -> Replica:
        """The least loaded sampler that serves the base model; waits until there is one."""
        return await self.samplers.route(base_model)
