"""Bodies that are made to be expensive: none of them keeps the event loop from others for long."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard

from gateway import codec
from gateway.codec import off_loop
from gateway.config import GatewayConfig
from gateway.database.tables.sessions import SamplingSession
from gateway.openai import answers, chat, completions, draws, responses
from gateway.openai.generator import Source
from gateway.sampling.drawing import Drawing
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, batch
from tests.unit.gateway.talking import TalkingSampler
from tinsmith.cores import Cores, make_page
from tinsmith.v1 import sampler_pb2

LONGEST_GAP_S = 2.0
"""Most was 0.4. Without bounds these bodies gave gaps of up to 20 s."""
_NUM_KEYS = 300_000


class Gaps:
    """The longest time for which the event loop did not come to a task that is always ready. In seconds of processor
    time of this process: what others do on the machine does not count."""

    longest_s = 0.0

    async def measure(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.process_time()
            self.longest_s, before = max(self.longest_s, now - before), now


@asynccontextmanager
async def watched() -> AsyncIterator[Gaps]:
    gaps = Gaps()
    measuring = asyncio.create_task(gaps.measure())
    try:
        yield gaps
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


def post(stack: Stack, path: str, body: bytes, *, protobuf: bool, zstd: bool) -> tuple[int, bytes]:
    """For a thread: the event loop of the test is the gateway's."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)
    headers = {"x-api-key": "tml-test", "content-type": f"application/{'x-protobuf' if protobuf else 'json'}"}
    connection.request("POST", path, body, headers | ({"content-encoding": "zstd"} if zstd else {}))
    reply = connection.getresponse()
    try:
        return reply.status, reply.read()
    finally:
        connection.close()


def ids(number: int) -> bytes:
    """Random token ids, as JSON."""
    return orjson.dumps(np.random.default_rng(0).integers(0, 2**31, number), option=orjson.OPT_SERIALIZE_NUMPY)


def keys(number: int) -> bytes:
    """Members of an object that nobody knows, with a comma behind each."""
    return b"".join(b'"unknown_%d":1,' % n for n in range(number))


def many(value: bytes, number: int) -> bytes:
    return b"[" + b",".join([value] * number) + b"]"


def head(**fields: object) -> bytes:
    return orjson.dumps(fields)[:-1] + b","


Make = Callable[[str, str], bytes]
"""Makes a body from the ids of a model and a sampling session."""

COMPLETION, CHAT = head(model=BASE_MODEL), head(model=BASE_MODEL, messages=[])
TEXT = [{"role": "user", "content": "a"}]


def _sample(session: str) -> bytes:
    return head(sampling_session_id=session, seq_id=1, sampling_params={})


def _batch(model_id: str, data: bytes) -> bytes:
    body = b'{"forward_backward_input":{"loss_fn":"cross_entropy","data":' + data + b'},"model_id":"%s","seq_id":1}'
    return body % model_id.encode()


_TENSOR = b'[{"model_input":{"chunks":[]},"loss_fn_inputs":{"a":{"dtype":"int64","data":'
_EMPTY_DATUM, _EMPTY_CHUNKS = b"\x1a\x00", b"\x0a\x00"


def _varint(number: int) -> bytes:
    made = bytearray()
    while number >= 128:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _one_datum(model_id: str, inside: bytes) -> bytes:
    return batch(model_id, 1).SerializeToString() + b"\x1a" + _varint(len(inside)) + inside


HOSTILE: dict[str, tuple[str, Make]] = {
    "token ids": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + ids(4_000_000) + b"}"),
    "a million token ids": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + ids(900_000) + b"}"),
    "empty prompts": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + many(b"[]", 4_000_000) + b"}"),
    "fewer empty prompts": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + many(b"[]", 90_000) + b"}"),
    "prompts of objects": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + many(b"{}", 90_000) + b"}"),
    "short prompts": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":' + many(b'"a"', 900_000) + b"}"),
    "mixed prompts": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":[' + b"1," * 900_000 + b'"a"]}'),
    "unknown keys": ("/v1/completions", lambda m, s: COMPLETION + keys(_NUM_KEYS) + b'"prompt":"a"}'),
    "a model of numbers": ("/v1/completions", lambda m, s: b'{"prompt":"a","model":' + ids(900_000) + b"}"),
    "a long model": ("/v1/completions", lambda m, s: b'{"prompt":"a","model":"' + b"m" * 40_000_000 + b'"}'),
    "a long number": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":[' + b"9" * 40_000_000 + b"]}"),
    "many stops": ("/v1/completions", lambda m, s: COMPLETION + b'"prompt":"a","stop":' + many(b'"a"', 900_000) + b"}"),
    "stops of ids": (
        "/v1/completions",
        lambda m, s: COMPLETION + b'"prompt":"a","stop_token_ids":' + ids(900_000) + b"}",
    ),
    "unknown keys of a chat": ("/v1/chat/completions", lambda m, s: CHAT + keys(_NUM_KEYS) + b'"n":1}'),
    "messages of nothing": (
        "/v1/chat/completions",
        lambda m, s: COMPLETION + b'"messages":' + many(b"{}", 90_000) + b"}",
    ),
    "chat of ids": ("/v1/chat/completions", lambda m, s: CHAT + b'"prompt_token_ids":' + ids(900_000) + b"}"),
    "tools": (
        "/v1/chat/completions",
        lambda m, s: head(model=BASE_MODEL, messages=TEXT) + b'"tools":' + many(b'{"type":1}', 90_000) + b"}",
    ),
    "biases": (
        "/v1/completions",
        lambda m, s: COMPLETION + b'"prompt":"a","logit_bias":{' + keys(_NUM_KEYS) + b'"1":1}}',
    ),
    "parts of nothing": (
        "/v1/chat/completions",
        lambda m, s: COMPLETION + b'"messages":[{"role":"user","content":' + many(b'{"type":1}', 70_000) + b"}]}",
    ),
    "calls of nothing": (
        "/v1/chat/completions",
        lambda m, s: COMPLETION + b'"messages":[{"role":"user","tool_calls":' + many(b'{"type":1}', 70_000) + b"}]}",
    ),
    "arguments of lists": (
        "/v1/chat/completions",
        lambda m, s: (
            COMPLETION
            + b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":'
            + many(b"[]", 15_000_000)
            + b'}"}}]}]}'
        ),
    ),
    "a chat of long letters": (
        "/v1/chat/completions",
        lambda m, s: COMPLETION + b'"messages":[{"role":"user","content":"' + "❄".encode() * 15_000_000 + b'"}]}',
    ),
    "a tool of long letters": (
        "/v1/chat/completions",
        lambda m, s: (
            head(model=BASE_MODEL, messages=TEXT)
            + b'"tools":[{"type":"function","function":{"name":"f","description":"'
            + "❄".encode() * 15_000_000
            + b'"}}]}'
        ),
    ),
    "a long stop": (
        "/v1/completions",
        lambda m, s: head(model=BASE_MODEL, prompt="a", n=64) + b'"stop":"' + b"s" * 60_000_000 + b'"}',
    ),
    "long stops of a chat": (
        "/v1/chat/completions",
        lambda m, s: (
            head(model=BASE_MODEL, messages=TEXT, n=64) + b'"stop":' + many(b'"' + b"s" * 50_000 + b'"', 1024) + b"}"
        ),
    ),
    "a sample's long stop": (
        "/api/v1/asample",
        lambda m, s: (
            head(sampling_session_id=s, seq_id=1, prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}]})
            + b'"sampling_params":{"stop":"'
            + b"s" * 60_000_000
            + b'"}}'
        ),
    ),
    "arguments of an item": (
        "/v1/responses",
        lambda m, s: (
            COMPLETION
            + b'"input":[{"type":"function_call","call_id":"a","name":"f","arguments":"{\\"a\\":'
            + many(b"[]", 15_000_000)
            + b'}"}]}'
        ),
    ),
    "items of nothing": ("/v1/responses", lambda m, s: COMPLETION + b'"input":' + many(b"{}", 90_000) + b"}"),
    "items": (
        "/v1/responses",
        lambda m, s: COMPLETION + b'"input":' + many(b'{"role":"user","content":[{"type":1}]}', 30_000) + b"}",
    ),
    "a session's keys": ("/api/v1/create_session", lambda m, s: b"{" + keys(_NUM_KEYS) + b'"tags":[]}'),
    "a session's tags": ("/api/v1/create_session", lambda m, s: b'{"tags":' + ids(900_000) + b"}"),
    "a session's metadata": (
        "/api/v1/create_session",
        lambda m, s: b'{"user_metadata":{' + keys(_NUM_KEYS)[:-1] + b"}}",
    ),
    "a session's wrong metadata": (
        "/api/v1/create_session",
        lambda m, s: b'{"user_metadata":{' + keys(200_000).replace(b'"unk', b'"\\u0000')[:-1] + b"}}",
    ),
    "a session's wrong tags": (
        "/api/v1/create_session",
        lambda m, s: b'{"tags":' + many(b'"\\u0000"', 900_000) + b"}",
    ),
    "reasons of a search": (
        "/api/v1/sessions/search",
        lambda m, s: b'{"statuses":[{"type":"client_finished","reasons":' + many(b'"success"', 900_000) + b"}]}",
    ),
    "wrong reasons of a search": (
        "/api/v1/sessions/search",
        lambda m, s: b'{"statuses":[{"type":"client_finished","reasons":' + many(b'"a"', 900_000) + b"}]}",
    ),
    "wrong statuses of a search": (
        "/api/v1/sessions/search",
        lambda m, s: b'{"statuses":' + many(b"{}", 90_000) + b"}",
    ),
    "a sample's prompt": (
        "/api/v1/asample",
        lambda m, s: _sample(s) + b'"prompt":{"chunks":[{"type":"encoded_text","tokens":' + ids(4_000_000) + b"}]}}",
    ),
    "a sample's large prompt": (
        "/api/v1/asample",
        lambda m, s: _sample(s) + b'"prompt":{"chunks":[{"type":"encoded_text","tokens":' + ids(900_000) + b"}]}}",
    ),
    "a sample's chunks": ("/api/v1/asample", lambda m, s: _sample(s) + b'"prompt":' + many(b"{}", 90_000) + b"}"),
    "chunks of nothing": (
        "/api/v1/asample",
        lambda m, s: _sample(s) + b'"prompt":{"chunks":' + many(b"{}", 90_000) + b"}}",
    ),
    "a sample's keys": ("/api/v1/asample", lambda m, s: _sample(s) + keys(_NUM_KEYS) + b'"prompt":{"chunks":[]}}'),
    "a sample's targets": (
        "/api/v1/asample",
        lambda m, s: (
            _sample(s)
            + b'"prompt":{"chunks":[]},"target_prompt_logprobs":{"dtype":"int64","data":'
            + ids(900_000)
            + b"}}"
        ),
    ),
    "a sample's picture": (
        "/api/v1/asample",
        lambda m, s: _sample(s) + b'"prompt":{"chunks":[{"type":"image","data":"' + b"A" * 48_000_000 + b'"}]}}',
    ),
    "a step's keys": (
        "/api/v1/optim_step",
        lambda m, s: head(model_id=m, seq_id=1) + keys(_NUM_KEYS) + b'"adam_params":{}}',
    ),
    "a long step": (
        "/api/v1/optim_step",
        lambda m, s: head(model_id=m, seq_id=1) + b'"adam_params":"' + b"a" * 60_000_000 + b'"}',
    ),
    "a datum's ids": (
        "/api/v1/forward_backward",
        lambda m, s: _batch(m, _TENSOR + ids(4_000_000) + b"}}}]"),
    ),
    "a datum's large tensor": (
        "/api/v1/forward_backward",
        lambda m, s: _batch(m, _TENSOR + ids(900_000) + b"}}}]"),
    ),
    "empty datums": ("/api/v1/forward_backward", lambda m, s: _batch(m, many(b"{}", 4_000_000))),
    "fewer empty datums": (
        "/api/v1/forward_backward",
        lambda m, s: _batch(m, many(b'{"model_input":{"chunks":[]},"loss_fn_inputs":{}}', 20_000)),
    ),
    "empty datums in protobuf": (
        "/api/v1/forward_backward",
        lambda m, s: batch(m, 1).SerializeToString() + _EMPTY_DATUM * 16_000_000,
    ),
    "empty chunks in protobuf": (
        "/api/v1/forward_backward",
        lambda m, s: _one_datum(m, _EMPTY_CHUNKS * 16_000_000),
    ),
    "a large datum in protobuf": (
        "/api/v1/forward_backward",
        lambda m, s: _one_datum(m, b"\x0a" + _varint(60_000_000) + bytes(60_000_000)),
    ),
    "a graph of lists": (
        "/api/v1/create_custom_loss",
        lambda m, s: (
            head(session_id=m.partition(":")[0], custom_loss_seq_id=1, name="a", inputs=[])
            + b'"graph":{"nodes":'
            + many(b"[]", 90_000)
            + b"}}"
        ),
    ),
    "a poll's ids": (
        "/api/v1/retrieve_futures",
        lambda m, s: (
            head(target={"type": "sampling_session", "sampling_session_id": s}, timeout=0)
            + b'"retrieved_request_ids":'
            + many(b'"a"', 900_000)
            + b"}"
        ),
    ),
    "a poll's long id": ("/api/v1/retrieve_future", lambda m, s: b'{"request_id":"' + b"a" * 40_000_000 + b'"}'),
}


@pytest.fixture
async def talking(stack: Stack) -> None:
    """Its sampler has a tokenizer."""
    await stack.sampler_backend.stop()
    stack.sampler = stack.sampler_backend.servicer = TalkingSampler()
    await stack.sampler_backend.start()
    await stack.restart_gateway(submit_timeout_s=60)


@pytest.mark.slow
@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("path", sorted({path for path, _ in HOSTILE.values()}))
async def test_no_body_blocks_the_event_loop(stack: Stack, client: Client, path: str) -> None:
    session_id = await client.session()
    longest: dict[str, float] = {}
    for number, (name, (where, make)) in enumerate(HOSTILE.items()):
        if where != path:
            continue
        model_id = await client.model(session_id, seq=number)
        sampling_session_id = await client.sampling_session(session_id, seq=number)
        body = await asyncio.to_thread(make, model_id, sampling_session_id)
        if is_zstd := name.startswith("empty") and name.endswith("protobuf"):
            body = zstandard.ZstdCompressor().compress(body)
        async with watched() as gaps:
            status, answer = await asyncio.to_thread(
                post, stack, path, body, protobuf=name.endswith("protobuf"), zstd=is_zstd
            )
        assert status in (200, 400, 413), (name, status, answer[:300])
        assert len(answer) < 1000, name
        longest[name] = gaps.longest_s
    assert {name: gap for name, gap in longest.items() if gap >= LONGEST_GAP_S} == {}


async def test_large_bodies_are_parsed_one_at_a_time() -> None:
    """Each parser keeps the interpreter's lock, so the event loop would wait for as many as there are threads: twelve
    bodies of a million token ids kept it from others for a second."""
    at_work = threading.Semaphore(1)

    def parse() -> bool:
        is_alone = at_work.acquire(blocking=False)
        time.sleep(0.01)
        at_work.release()
        return is_alone

    config = GatewayConfig()
    alone = await asyncio.gather(*(off_loop(parse, num_bytes=2**30, config=config) for _ in range(8)))
    assert all(alone)


async def test_a_service_that_computes_leaves_a_core_to_the_parser(tmp_path: Path) -> None:
    page = tmp_path / "cores"
    make_page(page, cores=8, shares=[8, 0])
    trainer = Cores(f"{page}:0", most=0, set_threads=lambda _: None)

    def threads() -> int:
        trainer.begin()
        return trainer.threads

    config = GatewayConfig(cores_page=f"{page}:1")
    assert await off_loop(threads, num_bytes=1, config=config) == 8
    assert await off_loop(threads, num_bytes=2**30, config=config) == 7


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b'{"prompt": "%s", "n": 1}' % (b"[,:{" * 100_000), 18),
        (b'{"prompt": "\\\\", "a": "%s"}' % (b'\\"[,' * 100_000), 18),
        (b'["%s", 1]' % (b"[" * (2**16 - 3) + b'\\"' + b"," * 2**16), 12),
        (b'["\\\\\\"%s", [1]]' % (b"," * 10**5), 22),
    ],
)
def test_punctuation_within_texts_is_no_value(text: bytes, number: int) -> None:
    """A long prompt of code or of JSON is one value."""
    orjson.loads(text)
    assert codec.json_values(text, limit=1000) == number


@pytest.mark.parametrize("ahead", range(8))
def test_a_text_is_told_wherever_its_pieces_end(ahead: int) -> None:
    """Pieces of a body end before, in and behind each escape and quotation mark."""
    text = b"[" + b" " * (2**16 - 5 + ahead) + b'"\\\\\\"[[[[\\\\", "%s"]' % (b"," * 2000)
    assert len(orjson.loads(text)) == 2
    assert codec.json_values(text, limit=1000) == 12


async def test_texts_that_are_kept_have_bounds(client: Client) -> None:
    """Searches and the dashboard read them by the thousand: six of 60 MB made an answer of 360 MB."""
    long = "x" * 70_000
    for fields, named in (
        ({"user_metadata": {"a": long}}, "user_metadata: "),
        ({"user_metadata": {"a": ["x" * 40_000], "b": "y" * 40_000}}, "user_metadata: "),
        ({"tags": ["a", long]}, "tags: "),
        ({"sdk_version": long}, "sdk_version: "),
        ({"user_metadata": {f"\0{n}": n for n in range(1025)}}, "user_metadata: has 1025 entries"),
        ({"tags": ["\0"] * 1025}, "tags: has 1025 entries"),
    ):
        error = (await client.call("create_session", fields, status=400))["detail"]
        assert error.startswith(named), error
        assert len(error) < 500
    session_id = await client.session()
    ended = {"reason": {"type": "success"}, "detail": long}
    assert (await client.call(f"sessions/{session_id}/finish", ended, status=400))["detail"].startswith("detail: ")
    project = await client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": long})
    assert (project.status_code, project.json()["detail"][:12]) == (400, "project_id: ")
    copy = {"source_path": "tinker://a:train:0/weights/b", "destination_project_id": long}
    error = (await client.call("copy_weights", copy, status=400))["detail"]
    assert error.startswith("destination_project_id: ")
    reply = await client.post("/v1/completions", json={"model": BASE_MODEL, "prompt": "a", "user": long})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "user")
    model_id = await client.model(session_id)
    save = {"model_id": model_id, "seq_id": 1, "path": "a", "user_metadata": {"a": long}}
    assert "user_metadata: " in (await client.result(await client.call("save_weights", save)))["error"]
    run = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE_MODEL, "user_metadata": {"a": long}}
    created = await client.result(await client.call("create_model", run | {"lora_config": {"rank": 4}}))
    assert "holds 70001 characters in all" in created["error"]
    assert (await client.call("create_session", {"user_metadata": {"a": "x" * 60_000}}))["session_id"]


async def test_a_value_that_an_index_cannot_hold_is_refused_by_name(client: Client) -> None:
    """PostgreSQL answered with an error of its own: 500."""
    session_id = await client.session()
    key = {"x-idempotency-key": "k" * 301}
    run = f"/api/v1/training_runs/{await client.model(session_id)}"
    for reply in (
        await client.post("/api/v1/create_session", json={}, headers=key),
        await client.delete(f"{run}/checkpoints/weights/a", headers=key),
        await client.post(
            "/api/v1/copy_weights",
            json={"source_path": "tinker://a:train:0/weights/b", "destination_project_id": "p"},
            headers=key,
        ),
    ):
        assert (reply.status_code, reply.json()["detail"][:32]) == (400, "x-idempotency-key: has 301 chara")
    body = {"session_id": session_id, "sampling_session_seq_id": 2**63, "base_model": BASE_MODEL}
    error = (await client.call("create_sampling_session", body, status=400))["detail"]
    assert error.startswith("sampling_session_seq_id: ")
    save = {"model_id": f"{session_id}:train:0", "seq_id": 1, "sampling_session_seq_id": 2**63}
    error = (await client.result(await client.call("save_weights_for_sampler", save)))["error"]
    assert error.startswith("sampling_session_seq_id: ")


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_long_prompt_is_made_off_the_event_loop(
    stack: Stack, client: Client, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `echo` and `logprobs` 200,000 tokens blocked the loop for seconds."""
    names: set[str] = set()
    push, listed = draws._push, answers.completion_logprobs

    def push_seen(*args: Any, **fields: Any) -> None:
        names.add(threading.current_thread().name)
        push(*args, **fields)

    def listed_seen(*args: Any, **fields: Any) -> Any:
        names.add(threading.current_thread().name)
        return listed(*args, **fields)

    monkeypatch.setattr(draws, "_MANY_TOKENS", 500)
    monkeypatch.setattr(draws, "_push", push_seen)
    for module in (answers, completions):
        monkeypatch.setattr(module, "completion_logprobs", listed_seen)
    body = {"model": BASE_MODEL, "prompt": [1] * 1000, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    assert names
    assert all(name.startswith("text") for name in names), names


@pytest.mark.usefixtures("talking")
async def test_the_prompt_of_a_stream_without_logprobs_is_made_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    echo = draws._Choice.echo

    def seen(choice: draws._Choice, *args: Any) -> draws.Update:
        update = echo(choice, *args)
        if update.text:
            names.append(threading.current_thread().name)
        return update

    monkeypatch.setattr(draws, "_MANY_TOKENS", 500)
    monkeypatch.setattr(draws._Choice, "echo", seen)
    body = {"model": BASE_MODEL, "prompt": [1] * 1000, "echo": True, "max_tokens": 4, "n": 2, "stream": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    assert len(names) == 2
    assert all(name.startswith("text") for name in names), names


@pytest.mark.usefixtures("talking")
async def test_many_logprobs_of_a_chat_are_made_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    listed = answers.chat_logprobs

    def seen(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return listed(*args)

    monkeypatch.setattr(draws, "_MANY_TOKENS", 8)
    monkeypatch.setattr(chat, "chat_logprobs", seen)
    body = {"model": BASE_MODEL, "messages": TEXT, "logprobs": True, "n": 2}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    assert len(names) == 2
    assert all(name.startswith("text") for name in names), names


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize(
    ("path", "field", "steps"),
    [
        ("/v1/chat/completions", "messages", {(chat, "chat_of"), (chat, "structure_of")}),
        ("/v1/responses", "input", {(responses, "chat_of"), (chat, "chat_of"), (chat, "structure_of")}),
    ],
)
async def test_a_chat_is_made_of_a_large_body_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, field: str, steps: set[tuple[Any, str]]
) -> None:
    """50,000 messages, 30,000 calls of tools or 20,000 tools took 0.3 to 0.7 s of the loop in one go."""
    threads: dict[tuple[Any, str], str] = {}

    def seen(step: tuple[Any, str]) -> Callable[..., Any]:
        work = getattr(*step)

        def worked(*args: Any, **fields: Any) -> Any:
            threads[step] = threading.current_thread().name
            return work(*args, **fields)

        return worked

    for step in steps:
        monkeypatch.setattr(*step, seen(step))
    body = orjson.dumps({"model": BASE_MODEL, field: TEXT}) + b" " * GatewayConfig().thread_body_bytes
    reply = await client.post(path, content=body)
    assert reply.status_code == 200, reply.text[:300]
    assert threads.keys() == steps
    assert all(name.startswith("bodies") for name in threads.values()), threads


@pytest.mark.usefixtures("talking")
async def test_an_owner_has_few_texts_at_samplers_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler converts texts one at a time, in the order in which they come, and a long text takes seconds."""
    num_now = num_most = 0
    ask = Drawing.ask

    async def noting(*args: Any) -> Any:
        nonlocal num_now, num_most
        num_now += 1
        num_most = max(num_most, num_now)
        try:
            return await ask(*args)
        finally:
            num_now -= 1

    monkeypatch.setattr(Drawing, "ask", noting)
    body = {"model": BASE_MODEL, "prompt": ["snow"] * 50, "max_tokens": 1}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    assert num_most == 2


@pytest.mark.usefixtures("talking")
async def test_a_tokenizer_waits_for_no_text(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """All owners wait for the tokenizer of a new sampler, whoever has asked for it first."""
    goes_on, ask = asyncio.Event(), Drawing.ask

    async def gated(drawing: Drawing, replica: Any, rpc: Any, request: Any) -> Any:
        if isinstance(request, sampler_pb2.TokenizeRequest):
            await goes_on.wait()
        return await ask(drawing, replica, rpc, request)

    monkeypatch.setattr(Drawing, "ask", gated)
    generator, source = stack.gateway.sampling.generator, Source("m", "", SamplingSession(base_model=BASE_MODEL))
    text = sampler_pb2.TokenizeRequest(text="snow")
    texts = [asyncio.create_task(generator.tokenize(source, text)) for _ in range(3)]
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(generator.tokenizer(source), 20)).vocabulary
    assert not any(task.done() for task in texts)
    goes_on.set()
    await asyncio.gather(*texts)


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("repeated", [["echo"], ["return_token_ids"], ["echo", "return_token_ids"]])
async def test_an_answer_that_repeats_its_prompt_in_each_choice_is_counted_and_bounded(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, repeated: list[str]
) -> None:
    """A prompt of 32,000 tokens and 1,024 choices: 150 MB of answer for a body of 200 kB, for as long as its client
    reads slowly."""
    held: list[int] = []
    finished = draws.Draw._finished

    def seen(draw: draws.Draw, *args: Any) -> Any:
        held.append(stack.gateway.bodies.num_bytes)
        return finished(draw, *args)

    monkeypatch.setattr(draws.Draw, "_finished", seen)
    monkeypatch.setattr(draws, "LogprobEntry", None)  # it takes ten times what is counted, and serves logprobs only
    body = {"model": BASE_MODEL, "prompt": [1] * 1000, "max_tokens": 4, "n": 16} | dict.fromkeys(repeated, True)
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    (held_bytes,) = held
    assert 0 <= held_bytes - 8 * 1000 * 16 * len(repeated) < 4000, "and the body"
    assert stack.gateway.bodies.num_bytes == 0
    await stack.restart_gateway(max_body_bytes=100_000)
    reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("depth", [990, 1010])
async def test_arguments_that_are_nested_deeply_are_refused_by_name(client: Client, depth: int) -> None:
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"function": {"name": "f", "arguments": arguments}}
    body = {"model": BASE_MODEL, "messages": [{"role": "assistant", "tool_calls": [call]}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "messages"


@pytest.mark.usefixtures("talking")
async def test_a_thousand_prompts_are_worked_on_a_few_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 prompts of 2,000 tokens each, with `echo`, as a stream: their texts were made in one pass of 12 s."""
    echo = draws._Choice.echo
    num_passes = 0
    in_pass: Counter[int] = Counter()

    def seen(choice: draws._Choice, *args: Any) -> draws.Update:
        in_pass[num_passes] += choice.has_echo
        return echo(choice, *args)

    async def count() -> None:
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += 1

    monkeypatch.setattr(draws._Choice, "echo", seen)
    passing = asyncio.create_task(count())
    for stream in (True, False):
        body = {"model": BASE_MODEL, "prompt": [[1] * 9] * 100, "echo": True, "max_tokens": 4, "stream": stream}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text[:300]
    passing.cancel()
    assert in_pass.total() == 200
    assert max(in_pass.values()) <= 8


@pytest.mark.usefixtures("talking")
async def test_draws_of_many_tokens_are_made_off_the_event_loop_and_without_what_nobody_asked_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    num_entries: list[int] = []
    make, push = completions._draw, draws._push

    def made(*args: Any, **fields: Any) -> draws.Draw:
        names.append(threading.current_thread().name)
        return make(*args, **fields)

    def pushed(update: draws.Update, *args: Any, **fields: Any) -> None:
        push(update, *args, **fields)
        num_entries.append(len(update.entries))

    monkeypatch.setattr(draws, "_MANY_TOKENS", 500)
    monkeypatch.setattr(draws, "_push", pushed)
    monkeypatch.setattr(completions, "_draw", made)
    for stream in (True, False):
        body = {"model": BASE_MODEL, "prompt": [[1] * 100] * 8, "echo": True, "max_tokens": 4, "stream": stream}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text[:300]
    assert len(names) == 16
    assert all(name.startswith("text") for name in names), names
    assert set(num_entries) == {0}


@pytest.mark.usefixtures("talking")
async def test_an_answer_of_more_logprobs_than_values_in_a_body_is_refused(stack: Stack, client: Client) -> None:
    await stack.restart_gateway(max_body_values=1000)
    body = {"model": BASE_MODEL, "prompt": [[1] * 50] * 5, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    reply = await client.post("/v1/completions", json=body | {"logprobs": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert "1500 log-probabilities of prompts" in reply.json()["error"]["message"]


async def test_the_text_of_an_owners_thousand_answers_delays_anothers_by_one() -> None:
    def draw(owner: str) -> draws.Draw:
        made = draws.Draw.__new__(draws.Draw)
        made.source = Source("m", owner, SamplingSession(base_model=BASE_MODEL))
        return made

    ended: list[str] = []

    async def text(owner: str) -> None:
        await draw(owner)._off_loop(lambda: time.sleep(0.02), num_tokens=10**6)
        ended.append(owner)

    works = [asyncio.create_task(text(owner)) for owner in ["ada"] * 20 + ["bob"]]
    await asyncio.gather(*works)
    assert ended.index("bob") <= 2
