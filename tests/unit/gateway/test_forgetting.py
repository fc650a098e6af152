"""Rows that the gateway's database drops after a while, and rows that it holds for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from gateway.database.forgetting import Forgetting
from gateway.database.tables.base import Base
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.history import Span
from gateway.database.tables.operations import CustomLoss, Operation
from gateway.database.tables.samples import SampleMark, SequenceRecord
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.tables.tenants import AuditEvent, CountedOperation, HourlyUsage, LedgerBatch
from gateway.gateway import Gateway
from tests.unit.gateway.commits import Statements
from tests.unit.gateway.stack import Client, Stack, sample_body
from tests.unit.gateway.test_custom_losses import loss

DAY_S = 86400.0


async def count(gateway: Gateway, table: type[Base]) -> int:
    async with gateway.store.begin() as db:
        return await db.scalar(select(func.count()).select_from(table)) or 0


async def change(gateway: Gateway, table: type[Base], **values: Any) -> None:
    async with gateway.store.begin() as db:
        await db.execute(update(table).values(**values))


async def busy_session(client: Client) -> str:
    """With a run, a checkpoint, a sampler, a sample and a custom loss."""
    session_id = await client.session()
    model_id = await client.model(session_id)
    await client.result((await client.forward_backward(model_id, 1)).json())
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 2, "path": "last"}))
    sampler_id = await client.sampling_session(session_id)
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    await client.result(await client.call("create_custom_loss", loss(session_id)))
    return session_id


async def test_only_the_history_of_a_session_that_ended_long_ago_stays(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    session_ids = [await busy_session(client) for _ in range(2)]
    for session_id in session_ids[:1]:
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    long_ago = time.time() - 8 * DAY_S
    for table in (SamplingSession, CustomLoss):
        await change(gateway, table, created_at=long_ago)
    gone = (SamplingSession, SampleMark, CustomLoss)
    await gateway.reaper.forgetting.forget()
    assert [await count(gateway, table) for table in gone] == [2, 2, 2]  # it has only just ended
    async with gateway.store.begin() as db:
        await db.execute(update(Session).where(Session.ended_at.is_not(None)).values(ended_at=long_ago))
    await gateway.reaper.forgetting.forget()
    async with gateway.store.begin() as db:
        left = [*await db.scalars(select(SamplingSession.session_id)), *await db.scalars(select(CustomLoss.session_id))]
    assert left == session_ids[1:] * 2
    assert await count(gateway, SampleMark) == 1
    await gateway.ledger.flush()
    assert [await count(gateway, table) for table in (Session, Model)] == [2, 2]
    assert await count(gateway, HourlyUsage) > 0
    runs = (await client.get("/api/v1/training_runs")).json()["training_runs"]
    assert len(runs) == 2
    assert all(run["last_checkpoint"] for run in runs)


@pytest.mark.gateway(max_spans=2)
async def test_only_the_newest_spans_and_audit_events_of_the_last_time_stay(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    await busy_session(client)
    await gateway.ledger.flush()
    assert await count(gateway, Span) > 2
    before = await count(gateway, AuditEvent)
    assert before > 0
    await gateway.reaper.forgetting.forget()
    assert (await count(gateway, Span), await count(gateway, AuditEvent)) == (2, before)
    await change(gateway, AuditEvent, at=time.time() - 366 * DAY_S)
    await gateway.reaper.forgetting.forget()
    assert await count(gateway, AuditEvent) == 0


async def test_operations_that_were_counted_after_their_models_release_are_forgotten(
    stack: Stack, client: Client
) -> None:
    gateway = stack.gateway
    live, released = [await client.model(await client.session()) for _ in range(2)]
    await gateway.store.models.release(released)
    async with gateway.store.begin() as db:
        await db.execute(update(Model).where(Model.model_id == released).values(released_at=time.time() - 100))
        db.add_all([CountedOperation(model_id=each, seq_id=1) for each in (live, released)])
    await gateway.reaper.forgetting.forget()
    async with gateway.store.begin() as db:
        assert list(await db.scalars(select(CountedOperation.model_id))) == [live]


async def test_batches_of_gateways_that_are_gone_are_forgotten(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    await busy_session(client)
    await gateway.ledger.flush()
    async with gateway.store.begin() as db:
        db.add(LedgerBatch(ledger_id="gone", number=9, written_at=time.time() - 31 * DAY_S))
    await gateway.reaper.forgetting.forget()
    assert await count(gateway, LedgerBatch) == 1


async def test_the_operation_of_a_copy_is_remembered_as_long_as_there_is_the_copy(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    session_id = await busy_session(client)
    body = {"source_path": f"tinker://{session_id}:train:0/weights/last", "session_id": session_id}
    paths = [(await client.call("copy_weights", body | {"model_seq_id": seq}))["tinker_path"] for seq in (1, 2)]
    await gateway.store.operations.add(
        Operation(
            request_id=f"{session_id}:train:1:7",
            model_id=f"{session_id}:train:1",
            kind="save_weights",
            fingerprint="",
            created_at=time.time(),
        )
    )
    run_id = paths[0].removeprefix("tinker://").partition("/")[0]
    assert (await client.delete(f"/api/v1/training_runs/{run_id}/checkpoints/weights/last")).status_code == 200
    before = await count(gateway, Operation)
    await Forgetting(gateway.config, store=gateway.store).forget()
    assert await count(gateway, Operation) == before, "a moment ago"
    await change(gateway, Operation, settled_at=time.time() - DAY_S)
    await change(gateway, Model, released_at=time.time() - DAY_S)
    await Forgetting(gateway.config, store=gateway.store).forget()
    async with gateway.store.begin() as db:
        assert list(await db.scalars(select(Operation.request_id))) == paths[1:]
    assert (await client.call("copy_weights", body | {"model_seq_id": 2}))["tinker_path"] == paths[1]


async def test_refusals_have_a_bound_and_are_deleted_without_reading_other_operations(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, session_id = stack.gateway, await client.session()
    for seq in range(5):
        body = {"session_id": session_id, "model_seq_id": seq, "base_model": "none", "lora_config": {"rank": 8}}
        assert "none" in (await client.result(await client.call("create_model", body)))["error"]
    monkeypatch.setattr("gateway.training.refusals._MAX_KEPT", 2)
    statements = Statements(gateway.store)
    await gateway.training.refusals.forget_old()
    sent = statements.taken()  # by this task: the reaper's first round may run beside it
    async with gateway.store.begin() as db:
        kept = sorted(await db.scalars(select(Operation.request_id)))
        assert kept == [f"{session_id}:train:{seq}:0" for seq in (3, 4)]
        for statement in sent[:2]:
            plan = str(list(await db.execute(text(f"EXPLAIN QUERY PLAN {statement.replace('?', '0')}"))))
            assert "ix_operations_refused_at" in plan, plan
    # A refusal that has gone is given again.
    monkeypatch.setattr("gateway.training.refusals._MAX_KEPT", 0)
    await gateway.training.refusals.forget_old()
    await stack.restart_gateway()
    assert (await client.poll(kept[0])).status_code == 410


# Bounds of each owner


async def bounded(stack: Stack, *rows: Base, most: int = 2, most_record_bytes: int = 2**30) -> Gateway:
    """The gateway with these rows, once it has left each owner the newest ones."""
    bounds = {"max_owner_rows": most, "max_owner_record_bytes": most_record_bytes}
    await stack.restart_gateway(**bounds)
    gateway = stack.gateway
    for table in (Session, Model, Checkpoint, SamplingSession, SampleMark, SequenceRecord, AuditEvent, HourlyUsage):
        async with gateway.store.begin() as db:
            db.add_all([row for row in rows if isinstance(row, table)])
    await gateway.reaper.forgetting.bound_owners()
    return gateway


async def keys(gateway: Gateway, column: Any) -> list[str]:
    return sorted(await gateway.store.all(select(column)))


def past_session(session_id: str, at: float, *, owner: str = "a", is_live: bool = False) -> Session:
    ended_at = None if is_live else at
    times = {"created_at": at, "last_seen_at": time.time() if is_live else at, "ended_at": ended_at}
    return Session(session_id=session_id, owner=owner, tags=[], user_metadata={}, **times)


def past_run(session_id: str, at: float, *, seq: int = 0, **columns: Any) -> Model:
    facts: dict[str, Any] = {"lora_rank": 8, "released_at": at, "base_model": "m", "optimizer": "adamw"}
    run_id = f"{session_id}:train:{seq}"
    return Model(model_id=run_id, session_id=session_id, user_metadata={}, created_at=at, **(facts | columns))


def kept(run_id: str, *, owner: str = "a") -> Checkpoint:
    return Checkpoint(
        path=f"tinker://{run_id}/weights/x",
        location="",
        run_id=run_id,
        kind="weights",
        owner=owner,
        base_model="m",
        version_id="",
        lora_rank=8,
        train_unembed=True,
        train_mlp=True,
        train_attn=True,
        has_optimizer=True,
        step=1,
        size_bytes=1,
        created_at=1.0,
        user_metadata={},
    )


@pytest.mark.usefixtures("either_database")
async def test_each_owner_keeps_the_newest_ended_sessions_and_runs_and_all_with_checkpoints(stack: Stack) -> None:
    sessions = [past_session(f"s{n}", float(n)) for n in range(1, 7)]
    runs = [past_run(f"s{n}", float(n)) for n in range(1, 7)]
    gateway = await bounded(stack, *sessions, *runs, kept("s1:train:0"), past_session("other", 0.0, owner="b"))
    assert await keys(gateway, Model.model_id) == ["s1:train:0", "s5:train:0", "s6:train:0"]
    assert await keys(gateway, Session.session_id) == ["other", "s1", "s3", "s4", "s5", "s6"], "two of them are empty"
    await gateway.store.checkpoints.delete("tinker://s1:train:0/weights/x", version_id="")
    await gateway.reaper.forgetting.bound_owners()
    assert await keys(gateway, Model.model_id) == ["s5:train:0", "s6:train:0"]
    assert await keys(gateway, Session.session_id) == ["other", "s3", "s4", "s5", "s6"]


@pytest.mark.usefixtures("either_database")
async def test_an_owner_who_starts_runs_without_end_loses_nothing_that_lives(stack: Stack) -> None:
    """Runs that were freed or refused go first; those that live, those that samplers follow and new ones stay."""
    now, live = time.time(), past_session("s", 1.0, is_live=True)
    follower = SamplingSession(
        sampling_session_id="s:sample:0",
        session_id="s",
        base_model="m",
        version_id="v",
        location="l",
        created_at=1.0,
        inflight_run_id="s:train:1",
    )
    runs = [past_run("s", float(seq), seq=seq) for seq in range(6)]
    runs[0].released_at = None
    runs[2].released_at = runs[2].lora_rank = None
    refused_now = past_run("s", now, seq=6, released_at=None, lora_rank=None)
    gateway = await bounded(stack, live, follower, *runs, refused_now)
    assert await keys(gateway, Model.model_id) == [f"s:train:{seq}" for seq in (0, 1, 4, 5, 6)]
    assert await keys(gateway, Session.session_id) == ["s"]


@pytest.mark.usefixtures("either_database")
async def test_refused_creations_of_a_live_session_are_bounded_an_hour_later(stack: Stack) -> None:
    """Within the hour they may be in work."""
    refused: dict[str, Any] = {"released_at": None, "lora_rank": None}
    now, live = time.time(), past_session("s", 1.0, is_live=True)
    runs = [past_run("s", now - 3700 + seq, seq=seq, **refused) for seq in range(6)]
    in_work = [past_run("s", now - 3000 + seq, seq=seq, **refused) for seq in range(6, 12)]
    gateway = await bounded(stack, live, *runs, *in_work)
    left = {f"s:train:{seq}" for seq in (4, 5, *range(6, 12))}
    assert set(await keys(gateway, Model.model_id)) == left


@pytest.mark.usefixtures("either_database")
async def test_a_session_stays_as_long_as_there_is_a_copy_in_it_or_a_sampler(stack: Stack) -> None:
    """The copy has no row of a run: that of a run which was made without a gateway has none, either."""
    sampler = SamplingSession(
        sampling_session_id="s2:sample:0",
        session_id="s2",
        base_model="m",
        version_id="",
        location="",
        created_at=time.time(),
    )
    sessions = [past_session(f"s{n}", float(n)) for n in range(1, 7)]
    gateway = await bounded(stack, *sessions, kept("s1:train:0"), sampler)
    assert await keys(gateway, Session.session_id) == ["s1", "s2", "s5", "s6"]


def sampler(session_id: str, at: float) -> SamplingSession:
    facts = {"base_model": "m", "version_id": "", "location": "", "created_at": at}
    return SamplingSession(sampling_session_id=f"{session_id}:sample:0", session_id=session_id, **facts)


@pytest.mark.usefixtures("either_database")
async def test_each_owner_keeps_the_progress_of_the_newest_clients_that_sample(stack: Stack) -> None:
    def client(session_id: str, number: int) -> SampleMark:
        low = number * 10**9
        return SampleMark(sampling_session_id=f"{session_id}:sample:0", clone_id=number, low=low, high=low + 99)

    sessions = [past_session(name, 1.0, owner=name[0], is_live=True) for name in ("a1", "a2", "b1")]
    samplers = [sampler("a1", 1.0), sampler("a2", 2.0), sampler("b1", 0.0)]
    clients = [client("a1", 7), client("a1", 8), *(client("a2", n) for n in (1, 2, 3)), client("b1", 0)]
    gateway = await bounded(stack, *sessions, *samplers, *clients, most=3)
    left = await gateway.store.rows(select(SampleMark.sampling_session_id, SampleMark.clone_id))
    assert sorted(map(tuple, left)) == [("a2:sample:0", n) for n in (1, 2, 3)] + [("b1:sample:0", 0)]
    gateway = await bounded(stack, most=2)
    assert await gateway.store.all(select(SampleMark.clone_id).order_by(SampleMark.clone_id)) == [0, 2, 3]


@pytest.mark.usefixtures("either_database")
async def test_each_owner_keeps_the_recorded_sequences_that_were_used_last_up_to_a_number_of_bytes(
    stack: Stack,
) -> None:
    def record(session_id: str, number: int, *, num_tokens: int = 1000) -> SequenceRecord:
        texts = {"prompt": b"", "tokens": b"tokn" * num_tokens, "logprobs": b"logp" * num_tokens}
        times = {"version_id": "", "expires_at": time.time() + 1000 + number}
        return SequenceRecord(sequence_id=f"{session_id}:{number}", session_id=session_id, **texts, **times)

    sessions = [past_session("a1", 1.0, is_live=True), past_session("a2", 1.0), past_session("b1", 1.0, owner="b")]
    records = [record("a1", n) for n in (1, 4)] + [record("a2", n) for n in (2, 3)] + [record("b1", 0)]
    gateway = await bounded(stack, *sessions, *records, most_record_bytes=3 * 8256)
    assert await keys(gateway, SequenceRecord.sequence_id) == ["a1:4", "a2:2", "a2:3", "b1:0"]
    gateway = await bounded(stack, most_record_bytes=3 * 8256 - 1)
    assert await keys(gateway, SequenceRecord.sequence_id) == ["a1:4", "a2:3", "b1:0"]


@pytest.mark.usefixtures("either_database")
async def test_each_owner_keeps_the_newest_entries_of_the_audit_log(stack: Stack) -> None:
    now = time.time()

    def entry(owner: str, at: float) -> AuditEvent:
        return AuditEvent(at=now + at, owner=owner, category="projects", event=f"{owner}{at:g}", details={})

    entries = [entry("a", float(n)) for n in range(5)] + [entry("b", 0.0), entry("b", 1.0)]
    gateway = await bounded(stack, *entries)
    assert await keys(gateway, AuditEvent.event) == ["a3", "a4", "b0", "b1"]


@pytest.mark.usefixtures("either_database")
async def test_usage_of_many_sessions_is_summed_up_from_the_oldest_hours_on_and_no_amount_changes(stack: Stack) -> None:
    def used(hour: int, session_id: str, kind: str = "training", amount: int = 1, owner: str = "a") -> HourlyUsage:
        return HourlyUsage(hour=hour, owner=owner, session_id=session_id, base_model="m", kind=kind, amount=amount)

    rows = [used(hour, f"s{n}", amount=10 * hour + n) for hour in (1, 2, 3) for n in range(2)]
    rows += [used(1, "s0", "sampling_sample", 7), used(1, "", "storage", 5), used(1, "", amount=100)]
    rows += [used(1, "s0", owner="b")]
    gateway = await bounded(stack, *rows)
    facts = (HourlyUsage.owner, HourlyUsage.hour, HourlyUsage.session_id, HourlyUsage.kind, HourlyUsage.amount)
    left = sorted(map(tuple, await gateway.store.rows(select(*facts))))
    assert left == [
        ("a", 1, "", "sampling_sample", 7),
        ("a", 1, "", "storage", 5),
        ("a", 1, "", "training", 100 + 10 + 11),
        ("a", 2, "", "training", 20 + 21),
        ("a", 3, "s0", "training", 30),
        ("a", 3, "s1", "training", 31),
        ("b", 1, "s0", "training", 1),
    ]
    await gateway.reaper.forgetting.bound_owners()
    assert sorted(map(tuple, await gateway.store.rows(select(*facts)))) == left


@pytest.mark.gateway(max_owner_rows=2)
async def test_an_owner_has_no_more_checkpoints_than_its_bound_and_may_replace_them(client: Client) -> None:
    model_id = await client.model(await client.session())

    async def save(seq_id: int, name: str, **fields: Any) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, **fields}
        return await client.result(await client.call("save_weights", body))

    assert "path" in await save(1, "a")
    assert "path" in await save(2, "b")
    refused = (await save(3, "c"))["error"]
    assert "'local' has 2 checkpoints, and may have at most 2 (max_owner_rows); delete some" in refused
    assert "path" in await save(4, "b", overwrite=True)
    source = f"tinker://{model_id}/weights/a"
    copied = await client.call("copy_weights", {"source_path": source, "destination_project_id": "p"}, status=403)
    assert "may have at most 2" in copied["detail"]
    assert (await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/a")).status_code == 200
    assert "path" in await save(5, "c")


@pytest.mark.gateway(max_owner_rows=2)
async def test_an_owner_has_no_more_custom_losses_than_its_bound(client: Client) -> None:
    for _ in range(2):
        made = await client.result(await client.call("create_custom_loss", loss(await client.session())))
        assert "loss_id" in made
    refused = await client.result(await client.call("create_custom_loss", loss(await client.session())))
    assert "the sessions of 'local' have 2 custom losses, and may have 2 in all (max_owner_rows)" in refused["error"]
