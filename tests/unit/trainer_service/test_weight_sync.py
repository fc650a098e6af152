"""The sender against receivers that speak the real protocol over real gRPC, gloo and shared memory, in this process."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.support.waiting import until
from tinsmith.errors import (
    AlreadyExists,
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    NotReady,
    OutOfCapacity,
    Unsupported,
    VersionConflict,
    VersionNotLoaded,
)
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights
from tinsmith.rpc.addresses import Addresses, write_addresses
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel.buckets import checksum, receive
from tinsmith.weight_channel.group import WeightGroup, join_store
from tinsmith.weight_channel.ring import RingInlet, connect_ring
from tinsmith.weight_channel.ring_memory import RingMemory, map_host_ring
from tinsmith.weight_channel.transport import Inlet
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.weight_sync import Version, WeightSender, group, samplers
from trainer_service.weight_sync import sender as sender_module
from trainer_service.weight_sync.choice import Channel

Context = grpc.aio.ServicerContext[Any, Any]

TIMEOUT_S = 20.0
BUCKET_BYTES = 10_000
"""Small, so that every version of these tests takes several."""


class Receiver(weight_sync_pb2_grpc.WeightSyncServiceServicer, sampler_pb2_grpc.SamplerServiceServicer):
    """The receiving end, as short as it can be, with faults to order."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.joined = asyncio.Event()
        self.versions: dict[str, Tensor] = {}
        self.confirmed: list[str] = []
        self.awake = asyncio.Event()
        """ConfirmVersion and RemoveVersion wait for it."""
        self.awake.set()
        self.announced = asyncio.Event()
        """StartWeightUpdate waits for it."""
        self.announced.set()
        self.on_start: Callable[[], Awaitable[None]] | None = None
        """StartWeightUpdate calls it."""
        self.faults: list[str] = []
        """Each makes the call of that name fail once."""
        self.backends: list[str] = []
        self.least_epoch = 0
        self.joins = asyncio.Event()
        """InitWeightTransfer waits for it."""
        self.joins.set()
        self.num_joining = 0
        """Calls of InitWeightTransfer that wait."""
        self.on_this_machine = True
        self.gpu_uuid = ""
        self._meeting: socket.socket | None = None
        self._group: Inlet | None = None
        self._started: pb.StartWeightUpdateRequest | None = None
        self._flat = torch.empty(0)
        self.received = ""

    def _fault(self, name: str) -> None:
        if name in self.faults:
            self.faults.remove(name)
            raise (OutOfCapacity if name == "start-full" else FailedPrecondition)(f"{name} was told to fail")

    async def ProbeWeightTransfer(
        self, request: pb.ProbeWeightTransferRequest, context: Context
    ) -> pb.ProbeWeightTransferResponse:
        self._fault("probe")
        if not self.on_this_machine:
            return pb.ProbeWeightTransferResponse()
        self._part()
        self._meeting = connect_ring(request.socket)
        return pb.ProbeWeightTransferResponse(connected=True, gpu_uuid=self.gpu_uuid)

    async def InitWeightTransfer(
        self, request: pb.InitWeightTransferRequest, context: Context
    ) -> pb.InitWeightTransferResponse:
        def form() -> Inlet:
            if request.backend == "shm":
                trainer, self._meeting = self._meeting, None
                assert trainer is not None
                return RingInlet(map_host_ring(trainer, request.ring), trainer, epoch=request.epoch)
            return WeightGroup.form(
                join_store(request.store_host, request.store_port, timeout_s=TIMEOUT_S),
                epoch=request.epoch,
                rank=request.rank,
                world_size=request.world_size,
                backend="gloo",
                host="127.0.0.1",
                timeout_s=TIMEOUT_S,
            )

        self.num_joining += 1
        try:
            await self.joins.wait()
        finally:
            self.num_joining -= 1
        if request.epoch <= self.least_epoch:
            raise FailedPrecondition("epoch: not above the present one", epoch=self.least_epoch)
        formed = await asyncio.to_thread(form)
        self.leave()
        self._group = formed
        self._fault("init")
        self.backends.append(request.backend)
        self.epochs.append(request.epoch)
        self.joined.set()
        return pb.InitWeightTransferResponse()

    def leave(self) -> None:
        """As if it had died: its connections close."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._part()

    def _part(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = None

    async def StartWeightUpdate(
        self, request: pb.StartWeightUpdateRequest, context: Context
    ) -> pb.StartWeightUpdateResponse:
        self._fault("start")
        await self.announced.wait()
        if self.on_start is not None:
            await self.on_start()
        if self._group is None or self._group.epoch != request.epoch:
            raise FailedPrecondition("no such group")
        if request.base_model != "tiny":
            raise InvalidRequest(f"base_model: {request.base_model!r} is not 'tiny'")
        if request.version_id not in self.versions:
            self._fault("start-full")
        if (held := self.versions.get(request.version_id)) is not None:
            raise AlreadyExists(request.version_id, checksum=checksum(held, torch.float32))
        self._started = request
        return pb.StartWeightUpdateResponse()

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        announced, group = self._started, self._group
        if "update" in self.faults:
            group = None
            self.leave()
        self._fault("update")
        assert announced is not None
        assert group is not None
        assert announced.epoch == group.epoch, "the version was announced to another group"
        self._flat = flat = torch.empty(sum(torch.Size(spec.shape).numel() for spec in announced.tensors))
        if "middle" in self.faults:
            await asyncio.to_thread(group.receive(flat[: announced.bucket_bytes // 4]))
            group = None
            self.leave()
        self._fault("middle")
        assert group is not None
        arriving = partial(receive, group, flat, dtype=torch.float32, bucket_bytes=announced.bucket_bytes)
        self.received = await asyncio.to_thread(arriving)
        return pb.UpdateWeightsResponse(num_bytes=self._flat.nbytes)

    async def FinishWeightUpdate(
        self, request: pb.FinishWeightUpdateRequest, context: Context
    ) -> pb.FinishWeightUpdateResponse:
        self._fault("finish")
        if self.received != request.checksum:
            raise DataCorrupted("checksum")
        self.versions[request.version_id] = self._flat
        return pb.FinishWeightUpdateResponse(version_id=request.version_id)

    async def ConfirmVersion(self, request: pb.ConfirmVersionRequest, context: Context) -> pb.ConfirmVersionResponse:
        await self.awake.wait()
        if request.version_id not in self.versions:
            raise VersionNotLoaded(request.version_id)
        self.confirmed.append(request.version_id)
        return pb.ConfirmVersionResponse()

    async def ListVersions(
        self, request: sampler_pb2.ListVersionsRequest, context: Context
    ) -> sampler_pb2.ListVersionsResponse:
        names = sorted(name for name in self.versions if name > request.page_token)
        return sampler_pb2.ListVersionsResponse(
            versions=[sampler_pb2.VersionInfo(version_id=name) for name in names[:2]],
            next_page_token=names[1] if len(names) > 2 else "",
        )

    async def RemoveVersion(self, request: pb.RemoveVersionRequest, context: Context) -> pb.RemoveVersionResponse:
        self._fault("remove")
        await self.awake.wait()
        self.versions.pop(request.version_id, None)
        return pb.RemoveVersionResponse()


Serve = Callable[..., Awaitable[Server]]
Connect = Callable[..., Awaitable[WeightSender]]
MakeVersion = Callable[[str], Version]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[Server] = []
    receivers: list[Receiver] = []

    async def make(receiver: Receiver, *, port: int = 0) -> Server:
        server = Server(f"127.0.0.1:{port}", [weight_sync_pb2.DESCRIPTOR, sampler_pb2.DESCRIPTOR])
        weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server(receiver, server.grpc)
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(receiver, server.grpc)
        await server.start()
        await server.set_serving(True)
        servers.append(server)
        receivers.append(receiver)
        return server

    yield make
    for server in servers:
        await server.stop(0)
    for receiver in receivers:
        receiver.leave()


BOTH_CHANNELS = pytest.mark.parametrize("channel", ["gloo", "shm"])


@pytest.fixture(params=["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def channel(request: pytest.FixtureRequest) -> Channel:
    """The fast tests have gloo only where bytes or groups differ: BOTH_CHANNELS."""
    return request.param


@pytest.fixture
async def connect(serve: Serve, channel: Channel) -> AsyncIterator[Connect]:
    """Makes a sender to some servers, or addresses. It is closed before the servers stop."""
    senders: list[WeightSender] = []

    async def make(
        *samplers: Server | str,
        started: bool = True,
        channel: Channel = channel,
        silence_s: float = 20,
        services_file: Path | None = None,
        version_homes: int = 4,
    ) -> WeightSender:
        addresses = [each if isinstance(each, str) else f"127.0.0.1:{each.port}" for each in samplers]
        config = TrainerConfig(
            base_model="tiny",
            samplers=addresses,
            services_file=services_file,
            channel=channel,
            channel_timeout_s=TIMEOUT_S,
            channel_silence_s=silence_s,
            version_homes=version_homes,
        ).model_copy(update={"channel_bucket_bytes": BUCKET_BYTES})  # fewer than the setting allows
        sender = WeightSender(config, Metrics(CollectorRegistry()), trainer_id="test")
        senders.append(sender)
        if started:
            sender.start()
        return sender

    yield make
    for sender in senders:
        await sender.close()


@pytest.fixture
def make_version(base: BaseModel) -> MakeVersion:
    def make(version_id: str) -> Version:
        return Version(version_id, "tiny", Adapter.create(AdapterConfig(rank=4), base.targets, base.device))

    return make


@pytest.fixture
def make_full_version(base: BaseModel) -> MakeVersion:
    """Makes versions of all parameters of the model."""

    def make(version_id: str) -> Version:
        layout = FullWeights(base, torch.empty(0))
        numel = sum(torch.Size(shape).numel() for _, shape in layout.specs())
        return Version(version_id, "tiny", FullWeights(base, torch.randn(numel)))

    return make


@BOTH_CHANNELS
@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_version_arrives_bit_for_bit_at_every_sampler(
    connect: Connect, serve: Serve, make_version: MakeVersion, make_full_version: MakeVersion, kind: str
) -> None:
    receivers = [Receiver(), Receiver()]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    make = make_version if kind == "adapter" else make_full_version
    versions = [make(f"m@{n}") for n in (1, 2, 3)]
    for version in versions:
        published = await sender.publish(version)
        assert len(published.members) == 2
        assert published.num_bytes == version.adapter.num_bytes
        assert published.checksum == receivers[0].received == receivers[1].received
    for receiver in receivers:
        for version in versions:
            assert torch.equal(receiver.versions[version.version_id], version.adapter.flat)
        assert len(receiver.epochs) <= 2, "one group serves many versions"
    assert (receivers[0].epochs[-1] == receivers[1].epochs[-1]) == (kind == "full"), "one group for all parameters only"


def holding(receivers: Sequence[Receiver], version_id: str) -> list[int]:
    return [n for n, receiver in enumerate(receivers) if version_id in receiver.versions]


async def test_versions_of_a_run_have_the_same_homes_and_runs_are_spread(
    connect: Connect, serve: Serve, make_version: MakeVersion, make_full_version: MakeVersion
) -> None:
    receivers = [Receiver() for _ in range(6)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, version_homes=2)
    homes = dict[str, list[int]]()
    for run in "abcdef":
        published = await sender.publish(make_version(f"{run}@1"))
        homes[run] = holding(receivers, f"{run}@1")
        assert published.members == [f"127.0.0.1:{servers[n].port}" for n in homes[run]]
        assert len(homes[run]) == 2
        await sender.publish(make_version(f"{run}@2"))
        assert holding(receivers, f"{run}@2") == homes[run]
    assert len({tuple(each) for each in homes.values()}) > 1
    await sender.publish(make_full_version("full@1"))
    assert holding(receivers, "full@1") == [0, 1, 2, 3, 4, 5], "all parameters go to every sampler"
    await sender.publish(make_version("a@3"))
    assert holding(receivers, "a@3") == homes["a"]


async def test_more_samplers_get_a_version_that_is_wanted_there_and_its_homes_are_sent_nothing(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver() for _ in range(4)]
    sender = await connect(*[await serve(receiver) for receiver in receivers], version_homes=1)
    version = make_version("m@1")
    await sender.publish(version)
    (home,) = holding(receivers, "m@1")
    receivers[home].faults = ["update"]
    assert len((await sender.publish(version, num_samplers=3)).members) == 3
    assert len(holding(receivers, "m@1")) == 3
    assert receivers[home].faults == ["update"], "it has the version already"
    assert len((await sender.publish(version, num_samplers=9)).members) == 4


async def test_a_run_whose_homes_have_no_room_or_are_gone_has_others(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver() for _ in range(3)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, version_homes=1)
    await sender.publish(make_version("m@1"))
    (first,) = holding(receivers, "m@1")
    receivers[first].faults = ["start-full"]
    await sender.publish(make_version("m@2"))
    (second,) = holding(receivers, "m@2")
    assert second != first
    await servers[second].grpc.stop(0)
    receivers[second].leave()
    await sender.publish(make_version("m@3"))
    (third,) = holding(receivers, "m@3")
    assert third not in (first, second)


async def test_a_sampler_more_or_less_changes_neither_the_homes_nor_the_groups_of_others(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver() for _ in range(4)]
    servers = [await serve(receiver) for receiver in receivers]
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    runs = [f"run{n}" for n in range(12)]
    sender = await connect(*addresses, version_homes=1)
    for run in runs:
        await sender.publish(make_version(f"{run}@1"))
    homes = {run: holding(receivers, f"{run}@1") for run in runs}
    gone = homes[runs[0]][0]
    epochs = [list(receiver.epochs) for receiver in receivers]
    await servers[gone].grpc.stop(0)
    receivers[gone].leave()
    for run in runs:
        await sender.publish(make_version(f"{run}@2"))
        assert homes[run] in ([gone], holding(receivers, f"{run}@2"))
    for n, receiver in enumerate(receivers):
        assert n == gone or receiver.epochs == epochs[n]


@BOTH_CHANNELS
async def test_the_first_group_is_formed_ahead_of_need(connect: Connect, serve: Serve) -> None:
    receiver = Receiver()
    await connect(await serve(receiver))
    await asyncio.wait_for(receiver.joined.wait(), 30)


@BOTH_CHANNELS
async def test_publishes_at_the_same_time_go_one_after_the_other(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    sender = await connect(await serve(receiver))
    published = await asyncio.gather(*(sender.publish(make_version(f"m@{n}")) for n in range(5)))
    assert [len(each.members) for each in published] == [1] * 5
    assert len(receiver.versions) == 5


async def test_samplers_come_and_go_by_the_file_while_the_trainer_runs(
    connect: Connect, serve: Serve, make_version: MakeVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.rpc.addresses._FILE_INTERVAL_S", 0.02)
    listed, receivers = tmp_path / "services.json", [Receiver(), Receiver()]
    addresses = [f"127.0.0.1:{(await serve(receiver)).port}" for receiver in receivers]
    write_addresses(listed, Addresses())
    sender = await connect(services_file=listed)
    assert not sender.has_samplers
    for count, version_id in ((1, "m@1"), (2, "m@2"), (1, "m@3"), (2, "m@4")):
        write_addresses(listed, Addresses(samplers=addresses[:count]))
        await until(lambda count=count: len(sender.samplers.serving()) == count)
        published = await sender.publish(make_version(version_id))
        assert list(published.members) == addresses[:count]
    assert [*receivers[0].versions] == ["m@1", "m@2", "m@3", "m@4"]
    assert [*receivers[1].versions] == ["m@2", "m@4"]


async def test_no_sampler_is_no_error_but_counts_zero(connect: Connect, make_version: MakeVersion) -> None:
    for sender in (await connect(), await connect("127.0.0.1:1")):
        published = await sender.publish(make_version("m@1"))
        assert published.members == []


async def test_a_version_that_all_hold_is_not_sent_again(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    sender = await connect(await serve(receiver))
    version = make_version("m@1")
    await sender.publish(version)
    receiver.faults = ["update"]
    again = await sender.publish(version)
    assert len(again.members) == 1
    assert again.checksum == receiver.received
    assert receiver.faults == ["update"]


async def test_other_weights_under_an_id_that_a_sampler_serves_are_refused_for_that_and_it_goes_on(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver()]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers)
    version = make_version("m@7")
    await sender.publish(version)
    del receivers[1].versions["m@7"]
    other = make_version("m@7")
    other.adapter.flat.fill_(0.5)
    with pytest.raises(VersionConflict, match=r"serves other weights as m@7.* id again") as refused:
        await sender.publish(other)
    assert refused.value.metadata["sampler"] == f"127.0.0.1:{servers[0].port}"
    assert torch.equal(receivers[0].versions["m@7"], version.adapter.flat)
    assert "m@7" not in receivers[1].versions, "it could not be the same everywhere"
    assert len((await sender.publish(version)).members) == 2


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_version_that_some_hold_goes_to_the_others(
    connect: Connect, serve: Serve, make_version: MakeVersion, make_full_version: MakeVersion, kind: str
) -> None:
    receivers = [Receiver(), Receiver(), Receiver()]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    make = make_version if kind == "adapter" else make_full_version
    version = make("m@1")
    await sender.publish(version)
    del receivers[1].versions["m@1"]
    assert len((await sender.publish(version)).members) == 3
    assert torch.equal(receivers[1].versions["m@1"], version.adapter.flat)
    assert len((await sender.publish(make("m@2"))).members) == 3
    assert all("m@2" in receiver.versions for receiver in receivers)


@BOTH_CHANNELS
@pytest.mark.parametrize("verb", ["probe", "init", "start", "update", "middle", "finish"])
async def test_a_failure_of_any_verb_is_retried_on_a_new_group(
    connect: Connect, serve: Serve, make_version: MakeVersion, verb: str, channel: Channel
) -> None:
    if (verb, channel) == ("probe", "gloo"):
        pytest.skip("nobody is asked where it is")
    receivers = [Receiver(), Receiver()]
    receivers[1].faults = [verb]
    sender = await connect(*[await serve(receiver) for receiver in receivers], started=False)
    version = make_version("m@1")
    assert len((await sender.publish(version)).members) == 2
    for receiver in receivers:
        assert torch.equal(receiver.versions["m@1"], version.adapter.flat)
    assert receivers[1].faults == []
    assert version.adapter.num_bytes > 2 * BUCKET_BYTES


@BOTH_CHANNELS
async def test_a_channel_that_never_works_ends_in_a_clear_error(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    receiver.faults = ["start"] * 9
    sender = await connect(await serve(receiver))
    with pytest.raises(NotReady, match=r"m@1 was not published: 3 attempts failed.*start was told to fail"):
        await sender.publish(make_version("m@1"))
    receiver.faults = []
    assert len((await sender.publish(make_version("m@2"))).members) == 1


FAULT = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["send", "form"])
async def test_a_fault_after_which_the_device_computes_nothing_is_no_matter_of_the_channel(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is raised as it is, and whoever publishes ends the process. Met in the background, it sets an event."""

    def faults(*_: object, **__: object) -> None:
        raise FAULT

    if where == "send":
        monkeypatch.setattr(sender_module, "send", faults)
    else:
        monkeypatch.setattr(group, "make_host_ring", faults)
        monkeypatch.setattr(WeightGroup, "form", faults)
    sender = await connect(await serve(Receiver()), started=False)
    with pytest.raises(NotReady, match=r"3 attempts failed.*illegal memory access"):  # the device goes on
        await sender.publish(make_version("m@1"))
    monkeypatch.setattr("tinsmith.faults._computes", lambda: False)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        await sender.publish(make_version("m@1"))
    if where == "form":
        sender = await connect(await serve(Receiver()))
        async with asyncio.timeout(TIMEOUT_S):
            await sender.device_failed.wait()


async def test_auto_takes_shared_memory_on_this_machine_and_gloo_for_the_rest_in_one_publish(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver(), Receiver(), Receiver()]
    receivers[1].on_this_machine = receivers[3].on_this_machine = False
    sender = await connect(*[await serve(receiver) for receiver in receivers], channel="auto")
    versions = [make_version(f"m@{n}") for n in (1, 2)]
    for version in versions:
        assert len((await sender.publish(version)).members) == 4
    assert [receiver.backends[-1] for receiver in receivers] == ["shm", "gloo", "shm", "gloo"]
    for receiver in receivers:
        for version in versions:
            assert torch.equal(receiver.versions[version.version_id], version.adapter.flat)


async def test_auto_goes_through_host_memory_where_gpu_memory_has_failed(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_cuda_ring(**_: object) -> RingMemory:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(group, "gpu_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(group, "make_cuda_ring", make_cuda_ring)
    receiver = Receiver()
    receiver.gpu_uuid = "GPU-1"
    server = await serve(receiver)
    sender = await connect(server, channel="auto", started=False)
    version = make_version("m@1")
    assert len((await sender.publish(version)).members) == 1
    assert receiver.backends == ["shm"]
    assert torch.equal(receiver.versions["m@1"], version.adapter.flat)
    asked_for = await connect(server, channel="cuda_ipc", started=False)
    with pytest.raises(NotReady, match="operation not supported"):
        await asked_for.publish(make_version("m@2"))


async def test_shared_memory_that_was_asked_for_and_cannot_be_had_is_a_clear_error(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    receiver.on_this_machine = False
    sender = await connect(await serve(receiver), channel="shm")
    with pytest.raises(Unsupported, match=r"channel: 'shm' does not reach the sampler 127\.0\.0\.1:\d+: it is not on"):
        await sender.publish(make_version("m@1"))


@BOTH_CHANNELS
async def test_a_sampler_that_has_a_later_epoch_in_mind_is_outbid(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    """As after a restart of the trainer with a clock that was set back."""
    receiver = Receiver()
    receiver.least_epoch = 1 << 50
    sender = await connect(await serve(receiver))
    assert len((await sender.publish(make_version("m@1"))).members) == 1
    assert receiver.epochs[-1] > 1 << 50


async def test_a_refusal_is_handed_on_as_it_is(
    connect: Connect, serve: Serve, base: BaseModel, make_version: MakeVersion
) -> None:
    sender = await connect(await serve(Receiver()))
    adapter = Adapter.create(AdapterConfig(rank=4), base.targets, base.device)
    with pytest.raises(InvalidRequest, match="base_model: 'huge'"):
        await sender.publish(Version("m@1", "huge", adapter))
    assert len((await sender.publish(make_version("m@2"))).members) == 1


@BOTH_CHANNELS
async def test_a_sampler_that_dies_between_publishes_is_left_out(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver()]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers)
    assert len((await sender.publish(make_version("m@1"))).members) == 2
    await servers[1].grpc.stop(0)
    receivers[1].leave()
    version = make_version("m@2")
    assert len((await sender.publish(version)).members) == 1
    assert torch.equal(receivers[0].versions["m@2"], version.adapter.flat)


async def test_a_full_sampler_is_left_out_and_gets_versions_again_later(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver() for _ in range(3)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers)
    await until(lambda: all(sampler.serving and sampler in sender._links for sampler in sender.samplers.all))
    receivers[1].faults = ["start-full"]
    others = [f"127.0.0.1:{servers[n].port}" for n in (0, 2)]
    assert (await sender.publish(make_version("m@1"))).members == others
    groups = len(receivers[0].epochs)
    assert (await sender.publish(make_version("m@2"))).members == others
    assert len(receivers[0].epochs) == groups, "the sampler that was full a moment ago is not asked"
    assert [list(receiver.versions) for receiver in receivers] == [["m@1", "m@2"], [], ["m@1", "m@2"]]
    sender.sampler(f"127.0.0.1:{servers[1].port}").full_until = 0.0
    version = make_version("m@3")
    assert len((await sender.publish(version)).members) == 3
    assert list(receivers[1].versions) == ["m@3"]
    # One that holds the version is enough, though the other one is full.
    del receivers[1].versions["m@3"]
    receivers[1].faults = ["start-full"]
    receivers[2].faults = ["start-full"]
    del receivers[2].versions["m@3"]
    assert (await sender.publish(version)).members == others[:1]


async def test_a_sampler_that_becomes_full_when_it_is_asked_again_is_left_out_on_the_same_attempt(
    connect: Connect, serve: Serve, make_full_version: MakeVersion, caplog: pytest.LogCaptureFixture
) -> None:
    """A broadcast of all parameters goes to a whole group, so those who lack them are asked again, as a group."""
    receivers = [Receiver() for _ in range(3)]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    version = make_full_version("m@1")
    await sender.publish(version)
    for receiver in receivers[1:]:
        del receiver.versions["m@1"]
    asked = 0

    async def full_the_second_time() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            receivers[1].faults = ["start-full"]

    receivers[1].on_start = full_the_second_time
    assert len((await sender.publish(version)).members) == 2
    assert (asked, receivers[1].faults) == (2, [])
    assert "attempt 1" not in caplog.text
    assert list(receivers[2].versions) == ["m@1"]


async def test_a_version_for_which_no_sampler_has_room_is_refused_as_they_do(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver()]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    for receiver in receivers:
        receiver.faults = ["start-full"]
    with pytest.raises(OutOfCapacity, match="start-full"):
        await sender.publish(make_version("m@1"))
    assert len((await sender.publish(make_version("m@2"))).members) == 2


def make_hang(sender: WeightSender, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the health checks of one sampler unanswered."""
    answered = samplers.is_serving

    async def check(channel: grpc.aio.Channel, *, timeout_s: float = 2.0) -> bool:
        if channel is sender.sampler(address).channel:
            await asyncio.sleep(timeout_s)
            return False
        return await answered(channel, timeout_s=timeout_s)

    monkeypatch.setattr(samplers, "is_serving", check)


async def test_a_sampler_that_hangs_is_left_out_long_before_its_silence_would_tell(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver() for _ in range(3)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, silence_s=1000)
    await sender.publish(make_version("m@1"))
    make_hang(sender, f"127.0.0.1:{servers[1].port}", monkeypatch)
    receivers[1].announced.clear()
    published = await asyncio.wait_for(sender.publish(make_version("m@2")), 100)
    assert published.members == [f"127.0.0.1:{servers[n].port}" for n in (0, 2)]


async def test_a_run_whose_only_home_hangs_soon_has_another(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver() for _ in range(2)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, silence_s=1000, version_homes=1)
    await sender.publish(make_version("m@1"))
    (home,) = holding(receivers, "m@1")
    make_hang(sender, f"127.0.0.1:{servers[home].port}", monkeypatch)
    receivers[home].announced.clear()
    published = await asyncio.wait_for(sender.publish(make_version("m@2")), 100)
    assert published.members == [f"127.0.0.1:{servers[1 - home].port}"]


async def test_a_full_a_dead_and_a_hanging_sampler_keep_no_version_from_a_fourth(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver() for _ in range(4)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, silence_s=1000)
    assert len((await sender.publish(make_version("m@1"))).members) == 4
    make_hang(sender, f"127.0.0.1:{servers[2].port}", monkeypatch)
    receivers[0].faults = ["start-full"] * 9
    await servers[1].grpc.stop(0)
    receivers[1].leave()
    receivers[2].announced.clear()
    version = make_version("m@2")
    published = await asyncio.wait_for(sender.publish(version), 100)
    assert published.members == [f"127.0.0.1:{servers[3].port}"]
    full, dead, hanging = (published.left_out[f"127.0.0.1:{server.port}"] for server in servers[:3])
    assert (full, dead) == ("full", "gone")
    assert hanging in ("not_serving", "no_group")  # `make_hang` leaves the watch of its health alone
    assert torch.equal(receivers[3].versions["m@2"], version.adapter.flat)


async def test_only_the_sampler_whose_transport_has_failed_gets_another_one(
    connect: Connect,
    serve: Serve,
    make_version: MakeVersion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group, "ON_CUDA", {"shm", "gloo"})  # as if it were memory of a GPU
    receivers = [Receiver(), Receiver(), Receiver()]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, channel="auto")
    await sender.publish(make_version("m@1"))
    receivers[1].faults = ["update"]
    assert len((await sender.publish(make_version("m@2"))).members) == 3
    told = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    assert told == [f"from now on weights reach 127.0.0.1:{servers[1].port} through host memory"]


async def test_those_who_outlive_another_sampler_keep_their_transport(
    connect: Connect,
    serve: Serve,
    make_version: MakeVersion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group, "ON_CUDA", {"shm", "gloo"})  # as if it were memory of a GPU
    receivers = [Receiver(), Receiver()]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, channel="auto")
    await sender.publish(make_version("m@1"))
    await servers[1].grpc.stop(0)
    assert len((await sender.publish(make_version("m@2"))).members) == 1
    assert "host memory" not in caplog.text


async def test_a_sampler_that_comes_back_empty_gets_the_next_version(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver()]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers)
    assert len((await sender.publish(make_version("m@1"))).members) == 2
    port = servers[1].port
    await servers[1].grpc.stop(0)
    receivers[1].leave()
    assert len((await sender.publish(make_version("m@2"))).members) == 1
    reborn = Receiver()
    await serve(reborn, port=port)
    await asyncio.wait_for(reborn.joined.wait(), 30)  # its group is formed as soon as it serves
    assert len((await sender.publish(make_version("m@3"))).members) == 2
    assert list(reborn.versions) == ["m@3"]


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_sampler_that_hangs_while_it_joins_holds_up_no_publish_to_others(
    connect: Connect, serve: Serve, make_version: MakeVersion, make_full_version: MakeVersion, tmp_path: Path, kind: str
) -> None:
    """Its service answers, and the trainer cannot reach it by the weight channel."""
    receivers, listed = [Receiver() for _ in range(3)], tmp_path / "services.json"
    addresses = [f"127.0.0.1:{(await serve(receiver)).port}" for receiver in receivers]
    write_addresses(listed, Addresses(samplers=addresses[:2]))
    sender = await connect(services_file=listed)
    make = make_version if kind == "adapter" else make_full_version
    assert (await sender.publish(make("m@1"))).members == addresses[:2]
    receivers[2].joins.clear()
    write_addresses(listed, Addresses(samplers=addresses))
    await until(lambda: receivers[2].num_joining)
    for n in (2, 3):
        assert (await sender.publish(make(f"m@{n}"))).members == addresses[:2]
    assert receivers[2].num_joining == 1, "its first call has not even failed"
    receivers[2].joins.set()
    await until_published_to(addresses, sender, make)


async def until_published_to(addresses: Sequence[str], sender: WeightSender, make: MakeVersion) -> None:
    """Publishes new versions until one goes to all of these. A sampler that has joined is sent versions soon after."""
    numbers = itertools.count(100)

    async def goes_to_all() -> bool:
        return (await sender.publish(make(f"m@{next(numbers)}"))).members == list(addresses)

    await until(goes_to_all)


async def test_a_sampler_whose_group_was_not_formed_gets_one_later(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receivers = [Receiver(), Receiver()]
    receivers[1].faults = ["init"] * 3
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers)
    await until(lambda: receivers[1].joined.is_set())
    assert receivers[1].faults == []
    await until_published_to([f"127.0.0.1:{server.port}" for server in servers], sender, make_version)


async def test_versions_of_a_deleted_model_are_removed(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    sender = await connect(await serve(receiver))
    for version_id in ("a@1", "a@2", "a@3", "b@1", "ab@1"):
        await sender.publish(make_version(version_id))
    await sender.remove_all("a@")
    await sender.withdraw("b@1")
    assert list(receiver.versions) == ["ab@1"]


async def test_those_that_are_named_confirm_and_a_silent_one_is_not_waited_for(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver() for _ in range(4)]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    members = (await sender.publish(make_version("m@1"))).members
    del receivers[1].versions["m@1"]
    receivers[2].awake.clear()
    monkeypatch.setattr(sender_module, "_CONFIRM_S", 0.2)
    assert await sender.confirm("m@1", members[:3]) == members[:1]
    assert [receiver.confirmed for receiver in receivers] == [["m@1"], [], [], []]


async def test_a_sampler_that_hangs_when_it_is_to_confirm_is_not_waited_for(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver() for _ in range(2)]
    servers = [await serve(receiver) for receiver in receivers]
    sender = await connect(*servers, silence_s=1000)
    members = (await sender.publish(make_version("m@1"))).members
    make_hang(sender, f"127.0.0.1:{servers[1].port}", monkeypatch)
    receivers[1].awake.clear()
    monkeypatch.setattr(sender_module, "_CONFIRM_S", 1000)
    assert await asyncio.wait_for(sender.confirm("m@1", members), 100) == members[:1]


async def test_a_silent_sampler_does_not_hold_up_a_withdrawal_and_hears_of_it_when_it_wakes_up(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other = receivers = [Receiver(), Receiver()]
    sender = await connect(*[await serve(receiver) for receiver in receivers])
    await sender.publish(make_version("m@1"))
    silent.awake.clear()
    monkeypatch.setattr(sender_module, "_REMOVE_S", 0.2)
    await sender.withdraw("m@1")
    assert [list(receiver.versions) for receiver in receivers] == [["m@1"], []]
    silent.awake.set()
    await asyncio.gather(*sender.withdrawing.values())
    assert silent.versions == {}
    assert other.versions == {}
    assert sender.withdrawing == {}


async def test_a_version_is_withdrawn_from_a_sampler_that_was_away_when_it_can_be_reached(
    connect: Connect, serve: Serve, make_version: MakeVersion
) -> None:
    receiver = Receiver()
    server = await serve(receiver)
    sender = await connect(server)
    await sender.publish(make_version("m@1"))
    await server.grpc.stop(0)
    await sender.withdraw("m@1")
    assert list(receiver.versions) == ["m@1"]
    await serve(receiver, port=server.port)
    await asyncio.wait_for(asyncio.gather(*sender.withdrawing.values()), 30)
    assert receiver.versions == {}


async def test_a_sampler_that_refuses_a_withdrawal_is_asked_ever_less_often_and_logged_once(
    connect: Connect,
    serve: Serve,
    make_version: MakeVersion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = Receiver()
    sender = await connect(await serve(receiver))
    await sender.publish(make_version("m@1"))
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    receiver.faults += ["remove"] * 4
    monkeypatch.setattr(sender_module, "_WITHDRAW_AGAIN_S", 0.011)
    monkeypatch.setattr(sender_module, "_WITHDRAW_RARELY_S", 0.033)
    monkeypatch.setattr(sender_module.asyncio, "sleep", noted)
    await sender.withdraw("m@1")
    await asyncio.gather(*sender.withdrawing.values())
    assert receiver.versions == {}
    assert [wait for wait in waits if wait in (0.011, 0.022, 0.033)] == [0.011, 0.022, 0.033, 0.033]
    assert caplog.text.count("has not removed m@1 yet") == 1


async def test_a_version_that_is_good_after_all_is_not_withdrawn_any_more(
    connect: Connect, serve: Serve, make_version: MakeVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver()
    sender = await connect(await serve(receiver))
    members = (await sender.publish(make_version("m@1"))).members
    monkeypatch.setattr(sender_module, "_REMOVE_S", 0.2)
    receiver.faults.append("remove")
    monkeypatch.setattr(sender_module, "_WITHDRAW_AGAIN_S", 60.0)
    await sender.withdraw("m@1")
    (withdrawing,) = sender.withdrawing.values()
    assert await sender.confirm("m@1", members) == members
    await asyncio.wait([withdrawing])
    assert withdrawing.cancelled()
    assert sender.withdrawing == {}
    assert list(receiver.versions) == ["m@1"]
