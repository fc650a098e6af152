import asyncio
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
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
from trainer_service.durability.journal import Body, EntryState, Journal, LiveModel, Record
from trainer_service.metrics import Metrics

MODEL = "s:train:0"


@asynccontextmanager
async def opened(folder: Path, **settings: float) -> AsyncIterator[Journal]:
    options = {"max_bytes": 1 << 20, "result_retention_s": 3600.0, **settings}
    journal = Journal(folder / "journal.sqlite", metrics=Metrics(CollectorRegistry()), **options)  # type: ignore[arg-type]
    try:
        yield journal
    finally:
        await asyncio.to_thread(journal.close)


async def requests(journal: Journal, model_id: str = MODEL) -> list[tuple[int, Body]]:
    """The requests whose bodies the journal still has, with their seq_ids."""
    kept = [entry.seq_id for entry in await journal.history(model_id) if entry.num_bytes]
    return [(seq_id, await journal.body(model_id, seq_id)) for seq_id in kept]


def created() -> Body:
    return Body.pack("create_model", pb.CreateModelRequest(model_id=MODEL, base_model="tiny"))


def batch(seq_id: int, *, length: int = 8) -> Body:
    data = [random_datum(length, seq_id, vocab_size=50)]
    return Body.pack("forward_backward", request(data, model_id=MODEL, seq_id=seq_id))


def done(value: float) -> pb.WaitResultResponse:
    return pb.WaitResultResponse(optim_step=pb.OptimStepResponse(metrics={"norm:mean": value}))


async def test_requests_come_back_whole_and_in_order(tmp_path: Path) -> None:
    bodies = [created(), *(batch(n) for n in (1, 2, 3))]
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, bodies[0])
        for seq_id in (3, 1, 2):
            await journal.append(MODEL, seq_id, bodies[seq_id])
        assert await requests(journal) == list(enumerate(bodies))
        assert await journal.live_models() == [LiveModel(MODEL, cut_seq_id=-1, snapshot_seq_id=None, last_seq_id=3)]
    assert pb.CreateModelRequest.FromString(bodies[0].unpack()).base_model == "tiny"
    assert pb.ForwardBackwardRequest.FromString(bodies[2].unpack()).seq_id == 2


async def test_results_and_errors_survive_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.append(MODEL, 2, batch(2))
        await journal.finish(MODEL, 1, done(0.5))
        await journal.finish(MODEL, 2, InvalidRequest("rank: 0 is wrong", field="rank"))
    async with opened(tmp_path) as journal:
        first, second = await journal.find(MODEL, 1), await journal.find(MODEL, 2)
        assert first is not None
        assert second is not None
        assert first.outcome == done(0.5)
        assert isinstance(second.outcome, InvalidRequest)
        assert second.outcome.metadata == {"field": "rank"}
        assert await journal.find(MODEL, 3) is None


async def test_a_lost_model_says_why_and_so_do_its_unfinished_operations(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(1.0))
        await journal.append(MODEL, 1, batch(1))
        await journal.check_not_lost(MODEL)
        await journal.lose(MODEL, "its snapshot is damaged")
    async with opened(tmp_path) as journal:
        assert await journal.live_models() == []
        finished, unfinished = await journal.find(MODEL, 0), await journal.find(MODEL, 1)
        assert finished is not None
        assert finished.outcome == done(1.0)
        assert unfinished is not None
        assert isinstance(unfinished.outcome, ModelLost)
        with pytest.raises(ModelLost, match="its snapshot is damaged; resume from a checkpoint"):
            await journal.check_not_lost(MODEL)
        await journal.check_not_lost("another")


async def test_a_model_whose_creation_fails_is_not_live(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
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


def test_states_keep_their_numbers_in_the_file() -> None:
    assert {state.name: state.value for state in EntryState} == {"ACCEPTED": 0, "DONE": 1, "FAILED": 2}


@pytest.mark.parametrize(
    ("snapshot", "last", "covered"),
    [(None, None, False), (None, 0, False), (0, None, True), (0, 0, True), (0, 1, False), (2, 1, True), (2, 2, True)],
)
def test_a_model_is_covered_by_a_snapshot_of_its_newest_operation(
    snapshot: int | None, last: int | None, covered: bool
) -> None:
    assert LiveModel(MODEL, cut_seq_id=-1, snapshot_seq_id=snapshot, last_seq_id=last).is_covered is covered


async def test_counted_bytes_are_those_of_the_file_after_every_call(tmp_path: Path) -> None:
    """The journal counts its bytes instead of asking the database, and refuses and cuts by these counts."""
    registry = CollectorRegistry()
    journal = Journal(tmp_path / "j", max_bytes=1 << 16, result_retention_s=60, metrics=Metrics(registry))

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
    journal.close()


async def test_results_that_have_not_expired_survive_a_deletion_on_demand(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(1.0))
        assert (await journal.prune(dry_run=False)).num_results == 0
        found = await journal.find(MODEL, 0)
        assert found is not None
        assert found.outcome == done(1.0)


async def test_waiting_appends_share_one_transaction(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    journal = Journal(tmp_path / "j", max_bytes=1 << 20, result_retention_s=60, metrics=Metrics(registry))
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
    journal.close()


async def test_an_answer_waits_for_the_next_append_to_share_its_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "_SHARES_S", 600.0)
    committed: list[int] = []
    commit = journal_writer.Writer._commit
    monkeypatch.setattr(
        journal_writer.Writer, "_commit", lambda self, jobs: (committed.append(len(jobs)), commit(self, jobs))
    )
    async with opened(tmp_path) as journal:
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
    async with opened(tmp_path) as journal:
        assert [entry.state for entry in await journal.history(MODEL)] == [EntryState.DONE, EntryState.DONE]


async def executed(journal: Journal, seq_ids: Iterable[int], *, length: int = 8) -> None:
    for seq_id in seq_ids:
        await journal.append(MODEL, seq_id, batch(seq_id, length=length) if seq_id else created())
        await journal.finish(MODEL, seq_id, done(seq_id))


async def test_bodies_are_cut_behind_the_snapshot_before_the_newest(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
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


async def test_a_snapshot_does_not_count_before_all_that_it_covers_is_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, [0, 1, 3])
        await journal.append(MODEL, 2, batch(2))
        assert await journal.add_snapshot(MODEL, 3, num_bytes=10) is None
        await journal.finish(MODEL, 2, InvalidRequest("no"))
        assert await journal.add_snapshot(MODEL, 3, num_bytes=10) == -1


async def test_an_operation_that_left_the_model_as_it_was_needs_no_body_and_keeps_its_place(tmp_path: Path) -> None:
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.finish(MODEL, 1, done(1.0), keep_body=False)
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        assert [(entry.seq_id, entry.state) for entry in await journal.history(MODEL)] == [
            (0, EntryState.ACCEPTED),
            (1, EntryState.DONE),
        ]
        assert [seq_id for seq_id, _ in await requests(journal)] == [0]


async def test_at_its_bound_the_journal_cuts_what_the_newest_snapshot_covers(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=40_000) as journal:
        await executed(journal, range(9), length=512)
        assert journal.is_pressed
        assert await journal.add_snapshot(MODEL, 8, num_bytes=10) == -1
        await executed(journal, range(9, 17), length=512)
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(9, 17))
        assert await journal.live_models() == [LiveModel(MODEL, cut_seq_id=8, snapshot_seq_id=8, last_seq_id=16)]


async def test_without_a_snapshot_the_oldest_bodies_are_cut_and_the_model_needs_its_next_one(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=40_000) as journal:
        await executed(journal, range(40), length=512)
        kept = [seq_id for seq_id, _ in await requests(journal)]
        assert 1 < len(kept) < 40
        assert kept[1:] == list(range(41 - len(kept), 40))
        (model,) = await journal.live_models()
        assert (model.cut_seq_id, model.snapshot_seq_id) == (kept[1] - 1, None)


async def test_pending_operations_are_never_cut_but_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=40_000) as journal:
        await journal.append(MODEL, 0, created())
        appends = [journal.append(MODEL, seq_id, batch(seq_id, length=512)) for seq_id in range(1, 100)]
        errors = await asyncio.gather(*appends, return_exceptions=True)
        refused = [error for error in errors if isinstance(error, OutOfCapacity)]
        assert "journal_max_bytes" in str(refused[0])
        assert len(await requests(journal)) == 1 + 99 - len(refused)


async def test_a_model_that_fills_its_share_of_the_journal_leaves_room_for_others(tmp_path: Path) -> None:
    body = batch(1, length=40_000)
    size = len(body.compressed)
    async with opened(tmp_path, max_bytes=8 * size) as journal:
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


async def test_expired_results_are_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.finish(MODEL, 1, done(1.0))
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        await journal.finish(MODEL, 0, done(0.0))
        record = await journal.find(MODEL, 1)
        assert record is None or record.outcome is None


async def test_deleting_a_model_deletes_its_rows(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.delete_model(MODEL)
        assert await requests(journal) == []
        with pytest.raises(ModelNotFound):
            await journal.append(MODEL, 2, batch(2))
        await journal.append(MODEL, 0, created())


async def test_a_second_trainer_on_the_same_journal_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        with pytest.raises(SystemExit, match="another trainer"):
            Journal(
                tmp_path / "journal.sqlite", max_bytes=1, result_retention_s=1, metrics=Metrics(CollectorRegistry())
            )


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """It holds what runs are trained on."""
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        modes = {file.name: file.stat().st_mode & 0o777 for file in os.scandir(tmp_path)}
    assert len(modes) > 1
    assert set(modes.values()) == {0o600}, modes


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
import asyncio, pathlib, sys
from prometheus_client import CollectorRegistry
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.journal import Body, Journal
from trainer_service.metrics import Metrics

async def main():
    path = pathlib.Path(sys.argv[1])
    journal = Journal(path, max_bytes=1 << 24, result_retention_s=60, metrics=Metrics(CollectorRegistry()))
    await journal.append("m", 0, Body.pack("create_model", pb.CreateModelRequest(model_id="m")))

    async def writer(first):
        for seq_id in range(first, 100_000, 8):
            await journal.append("m", seq_id, Body.pack("optim_step", pb.OptimStepRequest(seq_id=seq_id)))
            print(seq_id, flush=True)

    await asyncio.gather(*(writer(first) for first in range(1, 9)))

asyncio.run(main())
"""


async def test_everything_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _CHILD, path, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    acknowledged = [int(await child.stdout.readline()) for _ in range(200)]
    child.kill()
    rest = (await child.stdout.read()).splitlines(keepends=True)
    acknowledged += [int(line) for line in rest if line.endswith(b"\n")]
    await child.wait()
    async with opened(tmp_path) as journal:
        kept = {seq_id for seq_id, _ in await requests(journal, "m")}
        assert set(acknowledged) <= kept


@pytest.mark.parametrize("num_bytes", [1, 24, 2048, 4096])
async def test_a_power_cut_that_tears_off_the_end_takes_nothing_that_was_acknowledged(
    tmp_path: Path, num_bytes: int
) -> None:
    async with opened(tmp_path / "before") as journal:
        await journal.append(MODEL, 0, created())
        for seq_id in range(1, 20):
            await journal.append(MODEL, seq_id, batch(seq_id))
            after = tmp_path / f"after-{seq_id}"
            shutil.copytree(tmp_path / "before", after)
            with (after / "journal.sqlite-wal").open("r+b") as log:
                log.truncate(log.seek(0, os.SEEK_END) - num_bytes)
            async with opened(after) as copy:
                assert [found for found, _ in await requests(copy)] == list(range(seq_id + 1))


async def test_a_torn_write_behind_the_last_transaction_is_as_if_it_had_never_begun(tmp_path: Path) -> None:
    async with opened(tmp_path / "before") as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    with (tmp_path / "after" / "journal.sqlite-wal").open("r+b") as log:
        frame = log.read(32 + 24 + 4096)[32:]
        log.seek(0, os.SEEK_END)
        log.write(frame[:3000])
    async with opened(tmp_path / "after") as journal:
        assert [found for found, _ in await requests(journal)] == [0, 1]
        await journal.append(MODEL, 2, batch(2))
        assert [found for found, _ in await requests(journal)] == [0, 1, 2]


@pytest.mark.parametrize("number", [1, 2, 99])
async def test_a_journal_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute(f"PRAGMA user_version = {number}")
    database.close()
    with pytest.raises(SystemExit, match=f"has format {number}; this trainer reads format 3"):
        async with opened(tmp_path):
            pass


async def test_a_damaged_journal_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(40), length=512)
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[: 4096 * 3])
    with pytest.raises(SystemExit, match=rf"{path} is damaged: .*move the folder away"):
        async with opened(tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        (b"request BLOB", b"requesu BLOB", "there is no column operations.request"),
        (b"INDEX expiring", b"INDEY expiring", "malformed database schema"),
        (b"tableoperationsoperations", b"table\xffperations\xffperations", "is damaged"),
    ],
    ids=["a column", "a statement", "no UTF-8"],
)
async def test_a_damaged_schema_is_refused_with_what_to_do(
    tmp_path: Path, name: bytes, changed: bytes, why: str
) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(3))
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    assert content.count(name) == 1
    path.write_bytes(content.replace(name, changed))
    with pytest.raises(SystemExit, match=rf"{path} is damaged: .*move the folder away") as refused:
        async with opened(tmp_path):
            pass
    assert why in str(refused.value)


async def test_an_index_that_has_lost_a_row_costs_one_model_and_says_what_to_do(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(3))
        await journal.append("another", 0, created())
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as database:
        (root,) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_operations_1'"
        ).fetchone()
        (page_size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    content = bytearray(path.read_bytes())
    page = slice((root - 1) * page_size, root * page_size)
    content[page] = content[page].replace(MODEL.encode(), b"t:train:0")
    path.write_bytes(content)
    async with opened(tmp_path) as journal:
        with pytest.raises(DataCorrupted, match=rf"request of {MODEL}, seq_id 1, in the journal {path} is damaged"):
            await journal.body(MODEL, 1)
        assert await journal.body("another", 0) == created()
        with pytest.raises(ServiceError, match=rf"{path} is damaged: .*malformed.*Put a backup") as failed:
            await journal.writer.submit(lambda connection: connection.execute("DELETE FROM operations WHERE seq_id"))
        assert type(failed.value) is ServiceError, "a client that tries again would do so for ever"
        await journal.append("another", 1, batch(1))


async def test_a_request_that_is_gone_is_damage(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(2))
        await journal.writer.submit(lambda connection: connection.execute("UPDATE operations SET request = NULL"))
        with pytest.raises(DataCorrupted, match=rf"{MODEL}, seq_id 1, in the journal .* it is not found"):
            await journal.unpacked(MODEL, 1)


async def test_an_error_in_one_job_is_its_callers_and_the_journal_goes_on(tmp_path: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM models")
        raise KeyError("a bug")

    async with opened(tmp_path) as journal:
        await executed(journal, range(2))
        failed, written = await asyncio.wait_for(
            asyncio.gather(journal.writer.submit(fail), journal.append(MODEL, 2, batch(2)), return_exceptions=True), 10
        )
        assert type(failed) is ServiceError
        assert f"internal error at the journal {tmp_path}/journal.sqlite: KeyError('a bug')" in str(failed)
        assert written is None
        assert [seq_id for seq_id, _ in await requests(journal)] == [0, 1, 2]


class _FailingRollbacks:
    """A connection whose first rollbacks fail."""

    def __init__(self, connection: sqlite3.Connection, *, times: int) -> None:
        self._connection = connection
        self._times = times

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "ROLLBACK" and self._times:
            self._times -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return self._connection.execute(statement, *values)


async def test_a_rollback_that_fails_is_made_up_for_before_the_next_transaction(tmp_path: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM models")
        raise sqlite3.OperationalError("disk I/O error")

    async with opened(tmp_path) as journal:
        await executed(journal, range(2))
        connection = journal.writer._connection
        journal.writer._connection = _FailingRollbacks(connection, times=3)  # type: ignore[assignment]
        with pytest.raises(ServiceError, match="disk I/O error"):
            await asyncio.wait_for(journal.writer.submit(fail), 10)
        await asyncio.wait_for(journal.append(MODEL, 2, batch(2)), 10)
    async with opened(tmp_path) as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == [0, 1, 2]


async def test_calls_after_the_journal_was_closed_are_refused_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(2))
    with pytest.raises(NotReady, match="the journal is closed"):
        await asyncio.wait_for(journal.append(MODEL, 2, batch(2)), 10)
    journal.close()


async def test_a_torn_page_of_the_database_is_repaired_from_the_log(tmp_path: Path) -> None:
    async with opened(tmp_path / "before") as journal:
        await executed(journal, range(40), length=512)
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    database = tmp_path / "after" / "journal.sqlite"
    with database.open("r+b") as file:
        file.truncate(max(0, file.seek(0, os.SEEK_END) - 1000))
    async with opened(tmp_path / "after") as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(40))


async def test_on_a_full_disk_appends_are_refused_and_what_is_there_can_be_read(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=1 << 30) as journal:
        await executed(journal, range(3))
        pages = await journal.writer.submit(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
        await journal.writer.submit(
            lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        )
        appends = [journal.append(MODEL, seq_id, batch(seq_id, length=4096)) for seq_id in range(3, 9)]
        *refused, record = await asyncio.gather(*appends, journal.find(MODEL, 2), return_exceptions=True)
        assert {type(error) for error in refused} == {OutOfCapacity}
        assert "disk is full" in str(refused[0])
        assert isinstance(record, Record)
        assert record.outcome == done(2.0), "it shared a transaction with them"
        await journal.writer.submit(lambda connection: connection.execute("PRAGMA max_page_count = 1000000").fetchone())
        await executed(journal, range(3, 9), length=4096)
    async with opened(tmp_path) as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(9))


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << at % 8
    return bytes(changed)


async def damage(journal: Journal, column: str, seq_id: int, at: int) -> None:
    """Changes one bit of a stored column."""

    def run(connection: sqlite3.Connection) -> None:
        (content,) = connection.execute(f"SELECT {column} FROM operations WHERE seq_id = ?", (seq_id,)).fetchone()
        connection.execute(f"UPDATE operations SET {column} = ? WHERE seq_id = ?", (flipped(content, at), seq_id))

    await journal.writer.submit(run)


async def test_a_bit_that_changed_in_a_request_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(3))
        whole = batch(2)
        for at in range(0, len(whole.compressed), 7):
            await damage(journal, "request", 2, at)
            with pytest.raises(DataCorrupted, match=rf"request of {MODEL}, seq_id 2, in the journal {tmp_path}"):
                await journal.unpacked(MODEL, 2)
            await damage(journal, "request", 2, at)
        assert await journal.unpacked(MODEL, 2) == whole.unpack()


async def test_a_creation_that_has_got_its_seed_here_is_compared_with_what_was_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, Body("create_model", b"of what came without a seed", created().compressed))
        assert pb.CreateModelRequest.FromString(await journal.unpacked(MODEL, 0)).base_model == "tiny"
        for at in range(len(created().compressed)):
            await damage(journal, "request", 0, at)
            with pytest.raises(DataCorrupted, match=rf"{MODEL}, seq_id 0, in the journal"):
                await journal.unpacked(MODEL, 0)
            await damage(journal, "request", 0, at)


async def test_a_bit_that_changed_in_an_answer_is_an_error_instead_of_other_numbers(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
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
                assert f"the answer of {MODEL}, seq_id {seq_id}, in the journal {tmp_path}" in str(record.outcome)
                await damage(journal, column, seq_id, at)
        assert [str(await journal.find(MODEL, seq_id)) for seq_id in range(4)] == [str(one) for one in wholes]
