"""The sampler service on vLLM, over gRPC, held against the torch engine in this process. One server for all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sampler_service import convert
from sampler_service.torch_engine.engine import TorchEngine
from tests.support.waiting import until
from tests.unit.sampler_service.serving import floats, ints, make_adapter, sample
from tests.vllm.cases import FLAGS, LORA_RANK, assert_each_alone_and_together
from tests.vllm.client import (
    TOLERANCE,
    Service,
    assert_same,
    is_running,
    moved_midway,
    num_running,
    tokens_of,
    torch_sample,
)
from tests.vllm.service import MODEL, VllmService, flags
from tinsmith.errors import InvalidRequest, NotFound, NotReady, VersionNotLoaded
from tinsmith.modeling.adapter import Adapter
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[VllmService]:
    with VllmService(model, *flags(FLAGS)) as server:
        yield server


async def test_it_says_what_it_is(service: Service) -> None:
    info = await service.call("GetSamplerInfo", pb.GetSamplerInfoRequest())
    assert (info.engine, info.device, info.max_lora_rank) == ("vllm", "cpu", LORA_RANK)
    assert [*info.adapter_groups] == [1, 2, 3]
    assert list(info.base_models) == [MODEL]


async def test_each_request_alone_and_all_in_one_batch_give_what_the_torch_engine_gives(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    await assert_each_alone_and_together(service, torch_engine)


async def test_num_samples_beyond_the_places_and_none_of_them_equal(service: Service) -> None:
    response = await service.sample(tokens_of(8), seed=1, max_tokens=6, num_samples=30)
    assert len({sequence.tokens for sequence in response.sequences}) == 30
    alone = await service.sample(tokens_of(8), seed=1, max_tokens=6)
    assert alone.sequences[0].tokens == response.sequences[0].tokens


async def test_stops(service: Service, torch_engine: TorchEngine) -> None:
    prompt = tokens_of(12, 5)
    free = await service.sample(prompt, temperature=0.0, max_tokens=40)
    tokens = ints(free.sequences[0].tokens)
    by_id = sample(prompt, temperature=0.0, max_tokens=40, stop=pb.StopCondition(token_ids=[tokens[7]]))
    found = await service.call("Sample", by_id)
    assert found.sequences[0].stop_reason == types.STOP_REASON_STOP
    assert ints(found.sequences[0].tokens) == tokens[: tokens.index(tokens[7]) + 1]
    decode = await torch_engine.requests.stops.rule(convert.StopCondition(("x",)))
    assert decode.decode is not None
    text = decode.decode(tokens[10:13])
    by_string = sample(prompt, temperature=0.0, max_tokens=40, stop=pb.StopCondition(strings=[text, "never"]))
    assert_same(await service.call("Sample", by_string), await torch_sample(torch_engine, by_string))
    own = pb.SampleRequest()
    own.CopyFrom(sample(prompt, temperature=1.0, seed=3, num_samples=2))
    own.sampling_params.ClearField("stop")
    own.sampling_params.ClearField("max_tokens")  # to the model's own end token, or the context's end
    assert_same(await service.call("Sample", own), await torch_sample(torch_engine, own))


async def test_a_prompt_is_reused_by_its_version_and_salt_alone(service: Service, adapters: dict[str, Adapter]) -> None:
    prompt = tokens_of(100, 6)
    first = await service.sample(prompt, version_id="all", max_tokens=1)
    again = await service.sample(prompt, version_id="all", max_tokens=1)
    base = await service.sample(prompt, max_tokens=1)
    other = await service.sample(prompt, version_id="all", max_tokens=1, cache_salt="other")
    other_again = await service.sample(prompt, version_id="all", max_tokens=1, cache_salt="other")
    hits = [one.prompt_cache_hit_tokens for one in (first, again, base, other, other_again)]
    assert hits == [0, 96, 0, 0, 96]
    scored = await service.sample(prompt, version_id="all", max_tokens=1, prompt_logprobs=True)
    assert not np.isnan(floats(scored.prompt_logprobs)[1:]).any()


async def test_a_name_that_comes_back_with_other_weights_has_nothing_of_the_old_ones(
    service: Service, torch_engine: TorchEngine
) -> None:
    request = sample(tokens_of(100, 7), version_id="again", seed=1, max_tokens=6)
    for seed in (21, 22):
        adapter = make_adapter(torch_engine.targets, seed=seed, rank=4)
        await service.publish("again", adapter)
        await torch_engine.install("again", adapter)
        wanted = await torch_sample(torch_engine, request)
        for _ in range(2):
            assert_same(await service.call("Sample", request), wanted)
        await service.remove("again")
        torch_engine.store.remove("again")


async def test_a_version_that_is_not_there_is_refused_and_one_that_leaves_ends_what_it_began(
    service: Service, torch_engine: TorchEngine
) -> None:
    adapter = make_adapter(torch_engine.targets, seed=31, rank=2)
    await service.publish("leaving", adapter)
    await torch_engine.install("leaving", adapter)
    request = sample(tokens_of(10), version_id="leaving", seed=1, max_tokens=60)
    running = asyncio.create_task(service.call("Sample", request))
    await until(lambda: num_running(service, "leaving"))
    await service.remove("leaving")
    with pytest.raises(VersionNotLoaded):
        await service.call("Sample", request)
    assert_same(await running, await torch_sample(torch_engine, request))
    with pytest.raises(VersionNotLoaded):
        await service.sample(tokens_of(4), version_id="never", max_tokens=1)
    torch_engine.store.remove("leaving")
    await service.sample(tokens_of(4), max_tokens=1)


async def test_an_invalid_request_is_named_and_harms_nobody(service: Service) -> None:
    for fields in ({"max_tokens": 0}, {"top_p": 0.0}, {"num_samples": 0}, {"topk_sample_logprobs": 1000}):
        with pytest.raises(InvalidRequest, match=next(iter(fields))):
            await service.sample(tokens_of(4), **{"max_tokens": 1, **fields})
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await service.sample([10**6], max_tokens=1)
    with pytest.raises(InvalidRequest, match="context window"):
        await service.sample(tokens_of(4), max_tokens=10**6)
    picture = sample(tokens_of(4), max_tokens=1)
    picture.prompt.add(image=types.Image(data=b"", format="png"))
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\].*it sees text only"):
        await service.call("Sample", picture)
    await service.sample(tokens_of(4), max_tokens=1)


async def test_deltas_are_the_tokens_of_the_result(service: Service, adapters: dict[str, Adapter]) -> None:
    request = sample(tokens_of(10), version_id="odd", seed=2, max_tokens=20, num_samples=2, topk_sample_logprobs=2)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    num_deltas = 0
    async for message in service.stub.StreamSample(pb.StreamSampleRequest(request=request)):
        if message.HasField("delta"):
            num_deltas += 1
            tokens[message.delta.index] += ints(message.delta.tokens)
            logprobs[message.delta.index] += floats(message.delta.logprobs).tolist()
            assert message.delta.topk_sampled_logprobs.length == len(ints(message.delta.tokens))
    result = message.result
    assert num_deltas > 2
    for index, sequence in enumerate(result.sequences):
        assert tokens[index] == ints(sequence.tokens)
        np.testing.assert_array_equal(logprobs[index], floats(sequence.logprobs))


async def test_a_waiting_client_is_told_and_one_that_leaves_is_forgotten(service: Service) -> None:
    call = service.stub.Sample(
        sample(tokens_of(10), max_tokens=1000, num_samples=12), metadata=(("x-request-id", "long"),)
    )
    describe = pb.DescribeRequestRequest(request_id="long")
    await until(lambda: is_running(service, "long"))
    behind = service.stub.Sample(sample(tokens_of(10), max_tokens=4), metadata=(("x-request-id", "behind"),))
    while await is_running(service, "behind") is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    status = (await service.call("DescribeRequest", pb.DescribeRequestRequest(request_id="behind"))).status
    assert (status.running, status.position) == (False, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(ints((await behind).sequences[0].tokens)) == 4  # its place was free long before 1000 steps
    with pytest.raises(NotFound):
        await service.call("DescribeRequest", describe)


async def test_a_generation_that_follows_a_run_goes_on_with_its_newer_version(
    service: Service, torch_engine: TorchEngine
) -> None:
    old, new = (make_adapter(torch_engine.targets, seed=seed, rank=4) for seed in (41, 42))
    await service.publish("run@1", old)
    await service.publish("run@2", new)
    for name, adapter in (("run@1", old), ("run@2", new)):
        await torch_engine.install(name, adapter)
    request = sample(
        tokens_of(40, 8), version_id="run@1", follow_run="run", seed=5, max_tokens=120, num_samples=2,
        prompt_logprobs=True,
    )  # fmt: skip
    result = await moved_midway(service, request, run_id="run", version_id="run@2")
    for sequence in result.sequences:
        spans = [(span.version_id, span.num_tokens) for span in sequence.version_spans]
        assert [name for name, _ in spans] == ["run@1", "run@2"]
        assert sum(count for _, count in spans) == 120
        tokens, logprobs, start = ints(sequence.tokens), floats(sequence.logprobs), 40
        for name, count in spans:  # each part as that version scores it, after all that came before
            whole = np.concatenate([tokens_of(40, 8), np.array(tokens, np.int32)])
            scored = await torch_sample(
                torch_engine, sample(whole, version_id=name, max_tokens=1, prompt_logprobs=True)
            )
            wanted = floats(scored.prompt_logprobs)[start : start + count]
            np.testing.assert_allclose(logprobs[start - 40 : start - 40 + count], wanted, atol=TOLERANCE)
            start += count
    sequence = result.sequences[0]
    count = sequence.version_spans[0].num_tokens
    alone = sample(tokens_of(40, 8), version_id="run@1", seed=5, max_tokens=count)
    assert ints(sequence.tokens)[:count] == ints((await torch_sample(torch_engine, alone)).sequences[0].tokens)


async def test_a_move_between_equal_versions_changes_no_token(service: Service, torch_engine: TorchEngine) -> None:
    adapter = make_adapter(torch_engine.targets, seed=51, rank=4)
    for name in ("twin@1", "twin@2"):
        await service.publish(name, adapter)
    fields = {"version_id": "twin@1", "seed": 6, "max_tokens": 100, "num_samples": 2, "temperature": 0.8, "top_k": 50}
    request = sample(tokens_of(30, 9), follow_run="twin", **fields)
    moved = await moved_midway(service, request, run_id="twin", version_id="twin@2")
    unmoved = await service.sample(tokens_of(30, 9), **fields)
    assert all(len(sequence.version_spans) == 2 for sequence in moved.sequences)
    assert_same(moved, unmoved)


async def test_the_death_of_the_engine_ends_all_and_the_service(server: VllmService, service: Service) -> None:
    waiting = [asyncio.create_task(service.sample(tokens_of(10), max_tokens=1000)) for _ in range(3)]
    await asyncio.sleep(0.5)
    for engine in server.engines():
        engine.kill()
    for one in waiting:
        with pytest.raises(NotReady):  # EngineDead is one; the channel tries again, and may find nobody
            await one
    assert await asyncio.to_thread(server.process.wait, 60) == 1
