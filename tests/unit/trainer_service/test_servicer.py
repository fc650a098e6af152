"""TrainerService end to end: real gRPC, the real engine on a tiny model, a real journal and real files."""

import asyncio
import dataclasses
import gc
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import grpc.aio
import numpy as np
import pyrage
import pytest
import torch
import xxhash

from tests.support.batches import datum, random_datum, request, wide
from tests.support.models import VOCAB_SIZE, make_model
from tests.support.waiting import until
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tests.unit.trainer_service.restoring import Process
from tinsmith import errors
from tinsmith.cores import Cores
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FULL, FullWeights
from tinsmith.modeling.peft_import import import_peft
from tinsmith.received_answers import ReceivedAnswers
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.paths import creation_of
from tinsmith.rpc.server import ACCEPTED, REPEATED, Server
from tinsmith.rpc.tensors import from_numpy
from tinsmith.rpc.times import duration, seconds_of
from tinsmith.v1 import trainer_admin_pb2 as admin_pb
from tinsmith.v1 import trainer_admin_pb2_grpc, trainer_pb2_grpc, types_pb2
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith_cli import main
from trainer_service.config import TrainerConfig
from trainer_service.durability.executing import (
    MOST_DEATHS,
    NAME,
    Deaths,
    Executing,
    arriving,
    deletion,
    other_work,
)
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import EntryState
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import SnapshotPolicy
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.intake import _is_large
from trainer_service.operations.operations import Operations
from trainer_service.service import serve
from trainer_service.servicer import TrainerServicer
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location
from trainer_service.trainer import Trainer
from trainer_service.weight_sync import Version, WeightSender
from trainer_service.weight_sync.certificate import Certified

MODEL = "s:train:0"
EXTERNAL = types_pb2.CHECKPOINT_KIND_EXTERNAL
age: Any = pyrage  # it comes without types
LORA = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True)
OF_TEXT = [types_pb2.ADAPTER_GROUP_ATTN, types_pb2.ADAPTER_GROUP_MLP, types_pb2.ADAPTER_GROUP_UNEMBED]
"""Groups of a base model without a vision tower."""
ADAM = pb.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass
class Service:
    server: Server
    trainer: Trainer
    stub: Any
    channel: grpc.aio.Channel


StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start(base: BaseModel, tmp_path: Path) -> AsyncIterator[StartService]:
    """Starts a trainer on one folder; called again, it starts the next process's. `before`: called when none runs."""
    async with AsyncExitStack() as running:

        async def make(*, before: Callable[[], object] = lambda: None) -> Service:
            await running.aclose()
            before()
            process = await Process.start(
                tmp_path,
                base,
                policy=SnapshotPolicy(2, 0, 0),
                base_models=["tiny", "alias"],
                result_retention_s=60,
                max_queued_operations=20,
                max_tokens_per_microbatch=64,
                deterministic=False,
                trainer_id="t" * 32,
            )
            server = await running.enter_async_context(process.serving())
            channel = await running.enter_async_context(connect(f"127.0.0.1:{server.port}"))
            return Service(server, process.trainer, trainer_pb2_grpc.TrainerServiceStub(channel), channel)

        yield make


@pytest.fixture
async def service(start: StartService) -> Service:
    return await start()


@pytest.fixture
async def stub(service: Service) -> Any:
    await service.stub.CreateModel(creation())
    return service.stub


def creation(model_id: str = MODEL, **fields: Any) -> pb.CreateModelRequest:
    return pb.CreateModelRequest(**{"model_id": model_id, "base_model": "tiny", "lora_config": LORA, **fields})


def batch(seq_id: int, **fields: Any) -> pb.ForwardBackwardRequest:
    data = [random_datum(9, 5, vocab_size=VOCAB_SIZE), random_datum(4, 6, vocab_size=VOCAB_SIZE)]
    return request(data, model_id=MODEL, seq_id=seq_id, **fields)


def bad_batch(seq_id: int, **fields: Any) -> pb.ForwardBackwardRequest:
    nan = datum([1, 2], target_tokens=np.array([1, 2]), weights=np.array([1, np.nan], np.float32))
    return request([nan], model_id=MODEL, seq_id=seq_id, **fields)


def step(seq_id: int) -> pb.OptimStepRequest:
    return pb.OptimStepRequest(model_id=MODEL, seq_id=seq_id, adam_params=ADAM)


def save(seq_id: int, name: str = "one", **fields: Any) -> pb.SaveCheckpointRequest:
    given = {"kind": types_pb2.CHECKPOINT_KIND_TRAINING, "name": name, **fields}
    return pb.SaveCheckpointRequest(model_id=MODEL, seq_id=seq_id, **given)


@dataclass
class Accepted:
    """A unary call, made as a stream of one message: grpc.aio shows a unary one's initial metadata only at its end."""

    call: grpc.aio.UnaryStreamCall[Any, Any]

    @classmethod
    async def of(cls, service: Service, request: Any) -> "Accepted":
        """Returns once the service has acknowledged the request."""
        verb = type(request).__name__.removesuffix("Request")
        call = service.channel.unary_stream(
            f"/tinsmith.v1.TrainerService/{verb}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(pb, f"{verb}Response").FromString,
        )(request)
        await call.initial_metadata()
        return cls(call)

    async def result(self) -> Any:
        return await self.call.read()


async def read_file(stub: Any, location: str, name: str) -> bytes:
    call = stub.ReadCheckpointFile(pb.ReadCheckpointFileRequest(location=location, name=name))
    return b"".join([piece.data async for piece in call])


async def fails(call: Awaitable[object], error: type[errors.ServiceError], match: str) -> errors.ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    actual = from_rpc_error(caught.value)
    assert type(actual) is error, actual
    assert match in actual.message
    return actual


async def test_a_training_step_lowers_the_loss_and_is_described(stub: Any) -> None:
    first = await stub.ForwardBackward(batch(1))
    stepped = await stub.OptimStep(step(2))
    second = await stub.ForwardBackward(batch(3))
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
    assert "grad_norm:mean" in stepped.metrics
    model = (await stub.GetModel(pb.GetModelRequest(model_id=MODEL))).model
    assert (model.step, model.next_seq_id, model.base_model) == (1, 4, "tiny")
    assert model.optimizer == types_pb2.OPTIMIZER_ADAMW
    assert model.lora_config == LORA


async def test_the_acknowledgement_comes_before_the_result(service: Service, stub: Any) -> None:
    early = await Accepted.of(service, batch(2))  # waits for seq_id 1
    assert not early.call.done()
    await stub.ForwardBackward(batch(1))
    assert len((await early.result()).loss_fn_outputs) == 1


async def test_the_acknowledgement_tells_a_repeat(service: Service) -> None:
    await service.stub.CreateModel(creation())
    for is_repeat in (False, True):
        accepted = await Accepted.of(service, batch(1))
        metadata = tuple(await accepted.call.initial_metadata())
        assert (ACCEPTED in metadata, REPEATED in metadata) == (True, is_repeat)
        await accepted.result()


async def test_requests_in_reverse_order_give_what_they_give_in_order(service: Service) -> None:
    for model_id in (MODEL, "s:train:1"):
        await service.stub.CreateModel(creation(model_id))

    def chunk(model_id: str, seq_id: int) -> pb.ForwardBackwardRequest:
        return request([random_datum(6, seq_id, vocab_size=VOCAB_SIZE)], model_id=model_id, seq_id=seq_id)

    forward = [await service.stub.ForwardBackward(chunk(MODEL, seq_id)) for seq_id in (1, 2, 3)]
    calls = [await Accepted.of(service, chunk("s:train:1", seq_id)) for seq_id in (3, 2, 1)]
    backward = [await call.result() for call in reversed(calls)]
    losses = [[output.metrics["loss:sum"] for output in outputs] for outputs in (forward, backward)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


async def test_retried_forward_backward_adds_gradients_once(stub: Any) -> None:
    first, again = await asyncio.gather(stub.ForwardBackward(batch(1)), stub.ForwardBackward(batch(1)))
    later = await stub.ForwardBackward(batch(1))
    assert first == again == later
    norm = (await stub.OptimStep(step(2))).metrics["grad_norm:mean"]
    await stub.CreateModel(creation("s:train:1"))
    await stub.ForwardBackward(request(list(batch(1).data), model_id="s:train:1", seq_id=1))
    once = await stub.OptimStep(pb.OptimStepRequest(model_id="s:train:1", seq_id=2, adam_params=ADAM))
    assert norm == pytest.approx(once.metrics["grad_norm:mean"], rel=1e-5)


async def test_a_caller_that_was_told_of_a_failure_starts_afresh_behind_it(service: Service, stub: Any) -> None:
    await stub.ForwardBackward(batch(1))
    await fails(stub.ForwardBackward(bad_batch(2)), errors.InvalidRequest, "weights")
    calls = [await Accepted.of(service, batch(3)) for _ in range(2)]  # again, as after a lost connection
    for call in calls:
        await call.result()
    norm = (await stub.OptimStep(step(4))).metrics["grad_norm:mean"]
    await service.stub.CreateModel(creation("s:train:1"))
    alone = batch(1)
    alone.model_id = "s:train:1"
    await stub.ForwardBackward(alone)
    once = await stub.OptimStep(pb.OptimStepRequest(model_id="s:train:1", seq_id=2, adam_params=ADAM))
    assert norm == pytest.approx(once.metrics["grad_norm:mean"], rel=1e-5), "what came before the failure is dropped"
    assert await stub.OptimStep(step(4)) == await stub.OptimStep(step(4)), "a repeat is the same operation"
    await fails(stub.ForwardBackward(bad_batch(5)), errors.InvalidRequest, "weights")
    refused = await fails(stub.OptimStep(step(6)), errors.FailedPrecondition, "failed, seq_id 5; its gradients")
    assert refused.metadata["failed_seq_id"] == "5"


async def test_a_caller_that_pipelines_is_protected_from_a_step_on_half_a_batch(service: Service, stub: Any) -> None:
    calls = [await Accepted.of(service, body) for body in (batch(3), batch(2), step(4))]
    await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
    await calls[0].result()
    await fails(calls[2].result(), errors.FailedPrecondition, "failed, seq_id 1; its gradients")
    late = await Accepted.of(service, batch(7))  # sent before anybody was told of 5
    await fails(stub.ForwardBackward(bad_batch(5)), errors.InvalidRequest, "weights")
    await stub.ForwardBackward(batch(6))
    await late.result()
    await fails(stub.OptimStep(step(8)), errors.FailedPrecondition, "failed, seq_id 5; its gradients")


async def test_a_batch_that_fails_at_once_protects_those_that_were_sent_together_with_it(
    service: Service, stub: Any
) -> None:
    """They may come after the failure, and be computed before the step comes."""
    come = asyncio.Event()

    async def hold(_: float) -> None:
        await come.wait()

    with mock.patch("tinsmith.received_answers.sleep", hold):
        bad = await Accepted.of(service, bad_batch(1))
        await stub.ForwardBackward(batch(2))
        come.set()
        await fails(bad.result(), errors.InvalidRequest, "weights")
    await fails(stub.OptimStep(step(3)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")


async def test_a_batch_that_was_on_its_way_when_the_failure_was_told_is_protected(service: Service, stub: Any) -> None:
    told = asyncio.Event()

    async def message() -> AsyncIterator[pb.ForwardBackwardRequest]:
        await told.wait()
        yield batch(2)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.server.port}") as channel:
        call = channel.stream_unary(  # a unary call on the wire, whose message comes later than its head
            "/tinsmith.v1.TrainerService/ForwardBackward",
            request_serializer=pb.ForwardBackwardRequest.SerializeToString,
            response_deserializer=pb.ForwardBackwardResponse.FromString,
        )
        good = asyncio.ensure_future(call(message()))
        await trainer_pb2_grpc.TrainerServiceStub(channel).GetTrainerInfo(pb.GetTrainerInfoRequest())
        await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
        told.set()
        await good
    await fails(stub.OptimStep(step(3)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")


async def test_a_conflict_with_a_number_in_work_does_not_hide_that_its_caller_pipelines(
    service: Service, stub: Any
) -> None:
    early = await Accepted.of(service, batch(2))  # in work together with 1
    for other in (batch(2, forward_only=True), pb.LoadCheckpointRequest(model_id=MODEL, seq_id=2, location="x")):
        rpc = getattr(stub, type(other).__name__.removesuffix("Request"))
        await fails(rpc(other), errors.SequenceConflict, "seq_id 2")
    await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
    await early.result()
    await stub.ForwardBackward(batch(3))
    await fails(stub.OptimStep(step(4)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")


async def test_batches_in_work_together_are_protected_when_they_are_sent_again_after_a_restart(
    start: StartService, stub: Any
) -> None:
    await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
    await stub.ForwardBackward(batch(2))
    again = (await start()).stub
    await fails(again.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
    await again.ForwardBackward(batch(2))
    await fails(again.OptimStep(step(3)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")
    await fails(again.ForwardBackward(bad_batch(4)), errors.InvalidRequest, "weights")
    await again.ForwardBackward(batch(5))
    assert (await again.OptimStep(step(6))).metrics["grad_norm:mean"] > 0


async def test_a_batch_from_before_a_restart_is_protected_from_a_failure_behind_it(
    start: StartService, stub: Any
) -> None:
    """The restarted trainer does not know that the caller waits for the batch."""
    await stub.ForwardBackward(batch(1))
    again = (await start()).stub
    await fails(again.ForwardBackward(bad_batch(2)), errors.InvalidRequest, "weights")
    await again.ForwardBackward(batch(3))
    await again.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=1))
    await fails(again.OptimStep(step(4)), errors.FailedPrecondition, "failed, seq_id 2; its gradients")


async def test_a_batch_that_was_refused_for_now_is_protected_from_the_failure_that_comes_meanwhile(
    service: Service, stub: Any
) -> None:
    bad = await Accepted.of(service, bad_batch(1))
    full = mock.patch.object(service.trainer.scheduler, "accept", side_effect=errors.OutOfCapacity("the queue is full"))
    with full:
        await fails(stub.ForwardBackward(batch(2)), errors.OutOfCapacity, "the queue is full")
    await fails(bad.result(), errors.InvalidRequest, "weights")
    await stub.ForwardBackward(batch(2))
    await fails(stub.OptimStep(step(3)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")


async def test_a_number_that_another_operation_takes_after_it_was_refused_for_now_is_no_new_batch(
    service: Service, stub: Any
) -> None:
    await stub.ForwardBackward(batch(1))
    await fails(stub.ForwardBackward(bad_batch(2)), errors.InvalidRequest, "weights")
    full = mock.patch.object(service.trainer.scheduler, "accept", side_effect=errors.OutOfCapacity("the queue is full"))
    with full:
        await fails(stub.ForwardBackward(batch(3)), errors.OutOfCapacity, "the queue is full")
    await stub.ForwardBackward(batch(3, forward_only=True))
    await fails(stub.OptimStep(step(4)), errors.FailedPrecondition, "failed, seq_id 2; its gradients")


def num_told() -> int:
    gc.collect()
    return sum(type(each) is ReceivedAnswers for each in gc.get_objects())


@pytest.mark.parametrize("answer", ["for now", "cancelled"])
async def test_batches_of_models_that_do_not_exist_leave_nothing(service: Service, stub: Any, answer: str) -> None:
    before, accept = num_told(), service.trainer.scheduler.accept
    has_come, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **fields: Any) -> Any:
        has_come.set()
        await may_go_on.wait()
        return await accept(*args, **fields)

    effect = errors.NotReady("the journal is away") if answer == "for now" else slow
    with mock.patch.object(service.trainer.scheduler, "accept", side_effect=effect):
        call = stub.ForwardBackward(request([random_datum(4, 6, vocab_size=VOCAB_SIZE)], model_id="none", seq_id=1))
        if answer == "for now":
            await fails(call, errors.NotReady, "the journal is away")
        else:
            await has_come.wait()
            assert num_told() == before
            call.cancel()
            may_go_on.set()
    await until(lambda: num_told() == before)


async def test_batches_behind_creations_that_fail_take_bounded_memory(service: Service) -> None:
    may_fail = threading.Semaphore(0)

    def create(*_: Any) -> None:
        may_fail.acquire()
        raise errors.OutOfCapacity("no memory for the model")

    async def pause(_: float) -> None:
        pass

    before = num_told()
    with (
        mock.patch.object(service.trainer.operations.engine, "create_model", create),
        mock.patch("tinsmith.received_answers.sleep", pause),
    ):
        for n in range(200):
            made = await Accepted.of(service, creation(f"never:{n}"))
            behind = batch(1)
            behind.model_id = f"never:{n}"
            added = await Accepted.of(service, behind)
            may_fail.release()
            await fails(made.result(), errors.OutOfCapacity, "no memory for the model")
            await fails(added.result(), errors.ModelNotFound, "failed")
    assert num_told() - before < 100


async def test_a_call_that_grpc_makes_again_was_perhaps_made_before_the_failure(service: Service, stub: Any) -> None:
    """Its first attempt was lost before the trainer could read it."""
    await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights")
    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    options = [("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]}))]
    lost = mock.patch("trainer_service.intake.check_seq_id", side_effect=[errors.NotReady("lost"), None])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.server.port}", options=options) as channel:
        with lost:
            await trainer_pb2_grpc.TrainerServiceStub(channel).ForwardBackward(batch(2))
    await fails(stub.OptimStep(step(3)), errors.FailedPrecondition, "failed, seq_id 1; its gradients")


async def test_a_caller_that_says_what_it_was_told_is_believed(stub: Any) -> None:
    """As the gateway does, whose clients are told by it, and not by the trainer."""
    for seq_id, seen, applied in ((1, 0, False), (4, 4, True), (7, 6, False)):
        await fails(stub.ForwardBackward(bad_batch(seq_id)), errors.InvalidRequest, "weights")
        await stub.ForwardBackward(batch(seq_id + 1))
        said = step(seq_id + 2)
        said.failure_seen = seen
        if applied:
            assert (await stub.OptimStep(said)).metrics["grad_norm:mean"] > 0
        else:
            await fails(stub.OptimStep(said), errors.FailedPrecondition, f"failed, seq_id {seq_id}; its gradients")


@pytest.mark.parametrize("seen", [-1, 1, 99])
async def test_a_failure_that_is_not_before_the_step_is_refused_by_name(stub: Any, seen: int) -> None:
    said = step(1)
    said.failure_seen = seen
    await fails(stub.OptimStep(said), errors.InvalidRequest, f"failure_seen: {seen} is no seq_id before this step's, 1")


async def die_while_arriving(start: StartService, kind: str, model_id: str, seq_id: int, *, times: int = 2) -> Service:
    """The service after its process has died so often while it packed this request."""
    service = await start()
    for _ in range(times):
        service.trainer.scheduler.executing.blame((arriving(kind, model_id), seq_id))
        service = await start()
    return service


async def test_a_request_that_ended_the_trainer_twice_before_it_was_in_the_journal_fails_in_its_turn(
    start: StartService, stub: Any
) -> None:
    await stub.ForwardBackward(batch(1))
    service = await die_while_arriving(start, "forward_backward", MODEL, 2)
    with mock.patch("trainer_service.intake.batch_bytes", side_effect=AssertionError("read again")):
        for _ in range(2):
            await fails(service.stub.ForwardBackward(batch(2)), errors.InvalidRequest, "ended twice while it ran this")
    said = step(3)
    said.failure_seen = 0
    await fails(service.stub.OptimStep(said), errors.FailedPrecondition, "ended twice while it ran this")
    await service.stub.ForwardBackward(batch(4))
    assert (await service.stub.OptimStep(step(5))).metrics["grad_norm:mean"] > 0


async def test_a_request_that_ended_the_trainer_once_before_it_was_in_the_journal_runs(
    start: StartService, stub: Any
) -> None:
    for kind, seq_id, one in (("forward_backward", 1, batch(1)), ("optim_step", 2, step(2))):
        service = await die_while_arriving(start, kind, MODEL, seq_id, times=1)
        await getattr(service.stub, type(one).__name__.removesuffix("Request"))(one)
        assert not service.trainer.scheduler.executing.deaths


async def test_a_deletion_is_noted_in_each_part_and_refused_after_it_has_ended_the_trainer_twice(
    start: StartService, service: Service, stub: Any, tmp_path: Path
) -> None:
    await stub.CreateModel(creation("other:train:0"))
    noted: list[Deaths] = []
    name = deletion(MODEL)

    def noting(owner: Any, call: str) -> Any:
        plain = getattr(owner, call)

        def noted_call(self: Any, model_id: str, *arguments: Any) -> Any:
            noted.append(as_found(tmp_path)[name])
            return plain(self, model_id, *arguments)

        return mock.patch.object(owner, call, noted_call)

    with (
        noting(TrainingEngine, "delete_model"),
        noting(Journal, "delete_model"),
        noting(CheckpointStore, "delete_ephemeral"),
        noting(SnapshotFiles, "delete_all"),
    ):
        await stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL))
    assert noted == [*[Deaths(executing=1)] * 2, *[Deaths(storing=1)] * 2]
    assert name not in as_found(tmp_path)

    await stub.CreateModel(creation())
    for _ in range(2):
        service.trainer.scheduler.executing.blame(name)
        service = await start()
    await fails(
        service.stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL)),
        errors.ServiceError,
        "ended twice while it ran this",
    )
    await service.stub.DeleteModel(pb.DeleteModelRequest(model_id="other:train:0"))
    await service.stub.ForwardBackward(batch(1))


async def test_a_fault_of_the_device_while_a_request_becomes_work_is_no_answer_and_the_request_runs_after_a_restart(
    start: StartService, service: Service, stub: Any, tmp_path: Path
) -> None:
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with mock.patch.object(Operations, "work_of", side_effect=fault):
        calling = asyncio.ensure_future(stub.ForwardBackward(batch(1)))  # the channel calls again after UNAVAILABLE
        async with asyncio.timeout(20):
            await service.trainer.scheduler.compute.engine_died.wait()
    assert as_found(tmp_path)[MODEL, 1] == Deaths(executing=1)
    record = await service.trainer.journal.find(MODEL, 1)
    assert record is not None
    assert record.state == EntryState.ACCEPTED
    service = await start()
    await asyncio.gather(calling, return_exceptions=True)
    await service.stub.ForwardBackward(batch(1))


def as_found(folder: Path) -> dict[tuple[str, int], Deaths]:
    """The deaths that the next process would find if this one died now."""
    (folder / "copy").mkdir(exist_ok=True)
    shutil.copy(folder / NAME, folder / "copy" / NAME)
    return Executing(folder / "copy").deaths


async def test_a_creation_and_the_repeat_of_an_operation_that_ended_the_trainer_twice_are_refused(
    start: StartService, stub: Any
) -> None:
    await stub.ForwardBackward(batch(1))
    service = await die_while_arriving(start, "forward_backward", MODEL, 1)
    await fails(service.stub.ForwardBackward(batch(1)), errors.ServiceError, "ended twice while it ran this")
    service = await die_while_arriving(start, "create_model", "new:train:0", 0)
    await fails(service.stub.CreateModel(creation("new:train:0")), errors.ServiceError, "ended twice while it ran this")
    await service.stub.OptimStep(step(2))


@pytest.mark.parametrize("clip", [0.0, 1.0])
async def test_one_datum_with_a_huge_ratio_is_told_by_the_metrics_and_harmless_with_clipping(
    service: Service, stub: Any, clip: float
) -> None:
    """docs/algorithms.md: without clipping, AdamW's second moment remembers the gradient for very long."""
    adam = pb.AdamParams(learning_rate=1e-2, beta1=0.5, beta2=0.95, eps=1e-8, grad_clip_norm=clip)
    engine = service.trainer.operations.engine

    async def moved(data: list[types_pb2.Datum], loss_fn: str, seq_id: int) -> tuple[Any, Any, float]:
        before = engine.weights(MODEL).flat.clone()
        answer = await stub.ForwardBackward(request(data, loss_fn, model_id=MODEL, seq_id=seq_id))
        stepped = await stub.OptimStep(pb.OptimStepRequest(model_id=MODEL, seq_id=seq_id + 1, adam_params=adam))
        return answer.metrics, stepped.metrics, (engine.weights(MODEL).flat - before).abs().max().item()

    usual = list(batch(1).data)
    *_, first = await moved(usual, "cross_entropy", 1)
    ones = np.ones(3, np.float32)
    far = datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), logprobs=-40 * ones, advantages=ones)
    metrics, stepped, _ = await moved([far], "importance_sampling", 3)
    assert metrics["ratio:max"] > 1e13
    assert stepped["grad_norm:mean"] > 1e12
    last = 0.0
    for seq_id in range(5, 65, 2):  # until the first moment has forgotten it
        *_, last = await moved(usual, "cross_entropy", seq_id)
    assert last < 1e-4 * first if not clip else last > 1e-2 * first


async def test_another_body_is_a_conflict(stub: Any) -> None:
    await stub.ForwardBackward(batch(1))
    await fails(stub.ForwardBackward(batch(1, forward_only=True)), errors.SequenceConflict, "seq_id 1")
    await fails(stub.OptimStep(step(1)), errors.SequenceConflict, "forward_backward")
    await fails(stub.CreateModel(creation(base_model="alias")), errors.SequenceConflict, "seq_id 0")
    assert (await stub.CreateModel(creation())).model.model_id == MODEL


async def test_a_hundred_bytes_that_describe_67_million_targets_fail_by_name_and_the_others_train_on(
    service: Service, stub: Any
) -> None:
    await service.stub.CreateModel(creation("s:train:1"))
    bodies = [request([wide(2**26)], model_id=MODEL, seq_id=seq_id) for seq_id in range(1, 9)]
    calls = [await Accepted.of(service, body) for body in bodies]
    other = random_datum(4, 6, vocab_size=VOCAB_SIZE)
    assert (await stub.ForwardBackward(request([other], model_id="s:train:1", seq_id=1))).loss_fn_outputs
    for call in calls:
        await fails(call.result(), errors.InvalidRequest, "67108864 targets for a token are above this server's")
    await fails(stub.OptimStep(step(9)), errors.FailedPrecondition, "a forward_backward before it failed")
    await stub.ForwardBackward(batch(10))
    assert (await stub.OptimStep(step(11))).metrics["grad_norm:mean"] > 0


async def test_compressible_batches_are_bounded_by_what_they_are_in_memory(service: Service, stub: Any) -> None:
    service.trainer.scheduler.held.max_bytes = 2**22
    large = [datum([1] * 60, target_tokens=[1] * 60)] * 200  # less than 1 kB in the journal
    calls = [await Accepted.of(service, request(large, model_id=MODEL, seq_id=seq_id)) for seq_id in range(2, 8)]
    await stub.ForwardBackward(request(large[:1], model_id=MODEL, seq_id=1))
    outcomes = await asyncio.gather(*(call.result() for call in calls), return_exceptions=True)
    taken = [outcome for outcome in outcomes if not isinstance(outcome, grpc.aio.AioRpcError)]
    assert 2 <= len(taken) < 6
    assert outcomes[: len(taken)] == taken
    for outcome in outcomes[len(taken) :]:
        assert isinstance(outcome, grpc.aio.AioRpcError)
        assert isinstance(from_rpc_error(outcome), errors.OutOfCapacity)
    too_large = request(large * 10, model_id=MODEL, seq_id=len(taken) + 2)
    await fails(stub.ForwardBackward(too_large), errors.InvalidRequest, "half of its max_queued_bytes")
    await fails(stub.OptimStep(step(len(taken) + 3)), errors.FailedPrecondition, "bytes of memory")


async def test_a_body_larger_than_the_memory_for_one_operation_fails_by_name(service: Service, stub: Any) -> None:
    """A client that is told to try again would do so for ever."""
    service.trainer.scheduler.held.max_bytes = 2**15
    large = request([datum([1] * 60, target_tokens=[1] * 60)] * 200, model_id=MODEL, seq_id=1)
    assert large.ByteSize() > 2**15
    await fails(stub.ForwardBackward(large), errors.InvalidRequest, "half of its max_queued_bytes")
    await fails(stub.OptimStep(step(2)), errors.FailedPrecondition, "bytes of memory")
    await stub.ForwardBackward(batch(3))


async def test_an_unknown_model_is_refused_before_the_journal(service: Service) -> None:
    await fails(service.stub.OptimStep(step(1)), errors.ModelNotFound, MODEL)
    await fails(service.stub.GetModel(pb.GetModelRequest(model_id="x")), errors.ModelNotFound, "'x'")
    assert await service.trainer.journal.find(MODEL, 1) is None


async def test_an_invalid_batch_fails_and_the_next_request_works(stub: Any) -> None:
    await fails(stub.ForwardBackward(bad_batch(1)), errors.InvalidRequest, "weights[1]: nan is not finite")
    await fails(stub.ForwardBackward(batch(2, loss_fn="nope")), errors.UnknownLossFn, "'nope'")
    await fails(stub.OptimStep(step(3)), errors.FailedPrecondition, "'nope'")
    await stub.ForwardBackward(batch(4))
    await stub.OptimStep(step(5))
    await fails(stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=1)), errors.InvalidRequest, "nan")


async def test_a_skipped_operation_uses_up_its_number_and_spoils_the_step_if_gradients_are_missing(stub: Any) -> None:
    def skip(seq_id: int, *, gradients_missing: bool) -> Any:
        return stub.SkipOperation(
            pb.SkipOperationRequest(
                model_id=MODEL, seq_id=seq_id, reason="99 bytes", gradients_missing=gradients_missing
            )
        )

    await fails(skip(1, gradients_missing=False), errors.InvalidRequest, "99 bytes")
    await stub.OptimStep(step(2))
    await fails(skip(3, gradients_missing=True), errors.InvalidRequest, "99 bytes")
    await fails(stub.OptimStep(step(4)), errors.FailedPrecondition, "99 bytes")
    await stub.OptimStep(step(5))


async def test_the_journal_keeps_no_more_of_a_skipped_operation_than_its_caller_is_told(
    service: Service, stub: Any
) -> None:
    reason = "begins" + os.urandom(2**20).hex() + "ends"
    for _ in range(2):
        call = stub.SkipOperation(pb.SkipOperationRequest(model_id=MODEL, seq_id=1, reason=reason))
        error = await fails(call, errors.InvalidRequest, "begins")
        assert len(error.message) < 2000
        assert error.message.endswith("ends")
    assert service.trainer.journal.bound.sizes.total < 10_000


async def test_an_invalid_forward_does_not_spoil_the_step(stub: Any) -> None:
    await stub.ForwardBackward(batch(1))
    await fails(stub.ForwardBackward(bad_batch(2, forward_only=True)), errors.InvalidRequest, "nan")
    await stub.OptimStep(step(3))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"lora_config": types_pb2.LoraConfig(rank=0, train_attn=True)},
            "rank: 0 means full-parameter training, and this server was started without --full-training",
        ),
        ({"lora_config": types_pb2.LoraConfig(rank=-1, train_attn=True)}, "rank: -1 is outside 1..16"),
        ({"lora_config": types_pb2.LoraConfig(rank=17, train_attn=True)}, "rank: 17 is outside 1..16"),
        ({"lora_config": None}, "lora_config: missing"),
        ({"base_model": "huge"}, "'huge' is not served by this trainer; it serves tiny, alias"),
        ({"model_id": "../x"}, "'../x' is not a training run id"),
        ({"load_optimizer": True}, "load_optimizer"),
        ({"from_location": "r/weights/one"}, "lora_config: must be absent"),
        ({"from_location": "r/weights/..", "lora_config": None}, "from_location"),
    ],
)
async def test_a_wrong_creation_names_what_is_wrong(service: Service, fields: dict[str, Any], match: str) -> None:
    await fails(service.stub.CreateModel(creation(**fields)), errors.InvalidRequest, match)
    await service.stub.CreateModel(creation())


async def test_a_damaged_file_of_weights_ends_the_trainer_with_one_line(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x08" + b"\0" * 30)
    config = TrainerConfig(
        base_model=str(folder), state_dir=tmp_path, checkpoint_dir=str(tmp_path / "checkpoints"), listen="127.0.0.1:0"
    )
    with pytest.raises(SystemExit, match=r"cannot load the base model .*: model\.safetensors is damaged \(") as ended:
        await serve(config, None, Cores("", most=0, set_threads=lambda _: None))
    assert "\n" not in str(ended.value)


async def test_a_checkpoint_of_all_parameters_is_refused_by_its_name_where_adapters_are_trained(
    service: Service, base: BaseModel
) -> None:
    full = FullWeights(base, torch.zeros(sum(parameter.numel() for parameter in base.parameters.values())))
    save_by_hand(service, CapturedState(FULL, full, 1, None))
    said = "{}: r/weights/one holds all parameters, which needs a server started with --full-training; this one"
    started = pb.CreateModelRequest(model_id=MODEL, from_location="r/weights/one")
    await fails(service.stub.CreateModel(started), errors.InvalidRequest, said.format("from_location"))
    await service.stub.CreateModel(creation(model_id="s:train:1"))
    loading = pb.LoadCheckpointRequest(model_id="s:train:1", seq_id=1, location="r/weights/one")
    await fails(service.stub.LoadCheckpoint(loading), errors.InvalidRequest, said.format("location"))


async def test_a_checkpoint_of_an_adapter_is_refused_by_its_name_where_all_parameters_are_trained(
    service: Service, base: BaseModel, model_folder: Path
) -> None:
    config = AdapterConfig(rank=4, seed=1)
    save_by_hand(service, CapturedState(config, Adapter.create(config, base.targets, base.device), 1, None))
    trainable = BaseModel.load(model_folder, device=base.device, dtype=base.dtype, trainable=True)
    service.trainer.operations.loads.engine = TrainingEngine(trainable, max_tokens_per_microbatch=64)
    said = "holds an adapter (rank 4), which needs a server started without --full-training; this one"
    started = pb.CreateModelRequest(model_id=MODEL, from_location="r/weights/one")
    await fails(service.stub.CreateModel(started), errors.InvalidRequest, f"from_location: r/weights/one {said}")


def save_by_hand(service: Service, state: CapturedState) -> None:
    info = types_pb2.CheckpointInfo(
        location="r/weights/one", kind=types_pb2.CHECKPOINT_KIND_TRAINING, model_id="r", base_model="tiny",
        lora_config=config_to_proto(state.config), version_id="r@1", step=state.step,
    )  # fmt: skip
    service.trainer.checkpoints.save(info, state, overwrite=False)


async def test_an_unknown_optimizer_is_refused(service: Service) -> None:
    await fails(
        service.stub.CreateModel(creation(optimizer=7)), errors.InvalidRequest, "7 is not one of OPTIMIZER_ADAMW, "
    )


async def test_wrong_seq_ids_and_settings_are_named(stub: Any) -> None:
    await fails(stub.OptimStep(step(0)), errors.InvalidRequest, "seq_id: 0")
    await fails(stub.OptimStep(pb.OptimStepRequest(model_id=MODEL, seq_id=1)), errors.InvalidRequest, "params: missing")
    await fails(stub.SaveCheckpoint(save(2, name="a/b")), errors.InvalidRequest, "name: 'a/b'")
    await fails(
        stub.SaveCheckpoint(save(3, kind=0)), errors.InvalidRequest, "kind: 0 is not one of CHECKPOINT_KIND_TRAINING,"
    )
    ephemeral = save(4, kind=types_pb2.CHECKPOINT_KIND_EPHEMERAL)
    await fails(stub.SaveCheckpoint(ephemeral), errors.InvalidRequest, "name: 'one'")
    await fails(
        stub.SkipOperation(pb.SkipOperationRequest(model_id=MODEL, seq_id=5)), errors.InvalidRequest, "reason: is empty"
    )
    await stub.OptimStep(step(6))


async def test_the_result_waits_for_whoever_asks_after_the_call_was_cancelled(service: Service, stub: Any) -> None:
    (await Accepted.of(service, batch(2))).call.cancel()
    waiting = await Accepted.of(service, pb.WaitResultRequest(model_id=MODEL, seq_id=2))
    await stub.ForwardBackward(batch(1))
    answer = await waiting.result()
    assert len(answer.forward_backward.loss_fn_outputs) == 1
    await fails(stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=9)), errors.ResultNotFound, "seq_id 9")


async def test_a_save_and_the_load_behind_it_can_be_pipelined(stub: Any) -> None:
    await stub.ForwardBackward(batch(1))
    await stub.OptimStep(step(2))
    before = await stub.ForwardBackward(batch(3, forward_only=True))
    saving = stub.SaveCheckpoint(save(4, user_metadata={"note": "x"}, ttl=duration(3600)))
    rest = [stub.ForwardBackward(batch(5)), stub.OptimStep(step(6))]
    loading = stub.LoadCheckpoint(
        pb.LoadCheckpointRequest(model_id=MODEL, seq_id=7, location=f"{MODEL}/weights/one", load_optimizer=True)
    )
    after = stub.ForwardBackward(batch(8, forward_only=True))
    saved = (await saving).checkpoint
    await asyncio.gather(*rest)
    assert (await loading).checkpoint == saved
    assert (await after).metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"], rel=1e-6)
    assert re.fullmatch(f"{MODEL}@4[.][0-9a-f]{{12}}[.][0-9a-f]{{12}}", saved.version_id)
    assert (saved.step, saved.has_optimizer, saved.user_metadata["note"]) == (1, True, "x")
    got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=saved.location))
    assert got.checkpoint == saved
    await fails(stub.SaveCheckpoint(save(9)), errors.CheckpointExists, "weights/one exists")
    await stub.SaveCheckpoint(save(10, overwrite=True))


async def test_no_version_id_is_made_twice_when_a_model_id_is_used_again(service: Service, stub: Any) -> None:
    versions = []
    for name in ("one", "two", "three"):
        repeated = await stub.CreateModel(creation())
        assert repeated == await stub.CreateModel(creation()), "a repeat is the same creation"
        saved = [await stub.SaveCheckpoint(save(seq_id, f"{name}-{seq_id}")) for seq_id in (1, 2)]
        versions += [reply.checkpoint.version_id for reply in saved]
        await stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL))
        await service.trainer.journal.prune(dry_run=False)
    assert len(set(versions)) == 6
    assert [creation_of(version) for version in versions[::2]] == [creation_of(version) for version in versions[1::2]]
    for name, version in zip(("one", "two", "three"), versions[::2], strict=True):
        got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=f"{MODEL}/weights/{name}-1"))
        assert got.checkpoint.version_id == version
    await fails(stub.CreateModel(creation(creation_id="beef")), errors.InvalidRequest, "creation_id: 'beef'")


async def test_no_version_id_is_made_twice_when_the_journal_is_put_back_from_a_backup(
    start: StartService, tmp_path: Path
) -> None:
    """As docs/durability.md says: what was saved after the backup stays, and the run uses its seq_ids again."""
    backup = tmp_path / "backup"

    def copy(source: Path, target: Path) -> None:
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            (target / name).unlink(missing_ok=True)
            if (source / name).exists():
                shutil.copy(source / name, target / name)

    service = await start()
    await service.stub.CreateModel(creation())
    backup.mkdir()
    await start(before=lambda: copy(tmp_path, backup))
    saved: list[pb.SaveCheckpointResponse] = []
    for name in ("one", "two"):
        stub = (await start(before=lambda: copy(backup, tmp_path))).stub
        saved.append(await stub.SaveCheckpoint(save(1, name)))
        assert await stub.SaveCheckpoint(save(1, name)) == saved[-1], "a repeat is the same save"
    versions = [reply.checkpoint.version_id for reply in saved]
    assert versions[0] != versions[1]
    assert creation_of(versions[0]) == creation_of(versions[1])
    again = (await start()).stub
    assert await again.SaveCheckpoint(save(1, "two")) == saved[1]
    await fails(again.SaveCheckpoint(save(2, "no", save_id="beef")), errors.InvalidRequest, "save_id: 'beef'")


async def test_a_model_is_made_once_all_of_the_one_that_had_its_id_is_gone(
    service: Service, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ephemeral = {"kind": types_pb2.CHECKPOINT_KIND_EPHEMERAL, "name": ""}
    await stub.SaveCheckpoint(save(1, **ephemeral))
    going, leave = asyncio.Event(), asyncio.Event()
    delete_files = service.trainer.operations.delete_files

    async def slowly(model_id: str) -> None:
        going.set()
        await leave.wait()
        await delete_files(model_id)

    monkeypatch.setattr(service.trainer.operations, "delete_files", slowly)
    deleting = asyncio.ensure_future(stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL)))
    await going.wait()
    creating = asyncio.ensure_future(stub.CreateModel(creation()))
    await asyncio.sleep(0.1)
    leave.set()
    await asyncio.gather(deleting, creating)
    saved = await stub.SaveCheckpoint(save(1, **ephemeral))
    assert (await stub.GetModel(pb.GetModelRequest(model_id=MODEL))).model.next_seq_id == 2
    await stub.GetCheckpoint(pb.GetCheckpointRequest(location=saved.checkpoint.location))


async def test_a_new_model_from_a_checkpoint_goes_on_where_it_was(stub: Any) -> None:
    await stub.ForwardBackward(batch(1))
    await stub.OptimStep(step(2))
    await stub.SaveCheckpoint(save(3))
    await stub.ForwardBackward(batch(4))
    await stub.OptimStep(step(5))
    expected = await stub.ForwardBackward(batch(6, forward_only=True))
    created = await stub.CreateModel(
        pb.CreateModelRequest(model_id="s:train:1", from_location=f"{MODEL}/weights/one", load_optimizer=True)
    )
    assert created.model.lora_config == LORA
    assert (created.model.step, created.model.base_model) == (1, "tiny")
    for operation in (batch(1), step(2), batch(3, forward_only=True)):
        operation.model_id = "s:train:1"
        verb = stub.OptimStep if isinstance(operation, pb.OptimStepRequest) else stub.ForwardBackward
        answer = await verb(operation)
    assert answer.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)


async def test_the_optimizer_of_sampler_weights_is_refused_by_name(stub: Any) -> None:
    saved = await stub.SaveCheckpoint(save(1, kind=types_pb2.CHECKPOINT_KIND_SAMPLER))
    assert saved.num_samplers == 0
    location = saved.checkpoint.location
    assert location == f"{MODEL}/sampler_weights/one"
    load = pb.LoadCheckpointRequest(model_id=MODEL, seq_id=2, location=location, load_optimizer=True)
    await fails(stub.LoadCheckpoint(load), errors.InvalidRequest, "holds no optimizer state")
    await stub.LoadCheckpoint(pb.LoadCheckpointRequest(model_id=MODEL, seq_id=3, location=location))


async def test_a_checkpoint_with_moments_that_are_not_finite_is_named_when_it_is_loaded(
    service: Service, stub: Any
) -> None:
    await stub.ForwardBackward(batch(1))
    await stub.OptimStep(step(2))
    model = service.trainer.operations.engine.models[MODEL]
    optimizer: Any = model.need_optimizer()
    optimizer.exp_avg_sq[7] = np.inf
    location = (await stub.SaveCheckpoint(save(3))).checkpoint.location
    load = pb.LoadCheckpointRequest(model_id=MODEL, seq_id=4, location=location, load_optimizer=True)
    await fails(stub.LoadCheckpoint(load), errors.NotFinite, "has exp_avg_sq that are not finite")
    new = creation("s:train:1", lora_config=None, from_location=location, load_optimizer=True)
    await fails(service.stub.CreateModel(new), errors.NotFinite, f"from_location: {location} has exp_avg_sq")
    await stub.LoadCheckpoint(pb.LoadCheckpointRequest(model_id=MODEL, seq_id=5, location=location))
    await stub.ForwardBackward(batch(6))
    await stub.OptimStep(step(7))
    model.adapter.flat.detach()[3] = np.nan
    location = (await stub.SaveCheckpoint(save(8, "two"))).checkpoint.location
    load = pb.LoadCheckpointRequest(model_id=MODEL, seq_id=9, location=location)
    await fails(stub.LoadCheckpoint(load), errors.NotFinite, "has weights that are not finite")


async def test_a_sampler_that_is_full_just_now_does_not_fail_the_save(
    service: Service, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish(version: object, **_: object) -> NoReturn:
        raise errors.OutOfCapacity("2 versions in use hold everything")

    monkeypatch.setattr(WeightSender, "has_samplers", True)
    monkeypatch.setattr(service.trainer.operations.publishing.publisher.sender, "publish", publish)
    reply = await stub.SaveCheckpoint(save(1, kind=types_pb2.CHECKPOINT_KIND_SAMPLER))
    assert reply.num_samplers == 0
    assert not reply.HasField("certificate")
    assert (await stub.GetCheckpoint(pb.GetCheckpointRequest(location=reply.checkpoint.location))).checkpoint.step == 0


async def test_publishing_on_demand_needs_the_version_and_a_sampler(stub: Any) -> None:
    saved = (await stub.SaveCheckpoint(save(1, name="", kind=types_pb2.CHECKPOINT_KIND_EPHEMERAL))).checkpoint
    assert saved.location == f"{MODEL}/ephemeral/1"
    wanted = pb.PublishCheckpointRequest(location=saved.location, version_id=saved.version_id)
    await fails(stub.PublishCheckpoint(wanted), errors.NotReady, "no sampler is serving")
    wanted.version_id = "other@1"
    await fails(stub.PublishCheckpoint(wanted), errors.VersionGone, "other@1")
    wanted.version_id = ""
    await fails(stub.PublishCheckpoint(wanted), errors.InvalidRequest, "version_id: is empty")
    wanted.version_id, wanted.num_samplers = saved.version_id, -1
    await fails(stub.PublishCheckpoint(wanted), errors.InvalidRequest, "num_samplers: -1 must not be negative")
    wanted.version_id, wanted.num_samplers = "other@1", 0
    wanted.location = f"{MODEL}/ephemeral/2"
    await fails(stub.PublishCheckpoint(wanted), errors.CheckpointNotFound, "ephemeral/2")


async def test_checkpoint_calls_refuse_paths_and_deleting_is_idempotent(stub: Any) -> None:
    await fails(
        stub.GetCheckpoint(pb.GetCheckpointRequest(location=f"{MODEL}/weights/..")), errors.InvalidRequest, "location"
    )
    await stub.SaveCheckpoint(save(1))
    for _ in range(2):
        await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=f"{MODEL}/weights/one"))
    await fails(
        stub.GetCheckpoint(pb.GetCheckpointRequest(location=f"{MODEL}/weights/one")),
        errors.CheckpointNotFound,
        "weights/one",
    )


async def test_an_external_checkpoint_is_not_published_and_its_files_can_be_read(stub: Any) -> None:
    identity = age.x25519.Identity.generate()
    saved = await stub.SaveCheckpoint(
        save(1, kind=EXTERNAL, age_recipients=[str(identity.to_public())], ttl=duration(9))
    )
    info = saved.checkpoint
    assert (info.location, info.encrypted, info.ttl.seconds) == (f"{MODEL}/external_weights/one", True, 9)
    got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=info.location))
    assert got.checkpoint == info
    assert [file.name for file in got.files] == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    for file in got.files:
        data = await read_file(stub, info.location, file.name)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size_bytes, file.sha256)
        age.decrypt(data, [identity])
    await fails(read_file(stub, info.location, "manifest.json"), errors.NotFound, "has no file 'manifest.json'")
    await fails(read_file(stub, f"{MODEL}/external_weights/two", "x"), errors.CheckpointNotFound, "two")
    load = pb.LoadCheckpointRequest(model_id=MODEL, seq_id=2, location=info.location)
    await fails(stub.LoadCheckpoint(load), errors.InvalidRequest, "encrypted with age")
    wanted = pb.PublishCheckpointRequest(location=info.location, version_id=info.version_id)
    await fails(stub.PublishCheckpoint(wanted), errors.InvalidRequest, "encrypted with age")


async def test_an_unencrypted_external_checkpoint_can_be_loaded(stub: Any) -> None:
    saved = (await stub.SaveCheckpoint(save(1, kind=EXTERNAL))).checkpoint
    await stub.LoadCheckpoint(pb.LoadCheckpointRequest(model_id=MODEL, seq_id=2, location=saved.location))


async def test_recipients_are_refused_by_name(stub: Any) -> None:
    wrong = save(1, kind=EXTERNAL, age_recipients=["age1x"])
    await fails(stub.SaveCheckpoint(wrong), errors.InvalidRequest, "age_recipients[0]: 'age1x'")
    good = str(age.x25519.Identity.generate().to_public())
    await fails(
        stub.SaveCheckpoint(save(2, age_recipients=[good])), errors.InvalidRequest, "only CHECKPOINT_KIND_EXTERNAL"
    )


async def test_a_large_file_comes_in_pieces(stub: Any, service: Service) -> None:
    saved = (await stub.SaveCheckpoint(save(1, kind=EXTERNAL))).checkpoint
    with mock.patch("trainer_service.checkpoint_servicer._PIECE_BYTES", 1000):
        name = "adapter_model.safetensors"
        call = stub.ReadCheckpointFile(pb.ReadCheckpointFileRequest(location=saved.location, name=name))
        pieces = [piece.data async for piece in call]
    assert {len(piece) for piece in pieces[:-1]} == {1000}
    with service.trainer.checkpoints.open_file(Location.parse(saved.location, field="x"), name) as file:
        assert b"".join(pieces) == file.read()


async def test_a_client_that_leaves_while_a_piece_is_read_leaves_no_error_behind(
    service: Service, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved = (await stub.SaveCheckpoint(save(1, kind=EXTERNAL))).checkpoint
    request = pb.ReadCheckpointFileRequest(location=saved.location, name="adapter_model.safetensors")
    plain, stream, opened = CheckpointStore.reads, stub.ReadCheckpointFile(request), list[io.BufferedReader]()

    async def reads(store: CheckpointStore, call: Callable[..., Any], *arguments: Any) -> Any:
        if opened:
            stream.cancel()
            await until(lambda: opened[0].closed)
        answer = await plain(store, call, *arguments)
        opened.append(answer)
        return answer

    with mock.patch.object(CheckpointStore, "reads", reads):
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        await until(lambda: not service.trainer.scheduler.tasks)
    gc.collect()  # asyncio tells of an error that nobody has read when its task is freed
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_part_of_a_file_is_that_part_and_damage_elsewhere_is_found(stub: Any, tmp_path: Path) -> None:
    location = (await stub.SaveCheckpoint(save(1, kind=EXTERNAL))).checkpoint.location
    name = "adapter_model.safetensors"
    whole = await read_file(stub, location, name)

    async def part(**which: int) -> bytes:
        call = stub.ReadCheckpointFile(pb.ReadCheckpointFileRequest(location=location, name=name, **which))
        return b"".join([piece.data async for piece in call])

    assert await part(offset=10) == whole[10:]
    assert await part(offset=10, num_bytes=7) == whole[10:17]
    assert await part(offset=len(whole), num_bytes=7) == await part(num_bytes=0) == b""
    await fails(part(offset=-1), errors.InvalidRequest, "must not be negative")
    intact = await stub.VerifyCheckpoint(pb.VerifyCheckpointRequest(location=location))
    assert {file.name: file.size_bytes for file in intact.files}[name] == len(whole)
    assert not intact.problems
    path = tmp_path / "checkpoints" / location / name
    await asyncio.to_thread(path.write_bytes, whole[:-1] + bytes([whole[-1] ^ 1]))
    await fails(part(offset=10, num_bytes=7), errors.DataCorrupted, f"{name} is damaged")
    problems = (await stub.VerifyCheckpoint(pb.VerifyCheckpointRequest(location=location))).problems
    assert list(problems) == [name]


SAVED = f"{MODEL}/external_weights/one"
ON_CHECKPOINT = {
    "GetCheckpoint": ("manifest", pb.GetCheckpointRequest(location=SAVED), ("manifest", f"{SAVED} ")),
    "GetCertificate": ("certificate", pb.GetCertificateRequest(location=SAVED), ("certificate", f"{SAVED} ")),
    "VerifyCheckpoint": ("verify", pb.VerifyCheckpointRequest(location=SAVED), ("verify", f"{SAVED} ")),
    "CopyCheckpoint": (
        "copy",
        pb.CopyCheckpointRequest(source=SAVED, destination="t:train:0/external_weights/two"),
        ("copy", f"{SAVED} t:train:0/external_weights/two"),
    ),
    "DeleteCheckpoint": (
        "delete",
        pb.DeleteCheckpointRequest(location=SAVED, version_id="1"),
        ("delete", f"{SAVED} 1"),
    ),
    "CreateModel": (
        "info",
        pb.CreateModelRequest(model_id="t:train:0", base_model="tiny", from_location=SAVED),
        ("servable", f"{SAVED} "),
    ),
    "ReadCheckpointFile": (
        "open_file",
        pb.ReadCheckpointFileRequest(location=SAVED, name="adapter_model.safetensors"),
        ("open", f"{SAVED} adapter_model.safetensors"),
    ),
}
"""For each call on a checkpoint: the method of the store, the request, and the word and content of its name."""


@pytest.mark.parametrize("verb", ON_CHECKPOINT)
async def test_a_request_on_a_checkpoint_is_noted_and_refused_after_it_has_ended_the_trainer_too_often(
    service: Service, stub: Any, tmp_path: Path, verb: str
) -> None:
    method, request, (what, content) = ON_CHECKPOINT[verb]
    name = other_work(f"{what} {MODEL}", content.encode())
    assert (await stub.SaveCheckpoint(save(1, kind=EXTERNAL, name="one"))).checkpoint.location == SAVED
    noted: list[Deaths] = []
    plain = getattr(CheckpointStore, method)

    def noting(*arguments: Any, **settings: Any) -> Any:
        noted.append(as_found(tmp_path).get(name, Deaths()))
        return plain(*arguments, **settings)

    async def call() -> None:
        if verb == "ReadCheckpointFile":
            async for _ in stub.ReadCheckpointFile(request):
                pass
        else:
            await getattr(stub, verb)(request)

    executing = service.trainer.scheduler.executing
    executing.deaths[name] = Deaths(storing=MOST_DEATHS - 1)
    with mock.patch.object(CheckpointStore, method, noting):
        if verb == "GetCertificate":
            await fails(call(), errors.NotFound, "never published")
        else:
            await call()
        assert noted[0] == Deaths(storing=MOST_DEATHS)
        assert not executing.deaths
        noted.clear()
        executing.deaths[name] = Deaths(storing=MOST_DEATHS)
        await fails(call(), errors.ServiceError, "while it read or wrote the checkpoint of this")
    assert noted == []
    await stub.ForwardBackward(batch(2))


async def test_each_piece_of_a_file_is_noted_by_its_offset(service: Service, stub: Any) -> None:
    location = (await stub.SaveCheckpoint(save(1, kind=EXTERNAL, name="one"))).checkpoint.location
    name = "adapter_model.safetensors"
    killing = other_work(f"read {MODEL}", f"{location} {name} 2000".encode())
    service.trainer.scheduler.executing.deaths[killing] = Deaths(storing=MOST_DEATHS)
    got: list[bytes] = []

    async def read(offset: int) -> None:
        request = pb.ReadCheckpointFileRequest(location=location, name=name, offset=offset)
        got.extend([piece.data async for piece in stub.ReadCheckpointFile(request)])

    with mock.patch("trainer_service.checkpoint_servicer._PIECE_BYTES", 1000):
        await fails(read(0), errors.ServiceError, "while it read or wrote the checkpoint of this")
        assert list(service.trainer.scheduler.executing.deaths) == [killing]
        await read(2500)
    assert got


@pytest.mark.parametrize("verb", ["VerifyCheckpoint", "CopyCheckpoint"])
async def test_a_fault_of_the_device_in_a_request_on_a_checkpoint_ends_the_trainer_and_counts_as_a_death(
    service: Service, stub: Any, tmp_path: Path, verb: str
) -> None:
    method, request, (what, content) = ON_CHECKPOINT[verb]
    name = other_work(f"{what} {MODEL}", content.encode())
    await stub.SaveCheckpoint(save(1, kind=EXTERNAL, name="one"))
    service.trainer.scheduler.executing.deaths[name] = Deaths(executing=1)
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with mock.patch.object(CheckpointStore, method, side_effect=fault):
        calling = asyncio.ensure_future(getattr(stub, verb)(request))
        async with asyncio.timeout(20):
            await service.trainer.scheduler.compute.engine_died.wait()
    assert as_found(tmp_path)[name] == Deaths(executing=2)
    calling.cancel()


async def test_a_copy_stays_when_its_source_goes(stub: Any) -> None:
    saved = (await stub.SaveCheckpoint(save(1))).checkpoint
    request = pb.CopyCheckpointRequest(source=saved.location, destination="t:train:0/weights/two", ttl=duration(7200))
    copied = (await stub.CopyCheckpoint(request)).checkpoint
    await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=saved.location))
    got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=copied.location))
    assert (got.checkpoint, got.checkpoint.version_id) == (copied, saved.version_id)
    request.source = copied.location
    await fails(stub.CopyCheckpoint(request), errors.CheckpointExists, "weights/two")
    request.destination = "../x"
    await fails(stub.CopyCheckpoint(request), errors.InvalidRequest, "destination")


async def test_overwriting_keeps_a_version_that_samplers_have_while_its_run_lives(
    service: Service, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[torch.Tensor] = []

    async def publish(version: Version, scores: object, **_: object) -> Certified:
        published.append(version.adapter.flat.clone())
        return Certified(1, types_pb2.PublishCertificate(version_id=version.version_id, passed=True))

    monkeypatch.setattr(service.trainer.operations.publishing.publisher, "publish", publish)
    first = (await stub.SaveCheckpoint(save(1))).checkpoint
    wanted = pb.PublishCheckpointRequest(location=first.location, version_id=first.version_id)
    await stub.PublishCheckpoint(wanted)
    await stub.ForwardBackward(batch(2))
    await stub.OptimStep(step(3))
    # Nobody has asked for the second one, so its files go with the third.
    second, third = [(await stub.SaveCheckpoint(save(seq_id, overwrite=True))).checkpoint for seq_id in (4, 5)]
    await stub.PublishCheckpoint(wanted)
    assert torch.equal(published[0], published[1])
    gone = pb.PublishCheckpointRequest(location=second.location, version_id=second.version_id)
    await fails(stub.PublishCheckpoint(gone), errors.VersionGone, f"now holds version '{third.version_id}'")
    await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=first.location))
    await stub.PublishCheckpoint(wanted)
    await stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL))
    await fails(stub.PublishCheckpoint(wanted), errors.CheckpointNotFound, first.location)


async def test_a_version_that_was_replaced_is_not_deleted(stub: Any) -> None:
    first, second = [(await stub.SaveCheckpoint(save(seq_id, overwrite=True))).checkpoint for seq_id in (1, 2)]
    for version_id in (first.version_id, "other"):
        await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=first.location, version_id=version_id))
    got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=first.location))
    assert got.checkpoint.version_id == second.version_id
    gone = pb.DeleteCheckpointRequest(location=first.location, version_id=second.version_id)
    for _ in range(2):
        await stub.DeleteCheckpoint(gone)
    await fails(stub.GetCheckpoint(pb.GetCheckpointRequest(location=first.location)), errors.CheckpointNotFound, "one")


async def test_saves_that_replace_each_other_end_in_their_order(stub: Any) -> None:
    saves = [stub.SaveCheckpoint(save(seq_id, overwrite=True)) for seq_id in range(1, 9)]
    await asyncio.gather(*saves)
    got = await stub.GetCheckpoint(pb.GetCheckpointRequest(location=f"{MODEL}/weights/one"))
    assert got.checkpoint.version_id.startswith(f"{MODEL}@8.")


def archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, arcname="adapter")
    return buffer.getvalue()


async def import_pieces(
    stub: Any, *pieces: Any, complete: bool = True, max_checkpoint_bytes: int | None = None
) -> pb.ImportCheckpointResponse:
    async def requests() -> AsyncIterator[pb.ImportCheckpointRequest]:
        for piece in pieces:
            if isinstance(piece, bytes):
                yield pb.ImportCheckpointRequest(archive=piece)
            else:
                yield pb.ImportCheckpointRequest(header=piece)
        if complete:
            yield pb.ImportCheckpointRequest(complete=True, max_checkpoint_bytes=max_checkpoint_bytes)

    return await stub.ImportCheckpoint(requests())


async def each(messages: Iterable[pb.ImportCheckpointRequest]) -> AsyncIterator[pb.ImportCheckpointRequest]:
    for message in messages:
        yield message


IMPORTED = "i:train:0/weights/made-elsewhere"
HEADER = pb.ImportCheckpointHeader(
    location=IMPORTED, base_model="tiny", ttl=duration(3600), user_metadata={"from": "x"}
)


@pytest.fixture
def peft_archive(base: BaseModel, tmp_path: Path) -> bytes:
    adapter = Adapter.create(AdapterConfig(rank=4, train_mlp=False, train_unembed=False), base.targets, base.device)
    adapter.flat.normal_(std=0.1)
    (tmp_path / "peft").mkdir()
    adapter.save_peft(tmp_path / "peft", base_model="elsewhere")
    return archive(tmp_path / "peft")


async def test_an_imported_adapter_is_trained_on(stub: Any, peft_archive: bytes) -> None:
    half = len(peft_archive) // 2
    reply = await import_pieces(stub, HEADER, peft_archive[:half], peft_archive[half:])
    info = reply.checkpoint
    assert (info.location, info.kind) == (IMPORTED, types_pb2.CHECKPOINT_KIND_TRAINING)
    assert info.lora_config == types_pb2.LoraConfig(rank=4, train_attn=True)
    assert (info.base_model, info.ttl.seconds, dict(info.user_metadata)) == ("tiny", 3600, {"from": "x"})
    assert list(reply.notes) == ["the adapter says that it was made for 'elsewhere'; it was imported for 'tiny'"]
    start = pb.CreateModelRequest(model_id="s:train:1", from_location=IMPORTED)
    assert (await stub.CreateModel(start)).model.lora_config == info.lora_config
    losses = []
    for seq_id in (1, 3):
        operation = batch(seq_id)
        operation.model_id = "s:train:1"
        losses.append((await stub.ForwardBackward(operation)).metrics["loss:sum"])
        await stub.OptimStep(pb.OptimStepRequest(model_id="s:train:1", seq_id=seq_id + 1, adam_params=ADAM))
    assert losses[1] < losses[0]
    start.model_id, start.load_optimizer = "s:train:2", True
    await fails(stub.CreateModel(start), errors.InvalidRequest, "holds no optimizer state")
    await fails(import_pieces(stub, HEADER, peft_archive), errors.CheckpointExists, IMPORTED)


async def test_a_limit_of_an_import_in_another_message_than_the_last_is_refused(stub: Any, peft_archive: bytes) -> None:
    """It was ignored there."""
    limit, field = {"max_checkpoint_bytes": 10}, "max_checkpoint_bytes"
    first, piece, last = ({"header": HEADER}, {"archive": peft_archive}, {"complete": True})
    for messages in ([first | limit, piece, last], [first, piece | limit, last]):
        sent = [pb.ImportCheckpointRequest(**message) for message in messages]
        await fails(stub.ImportCheckpoint(each(sent)), errors.InvalidRequest, f"{field}: goes with complete")
    header = pb.ImportCheckpointHeader(archive_bytes=-1)
    header.MergeFrom(HEADER)
    await fails(
        import_pieces(stub, header, peft_archive), errors.InvalidRequest, "header.archive_bytes: -1 must not be"
    )


async def test_an_import_that_unpacks_to_more_than_is_left_is_refused_and_leaves_nothing(
    stub: Any, peft_archive: bytes, tmp_path: Path
) -> None:
    size = (await import_pieces(stub, HEADER, peft_archive)).checkpoint.size_bytes
    await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(location=IMPORTED))
    refused = import_pieces(stub, HEADER, peft_archive, max_checkpoint_bytes=size - 1)
    await fails(refused, errors.BudgetExceeded, f"has {size} bytes, and {size - 1} are left of the storage quota")
    await fails(stub.GetCheckpoint(pb.GetCheckpointRequest(location=IMPORTED)), errors.CheckpointNotFound, IMPORTED)
    left = [path for path in tmp_path.rglob("~tmp") if any(path.iterdir())]  # noqa: ASYNC240
    assert left == []
    reply = await import_pieces(stub, HEADER, peft_archive, max_checkpoint_bytes=size)
    assert reply.checkpoint.size_bytes == size


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ({"a": "x" * 70_000}, "70001 characters in all are above 65536"),
        ({str(number): "" for number in range(1025)}, "1025 entries are above 1024"),
    ],
)
async def test_notes_that_are_kept_have_a_bound(stub: Any, notes: dict[str, str], problem: str) -> None:
    """Live models keep theirs in memory: one of 30 MB was taken."""
    created = stub.CreateModel(creation("s:train:1", user_metadata=notes))
    await fails(created, errors.InvalidRequest, f"user_metadata: {problem}")
    await fails(stub.SaveCheckpoint(save(1, user_metadata=notes)), errors.InvalidRequest, f"user_metadata: {problem}")
    header = pb.ImportCheckpointHeader(location=IMPORTED, base_model="tiny", user_metadata=notes)
    await fails(import_pieces(stub, header), errors.InvalidRequest, f"header.user_metadata: {problem}")
    await stub.SaveCheckpoint(save(2, user_metadata={"a": "x" * 60_000}))


async def test_an_archive_that_ends_the_trainer_each_time_is_refused_in_the_end(
    service: Service, peft_archive: bytes, tmp_path: Path
) -> None:
    executing = service.trainer.scheduler.executing
    name = other_work("import archive", xxhash.xxh3_128_digest(peft_archive))
    executing.deaths[name] = Deaths(storing=MOST_DEATHS)
    refused = import_pieces(service.stub, HEADER, peft_archive[:100], peft_archive[100:])
    await fails(refused, errors.ServiceError, "ended twice while it read or wrote the checkpoint of this")
    executing.deaths[name] = Deaths(storing=MOST_DEATHS - 1)
    noted = []

    def noting(*arguments: Any, **settings: Any) -> Any:
        noted.append((tmp_path / NAME).read_bytes())
        return import_peft(*arguments, **settings)

    with mock.patch("trainer_service.storage.imports.import_peft", noting):
        await import_pieces(service.stub, HEADER, peft_archive)
    assert f"storing 0 1 {name[1]} import archive".encode() in noted[0]
    assert not executing.deaths


async def test_a_custom_loss_that_ends_the_trainer_each_time_it_is_checked_is_refused_in_the_end(
    service: Service, tmp_path: Path
) -> None:
    executing, operations = service.trainer.scheduler.executing, service.trainer.operations
    loss = custom_loss(graph(node("call_method", "total", "sum", ref("logprobs")), loss="total"), {"logprobs": 1})
    request = pb.CheckCustomLossRequest(custom_loss=loss)
    name = other_work("check custom-loss", request.SerializeToString(deterministic=True))
    executing.deaths[name] = Deaths(executing=MOST_DEATHS)
    await fails(service.stub.CheckCustomLoss(request), errors.ServiceError, "ended twice while it ran this")
    executing.deaths[name] = Deaths(executing=MOST_DEATHS - 1)
    noted, check = [], operations.check_custom_loss

    def noting(checked: pb.CheckCustomLossRequest) -> None:
        noted.append((tmp_path / NAME).read_bytes())
        check(checked)

    with mock.patch.object(operations, "check_custom_loss", noting):
        await service.stub.CheckCustomLoss(request)
    assert f"executing 1 0 {name[1]} check custom-loss".encode() in noted[0]
    assert not executing.deaths


async def test_an_archive_that_is_cut_off_is_not_imported(stub: Any, peft_archive: bytes) -> None:
    await fails(import_pieces(stub, HEADER, peft_archive, complete=False), errors.InvalidRequest, "complete: ")


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([], "header: the first message"),
        ([b"data"], "header: the first message"),
        ([HEADER, HEADER], "archive: every message between"),
        ([HEADER], "archive: it cannot be read"),
        ([HEADER, b"x" * (1 << 21), b"x" * (1 << 21), b"x"], "archive: more than 4194304 bytes"),
        ([pb.ImportCheckpointHeader(location=IMPORTED, base_model="huge")], "'huge' is not served"),
        ([pb.ImportCheckpointHeader(location="i:train:0/weights/..", base_model="tiny")], "location"),
        ([pb.ImportCheckpointHeader(location="i:train:0/ephemeral/1", base_model="tiny")], "not of kind 'weights'"),
        ([pb.ImportCheckpointHeader(location=IMPORTED, base_model="tiny", ttl=duration(0))], "header.ttl: 0 s is not"),
    ],
)
async def test_a_wrong_import_names_what_is_wrong_and_leaves_nothing(
    service: Service, pieces: list[Any], match: str, tmp_path: Path
) -> None:
    await fails(import_pieces(service.stub, *pieces), errors.InvalidRequest, match)
    assert list((tmp_path / "checkpoints" / "~tmp").iterdir()) == []
    assert not (tmp_path / "checkpoints" / "i:train:0").exists()


async def test_an_operation_says_when_it_was_computed(stub: Any) -> None:
    before = time.time()
    call = stub.ForwardBackward(batch(1))
    await call
    metadata = dict(await call.trailing_metadata())
    start, end = map(float, metadata["x-tinsmith-ran"].split(":"))
    assert before - 1e-3 <= start <= end <= time.time()
    waited = stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=1))
    await waited  # from the journal, perhaps, which does not know
    assert dict(await waited.trailing_metadata()).get("x-tinsmith-ran") in (None, metadata["x-tinsmith-ran"])
    failed = stub.ForwardBackward(batch(2, loss_fn="nope"))
    await fails(failed, errors.UnknownLossFn, "'nope'")  # its details come through beside it
    assert "x-tinsmith-ran" in dict(await failed.trailing_metadata())


async def test_an_operation_says_what_it_waits_for(service: Service, stub: Any) -> None:
    await Accepted.of(service, batch(2))
    request = pb.DescribeOperationRequest(model_id=MODEL, seq_id=2)
    status = (await stub.DescribeOperation(request)).status
    assert status.reason == "waits for seq_id 1 of this model, which has not arrived"
    request.seq_id = 9
    await fails(stub.DescribeOperation(request), errors.ResultNotFound, "seq_id 9")


async def test_deleting_a_model_frees_it_and_its_ephemeral_checkpoints(stub: Any) -> None:
    await stub.SaveCheckpoint(save(1))
    await stub.SaveCheckpoint(save(2, name="", kind=types_pb2.CHECKPOINT_KIND_EPHEMERAL))
    for _ in range(2):
        await stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL))
    await fails(stub.OptimStep(step(3)), errors.ModelNotFound, MODEL)
    await stub.GetCheckpoint(pb.GetCheckpointRequest(location=f"{MODEL}/weights/one"))
    gone = pb.GetCheckpointRequest(location=f"{MODEL}/ephemeral/2")
    await fails(stub.GetCheckpoint(gone), errors.CheckpointNotFound, "ephemeral/2")
    await fails(stub.DeleteModel(pb.DeleteModelRequest(model_id="../x")), errors.InvalidRequest, "'../x'")
    await fails(stub.DeleteModel(pb.DeleteModelRequest(model_id="retired")), errors.InvalidRequest, "'retired'")


async def test_the_journal_and_checkpoints_know_the_base_weights(start: StartService, base: BaseModel) -> None:
    stub = (await start()).stub
    others = creation(base_weights="0" * 32)
    await fails(stub.CreateModel(others), errors.InvalidRequest, f"has '{base.weights_sum}'")
    info = await stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    created = await stub.CreateModel(creation())
    saved = await stub.SaveCheckpoint(save(1))
    assert info.base_weights == saved.checkpoint.base_weights == base.weights_sum
    service = await start()
    journal = service.trainer.journal
    noted = pb.CreateModelRequest.FromString(await journal.unpacked(MODEL, 0))
    assert noted.base_weights == base.weights_sum
    assert await service.stub.CreateModel(creation()) == created, "a repeat that does not bring them is no conflict"


async def test_the_trainer_says_who_it_is_where_it_keeps_checkpoints_and_how_busy_it_is(start: StartService) -> None:
    service = await start()
    before = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert (before.trainer_id, before.store_id) == ("t" * 32, service.trainer.checkpoints.storage.store_id)
    assert dict(before.fingerprint) == {"base_weights": before.base_weights}
    assert (before.reserved_bytes, before.num_models, before.queued_time) == (0, 0, duration(0))
    await service.stub.CreateModel(creation())
    after = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert after.reserved_bytes > 0
    assert after.num_models == 1
    again = await (await start()).stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert again.store_id == before.store_id


async def test_after_a_restart_models_answers_and_operations_behind_a_gap_are_there(start: StartService) -> None:
    service = await start()
    stub = service.stub
    created = await stub.CreateModel(creation())
    answer = await stub.ForwardBackward(batch(1))
    await stub.SaveCheckpoint(save(2))
    await Accepted.of(service, step(4))  # waits for seq_id 3
    stub = (await start()).stub
    stored = await stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=1))
    assert stored.forward_backward == answer
    assert await stub.ForwardBackward(batch(1)) == answer
    assert await stub.CreateModel(creation()) == created, "without a seed it would be another model"
    waiting = asyncio.ensure_future(stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=4)))
    model = (await stub.GetModel(pb.GetModelRequest(model_id=MODEL))).model
    assert (model.step, model.next_seq_id) == (0, 3)
    status = (await stub.DescribeOperation(pb.DescribeOperationRequest(model_id=MODEL, seq_id=4))).status
    assert status.reason == "waits for seq_id 3 of this model, which has not arrived"
    assert not waiting.done()
    await stub.ForwardBackward(batch(3))
    assert (await waiting).optim_step.metrics["grad_norm:mean"] > 0
    await fails(stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=5)), errors.ResultNotFound, "seq_id 5")
    await fails(stub.OptimStep(step(1)), errors.SequenceConflict, "another request")


async def test_an_operator_sees_and_prunes_the_journal_of_a_running_trainer(
    service: Service, stub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await stub.ForwardBackward(batch(1))
    admin: Any = trainer_admin_pb2_grpc.TrainerAdminServiceStub(service.channel)
    (model,) = (await admin.ListJournal(admin_pb.ListJournalRequest())).models
    assert (model.model_id, model.state, model.cut_seq_id) == (MODEL, admin_pb.JOURNAL_STATE_LIVE, -1)
    assert 0 <= time.time() - seconds_of(model.created_at) < 600
    assert model.num_accepted + model.num_done == 2
    assert not model.HasField("snapshot_seq_id")
    assert not model.HasField("snapshot_at")
    address = f"127.0.0.1:{service.server.port}"
    assert await asyncio.to_thread(main, ["journal", "show", "--trainer", address]) == 0
    assert f"{MODEL}  live, no snapshot, all requests are kept" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["journal", "prune", "--trainer", address]) == 0
    assert "would delete 0 B: 0 expired results" in capsys.readouterr().out
    pruned = await admin.PruneJournal(admin_pb.PruneJournalRequest())
    assert pruned == admin_pb.PruneJournalResponse()


async def test_a_released_model_is_adopted_over_grpc_by_the_trainer_that_was_named_only(
    service: Service, stub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await stub.ForwardBackward(batch(1))
    admin: Any = trainer_admin_pb2_grpc.TrainerAdminServiceStub(service.channel)
    move_id, other = "a" * 32, "b" * 32
    release = admin_pb.ReleaseModelRequest(model_id=MODEL, move_id=move_id, trainer_id=other)
    for field, value in (("model_id", "../x"), ("move_id", "A" * 32), ("trainer_id", "a b")):
        refused = admin_pb.ReleaseModelRequest()
        refused.CopyFrom(release)
        setattr(refused, field, value)
        await fails(admin.ReleaseModel(refused), errors.InvalidRequest, f"{field}: '{value}' is not")
    for call, wrong, field in (
        (admin.ReleaseModel, admin_pb.ReleaseModelRequest(model_id=MODEL, move_id=move_id), "trainer_id"),
        (admin.FenceTrainer, admin_pb.FenceTrainerRequest(), "trainer_id"),
        (admin.AdoptModel, admin_pb.AdoptModelRequest(move_id=move_id, fenced_trainer_id="x"), "fenced_trainer_id"),
    ):
        await fails(call(wrong), errors.InvalidRequest, f"{field}: '{getattr(wrong, field)}' is not 32 hexadecimal")
    adopt = admin_pb.AdoptModelRequest(model_id=MODEL, move_id=move_id)
    await fails(admin.AdoptModel(admin_pb.AdoptModelRequest(model_id=MODEL)), errors.InvalidRequest, "move_id: ''")
    await fails(admin.ForgetMove(admin_pb.ForgetMoveRequest(model_id=MODEL)), errors.InvalidRequest, "move_id: ''")
    await admin.AdoptModel(adopt)  # it has the model
    await admin.ReleaseModel(release)
    await fails(stub.ForwardBackward(batch(2)), errors.ModelMoved, f"moves to the trainer {other}")
    await fails(stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=1)), errors.ModelMoved, "send it again")
    await fails(stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL)), errors.ModelMoved, "send it again")
    (model,) = (await admin.ListJournal(admin_pb.ListJournalRequest())).models
    assert (model.state, model.reason) == (admin_pb.JOURNAL_STATE_MOVED, f"{move_id} {other}")
    assert await asyncio.to_thread(main, ["journal", "show", "--trainer", f"127.0.0.1:{service.server.port}"]) == 0
    assert f"{MODEL}  moved, snapshot after seq_id 1" in capsys.readouterr().out
    await fails(admin.AdoptModel(adopt), errors.FailedPrecondition, "was released by this trainer")
    await admin.ForgetMove(admin_pb.ForgetMoveRequest(model_id=MODEL, move_id=move_id))
    await fails(stub.GetModel(pb.GetModelRequest(model_id=MODEL)), errors.ModelNotFound, MODEL)
    assert not (await admin.ListJournal(admin_pb.ListJournalRequest())).models


async def test_before_the_base_model_is_loaded_calls_fail_as_not_ready() -> None:
    server = Server("127.0.0.1:0", [pb.DESCRIPTOR])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(), server.grpc)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        await fails(stub.GetTrainerInfo(pb.GetTrainerInfoRequest()), errors.NotReady, "loaded")
    await server.stop(0)


async def test_the_trainer_describes_itself(service: Service) -> None:
    info = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert list(info.base_models) == ["tiny", "alias"]
    assert (info.vocab_size, info.max_lora_rank, info.device) == (VOCAB_SIZE, 16, "cpu")
    assert info.architecture == "Qwen3ForCausalLM"
    assert "importance_sampling" in info.loss_fns


async def test_a_group_that_failed_the_check_at_load_is_refused_with_the_reason_and_the_others_train(
    start: StartService, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start()
    info = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert info.trainable
    assert list(info.trainable_groups) == OF_TEXT
    assert not info.refused_groups
    targets = [target for target in base.targets if target.group != "mlp"]
    partly = dataclasses.replace(base, targets=targets, refused_groups={"mlp": "its adapters are wrong by 3"})
    monkeypatch.setattr(service.trainer.operations.engine, "base", partly)
    info = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert info.trainable
    assert list(info.trainable_groups) == [types_pb2.ADAPTER_GROUP_ATTN, types_pb2.ADAPTER_GROUP_UNEMBED]
    assert list(info.refused_groups) == [
        pb.RefusedGroup(group=types_pb2.ADAPTER_GROUP_MLP, reason="its adapters are wrong by 3")
    ]
    await fails(
        service.stub.CreateModel(creation()),
        errors.Unsupported,
        "lora_config.train_mlp: its adapters are wrong by 3; set it to false",
    )
    attention = types_pb2.LoraConfig(rank=4, train_attn=True)
    await service.stub.CreateModel(creation("s:train:1", lora_config=attention))


async def test_a_base_model_without_anything_to_adapt_is_not_trainable(
    service: Service, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.trainer.operations.engine, "base", dataclasses.replace(base, targets=[]))
    info = await service.stub.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert not info.trainable
    assert [one.group for one in info.refused_groups] == OF_TEXT
    await fails(service.stub.CreateModel(creation()), errors.Unsupported, "no such layers")


@pytest.mark.parametrize(
    ("num_datums", "num_tokens", "large"), [(1, 8, False), (64, 8, False), (65, 1, True), (1, 10_000, True)]
)
def test_large_batches_are_told_without_encoding_them(num_datums: int, num_tokens: int, large: bool) -> None:
    datum = types_pb2.Datum(
        model_input=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=b"\0\0\0\0" * num_tokens))],
        loss_fn_inputs={"target_tokens": from_numpy(np.zeros(num_tokens, np.int64))},
    )
    assert _is_large(pb.ForwardBackwardRequest(data=[datum] * num_datums)) is large
