"""Trainer and sampler without the gateway: any gRPC client can use them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from tests.support.batches import datum, random_datum, request
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tinsmith.v1 import (
    sampler_pb2,
    sampler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
    weight_sync_pb2,
    weight_sync_pb2_grpc,
)

PROMPT = np.array([5, 6, 7], "<i4").tobytes()
SERVICES = {"trainer": "tinsmith.v1.TrainerService", "sampler": "tinsmith.v1.SamplerService"}


@pytest.fixture(scope="module")
def channels(stack: Stack) -> Iterator[dict[str, grpc.Channel]]:
    with grpc.insecure_channel(stack.trainers[0]) as trainer, grpc.insecure_channel(stack.samplers[0]) as sampler:
        yield {"trainer": trainer, "sampler": sampler}


@pytest.fixture(scope="module")
def trainer(channels: dict[str, grpc.Channel]) -> trainer_pb2_grpc.TrainerServiceStub:
    return trainer_pb2_grpc.TrainerServiceStub(channels["trainer"])


@pytest.fixture(scope="module")
def sampler(channels: dict[str, grpc.Channel]) -> sampler_pb2_grpc.SamplerServiceStub:
    return sampler_pb2_grpc.SamplerServiceStub(channels["sampler"])


def create(trainer: trainer_pb2_grpc.TrainerServiceStub, model_id: str, *, rank: int = 4) -> trainer_pb2.ModelInfo:
    config = types_pb2.LoraConfig(rank=rank, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    made = trainer.CreateModel(
        trainer_pb2.CreateModelRequest(model_id=model_id, base_model=BASE_MODEL, lora_config=config)
    )
    return made.model


def sample_request(version_id: str = "", **fields: object) -> sampler_pb2.SampleRequest:
    params = sampler_pb2.SamplingParams(max_tokens=6, seed=1, stop=sampler_pb2.StopCondition())
    prompt = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=PROMPT))
    given = {"version_id": version_id, "prompt": [prompt], "num_samples": 2, "sampling_params": params, **fields}
    return sampler_pb2.SampleRequest(**given)  # type: ignore[arg-type]


def test_trainer_and_sampler_say_what_their_checks_at_load_have_found(
    trainer: trainer_pb2_grpc.TrainerServiceStub, sampler: sampler_pb2_grpc.SamplerServiceStub
) -> None:
    trained = trainer.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest())
    sampled = sampler.GetSamplerInfo(sampler_pb2.GetSamplerInfoRequest())
    assert trained.trainable
    assert list(trained.trainable_groups) == list(sampled.adapter_groups) == [1, 2, 3]  # AdapterGroup
    assert not trained.refused_groups
    assert 0 < trained.max_context_length <= 32_768
    assert 0 < sampled.max_context_length <= 32_768


@pytest.mark.parametrize("kind", SERVICES)
def test_health_is_told_at_once_and_watched(kind: str, channels: dict[str, grpc.Channel]) -> None:
    stub = health_pb2_grpc.HealthStub(channels[kind])
    for service in ("", SERVICES[kind]):
        asked = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(asked, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(asked, timeout=5)
        assert next(iter(watch)).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("kind", SERVICES)
def test_reflection_describes_the_service_to_a_client_without_its_protos(
    kind: str, channels: dict[str, grpc.Channel]
) -> None:
    database = ProtoReflectionDescriptorDatabase(channels[kind])
    assert {SERVICES[kind], "grpc.health.v1.Health"} <= set(database.get_services())
    service = DescriptorPool(database).FindServiceByName(SERVICES[kind])
    wanted = {"trainer": trainer_pb2, "sampler": sampler_pb2}[kind].DESCRIPTOR.services_by_name
    assert {method.name for method in service.methods} == {
        method.name for method in wanted[SERVICES[kind].rpartition(".")[2]].methods
    }


def test_a_model_is_trained_saved_published_and_sampled(
    trainer: trainer_pb2_grpc.TrainerServiceStub,
    sampler: sampler_pb2_grpc.SamplerServiceStub,
    channels: dict[str, grpc.Channel],
) -> None:
    model_id = "grpc:train:0"
    assert create(trainer, model_id).lora_config.rank == 4
    data = [random_datum(length, length, vocab_size=500) for length in (6, 11)]
    first = trainer.ForwardBackward(request(data, model_id=model_id, seq_id=1))
    assert trainer.ForwardBackward(request(data, model_id=model_id, seq_id=1)) == first  # a repeat is no second one
    adam = trainer_pb2.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12)
    step = trainer.OptimStep(trainer_pb2.OptimStepRequest(model_id=model_id, seq_id=2, adam_params=adam))
    assert step.metrics["grad_norm:mean"] > 0
    found = trainer.WaitResult(trainer_pb2.WaitResultRequest(model_id=model_id, seq_id=2))
    assert found.optim_step == step
    saved = trainer.SaveCheckpoint(
        trainer_pb2.SaveCheckpointRequest(
            model_id=model_id, seq_id=3, kind=types_pb2.CHECKPOINT_KIND_SAMPLER, name="by-grpc"
        )
    )
    assert saved.num_samplers == 1
    assert (
        trainer.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=saved.checkpoint.location)).checkpoint
        == saved.checkpoint
    )
    version_id = saved.checkpoint.version_id
    versions = {info.version_id: info for info in sampler.ListVersions(sampler_pb2.ListVersionsRequest()).versions}
    assert versions[version_id].lora_config.rank == 4
    info = trainer.GetModel(trainer_pb2.GetModelRequest(model_id=model_id)).model
    assert (info.step, info.next_seq_id) == (1, 4)

    sampled = sampler.Sample(sample_request(version_id))
    assert [len(sequence.tokens) for sequence in sampled.sequences] == [24, 24]  # 6 tokens of 4 bytes
    assert sampled != sampler.Sample(sample_request())  # the base model is another one

    weights = weight_sync_pb2_grpc.WeightSyncServiceStub(channels["sampler"])
    weights.RemoveVersion(weight_sync_pb2.RemoveVersionRequest(version_id=version_id))
    with pytest.raises(grpc.RpcError) as refused:
        sampler.Sample(sample_request(version_id))
    assert reason_of(refused.value) == "VERSION_NOT_LOADED"
    published = trainer.PublishCheckpoint(
        trainer_pb2.PublishCheckpointRequest(location=saved.checkpoint.location, version_id=version_id)
    )
    assert published.num_samplers == 1
    assert sampler.Sample(sample_request(version_id)) == sampled
    trainer.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id))


def test_the_versions_of_a_model_whose_id_was_used_before_are_its_own(
    trainer: trainer_pb2_grpc.TrainerServiceStub, sampler: sampler_pb2_grpc.SamplerServiceStub, stack: Stack
) -> None:
    model_id = "twice:train:0"
    saved, texts = [], []
    for name, value in (("one", 7), ("two", 11)):
        create(trainer, model_id)
        data = [datum([value] * 12, target_tokens=np.full(12, value), weights=np.ones(12, np.float32))]
        for seq_id in (1, 3, 5):
            trainer.ForwardBackward(request(data, model_id=model_id, seq_id=seq_id))
            adam = trainer_pb2.AdamParams(learning_rate=0.05)
            trainer.OptimStep(trainer_pb2.OptimStepRequest(model_id=model_id, seq_id=seq_id + 1, adam_params=adam))
        save = trainer_pb2.SaveCheckpointRequest(
            model_id=model_id, seq_id=7, kind=types_pb2.CHECKPOINT_KIND_SAMPLER, name=name
        )
        saved.append(trainer.SaveCheckpoint(save))
        if name == "one":
            trainer.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id))
            republish(trainer, saved[0].checkpoint)
    one, two = (reply.checkpoint for reply in saved)
    assert one.version_id != two.version_id
    republish(trainer, one)
    republish(trainer, two)
    drawn = [sampler.Sample(sample_request(each.version_id)).sequences[0].tokens for each in (one, two)]
    assert [np.frombuffer(tokens, "<i4").tolist() for tokens in drawn] == [[7] * 6, [11] * 6]
    for name in ("one", "two"):
        asked = {
            "model": f"tinker://{model_id}/sampler_weights/{name}",
            "prompt": [5, 6, 7],
            "max_tokens": 6,
            "seed": 1,
        }
        with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-test", max_retries=0, timeout=60) as client:
            texts.append(client.completions.create(**asked).choices[0].text)  # type: ignore[call-overload]
    assert texts[0] != texts[1]


def republish(trainer: trainer_pb2_grpc.TrainerServiceStub, checkpoint: types_pb2.CheckpointInfo) -> None:
    asked = trainer_pb2.PublishCheckpointRequest(location=checkpoint.location, version_id=checkpoint.version_id)
    assert trainer.PublishCheckpoint(asked).num_samplers == 1


def test_a_stream_is_the_same_sample_in_pieces(sampler: sampler_pb2_grpc.SamplerServiceStub) -> None:
    wanted = sampler.Sample(sample_request())
    pieces = list(sampler.StreamSample(sampler_pb2.StreamSampleRequest(request=sample_request())))
    assert [piece.WhichOneof("event") for piece in pieces] == ["delta"] * (len(pieces) - 1) + ["result"]
    assert len(pieces) > 3
    assert pieces[-1].result == wanted
    for index, sequence in enumerate(wanted.sequences):
        mine = [piece.delta for piece in pieces[:-1] if piece.delta.index == index]
        assert b"".join(delta.tokens for delta in mine) == sequence.tokens
        assert b"".join(delta.logprobs for delta in mine) == sequence.logprobs


async def test_an_operation_is_acknowledged_before_it_runs(
    stack: Stack, trainer: trainer_pb2_grpc.TrainerServiceStub
) -> None:
    model_id = "grpc:train:1"
    create(trainer, model_id)
    data = [random_datum(5, 0, vocab_size=500)]
    async with grpc.aio.insecure_channel(stack.trainers[0]) as channel:
        # A unary call is a stream of one message; the library shows initial metadata early for streams only.
        call = channel.unary_stream(
            "/tinsmith.v1.TrainerService/ForwardBackward",
            request_serializer=trainer_pb2.ForwardBackwardRequest.SerializeToString,
            response_deserializer=trainer_pb2.ForwardBackwardResponse.FromString,
        )
        early = call(request(data, model_id=model_id, seq_id=2))
        await early.initial_metadata()  # returns, although number 1 has not come
        assert not early.done()
        first = call(request(data, model_id=model_id, seq_id=1))
        assert (await first.read()).metrics["loss:sum"] == (await early.read()).metrics["loss:sum"]
    trainer.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id))


def reason_of(error: grpc.RpcError) -> str:
    """From google.rpc.Status and its ErrorInfo."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "tinsmith"
    return info.reason


@pytest.mark.parametrize(
    ("call", "code", "reason", "named"),
    [
        (
            lambda t, s: t.GetModel(trainer_pb2.GetModelRequest(model_id="no:train:0")),
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            "no:train:0",
        ),
        (
            lambda t, s: t.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location="no:train:0/weights/x")),
            grpc.StatusCode.NOT_FOUND,
            "CHECKPOINT_NOT_FOUND",
            "no:train:0/weights/x",
        ),
        (
            lambda t, s: t.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location="../../etc")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "../../etc",
        ),
        (lambda t, s: create(t, "grpc:train:2", rank=0), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "rank"),
        (
            lambda t, s: s.Sample(sample_request("no-such-version")),
            grpc.StatusCode.FAILED_PRECONDITION,
            "VERSION_NOT_LOADED",
            "no-such-version",
        ),
        (
            lambda t, s: s.Sample(sample_request(num_samples=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "num_samples",
        ),
        (
            lambda t, s: list(s.StreamSample(sampler_pb2.StreamSampleRequest(request=sample_request(prompt=[])))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "prompt",
        ),
    ],
)
def test_errors_carry_a_status_and_a_reason(
    call: object,
    code: grpc.StatusCode,
    reason: str,
    named: str,
    trainer: trainer_pb2_grpc.TrainerServiceStub,
    sampler: sampler_pb2_grpc.SamplerServiceStub,
) -> None:
    assert callable(call)
    with pytest.raises(grpc.RpcError) as error:
        call(trainer, sampler)
    assert error.value.code() == code  # type: ignore[attr-defined]
    assert named in error.value.details()  # type: ignore[attr-defined]
    assert reason_of(error.value) == reason
