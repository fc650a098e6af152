"""Bad values in each field of each RPC of trainer and sampler: every refusal names its field, none is an accident."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.batches import datum
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2, weight_sync_pb2

MODEL = "fields:train:0"
TRAINER = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]
SAMPLER = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"]
WEIGHT_SYNC = weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSyncService"]
F = FieldDescriptor
BAD: dict[int, list[Any]] = {
    F.TYPE_STRING: ["", "\0", "../x", "x" * 300],
    F.TYPE_BYTES: [b"", b"abc"],
    F.TYPE_ENUM: [0, 99],
    F.TYPE_DOUBLE: [math.nan, -1.0, 1e30],
    F.TYPE_BOOL: [True, False],
    F.TYPE_UINT32: [0, 2**32 - 1],
    F.TYPE_INT32: [-1, 0, 2**31 - 1],
    F.TYPE_INT64: [-1, 0, 2**63 - 1],
}
FIELDLESS = {"SkipOperation"}
"""Its refusal is the caller's own: it gives the number up, with the caller's words."""
GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]},
    ],
}
CUSTOM = trainer_pb2.CustomLoss(
    name="sum", inputs=[trainer_pb2.CustomLossInput(name="logprobs", rank=1)], graph=json.dumps(GRAPH)
)
LORA = types_pb2.LoraConfig(rank=2, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
ONES = np.ones(3, np.float32)
PROMPT = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array([5, 6, 7], "<i4").tobytes()))
SAMPLE = sampler_pb2.SampleRequest(
    prompt=[PROMPT], num_samples=1, sampling_params=sampler_pb2.SamplingParams(max_tokens=1)
)
CHAT = sampler_pb2.Chat(messages='[{"role": "user", "content": "x"}]', add_generation_prompt=True)

Change = Callable[[Any], object]
Place = Callable[[Any], Any]


def batch(**fields: Any) -> trainer_pb2.ForwardBackwardRequest:
    arrays = {"target_tokens": [2, 3, 4], "weights": ONES}
    if fields["loss_fn"] == "ppo":
        arrays |= {"logprobs": -ONES, "advantages": ONES}
    return trainer_pb2.ForwardBackwardRequest(model_id=MODEL, data=[datum([1, 2, 3], **arrays)], **fields)


REQUESTS: list[tuple[ServiceDescriptor, str, Message]] = [
    (TRAINER, "CreateModel", trainer_pb2.CreateModelRequest(base_model=BASE_MODEL, lora_config=LORA)),
    (TRAINER, "CreateModel", trainer_pb2.CreateModelRequest(from_location=f"{MODEL}/weights/one", load_optimizer=True)),
    (TRAINER, "GetModel", trainer_pb2.GetModelRequest(model_id=MODEL)),
    (TRAINER, "DeleteModel", trainer_pb2.DeleteModelRequest(model_id="fields:none")),
    (TRAINER, "ForwardBackward", batch(loss_fn="cross_entropy")),
    (TRAINER, "ForwardBackward", batch(loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})),
    (
        TRAINER,
        "ForwardBackward",
        batch(loss_fn="ppo", loss_fn_config_v2={"clip_low_threshold": types_pb2.LossConfigValue(number=0.9)}),
    ),
    (TRAINER, "ForwardBackward", batch(loss_fn="custom", custom_loss=CUSTOM)),
    (TRAINER, "OptimStep", trainer_pb2.OptimStepRequest(model_id=MODEL, adam_params=trainer_pb2.AdamParams())),
    (TRAINER, "SkipOperation", trainer_pb2.SkipOperationRequest(model_id=MODEL, reason="x")),
    (TRAINER, "SaveCheckpoint", trainer_pb2.SaveCheckpointRequest(model_id=MODEL, kind=1, name="two", overwrite=True)),  # type: ignore[arg-type]
    (
        TRAINER,
        "LoadCheckpoint",
        trainer_pb2.LoadCheckpointRequest(model_id=MODEL, location=f"{MODEL}/sampler_weights/one"),
    ),
    (TRAINER, "PublishCheckpoint", trainer_pb2.PublishCheckpointRequest(location=f"{MODEL}/sampler_weights/one")),
    (TRAINER, "GetCheckpoint", trainer_pb2.GetCheckpointRequest(location=f"{MODEL}/weights/one")),
    (TRAINER, "DeleteCheckpoint", trainer_pb2.DeleteCheckpointRequest(location=f"{MODEL}/weights/none")),
    (
        TRAINER,
        "CopyCheckpoint",
        trainer_pb2.CopyCheckpointRequest(source=f"{MODEL}/weights/one", destination=f"{MODEL}/weights/copy"),
    ),
    (
        TRAINER,
        "ReadCheckpointFile",
        trainer_pb2.ReadCheckpointFileRequest(location=f"{MODEL}/weights/one", name="adapter_config.json"),
    ),
    (TRAINER, "VerifyCheckpoint", trainer_pb2.VerifyCheckpointRequest(location=f"{MODEL}/weights/one")),
    (TRAINER, "GetCertificate", trainer_pb2.GetCertificateRequest(location=f"{MODEL}/sampler_weights/one")),
    (
        TRAINER,
        "ImportCheckpoint",
        trainer_pb2.ImportCheckpointRequest(
            header=trainer_pb2.ImportCheckpointHeader(location=f"{MODEL}/weights/new", base_model=BASE_MODEL)
        ),
    ),
    (TRAINER, "CheckCustomLoss", trainer_pb2.CheckCustomLossRequest(custom_loss=CUSTOM)),
    (TRAINER, "DescribeOperation", trainer_pb2.DescribeOperationRequest(model_id=MODEL, seq_id=1)),
    (TRAINER, "WaitResult", trainer_pb2.WaitResultRequest(model_id=MODEL, seq_id=1)),
    (SAMPLER, "Sample", SAMPLE),
    (SAMPLER, "StreamSample", sampler_pb2.StreamSampleRequest(request=SAMPLE)),
    (SAMPLER, "DescribeRequest", sampler_pb2.DescribeRequestRequest(request_id="x")),
    (SAMPLER, "Tokenize", sampler_pb2.TokenizeRequest(text="x")),
    (SAMPLER, "Tokenize", sampler_pb2.TokenizeRequest(chat=CHAT)),
    (SAMPLER, "ListVersions", sampler_pb2.ListVersionsRequest()),
    (SAMPLER, "MoveGenerations", sampler_pb2.MoveGenerationsRequest(run_id=MODEL, version_id="none")),
    (WEIGHT_SYNC, "ProbeWeightTransfer", weight_sync_pb2.ProbeWeightTransferRequest(trainer_id="x", epoch=1)),
    (
        WEIGHT_SYNC,
        "InitWeightTransfer",
        weight_sync_pb2.InitWeightTransferRequest(trainer_id="x", epoch=1, rank=1, world_size=2, backend="none"),
    ),
    (WEIGHT_SYNC, "StartWeightUpdate", weight_sync_pb2.StartWeightUpdateRequest(trainer_id="x", lora_config=LORA)),
    (WEIGHT_SYNC, "UpdateWeights", weight_sync_pb2.UpdateWeightsRequest(trainer_id="x", epoch=1)),
    (WEIGHT_SYNC, "FinishWeightUpdate", weight_sync_pb2.FinishWeightUpdateRequest(trainer_id="x", epoch=1)),
    (WEIGHT_SYNC, "SampleOnProbation", weight_sync_pb2.SampleOnProbationRequest(request=SAMPLE)),
    (WEIGHT_SYNC, "ConfirmVersion", weight_sync_pb2.ConfirmVersionRequest(version_id="none")),
    (WEIGHT_SYNC, "RemoveVersion", weight_sync_pb2.RemoveVersionRequest(version_id="none")),
]
NUMBERS = itertools.count(1)


def is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def changes(message: Message) -> Iterator[tuple[str, Change]]:
    """Changes of one field each, at any depth, with what they do."""
    return walk(message, message.DESCRIPTOR, lambda root: root, "")


def walk(message: Any, kind: Any, place: Place, path: str) -> Iterator[tuple[str, Change]]:
    """Changes of the fields of the message at `place`, which is of this kind."""
    for field in kind.fields:
        name, where = field.name, f"{path}{field.name}"
        inner: Place = partial(_at, place, name)
        yield f"{where} cleared", lambda root, name=name: place(root).ClearField(name)
        if is_map(field):
            key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
            strange = "none" if key.type == F.TYPE_STRING else -1
            if value.message_type is None:
                for bad in BAD[value.type]:
                    yield f"{where} + {bad!r}", partial(_put, inner, strange, bad)
                continue
            yield f"{where} + an empty one", lambda root, inner=inner, key=strange: inner(root)[key].SetInParent()
            for known in list(inner(message)):
                yield from walk(message, value.message_type, partial(_in, inner, known), f"{where}.{known}.")
        elif field.is_repeated and field.message_type is not None:
            yield f"{where} + an empty one", lambda root, inner=inner: inner(root).add()
            if inner(message):
                yield from walk(message, field.message_type, partial(_in, inner, 0), f"{where}[0].")
        elif field.is_repeated:
            for bad in BAD[field.type]:
                yield f"{where} + {bad!r}", lambda root, inner=inner, bad=bad: inner(root).append(bad)
        elif field.message_type is not None:
            yield f"{where} = an empty one", lambda root, inner=inner: inner(root).SetInParent()
            yield from walk(message, field.message_type, inner, f"{where}.")
        else:
            for bad in BAD[field.type]:
                yield f"{where} = {bad!r}", lambda root, name=name, bad=bad: setattr(place(root), name, bad)


def _at(place: Place, name: str, root: Any) -> Any:
    return getattr(place(root), name)


def _put(place: Place, key: Any, value: Any, root: Any) -> None:
    place(root)[key] = value


def _in(place: Place, key: Any, root: Any) -> Any:
    return place(root)[key]


def has_path(kind: Any, path: str) -> bool:
    """Whether messages of this kind have the field, or the oneof, at the path."""
    parts = re.sub(r"\[\d+\]", "", path).split(".")
    while parts:
        name = parts.pop(0)
        if kind is None:
            return False
        if name in kind.oneofs_by_name:
            return not parts
        field = kind.fields_by_name.get(name)
        if field is None:
            return False
        kind = field.message_type
        if kind is not None and is_map(field):
            kind = kind.fields_by_name["value"].message_type
            parts = parts[1:]
    return True


class Services:
    """Trainer and sampler, by bytes: also what no stub would send."""

    def __init__(self, trainer: grpc.Channel, sampler: grpc.Channel) -> None:
        self._trainer, self._sampler = trainer, sampler

    def call(self, service: ServiceDescriptor, name: str, request: Message) -> list[bytes]:
        """The answers. Raises grpc.RpcError."""
        channel = self._trainer if service is TRAINER else self._sampler
        path, body = f"/{service.full_name}/{name}", request.SerializeToString()
        if service.methods_by_name[name].client_streaming:
            return [channel.stream_unary(path)(iter([body]), timeout=30)]
        return list(channel.unary_stream(path)(body, timeout=30))  # a unary answer is a stream of one message

    def next_seq_id(self) -> int:
        (answer,) = self.call(TRAINER, "GetModel", trainer_pb2.GetModelRequest(model_id=MODEL))
        return trainer_pb2.GetModelResponse.FromString(answer).model.next_seq_id

    def delete(self, model_id: str) -> None:
        with contextlib.suppress(grpc.RpcError):  # a model_id that is refused has made none
            self.call(TRAINER, "DeleteModel", trainer_pb2.DeleteModelRequest(model_id=model_id))


@pytest.fixture(scope="module")
def services(stack: Stack) -> Iterator[Services]:
    with grpc.insecure_channel(stack.trainers[0]) as trainer, grpc.insecure_channel(stack.samplers[0]) as sampler:
        services = Services(trainer, sampler)
        create = trainer_pb2.CreateModelRequest(model_id=MODEL, base_model=BASE_MODEL, lora_config=LORA)
        services.call(TRAINER, "CreateModel", create)
        for number, kind in enumerate((types_pb2.CHECKPOINT_KIND_TRAINING, types_pb2.CHECKPOINT_KIND_SAMPLER), 1):
            save = trainer_pb2.SaveCheckpointRequest(model_id=MODEL, seq_id=number, kind=kind, name="one")
            services.call(TRAINER, "SaveCheckpoint", save)
        yield services
        services.delete(MODEL)


def complaint(error: grpc.RpcError, request: Message, name: str) -> str:
    """The fault of an error's details; empty when they are as they should be."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    if status is None or not status.details:
        return "no details"
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        assert any(detail.Unpack(each) for each in (info, bad, retry))
    code, field = error.code(), info.metadata.get("field")  # type: ignore[attr-defined]
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED):
        return "an accident"
    if "UNSPECIFIED" in status.message:
        return "offers the unspecified value"
    if field is not None and not has_path(request.DESCRIPTOR, field):
        return f"field {field!r} is none of the request"
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED) and name not in FIELDLESS:
        if field is None:
            return "names no field"
        if [each.field for each in bad.field_violations] != [field]:
            return "BadRequest names another field"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED) and not retry.retry_delay.seconds:
        return "no RetryInfo"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("service", "name", "good"), REQUESTS, ids=[f"{row[1]}-{n}" for n, row in enumerate(REQUESTS)])
def test_each_refusal_names_a_field_of_its_request(
    services: Services, service: ServiceDescriptor, name: str, good: Any
) -> None:
    wrong: list[str] = []
    is_operation = "seq_id" in good.DESCRIPTOR.fields_by_name and not good.seq_id
    for what, change in changes(good):
        request = type(good)()
        request.CopyFrom(good)
        if is_operation:
            request.seq_id = services.next_seq_id()
        elif name == "CreateModel":
            request.model_id = f"fields:{next(NUMBERS)}"
        change(request)
        try:
            services.call(service, name, request)
        except grpc.RpcError as error:
            if why := complaint(error, request, name):
                wrong.append(f"{what}: {why}: {str(error.details())[:300]}")
        if name == "CreateModel":
            services.delete(request.model_id)
    assert not wrong, "\n".join(wrong)
