"""Pictures in prompts for vLLM, held against the torch engine in this process, which is held against transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sampler_service.torch_engine.engine import TorchEngine
from tests.unit.sampler_service.serving import floats, ints, make_adapter
from tests.vllm.client import (
    TOLERANCE,
    Service,
    assert_alone_and_together_the_same,
    assert_same,
    moved_midway,
    torch_sample,
)
from tests.vllm.seeing import HIGH, OTHER, WIDE, asked, chunk, make, prompts, requests, text
from tests.vllm.service import VllmService, flags
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.modeling.adapter import Adapter
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

FLAGS = {
    "max-lora-rank": 12,
    "max-device-versions": 2,
    "max-kv-tokens": 1024,
    "prefix-cache-bytes": 2 * 1024 * 1024,
    "prefill-tokens-per-step": 24,
    "max-running": 12,
}
"""Prompts are computed in pieces, which cut pictures."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[VllmService]:
    with VllmService(model, *flags(FLAGS)) as server:
        yield server


async def test_each_request_alone_and_all_in_one_batch_give_what_the_torch_engine_gives(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    wanted = await assert_alone_and_together_the_same(service, torch_engine, requests())
    table = wanted["tables"].topk_prompt_logprobs
    assert floats(table.logprobs).reshape(table.length, table.k)[3:18].max() < -1000  # none at a picture


async def test_pictures_of_as_many_tokens_are_told_apart_by_the_prefix_cache(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    asks = [asked(text(6), chunk(image), text(60, seed=9), version_id="all") for image in (WIDE, OTHER)]
    wanted = [await torch_sample(torch_engine, request) for request in asks]
    assert np.abs(floats(wanted[0].sequences[0].logprobs) - floats(wanted[1].sequences[0].logprobs)).max() > 0.01
    hits = []
    for _ in range(2):
        for request, answer in zip(asks, wanted, strict=True):
            found = await service.call("Sample", request)
            assert_same(found, answer)
            hits.append(found.prompt_cache_hit_tokens)
    assert hits == [0, 0, 64, 64]
    after = asked(text(6), chunk(WIDE), text(60, seed=9), version_id="all", prompt_logprobs=True)
    assert_same(await service.call("Sample", after), await torch_sample(torch_engine, after))


async def test_deltas_are_the_tokens_of_the_result(service: Service, torch_engine: TorchEngine) -> None:
    request = asked(*prompts()["two"], max_tokens=20, num_samples=2)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    num_deltas = 0
    async for message in service.stub.StreamSample(pb.StreamSampleRequest(request=request)):
        if message.HasField("delta"):
            num_deltas += 1
            tokens[message.delta.index] += ints(message.delta.tokens)
    assert num_deltas > 2
    assert_same(message.result, await torch_sample(torch_engine, request))
    assert [ints(sequence.tokens) for sequence in message.result.sequences] == [tokens[0], tokens[1]]


async def test_a_generation_with_pictures_moves_to_a_newer_version(service: Service, torch_engine: TorchEngine) -> None:
    old, new = (make_adapter(torch_engine.targets, seed=seed, rank=4) for seed in (41, 42))
    for name, adapter in (("run@1", old), ("run@2", new)):
        await service.publish(name, adapter)
        await torch_engine.install(name, adapter)
    request = asked(*prompts()["two"], version_id="run@1", follow_run="run", max_tokens=120, num_samples=2)
    result = await moved_midway(service, request, run_id="run", version_id="run@2")
    for sequence in result.sequences:
        first, second = sequence.version_spans
        assert (first.version_id, second.version_id) == ("run@1", "run@2")
        rest = types.Chunk(encoded_text=types.EncodedText(tokens=sequence.tokens))
        for one in (first, second):  # each part is what its version thinks of it
            scored = await torch_sample(
                torch_engine,
                asked(*request.prompt, rest, version_id=one.version_id, max_tokens=1, prompt_logprobs=True),
            )
            begin = 0 if one is first else first.num_tokens
            theirs = floats(scored.prompt_logprobs)[-len(ints(sequence.tokens)) :][begin : begin + one.num_tokens]
            ours = floats(sequence.logprobs)[begin : begin + one.num_tokens]
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


async def test_many_samples_and_cancelled_ones_leave_no_picture_behind(service: Service, server: VllmService) -> None:
    request = asked(*prompts()["two"], num_samples=20, max_tokens=100)
    call = service.stub.Sample(request)
    await asyncio.sleep(0)
    alone = await service.call("Sample", asked(*prompts()["two"]))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    again = await service.call("Sample", asked(*prompts()["two"], num_samples=20))
    assert again.sequences[0].tokens == alone.sequences[0].tokens
    assert len({sequence.tokens for sequence in again.sequences}) == 20


async def test_what_cannot_be_taken_is_refused_by_name(service: Service, torch_engine: TorchEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\]\.expected_tokens: expected 9 tokens, got 8 from image"):
        await service.call("Sample", asked(text(2), chunk(HIGH, expected_tokens=9)))
    with pytest.raises(InvalidRequest, match=r"^prompt\[0\]\.data: the picture is no png file: it is empty"):
        await service.call("Sample", asked(chunk(HIGH, data=b"")))
    with pytest.raises(InvalidRequest, match=r"^prompt: 600 tokens, with those of its pictures, are above 512"):
        await service.call("Sample", asked(*[chunk(WIDE)] * 40))
    seeing = make_adapter(torch_engine.targets, seed=3, rank=4, train_vision=True)
    with pytest.raises(Unsupported, match=r"train_vision: the vLLM engine does not serve adapters of the vision tower"):
        await service.publish("seeing", seeing)
    await service.call("Sample", asked(*prompts()["two"]))
