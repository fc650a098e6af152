"""The reason for which a request waits, and text, over real gRPC."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sampler_service import convert
from sampler_service.core.queue_status import Progress, Queue, status_of
from sampler_service.core.sequence import HEADROOM, Sequence
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.scheduler import StepOutput
from tests.support.waiting import until
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import ints, make_adapter, metric, prompt, sample
from tinsmith.errors import InvalidRequest, NotFound
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.times import seconds_of
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types


def begin(service: Service, request_id: str, **fields: Any) -> Any:
    asked = sample(prompt(6, vocab_size=200), **{"max_tokens": 240, **fields})
    return service.stub.Sample(asked, metadata=[("x-request-id", request_id)])


async def describe(service: Service, request_id: str) -> types.QueueStatus:
    return (await service.stub.DescribeRequest(pb.DescribeRequestRequest(request_id=request_id))).status


def num_drawn(engine: TorchEngine, request_id: str) -> int:
    status = engine.describe(request_id)
    told = None if status is None else re.match(r"generating: (\d+)", status.reason)
    return 0 if told is None else int(told[1])


@pytest.mark.parametrize("settings", [{"max_running": 3}], indirect=True)
async def test_a_request_says_what_it_waits_for_and_how_far_it_is(service: Service) -> None:
    engine = service.engine
    calls = [begin(service, "first", num_samples=3)]
    await until(lambda: num_drawn(engine, "first") > 3 * 10)
    calls += [begin(service, "second", num_samples=2), begin(service, "third", max_tokens=10)]
    await until(lambda: metric(engine, "waiting_requests") == 2)
    assert metric(engine, "waiting_tokens") == (6 + 2 * 240) + (6 + 10)
    first, second, third = [await describe(service, name) for name in ("first", "second", "third")]

    assert (first.running, first.position, first.tokens_ahead) == (True, 0, 0)
    done = re.fullmatch(r"generating: (\d+) of 720 tokens in 3 sequences, 0 sequences run beside it", first.reason)
    assert done is not None
    assert 3 * 10 < int(done[1]) < 720
    assert (second.running, second.position, third.position) == (False, 1, 2)
    assert second.reason == "waits for a place: 1 requests are before it, 0 of them wait too; 3 sequences run"
    assert third.reason == "waits for a place: 2 requests are before it, 1 of them wait too; 3 sequences run"
    assert 0 < second.tokens_ahead < 720
    assert third.tokens_ahead > 2 * 240 + 6
    assert 0 < seconds_of(first.expected_time) < seconds_of(second.expected_time) < 600
    assert seconds_of(first.expected_time) < seconds_of(third.expected_time) < 600

    for call in calls:
        call.cancel()
    await until(lambda: metric(engine, "requests_total", outcome="CANCELLED") == 3)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await describe(service, "first")
    assert isinstance(from_rpc_error(raised.value), NotFound)


class SimpleGroup(SimpleNamespace):
    """As much of a request as its progress is told from."""

    __hash__ = object.__hash__


class _Counted(list[Sequence]):
    """Sequences that say how often somebody has gone through all of them."""

    num_iterations = 0

    def __iter__(self) -> Iterator[Sequence]:
        type(self).num_iterations += 1
        return super().__iter__()


def test_a_waiting_request_is_counted_without_a_look_at_each_of_its_samples() -> None:
    """4,096 requests of 128 samples once took 0.1 s for each question, on the event loop."""
    groups: list[Any] = []
    for order, (bounded, left) in enumerate([(True, 10), (False, HEADROOM), (True, 7)]):
        group: Any = SimpleGroup(request_id=str(order), request=SimpleNamespace(prompt=[0] * 5), version=None)
        max_length = 5 + left if bounded else 9999
        group.sequences = _Counted(Sequence(group, n, 5, max_length, bounded=bounded, order=order) for n in range(128))
        groups.append(group)
    status = status_of("2", groups, groups, Progress(), Queue())
    assert status is not None
    assert status.tokens_ahead == 2 * 5 + 128 * (10 + HEADROOM)
    assert _Counted.num_iterations == 0


def test_thousands_of_questions_do_not_each_add_up_thousands_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 requests that wait were 17 million additions for one question about each, for seconds on the event loop."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr("sampler_service.core.queue_status.time.perf_counter", now)
    added = 0

    class Prompt(list[int]):
        def __len__(self) -> int:
            nonlocal added
            added += 1
            return 5

    groups: list[Any] = [
        SimpleGroup(request_id=str(order), request=SimpleNamespace(prompt=Prompt()), version=None)
        for order in range(60)
    ]
    for order, group in enumerate(groups):
        group.sequences = [Sequence(group, 0, 5, 15, bounded=True, order=order)]
    queue = Queue()
    told = [status_of(group.request_id, groups[:50], groups[:50], Progress(), queue) for group in groups[:50]]
    assert [one and (one.position, one.tokens_ahead) for one in told] == [(n, 15 * n) for n in range(50)]
    assert added <= 50 * (50 // 20 + 2)  # once for each question itself, and few times for all
    late = status_of("55", groups, groups, Progress(), queue)
    assert late is not None
    assert late.position in (50, 55)


async def test_a_request_that_has_ended_before_its_admission_is_heard_of_is_described(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute thread is ahead of the event loop: the last token may be there when its admission is told."""
    engine = service.engine
    answers: list[types.QueueStatus | None] = []
    deliver = engine._deliver

    def described_first(output: StepOutput) -> None:
        if output.ended:
            status = engine.describe("quick")
            answers.append(None if status is None else convert.status_to_proto(status))
        deliver(output)

    monkeypatch.setattr(engine, "_deliver", described_first)
    await begin(service, "quick", max_tokens=1)
    (status,) = answers
    assert status is not None
    assert (status.running, status.position, status.tokens_ahead) == (False, 0, 0)


async def test_the_youngest_request_of_a_shared_id_is_described(service: Service) -> None:
    calls = [begin(service, "shared")]
    await until(lambda: metric(service.engine, "running_sequences") == 1)
    calls.append(begin(service, "shared", max_tokens=None))
    await until(lambda: metric(service.engine, "running_sequences") == 2)
    await until(lambda: metric(service.engine, "waiting_requests") == 0)
    status = await describe(service, "shared")
    assert re.fullmatch(r"generating: \d+ tokens, 1 sequences run beside it", status.reason)
    for call in calls:
        call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await describe(service, "")
    assert isinstance(from_rpc_error(raised.value), InvalidRequest)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_cancelled_call_stops_computing_and_lets_go_of_its_version(service: Service, stream: bool) -> None:
    engine = service.engine
    await engine.install("v", make_adapter(engine.targets, seed=1))
    before = metric(engine, "sampled_tokens_total")
    asked = sample(prompt(6, vocab_size=200), version_id="v", num_samples=16, max_tokens=240)
    call = service.stub.StreamSample(pb.StreamSampleRequest(request=asked)) if stream else service.stub.Sample(asked)
    await until(lambda: metric(engine, "sampled_tokens_total") > before + 16)
    assert [version.num_running for version in engine.store.versions()] == [1]
    call.cancel()
    await until(lambda: engine.store.versions()[0].num_running == 0)
    stopped = metric(engine, "sampled_tokens_total")
    assert stopped - before < 16 * 240
    await asyncio.sleep(0.05)
    assert metric(engine, "sampled_tokens_total") == stopped


async def test_the_tokenizer_and_its_ends_are_handed_out(service: Service, text_model_folder: Path) -> None:
    stock = AutoTokenizer.from_pretrained(text_model_folder)
    reply = await service.stub.GetTokenizer(pb.GetTokenizerRequest())
    assert Tokenizer.from_str(reply.tokenizer_json).encode("the cat").ids == stock.encode("the cat")
    assert reply.has_chat_template
    assert list(reply.eos_token_ids) == sorted(service.engine.eos_token_ids)


async def test_text_and_chats_are_tokenized(service: Service, text_model_folder: Path) -> None:
    stock = AutoTokenizer.from_pretrained(text_model_folder)
    reply = await service.stub.Tokenize(pb.TokenizeRequest(text="the cat", add_special_tokens=True))
    assert ints(reply.tokens) == stock.encode("the cat")
    messages = [{"role": "user", "content": "sat"}]
    asked = pb.Chat(messages=json.dumps(messages), add_generation_prompt=True, template_kwargs='{"thinking": false}')
    reply = await service.stub.Tokenize(pb.TokenizeRequest(chat=asked))
    expected = stock.apply_chat_template(messages, add_generation_prompt=True, thinking=False, return_dict=False)
    assert ints(reply.tokens) == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.TokenizeRequest(), "input: needs a text or a chat"),
        (pb.TokenizeRequest(chat=pb.Chat(messages="{")), "chat.messages: is not JSON"),
        (pb.TokenizeRequest(chat=pb.Chat(messages="[]"), add_special_tokens=True), "add_special_tokens: is for text"),
    ],
    ids=["nothing", "json", "special"],
)
async def test_text_that_cannot_be_tokenized_is_refused(
    service: Service, request_: pb.TokenizeRequest, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.stub.Tokenize(request_)
    found = from_rpc_error(raised.value)
    assert isinstance(found, InvalidRequest)
    assert found.message.startswith(message)
