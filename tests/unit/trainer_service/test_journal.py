"""The journal's contract, in both of its forms. test_journal_file.py and test_journal_postgres.py have what only one
form has."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest
from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
from tests.unit.trainer_service.journals import MODEL, Journals, batch, created, done, executed, requests
from tinsmith.errors import (
    DataCorrupted,
    InvalidRequest,
    ModelLost,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability import journal_writer
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database
from trainer_service.durability.records import Body, EntryState, LiveModel


async def test_requests_come_back_whole_and_in_order(journals: Journals) -> None:
    bodies = [created(), *(batch(n) for n in (1, 2, 3))]
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, bodies[0])
        for seq_id in (3, 1, 2):
            await journal.append(MODEL, seq_id, bodies[seq_id])
        assert await requests(journal) == list(enumerate(bodies))
        assert await journal.live_models() == [LiveModel(MODEL, cut_seq_id=-1, snapshot_seq_id=None, last_seq_id=3)]
    assert pb.CreateModelRequest.FromString(bodies[0].unpack()).base_model == "tiny"
    assert pb.ForwardBackwardRequest.FromString(bodies[2].unpack()).seq_id == 2


async def test_results_and_errors_survive_a_restart(journals: Journals) -> None:
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.append(MODEL, 2, batch(2))
        await journal.finish(MODEL, 1, done(0.5))
        await journal.finish(MODEL, 2, InvalidRequest("rank: 0 is wrong", field="rank"))
    async with journals.opened() as journal:
        first, second = await journal.find(MODEL, 1), await journal.find(MODEL, 2)
        assert first is not None
        assert second is not None
        assert first.outcome == done(0.5)
        assert isinstance(second.outcome, InvalidRequest)
        assert second.outcome.metadata == {"field": "rank"}
        assert await journal.find(MODEL, 3) is None


async def test_a_lost_model_says_why_and_so_do_its_unfinished_operations(journals: Journals) -> None:
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(1.0))
        await journal.append(MODEL, 1, batch(1))
        await journal.check_not_lost(MODEL)
        await journal.lose(MODEL, "its snapshot is damaged")
    async with journals.opened() as journal:
        assert await journal.live_models() == []
        finished, unfinished = await journal.find(MODEL, 0), await journal.find(MODEL, 1)
        assert finished is not None
        assert finished.outcome == done(1.0)
        assert unfinished is not None
        assert isinstance(unfinished.outcome, ModelLost)
        with pytest.raises(ModelLost, match="its snapshot is damaged; resume from a checkpoint"):
            await journal.check_not_lost(MODEL)
        await journal.check_not_lost("another")


async def test_a_model_whose_creation_fails_is_not_live(journals: Journals) -> None:
    async with journals.opened() as journal:
        for model_id in (MODEL, "s:train:1"):
            await journal.append(model_id, 0, created())
        await journal.finish(MODEL, 0, InvalidRequest("rank: 0 is wrong"))
        await journal.finish("s:train:1", 0, done(1.0))
        await journal.append("s:train:1", 1, batch(1))
        await journal.finish("s:train:1", 1, InvalidRequest("data: is empty"))
        assert [model.model_id for model in await journal.live_models()] == ["s:train:1"]
        assert (await journal.live_model(MODEL), await journal.live_model("unknown")) == (None, None)
        assert {model.model_id: model.state for model in await journal.summaries()} == {
            MODEL: "failed",
            "s:train:1": "live",
        }


@pytest.mark.parametrize(
    ("snapshot", "last", "covered"),
    [(None, None, False), (None, 0, False), (0, None, True), (0, 0, True), (0, 1, False), (2, 1, True), (2, 2, True)],
)
def test_a_model_is_covered_by_a_snapshot_of_its_newest_operation(
    snapshot: int | None, last: int | None, covered: bool
) -> None:
    assert LiveModel(MODEL, cut_seq_id=-1, snapshot_seq_id=snapshot, last_seq_id=last).is_covered is covered


async def test_counted_bytes_are_those_of_the_database_after_every_call(journals: Journals) -> None:
    """The journal counts its bytes instead of asking the database, and refuses and cuts by these counts."""
    registry = CollectorRegistry()
    journal = await asyncio.to_thread(journals.journal, max_bytes=1 << 16, result_retention_s=60, registry=registry)

    async def check() -> None:
        with pytest.raises(OutOfCapacity) as refused:  # its body is larger than the bound
            await journal.append("large", 0, batch(1, length=40_000))
        entries = [entry for model_id in await journal.model_ids() for entry in await journal.history(model_id)]
        waiting = sum(entry.num_bytes for entry in entries if entry.state is EntryState.ACCEPTED)
        held = sum(model.request_bytes + model.result_bytes for model in await journal.summaries())
        assert f"holds {waiting} bytes of operations that have not run" in str(refused.value)
        assert registry.get_sample_value("trainer_journal_bytes") == held

    for model_id in (MODEL, "other"):
        await journal.append(model_id, 0, created())
        for seq_id in range(1, 7):
            await journal.append(model_id, seq_id, batch(seq_id))
    await check()
    await journal.finish(MODEL, 0, done(1.0))
    await journal.finish(MODEL, 1, done(1.0))
    await check()
    await journal.finish(MODEL, 2, InvalidRequest("rank: 0 is wrong"), keep_body=False)
    await check()
    await journal.finish(MODEL, 3, None)
    await check()
    assert await journal.add_snapshot(MODEL, 1, num_bytes=10) == -1
    assert await journal.add_snapshot(MODEL, 3, num_bytes=10) == 1  # cuts the bodies up to 1
    await check()
    await journal.lose(MODEL, "its snapshot is damaged")
    await check()
    await journal.delete_model("other")
    await check()
    await journal.prune(dry_run=False)
    await check()
    await asyncio.to_thread(journal.close)


async def test_results_that_have_not_expired_survive_a_deletion_on_demand(journals: Journals) -> None:
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(1.0))
        assert (await journal.prune(dry_run=False)).num_results == 0
        found = await journal.find(MODEL, 0)
        assert found is not None
        assert found.outcome == done(1.0)


async def test_waiting_appends_share_one_transaction(journals: Journals) -> None:
    registry = CollectorRegistry()
    journal = await asyncio.to_thread(journals.journal, result_retention_s=60, registry=registry)
    await journal.append(MODEL, 0, created())
    commits = registry.get_sample_value("trainer_journal_commit_seconds_count")
    bodies = [batch(seq_id) for seq_id in range(1, 101)]
    await asyncio.gather(*(journal.append(MODEL, seq_id, body) for seq_id, body in enumerate(bodies, start=1)))
    new_commits = registry.get_sample_value("trainer_journal_commit_seconds_count")
    assert commits is not None
    assert new_commits is not None
    assert new_commits - commits < 50
    assert (registry.get_sample_value("trainer_state_free_bytes") or 0) > 0
    assert len(await requests(journal)) == 101
    await asyncio.to_thread(journal.close)


async def test_an_answer_waits_for_the_next_append_to_share_its_transaction(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "_SHARES_S", 600.0)
    committed: list[int] = []
    commit = journal_writer.Writer._commit
    monkeypatch.setattr(
        journal_writer.Writer, "_commit", lambda self, jobs: (committed.append(len(jobs)), commit(self, jobs))
    )
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, created())
        answer = asyncio.create_task(journal.finish(MODEL, 0, done(1.0)))
        await asyncio.sleep(0.05)  # the writer has it
        assert not answer.done()
        await journal.append(MODEL, 1, batch(1))
        await answer
        assert committed == [1, 2]
        last = asyncio.create_task(journal.finish(MODEL, 1, done(2.0)))
        await asyncio.sleep(0.05)
    await last  # the end waits for nothing more
    async with journals.opened() as journal:
        assert [entry.state for entry in await journal.history(MODEL)] == [EntryState.DONE, EntryState.DONE]


async def test_bodies_are_cut_behind_the_snapshot_before_the_newest(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, range(5))
        assert await journal.add_snapshot(MODEL, 2, num_bytes=10) == -1
        assert [seq_id for seq_id, _ in await requests(journal)] == [0, 1, 2, 3, 4]
        assert await journal.add_snapshot(MODEL, 4, num_bytes=10) == 2
        assert [seq_id for seq_id, _ in await requests(journal)] == [3, 4]
        assert await journal.live_models() == [LiveModel(MODEL, cut_seq_id=2, snapshot_seq_id=4, last_seq_id=4)]
        assert await journal.add_snapshot(MODEL, 4, num_bytes=10) is None, "it is no newer one"
        assert await journal.add_snapshot("another", 4, num_bytes=10) is None
        record = await journal.find(MODEL, 1)
        assert record is not None
        assert record.outcome == done(1.0), "a result outlives its body"


async def test_a_snapshot_does_not_count_before_all_that_it_covers_is_answered(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, [0, 1, 3])
        await journal.append(MODEL, 2, batch(2))
        assert await journal.add_snapshot(MODEL, 3, num_bytes=10) is None
        await journal.finish(MODEL, 2, InvalidRequest("no"))
        assert await journal.add_snapshot(MODEL, 3, num_bytes=10) == -1


async def test_an_operation_that_left_the_model_as_it_was_needs_no_body_and_keeps_its_place(journals: Journals) -> None:
    async with journals.opened(result_retention_s=0.0) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.finish(MODEL, 1, done(1.0), keep_body=False)
    async with journals.opened(result_retention_s=0.0) as journal:
        assert [(entry.seq_id, entry.state) for entry in await journal.history(MODEL)] == [
            (0, EntryState.ACCEPTED),
            (1, EntryState.DONE),
        ]
        assert [seq_id for seq_id, _ in await requests(journal)] == [0]


async def test_at_its_bound_the_journal_cuts_what_the_newest_snapshot_covers(journals: Journals) -> None:
    async with journals.opened(max_bytes=40_000) as journal:
        await executed(journal, range(9), length=512)
        assert journal.bound.is_pressed
        assert await journal.add_snapshot(MODEL, 8, num_bytes=10) == -1
        await executed(journal, range(9, 17), length=512)
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(9, 17))
        assert await journal.live_models() == [LiveModel(MODEL, cut_seq_id=8, snapshot_seq_id=8, last_seq_id=16)]


async def test_without_a_snapshot_the_oldest_bodies_are_cut_and_the_model_needs_its_next_one(
    journals: Journals,
) -> None:
    async with journals.opened(max_bytes=40_000) as journal:
        await executed(journal, range(40), length=512)
        kept = [seq_id for seq_id, _ in await requests(journal)]
        assert 1 < len(kept) < 40
        assert kept[1:] == list(range(41 - len(kept), 40))
        (model,) = await journal.live_models()
        assert (model.cut_seq_id, model.snapshot_seq_id) == (kept[1] - 1, None)


async def test_pending_operations_are_never_cut_but_refused(journals: Journals) -> None:
    async with journals.opened(max_bytes=40_000) as journal:
        await journal.append(MODEL, 0, created())
        appends = [journal.append(MODEL, seq_id, batch(seq_id, length=512)) for seq_id in range(1, 100)]
        errors = await asyncio.gather(*appends, return_exceptions=True)
        refused = [error for error in errors if isinstance(error, OutOfCapacity)]
        assert "journal_max_bytes" in str(refused[0])
        assert len(await requests(journal)) == 1 + 99 - len(refused)


async def test_a_model_that_fills_its_share_of_the_journal_leaves_room_for_others(journals: Journals) -> None:
    body = batch(1, length=40_000)
    size = len(body.compressed)
    async with journals.opened(max_bytes=8 * size) as journal:
        for model_id in ("greedy", "late"):
            await journal.append(model_id, 0, created())
        for seq_id in (1, 2, 3):
            await journal.append("greedy", seq_id, body, within_share=True)
        with pytest.raises(OutOfCapacity, match=r"greedy: .* more than its share of this server's journal_max_bytes"):
            await journal.append("greedy", 4, body, within_share=True)
        await journal.append("late", 1, body, within_share=True)
        await journal.append("greedy", 4, body)  # others of its model wait for it
        for done in range(1, 5):
            await journal.finish("greedy", done, None)
        await journal.append("greedy", 9, body, within_share=True)


async def test_expired_results_are_forgotten(journals: Journals) -> None:
    async with journals.opened(result_retention_s=0.0) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.finish(MODEL, 1, done(1.0))
    async with journals.opened(result_retention_s=0.0) as journal:
        await journal.finish(MODEL, 0, done(0.0))
        record = await journal.find(MODEL, 1)
        assert record is None or record.outcome is None


async def test_deleting_a_model_deletes_its_rows(journals: Journals) -> None:
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.delete_model(MODEL)
        assert await requests(journal) == []
        with pytest.raises(ModelNotFound):
            await journal.append(MODEL, 2, batch(2))
        await journal.append(MODEL, 0, created())


def test_digest_tells_kinds_and_bodies_apart() -> None:
    one, two = pb.OptimStepRequest(model_id=MODEL, seq_id=1), pb.OptimStepRequest(model_id=MODEL, seq_id=2)
    assert Body.pack("optim_step", one) == Body.pack("optim_step", one)
    assert Body.pack("optim_step", one).digest != Body.pack("optim_step", two).digest
    assert Body.pack("optim_step", one).digest != Body.pack("save_checkpoint", one).digest


def test_a_batch_is_stored_as_protobuf_serializes_it() -> None:
    """Also a batch of more datums than are serialized in one go, and with every field set."""
    data = [random_datum(3, seed, vocab_size=50) for seed in range(150)]
    batch = request(data, config={"a": 1.0, "b": 2.0}, model_id=MODEL, seq_id=7, forward_only=True)
    batch.loss_fn_config_v2["c"].number = 3.0
    batch.custom_loss.name = "mine"
    assert {field for field, _ in batch.ListFields()} == set(batch.DESCRIPTOR.fields)
    for known in (batch, pb.ForwardBackwardRequest()):
        for message in (known, pb.ForwardBackwardRequest.FromString(known.SerializeToString() + b"\xa0\x1f\x01")):
            assert Body.pack("forward_backward", message).unpack() == message.SerializeToString(deterministic=True)


_CHILD = """
import asyncio, sys
from pathlib import Path
from tests.unit.trainer_service.journals import Journals
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.records import Body

async def main(journal):
    await journal.append("m", 0, Body.pack("create_model", pb.CreateModelRequest(model_id="m")))

    async def writer(first):
        for seq_id in range(first, 100_000, 8):
            await journal.append("m", seq_id, Body.pack("optim_step", pb.OptimStepRequest(seq_id=seq_id)))
            print(seq_id, flush=True)

    await asyncio.gather(*(writer(first) for first in range(1, 9)))

asyncio.run(main(Journals(Path(sys.argv[1]), sys.argv[2]).journal(max_bytes=1 << 24)))
"""


async def test_everything_acknowledged_survives_kill_9(journals: Journals) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, str(journals.folder), journals.url, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    acknowledged = [int(await child.stdout.readline()) for _ in range(200)]
    child.kill()
    rest = (await child.stdout.read()).splitlines(keepends=True)
    acknowledged += [int(line) for line in rest if line.endswith(b"\n")]
    await child.wait()
    async with journals.opened() as journal:
        kept = {seq_id for seq_id, _ in await requests(journal, "m")}
        assert set(acknowledged) <= kept


async def test_a_request_that_is_gone_is_damage(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, range(2))
        await journal.writer.submit(lambda database: database.execute("UPDATE operations SET request = NULL"))
        with pytest.raises(DataCorrupted, match=rf"{MODEL}, seq_id 1, in the journal .* it is not found"):
            await journal.unpacked(MODEL, 1)


async def test_an_error_in_one_job_is_its_callers_and_the_journal_goes_on(journals: Journals) -> None:
    def fail(database: Database) -> None:
        database.execute("DELETE FROM models")
        raise KeyError("a bug")

    async with journals.opened() as journal:
        await executed(journal, range(2))
        failed, written = await asyncio.wait_for(
            asyncio.gather(journal.writer.submit(fail), journal.append(MODEL, 2, batch(2)), return_exceptions=True), 10
        )
        assert type(failed) is ServiceError
        assert f"internal error at the journal {journals.name}: KeyError('a bug')" in str(failed)
        assert written is None
        assert [seq_id for seq_id, _ in await requests(journal)] == [0, 1, 2]


async def test_calls_after_the_journal_was_closed_are_refused_at_once(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, range(2))
    with pytest.raises(NotReady, match="the journal is closed"):
        await asyncio.wait_for(journal.append(MODEL, 2, batch(2)), 10)
    await asyncio.to_thread(journal.close)


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << at % 8
    return bytes(changed)


async def damage(journal: Journal, column: str, seq_id: int, at: int) -> None:
    """Changes one bit of a stored column."""

    def run(database: Database) -> None:
        (content,) = database.execute(f"SELECT {column} FROM operations WHERE seq_id = ?", (seq_id,)).fetchone()
        database.execute(f"UPDATE operations SET {column} = ? WHERE seq_id = ?", (flipped(content, at), seq_id))

    await journal.writer.submit(run)


async def test_a_bit_that_changed_in_a_request_is_noticed_wherever_it_is(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, range(3))
        whole = batch(2)
        for at in range(0, len(whole.compressed), 7):
            await damage(journal, "request", 2, at)
            with pytest.raises(
                DataCorrupted, match=rf"request of {MODEL}, seq_id 2, in the journal {re.escape(journals.name)}"
            ):
                await journal.unpacked(MODEL, 2)
            await damage(journal, "request", 2, at)
        assert await journal.unpacked(MODEL, 2) == whole.unpack()


async def test_a_creation_that_has_got_its_seed_here_is_compared_with_what_was_stored(journals: Journals) -> None:
    async with journals.opened() as journal:
        await journal.append(MODEL, 0, Body("create_model", b"of what came without a seed", created().compressed))
        assert pb.CreateModelRequest.FromString(await journal.unpacked(MODEL, 0)).base_model == "tiny"
        for at in range(len(created().compressed)):
            await damage(journal, "request", 0, at)
            with pytest.raises(DataCorrupted, match=rf"{MODEL}, seq_id 0, in the journal"):
                await journal.unpacked(MODEL, 0)
            await damage(journal, "request", 0, at)


async def test_a_bit_that_changed_in_an_answer_is_an_error_instead_of_other_numbers(journals: Journals) -> None:
    async with journals.opened() as journal:
        await executed(journal, range(2))
        await journal.append(MODEL, 2, batch(2))
        await journal.finish(MODEL, 2, InvalidRequest("rank: 0 is wrong"))
        await journal.append(MODEL, 3, batch(3))
        await journal.lose(MODEL, "its snapshot is damaged")
        wholes = [await journal.find(MODEL, seq_id) for seq_id in range(4)]
        for seq_id, column, last in ((1, "result", 20), (2, "result", 20), (3, "result", 20), (1, "result_sum", 8)):
            for at in range(0, last, 3):
                await damage(journal, column, seq_id, at)
                record = await journal.find(MODEL, seq_id)
                assert record is not None
                assert isinstance(record.outcome, DataCorrupted)
                assert f"the answer of {MODEL}, seq_id {seq_id}, in the journal {journals.name}" in str(record.outcome)
                await damage(journal, column, seq_id, at)
        assert [str(await journal.find(MODEL, seq_id)) for seq_id in range(4)] == [str(one) for one in wholes]
