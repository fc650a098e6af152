"""Budgets by owner, rates by key: what is refused, what waits, and what is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from gateway.database.catalog import Catalog
from gateway.database.outages import DatabaseUnusable
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import CountedOperation
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.tenants import limits
from gateway.tenants.access import Caller
from gateway.tenants.keys import Keys
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Bucket, Limits
from tests.support.waiting import until
from tests.unit.gateway.commits import commits, lost
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.talking import TalkingSampler
from tinsmith.errors import BudgetExceeded, RateLimited
from tinsmith.v1 import sampler_pb2, types_pb2

pytestmark = pytest.mark.gateway(sampler=TalkingSampler, openai_wait_s=0.3, long_poll_s=0.2)

ADA = Caller("ada", "a" * 12)
_BATCH, _PROMPT = 3, 3
"""Tokens of the batches and prompts of tests.unit.gateway.stack."""


@pytest.fixture
async def store(stack: Stack) -> AsyncIterator[Store]:
    """Another gateway's, on the same database."""
    store = Store(f"sqlite+aiosqlite:///{stack.state_dir / 'gateway.db'}", Metrics())
    yield store
    await store.close()


def gateway(stack: Stack) -> Gateway:
    assert stack.server is not None
    return stack.server.app.state.gateway


async def client_of(stack: Stack, key: str) -> Client:
    await gateway(stack).tenants.callers.read()
    await gateway(stack).tenants.limits.refresh()
    return Client(base_url=stack.url, timeout=20, headers={"x-api-key": key})


def sample(num_prompt: int, *, max_tokens: int, num_samples: int = 1) -> sampler_pb2.SampleRequest:
    request = sampler_pb2.SampleRequest(num_samples=num_samples)
    request.prompt.append(types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=bytes(4 * num_prompt))))
    request.sampling_params.max_tokens = max_tokens
    return request


async def limited(store: Store, **budget: int | None) -> tuple[Limits, Ledger, Keys]:
    keys, ledger = Keys(store), Ledger(store)
    await keys.set_budget("ada", budget)
    made = Limits(keys, ledger, context_length=lambda _: 100, counting=lambda _: None, max_checkpoints=100)
    await made.refresh()
    return made, ledger, keys


# Budgets


async def test_past_the_token_budget_training_and_sampling_fail_and_reads_go_on(stack: Stack) -> None:
    keys = gateway(stack).tenants.keys
    key, _ = await keys.create("ada")
    await keys.set_budget("ada", {"tokens": 2 * _BATCH + 1})
    async with await client_of(stack, key) as client:
        session_id = await client.session()
        model_id = await client.model(session_id)
        sampler_id = await client.sampling_session(session_id, base_model=BASE_MODEL)
        for seq_id in (1, 2):
            assert isinstance(await client.result((await client.forward_backward(model_id, seq_id)).json()), bytes)
        refused = await client.result((await client.forward_backward(model_id, 3)).json())
        assert refused["category"] == "user"
        assert "the token budget of 'ada' does not allow this request: 6 of 7 tokens" in refused["error"]
        again = await client.result((await client.forward_backward(model_id, 3)).json())
        assert again == refused
        drawn = await client.result(await client.call("asample", sample_body(sampler_id, 0)))
        assert drawn["category"] == "user"
        assert "token budget" in drawn["error"]
        for is_stream in (False, True):
            body = {"model": BASE_MODEL, "prompt": "the", "max_tokens": 9, "stream": is_stream}
            completed = await client.post("/v1/completions", json=body)
            assert (completed.status_code, completed.json()["error"]["code"]) == (403, "budget_exceeded")
        # The order of the run goes on, and what is there can be read, saved and deleted.
        saved = await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 4, "path": "w"}))
        assert saved["path"] == f"tinker://{model_id}/weights/w"
        await client.call("weights_info", {"tinker_path": saved["path"]})
        assert (await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/w")).status_code == 200
        await keys.set_budget("ada", {"tokens": None})
        await gateway(stack).tenants.limits.refresh()
        assert isinstance(await client.result((await client.forward_backward(model_id, 5)).json()), bytes)


async def test_the_count_survives_a_restart_and_is_that_of_all_gateways(stack: Stack, store: Store) -> None:
    key, row = await gateway(stack).tenants.keys.create("ada")
    async with await client_of(stack, key) as client:
        model_id = await client.model(await client.session())
        await client.result((await client.forward_backward(model_id, 1)).json())
        await stack.restart_gateway()
        other = Ledger(store)
        other.use("sampling_sample", 40, base_model="m", owner="ada", key_id="")
        await other.flush()
        await gateway(stack).tenants.keys.set_budget("ada", {"tokens": 100})
        await gateway(stack).tenants.limits.refresh()
        assert gateway(stack).ledger.tokens("ada") == 40 + _BATCH
        await client.result((await client.forward_backward(model_id, 2)).json())
        await gateway(stack).ledger.flush()
    account = (await Keys(store).accounts())["ada"]
    assert (account.tokens, account.token_budget) == (40 + 2 * _BATCH, 100)
    by_key = {count.key_id: count.amount for count in await Keys(store).token_counts(["ada"])}
    assert by_key == {"": 40, row.key_hash[:12]: 2 * _BATCH}


async def test_two_gateways_that_count_at_once_lose_nothing(stack: Stack, store: Store) -> None:
    ledgers = [Ledger(store), gateway(stack).ledger]

    async def count(ledger: Ledger) -> None:
        for _ in range(20):
            ledger.use("training", 1, base_model="m", owner="ada")
            ledger.use("sampling_sample", 2, base_model="m", owner="bob")
            await ledger.flush()

    await asyncio.gather(*map(count, ledgers))
    tokens = {owner: account.tokens for owner, account in (await Keys(store).accounts()).items()}
    assert tokens == {"ada": 40, "bob": 80}


async def test_requests_in_work_count_with_their_most_possible_usage(store: Store) -> None:
    made, ledger, _ = await limited(store, tokens=100)
    first = made.sample(ADA, sample(10, max_tokens=50), base_model="m")
    with pytest.raises(RateLimited, match="those in work may use 60, and this one 60"):
        made.sample(ADA, sample(10, max_tokens=50), base_model="m")
    with pytest.raises(BudgetExceeded, match="10 of 100 tokens are used or in work, and it may use 172"):
        made.sample(ADA, sample(91, max_tokens=100, num_samples=9), base_model="m")  # at most to the context's end
    second = made.sample(ADA, sample(10, max_tokens=30), base_model="m")
    ledger.use("sampling_prefill", 10, base_model="m", owner="ada")
    for hold in (first, second, first):
        hold.release()
    assert ledger.tokens("ada") == 10
    with pytest.raises(RateLimited, match=r"10 of 100 tokens are used"):
        made.sample(ADA, sample(1, max_tokens=100), base_model="m")
    await ledger.flush()
    with pytest.raises(BudgetExceeded, match=r"10 of 100 .* it may use 100"):
        made.sample(ADA, sample(1, max_tokens=100), base_model="m").release()
    made.sample(ADA, sample(40, max_tokens=50), base_model="m").release()


@pytest.mark.parametrize("kind", ["training", "sampling", "completion"])
async def test_usage_that_waits_to_be_written_counts_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    keys, ledger, may_write = gateway(stack).tenants.keys, gateway(stack).ledger, asyncio.Event()
    write = ledger.flush
    key, _ = await keys.create("ada")

    async def write_later() -> None:
        await may_write.wait()
        await write()

    async with await client_of(stack, key) as client:
        session_id = await client.session()
        model_id = await client.model(session_id)
        sampler_id = await client.sampling_session(session_id, base_model=BASE_MODEL)

        async def ask(n: int) -> bool:
            if kind == "completion":
                body = {"model": BASE_MODEL, "prompt": "the", "max_tokens": 2}
                return (await client.post("/v1/completions", json=body)).status_code == 200
            if kind == "training":
                reply = await client.forward_backward(model_id, n)
            else:
                reply = await client.post("/api/v1/asample", json=sample_body(sampler_id, n))
            return reply.status_code == 200 and isinstance(await client.result(reply.json()), bytes)

        assert await ask(1)
        amount = ledger.tokens("ada")
        await keys.set_budget("ada", {"tokens": 3 * amount})
        await gateway(stack).tenants.limits.refresh()
        monkeypatch.setattr(ledger, "flush", write_later)
        first = asyncio.create_task(ask(2))
        await until(lambda: ledger.tokens("ada") > amount)
        second = asyncio.create_task(ask(3))
        await until(lambda: ledger.tokens("ada") > 2 * amount or second.done())
        may_write.set()
        assert (await first, await second) == (True, True)
        assert ledger.tokens("ada") == 3 * amount


async def test_training_that_waits_for_another_in_its_order_is_not_told_to_wait_for_it(store: Store) -> None:
    made, _, _ = await limited(store, tokens=100)
    made.operation(ADA, "s:train:0:2", owner="ada", tokens=60)
    with pytest.raises(BudgetExceeded, match="60 of 100 tokens are used or in work, and it may use 60"):
        made.operation(ADA, "s:train:0:1", owner="ada", tokens=60)
    made.operation(Caller("bob", "b" * 12), "t:train:0:1", owner="bob", tokens=10**9)


async def test_usage_whose_write_went_unheard_refuses_nothing_for_good(
    store: Store,
) -> None:
    made, ledger, _ = await limited(store, tokens=100)
    ledger.use("training", 50, base_model="m", owner="ada")
    with commits(store, lost), pytest.raises(DatabaseUnusable):
        await ledger.flush()
    await made.refresh()
    with pytest.raises(RateLimited, match="100 of 100 tokens are used"):
        made.operation(ADA, "s:train:0:1", owner="ada", tokens=50)
    await ledger.flush()
    made.operation(ADA, "s:train:0:1", owner="ada", tokens=50)


async def test_a_budget_can_begin_anew(store: Store) -> None:
    made, ledger, keys = await limited(store, tokens=10)
    ledger.use("training", 10, base_model="m", owner="ada")
    await ledger.flush()
    with pytest.raises(BudgetExceeded):
        made.operation(ADA, "s:train:0:1", owner="ada", tokens=1)
    await keys.set_budget("ada", {}, restart=True)
    await made.refresh()
    made.operation(ADA, "s:train:0:1", owner="ada", tokens=10)


async def test_past_the_storage_quota_saves_fail_until_something_is_deleted(stack: Stack) -> None:
    keys = gateway(stack).tenants.keys
    key, _ = await keys.create("ada")
    await keys.set_budget("ada", {"storage_bytes": 250})
    async with await client_of(stack, key) as client:
        session_id = await client.session()
        model_id = await client.model(session_id)

        async def save(seq_id: int, name: str, **fields: Any) -> Any:
            body = {"model_id": model_id, "seq_id": seq_id, "path": name} | fields
            return await client.result(await client.call("save_weights", body))

        source = (await save(1, "one"))["path"]  # of 100 bytes each
        await save(2, "two")
        refused = await save(3, "three")
        assert refused["category"] == "user"
        assert "the storage quota of 'ada' does not allow this save: 200 of 250 bytes are used" in refused["error"]
        assert "path" in await save(4, "two", overwrite=True)
        copy = {"source_path": source, "destination_project_id": "p"}
        assert "storage quota" in (await client.call("copy_weights", copy, status=403))["detail"]
        imported = await client.post(f"/api/v1/checkpoints/import?base_model={BASE_MODEL}&name=x", content=bytes(100))
        assert imported.status_code == 403
        assert "path" not in await save(5, "four")
        assert (await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/one")).status_code == 200
        assert "path" in await save(6, "four")


async def test_an_import_counts_with_what_it_unpacks_to(stack: Stack) -> None:
    keys = gateway(stack).tenants.keys
    key, _ = await keys.create("ada")
    await keys.set_budget("ada", {"storage_bytes": 299})
    async with await client_of(stack, key) as client:

        async def add(name: str) -> httpx.Response:
            query = {"base_model": BASE_MODEL, "name": name}
            return await client.post("/api/v1/checkpoints/import", params=query, content=bytes(10))  # 150 unpacked

        assert (await add("one")).status_code == 200
        refused = await add("two")
        assert (refused.status_code, refused.json()["detail"]) == (403, "it has 150 bytes")
        assert len(stack.trainer.checkpoints) == 1
        await keys.set_budget("ada", {"storage_bytes": 300})
        await gateway(stack).tenants.limits.refresh()
        answers = await asyncio.gather(add("two"), add("three"))  # one waits for the other, and finds no room
        assert sorted(answer.status_code for answer in answers) == [200, 403]
    assert await keys.stored_bytes("ada") == 300


async def test_an_import_waits_for_a_save_in_work_before_it_says_how_much_room_there_is(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = await limited(gateway(stack).store, storage_bytes=100)
    saving, importing = made.start("ada"), made.start("ada")
    assert await made.store(importing, "tinker://b", num_bytes=10) == 100
    assert await made.store(saving, "tinker://a", num_bytes=40) == 90
    assert await made.store(importing, "tinker://b", num_bytes=None) == 60
    saving.release()
    with pytest.raises(RateLimited, match="any number"):
        await made.store(made.start("ada"), "tinker://c", num_bytes=1)
    importing.release()
    assert await made.store(made.start("ada"), "tinker://c", num_bytes=100) == 100
    assert await made.store(made.start("bob"), "tinker://d", num_bytes=100) is None


def stored(owner: str, name: str, **fields: Any) -> Checkpoint:
    """A checkpoint's row, of 100 bytes."""
    location = f"{owner}:train:0/weights/{name}"
    row = Checkpoint(
        path=f"tinker://{location}", location=location, run_id=f"{owner}:train:0", kind="weights", owner=owner,
        base_model="m", optimizer="adamw", version_id=name, lora_rank=8, train_unembed=True, train_mlp=True,
        train_attn=True, has_optimizer=True, step=1, size_bytes=100, created_at=time.time(), user_metadata={},
    )  # fmt: skip
    for field, value in fields.items():
        setattr(row, field, value)
    return row


async def num_saved(client: Client, model_id: str, *seq_ids: int) -> int:
    """Begins all saves at once. Returns the number that succeeded; the quota refuses the others.

    A save that is told to try again is sent again before the next one, as the SDK does.
    """
    receipts = []
    for seq_id in seq_ids:
        body = {"model_id": model_id, "seq_id": seq_id, "path": f"w{seq_id}"}
        while (reply := await client.post("/api/v1/save_weights", json=body)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        receipts.append(reply.json())
    answers = [await client.result(receipt) for receipt in receipts]
    assert all("path" in answer or "storage quota" in answer["error"] for answer in answers)
    return sum("path" in answer for answer in answers)


@pytest.mark.parametrize(("num_runs", "num_saves"), [(6, 1), (1, 8), (3, 3)])
async def test_the_storage_quota_holds_for_first_saves_at_once(stack: Stack, num_runs: int, num_saves: int) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada")
    await gateway(stack).tenants.keys.set_budget("ada", {"storage_bytes": 250})
    async with await client_of(stack, key) as client:
        session_id = await client.session()
        models = [await client.model(session_id, model_seq_id=n) for n in range(num_runs)]
        saves = [num_saved(client, model_id, *range(1, num_saves + 1)) for model_id in models]
        async with asyncio.timeout(30):
            assert sum(await asyncio.gather(*saves)) == 2  # of 100 bytes each
    assert await gateway(stack).tenants.keys.stored_bytes("ada") == 200


async def test_a_save_of_another_owner_tells_the_size(stack: Stack) -> None:
    keys = gateway(stack).tenants.keys
    (ada, _), (bob, _) = await keys.create("ada"), await keys.create("bob")
    await keys.set_budget("ada", {"storage_bytes": 250})
    async with await client_of(stack, bob) as client:
        assert await num_saved(client, await client.model(await client.session()), 1) == 1
    async with await client_of(stack, ada) as client:
        model_id = await client.model(await client.session())
        stack.trainer.go.clear()
        bodies = [{"model_id": model_id, "seq_id": n, "path": f"w{n}"} for n in (1, 2, 3)]
        receipts = [await client.call("save_weights", body) for body in bodies[:2]]  # both are in work
        waits = await client.call("save_weights", bodies[2], status=429)
        assert "0 of 250 bytes are used, those in work may need 200, and this one needs about 100" in waits["detail"]
        stack.trainer.go.set()
        for receipt in receipts:
            assert "path" in await client.result(receipt)
        assert await num_saved(client, model_id, 3) == 0


async def test_a_save_of_unknown_size_takes_all_the_room_until_it_is_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = await limited(store, storage_bytes=100)
    first, second = made.start("ada"), made.start("ada")
    await made.store(first, "tinker://a", num_bytes=None)
    for num_bytes in (None, 10):
        with pytest.raises(RateLimited, match="the first of its shape is among them"):
            await made.store(second, "tinker://b", num_bytes=num_bytes, request_id="s:train:0:2")
    monkeypatch.setattr(limits, "PATIENCE_S", 0.0)
    with pytest.raises(BudgetExceeded, match="the first of its shape"):
        await made.store(second, "tinker://b", num_bytes=None, request_id="s:train:0:2")
    await made.store(made.start("bob"), "tinker://c", num_bytes=None)
    first.release()
    await made.store(second, "tinker://b", num_bytes=60)
    with pytest.raises(RateLimited, match="those in work may need 60, and this one needs about 60"):
        await made.store(made.start("ada"), "tinker://d", num_bytes=60)
    await made.store(made.start("ada"), "tinker://b", num_bytes=60)  # the same checkpoint needs its room once


async def test_a_size_that_becomes_known_while_a_save_waits_to_be_let_in_counts(store: Store) -> None:
    """Several first saves at once: one whose size had been asked for before the first was stored came in when there
    was room for half of it."""
    made, _, _ = await limited(store, storage_bytes=250)

    async def size() -> int | None:
        async with store.begin() as db:
            return await db.scalar(select(func.max(Checkpoint.size_bytes)))

    async with made._storing["ada"]:
        saving = asyncio.create_task(made.store(made.start("ada"), "tinker://c", num_bytes=size))
        await asyncio.sleep(0)
        for name in ("a", "b"):
            await store.checkpoints.put(stored("ada", name))
    with pytest.raises(BudgetExceeded, match="200 of 250 bytes are used, and it needs about 100"):
        await saving


async def test_a_save_that_is_stored_while_the_sum_is_read_counts_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, keys = await limited(store, storage_bytes=250)
    first, read = made.start("ada"), keys.stored_bytes
    row = stored("ada", "w1")
    await made.store(first, row.path, num_bytes=100)

    async def read_then_stored(owner: str, **arguments: Any) -> int:
        found = await read(owner, **arguments)
        if first.path and await store.checkpoints.put(row):
            first.release()
        return found

    monkeypatch.setattr(keys, "stored_bytes", read_then_stored)
    with pytest.raises(RateLimited, match="0 of 250 bytes are used, those in work may need 100"):
        await made.store(made.start("ada"), "tinker://b", num_bytes=160)
    monkeypatch.undo()
    # Stored, and not yet over.
    again = made.start("ada")
    await made.store(again, row.path, num_bytes=100)
    await made.store(made.start("ada"), "tinker://b", num_bytes=150)


async def test_the_size_of_a_save_is_that_of_its_run_or_of_its_shape(stack: Stack, store: Store) -> None:
    model = Model(model_id="ada:train:0", base_model="m", optimizer="adamw", lora_rank=8)
    model.train_unembed = model.train_mlp = model.train_attn = True
    catalog = Catalog(store)

    async def size(kind: str = "weights") -> int | None:
        return await catalog.size_of_save(model, kind=kind, base_models=["m", "alias"])

    others: list[dict[str, Any]] = [
        {"has_optimizer": False}, {"base_model": "n"}, {"lora_rank": 4}, {"optimizer": "dimuon"}, {"train_mlp": False},
    ]  # fmt: skip
    for number, fields in enumerate(others):
        await store.checkpoints.put(stored("bob", f"x{number}", **fields))
    assert await size() is None
    await store.checkpoints.put(stored("bob", "y", base_model="alias", size_bytes=70))
    assert (await size(), await size("sampler_weights")) == (70, None)
    await store.checkpoints.put(stored("ada", "z", size_bytes=60))
    assert await size() == 60


# Rates


def test_a_bucket_gives_what_a_minute_has_and_lends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    bucket = Bucket(60)
    assert bucket.wait_s() == 0
    bucket.take(90)
    assert bucket.wait_s() == 31  # 30 are owed, and one is wanted
    now += 31
    assert bucket.wait_s() == 0
    now += 3600
    bucket.take(60)
    assert bucket.wait_s() == 1  # it never holds more than a minute's


async def test_requests_past_the_rate_are_told_when_to_come_again(stack: Stack) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", requests_per_minute=3)
    async with await client_of(stack, key) as client:
        session_id = await client.session()
        replies = [await client.get(f"/api/v1/sessions/{session_id}") for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert "requests_per_minute" in replies[-1].json()["detail"]
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 20
        refused = await client.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        # Calls that SDKs make by themselves do not count: no answer is lost, and the session lives.
        await client.call("session_heartbeat", {"session_id": session_id})
        assert (await client.poll("nothing")).status_code == 410
    other, _ = await gateway(stack).tenants.keys.create("ada")
    async with await client_of(stack, other) as client:
        assert (await client.get(f"/api/v1/sessions/{session_id}")).status_code == 200


def optim_step(model_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {}, **fields}


async def test_operations_of_a_model_that_does_not_exist_count_and_leave_no_row(stack: Stack, store: Store) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", requests_per_minute=20)
    async with await client_of(stack, key) as client:
        replies = [await client.post("/api/v1/optim_step", json=optim_step("no:train:0", n)) for n in range(1, 201)]
        statuses = Counter(reply.status_code for reply in replies)
        assert statuses[200] + statuses[429] == 200
        assert 20 <= statuses[200] < 60  # a slow machine gives the bucket time to fill
        assert (await client.forward_backward("no:train:0", 1)).status_code == 429
        refused = await client.result(replies[0].json())
        assert refused["error"] == "model_id: 'no:train:0' cannot be trained: there is no such model"
        assert refused["category"] == "user"
        assert gateway(stack).futures.answer(replies[0].json()["request_id"]) is None
        await stack.restart_gateway()
        async with await client_of(stack, key) as again:
            assert await again.result(replies[0].json()) == refused
            begin = replies[0].json()["request_id"].rpartition(":")[0]
            assert (await again.poll(f"{begin}:nonsense")).status_code == 410
    async with store.begin() as db:
        assert list(await db.scalars(select(Operation))) == []


async def test_another_owner_is_not_told_a_refusal(stack: Stack) -> None:
    (ada, _), (bob, _) = [await gateway(stack).tenants.keys.create(owner) for owner in ("ada", "bob")]
    async with await client_of(stack, ada) as first, await client_of(stack, bob) as second:
        for path, body in (("optim_step", optim_step("no:train:0", 1)), ("asample", sample_body("no:sample:0", 1))):
            receipt = await first.call(path, body)
            assert "there is no" in (await first.result(receipt))["error"]
            assert (await second.poll(receipt["request_id"])).status_code == 410


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"seq_id": 1}),  # no model_id
        ("optim_step", {"model_id": "MODEL", "seq_id": 1, "adam_params": {"eps": "x"}}),
        ("forward_backward", {"model_id": "MODEL", "seq_id": 1}),
        ("forward_backward", [1]),
        ("save_weights", {"model_id": "MODEL", "seq_id": 1, "path": "/"}),
        ("load_weights", {"session_id": "SESSION", "model_seq_id": 7, "path": "tinker://none"}),
        ("load_weights", {"path": 1}),
    ],
)
async def test_refused_requests_count_too(stack: Stack, path: str, body: Any) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", requests_per_minute=5)
    other, _ = await gateway(stack).tenants.keys.create("ada")
    async with await client_of(stack, other) as client:
        session_id = await client.session()
        model_id = await client.model(session_id)
    text = json.dumps(body).replace("MODEL", model_id).replace("SESSION", session_id)
    async with await client_of(stack, key) as client:
        headers = {"content-type": "application/json"}
        replies = [await client.post(f"/api/v1/{path}", content=text, headers=headers) for _ in range(12)]
        statuses = [reply.status_code for reply in replies]
        assert statuses[-1] == 429
        assert 429 not in statuses[:5]


@pytest.mark.parametrize(
    ("method", "path", "leaves"),
    [
        ("GET", "/api/v1/optim_step", 405),
        ("POST", "/api/v1/forward_nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completions", 400),
        ("POST", "/services/tinker-prod/api/v1/create_sampling_session", 400),
        ("GET", "/dashboard/api/checkpoints/RUN/sampler_weights/p/download", 200),
    ],
)
async def test_every_path_that_leaves_a_row_or_is_none_counts(
    stack: Stack, method: str, path: str, leaves: int
) -> None:
    """A download of the dashboard is an event of the audit log, and counted against no rate."""
    key, _ = await gateway(stack).tenants.keys.create("ada", requests_per_minute=5)
    other, _ = await gateway(stack).tenants.keys.create("ada")
    async with await client_of(stack, other) as client:
        model_id = await client.model(await client.session())
        save = {"model_id": model_id, "seq_id": 1, "path": "p"}
        await client.result(await client.call("save_weights_for_sampler", save))
    async with await client_of(stack, key) as client:
        replies = [await client.request(method, path.replace("RUN", model_id)) for _ in range(12)]
        statuses = [reply.status_code for reply in replies]
    assert statuses[0] == leaves, replies[0].text
    assert statuses[-1] == 429
    assert set(statuses[:5]) == {leaves}


async def test_an_operation_past_the_budget_and_a_repeat_count_as_requests(stack: Stack) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", requests_per_minute=6)
    await gateway(stack).tenants.keys.set_budget("ada", {"tokens": 1})
    async with await client_of(stack, key) as client:
        model_id = await client.model(await client.session())  # two requests
        statuses = [(await client.forward_backward(model_id, 1)).status_code for _ in range(3)]
        statuses += [(await client.forward_backward(model_id, seq_id)).status_code for seq_id in range(2, 7)]
    assert statuses[:4] == [200] * 4
    assert statuses[-1] == 429


async def test_training_past_the_rate_keeps_its_order_and_comes_in_after_a_while(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", tokens_per_minute=_BATCH)
    async with await client_of(stack, key) as client:
        model_id = await client.model(await client.session())
        accepted = [(await client.forward_backward(model_id, 2)).json()]
        early = await client.forward_backward(model_id, 1)
        assert early.status_code == 429
        assert "tokens_per_minute" in early.json()["detail"]
        assert int(early.headers["retry-after"]) >= 1
        monkeypatch.setattr(limits, "PATIENCE_S", 0.0)
        accepted.append((await client.forward_backward(model_id, 1)).json())
        for receipt in accepted:
            assert isinstance(await client.result(receipt), bytes)
        assert [each.seq_id for each in _batches(stack, model_id)] == [1, 2]


def _batches(stack: Stack, model_id: str) -> list[Any]:
    from tinsmith.v1 import trainer_pb2

    requests = stack.trainer.models[model_id].requests
    return [trainer_pb2.ForwardBackwardRequest.FromString(requests[n]) for n in sorted(requests) if n]


async def test_a_sample_past_the_rate_is_told_to_slow_down_and_sampled_tokens_count(stack: Stack) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", tokens_per_minute=_PROMPT + 1)
    async with await client_of(stack, key) as client:
        sampler_id = await client.sampling_session(await client.session(), base_model=BASE_MODEL)
        await client.result(await client.call("asample", sample_body(sampler_id, 0)))
        slowed = await client.post("/api/v1/asample", json=sample_body(sampler_id, 1))
        assert slowed.status_code == 429  # on which the SDK sends the same again, for ever
        assert int(slowed.headers["retry-after"]) > 15  # more is owed than the prompt


async def test_an_owner_does_not_take_the_places_of_all(stack: Stack) -> None:
    await stack.restart_gateway(max_pending_samples=3, max_pending_samples_per_owner=2)
    (ada, _), (bob, _) = [await gateway(stack).tenants.keys.create(owner) for owner in ("ada", "bob")]
    async with await client_of(stack, ada) as first, await client_of(stack, bob) as second:
        samplers = [await one.sampling_session(await one.session(), base_model=BASE_MODEL) for one in (first, second)]
        stack.sampler.go.clear()
        receipts = [await first.call("asample", sample_body(samplers[0], n)) for n in (0, 1)]
        refused = await first.call("asample", sample_body(samplers[0], 2), status=429)
        assert "2 samples of 'ada' are in work, which is max_pending_samples_per_owner" in refused["detail"]
        other = await second.call("asample", sample_body(samplers[1], 0))
        full = await second.call("asample", sample_body(samplers[1], 1), status=429)
        assert "3 samples are in work, which is max_pending_samples;" in full["detail"]
        stack.sampler.go.set()
        for client, receipt in ((first, receipts[0]), (first, receipts[1]), (second, other)):
            await client.result(receipt)
        await first.result(await first.call("asample", sample_body(samplers[0], 2)))


# Keys of the database


async def test_a_key_works_within_seconds_and_until_it_is_revoked(stack: Stack, store: Store) -> None:
    """Made and revoked by another process."""
    keys = Keys(store)
    async with httpx.AsyncClient(base_url=stack.url) as http:

        async def status(key: str) -> int:
            return (await http.get("/api/v1/auth/apikey/me", headers={"x-api-key": key})).status_code

        async def until(key: str, expected: int) -> None:
            async with asyncio.timeout(10):
                while await status(key) != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        assert await status("tml-any") == 200
        key, row = await keys.create("ada", name="laptop")
        await until("tml-any", 401)  # with a key there, one is needed
        assert await status(key) == 200
        second, _ = await keys.create("ada", expires_at=time.time() + 3600)
        await until(second, 200)
        expired, _ = await keys.create("ada", expires_at=time.time() - 1)
        await keys.revoke(row.key_hash[:12])
        await until(key, 401)
        assert await status(expired) == 401
        me = (await http.get("/api/v1/auth/apikey/me", headers={"x-api-key": second})).json()
        assert me["key_id"] < 2**53
        await stack.restart_gateway()
        assert [await status(each) for each in (key, second, "tml-any")] == [401, 200, 401]
    rows = {row.key_hash[:12]: row.last_used_at for row in await keys.all()}
    assert sum(at is not None for at in rows.values()) == 2


async def test_an_owner_of_a_configured_key_shares_with_keys_of_the_database(stack: Stack) -> None:
    await stack.restart_gateway(api_keys=[{"key": "tml-conf", "owner": "ada"}, "tml-plain"])
    key, _ = await gateway(stack).tenants.keys.create("ada")
    async with (
        await client_of(stack, key) as stored,
        await client_of(stack, "tml-conf") as configured,
        await client_of(stack, "tml-plain") as plain,
    ):
        model_id = await stored.model(await stored.session())
        await configured.call("get_info", {"model_id": model_id})
        await plain.call("get_info", {"model_id": model_id}, status=404)


async def test_a_jwt_ends_with_the_key_that_it_was_issued_for(stack: Stack) -> None:
    await stack.restart_gateway(jwt_auth=True)
    keys = gateway(stack).tenants.keys
    (key, row), (other, _) = await keys.create("ada"), await keys.create("ada")
    async with await client_of(stack, key) as client:
        token = (await client.call("auth/token", {}))["jwt"]
        headers = {"x-api-key": token}
        assert (await client.get("/api/v1/auth/apikey/me", headers=headers)).status_code == 200
        await keys.revoke(row.key_hash[:12])
        await gateway(stack).tenants.callers.read()
        refused = await client.get("/api/v1/auth/apikey/me", headers=headers)
        assert refused.status_code == 401
        assert "invalid_token" in refused.headers["www-authenticate"]
        mine = await client.get("/api/v1/auth/apikey/me", headers={"x-api-key": other})
        assert mine.status_code == 200


async def test_a_key_that_deletes_itself_is_revoked(stack: Stack) -> None:
    key, _ = await gateway(stack).tenants.keys.create("ada", admin=True)
    async with await client_of(stack, key) as client:
        assert (await client.delete("/api/v1/auth/apikey/me")).status_code == 200
        assert (await client.get("/api/v1/sessions")).status_code == 401
    assert [row.revoked_at is not None for row in await gateway(stack).tenants.keys.all()] == [True]
    admin, _ = await gateway(stack).tenants.keys.create("eve", admin=True)
    async with await client_of(stack, admin) as client:
        entries = (await client.get("/api/v1/audit")).json()["entries"]
    assert [entry["event"] for entry in entries] == ["key_create", "key_revoke", "key_create"]
    assert entries[1]["event_details"]["actor"].endswith(":ada")
    assert key not in str(entries)


async def test_usage_against_a_budget_is_written_before_the_client_has_the_answer(
    stack: Stack, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that is killed thus gives nothing away. Usage without a budget is written within a second."""
    monkeypatch.setattr("gateway.database.write_behind.FLUSH_S", 3600.0)
    await stack.restart_gateway()
    keys = gateway(stack).tenants.keys
    (ada, _), (bob, _) = await keys.create("ada"), await keys.create("bob")
    await keys.set_budget("ada", {"tokens": 1000})
    for key, owner, counts in ((ada, "ada", (_BATCH, _BATCH + _PROMPT + 4)), (bob, "bob", (0, 0))):
        async with await client_of(stack, key) as client:
            session_id = await client.session()
            model_id = await client.model(session_id)
            await client.result((await client.forward_backward(model_id, 1)).json())
            assert sum(row.amount for row in await Keys(store).token_counts([owner])) == counts[0]
            sampler_id = await client.sampling_session(session_id)
            await client.result(await client.call("asample", sample_body(sampler_id, 0)))
            assert sum(row.amount for row in await Keys(store).token_counts([owner])) == counts[1]
            for is_stream in (False, True):
                body = {"model": BASE_MODEL, "prompt": "the", "max_tokens": 2, "stream": is_stream}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                written = sum(row.amount for row in await Keys(store).token_counts([owner]))
                assert written == (gateway(stack).ledger.tokens(owner) if counts[1] else 0)
        async with store.begin() as db:
            marks = list(await db.scalars(select(CountedOperation.seq_id).where(CountedOperation.model_id == model_id)))
        assert marks == ([1] if counts[0] else [])
