"""The receiving side of the weight channel, with a trainer that is a thread, and real process groups."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import torch

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.service import make_server
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.weights import weight_sync
from tests.support.waiting import until
from tests.unit.sampler_service.full_versions import make_full
from tests.unit.sampler_service.serving import generate, make_adapter, metric, prompt, serving
from tinsmith.errors import (
    AlreadyExists,
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    ServiceError,
    Unsupported,
    VersionNotLoaded,
)
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import FULL, Weights
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import types_pb2 as types
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.v1 import weight_sync_pb2_grpc
from tinsmith.weight_channel.buckets import bucket_slices, checksum, receive, send
from tinsmith.weight_channel.group import WeightGroup, open_store
from tinsmith.weight_channel.ring import RingListener, RingOutlet
from tinsmith.weight_channel.ring_memory import make_host_ring
from tinsmith.weight_channel.transport import Inlet, Outlet

TIMEOUT_S = 30.0
"""torch looks up the name of a peer when it connects, which takes seconds where no name server answers."""


class Trainer:
    """Rank 0, as a trainer service will play it."""

    def __init__(self, stub: weight_sync_pb2_grpc.WeightSyncServiceStub, trainer_id: str = "t") -> None:
        self.stub = stub
        self.trainer_id = trainer_id
        self.store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
        self.epoch = 0
        self.weight_group: Outlet

    async def form(self) -> None:
        self.epoch += 1
        form = asyncio.to_thread(
            lambda: WeightGroup.form(
                self.store,
                epoch=self.epoch,
                rank=0,
                world_size=2,
                backend="gloo",
                host="127.0.0.1",
                timeout_s=TIMEOUT_S,
            )
        )
        _, self.weight_group = await asyncio.gather(self.call("InitWeightTransfer", self.group()), form)

    async def probe(self) -> socket.socket:
        """The connection that the sampler has made."""
        self.epoch += 1
        with RingListener() as listener:
            probe = pb.ProbeWeightTransferRequest(trainer_id=self.trainer_id, epoch=self.epoch, socket=listener.name)
            reply = await self.call("ProbeWeightTransfer", probe)
            assert reply == pb.ProbeWeightTransferResponse(connected=True)
            return listener.accept()

    async def form_ring(self, *, slot_bytes: int = 4096) -> None:
        connection = await self.probe()
        memory = make_host_ring([connection], num_slots=3, slot_bytes=slot_bytes)
        self.weight_group = RingOutlet(memory, [connection])
        await self.call("InitWeightTransfer", self.ring(slot_bytes=slot_bytes))

    def ring(self, *, slot_bytes: int, **fields: Any) -> pb.InitWeightTransferRequest:
        ring = pb.SharedRing(num_slots=3, slot_bytes=slot_bytes)
        return self.group(**{"backend": "shm", "ring": ring, "rank": 0, **fields})

    def group(self, **fields: Any) -> pb.InitWeightTransferRequest:
        return pb.InitWeightTransferRequest(
            **{
                "trainer_id": self.trainer_id,
                "epoch": self.epoch,
                "store_host": "127.0.0.1",
                "store_port": self.store.port,
                "rank": 1,
                "world_size": 2,
                "backend": "gloo",
                **fields,
            }
        )

    def announcement(self, announced: str, adapter: Weights, **fields: Any) -> pb.StartWeightUpdateRequest:
        return pb.StartWeightUpdateRequest(
            **{
                "trainer_id": self.trainer_id,
                "epoch": self.epoch,
                "version_id": announced,
                "base_model": "base",
                "lora_config": config_to_proto(adapter.config),
                "tensors": [pb.TensorSpec(name=name, shape=shape) for name, shape in adapter.specs()],
                "dtype": types.DTYPE_FLOAT32,
                **fields,
            }
        )

    async def start(self, version_id: str, adapter: Weights, **fields: Any) -> None:
        await self.call("StartWeightUpdate", self.announcement(version_id, adapter, **fields))

    async def send(
        self, version_id: str, adapter: Weights, *, dtype: torch.dtype = torch.float32, bucket_bytes: int = 0
    ) -> str:
        """Returns the checksum."""
        request = pb.UpdateWeightsRequest(trainer_id=self.trainer_id, version_id=version_id, epoch=self.epoch)
        received = asyncio.create_task(self.call("UpdateWeights", request))
        sum_ = await asyncio.to_thread(
            lambda: send([self.weight_group], adapter.flat, dtype=dtype, bucket_bytes=bucket_bytes)
        )
        assert (await received).num_bytes == adapter.flat.numel() * dtype.itemsize
        return sum_

    async def finish(self, version_id: str, sum_: str) -> None:
        request = pb.FinishWeightUpdateRequest(
            trainer_id=self.trainer_id, version_id=version_id, epoch=self.epoch, checksum=sum_
        )
        await self.call("FinishWeightUpdate", request)

    async def confirm(self, version_id: str) -> None:
        await self.call("ConfirmVersion", pb.ConfirmVersionRequest(version_id=version_id))

    async def publish(self, version_id: str, adapter: Weights) -> None:
        await self.start(version_id, adapter)
        await self.finish(version_id, await self.send(version_id, adapter))
        await self.confirm(version_id)

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


PROBE = pb.ProbeWeightTransferRequest(trainer_id="t", epoch=5)


class Setup:
    def __init__(self, engine: TorchEngine, stub: weight_sync_pb2_grpc.WeightSyncServiceStub) -> None:
        self.engine = engine
        self.stub = stub
        self.trainer = Trainer(stub)

    def adapter(self, seed: int, **config: Any) -> Adapter:
        return make_adapter(self.engine.targets, seed=seed, **config)


@asynccontextmanager
async def receiving(model_folder: Path, **settings: Any) -> AsyncIterator[Setup]:
    """A sampler with a weight channel; `settings` are its engine's."""
    async with serving(model_folder, **settings) as engine:
        config = SamplerConfig(
            base_model=str(model_folder),
            model_names=("base",),
            listen="127.0.0.1:0",
            max_lora_rank=32,
            channel_timeout_s=TIMEOUT_S,
        )
        server = make_server(config, EngineSlot(engine), engine.metrics)
        await server.start()
        async with connect(f"127.0.0.1:{server.port}") as channel:
            yield Setup(engine, weight_sync_pb2_grpc.WeightSyncServiceStub(channel))
        await server.stop(0)


@pytest_asyncio.fixture
async def setup(model_folder: Path) -> AsyncIterator[Setup]:
    async with receiving(model_folder, adapter_memory_bytes=200_000) as setup:
        yield setup


async def test_a_published_version_samples_like_the_trainers_adapter(setup: Setup) -> None:
    await setup.trainer.form()
    adapters = {"v1": setup.adapter(1), "v2": setup.adapter(2, rank=2, train_mlp=False)}
    for name, adapter in adapters.items():
        await setup.trainer.publish(name, adapter)
        await setup.engine.install(f"local {name}", adapter)
        sent = await generate(setup.engine, prompt(6), version_id=name, max_tokens=10, seed=1)
        local = await generate(setup.engine, prompt(6), version_id=f"local {name}", max_tokens=10, seed=1)
        assert sent.sequences == local.sequences
    assert metric(setup.engine, "publishes_total", outcome="ok") == 2
    assert metric(setup.engine, "publish_bytes_total") == sum(adapter.num_bytes for adapter in adapters.values())


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
async def test_a_version_that_has_arrived_is_on_probation_until_it_is_confirmed(setup: Setup, full: bool) -> None:
    setup.engine.store.max_bytes = 3_000_000
    weights = make_full(setup.engine.base, seed=1) if full else setup.adapter(1)
    version_id = "s:train:0@1"
    await setup.trainer.form()
    for _ in range(2):  # announced again, the first is dropped
        await setup.trainer.start(version_id, weights)
        await setup.trainer.finish(version_id, await setup.trainer.send(version_id, weights))
    assert setup.engine.store.versions() == []
    with pytest.raises(VersionNotLoaded):
        await generate(setup.engine, prompt(6), version_id=version_id, max_tokens=2)
    with pytest.raises(VersionNotLoaded):
        await setup.engine.move("s:train:0", version_id)
    measured = await generate(setup.engine, prompt(6), version_id=version_id, max_tokens=2, seed=1, on_probation=True)
    await setup.trainer.confirm(version_id)
    served = await generate(setup.engine, prompt(6), version_id=version_id, max_tokens=2, seed=1)
    assert served.sequences == measured.sequences
    assert await setup.engine.move("s:train:0", version_id) == 0
    with pytest.raises(AlreadyExists) as resident:
        await setup.trainer.start(version_id, weights)
    assert resident.value.metadata["checksum"] == checksum(weights.flat, torch.float32)
    with pytest.raises(VersionNotLoaded, match="'other' is not loaded"):
        await setup.trainer.confirm("other")


async def test_a_wrong_checksum_leaves_nothing_visible_and_the_next_publish_works(setup: Setup) -> None:
    await setup.trainer.form()
    adapter = setup.adapter(1)
    await setup.trainer.start("v1", adapter)
    await setup.trainer.send("v1", adapter)
    with pytest.raises(DataCorrupted, match="checksum"):
        await setup.trainer.finish("v1", "0" * 32)
    assert setup.engine.store.versions() == []
    await setup.trainer.publish("v1", adapter)
    assert [version.version_id for version in setup.engine.store.versions()] == ["v1"]


async def test_generation_goes_on_while_versions_arrive(setup: Setup) -> None:
    await setup.trainer.form()
    quiet = await generate(setup.engine, prompt(6), max_tokens=200, seed=1)
    running = asyncio.create_task(generate(setup.engine, prompt(6), max_tokens=200, seed=1))
    for n in range(4):
        await setup.trainer.publish(f"v{n}", setup.adapter(n))
    assert (await running).sequences == quiet.sequences


async def test_a_lost_trainer_breaks_the_group_and_the_next_epoch_works(setup: Setup) -> None:
    await setup.trainer.form()
    adapter = setup.adapter(1)
    await setup.trainer.start("v1", adapter)
    request = pb.UpdateWeightsRequest(trainer_id="t", version_id="v1", epoch=setup.trainer.epoch)
    receiving = asyncio.create_task(setup.trainer.call("UpdateWeights", request))
    await asyncio.sleep(0.1)
    del setup.trainer.weight_group  # its sockets close
    with pytest.raises(FailedPrecondition, match=r"group 1 of trainer 't' broke .* form the next epoch"):
        await receiving
    with pytest.raises(FailedPrecondition, match="has no group with this sampler"):
        await setup.trainer.start("v1", adapter)
    await setup.trainer.form()
    await setup.trainer.publish("v1", adapter)
    assert (await generate(setup.engine, prompt(6), version_id="v1", max_tokens=2)).sequences


async def test_a_new_group_replaces_the_old_one_and_trainers_do_not_disturb_each_other(setup: Setup) -> None:
    other = Trainer(setup.stub, "other")
    await setup.trainer.form()
    await other.form()
    await setup.trainer.start("half-sent", setup.adapter(3))
    await setup.trainer.form()
    await other.publish("o1", setup.adapter(1))
    await setup.trainer.publish("v1", setup.adapter(2))
    assert [version.version_id for version in setup.engine.store.versions()] == ["o1", "v1"]
    with pytest.raises(FailedPrecondition, match="'half-sent' was not announced"):
        await setup.trainer.finish("half-sent", "")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"base_model": "other"},
            InvalidRequest,
            r"base_model: 'other' is not served here; this sampler has \['base'\]",
        ),
        (
            {"quantize": "nf4"},
            InvalidRequest,
            "quantize: the trainer's base weights are quantised to nf4, this sampler's are not quantised; set TRAINER_",
        ),
        ({"epoch": 7}, FailedPrecondition, r"epoch: 7 is not the group that this sampler is in \(1\)"),
        ({"dtype": types.DTYPE_BFLOAT16}, InvalidRequest, "dtype: DTYPE_BFLOAT16"),
        ({"version_id": ""}, InvalidRequest, "version_id: is empty"),
        ({"version_id": "resident"}, AlreadyExists, "'resident' is resident already"),
        ({"lora_config": types.LoraConfig(rank=33, train_attn=True)}, InvalidRequest, r"rank: 33 is outside 1\.\.32"),
        ({"tensors": []}, InvalidRequest, "tensors: 0 were announced"),
        ({"bucket_bytes": -4}, InvalidRequest, "bucket_bytes: -4 is not a whole number of DTYPE_FLOAT32 values"),
        ({"bucket_bytes": 6}, InvalidRequest, "bucket_bytes: 6 is not a whole number"),
        (
            {"lora_config": types.LoraConfig(rank=0, train_attn=True)},
            InvalidRequest,
            r"lora_config\.train_mlp: false is not possible with rank 0",
        ),
        (
            {"lora_config": config_to_proto(FULL)},
            InvalidRequest,
            "tensors: 30 were announced, this base model takes 25",
        ),
        (
            {"lora_config": config_to_proto(FULL), "dtype": types.DTYPE_INT32},
            InvalidRequest,
            "dtype: DTYPE_INT32 is not DTYPE_FLOAT32 or",
        ),
        (
            {"lora_config": types.LoraConfig(rank=3, train_attn=True, train_mlp=True, train_unembed=True)},
            InvalidRequest,
            r"lora_A.weight' of shape \[4, 64\] stands where this base model has",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_an_announcement_that_does_not_fit_is_refused(
    setup: Setup, fields: dict[str, Any], error: type[ServiceError], message: str
) -> None:
    await setup.engine.install("resident", setup.adapter(0))
    await setup.trainer.form()
    with pytest.raises(error, match=message):
        await setup.trainer.call("StartWeightUpdate", setup.trainer.announcement("v1", setup.adapter(1), **fields))
    await setup.trainer.publish("v1", setup.adapter(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank: 0"),
        ({"rank": 2}, "rank: 2"),
        ({"backend": "mpi"}, "backend: 'mpi'"),
        ({"backend": "nccl"}, "backend: 'nccl' needs CUDA, and this sampler takes versions on cpu; set the trainer's"),
        ({"backend": "cuda_ipc"}, "backend: 'cuda_ipc' needs CUDA"),
        ({"backend": "shm"}, "ring: 0 slots of 0 bytes hold nothing"),
        ({"trainer_id": ""}, "trainer_id: is empty"),
    ],
    ids=str,
)
async def test_a_group_that_cannot_be_is_refused(setup: Setup, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await setup.trainer.call("InitWeightTransfer", setup.trainer.group(**fields))


async def test_an_engine_on_a_gpu_that_takes_versions_on_the_host_says_nothing_of_its_gpu(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's: to look at its GPU, the service would take some of its memory."""
    monkeypatch.setattr(type(setup.engine), "device", "cuda")
    monkeypatch.setattr(type(setup.engine), "weights_device", "cpu")
    await setup.trainer.form()
    await setup.trainer.publish("v1", setup.adapter(1))
    assert (await setup.trainer.call("ProbeWeightTransfer", PROBE)).gpu_uuid == ""
    with pytest.raises(InvalidRequest, match="this sampler takes versions on cpu"):
        await setup.trainer.call("InitWeightTransfer", setup.trainer.group(backend="nccl"))


async def test_a_version_that_never_fits_is_refused_before_it_is_sent(setup: Setup) -> None:
    await setup.trainer.form()
    with pytest.raises(InvalidRequest, match=r"adapter_memory_bytes 200000: it can never be served"):
        await setup.trainer.start("big", setup.adapter(1, rank=32))


async def test_steps_out_of_order_are_refused(setup: Setup) -> None:
    adapter = setup.adapter(1)
    with pytest.raises(FailedPrecondition, match="call InitWeightTransfer"):
        await setup.trainer.start("v1", adapter)
    await setup.trainer.form()
    with pytest.raises(FailedPrecondition, match="was not announced"):
        await setup.trainer.finish("v1", "")
    await setup.trainer.start("v1", adapter)
    with pytest.raises(FailedPrecondition, match="has not been received"):
        await setup.trainer.finish("v1", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_a_full_version_in_buckets_samples_like_the_trainers_parameters(setup: Setup, dtype: torch.dtype) -> None:
    setup.engine.store.max_bytes = 3_000_000
    full = make_full(setup.engine.base, seed=1)
    full.flat.copy_(full.flat.to(dtype))
    await setup.trainer.form()
    sent_as = {torch.float32: types.DTYPE_FLOAT32, torch.bfloat16: types.DTYPE_BFLOAT16}[dtype]
    await setup.trainer.start("v1", full, dtype=sent_as, bucket_bytes=100_000)
    assert len(bucket_slices(full.flat.numel(), itemsize=dtype.itemsize, bucket_bytes=100_000)) >= 3
    sum_ = await setup.trainer.send("v1", full, dtype=dtype, bucket_bytes=100_000)
    assert setup.engine.store.versions() == []
    await setup.trainer.finish("v1", sum_)
    await setup.trainer.confirm("v1")
    await setup.engine.install("local", full.like(full.flat.clone()))
    sent, local = [
        await generate(setup.engine, prompt(6), version_id=name, max_tokens=10, seed=1) for name in ("v1", "local")
    ]
    assert sent.sequences == local.sequences


async def test_a_trainer_lost_between_two_buckets_leaves_nothing_and_the_next_epoch_works(setup: Setup) -> None:
    setup.engine.store.max_bytes = 3_000_000
    full = make_full(setup.engine.base, seed=1)
    await setup.trainer.form()
    await setup.trainer.start("v1", full, bucket_bytes=100_000)
    request = pb.UpdateWeightsRequest(trainer_id="t", version_id="v1", epoch=setup.trainer.epoch)
    receiving = asyncio.create_task(setup.trainer.call("UpdateWeights", request))
    await asyncio.to_thread(setup.trainer.weight_group.send(full.flat[:25_000]))
    del setup.trainer.weight_group  # its sockets close
    with pytest.raises(FailedPrecondition, match=r"group 1 of trainer 't' broke while version 'v1' was received"):
        await receiving
    assert setup.engine.store.versions() == []
    await setup.trainer.form()
    await setup.trainer.publish("v1", full)
    assert (await generate(setup.engine, prompt(6), version_id="v1", max_tokens=2)).sequences


async def test_a_full_version_that_never_fits_or_an_engine_that_takes_none_is_refused_by_name(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.trainer.form()
    full = make_full(setup.engine.base, seed=1)
    with pytest.raises(InvalidRequest, match=rf"'v1' needs {full.num_bytes} bytes, above .* adapter_memory_bytes"):
        await setup.trainer.start("v1", full)

    def refuse(flat: torch.Tensor) -> Any:
        raise Unsupported("lora_config.rank: 0, and this engine serves adapters only")

    monkeypatch.setattr(setup.engine, "full_weights", refuse)
    with pytest.raises(Unsupported, match="this engine serves adapters only"):
        await setup.trainer.start("v1", full)


@pytest.mark.parametrize("lasts", [False, True])
async def test_a_fault_after_which_the_device_computes_nothing_ends_the_engine(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    def faults(*_: Any, **__: Any) -> str:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(weight_sync, "receive", faults)
    monkeypatch.setattr("tinsmith.faults._computes", lambda: not lasts)
    setup.engine.store.max_bytes = 3_000_000
    full = make_full(setup.engine.base, seed=1)
    await setup.trainer.form_ring()
    await setup.trainer.start("v1", full, bucket_bytes=4096)
    request = pb.UpdateWeightsRequest(trainer_id="t", version_id="v1", epoch=setup.trainer.epoch)
    # The call is sent again to a sampler that is UNAVAILABLE, which has no group any more.
    with pytest.raises(FailedPrecondition, match="has no group" if lasts else "illegal memory access"):
        await setup.trainer.call("UpdateWeights", request)
    assert setup.engine.requests.died.is_set() == lasts


async def test_the_memory_of_a_version_whose_trainer_is_lost_is_free_at_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[weakref.ref[torch.Tensor]] = []

    def noted(inlet: Inlet, flat: torch.Tensor, **options: Any) -> str:
        buffers.append(weakref.ref(flat))
        return receive(inlet, flat, **options)

    monkeypatch.setattr(weight_sync, "receive", noted)
    setup.engine.store.max_bytes = 3_000_000
    full = make_full(setup.engine.base, seed=1)
    await setup.trainer.form_ring()
    await setup.trainer.start("v1", full, bucket_bytes=4096)
    request = pb.UpdateWeightsRequest(trainer_id="t", version_id="v1", epoch=setup.trainer.epoch)
    receiving = asyncio.create_task(setup.trainer.call("UpdateWeights", request))
    await asyncio.to_thread(setup.trainer.weight_group.send(full.flat[:1024]))
    gc.disable()  # it may not run for long where nothing else happens
    try:
        setup.trainer.weight_group.close()
        with pytest.raises(FailedPrecondition, match=r"broke while version 'v1' was received"):
            await receiving
        await until(lambda: buffers[0]() is None)
    finally:
        gc.enable()


async def test_a_version_that_comes_by_shared_memory_samples_like_the_trainers_adapter(setup: Setup) -> None:
    await setup.trainer.form_ring()
    adapter = setup.adapter(1)
    assert adapter.num_bytes > 3 * 4096
    for name in ("v1", "v2"):
        await setup.trainer.start(name, adapter, bucket_bytes=4096)
        await setup.trainer.finish(name, await setup.trainer.send(name, adapter, bucket_bytes=4096))
        await setup.trainer.confirm(name)
    await setup.engine.install("local", adapter)
    local, *sent = [
        await generate(setup.engine, prompt(6), version_id=name, max_tokens=10, seed=1)
        for name in ("local", "v1", "v2")
    ]
    assert all(each.sequences == local.sequences for each in sent)
    setup.trainer.weight_group.close()


@pytest.mark.parametrize("form", ["form", "form_ring"])
async def test_a_version_whose_trainer_has_given_the_group_up_is_not_installed(setup: Setup, form: str) -> None:
    """As when this process was stopped between the last bucket and the call that ends the update."""
    await getattr(setup.trainer, form)()
    adapter = setup.adapter(1)
    await setup.trainer.start("v1", adapter, bucket_bytes=4096)
    sum_ = await setup.trainer.send("v1", adapter, bucket_bytes=4096)
    await asyncio.to_thread(setup.trainer.weight_group.close)
    with pytest.raises(FailedPrecondition, match=r"version 'v1' is not wanted any more: .* given group 1 up"):
        await setup.trainer.finish("v1", sum_)
    assert setup.engine.store.versions() == []


async def test_calls_of_an_older_epoch_are_refused(setup: Setup) -> None:
    await setup.trainer.form_ring()
    adapter = setup.adapter(1)
    await setup.trainer.start("v1", adapter, bucket_bytes=4096)
    sum_ = await setup.trainer.send("v1", adapter, bucket_bytes=4096)
    setup.trainer.epoch = 0
    update = pb.UpdateWeightsRequest(trainer_id="t", version_id="v1", epoch=0)
    for call in (
        setup.trainer.start("v2", adapter),
        setup.trainer.call("UpdateWeights", update),
        setup.trainer.finish("v1", sum_),
    ):
        with pytest.raises(FailedPrecondition, match=r"epoch: 0 is not the group that this sampler is in \(1\)"):
            await call
    with pytest.raises(FailedPrecondition, match="epoch: 0 is not above that of the present group, 1") as error:
        await setup.trainer.call("InitWeightTransfer", setup.trainer.group())
    assert error.value.metadata == {"epoch": "1"}
    assert setup.engine.store.versions() == []
    setup.trainer.epoch = 1
    await setup.trainer.finish("v1", sum_)
    setup.trainer.weight_group.close()


async def test_a_ring_needs_the_connection_of_its_own_probe_and_memory_of_the_size_that_was_said(setup: Setup) -> None:
    trainer = setup.trainer
    with pytest.raises(FailedPrecondition, match="needs the connection of a ProbeWeightTransfer of epoch 0"):
        await trainer.call("InitWeightTransfer", trainer.ring(slot_bytes=4096))
    with (
        await trainer.probe(),
        pytest.raises(FailedPrecondition, match="needs the connection of a ProbeWeightTransfer of epoch 9"),
    ):
        await trainer.call("InitWeightTransfer", trainer.ring(slot_bytes=4096, epoch=9))
    with await trainer.probe() as connection:
        make_host_ring([connection], num_slots=3, slot_bytes=4096)
        with pytest.raises(FailedPrecondition, match="the ring's memory has 12288 bytes, not 3 x 5000"):
            await trainer.call("InitWeightTransfer", trainer.ring(slot_bytes=5000))
    elsewhere = pb.ProbeWeightTransferRequest(trainer_id="t", epoch=5, socket="tinsmith-weights-elsewhere")
    assert await trainer.call("ProbeWeightTransfer", elsewhere) == pb.ProbeWeightTransferResponse()


async def test_the_next_adapter_of_a_size_finds_memory_that_has_been_used(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares: asyncio.Queue[torch.Tensor] = asyncio.Queue()
    in_thread = weight_sync.in_thread

    async def record(work: Any) -> Any:
        result = await in_thread(work)
        if isinstance(result, torch.Tensor):
            spares.put_nowait(result)
        return result

    monkeypatch.setattr(weight_sync, "in_thread", record)
    await setup.trainer.form()
    spare = None
    for n in range(3):
        adapter = setup.adapter(n, rank=1)
        await setup.trainer.publish(f"v{n}", adapter)
        version = setup.engine.store.acquire(f"v{n}")
        flat = version.weights.flat
        setup.engine.store.release(version)
        assert torch.equal(flat, adapter.flat)
        assert spare is None or flat.data_ptr() == spare.data_ptr()
        spare = await spares.get()
