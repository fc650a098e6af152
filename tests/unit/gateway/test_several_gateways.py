"""Two gateways behind one database, on SQLite and on PostgreSQL, and requests that go to one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError

from gateway.config import GatewayConfig
from gateway.database.outages import DatabaseUnusable
from gateway.database.tables.gateways import GatewayRow, Lease
from gateway.gateway import Gateway, StartError
from gateway.ids import target_of
from gateway.sampling.suspects import Suspects
from tests.support.postgres import Postgres
from tests.support.waiting import until
from tests.unit.gateway.several import Several, client_of
from tests.unit.gateway.stack import Client, Stack, sample_body


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def several(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Several]:
    backends = Stack(tmp_path)
    await backends.trainer_backend.start()
    await backends.sampler_backend.start()
    url = ""
    if request.param == "postgresql":
        cluster: Postgres = request.getfixturevalue("postgres")
        url = await asyncio.to_thread(cluster.new_database)
    several = Several(backends, tmp_path, database_url=url)
    await several.start()
    yield several
    await several.stop()
    await backends.trainer_backend.stop()
    await backends.sampler_backend.stop()
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


@pytest.fixture
async def client(several: Several) -> AsyncIterator[Client]:
    async with client_of(several) as client:
        yield client


async def completions(client: Client, sampler_id: str, cursor: int, **fields: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": 0}
    return await client.call("retrieve_futures", {"target": target, "prev_cursor": cursor, **fields})


async def test_a_run_is_trained_through_both(several: Several, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    receipts = [(await client.forward_backward(model_id, seq_id)).json() for seq_id in (1, 2, 3)]
    assert [type(await client.result(receipt)) for receipt in receipts for _ in range(2)] == [bytes] * 6
    save = {"model_id": model_id, "seq_id": 4, "path": "one"}
    saves = [await client.call("save_weights", save) for _ in range(2)]
    assert saves[0] == saves[1]
    answers = [await client.result(saves[0]) for _ in range(4)]
    assert answers == [{"type": "save_weights", "path": f"tinker://{model_id}/weights/one"}] * 4
    assert several.backends.trainer.orders[model_id] == [0, 1, 2, 3, 4]
    listed = await client.get(f"/api/v1/training_runs/{model_id}/checkpoints")
    assert len(listed.json()["checkpoints"]) == 1


@pytest.mark.parametrize("elsewhere", ["nothing", "batch", "save"])
async def test_a_step_behind_a_failure_runs_if_one_gateway_has_accepted_all_since_the_last_step(
    several: Several, elsewhere: str
) -> None:
    one, other = several.urls
    async with Client(base_url=one, timeout=30) as client, Client(base_url=other, timeout=30) as second:
        model_id = await client.model(await client.session())
        for seq_id, loss_fn in ((1, "ppo"), (2, "cross_entropy"), (3, "cross_entropy")):
            sender = second if (elsewhere, seq_id) == ("batch", 2) else client
            await sender.result((await sender.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json())
        sender = second if elsewhere == "save" else client
        await sender.result(await sender.call("save_weights", {"model_id": model_id, "seq_id": 4, "path": "one"}))
        await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 5, "adam_params": {}}))
    assert several.backends.trainer.failures_seen == [1 if elsewhere == "nothing" else 0]


async def test_a_load_at_either_waits_for_a_save_of_another_run(several: Several, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    several.backends.trainer.go.clear()
    saving = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
    body = {"session_id": session_id, "path": f"tinker://{model_id}/weights/one", "optimizer": False}
    loads = [asyncio.create_task(client.call("load_weights", body | {"model_seq_id": seq})) for seq in (1, 2)]
    await asyncio.sleep(0.3)
    several.backends.trainer.go.set()
    answers = [await client.result(receipt) for receipt in await asyncio.gather(*loads)]
    assert [answer["path"] for answer in answers] == [body["path"]] * 2
    assert (await client.result(saving))["path"] == body["path"]


async def test_a_repeat_at_the_other_is_the_same_and_another_body_conflicts(several: Several, client: Client) -> None:
    model_id = await client.model(await client.session())
    replies = [await client.forward_backward(model_id, 1) for _ in range(3)]
    assert {reply.text for reply in replies} == {replies[0].text}
    for _ in range(2):
        assert (await client.forward_backward(model_id, 1, loss_fn="other")).status_code == 422
    assert several.backends.trainer.orders[model_id] == [0, 1]


async def test_samples_have_one_home_and_any_gateway_answers_for_it(several: Several, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    receipts = [await client.call("asample", sample_body(sampler_id, seq_id)) for seq_id in range(6)]
    assert [len(await client.result(receipt)) for receipt in receipts for _ in range(2)] == [54] * 12
    assert len(several.backends.sampler.requests) == 6
    again = await client.call("asample", sample_body(sampler_id, 5))
    assert again == receipts[5]
    for _ in range(2):
        await client.call("asample", sample_body(sampler_id, 5, num_samples=1), status=422)
        page = await completions(client, sampler_id, 0, timeout=0)
        assert page["cursor"] == 6
        assert {each["request_id"] for each in page["completions"]} == {each["request_id"] for each in receipts}
    several.backends.sampler.go.clear()
    stopped = await client.call("asample", sample_body(sampler_id, 6))
    await client.call("cancel_future", {"request_id": stopped["request_id"]})
    await client.call("cancel_future", {"request_id": stopped["request_id"]})
    assert "cancelled" in (await client.result(stopped))["error"]


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_samples_of_a_gateway_that_is_gone_are_taken_over(
    several: Several, client: Client, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("BEAT_S", 0.2), ("SILENT_S", 1.0), ("FRESH_S", 0.6)):
        monkeypatch.setattr(f"gateway.high_availability.peers.{name}", seconds)
    sampler_id = await client.sampling_session(await client.session())
    several.backends.sampler.go.clear()
    lost = await client.call("asample", sample_body(sampler_id, 0))
    home = next(port for port in several.servers if several.gateway(port).futures.pending(lost["request_id"]))
    polling = asyncio.create_task(client.poll(lost["request_id"]))
    await asyncio.sleep(0.2)
    await several.stop_one(home, leaves=leaves)
    several.backends.sampler.go.set()
    assert (await polling).status_code in (200, 410, 503)  # by which of the two it was answered
    while (reply := await client.poll(lost["request_id"])).status_code == 503:
        pass
    assert reply.status_code == 410
    page = await completions(client, sampler_id, 0)
    assert {"state": "failed", "request_id": lost["request_id"]} in page["completions"]
    again = await client.call("asample", sample_body(sampler_id, 1))
    assert isinstance(await client.result(again), bytes)
    page = await completions(client, sampler_id, page["cursor"])
    assert again["request_id"] in {each["request_id"] for each in page["completions"]}


async def test_one_that_was_taken_for_dead_gives_up_what_others_took_over(
    several: Several, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler_id = await client.sampling_session(await client.session())
    first = await client.call("asample", sample_body(sampler_id, 0))
    await client.result(first)
    home, other = sorted(
        several.servers, key=lambda port: several.gateway(port).futures.answer(first["request_id"]) is None
    )
    peers = several.gateway(home).peers
    monkeypatch.setattr("gateway.high_availability.peers.FRESH_S", 0.0)
    async with several.gateway(other).store.begin() as db:
        await db.execute(delete(GatewayRow).where(GatewayRow.gateway_id == peers.gateway_id))
    several.gateway(other).sampling.forwarding._known.clear()
    receipts = [await client.call("asample", sample_body(sampler_id, seq_id)) for seq_id in (1, 2, 3, 4)]
    for receipt in receipts:
        assert isinstance(await client.result(receipt), bytes)
    futures = [several.gateway(port).futures for port in (home, other)]
    held = [sum(each.answer(receipt["request_id"]) is not None for receipt in receipts) for each in futures]
    assert sorted(held) == [0, 4]
    assert peers.url_of(peers.gateway_id) is not None


async def test_deaths_are_read_when_samples_of_a_dead_gateway_are_taken_over_and_at_no_other_time(
    several: Several, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, fails = 0, True
    read = Suspects.read

    async def counted(self: Suspects) -> None:
        nonlocal num_read
        num_read += 1
        if fails:
            raise DatabaseUnusable("away")
        await read(self)

    monkeypatch.setattr(Suspects, "read", counted)
    sampler_id = await client.sampling_session(await client.session())
    first = await client.call("asample", sample_body(sampler_id, 0))
    await client.result(first)
    assert num_read == 0
    gateways = [several.gateway(port) for port in several.servers]
    home, other = sorted(gateways, key=lambda each: each.futures.answer(first["request_id"]) is None)
    target, forwarding = target_of(first["request_id"]), other.sampling.forwarding
    assert target is not None
    assert forwarding is not None
    async with other.store.begin() as db:
        await db.execute(delete(GatewayRow).where(GatewayRow.gateway_id == home.peers.gateway_id))
    for _ in range(2):
        with pytest.raises(DatabaseUnusable):
            await forwarding._find(target, is_new=False)
    fails = False
    await forwarding._find(target, is_new=False)
    await forwarding._find(target, is_new=False)
    assert num_read == 3


async def test_gateways_whose_database_was_away_do_not_take_each_other_for_dead(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (several.gateway(port).peers for port in several.servers)
    for _ in range(2):
        await one.beat()
    later = time.monotonic() + 60  # nobody has raised a number since
    monkeypatch.setattr("gateway.high_availability.peers.time", SimpleNamespace(monotonic=lambda: later))
    await one.beat()
    assert one.url_of(other.gateway_id) is not None


async def test_refusals_are_told_by_both(client: Client) -> None:
    session_id = await client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "none", "lora_config": {"rank": 8}}
    receipts = [
        await client.call("create_model", body),
        await client.call("optim_step", {"model_id": "nobody:train:0", "seq_id": 1, "adam_params": {}}),
        await client.call("asample", sample_body("nobody:sample:0", 1)),
        await client.call("asample", sample_body("nobody", 1)),
        await client.call(
            "create_custom_loss",
            {"session_id": session_id, "custom_loss_seq_id": 0, "name": "bad", "inputs": [], "graph": {}},
        ),
    ]
    for receipt in receipts:
        answers = [await client.result(receipt) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["category"] == "user"


async def test_operations_without_a_seq_id_are_numbered_by_both_in_turn(several: Several, client: Client) -> None:
    """Equal ones too: each is an operation of its own."""
    model_id = await client.model(await client.session())
    steps = [client.call("optim_step", {"model_id": model_id, "adam_params": {}}) for _ in range(12)]
    receipts = await asyncio.gather(*steps)
    assert sorted(receipt["request_id"] for receipt in receipts) == sorted(f"{model_id}:{n}" for n in range(1, 13))
    for receipt in receipts:
        assert "metrics" in await client.result(receipt)
    assert several.backends.trainer.orders[model_id] == list(range(13))


async def test_an_operation_is_numbered_once_no_living_gateway_numbers_one_of_its_model(
    several: Several, client: Client
) -> None:
    model_id = await client.model(await client.session())
    work, (one, other) = f"numbers of {model_id}", map(several.gateway, several.servers)
    async with Client(base_url=several.urls[0], timeout=30) as client:
        async with other.peers.alone(work):
            sending = asyncio.create_task(client.call("optim_step", {"model_id": model_id, "adam_params": {}}))
            await asyncio.sleep(0.3)
            assert not sending.done()
        assert (await sending)["request_id"] == f"{model_id}:1"
        await one.store.run(one.store.insert(Lease).values(name=work, holder="one that has died"))
        receipt = await client.call("optim_step", {"model_id": model_id, "adam_params": {}})
        assert receipt["request_id"] == f"{model_id}:2"


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before the gateways, which sleep from one to the next."""
    for module in ("high_availability.peers", "reaper"):
        monkeypatch.setattr(f"gateway.{module}.BEAT_S", 0.2)


@pytest.fixture
def no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before the gateways."""
    monkeypatch.setattr("gateway.high_availability.peers.BEAT_S", 1000)


async def test_a_lease_that_could_not_be_given_back_is_given_back_with_the_next_beat(
    no_beats: None, monkeypatch: pytest.MonkeyPatch, several: Several
) -> None:
    one, other = (several.gateway(port) for port in several.servers)
    with monkeypatch.context() as outage:
        async with one.peers.alone("work"):
            outage.setattr(one.store, "run", AsyncMock(side_effect=SQLAlchemyError("the connection is lost")))
    assert not await other.peers.has_lease("work")
    await one.peers.beat()
    assert await other.peers.has_lease("work")


async def test_a_session_that_ends_at_one_ends_at_both(quick_beats: None, several: Several, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = await client.sampling_session(session_id)
    for seq_id in range(2):
        await client.result(await client.call("asample", sample_body(sampler_id, seq_id)))
    several.backends.trainer.go.clear()
    save = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "last"})
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await asyncio.sleep(1.5)  # several rounds of both
    assert several.backends.trainer.deleted_models == []  # one of them waits for its last save
    for _ in range(2):
        receipt = await client.call("asample", sample_body(sampler_id, 9))
        assert "has ended" in (await client.result(receipt))["error"]
    several.backends.trainer.go.set()
    assert (await client.result(save))["path"] == f"tinker://{model_id}/weights/last"
    async with asyncio.timeout(20):
        await several.backends.trainer.deletion.wait()
    assert several.backends.trainer.deleted_models == [model_id]


async def test_a_run_that_is_ended_at_one_takes_nothing_more_at_either(several: Several, client: Client) -> None:
    model_id = await client.model(await client.session())
    for seq_id in (1, 2):  # each gateway has the run in memory
        await client.result((await client.forward_backward(model_id, seq_id)).json())
    several.backends.trainer.go.clear()
    save = await client.call("save_weights", {"model_id": model_id, "seq_id": 3, "path": "last"})
    await client.call("unload_model", {"model_id": model_id})
    for seq_id in (4, 5):
        reply = await client.forward_backward(model_id, seq_id)
        assert "the run has ended" in (await client.result(reply.json()))["error"]
    several.backends.trainer.go.set()
    assert (await client.result(save))["path"] == f"tinker://{model_id}/weights/last"


async def test_an_inflight_save_at_one_moves_new_samples_of_both(several: Several, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    save = {"model_id": model_id, "kind": "inflight"}
    await client.result(await client.call("save_weights_for_sampler", save | {"seq_id": 1, "path": "a"}))
    path = f"tinker://{model_id}/sampler_weights/a"
    samplers = [await client.sampling_session(session_id, seq=n, model_path=path) for n in range(2)]
    for seq_id in (2, 3):
        for sampler_id in samplers:
            await client.result(await client.call("asample", sample_body(sampler_id, 10 * seq_id)))
        body = save | {"seq_id": seq_id, "path": f"b{seq_id}"}
        await client.result(await client.call("save_weights_for_sampler", body))
        for sampler_id in samplers:
            await client.result(await client.call("asample", sample_body(sampler_id, 10 * seq_id + 1)))
            assert several.backends.sampler.requests[-1].version_id == f"{model_id}@{seq_id}"


async def test_usage_is_counted_once(several: Several, client: Client) -> None:
    model_id = await client.model(await client.session())
    receipt = (await client.forward_backward(model_id, 1)).json()
    for _ in range(4):
        await client.result(receipt)
    gateways = [several.gateway(port) for port in several.servers]
    for gateway in gateways:
        await gateway.ledger.flush()
    events, _ = await gateways[0].tenants.billing.usage(0, 10**7, owner=None)
    training = [event["event_info"]["token_count"] for event in events if event["event_info"]["type"] == "training"]
    assert training == [3]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_save_is_written_down_though_its_gateway_is_gone_and_nobody_asks(
    several: Several, client: Client, fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the database fails in the middle of that, and where it was gone before the other one saw it."""
    model_id = await client.model(await client.session())
    several.backends.trainer.go.clear()
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
    gone = next(port for port in several.servers if several.gateway(port).futures.pending(receipt["request_id"]))
    await several.stop_one(gone)
    (port,) = several.servers
    gateway = several.gateway(port)
    if fails:
        get, failed = gateway.store.models.get, asyncio.Event()

        async def fail_first(model_id: str) -> Any:
            if not failed.is_set():
                failed.set()
                raise DatabaseUnusable("database is locked")
            return await get(model_id)

        monkeypatch.setattr(gateway.store.models, "get", fail_first)
    gateway.reaper._wake.set()
    await until(lambda: gateway.futures.pending(receipt["request_id"]))
    pending = gateway.futures.pending(receipt["request_id"])
    caplog.clear()
    assert pending is not None
    assert pending.task is not None
    several.backends.trainer.go.set()
    await pending.task
    assert await gateway.store.checkpoints.get(f"tinker://{model_id}/weights/one") is not None


async def test_a_deletion_is_repeated_at_the_other(client: Client) -> None:
    model_id = await client.model(await client.session())
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"}))
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/one"
    replies = [await client.delete(url, headers={"x-idempotency-key": "k"}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert (await client.delete(url)).status_code == 404


async def test_one_reaps(several: Several) -> None:
    leads = [await several.gateway(port).peers.has_lease("reaper") for port in several.servers]
    assert sorted(leads) == [False, True]
    await several.stop_one(list(several.servers)[leads.index(True)])
    (port,) = several.servers
    assert await several.gateway(port).peers.has_lease("reaper")


async def test_a_gateway_that_others_cannot_reach_does_not_start_beside_them(
    several: Several, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (port, _) = several.servers
    url = several.gateway(port).config.database_url
    alone = Gateway(GatewayConfig(state_dir=tmp_path, database_url=url, trainers=[], samplers=[]))
    with pytest.raises(StartError, match="set peer_url"):
        await alone.start()
    await alone.store.close()
