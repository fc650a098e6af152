"""The service over real gRPC."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from sampler_service import convert
from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.core.request import Request, RequestLimits, Targets
from sampler_service.core.sequence import SequenceGroup
from sampler_service.metrics import SamplerMetrics
from sampler_service.service import make_server, serve
from sampler_service.tokenizer import TokenizerSlot
from sampler_service.torch_engine.engine import ForgetWarmUp
from tests.support.models import make_model
from tests.support.waiting import until
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import (
    floats,
    ints,
    leave,
    make_adapter,
    metric,
    plain_logits,
    prompt,
    request,
    sample,
    serving,
    slow_down,
)
from tinsmith.allocator import give_back_freed_memory
from tinsmith.errors import InvalidRequest, NotReady, OutOfCapacity, ServiceError, VersionNotLoaded
from tinsmith.rpc import logs
from tinsmith.rpc.channel import connect, is_serving, wait_serving
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.server import RAN
from tinsmith.rpc.tensors import from_numpy, to_numpy
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import sampler_pb2_grpc, weight_sync_pb2
from tinsmith.v1 import types_pb2 as types


async def test_info(service: Service) -> None:
    info = await service.stub.GetSamplerInfo(pb.GetSamplerInfoRequest())
    assert list(info.base_models) == ["one", "two"]
    assert (info.max_context_length, info.max_lora_rank, info.engine, info.device) == (256, 16, "torch", "cpu")
    assert list(info.adapter_groups) == [types.ADAPTER_GROUP_ATTN, types.ADAPTER_GROUP_MLP, types.ADAPTER_GROUP_UNEMBED]
    assert info.vocab_size == service.engine.limits.vocab_size > 0
    assert info.boot_id


async def test_a_sample_with_everything(service: Service, text_model_folder: Path) -> None:
    tokens = prompt(20, vocab_size=200)
    named = np.random.default_rng(0).integers(-1, 200, size=(19, 3))
    reply = await service.stub.Sample(
        sample(
            tokens,
            num_samples=2,
            max_tokens=5,
            seed=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=from_numpy(named),
            prompt_alt_tokens_k=4,
        )
    )
    table = plain_logits(text_model_folder, tokens)[:-1].log_softmax(-1).numpy()
    assert [len(ints(s.tokens)) for s in reply.sequences] == [5, 5]
    assert [len(floats(s.logprobs)) for s in reply.sequences] == [5, 5]
    assert all(s.stop_reason == types.STOP_REASON_LENGTH for s in reply.sequences)
    assert all(s.public_stop_reason == types.PUBLIC_STOP_REASON_LENGTH for s in reply.sequences)
    assert [(s.topk_sampled_logprobs.length, s.topk_sampled_logprobs.k) for s in reply.sequences] == [(5, 3)] * 2
    assert (reply.topk_prompt_logprobs.length, reply.topk_prompt_logprobs.k) == (20, 2)
    assert floats(reply.topk_prompt_logprobs.logprobs)[:2].tolist() == [-99999.0] * 2
    np.testing.assert_allclose(floats(reply.prompt_logprobs)[1:], table[np.arange(19), tokens[1:]], atol=1e-4)
    answer = to_numpy(reply.target_prompt_logprobs, field="answer")
    cells = np.take_along_axis(table, np.maximum(named, 0), 1)
    np.testing.assert_allclose(answer, np.where(named < 0, 0, cells), atol=1e-4)
    assert to_numpy(reply.prompt_alt_tokens.tokens, field="tokens").shape == (19, 4)
    assert reply.prompt_alt_tokens.tokens.dtype == types.DTYPE_INT64
    assert to_numpy(reply.prompt_alt_tokens.logprobs, field="logprobs").shape == (19, 4)


async def test_sparse_targets_are_answered_in_their_own_layout(service: Service, text_model_folder: Path) -> None:
    tokens = prompt(5, vocab_size=200)
    asked = types.Tensor(
        dtype=types.DTYPE_INT64,
        shape=[4, 2],
        sparse_csr=types.SparseCsr(
            values=np.array([7, 8, 9], "<i8").tobytes(),
            crow_indices=np.array([0, 1, 1, 3, 3], "<i8").tobytes(),
            col_indices=np.array([1, 0, 1], "<i8").tobytes(),
        ),
    )
    reply = await service.stub.Sample(sample(tokens, max_tokens=1, target_prompt_logprobs=asked))
    answer = reply.target_prompt_logprobs
    table = plain_logits(text_model_folder, tokens).log_softmax(-1)
    np.testing.assert_allclose(floats(answer.sparse_csr.values), table[[0, 2, 2], [7, 8, 9]], atol=1e-4)
    assert answer.sparse_csr.crow_indices == asked.sparse_csr.crow_indices
    assert answer.sparse_csr.col_indices == asked.sparse_csr.col_indices
    assert list(answer.shape) == [4, 2]


async def test_a_wide_sparse_table_of_targets_costs_what_it_stores(service: Service, text_model_folder: Path) -> None:
    """1,000 cells of [1, 2^26] once became 512 MiB, on the event loop: 16 kB kept everybody waiting."""
    num_cells, num_columns = 1000, 2**26
    tokens, named = prompt(2, vocab_size=200), np.arange(num_cells) % 200
    asked = types.Tensor(
        dtype=types.DTYPE_INT64,
        shape=[1, num_columns],
        sparse_csr=types.SparseCsr(
            values=named.astype("<i8").tobytes(),
            crow_indices=np.array([0, num_cells], "<i8").tobytes(),
            col_indices=np.linspace(0, num_columns - 1, num_cells).astype("<i8").tobytes(),
        ),
    )
    request = sample(tokens, max_tokens=1, target_prompt_logprobs=asked)
    tracemalloc.start()
    convert.request_from_proto(request)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1024 * 1024
    reply = await service.stub.Sample(request)
    table = plain_logits(text_model_folder, tokens).log_softmax(-1)
    np.testing.assert_allclose(floats(reply.target_prompt_logprobs.sparse_csr.values), table[0, named], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_samples": 0}, InvalidRequest, "num_samples: 0"),
        ({"version_id": "nobody"}, VersionNotLoaded, "'nobody' is not loaded"),
        ({"target_prompt_logprobs": from_numpy(np.zeros((2, 1), np.int64))}, InvalidRequest, r"shape \[3, K\]"),
        ({"target_prompt_logprobs": from_numpy(np.full((3, 1), -1))}, InvalidRequest, "names no token"),
        ({"prompt": []}, InvalidRequest, "prompt: is empty"),
        (
            {"prompt": [types.Chunk(image=types.Image())]},
            InvalidRequest,
            "chunk kind 'image' is not .*it sees text only",
        ),
        ({"max_tokens": 253}, InvalidRequest, r"context window: 4 \+ 253 > 256"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_an_unservable_request_is_refused_and_the_next_one_works(
    service: Service, fields: dict[str, Any], error: type[ServiceError], message: str
) -> None:
    asked = sample(prompt(4, vocab_size=200), **{"max_tokens": 2, **{k: v for k, v in fields.items() if k != "prompt"}})
    if "prompt" in fields:
        del asked.prompt[:]
        asked.prompt.extend(fields["prompt"])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.stub.Sample(asked)
    found = from_rpc_error(raised.value)
    assert type(found) is error
    with pytest.raises(error, match=message):
        raise found
    assert (await service.stub.Sample(sample(prompt(4, vocab_size=200), max_tokens=2))).sequences


async def test_a_sample_says_when_it_was_computed(service: Service) -> None:
    before = time.time()
    call = service.stub.Sample(sample(prompt(5, vocab_size=200), max_tokens=3))
    await call
    trailer = dict(await call.trailing_metadata())
    begin, end = (float(at) for at in trailer[RAN].split(":"))
    assert before <= begin < end <= time.time()


async def test_a_stop_string_over_the_wire(service: Service) -> None:
    asked = sample(prompt(4, vocab_size=200), max_tokens=200, seed=1, stop=pb.StopCondition(strings=["a", "e", "t"]))
    reply = await service.stub.Sample(asked)
    assert reply.sequences[0].stop_reason == types.STOP_REASON_STOP != types.SampledSequence().stop_reason
    assert reply.sequences[0].public_stop_reason == types.PUBLIC_STOP_REASON_STOP


async def test_a_stream_gives_tokens_as_they_come_and_then_the_result(service: Service) -> None:
    asked = sample(prompt(4, vocab_size=200), num_samples=2, max_tokens=6, seed=1)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    result = None
    async for event in service.stub.StreamSample(pb.StreamSampleRequest(request=asked)):
        assert result is None
        if event.WhichOneof("event") == "delta":
            tokens[event.delta.index] += ints(event.delta.tokens)
        else:
            result = event.result
    assert result is not None
    assert [ints(s.tokens) for s in result.sequences] == list(tokens.values())
    assert result == await service.stub.Sample(asked)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_client_that_leaves_frees_its_place(
    service: Service, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slow_down(service.engine, monkeypatch)
    asked = sample(prompt(4, vocab_size=200), num_samples=8, max_tokens=250)
    if stream:
        call: Any = service.stub.StreamSample(pb.StreamSampleRequest(request=asked))
        await call.read()
    else:
        call = service.stub.Sample(asked)
        await until(lambda: metric(service.engine, "running_sequences") > 0)
    call.cancel()
    await until(lambda: metric(service.engine, "requests_total", outcome="CANCELLED") > 0)
    await service.stub.Sample(sample(prompt(4, vocab_size=200), max_tokens=1))
    assert metric(service.engine, "running_sequences") == 0


async def test_a_full_queue_refuses(text_model_folder: Path) -> None:
    async with serving(text_model_folder, max_running=1, max_waiting=2) as engine:
        server = make_server(
            SamplerConfig(base_model=str(text_model_folder), listen="127.0.0.1:0"), EngineSlot(engine), engine.metrics
        )
        await server.start()
        async with connect(f"127.0.0.1:{server.port}") as channel:
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            calls = [stub.Sample(sample(prompt(4, vocab_size=200), max_tokens=250)) for _ in range(8)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await server.stop(0)
    refused = [from_rpc_error(o).reason for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
    assert set(refused) == {"OUT_OF_CAPACITY"}
    assert 0 < len(refused) < 7


async def test_memory_of_requests_is_bounded_and_free_again_at_their_end(
    text_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 requests of 1,024 samples each held 1.2 GB, and a table of scores up to 64 MB was not counted."""
    async with serving(text_model_folder, max_running=1, max_held_bytes=150_000) as engine:
        with monkeypatch.context() as patch:
            slow_down(engine, patch)
            first = await engine.submit(request(prompt(4, vocab_size=200), max_tokens=250, num_samples=150))
            with pytest.raises(OutOfCapacity, match=r"this one takes \d+, and max_held_bytes is 150000"):
                await engine.submit(request(prompt(4, vocab_size=200), max_tokens=1, num_samples=50))
            table = Targets(np.zeros(2000, np.int64), np.zeros(2000, np.int64))
            with pytest.raises(OutOfCapacity, match="requests hold"):
                await engine.submit(request(prompt(4, vocab_size=200), max_tokens=1, targets=table))
            small = await engine.submit(request(prompt(4, vocab_size=200), max_tokens=1))
            await leave(first)
        await small.result()
        await until(lambda: engine.requests.held_bytes == 0)
        one = await engine.submit(request(prompt(4, vocab_size=200), max_tokens=1, num_samples=400))
        assert len((await one.result()).sequences) == 400, "alone a request is taken, whatever it holds"


@pytest.mark.parametrize("field", ["version_id", "follow_run", "cache_salt", "sampling_params.stop.token_ids"])
async def test_names_and_stop_tokens_above_their_bounds_are_refused_by_name(service: Service, field: str) -> None:
    """`max_held_bytes` counted none of them: 200 MB of each stayed in memory for as long as the request waited, and a
    salt as long as the prefix cache kept the prompt."""
    asked = sample(prompt(4, vocab_size=200), max_tokens=1)
    if field.endswith("token_ids"):
        asked.sampling_params.stop.token_ids.extend([3] * 1025)
    else:
        setattr(asked, field, "x" * 1001)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.stub.Sample(asked)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert (error.metadata["field"], error.message.startswith(f"{field}: 10")) == (field, True)


def test_a_prompt_counts_for_its_chunks_however_small_they_are_on_the_wire() -> None:
    """32,500 empty chunks have 0.13 MB on the wire and 2 MB in memory, for as long as the request waits."""
    asked = sample(prompt(4, vocab_size=200), max_tokens=1)
    for _ in range(32_500):
        asked.prompt.add().encoded_text.tokens = b""
    body, process = asked.SerializeToString(), psutil.Process()
    gc.collect()
    give_back_freed_memory()  # which earlier tests have left, and the messages would take
    before = process.memory_info().rss
    kept = [pb.SampleRequest.FromString(body) for _ in range(25)]
    taken = process.memory_info().rss - before
    assert taken < sum(convert.request_from_proto(one).num_bytes for one in kept)


def test_no_less_memory_is_counted_than_a_waiting_request_takes(text_model_folder: Path) -> None:
    may_compute = threading.Event()

    async def measured() -> tuple[int, int]:
        async with serving(text_model_folder, max_running=1) as engine:
            engine.scheduler.forget_warm_up = lambda: may_compute.wait(60)  # type: ignore[method-assign]
            engine.commands.put(ForgetWarmUp())
            asked = [request(prompt(4, vocab_size=200), max_tokens=250, num_samples=1000) for _ in range(20)]
            tracemalloc.start()
            for one in asked:
                await engine.submit(one)
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            may_compute.set()
            return taken, sum(one.num_bytes for one in asked)

    taken, counted = asyncio.run(measured())
    assert counted / 3 < taken < counted


async def test_a_large_table_of_targets_does_not_hold_up_the_event_loop(service: Service) -> None:
    """A dense one of 64 MB stopped it for half a second."""
    tokens = prompt(2, vocab_size=200)
    table = from_numpy(np.zeros((1, 1 << 20), np.int64))
    asked = sample(tokens, max_tokens=1, target_prompt_logprobs=table)
    threads: list[str] = []

    def noting(call: Any) -> Any:
        def noted(*args: Any, **settings: Any) -> Any:
            threads.append(threading.current_thread().name.split("_")[0])
            return call(*args, **settings)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("request_from_proto", "response_to_proto"):
            patch.setattr(convert, name, noting(getattr(convert, name)))
        patch.setattr(RequestLimits, "check", noting(RequestLimits.check))
        reply = await service.stub.Sample(asked)
    assert len(floats(reply.target_prompt_logprobs.dense)) == 1 << 20
    assert threads == ["large-messages"] * 3


async def test_the_answer_of_many_tokens_is_made_beside_the_event_loop(service: Service) -> None:
    """1,024 sequences of 8,192 tokens would stop it for half a second."""
    threads: list[str] = []
    write = convert.response_to_proto

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread().name.split("_")[0])
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "response_to_proto", noting)
        patch.setattr("sampler_service.servicer._MANY_TOKENS", 6)
        for num_samples in (1, 4):
            await service.stub.Sample(sample(prompt(4, vocab_size=200), max_tokens=2, num_samples=num_samples))
    assert threads == ["MainThread", "large-messages"]


async def test_versions_are_listed_by_page_and_removed(service: Service) -> None:
    for n in range(5):
        await service.engine.install(f"v{n}", make_adapter(service.engine.targets, seed=n, rank=2))
    seen, token = [], ""
    while True:
        page = await service.stub.ListVersions(pb.ListVersionsRequest(page_size=2, page_token=token))
        seen += [version.version_id for version in page.versions]
        token = page.next_page_token
        if not token:
            break
    assert seen == [f"v{n}" for n in range(5)]
    assert page.versions[0].lora_config.rank == 2
    assert page.versions[0].size_bytes == make_adapter(service.engine.targets, seed=0, rank=2).num_bytes
    for name in ("v3", "v3", "unknown"):
        await service.weights.RemoveVersion(weight_sync_pb2.RemoveVersionRequest(version_id=name))
    left = (await service.stub.ListVersions(pb.ListVersionsRequest())).versions
    assert [version.version_id for version in left] == ["v0", "v1", "v2", "v4"]


async def test_calls_while_loading_are_not_ready() -> None:
    config = SamplerConfig(base_model="later", listen="127.0.0.1:0")
    server = make_server(config, EngineSlot(), SamplerMetrics(CollectorRegistry()))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert not await is_serving(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await sampler_pb2_grpc.SamplerServiceStub(channel).GetSamplerInfo(pb.GetSamplerInfoRequest())
        assert isinstance(from_rpc_error(raised.value), NotReady)
    await server.stop(0)


async def test_each_request_leaves_a_line_with_its_id_and_its_run(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[tuple[str, str, str]] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append((logs.request_id.get(), logs.model_id.get(), record.getMessage().partition(", after")[0]))
        return True

    caplog.set_level(logging.INFO, logger="sampler_service.servicer")
    caplog.handler.addFilter(note)
    try:
        await service.engine.install("m:train:0@6", make_adapter(service.engine.targets, seed=1, rank=2))
        good, bad = sample([1, 2, 3], num_samples=2, max_tokens=4), sample([1], version_id="m@7")
        await service.stub.Sample(good, metadata=[(logs.REQUEST_ID_METADATA, "r:1")])
        good.version_id = "m:train:0@6"
        stream = service.stub.StreamSample(
            pb.StreamSampleRequest(request=good), metadata=[(logs.REQUEST_ID_METADATA, "r:2")]
        )
        assert [one async for one in stream]
        with pytest.raises(grpc.aio.AioRpcError):
            await service.stub.Sample(bad, metadata=[(logs.REQUEST_ID_METADATA, "r:3")])
    finally:
        caplog.handler.removeFilter(note)
    drawn = "ok, 8 tokens in 2 sequences"
    assert lines[:2] == [
        ("r:1", "", f"sample of the base model: {drawn}"),
        ("r:2", "m:train:0", f"sample of version 'm:train:0@6': {drawn}"),
    ]
    (*ids, failed), *_ = lines[2:]
    assert ids == ["r:3", "m"]
    assert failed.startswith("sample of version 'm@7': VERSION_NOT_LOADED: ")


async def test_a_model_that_does_not_load_ends_the_process_with_a_message(tmp_path: Path) -> None:
    config = SamplerConfig(base_model=str(tmp_path / "nowhere"), listen="127.0.0.1:0")
    assert await serve(config) == 1


async def test_a_damaged_file_of_weights_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x08" + b"\0" * 30)
    assert await serve(SamplerConfig(base_model=str(folder), listen="127.0.0.1:0")) == 1
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line.startswith(f"cannot serve {folder}: model.safetensors is damaged (")
    assert "\n" not in line


async def test_an_engine_that_dies_in_its_first_pass_is_one_line_below_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("sampler_service.torch_engine.runner.Runner.run", fail)
    folder = make_model(tmp_path)
    assert await serve(SamplerConfig(base_model=str(folder), listen="127.0.0.1:0")) == 1
    last = [record for record in caplog.records if record.levelname == "ERROR"][-1]
    assert last.getMessage() == f"cannot serve {folder}: the engine has died: can't allocate memory"
    assert last.exc_info is None


@pytest.mark.slow
async def test_the_process_serves_and_stops_on_sigterm_with_a_generation_running(
    text_model_folder: Path, unused_tcp_port: int
) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "sampler_service", "--base-model", str(text_model_folder), "--listen", address],
        *["--model-names", '["public/name"]', "--num-threads", "1", "--max-kv-tokens", "100000"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with connect(address) as channel:
            await wait_serving(channel, timeout_s=60)
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            info = await stub.GetSamplerInfo(pb.GetSamplerInfoRequest())
            assert list(info.base_models) == ["public/name"]
            calls = [stub.Sample(sample(prompt(4, vocab_size=200), num_samples=64, max_tokens=250)) for _ in range(20)]
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(o, pb.SampleResponse | grpc.aio.AioRpcError) for o in outcomes)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        await process.wait()
    assert "Traceback" not in log, log


async def test_a_caller_with_an_ordinary_key_is_one_owner_whatever_its_salts(model_folder: Path) -> None:
    """And finds nothing of others in the prefix cache. With the service key the salt says who the owner is."""
    config = SamplerConfig(
        base_model=str(model_folder),
        listen="127.0.0.1:0",
        api_keys=[SecretStr("tml-one"), SecretStr("tml-two")],
        service_key=SecretStr("tml-service"),
    )
    owners: list[str] = []
    async with serving(model_folder) as engine:
        accept = engine.requests.accept

        async def noting(asked: Request, **how: Any) -> SequenceGroup:
            owners.append(asked.owner)
            return await accept(asked, **how)

        engine.requests.accept = noting  # pyright: ignore[reportAttributeAccessIssue]
        server = make_server(config, EngineSlot(engine), engine.metrics)
        await server.start()

        async def hits(key: str, salt: str) -> int:
            async with connect(f"127.0.0.1:{server.port}", api_key=key) as channel:
                stub = sampler_pb2_grpc.SamplerServiceStub(channel)
                reply = await stub.Sample(sample(prompt(40), max_tokens=1, cache_salt=salt))
            return reply.prompt_cache_hit_tokens

        found = [await hits("tml-service", salt) for salt in ("ada", "ada", "bob")]
        assert found == [0, 32, 0]
        assert owners == ["ada", "ada", "bob"]
        found = [await hits(key, salt) for key in ("tml-one", "tml-two") for salt in ("ada", "ada", "bob")]
        assert found == [0, 32, 0] * 2
        assert len(set(owners)) == 4
        assert [owner == owners[3] for owner in owners[3:]] == [True] * 3 + [False] * 3
        await server.stop(0)


async def test_a_key_has_few_texts_that_wait_to_be_converted(
    text_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler converts texts one at a time, in the order in which they come, and a long text takes seconds."""
    config = SamplerConfig(base_model=str(text_model_folder), listen="127.0.0.1:0", api_keys=[SecretStr("tml-one")])
    num_now = num_most = 0
    run = TokenizerSlot.run

    async def noting(slot: TokenizerSlot, work: Any) -> Any:
        nonlocal num_now, num_most
        num_now += 1
        num_most = max(num_most, num_now)
        try:
            return await run(slot, work)
        finally:
            num_now -= 1

    monkeypatch.setattr(TokenizerSlot, "run", noting)
    async with serving(text_model_folder) as engine:
        server = make_server(config, EngineSlot(engine), engine.metrics)
        await server.start()
        async with connect(f"127.0.0.1:{server.port}", api_key="tml-one") as channel:
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            replies = await asyncio.gather(*(stub.Tokenize(pb.TokenizeRequest(text="the cat")) for _ in range(20)))
        await server.stop(0)
    assert all(reply.tokens for reply in replies)
    assert num_most == 2
