"""Saves and publishes through the whole trainer, to real samplers in this process, one of which may compute wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.service import make_server
from sampler_service.torch_engine.engine import TorchEngine
from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.sampler_service.serving import generate, prompt, serving
from tests.unit.trainer_service.restoring import Process
from tinsmith.errors import (
    CheckpointNotFound,
    InvalidRequest,
    NotFound,
    NotReady,
    ServiceError,
    VersionNotLoaded,
    VersionRefused,
)
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import trainer_pb2_grpc, types_pb2
from trainer_service.durability.executing import (
    MOST_DEATHS,
    NAME,
    Deaths,
    Executing,
    other_work,
)
from trainer_service.engine.engine import TrainingEngine
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.weight_sync.certificate import Publisher

MODEL = "s:train:0"
SAMPLER = types_pb2.CHECKPOINT_KIND_SAMPLER
ADAM = pb.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass
class Stack:
    """A trainer with a model that has made a step, and its samplers."""

    stub: Any
    engines: list[TorchEngine]
    publisher: Publisher
    executing: Executing
    next_seq_id: int = 1

    async def call(self, rpc: str, message: Any, **fields: Any) -> Any:
        """With the next seq_id. Raises the service's own error."""
        self.next_seq_id += 1
        try:
            return await getattr(self.stub, rpc)(message(model_id=MODEL, seq_id=self.next_seq_id - 1, **fields))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def save(self, name: str = "one") -> pb.SaveCheckpointResponse:
        return await self.call("SaveCheckpoint", pb.SaveCheckpointRequest, kind=SAMPLER, name=name)

    async def step(self) -> None:
        data = [random_datum(9, self.next_seq_id, vocab_size=VOCAB_SIZE)]
        batch = request(data, model_id=MODEL, seq_id=self.next_seq_id)
        self.next_seq_id += 1
        await self.stub.ForwardBackward(batch)
        await self.call("OptimStep", pb.OptimStepRequest, adam_params=ADAM)

    async def certificate(self, location: str) -> types_pb2.PublishCertificate:
        try:
            return (await self.stub.GetCertificate(pb.GetCertificateRequest(location=location))).certificate
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def publish(self, location: str, version_id: str) -> pb.PublishCheckpointResponse:
        try:
            wanted = pb.PublishCheckpointRequest(location=location, version_id=version_id)
            return await self.stub.PublishCheckpoint(wanted)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def make_wrong(self, monkeypatch: pytest.MonkeyPatch, *, scale: float = 2.0) -> None:
        """From now on the last sampler changes what it installs, after its checksum was right."""
        engine, install = self.engines[-1], self.engines[-1].install

        async def changed(version_id: str, weights: Weights, **options: bool) -> None:
            await install(version_id, weights.like(weights.flat * scale), **options)

        monkeypatch.setattr(engine, "install", changed)

    def held(self) -> list[list[str]]:
        return [[version.version_id for version in engine.store.versions()] for engine in self.engines]


@pytest.fixture
async def stack(base: BaseModel, model_folder: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        engines, addresses = [], []
        for _ in range(2):
            engine = await exits.enter_async_context(
                serving(model_folder, max_lora_rank=16, max_running=2, max_waiting=1)
            )
            config = SamplerConfig(
                base_model=str(model_folder), model_names=("tiny",), listen="127.0.0.1:0", max_lora_rank=16
            )
            server = make_server(config, EngineSlot(engine), engine.metrics)
            await server.start()
            await server.set_serving(True)
            exits.push_async_callback(server.stop, 0)
            engines.append(engine)
            addresses.append(f"127.0.0.1:{server.port}")
        trainer = await Process.start(
            tmp_path,
            base,
            max_queued_operations=20,
            max_tokens_per_microbatch=64,
            deterministic=False,
            samplers=addresses,
        )
        server = await exits.enter_async_context(trainer.serving())
        channel = await exits.enter_async_context(connect(f"127.0.0.1:{server.port}"))
        publisher, executing = trainer.operations.publishing.publisher, trainer.scheduler.executing
        stack = Stack(trainer_pb2_grpc.TrainerServiceStub(channel), engines, publisher, executing)
        lora = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True)
        await stack.stub.CreateModel(pb.CreateModelRequest(model_id=MODEL, base_model="tiny", lora_config=lora))
        await stack.step()
        yield stack


async def test_every_save_has_a_certificate_that_stays_with_the_version(stack: Stack) -> None:
    saved = await stack.save()
    assert saved.num_samplers == 2
    certificate = saved.certificate
    assert certificate.passed
    assert certificate.version_id == saved.checkpoint.version_id
    assert len(certificate.weights_hash) == 32
    assert [gap.engine for gap in certificate.samplers] == ["torch", "torch"]
    assert all(gap.max_gap < 1e-4 and gap.num_tokens == 15 for gap in certificate.samplers)
    assert await stack.certificate(saved.checkpoint.location) == certificate
    await stack.step()
    other = await stack.save("two")
    assert other.certificate.weights_hash != certificate.weights_hash
    assert await stack.certificate(saved.checkpoint.location) == certificate


async def test_what_was_never_published_has_none(stack: Stack) -> None:
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    saved = await stack.call("SaveCheckpoint", pb.SaveCheckpointRequest, kind=kind, name="state")
    assert not saved.HasField("certificate")
    with pytest.raises(NotFound, match="never published"):
        await stack.certificate(saved.checkpoint.location)
    with pytest.raises(CheckpointNotFound):
        await stack.certificate(f"{MODEL}/weights/none")
    published = await stack.publish(saved.checkpoint.location, saved.checkpoint.version_id)
    assert published.certificate.passed
    assert await stack.certificate(saved.checkpoint.location) == published.certificate


async def test_a_version_that_one_sampler_computes_wrongly_is_never_served(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = await stack.save("right")
    stack.make_wrong(monkeypatch)
    await stack.step()
    with pytest.raises(VersionRefused) as refused:
        await stack.save("wrong")
    location, version_id = f"{MODEL}/sampler_weights/wrong", refused.value.metadata["version_id"]
    assert float(refused.value.metadata["max_gap"]) > 0.01
    assert "publish_gap_limit 0.01" in refused.value.message
    assert stack.held() == [[right.checkpoint.version_id]] * 2
    certificate = await stack.certificate(location)
    assert (certificate.passed, certificate.version_id) == (False, version_id)
    # Its files are there; sampling from them publishes it again, with the same end while the sampler is as it is.
    with pytest.raises(VersionRefused):
        await stack.publish(location, version_id)
    assert stack.held() == [[right.checkpoint.version_id]] * 2
    monkeypatch.undo()
    assert (await stack.publish(location, version_id)).certificate.passed
    assert (await stack.certificate(location)).passed
    assert all(version_id in versions for versions in stack.held())
    # Training was never touched.
    await stack.step()
    assert (await stack.save("later")).certificate.passed


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("max_lora_rank", r"lora_config\.rank: 4 could be trained, but never published: .* serves ranks up to 2"),
        ("max_version_bytes", r"a version has \d+ bytes, and the sampler at .* holds 2 \(its adapter_memory_bytes\)"),
    ],
)
async def test_a_model_that_no_sampler_can_serve_is_refused_before_it_is_trained(
    stack: Stack, field: str, why: str
) -> None:
    last = stack.publisher.sender.samplers.all[-1]
    assert last.info is not None
    assert last.info.max_lora_rank == 16
    assert last.info.max_version_bytes == 2 * 1024**3
    setattr(last.info, field, 2)  # as of a sampler that was started with that
    location = (await stack.call("SaveCheckpoint", pb.SaveCheckpointRequest, kind=1, name="start")).checkpoint.location
    lora = types_pb2.LoraConfig(rank=4, train_attn=True)
    for fields in ({"base_model": "tiny", "lora_config": lora}, {"from_location": location}):
        with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
            await stack.stub.CreateModel(pb.CreateModelRequest(model_id="s:train:1", **fields))
        assert isinstance(from_rpc_error(refused.value), InvalidRequest)
    last.info.max_lora_rank, last.info.max_version_bytes = 16, 2 * 1024**3
    del last.info.adapter_groups[:]
    last.info.adapter_groups.append(types_pb2.ADAPTER_GROUP_MLP)
    with pytest.raises(grpc.aio.AioRpcError, match=r"lora_config\.train_attn: .* never published: .* adapters on mlp;"):
        await stack.stub.CreateModel(pb.CreateModelRequest(model_id="s:train:1", base_model="tiny", lora_config=lora))
    last.info = None  # nobody has seen it yet: its own limits hold at the publish
    await stack.stub.CreateModel(pb.CreateModelRequest(model_id="s:train:1", base_model="tiny", lora_config=lora))


async def test_a_sampler_that_does_not_apply_the_adapter_is_named_for_that(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = (await stack.save("right")).certificate
    assert [gap.applied for gap in right.samplers] == [types_pb2.APPLIED_YES] * 2
    assert right.change > 1e-3
    stack.make_wrong(monkeypatch, scale=0.0)
    await stack.step()
    with pytest.raises(VersionRefused, match="does not apply it: with it the canary keeps the base model's logprobs"):
        await stack.save("wrong")
    certificate = await stack.certificate(f"{MODEL}/sampler_weights/wrong")
    states = sorted(gap.applied for gap in certificate.samplers)
    assert states == [types_pb2.APPLIED_YES, types_pb2.APPLIED_NO]


async def test_a_refused_version_is_served_by_none_even_where_its_removal_never_arrives(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a sampler that was stopped before it, and goes on later."""
    for engine in stack.engines:
        monkeypatch.setattr(engine.store, "remove", lambda version_id: None)
    stack.make_wrong(monkeypatch)
    with pytest.raises(VersionRefused) as refused:
        await stack.save("wrong")
    version_id = refused.value.metadata["version_id"]
    assert stack.held() == [[], []]
    for engine in stack.engines:
        assert engine.store.num_bytes > 0
        with pytest.raises(VersionNotLoaded):
            await generate(engine, prompt(6), version_id=version_id, max_tokens=1)
    monkeypatch.undo()
    assert (await stack.publish(f"{MODEL}/sampler_weights/wrong", version_id)).num_samplers == 2
    assert stack.held() == [[version_id]] * 2


async def test_a_save_that_no_sampler_can_measure_is_saved_and_not_published(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(address: str, version_id: str, canary: object) -> None:
        return None

    monkeypatch.setattr(stack.publisher, "_measure", measure)
    saved = await stack.save()
    assert saved.num_samplers == 0
    assert not saved.HasField("certificate")
    assert stack.held() == [[], []]
    with pytest.raises(NotReady, match="no sampler could be measured"):
        await stack.publish(saved.checkpoint.location, saved.checkpoint.version_id)
    monkeypatch.undo()
    published = await stack.publish(saved.checkpoint.location, saved.checkpoint.version_id)
    assert (published.num_samplers, published.certificate.passed) == (2, True)
    assert stack.held() == [[saved.checkpoint.version_id]] * 2


async def test_a_sampler_that_was_not_measured_gets_the_version_when_it_is_wanted(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = stack.publisher._measure
    left_out: list[str] = []

    async def some(address: str, version_id: str, canary: Any) -> Any:
        left_out.append(address)
        return await measure(address, version_id, canary) if address != left_out[0] else None

    monkeypatch.setattr(stack.publisher, "_measure", some)
    saved = await stack.save()
    assert (saved.num_samplers, len(saved.certificate.samplers)) == (1, 1)
    assert sorted(len(versions) for versions in stack.held()) == [0, 1]
    monkeypatch.undo()
    published = await stack.publish(saved.checkpoint.location, saved.checkpoint.version_id)
    assert (published.num_samplers, len(published.certificate.samplers)) == (2, 2)
    assert stack.held() == [[saved.checkpoint.version_id]] * 2


async def test_a_publish_that_ends_the_trainer_each_time_is_refused_in_the_end(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = (await stack.save()).checkpoint
    name = other_work(f"publish {MODEL}", f"{saved.location} {saved.version_id}".encode())
    load, score = CheckpointStore.load, TrainingEngine.score
    noted: dict[str, bytes] = {}

    def noting(call: Any, what: str) -> Any:
        def noted_call(*arguments: Any, **settings: Any) -> Any:
            noted[what] = (tmp_path / NAME).read_bytes()
            return call(*arguments, **settings)

        return noted_call

    monkeypatch.setattr(CheckpointStore, "load", noting(load, "storing"))
    monkeypatch.setattr(TrainingEngine, "score", noting(score, "executing"))
    stack.executing.deaths[name] = Deaths(executing=MOST_DEATHS - 1, storing=MOST_DEATHS - 1)
    assert (await stack.publish(saved.location, saved.version_id)).certificate.passed
    for doing in ("storing", "executing"):
        assert f"{doing} 1 1 {name[1]} publish {MODEL}".encode() in noted[doing]
    assert not stack.executing.deaths
    for deaths in (Deaths(executing=MOST_DEATHS), Deaths(storing=MOST_DEATHS)):
        stack.executing.deaths[name] = deaths
        with pytest.raises(ServiceError, match="the trainer ended twice while"):
            await stack.publish(saved.location, saved.version_id)
        other = (await stack.save(f"other-{deaths.storing}")).checkpoint
        assert (await stack.publish(other.location, other.version_id)).certificate.passed


async def test_a_stored_version_is_scored_as_it_was_whatever_the_model_is_now(stack: Stack) -> None:
    saved = await stack.save()
    for engine in stack.engines:
        engine.store.remove(saved.checkpoint.version_id)
    for _ in range(3):
        await stack.step()
    published = await stack.publish(saved.checkpoint.location, saved.checkpoint.version_id)
    assert published.certificate.passed
    assert published.certificate.weights_hash == saved.certificate.weights_hash


async def test_a_copy_has_the_certificate_of_its_source(stack: Stack) -> None:
    saved = await stack.save()
    destination = f"{MODEL}/sampler_weights/copy"
    await stack.stub.CopyCheckpoint(pb.CopyCheckpointRequest(source=saved.checkpoint.location, destination=destination))
    assert await stack.certificate(destination) == saved.certificate
    await stack.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=saved.checkpoint.location))
    assert await stack.certificate(destination) == saved.certificate


async def test_saves_at_the_same_time_each_get_their_own(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.save(f"n{n}") for n in range(6)), return_exceptions=True)
    for answer in answers:
        assert not isinstance(answer, (BaseException, ServiceError)), answer
        assert answer.certificate.version_id == answer.checkpoint.version_id
