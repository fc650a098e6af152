"""The record of what a process was executing when it died, and the next process's use of it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.unit.trainer_service.scheduling import Bench, MakeBench
from tinsmith.errors import ServiceError
from trainer_service.durability.executing import (
    MOST_DEATHS,
    MOST_DEATHS_OF_MODEL,
    NAME,
    Deaths,
    Executing,
    arriving,
)

A, B = ("a:train:0", 7), ("b:train:0", 3)


def died(folder: Path) -> Executing:
    """The record as the next process finds it: the dead one left its file as it was."""
    return Executing(folder)


def is_condemned(executing: Executing, name: tuple[str, int], *, of_model: bool = False) -> bool:
    try:
        executing.check(*name, of_model=of_model)
        executing.check_storing(*name, of_model=of_model)
    except ServiceError:
        return True
    return False


def test_an_operation_is_condemned_by_two_deaths_and_what_was_executed_with_it_is_cleared_by_its_answer(
    tmp_path: Path,
) -> None:
    first = Executing(tmp_path)
    first.begin([A, B])
    second = died(tmp_path)
    assert second.is_suspect(*A)
    assert second.is_suspect(*B)
    assert not is_condemned(second, A)
    second.begin([B])
    second.end([B])
    second.forget(*B)
    second.begin([A])
    third = died(tmp_path)
    assert is_condemned(third, A)
    assert not third.is_suspect(*B)


def test_a_death_while_nothing_is_executed_counts_for_nobody_and_takes_nothing_back(tmp_path: Path) -> None:
    Executing(tmp_path).begin([A])
    for _ in range(9):  # as when it is killed while it loads the base model
        again = died(tmp_path)
        assert again.is_suspect(*A)
        assert not is_condemned(again, A)


def test_an_ended_operation_leaves_no_trace_and_its_place_is_used_again(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    for n in range(1000):
        executing.begin([(f"m{n}", n)])
        executing.end([(f"m{n}", n)])
    assert (tmp_path / NAME).stat().st_size <= 1024
    assert not died(tmp_path).deaths


def test_a_graceful_end_in_the_middle_of_an_operation_is_no_death_and_keeps_the_count_of_a_suspect(
    tmp_path: Path,
) -> None:
    executing = Executing(tmp_path)
    executing.begin([A])
    executing.close()
    again = died(tmp_path)
    assert not again.is_suspect(*A)
    again.begin([A])
    third = died(tmp_path)
    third.begin([A])
    third.close()
    fourth = died(tmp_path)
    assert fourth.is_suspect(*A)
    assert not is_condemned(fourth, A)


def test_an_operation_that_has_its_answer_is_condemned_after_more_deaths(tmp_path: Path) -> None:
    Executing(tmp_path).begin([A])
    for _ in range(MOST_DEATHS_OF_MODEL - 1):
        again = died(tmp_path)
        assert not is_condemned(again, A, of_model=True)
        again.begin([A])
    assert is_condemned(died(tmp_path), A, of_model=True)


def test_operations_of_models_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    executing.begin([A, B])
    again = died(tmp_path)
    again.keep_models({A[0]})
    assert again.is_suspect(*A)
    assert not again.is_suspect(*B)
    again.forget_model(A[0])
    assert not died(tmp_path).deaths


def test_deaths_in_other_work_are_kept_without_a_model_up_to_a_limit(tmp_path: Path) -> None:
    """The model of a request that is not in the journal may not exist yet."""
    executing = Executing(tmp_path)
    executing.begin([("gone:train:0", 1)])
    executing.begin([(arriving("create_model", f"m{n}:train:0"), 0) for n in range(1200)])
    again = died(tmp_path)
    again.begin([(arriving("create_model", "m7:train:0"), 0)])
    again = died(tmp_path)
    again.keep_models(set())
    assert len(again.deaths) == 1000
    assert is_condemned(again, (arriving("create_model", "m7:train:0"), 0))
    assert not again.is_suspect("gone:train:0", 1)
    again.forget_model("m7:train:0")
    assert not is_condemned(again, (arriving("create_model", "m7:train:0"), 0))


def test_a_name_of_the_greatest_length_fits_its_slot(tmp_path: Path) -> None:
    names = [(arriving("forward_backward", letter * 200), 2**63 - 1) for letter in "ab"]
    Executing(tmp_path).begin(names)
    assert set(died(tmp_path).deaths) == set(names)


def test_a_request_that_is_sent_again_does_not_end_the_record_of_the_first(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    executing.begin([A])
    executing.begin([A])
    executing.end([A])
    assert died(tmp_path).is_suspect(*A)


def test_a_process_that_is_really_killed_leaves_what_it_was_executing(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from trainer_service.durability.executing import Executing\n"
        "executing = Executing(Path(sys.argv[1]))\n"
        "executing.begin([('a:train:0', 7)]); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert died(tmp_path).is_suspect(*A)


@pytest.mark.parametrize("damage", [b"\xff\x00 nonsense" * 99, b"executing x 0 3 m", b"", b"1 1", b"running 1 0 3 m"])
def test_a_damaged_file_condemns_nobody(tmp_path: Path, damage: bytes) -> None:
    Executing(tmp_path).begin([A])
    boot = (tmp_path / NAME).read_bytes()[:256]
    for file in (boot + damage, damage):
        (tmp_path / NAME).write_bytes(file)
        assert not Executing(tmp_path).deaths


def test_a_file_that_cannot_be_written_is_told_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executing = Executing(tmp_path)
    assert executing._file is not None
    os.close(executing._file)
    executing._file = os.open(tmp_path / NAME, os.O_RDONLY)
    for _ in range(3):
        executing.begin([A])
        executing.end([A])
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        caplog.records[-1].message
    ]
    (tmp_path / "file").touch()
    Executing(tmp_path / "file").begin([A])  # no folder at all


def test_a_disk_that_was_full_for_a_while_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that began before the disk was full are not suspected for ever. Later ones are noted."""
    executing = Executing(tmp_path)
    executing.begin([A])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        executing.end([A])
    executing.begin([A, B])
    executing.end([A])
    assert list(died(tmp_path).deaths) == [B]


def test_the_end_of_the_machine_counts_for_nobody_and_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may leave the file as it was. Deaths of another boot do not count, nor those of another machine."""
    Executing(tmp_path).begin([A])
    died(tmp_path).begin([A, B])
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr("trainer_service.durability.executing._BOOT_ID", tmp_path / "boot_id")
    rebooted = died(tmp_path)
    assert rebooted.is_suspect(*A)
    assert not is_condemned(rebooted, A)
    assert not rebooted.is_suspect(*B)
    rebooted.begin([A])
    assert is_condemned(died(tmp_path), A)


def test_an_operation_on_a_checkpoint_is_condemned_by_two_deaths_and_makes_no_execution_wait(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    for _ in range(MOST_DEATHS):
        assert not is_condemned(executing, A)
        assert not executing.is_suspect(*A)
        with executing.storing(*B):
            pass
        with executing.storing(*A):
            executing.begin([B])  # waits for nobody
            executing.end([B])
            executing = died(tmp_path)
    assert is_condemned(executing, A)
    assert not is_condemned(executing, A, of_model=True)
    with pytest.raises(ServiceError, match="ended twice while it read or wrote the checkpoint of this"):
        executing.check_storing(*A)
    assert not is_condemned(executing, B)
    executing.forget(*A)
    assert not died(tmp_path).deaths


def test_requests_that_kill_one_after_the_other_do_not_condemn_a_save_beside_them(tmp_path: Path) -> None:
    """Each first death finds the save at its files; so does each second one, if the save has waited in vain."""
    executing = Executing(tmp_path)
    guilty = [(f"guilty{n}:train:0", 1) for n in range(2 * MOST_DEATHS)]
    for name in guilty:
        for _ in range(2):
            assert not is_condemned(executing, B)
            executing.begin([name])
            with executing.storing(*B):
                executing = died(tmp_path)
        assert is_condemned(executing, name)
        executing.forget(*name)
    assert not executing.deaths


async def test_what_kills_while_it_reads_a_checkpoint_condemns_no_other_model_and_is_given_up(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    for n in range(MOST_DEATHS):
        innocent = f"innocent{n}:train:0", 1
        assert not is_condemned(executing, A)
        with executing.storing(*A):
            executing.begin([innocent])
            executing = died(tmp_path)
        waiting = asyncio.create_task(executing.turn_to_store(*A))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        async with executing.stage(*innocent):  # the suspect, which nothing disturbs
            await asyncio.sleep(0.02)
            assert not waiting.done()
        executing.forget(*innocent)
        if n < MOST_DEATHS - 1:
            await asyncio.wait_for(waiting, 20)
        else:
            with pytest.raises(ServiceError, match="ended twice"):
                await asyncio.wait_for(waiting, 20)
        assert not is_condemned(executing, innocent)
    assert is_condemned(executing, A)


async def test_an_operation_without_deaths_or_of_the_suspects_own_model_reads_its_checkpoint_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.durability.executing._PATIENCE_S", 1e9)
    executing = Executing(tmp_path)
    executing.begin([A])
    with executing.storing(A[0], 8):
        executing = died(tmp_path)
    assert executing.is_suspect(*A)
    await asyncio.wait_for(executing.turn_to_store(*B), 20)
    await asyncio.wait_for(executing.turn_to_store(A[0], 8), 20)  # it is behind the suspect, or the other way round
    executing.turn_to_store_on_thread(A[0], 8)


async def test_a_suspect_that_never_comes_back_delays_a_checkpoint_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.durability.executing._PATIENCE_S", 0.05)
    executing = Executing(tmp_path)
    executing.begin([A])
    with executing.storing(*B):
        executing = died(tmp_path)
    await asyncio.wait_for(executing.turn_to_store(*B), 20)
    executing.turn_to_store_on_thread(*B)
    assert executing.is_suspect(*A)


async def test_a_suspect_reads_its_checkpoint_while_no_other_models_work_does_and_the_innocent_beside_it_survive(
    tmp_path: Path,
) -> None:
    """A and B read at the first death, and the third request begins later."""
    executing, later = Executing(tmp_path), ("later:train:0", 1)
    with executing.storing(*A), executing.storing(*B):
        executing = died(tmp_path)
    with executing.storing(*later):  # it had begun before the suspects came back
        first = asyncio.create_task(executing.turn_to_store(*A))
        await asyncio.sleep(0.02)
        assert not first.done()
    await asyncio.wait_for(first, 20)
    with executing.storing(*A):
        waiting = [asyncio.create_task(executing.turn_to_store(*name)) for name in (B, later)]
        await asyncio.to_thread(executing.turn_to_store_on_thread, A[0], 8)  # of the same model
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in waiting)
        executing.begin([later])  # what is only computed does not wait
        executing.end([later])
        again = died(tmp_path)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
    assert is_condemned(again, A)
    with pytest.raises(ServiceError):
        await again.turn_to_store(*A)
    await asyncio.wait_for(again.turn_to_store(*later), 20)  # the condemned one holds up nobody
    for name in (B, later):
        assert not is_condemned(again, name)
    with again.storing(*later):
        leaving = asyncio.create_task(again.turn_to_store(*B))
        await asyncio.sleep(0.02)
        leaving.cancel()
        await asyncio.wait([leaving])
    await asyncio.wait_for(again.turn_to_store(*later), 20)  # nor does a suspect whose caller has left


async def test_a_storage_that_hangs_delays_a_suspect_and_others_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.durability.executing._PATIENCE_S", 0.05)
    executing = Executing(tmp_path)
    with executing.storing(*A):
        executing = died(tmp_path)
    with executing.storing(*B):
        await asyncio.wait_for(executing.turn_to_store(*A), 20)
        with executing.storing(*A):
            await asyncio.wait_for(executing.turn_to_store("later:train:0", 1), 20)
            await asyncio.to_thread(executing.turn_to_store_on_thread, "later:train:0", 2)


def test_an_operation_may_write_its_checkpoint_while_it_is_executed(tmp_path: Path) -> None:
    """As a save does that scores its version meanwhile."""
    executing = Executing(tmp_path)
    for _ in range(MOST_DEATHS):
        executing.begin([A])
        with executing.storing(*A):
            executing.end([A])
            executing = died(tmp_path)
    assert is_condemned(executing, A)
    executing.begin([B])
    with executing.storing(*B):
        pass
    assert died(tmp_path).is_suspect(*B)


async def test_a_suspect_waits_until_nothing_else_is_executed_and_then_nothing_else_is(tmp_path: Path) -> None:
    Executing(tmp_path).begin([A])
    executing = died(tmp_path)
    order: list[str] = []

    async def stage(name: tuple[str, int]) -> None:
        async with executing.stage(*name):
            order.append(f"{name[0]} begins")
            await asyncio.sleep(0.03)
            order.append(f"{name[0]} ends")

    executing.begin([B])
    suspect = asyncio.create_task(stage(A))
    await asyncio.sleep(0.02)
    later = asyncio.create_task(stage(("later", 1)))
    compute = threading.Thread(target=executing.begin, args=([("computed", 1)],))
    compute.start()
    await asyncio.sleep(0.02)
    assert order == []
    executing.end([B])
    await asyncio.gather(suspect, later)
    assert order[:2] == [f"{A[0]} begins", f"{A[0]} ends"]
    await asyncio.to_thread(compute.join, 5)
    assert not compute.is_alive()


async def test_a_suspect_whose_caller_leaves_or_whose_model_is_deleted_holds_up_nobody(tmp_path: Path) -> None:
    Executing(tmp_path).begin([A])
    executing = died(tmp_path)

    async def stage() -> None:
        async with executing.stage(*A):
            pass

    executing.begin([B])
    leaving = asyncio.create_task(stage())
    await asyncio.sleep(0.02)
    leaving.cancel()
    await asyncio.wait([leaving])
    executing.begin([("c", 1)])
    executing.end([("c", 1)])
    waiting = asyncio.create_task(stage())
    await asyncio.sleep(0.02)
    executing.forget_model(A[0])
    await waiting


async def test_after_a_death_the_suspects_share_no_micro_batch_and_the_others_do(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = await make_bench()
    executing = bench.scheduler.executing
    names = ("a", "b", "c", "d")
    await bench.create(*names)
    executing.deaths = {("a", 1): Deaths(executing=1), ("b", 1): Deaths(executing=1)}
    blocker = await bench.hold("d", 1)
    operations = [await bench.batch(name, 1, lengths=[10, 10]) for name in names[:3]]
    operations.append(await bench.batch("d", 2, lengths=[10, 10]))
    bench.engine.gate.set()
    for operation in [blocker, *operations]:
        await operation.wait()
        await operation.stored.wait()
    assert sorted(map(sorted, bench.engine.sizes[1:])) == [["a1"], ["b1"], ["c1", "d2"]]
    assert not executing.deaths


async def test_a_crash_suspects_the_operations_of_the_micro_batch_that_ran(bench: Bench, tmp_path: Path) -> None:
    await bench.create("a", "b", "c")
    running = await bench.hold("a", 1)
    waiting = await bench.batch("b", 1)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / NAME, tmp_path / "copy" / NAME)
    assert list(died(tmp_path / "copy").deaths) == [("a", 1)]
    bench.engine.gate.set()
    await running.wait()
    await waiting.wait()


@pytest.mark.parametrize(("call", "name"), [("append", (arriving("optim_step", "a"), 1)), ("finish", ("a", 1))])
async def test_a_crash_while_the_journal_takes_a_request_or_an_answer_suspects_its_operation(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: tuple[str, int]
) -> None:
    await (await bench.step("a", 0)).stored.wait()
    plain, found = getattr(bench.journal, call), list[Executing]()
    (tmp_path / "copy").mkdir()

    async def noting(model_id: str, *arguments: Any, **settings: Any) -> Any:
        if model_id == "a":
            shutil.copy(tmp_path / NAME, tmp_path / "copy" / NAME)
            found.append(died(tmp_path / "copy"))
        return await plain(model_id, *arguments, **settings)

    monkeypatch.setattr(bench.journal, call, noting)
    await (await bench.step("a", 1)).stored.wait()
    assert [list(one.deaths) for one in found] == [[name]]
    assert not died(tmp_path).deaths


async def test_a_request_that_ended_the_trainer_twice_while_it_was_appended_to_the_journal_is_not_appended(
    bench: Bench,
) -> None:
    await bench.create("a", "b")
    for kind, error in (("optim_step", "ended twice while it ran this"), ("forward_backward", "")):
        bench.scheduler.executing.deaths[arriving(kind, "a"), 1] = Deaths(executing=2 if error else 1)
        if error:
            with pytest.raises(ServiceError, match=error):
                await bench.step("a", 1)
            assert await bench.journal.find("a", 1) is None
        else:
            await (await bench.batch("a", 1)).stored.wait()
            assert list(bench.scheduler.executing.deaths) == [(arriving("optim_step", "a"), 1)]
    await (await bench.step("b", 1)).wait()


async def test_an_answer_that_ended_the_trainer_once_while_it_was_stored_is_stored_alone_and_then_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.create("a", "b")
    bench.scheduler.executing.deaths["a", 1] = Deaths(executing=1)
    plain, order, gate = bench.journal.finish, list[str](), asyncio.Event()

    async def noting(model_id: str, *arguments: Any, **settings: Any) -> Any:
        order.append(f"{model_id} begins")
        if model_id == "a":
            await gate.wait()
        await plain(model_id, *arguments, **settings)
        order.append(f"{model_id} ends")

    monkeypatch.setattr(bench.journal, "finish", noting)
    suspect = await bench.step("a", 1)
    await suspect.wait()
    await until(lambda: order)
    other = asyncio.create_task(bench.step("b", 1))
    await asyncio.sleep(0.05)
    gate.set()
    await suspect.stored.wait()
    await (await other).stored.wait()
    assert order == ["a begins", "a ends", "b begins", "b ends"]
    assert not bench.scheduler.executing.deaths


def test_a_mark_costs_little(tmp_path: Path) -> None:
    executing = Executing(tmp_path)
    names = [(f"{n:0>32}:train:0", n) for n in range(16)]
    began = time.perf_counter()
    for _ in range(200):
        executing.begin(names)
        executing.end(names)
    assert (time.perf_counter() - began) / 200 < 0.02, "seconds for a micro-batch of 16 operations"
