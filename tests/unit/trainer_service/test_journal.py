import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.batches import random_datum, request
from tinsmith.rpc.errors import InvalidRequest, ModelLost, ModelNotFound, OutOfCapacity
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.journal import Body, Journal
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
        assert await journal.requests(MODEL) == list(enumerate(bodies))
        assert await journal.is_replayable(MODEL)
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


async def test_after_a_restart_models_are_lost_and_unfinished_operations_say_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(1.0))
        await journal.append(MODEL, 1, batch(1))
    async with opened(tmp_path) as journal:
        assert await journal.lose_models() == 1
        finished, unfinished = await journal.find(MODEL, 0), await journal.find(MODEL, 1)
        assert finished is not None
        assert finished.outcome == done(1.0)
        assert unfinished is not None
        assert isinstance(unfinished.outcome, ModelLost)
        with pytest.raises(ModelLost, match="resume from a checkpoint"):
            await journal.check_not_lost(MODEL)
        await journal.check_not_lost("another")


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
    assert len(await journal.requests(MODEL)) == 101
    journal.close()


async def test_bodies_are_cut_oldest_first_and_the_model_is_marked(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=40_000) as journal:
        await journal.append(MODEL, 0, created())
        await journal.finish(MODEL, 0, done(0.0))
        for seq_id in range(1, 40):
            await journal.append(MODEL, seq_id, batch(seq_id, length=512))
            await journal.finish(MODEL, seq_id, done(seq_id))
        kept = [seq_id for seq_id, _ in await journal.requests(MODEL)]
        assert kept[0] == 0
        assert 1 < len(kept) < 40
        assert kept[1:] == list(range(41 - len(kept), 40))
        assert not await journal.is_replayable(MODEL)
        record = await journal.find(MODEL, 1)
        assert record is not None
        assert record.outcome == done(1.0), "a result outlives its body"


async def test_pending_operations_are_never_cut_but_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=40_000) as journal:
        await journal.append(MODEL, 0, created())
        appends = [journal.append(MODEL, seq_id, batch(seq_id, length=512)) for seq_id in range(1, 100)]
        errors = await asyncio.gather(*appends, return_exceptions=True)
        refused = [error for error in errors if isinstance(error, OutOfCapacity)]
        assert "journal_max_bytes" in str(refused[0])
        assert len(await journal.requests(MODEL)) == 1 + 99 - len(refused)


async def test_expired_results_are_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.finish(MODEL, 1, done(1.0))
    async with opened(tmp_path, result_retention_s=0.0) as journal:
        await journal.lose_models()
        record = await journal.find(MODEL, 1)
        assert record is None or record.outcome is None


async def test_deleting_a_model_deletes_its_rows(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        await journal.delete_model(MODEL)
        assert await journal.requests(MODEL) == []
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


def test_digest_tells_kinds_and_bodies_apart() -> None:
    one, two = pb.OptimStepRequest(model_id=MODEL, seq_id=1), pb.OptimStepRequest(model_id=MODEL, seq_id=2)
    assert Body.pack("optim_step", one) == Body.pack("optim_step", one)
    assert Body.pack("optim_step", one).digest != Body.pack("optim_step", two).digest
    assert Body.pack("optim_step", one).digest != Body.pack("save_checkpoint", one).digest


_CHILD = """
import asyncio, pathlib, sys
from prometheus_client import CollectorRegistry
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.journal import Body, Journal
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
        kept = {seq_id for seq_id, _ in await journal.requests("m")}
        assert set(acknowledged) <= kept
        assert await journal.lose_models() == 1
        record = await journal.find("m", acknowledged[-1])
        assert record is not None
        assert isinstance(record.outcome, ModelLost)


@pytest.mark.parametrize("num_bytes", [1, 24, 2048, 4096])
async def test_what_a_power_cut_tears_from_the_end_takes_nothing_that_was_acknowledged(
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
                assert [found for found, _ in await copy.requests(MODEL)] == list(range(seq_id + 1))


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
        assert [found for found, _ in await journal.requests(MODEL)] == [0, 1]
        await journal.append(MODEL, 2, batch(2))
        assert [found for found, _ in await journal.requests(MODEL)] == [0, 1, 2]
