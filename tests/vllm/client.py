"""A client of a sampler on vLLM, and what its answers are held against."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc.aio
import numpy as np
import pytest

from sampler_service import convert
from sampler_service.torch_engine.engine import TorchEngine
from tests.unit.sampler_service.serving import floats, ints, sample
from tests.vllm.service import MODEL
from tinsmith.errors import NotFound, VersionNotLoaded
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.tensors import to_numpy
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import sampler_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc
from tinsmith.v1 import types_pb2 as types
from trainer_service.weight_sync.sender import Version, WeightSender

TOLERANCE = 5e-4


class Service:
    """The server's API, errors as ServiceError."""

    def __init__(self, channel: grpc.aio.Channel, sender: WeightSender) -> None:
        self.stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        self._weights: Any = weight_sync_pb2_grpc.WeightSyncServiceStub(channel)
        self._sender = sender

    async def call(self, method: str, request: Any, **options: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, **options)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def sample(self, tokens: Any, **fields: Any) -> pb.SampleResponse:
        return await self.call("Sample", sample(tokens, **fields))

    async def publish(self, version_id: str, adapter: Weights) -> None:
        """As the trainer does: on probation the version is for those who ask for it as such."""
        published = await self._sender.publish(Version(version_id, MODEL, adapter))
        with pytest.raises(VersionNotLoaded):
            await self.sample(tokens_of(5), version_id=version_id, max_tokens=1)
        asked = sample(tokens_of(5), version_id=version_id, max_tokens=1)
        found = await self._weights.SampleOnProbation(weight_sync_pb2.SampleOnProbationRequest(request=asked))
        assert found.response.sequences
        assert await self._sender.confirm(version_id, published.members) == published.members

    async def remove(self, version_id: str) -> None:
        await self._weights.RemoveVersion(weight_sync_pb2.RemoveVersionRequest(version_id=version_id))


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2000, size=length).astype(np.int32)


async def torch_sample(engine: TorchEngine, request: pb.SampleRequest) -> pb.SampleResponse:
    asked = convert.request_from_proto(
        request, processor=engine.processor, why_no_pictures="", max_tokens=engine.limits.max_length
    )
    result = await (await engine.submit(asked)).result()
    return convert.response_to_proto(result, request)


def assert_same(found: pb.SampleResponse, wanted: pb.SampleResponse) -> None:
    """Tokens equal, logprobs to rounding."""
    assert len(found.sequences) == len(wanted.sequences)
    for ours, theirs in zip(found.sequences, wanted.sequences, strict=True):
        assert ints(ours.tokens) == ints(theirs.tokens)
        assert ours.stop_reason == theirs.stop_reason
        np.testing.assert_allclose(floats(ours.logprobs), floats(theirs.logprobs), atol=TOLERANCE)
        assert_same_table(ours.topk_sampled_logprobs, theirs.topk_sampled_logprobs)
    np.testing.assert_allclose(floats(found.prompt_logprobs), floats(wanted.prompt_logprobs), atol=TOLERANCE)
    assert_same_table(found.topk_prompt_logprobs, wanted.topk_prompt_logprobs)
    assert found.HasField("target_prompt_logprobs") == wanted.HasField("target_prompt_logprobs")
    if found.HasField("target_prompt_logprobs"):
        ours, theirs = (to_numpy(one.target_prompt_logprobs, field="t") for one in (found, wanted))
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert found.HasField("prompt_alt_tokens") == wanted.HasField("prompt_alt_tokens")
    if found.HasField("prompt_alt_tokens"):
        ours, theirs = found.prompt_alt_tokens, wanted.prompt_alt_tokens
        np.testing.assert_array_equal(to_numpy(ours.tokens, field="t"), to_numpy(theirs.tokens, field="t"))
        np.testing.assert_allclose(
            to_numpy(ours.logprobs, field="l"), to_numpy(theirs.logprobs, field="l"), atol=TOLERANCE
        )


async def assert_alone_and_together_the_same(
    service: Service, engine: TorchEngine, requests: Mapping[str, pb.SampleRequest]
) -> dict[str, pb.SampleResponse]:
    """Checks that each request gets the torch engine's answer, alone and in a batch of all. Returns the torch engine's
    answers. Those of "two, base" and "two, all" must differ by the adapter."""
    wanted = {name: await torch_sample(engine, request) for name, request in requests.items()}
    together = await asyncio.gather(*(service.call("Sample", request) for request in requests.values()))
    for name, found in zip(wanted, together, strict=True):
        assert_same(found, wanted[name])
    for name, request in requests.items():
        assert_same(await service.call("Sample", request), wanted[name])
    base, adapted = (floats(wanted[f"two, {version}"].sequences[0].logprobs) for version in ("base", "all"))
    assert np.abs(base - adapted).max() > 0.01
    return wanted


def assert_same_table(found: types.TopkLogprobs, wanted: types.TopkLogprobs) -> None:
    assert (found.k, found.length) == (wanted.k, wanted.length)
    assert ints(found.token_ids) == ints(wanted.token_ids)
    np.testing.assert_allclose(floats(found.logprobs), floats(wanted.logprobs), atol=TOLERANCE)


async def num_running(service: Service, version_id: str) -> int:
    listed = await service.call("ListVersions", pb.ListVersionsRequest())
    return next(version.num_running for version in listed.versions if version.version_id == version_id)


async def is_running(service: Service, request_id: str) -> bool | None:
    """None: it has not come yet, or is no more."""
    try:
        described = await service.call("DescribeRequest", pb.DescribeRequestRequest(request_id=request_id))
    except NotFound:
        return None
    return described.status.running


async def moved_midway(
    service: Service, request: pb.SampleRequest, *, run_id: str, version_id: str
) -> pb.SampleResponse:
    """The answer of a request that moves to a version as soon as each of its two sequences has a token."""
    begun: set[int] = set()
    answer, message = None, None
    async for message in service.stub.StreamSample(pb.StreamSampleRequest(request=request)):
        begun.add(message.delta.index)
        if answer is None and len(begun) == 2:
            move = pb.MoveGenerationsRequest(run_id=run_id, version_id=version_id)
            answer = await service.call("MoveGenerations", move)
    assert answer is not None
    assert answer.num_sequences == 2
    assert message is not None
    return message.result
