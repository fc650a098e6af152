"""The dashboard's API: histories, samples, services, access to them, and the page itself."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
import threading
import time
from typing import Any

import httpx
import pytest
from PIL import Image
from sqlalchemy import func, select, update

from gateway.dashboard.history import MetricHistory
from gateway.dashboard.samples import MAX_PICTURE_BYTES, MAX_TOKENS, RecentSamples
from gateway.dashboard.services import parse_figures
from gateway.dashboard.thumbnails import MAX_BYTES, MAX_THUMBNAIL_BYTES, thumbnail
from gateway.database.outages import DatabaseUnusable
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.history import MetricPoint
from gateway.database.tables.samples import RecentSample
from gateway.database.tables.sessions import Model, Session
from gateway.gateway import Gateway
from gateway.http.routes.dashboard import STATIC
from tests.support.waiting import until
from tests.unit.gateway.commits import Statements, commits, lost
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.talking import END, TalkingSampler
from tinsmith.rpc.metrics import new_registry
from tinsmith.rpc.metrics_service import MetricsServicer
from tinsmith.v1 import metrics_pb2, sampler_pb2, types_pb2
from tinsmith.v1 import trainer_pb2 as pb

# The fake trainer computes in 1970.
pytestmark = pytest.mark.gateway(sampler=TalkingSampler, history_retention_s=1e12)

RUN = "s:train:0"
BEGAN_AT = time.time()  # the gateway forgets what is old
HOSTILE = "<img src=x onerror=alert(1)>"


async def get(client: httpx.AsyncClient, path: str, *, status: int = 200, **query: Any) -> Any:
    reply = await client.get(f"/dashboard/api/{path}", params=query or None)
    assert reply.status_code == status, reply.text
    return reply.json()


async def train(client: Client, run_id: str, *, steps: range) -> None:
    """One batch and one step for each of them."""
    for step in steps:
        receipt = (await client.forward_backward(run_id, 2 * step - 1)).json()
        await client.result(receipt)
        body = {"model_id": run_id, "seq_id": 2 * step, "adam_params": {"learning_rate": step / 1000}}
        await client.result(await client.call("optim_step", body))


async def sampled_run(client: Client) -> str:
    """A run, and two sequences drawn from it."""
    session_id = await client.session()
    run_id = await client.model(session_id)
    saved = await client.result(
        await client.call("save_weights_for_sampler", {"model_id": run_id, "seq_id": 1, "path": "p"})
    )
    sampler_id = await client.sampling_session(session_id, model_path=saved["path"])
    await client.result(await client.call("asample", sample_body(sampler_id, 1, sampling_params={"max_tokens": 100})))
    return run_id


# Metrics


async def test_a_runs_numbers_are_there_after_a_restart_and_go_on(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    await train(client, run_id, steps=range(1, 4))
    await stack.gateway.dashboard.flush()
    first = await get(client, f"runs/{run_id}/history")
    assert first["reset"]
    assert first["step"] == [1, 2, 3]
    assert first["series"]["learning_rate:mean"] == [0.001, 0.002, 0.003]
    assert first["series"]["grad_norm:mean"] == ["nan"] * 3  # the fake trainer's
    await stack.restart_gateway()
    assert await get(client, f"runs/{run_id}/history") == first
    await train(client, run_id, steps=range(4, 6))
    await stack.gateway.dashboard.flush()
    more = await get(client, f"runs/{run_id}/history", after=first["seq"][-1], steps=3)
    assert (more["reset"], more["step"], more["seq"]) == (False, [4, 5], [8, 10])
    none = await get(client, f"runs/{run_id}/history", after=10, steps=5)
    assert (none["reset"], none["seq"]) == (False, [])
    other = await get(client, f"runs/{run_id}/history", after=8, steps=2)  # not what lies there
    assert (other["reset"], other["step"]) == (True, [1, 2, 3, 4, 5])


async def test_an_answer_that_passes_again_is_counted_once(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    await train(client, run_id, steps=range(1, 3))
    await stack.restart_gateway()
    for seq_id in range(1, 5):  # this gateway fetches them from the trainer
        assert (await client.poll(f"{run_id}:{seq_id}")).status_code == 200
    await stack.gateway.dashboard.flush()
    assert (await get(client, f"runs/{run_id}/history"))["step"] == [1, 2]


def observe(history: MetricHistory, seq_id: int) -> None:
    """A batch where seq_id is odd, a step where it is even."""
    ran = (BEGAN_AT + seq_id, BEGAN_AT + seq_id + 0.5)
    if seq_id % 2:
        metrics = {"loss:sum": 3.0, "num_tokens:sum": 6.0, "num_sequences:sum": 1.0}
        history.add(RUN, seq_id, pb.ForwardBackwardResponse(metrics=metrics), ran=ran)
    else:
        history.add(RUN, seq_id, pb.OptimStepResponse(metrics={"grad_norm:mean": 1.0}), ran=ran)


async def num_rows(gateway: Gateway, table: type[MetricPoint] | type[RecentSample]) -> int:
    async with gateway.store.begin() as db:
        return await db.scalar(select(func.count()).select_from(table)) or 0


async def test_a_long_history_is_bounded_and_whole_also_with_two_writers(stack: Stack) -> None:
    gateway = stack.gateway
    one, other = (MetricHistory(gateway.store, max_points=64) for _ in range(2))
    for seq_id in range(1, 1001):
        observe((one, other)[seq_id // 4 % 2], seq_id)
        if seq_id % 5 == 0:
            await one.flush()
            await other.flush()
            assert await num_rows(gateway, MetricPoint) <= 64
    found = await one.read(RUN)
    assert found["step"][-1] == 500
    assert sum(found["num_steps"]) == 500
    assert set(found["series"]["loss/token"]) == {0.5}
    observe(one, 3)  # merged long ago
    await one.flush()
    assert sum((await one.read(RUN))["tokens"]) == 3000
    summary = (await one.summaries([RUN]))[RUN]
    assert summary is not None
    assert (summary.num_steps, summary.recent["step"][-1]) == (500, 500)


async def test_a_reader_whose_points_were_merged_gets_all_anew(stack: Stack) -> None:
    history = MetricHistory(stack.gateway.store, max_points=64)
    for seq_id in range(1, 41):
        observe(history, seq_id)
    await history.flush()
    known = await history.read(RUN)
    for seq_id in range(41, 101):
        observe(history, seq_id)
    await history.flush()
    there = (await history.read(RUN))["seq"]
    merged = next(n for n, seq_id in enumerate(known["seq"]) if seq_id not in there)
    more = await history.read(RUN, after=known["seq"][merged], num_steps=known["step"][merged])
    assert (more["reset"], more["step"][-1]) == (True, 50)


async def test_many_points_are_written_in_portions_and_none_is_lost_between_them(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 points of one run, as after an outage, kept the event loop from others for 2.5 s."""
    monkeypatch.setattr("gateway.dashboard.history._PER_WRITE", 10)
    store, commits_seen = stack.gateway.store, 0
    history = MetricHistory(store, max_points=64)

    def fail() -> None:
        nonlocal commits_seen
        commits_seen += 1
        if commits_seen == 3:
            lost()

    for seq_id in range(1, 26):
        observe(history, seq_id)
    with commits(store, fail, of=asyncio.current_task()), pytest.raises(DatabaseUnusable):
        await history.flush()
    assert commits_seen == 3
    await history.flush()
    assert (await history.read(RUN))["step"] == list(range(1, 13))
    assert await num_rows(stack.gateway, MetricPoint) == 25


async def test_without_points_nothing_is_kept(stack: Stack) -> None:
    gateway = stack.gateway
    history = MetricHistory(gateway.store, max_points=0)
    observe(history, 1)
    await history.flush()
    assert await num_rows(gateway, MetricPoint) == 0


async def test_old_points_are_forgotten(stack: Stack) -> None:
    gateway = stack.gateway
    history = MetricHistory(gateway.store, max_points=64)
    for seq_id in range(1, 9):
        observe(history, seq_id)
    await history.flush()
    await gateway.store.delete_old(MetricPoint.at, before=BEGAN_AT + 5, keep_newest=100)
    assert await num_rows(gateway, MetricPoint) == 4


# Samples


async def test_recent_samples_are_text_token_by_token(stack: Stack, client: Client) -> None:
    assert isinstance(stack.sampler, TalkingSampler)
    stack.sampler.says = f"é {HOSTILE}"
    run_id = await sampled_run(client)
    await stack.gateway.dashboard.flush()
    found = (await get(client, f"runs/{run_id}/samples"))["samples"]
    assert len(found) == 2
    newest = found[0]
    assert "".join(newest["texts"]) == f"é {HOSTILE}{END}"
    assert newest["texts"][:2] == ["", "é"]  # two tokens are one character
    assert len(newest["tokens"]) == len(newest["logprobs"]) == len(newest["texts"]) == newest["num_tokens"]
    assert newest["special"] == [newest["num_tokens"] - 1]
    assert newest["logprobs"][0] == -0.25
    assert newest["num_prompt_tokens"] == 3
    assert newest["is_finished"]
    assert (await get(client, f"runs/{run_id}/samples", after=newest["id"]))["samples"] == []


async def test_samples_without_a_sampler_are_token_ids(stack: Stack, client: Client) -> None:
    run_id = await sampled_run(client)
    await stack.sampler_backend.stop()
    clients = stack.gateway.clients
    await until(lambda: not clients.samplers.usable(BASE_MODEL))
    await stack.gateway.dashboard.flush()
    (newest, _) = (await get(client, f"runs/{run_id}/samples"))["samples"]
    assert newest["texts"] is None
    assert newest["tokens"]


def drawn(num_tokens: int, *, topk: types_pb2.TopkLogprobs | None = None) -> types_pb2.SampledSequence:
    return types_pb2.SampledSequence(
        tokens=struct.pack(f"<{num_tokens}i", *range(num_tokens)),
        logprobs=struct.pack(f"<{num_tokens}f", *[-1.0] * num_tokens),
        topk_sampled_logprobs=topk,
    )


async def keep(
    store: Any, sequences: list[types_pb2.SampledSequence], *, keep: int, owner: str = "a"
) -> list[RecentSample]:
    samples = RecentSamples(store, keep=keep)
    request = sampler_pb2.SampleRequest(version_id=f"{RUN}@1")
    for n, sequence in enumerate(sequences):
        samples.add(f"r{n}", request, [sequence], base_model=BASE_MODEL, owner=owner)
        await samples.flush()
    return await samples.read(RUN, owner=owner)


async def test_no_whole_request_waits_to_be_written(stack: Stack) -> None:
    samples = RecentSamples(stack.gateway.store, keep=64)
    prompt = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=bytes(4 * 10**6)))
    request = sampler_pb2.SampleRequest(version_id=f"{RUN}@1", prompt=[prompt])
    samples.add("r", request, [drawn(10**5)] * 4, base_model=BASE_MODEL, owner="a")
    waiting = [value for each in samples._drawn for value in each.row.values()]
    assert sum(len(value) for value in waiting if isinstance(value, bytes)) < 10**5
    await samples.flush()
    (row, *_) = found = await samples.read(RUN, owner="a")
    assert (len(found), row.num_prompt_tokens, row.num_tokens) == (4, 10**6, 10**5)


def with_pictures(*pictures: bytes) -> sampler_pb2.SampleRequest:
    images = [types_pb2.Chunk(image=types_pb2.Image(data=one, format="png")) for one in pictures]
    return sampler_pb2.SampleRequest(version_id=f"{RUN}@1", prompt=images)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 200).convert(mode).save(file, "PNG")
    return file.getvalue()


async def test_pictures_of_a_prompt_are_thumbnails(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    monkeypatch.setattr(
        "gateway.dashboard.samples.thumbnail", lambda one: threads.add(threading.get_ident()) or thumbnail(one)
    )
    run_id = await sampled_run(client)
    await stack.gateway.dashboard.flush()  # what was drawn there is older than what follows
    samples = RecentSamples(stack.gateway.store, keep=64)
    good, large, broken = png(300, 150, "RGBA"), png(2050, 2050, "1"), png(40, 40)[:90]
    request = with_pictures(good, large, broken, HOSTILE.encode(), good, good)
    request.version_id = f"{run_id}@1"
    samples.add("pictures", request, [drawn(3)] * 2, base_model=BASE_MODEL, owner="")
    await samples.flush()
    assert threads
    assert threading.get_ident() not in threads
    second, first = (await get(client, f"runs/{run_id}/samples"))["samples"][:2]
    assert second["pictures"] == []
    url, *others = first["pictures"]
    assert others == [None, None, None], "too large, cut off, no picture; and no more than four"
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
        assert (shown.format, shown.size, shown.mode) == ("JPEG", (96, 48), "RGB")
        assert not shown.getexif()
    assert len(url) < 1.4 * MAX_THUMBNAIL_BYTES


async def test_the_bytes_of_pictures_that_wait_are_bounded(stack: Stack) -> None:
    samples = RecentSamples(stack.gateway.store, keep=64)
    most = bytes(MAX_BYTES)
    for n in range(20):
        samples.add(f"r{n}", with_pictures(most, bytes(MAX_BYTES + 1)), [drawn(1)], base_model=BASE_MODEL, owner="a")
    held = sum(len(one.data) for each in samples._drawn for one in each.pictures)
    assert held == MAX_PICTURE_BYTES
    await samples.flush()
    assert {row.pictures for row in await samples.read(RUN, owner="a")} == {"[null, null]", None}
    samples.add("new", with_pictures(png(9, 9)), [drawn(1)], base_model=BASE_MODEL, owner="a")
    await samples.flush()
    (row,) = await samples.read(RUN, owner="a", limit=1)
    assert row.pictures is not None
    assert row.pictures.startswith('["data:image/jpeg;base64,')


async def test_only_the_newest_samples_stay_of_each_owner(stack: Stack) -> None:
    store = stack.gateway.store
    await keep(store, [drawn(1)] * 3, keep=5, owner="b")
    mine = await keep(store, [drawn(n) for n in range(1, 10)], keep=5)
    assert [row.num_tokens for row in mine] == [9, 8, 7, 6, 5]
    assert len(await RecentSamples(store, keep=5).read(RUN, owner="b")) == 3
    await store.delete_old(RecentSample.at, before=mine[0].at + 1, keep_newest=100)
    assert await RecentSamples(store, keep=5).read(RUN, owner=None) == []


async def test_only_the_newest_points_and_samples_of_all_runs_together_stay(stack: Stack) -> None:
    gateway = stack.gateway
    history = MetricHistory(gateway.store, max_points=64)
    for seq_id in range(1, 9):
        observe(history, seq_id)
    await history.flush()
    await gateway.store.delete_old(MetricPoint.at, before=0, keep_newest=8)
    assert await num_rows(gateway, MetricPoint) == 8
    await gateway.store.delete_old(MetricPoint.at, before=0, keep_newest=4)
    assert (await history.read(RUN))["seq"] == [6, 8]
    await keep(gateway.store, [drawn(1)] * 3, keep=5, owner="b")
    await keep(gateway.store, [drawn(2)] * 3, keep=5)
    await gateway.store.delete_old(RecentSample.at, before=0, keep_newest=4)
    assert [row.owner for row in await RecentSamples(gateway.store, keep=5).read(RUN, owner=None)] == [*"aaab"]


async def test_long_outputs_are_cut_and_ranks_come_from_the_top_k_table(stack: Stack) -> None:
    store = stack.gateway.store
    table = types_pb2.TopkLogprobs(token_ids=struct.pack("<6i", 0, 7, 8, 1, 9, 9), k=2, length=3)
    long, short = await keep(store, [drawn(3, topk=table), drawn(MAX_TOKENS + 5)], keep=5)
    assert (long.num_tokens, len(long.tokens) // 4, len(long.logprobs) // 4) == (MAX_TOKENS + 5, MAX_TOKENS, MAX_TOKENS)
    assert long.ranks == b""
    assert struct.unpack("<3H", short.ranks) == (1, 2, 0)


@pytest.mark.gateway(recent_samples=0)
async def test_the_setting_keeps_no_text(stack: Stack, client: Client) -> None:
    run_id = await sampled_run(client)
    await stack.gateway.dashboard.flush()
    assert await get(client, f"runs/{run_id}/samples") | {"now": 0} == {"now": 0, "keeps": 0, "samples": []}
    assert await num_rows(stack.gateway, RecentSample) == 0


async def test_completions_of_the_openai_api_are_samples_too(stack: Stack, client: Client) -> None:
    run_id = await sampled_run(client)
    body = {"model": f"tinker://{run_id}/sampler_weights/p", "prompt": "the", "max_tokens": 4}
    for stream in (False, True):
        reply = await client.post("/v1/completions", json=body | {"stream": stream})
        assert reply.status_code == 200, reply.text
    await stack.gateway.dashboard.flush()
    assert len((await get(client, f"runs/{run_id}/samples"))["samples"]) == 4


# Lists


async def many_runs(stack: Stack, client: Client, number: int) -> list[str]:
    """Runs of one session with a few points each, the oldest first."""
    store, session_id = stack.gateway.store, await client.session()
    run_ids = [f"{session_id}:train:{n}" for n in range(number)]
    async with store.begin() as db:
        for n, run_id in enumerate(run_ids):
            row = Model(model_id=run_id, session_id=session_id, base_model=BASE_MODEL, optimizer="adamw", lora_rank=8)
            row.train_unembed = row.train_mlp = row.train_attn = True
            row.user_metadata, row.created_at, row.last_request_at = {}, BEGAN_AT - 1000 + n, BEGAN_AT - 500
            db.add(row)
        for n, run_id in enumerate(run_ids):
            for seq_id in range(1, 4):
                db.add(
                    MetricPoint(
                        run_id=run_id, seq_id=seq_id, first_seq_id=seq_id, at=BEGAN_AT, num_steps=1, num_operations=1,
                        sums={"grad_norm:mean": [float(n), 1.0, 0]},
                    )
                )  # fmt: skip
        db.add(checkpoint_of(run_ids[0], 40))
        db.add(checkpoint_of(run_ids[-1], 2))
    return run_ids


def checkpoint_of(run_id: str, num_bytes: int) -> Checkpoint:
    row = Checkpoint(path=f"tinker://{run_id}/weights/w", location=f"{run_id}/weights/w", run_id=run_id, kind="weights")
    row.owner, row.base_model, row.optimizer, row.version_id, row.lora_rank = "local", BASE_MODEL, "adamw", "v", 8
    row.train_unembed = row.train_mlp = row.train_attn = row.has_optimizer = True
    row.step, row.size_bytes, row.created_at, row.user_metadata = 1, num_bytes, BEGAN_AT, {}
    return row


async def test_tabs_share_the_overview_and_it_takes_few_queries_however_many_runs(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dashboard.lists._FRESH_S", 60.0)  # a slow machine serves 20 tabs slowly
    run_ids = await many_runs(stack, client, 90)
    forgets = "DELETE FROM metric_points", "OFFSET"  # the recorder, in the background

    def asked() -> list[str]:
        found = [each for each in statements.of_all if "metric_points" in each]
        return [each for each in found if not any(word in each for word in forgets)]

    statements = Statements(stack.gateway.store)
    tabs = await asyncio.gather(*[get(client, "overview") for _ in range(20)])
    assert 1 <= len(asked()) <= 3, asked()
    for found in tabs:
        assert [run["run_id"] for run in found["runs"]] == run_ids[::-1]
        assert [run["num_steps"] for run in found["runs"]] == [3] * 90
        assert [run["recent"]["series"]["grad_norm:mean"] for run in found["runs"]] == [
            [n] * 3 for n in range(89, -1, -1)
        ]
    # Rows that have not changed are not read again.
    stack.gateway.dashboard.lists._shared.clear()
    statements.of_all.clear()
    assert (await get(client, "overview"))["runs"] == tabs[0]["runs"]
    assert asked() == []


async def test_runs_beyond_the_newest_are_counted_and_active_ones_are_listed(stack: Stack, client: Client) -> None:
    run_ids = await many_runs(stack, client, 130)
    async with stack.gateway.store.begin() as db:
        await db.execute(update(Model).where(Model.model_id == run_ids[3]).values(last_request_at=time.time()))
    found = await get(client, "overview")
    assert (found["num_runs"], found["num_checkpoints"], found["checkpoint_bytes"]) == (130, 2, 42)
    assert [run["run_id"] for run in found["runs"]] == [*run_ids[:29:-1], run_ids[3]]


async def test_an_overview_that_failed_is_not_what_the_next_tab_is_told(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: object) -> None:
        raise DatabaseUnusable("away")

    with monkeypatch.context() as patch:
        patch.setattr(stack.gateway.dashboard.history, "newest", fail)
        await many_runs(stack, client, 2)
        assert (await client.get("/dashboard/api/overview")).status_code == 503
    caplog.clear()
    assert len((await get(client, "overview"))["runs"]) == 2


async def test_the_overview_tells_of_runs_and_of_the_server(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dashboard.lists._FRESH_S", 0.0)
    assert (await get(client, "overview"))["runs"] == []
    run_id = await client.model(await client.session(), user_metadata={"name": "first"})
    await train(client, run_id, steps=range(1, 3))
    await stack.gateway.dashboard.flush()
    found = await get(client, "overview")
    assert found["base_models"] == sorted([BASE_MODEL, "tinsmith/eight"])
    assert (found["samplers"], found["unreached"], found["needs_key"]) == (["serving"], [], False)
    (run,) = found["runs"]
    assert (run["run_id"], run["num_steps"], run["user_metadata"]) == (run_id, 2, {"name": "first"})
    assert run["recent"]["series"]["learning_rate:mean"] == [0.001, 0.002]


async def test_a_run_has_its_checkpoints_and_a_download_of_this_host(stack: Stack, client: Client) -> None:
    run_id = await sampled_run(client)
    (checkpoint,) = (await get(client, f"runs/{run_id}"))["checkpoints"]
    assert (checkpoint["kind"], checkpoint["name"], checkpoint["num_samplers"]) == ("sampler_weights", "p", 1)
    url = (await get(client, f"checkpoints/{run_id}/sampler_weights/p/download"))["url"]
    assert url.startswith("/download/archives/")
    assert (await client.get(url)).status_code == 200
    await get(client, f"checkpoints/{run_id}/sampler_weights/none/download", status=404)


async def test_sessions_count_what_they_have(client: Client) -> None:
    session_id = await client.session()
    await client.model(session_id)
    await client.sampling_session(session_id)
    (session,) = (await get(client, "sessions"))["sessions"]
    assert (session["session_id"], session["num_runs"], session["num_samplers"]) == (session_id, 1, 1)


@pytest.mark.usefixtures("either_database")
async def test_long_notes_do_not_make_lists_long_and_tabs_share_them(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists have 200 sessions, a run in each, and 500 checkpoints. Their notes would be 60 MB if not shortened."""
    monkeypatch.setattr("gateway.dashboard.lists._FRESH_S", 60.0)
    tags, notes = ['\\"first', *("t" * 100 for _ in range(600))], {"name": "n" * 30_000, "k": "v" * 30_000}
    session_ids = [f"s{n}" for n in range(200)]
    async with stack.gateway.store.begin() as db:
        for n, session_id in enumerate(session_ids):
            session = Session(session_id=session_id, owner="local", key_id="", created_at=BEGAN_AT + n)
            session.last_seen_at, session.tags, session.user_metadata = BEGAN_AT, tags if n else ["short"], notes
            session.end_detail = "d" * 60_000
            db.add(session)
        await db.flush()
        for session_id in session_ids:
            row = Model(model_id=f"{session_id}:train:0", session_id=session_id, base_model=BASE_MODEL, lora_rank=8)
            row.optimizer, row.user_metadata, row.created_at = "adamw", notes, BEGAN_AT
            row.train_unembed = row.train_mlp = row.train_attn = True
            db.add(row)
        for n in range(500):
            row = checkpoint_of("s199:train:0", 1)
            row.path, row.user_metadata = f"{row.path}{n}", notes
            db.add(row)
    statements = Statements(stack.gateway.store)
    tabs = [await get(client, "sessions") for _ in range(5)]
    assert len([each for each in statements.of_all if "substr(CAST(sessions.tags" in each]) == 1
    newest, oldest = tabs[-1]["sessions"][0], tabs[-1]["sessions"][-1]
    assert newest["tags"] == ['\\"first', *["t" * 100] * 4, "..."]
    assert newest["end_detail"] == "d" * 500
    assert (oldest["tags"], oldest["num_runs"]) == (["short"], 1)
    runs = (await get(client, "overview"))["runs"]
    assert [run["user_metadata"] for run in runs] == [{"name": "n" * 500}] * 100
    run = await get(client, "runs/s199:train:0")
    assert (run["user_metadata"], len(run["checkpoints"])) == (notes, 500)
    for found, most in ((tabs[-1], 600_000), (runs, 300_000), (run, 400_000)):
        assert len(json.dumps(found)) < most


async def test_services_are_told_with_and_without_their_figures(client: Client) -> None:
    found = await get(client, "services")
    assert found["gateway"]["figures"]["process_resident_memory_bytes"] > 0
    (trainer,), (sampler,) = found["trainers"], found["samplers"]
    assert (trainer["state"], trainer["figures"]) == ("serving", None)  # the fakes have no MetricsService
    assert (sampler["state"], sampler["engine"], sampler["figures"]) == ("serving", "fake", None)


async def test_the_metrics_service_gives_what_the_page_reads() -> None:
    reply = await MetricsServicer(new_registry()).GetMetrics(metrics_pb2.GetMetricsRequest(), None)  # type: ignore[arg-type]
    assert parse_figures(reply.exposition)["process_resident_memory_bytes"] > 0
    assert not [name for name in parse_figures(reply.exposition) if name.startswith("python_gc")]


@pytest.mark.parametrize("path", ["runs/none", "runs/none/history", "runs/none/samples"])
async def test_an_unknown_run_is_404(client: Client, path: str) -> None:
    assert "'none'" in (await get(client, path, status=404))["detail"]


@pytest.mark.parametrize("query", [{"after": "-1"}, {"after": "x"}, {"steps": "1" * 20}], ids=str)
async def test_a_malformed_number_is_named(client: Client, query: dict[str, str]) -> None:
    run_id = await client.model(await client.session())
    assert next(iter(query)) in (await get(client, f"runs/{run_id}/history", status=400, **query))["detail"]


# Access


@pytest.mark.parametrize(("path", "name"), [("samples", "after"), ("history", "after"), ("history", "steps")])
async def test_numbers_that_no_column_holds_are_refused_by_name(client: Client, path: str, name: str) -> None:
    """PostgreSQL takes no larger number for a column of 32 bits."""
    run_id = await client.model(await client.session())
    refused = await get(client, f"runs/{run_id}/{path}", status=400, **{name: 2**31})
    assert refused["detail"] == f"{name}: '2147483648' is not a number from 0 to 2147483647"
    await get(client, f"runs/{run_id}/{path}", **{name: 2**31 - 1})


@pytest.mark.gateway(api_keys=["tml-right"])
async def test_keys_are_needed_for_data_and_not_for_the_page(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as http:
        for path in ("overview", "services", "sessions", f"runs/{RUN}", f"runs/{RUN}/history", f"runs/{RUN}/samples"):
            await get(http, path, status=401)
        await get(http, f"checkpoints/{RUN}/weights/x/download", status=401)
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/dashboard/static/main.js")).status_code == 200
        http.headers["x-api-key"] = "tml-right"
        assert (await get(http, "overview"))["needs_key"]


@pytest.mark.gateway(api_keys=["tml-mine", "tml-other"])
async def test_another_owner_sees_nothing_of_a_run(stack: Stack) -> None:
    mine, other = (
        Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) for key in ("tml-mine", "tml-other")
    )
    async with mine, other:
        run_id = await sampled_run(mine)
        await stack.gateway.dashboard.flush()
        assert len((await get(mine, f"runs/{run_id}/samples"))["samples"]) == 2
        assert (await get(other, "overview"))["runs"] == []
        assert (await get(other, "sessions"))["sessions"] == []
        for path in ("", "/history", "/samples"):
            await get(other, f"runs/{run_id}{path}", status=404)
        await get(other, f"checkpoints/{run_id}/sampler_weights/p/download", status=404)


@pytest.mark.gateway(api_keys=["tml-mine", "tml-other"])
async def test_strangers_who_sample_a_published_checkpoint_keep_their_prompts_to_themselves(stack: Stack) -> None:
    mine, other = (
        Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) for key in ("tml-mine", "tml-other")
    )
    async with mine, other:
        run_id = await sampled_run(mine)
        published = f"/api/v1/training_runs/{run_id}/checkpoints/sampler_weights/p/publish"
        assert (await mine.post(published)).status_code == 200
        sampler_id = await other.sampling_session(
            await other.session(), model_path=f"tinker://{run_id}/sampler_weights/p"
        )
        await other.result(await other.call("asample", sample_body(sampler_id, 1)))
        await stack.gateway.dashboard.flush()
        assert len((await get(mine, f"runs/{run_id}/samples"))["samples"]) == 2


# The page


async def test_the_page_allows_nothing_but_its_own_files(client: Client) -> None:
    for path in ("/", "/dashboard/static/main.js", "/dashboard/static/style.css"):
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert (await client.get("/dashboard/static/../../auth.py")).status_code == 404
    assert (await client.get("/dashboard/static/%2e%2e/routes.py")).status_code == 404


def test_the_pages_own_files_put_in_text_as_text_and_ask_no_one_else() -> None:
    for file in [*STATIC.glob("*.js"), *STATIC.glob("*.html"), *STATIC.glob("*.css")]:
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|style=", text), file.name
        assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}, file.name


def test_the_vendored_charts_come_with_their_licence() -> None:
    assert "MIT" in (STATIC / "vendor" / "uplot" / "LICENSE").read_text()
    assert "v1.6.32" in (STATIC / "vendor" / "uplot" / "README.md").read_text()
