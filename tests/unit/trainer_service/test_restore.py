"""After a crash: the same weights, bit for bit, and the same answers, wherever it was."""

import asyncio
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.batches import random_datum, request, wide
from tests.support.models import VOCAB_SIZE
from tests.support.waiting import until
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tests.unit.trainer_service.restoring import NEVER, Process
from tinsmith.errors import ModelLost
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc import tensors
from tinsmith.rpc.tensors import to_numpy
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability.executing import (
    MOST_DEATHS,
    MOST_DEATHS_OF_MODEL,
    NAME,
    Deaths,
    Executing,
    other_work,
)
from trainer_service.durability.records import Body, EntryState, sum_of
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import SnapshotPolicy
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.operation import Answer
from trainer_service.operations.operations import Operations
from trainer_service.operations.restore import check_journal
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location

MODEL = "s:train:0"
EVERY_STEP, EVERY_OTHER = SnapshotPolicy(1, 0, 0), SnapshotPolicy(2, 0, 0)
TRAINING = types_pb2.CHECKPOINT_KIND_TRAINING
EPHEMERAL = types_pb2.CHECKPOINT_KIND_EPHEMERAL

Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(base: BaseModel) -> AsyncIterator[Start]:
    running: list[Process] = []

    async def make(folder: Path, **settings: Any) -> Process:
        running.append(await Process.start(folder, base, **settings))
        return running[-1]

    yield make
    for process in running:
        await process.stop()


def creation(model_id: str = MODEL, **fields: Any) -> pb.CreateModelRequest:
    lora = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True)
    return pb.CreateModelRequest(**{"model_id": model_id, "base_model": "tiny", "lora_config": lora, **fields})


def batch(seq_id: int, **fields: Any) -> pb.ForwardBackwardRequest:
    lengths = (9, 17, 6)  # two micro-batches
    data = [random_datum(length, seq_id + length, vocab_size=VOCAB_SIZE) for length in lengths]
    return request(data, model_id=MODEL, seq_id=seq_id, **fields)


def bad_batch(seq_id: int) -> pb.ForwardBackwardRequest:
    return request([random_datum(4, 1, vocab_size=VOCAB_SIZE)], "nope", model_id=MODEL, seq_id=seq_id)


def step(seq_id: int, *, learning_rate: float = 1e-2, model_id: str = MODEL) -> pb.OptimStepRequest:
    adam = pb.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    return pb.OptimStepRequest(model_id=model_id, seq_id=seq_id, adam_params=adam)


def save(seq_id: int, name: str, **fields: Any) -> pb.SaveCheckpointRequest:
    return pb.SaveCheckpointRequest(**{"model_id": MODEL, "seq_id": seq_id, "kind": TRAINING, "name": name, **fields})


def load(seq_id: int, name: str, **fields: Any) -> pb.LoadCheckpointRequest:
    location = f"{MODEL}/weights/{name}"
    return pb.LoadCheckpointRequest(**{"model_id": MODEL, "seq_id": seq_id, "location": location, **fields})


def skip(seq_id: int) -> pb.SkipOperationRequest:
    return pb.SkipOperationRequest(model_id=MODEL, seq_id=seq_id, reason="too large", gradients_missing=True)


SCRIPT = [
    creation(),
    batch(1),
    step(2),
    batch(3),
    bad_batch(4),
    step(5),  # is refused, and clears what 3 has left
    batch(6),
    batch(7, forward_only=True),
    batch(8),
    step(9),
    save(10, "one"),
    batch(11),
    step(12),
    load(13, "one", load_optimizer=True),
    batch(14),
    skip(15),
    step(16),  # is refused, too
    batch(17),
    pb.OptimStepRequest(model_id=MODEL, seq_id=18),  # has no parameters: 17 stays
    step(19),
    load(20, "missing"),
    batch(21),
    step(22),
    batch(23),
    step(24, learning_rate=1e30),  # would lead out of float32, and clears what 23 has left
    batch(25),
    step(26),
]
FAILED = {4, 5, 15, 16, 18, 20, 24}


async def outcomes(process: Process) -> list[Any]:
    """Outcomes of the whole script, without times."""
    found = [await process.outcome(MODEL, seq_id) for seq_id in range(len(SCRIPT))]
    for outcome in found:
        if isinstance(outcome, Answer):
            outcome.save_checkpoint.checkpoint.ClearField("created_at")
            outcome.load_checkpoint.checkpoint.ClearField("created_at")
    return found


async def run(process: Process, requests: Sequence[Any] = SCRIPT) -> None:
    for one in requests:
        await asyncio.wait([(await process.send(one)).outcome])


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


async def test_a_step_that_started_afresh_behind_a_failure_does_so_again_after_a_crash(
    start: Start, tmp_path: Path
) -> None:
    seen = step(4)
    seen.failure_seen = 2
    script = [creation(), batch(1), bad_batch(2), batch(3), seen, batch(5), bad_batch(6), batch(7), step(8), batch(9)]
    plain = await start(tmp_path / "plain")
    await run(plain, [creation(), request(batch(3).data, model_id=MODEL, seq_id=1), step(2), skip(3), step(4)])
    process = await start(tmp_path / "0")
    await run(process, script)
    assert "a forward_backward before it failed, seq_id 6" in str(await process.outcome(MODEL, 8))
    assert_equal(await process.weights(MODEL), await plain.weights(MODEL))
    again = await start(await process.crash(tmp_path / "1"))
    assert_equal(await again.weights(MODEL), await process.weights(MODEL))
    assert await again.outcome(MODEL, 4) == await process.outcome(MODEL, 4)


@pytest.mark.parametrize("policy", [NEVER, EVERY_STEP], ids=["no snapshots", "snapshots"])
@pytest.mark.parametrize("creation_id", ["0c3f", ""], ids=["", "made by an earlier version"])
async def test_the_versions_of_a_model_have_the_creation_in_their_ids_after_restarts_too(
    start: Start, tmp_path: Path, policy: SnapshotPolicy, creation_id: str
) -> None:
    process = await start(tmp_path / "0", policy=policy)
    await run(process, [creation(creation_id=creation_id), batch(1), step(2), save(3, "before")])
    for count in (1, 2):
        process = await start(await process.crash(tmp_path / str(count)), policy=policy)
        await run(process, [batch(3 * count + 1), step(3 * count + 2), save(3 * count + 3, f"after-{count}")])
    names = {3: "before", 6: "after-1", 9: "after-2"}
    for seq_id, name in names.items():
        found = process.operations.loads.checkpoints.info(Location(MODEL, "weights", name))
        assert found.version_id == (f"{MODEL}@{seq_id}.{creation_id}" if creation_id else f"{MODEL}@{seq_id}")


async def test_a_save_that_a_crash_has_interrupted_does_not_finish_with_files_of_another_run_of_its_id(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(creation_id="aa"), save(1, "one")])
    assert isinstance(await process.outcome(MODEL, 1), Answer)
    await process.scheduler.delete(MODEL, lambda: process.engine.delete_model(MODEL))
    await process.operations.delete_files(MODEL)
    await run(process, [creation(creation_id="bb"), save(1, "one")])  # as it was accepted, before it was answered
    process = await start(await process.crash(tmp_path / "1"))
    assert "one exists" in str(await process.outcome(MODEL, 1))
    found = process.operations.loads.checkpoints.info(Location(MODEL, "weights", "one"))
    assert found.version_id == f"{MODEL}@1.aa"


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        pytest.param(NEVER, 0, id="no snapshots", marks=pytest.mark.slow),
        pytest.param(EVERY_OTHER, 1, id="snapshots"),
    ],
)
async def test_a_crash_after_any_operation_changes_no_bit_and_no_answer(
    start: Start, tmp_path: Path, policy: SnapshotPolicy, first: int
) -> None:
    undisturbed = await start(tmp_path / "undisturbed", policy=policy)
    crashes = []
    for n, one in enumerate(SCRIPT):
        await asyncio.wait([(await undisturbed.send(one)).outcome])
        if n % 2 == first or n == len(SCRIPT) - 1:
            crashes.append((n, await undisturbed.crash(tmp_path / f"crash-{n}")))
    expected, weights = await outcomes(undisturbed), await undisturbed.weights(MODEL)
    assert {seq_id for seq_id, outcome in enumerate(expected) if isinstance(outcome, str)} == FAILED
    for n, folder in crashes:
        process = await start(folder, policy=policy)
        await run(process, SCRIPT[n + 1 :])
        assert await outcomes(process) == expected
        assert_equal(await process.weights(MODEL), weights)
        assert process.operations.models.get(MODEL).step == undisturbed.operations.models.get(MODEL).step
        await process.stop()


async def test_a_crash_at_any_moment_of_a_pipelined_run_changes_no_bit_and_loses_nothing(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "undisturbed", policy=EVERY_OTHER)
    operations, crashes = [], []
    for n, one in enumerate(SCRIPT, start=1):
        operations.append(await process.send(one))
        if n % 6 == 0:  # a fast machine has done them when the last is sent
            crashes.append((n, await process.crash(tmp_path / f"crash-{len(crashes)}")))
    while not all(operation.outcome.done() for operation in operations):
        crashes.append((len(SCRIPT), await process.crash(tmp_path / f"crash-{len(crashes)}")))
        await asyncio.sleep(0.05)
    expected, weights = await outcomes(process), await process.weights(MODEL)
    for n, folder in crashes:
        process = await start(folder, policy=EVERY_OTHER)
        for one in SCRIPT[n:]:
            await process.send(one)
        assert await outcomes(process) == expected
        assert_equal(await process.weights(MODEL), weights)
        await process.stop()


async def test_crashes_during_the_replay_change_no_bit_either(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", policy=NEVER)
    for one in SCRIPT:
        await process.send(one)
    expected, weights = await outcomes(process), await process.weights(MODEL)
    for n in range(4):
        folder = await process.crash(tmp_path / str(n + 1))
        await process.stop()
        process = await start(folder, policy=EVERY_OTHER if n else NEVER)
        await asyncio.sleep(0.02)
    assert await outcomes(process) == expected
    await process.scheduler.check_held(MODEL)
    assert_equal(await process.weights(MODEL), weights)


async def test_a_snapshot_makes_the_replay_short(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process, SCRIPT[:9])
    await settled(process)  # while one snapshot is written, no other is taken
    await run(process, SCRIPT[9:11])  # the last is a save: what a snapshot covers whole stays parked
    await settled(process)
    again = await start(await process.crash(tmp_path / "1"))
    await again.scheduler.check_held(MODEL)
    assert again.num_replayed("forward_backward") == 0
    assert again.count("restored_models_total") == again.count("restore_seconds_count") == 1
    assert again.count("snapshot_failures_total") == 0


async def settled(process: Process) -> None:
    """Until the journal knows the snapshots that have been taken."""
    await until(lambda: not process.snapshots.tasks)


async def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    for one in SCRIPT[:10]:
        await run(process, [one])
        await settled(process)
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    assert sorted(int(path.name) for path in (folder / "snapshots" / MODEL).iterdir()) == [2, 9]
    flip(folder / "snapshots" / MODEL / "9" / "adapter.npy")
    shutil.copytree(folder, tmp_path / "2")
    again = await start(folder, policy=EVERY_STEP)
    assert_equal(await again.weights(MODEL), weights)
    assert "the snapshot s:train:0/9 is not used: s:train:0/9/adapter.npy is damaged" in caplog.text
    assert again.num_replayed("forward_backward") == 5, "of which one had failed, and one only forward"
    flip(tmp_path / "2" / "snapshots" / MODEL / "2" / "adapter.npy")
    lost = await start(tmp_path / "2")
    assert (await lost.scheduler.find(MODEL, 1)).outcome.done(), "its answers are there"
    answer = await lost.outcome(MODEL, 10)
    assert "no operation" in str(answer)
    with pytest.raises(Exception, match=r"begins after seq_id 2, and no snapshot from there on is intact.*9/adapter"):
        await lost.send(save(10, "one"))
    assert lost.count("unrestored_models_total") == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage(folder: Path, column: str, seq_id: int) -> None:
    journal = sqlite3.connect(folder / "journal.sqlite")
    where = "WHERE seq_id = ?"
    (content,) = journal.execute(f"SELECT {column} FROM operations {where}", (seq_id,)).fetchone()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    journal.execute(f"UPDATE operations SET {column} = ? {where}", (bytes(changed), seq_id))
    journal.commit()
    journal.close()


@pytest.mark.parametrize("seq_id", [0, 3], ids=["creation", "batch"])
async def test_a_model_whose_journal_is_damaged_is_lost_and_the_entry_is_named(
    start: Start, tmp_path: Path, seq_id: int
) -> None:
    process = await start(tmp_path / "0")
    await run(process, SCRIPT[:10])
    folder = await process.crash(tmp_path / "1")
    damage(folder, "request", seq_id)
    for _ in range(2):  # it stays so
        again = await start(folder)
        with pytest.raises(ModelLost, match=f"request of {MODEL}, seq_id {seq_id}, in the journal {folder}/journal"):
            await again.scheduler.check_held(MODEL)
        assert isinstance(await again.outcome(MODEL, 2), Answer)
        assert await again.journal.live_models() == []
        await again.stop()


async def test_a_snapshot_after_a_damaged_entry_brings_the_model_back(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process, SCRIPT[:3])
    await settled(process)
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    damage(folder, "request", 1)
    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)


async def test_a_damaged_answer_fails_its_future_and_not_the_replay(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    await run(process, SCRIPT[:10])
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    for seq_id in (3, 4):  # one that had failed, too
        damage(folder, "result", seq_id)
    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)
    for seq_id in (3, 4):
        assert f"the answer of {MODEL}, seq_id {seq_id}, in the journal" in str(await again.outcome(MODEL, seq_id))


async def test_a_load_whose_damaged_answer_does_not_tell_what_was_read_gives_the_model_up(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2), save(3, "one"), load(4, "one"), batch(5), step(6)])
    folder = await process.crash(tmp_path / "1")
    shutil.rmtree(folder / "snapshots")
    damage(folder, "result", 4)
    again = await start(folder)
    with pytest.raises(ModelLost, match=f"the answer of {MODEL}, seq_id 4, in the journal .* is damaged"):
        await again.scheduler.check_held(MODEL)


def unanswer(journal: sqlite3.Connection, message: pb.SaveCheckpointRequest) -> None:
    """As if the process had ended before the answer was stored."""
    request = Body.pack("save_checkpoint", message).compressed
    journal.execute(
        "UPDATE operations SET state = 0, result = NULL, request = ?, request_sum = ? WHERE seq_id = ?",
        (request, sum_of(MODEL, message.seq_id, "save_checkpoint", request), message.seq_id),
    )
    journal.commit()


async def test_a_save_that_was_written_but_not_answered_finishes_as_what_it_is(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2), save(3, "one"), save(4, "", kind=EPHEMERAL)])
    before = [await process.outcome(MODEL, seq_id) for seq_id in (3, 4)]
    folder = await process.crash(tmp_path / "1")
    journal = sqlite3.connect(folder / "journal.sqlite")
    for message in (save(3, "one"), save(4, "", kind=EPHEMERAL)):
        unanswer(journal, message)
    journal.close()
    again = await start(folder)
    assert [await again.outcome(MODEL, seq_id) for seq_id in (3, 4)] == before


async def test_the_later_of_two_unanswered_saves_at_one_place_stays(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    saves = [save(n, "latest", overwrite=True) for n in (3, 6)]
    await run(process, [creation(), batch(1), step(2), saves[0], batch(4), step(5), saves[1]])
    folder = await process.crash(tmp_path / "1")
    journal = sqlite3.connect(folder / "journal.sqlite")
    for message in saves:
        unanswer(journal, message)
    journal.close()
    again = await start(folder)
    answers = [await again.outcome(MODEL, seq_id) for seq_id in (3, 6)]
    assert [answer.save_checkpoint.checkpoint.step for answer in answers if isinstance(answer, Answer)] == [1, 2]
    location = Location.parse(f"{MODEL}/weights/latest", field="location")
    assert again.operations.publishing.checkpoints.info(location).step == 2


@pytest.mark.parametrize("earlier", [save(3, "two"), load(3, "one")], ids=["save", "load"])
async def test_a_checkpoint_is_replaced_once_the_answers_before_are_stored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: Any
) -> None:
    process = await start(tmp_path / "0")
    finish, folder, has_crashed = process.journal.finish, tmp_path / "1", asyncio.Event()

    async def crash_before_the_earlier_is_stored(model_id: str, seq_id: int, *args: Any, **options: Any) -> None:
        if seq_id == 3:
            await asyncio.sleep(0.5)  # for the later save, if it does not wait
            await process.crash(folder)
            has_crashed.set()
        await finish(model_id, seq_id, *args, **options)

    await run(process, [creation(), save(1, "one"), batch(2)])
    monkeypatch.setattr(process.journal, "finish", crash_before_the_earlier_is_stored)
    name = "two" if isinstance(earlier, pb.SaveCheckpointRequest) else "one"
    await run(process, [earlier, batch(4), step(5), save(6, name, overwrite=True)])
    expected = [await process.outcome(MODEL, seq_id) for seq_id in (3, 6)]
    await has_crashed.wait()
    again = await start(folder)
    for one in (batch(4), step(5), save(6, name, overwrite=True)):
        await again.send(one)
    answers = [await again.outcome(MODEL, seq_id) for seq_id in (3, 6)]
    assert answers[0] == expected[0]
    assert [answer.save_checkpoint.checkpoint.step for answer in answers[1:] if isinstance(answer, Answer)] == [1]


async def test_a_save_after_one_that_replaces_finds_the_place_taken(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0")
    storage = process.operations.publishing.checkpoints
    store = storage.save

    def wait_when_it_replaces(*args: Any, overwrite: bool, **options: Any) -> types_pb2.CheckpointInfo:
        if overwrite:
            time.sleep(0.5)  # the other save, if it does not wait, is stored meanwhile
        return store(*args, overwrite=overwrite, **options)

    monkeypatch.setattr(storage, "save", wait_when_it_replaces)
    await run(process, [creation()])
    for one in (save(1, "one", overwrite=True), save(2, "one")):
        await process.send(one)
    assert isinstance(await process.outcome(MODEL, 1), Answer)
    assert "one exists; use another name" in str(await process.outcome(MODEL, 2))


async def test_a_checkpoint_may_be_deleted_once_its_load_is_answered(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2), save(3, "one"), batch(4), step(5), load(6, "one"), batch(7)])
    other = creation("s:train:1", base_model="", lora_config=None, from_location=f"{MODEL}/weights/one")
    await run(process, [other])
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    shutil.rmtree(folder / "checkpoints" / MODEL)
    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)
    assert again.num_replayed("forward_backward") == 1
    await again.scheduler.check_held("s:train:1")
    assert again.operations.models.get("s:train:1").step == 1


async def test_a_load_that_would_read_another_checkpoint_gives_the_model_up_and_keeps_the_journal(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2), save(3, "one"), load(4, "one"), batch(5), step(6)])
    folder = await process.crash(tmp_path / "1")
    shutil.rmtree(folder / "snapshots")
    await run(process, [save(7, "one", overwrite=True)])
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(process.folder / "checkpoints", folder / "checkpoints")
    again = await start(folder)
    with pytest.raises(Exception, match=r"load_checkpoint, seq_id 4, fails .*@3 of .* was loaded, and .*@7"):
        await again.scheduler.check_held(MODEL)
    assert isinstance(await again.outcome(MODEL, 1), Answer)
    assert len(await again.journal.live_models()) == 1


async def test_a_model_of_another_base_model_stays_in_the_journal_until_that_is_served_again(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    weights = await process.weights(MODEL)
    other = await start(await process.crash(tmp_path / "1"), base_models=["huge"])
    with pytest.raises(Exception, match="'tiny' is not served by this trainer"):
        await other.send(batch(3))
    await other.stop()
    again = await start(tmp_path / "1")
    assert_equal(await again.weights(MODEL), weights)


@pytest.mark.parametrize("policy", [NEVER, EVERY_STEP], ids=["from its creation", "from a snapshot"])
async def test_a_model_of_other_base_weights_of_the_same_name_waits_for_its_own(
    base: BaseModel, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: SnapshotPolicy
) -> None:
    process = await start(tmp_path / "0", policy=policy)
    await run(process, [creation(base_weights=base.weights_sum), batch(1), step(2), save(3, "one")])
    await settled(process)
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")

    other_weights = replace(base, weights_sum="another")
    other = await Process.start(folder, other_weights)
    refusal = f"base_weights: '{base.weights_sum}' is the checksum of .*, but this trainer's tiny has 'another'"
    with pytest.raises(Exception, match=refusal):
        await other.send(batch(4))
    await run(other, [creation("s:train:1")])
    await other.send(load(1, "one", model_id="s:train:1"))
    assert re.search(
        f"location .*{refusal}.*TRAINER_ALLOW_OTHER_BASE_WEIGHTS", str(await other.outcome("s:train:1", 1))
    )
    await other.stop()

    allowing = await Process.start(folder, other_weights, allow_other_weights=True)
    assert_equal(await allowing.weights(MODEL), weights)
    assert "another set of weights has the same name; the model is used nevertheless" in caplog.text
    await run(allowing, [save(4, "two")])
    saved = await allowing.outcome(MODEL, 4)
    assert isinstance(saved, Answer)
    assert saved.save_checkpoint.checkpoint.base_weights == "another", "it goes on with those"
    await allowing.stop()

    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)


async def test_a_snapshot_that_cannot_be_written_is_a_warning_and_training_goes_on(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    (tmp_path / "0" / "snapshots" / MODEL).write_text("in the way")
    await run(process, SCRIPT)
    await settled(process)
    assert process.count("snapshot_failures_total") >= 1
    assert "the snapshot s:train:0/2 cannot be written" in caplog.text
    expected, weights = await outcomes(process), await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    (folder / "snapshots" / MODEL).unlink()
    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)
    assert await outcomes(again) == expected


async def test_a_journal_at_its_bound_takes_snapshots_instead_of_losing_what_a_replay_needs(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_bytes=20_000, policy=SnapshotPolicy(0, 3600, 0))
    await run(process, [creation()])
    for seq_id in range(1, 41, 2):
        await run(process, [batch(seq_id), step(seq_id + 1)])
        await settled(process)
    weights = await process.weights(MODEL)
    assert process.count("snapshot_seconds_count") > 0
    (model,) = await process.journal.live_models()
    assert model.snapshot_seq_id is not None
    assert 0 < model.cut_seq_id <= model.snapshot_seq_id
    again = await start(await process.crash(tmp_path / "1"), max_bytes=20_000)
    assert_equal(await again.weights(MODEL), weights)


async def test_a_log_that_has_lost_its_end_leaves_what_was_before_also_of_snapshots(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_OTHER)
    await run(process)
    expected, weights = await outcomes(process), await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    with (folder / "journal.sqlite-wal").open("r+b") as log:
        log.truncate(log.seek(0, 2) * 2 // 3)
    again = await start(folder, policy=EVERY_OTHER)
    history = await again.journal.history(MODEL)
    await run(again, SCRIPT[len(history) :])  # what the client has no receipt of, it sends again
    assert await outcomes(again) == expected
    assert_equal(await again.weights(MODEL), weights)
    assert all(entry.state != EntryState.ACCEPTED for entry in await again.journal.history(MODEL))


async def test_all_parameters_come_back_too(model_folder: Path, start: Start, tmp_path: Path) -> None:
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    full = types_pb2.LoraConfig(train_attn=True, train_mlp=True, train_unembed=True)
    process = await Process.start(tmp_path / "0", base, policy=EVERY_OTHER)
    await run(process, [creation(lora_config=full), *SCRIPT[1:]])
    await settled(process)
    expected, weights = await outcomes(process), await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    await process.stop()
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    again = await Process.start(folder, base)
    assert_equal(await again.weights(MODEL), weights)
    assert await outcomes(again) == expected
    await again.stop()


async def test_deleting_a_model_deletes_its_snapshots_also_while_it_is_being_restored(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process)
    await settled(process)
    folder = await process.crash(tmp_path / "1")
    again = await start(folder)
    await again.scheduler.delete(MODEL, lambda: again.engine.delete_model(MODEL))
    await again.operations.delete_files(MODEL)
    assert not (folder / "snapshots" / MODEL).exists()
    await again.stop()
    assert await (await start(folder)).journal.live_models() == []


async def test_files_beside_snapshots_are_left_alone(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process, SCRIPT[:3])
    await settled(process)
    weights = await process.weights(MODEL)
    folder = await process.crash(tmp_path / "1")
    snapshots = folder / "snapshots"
    for stray in (snapshots / ".DS_Store", snapshots / MODEL / ".DS_Store", snapshots / MODEL / "3"):
        stray.write_text("of a file browser")
    for stray in (snapshots / "@eaDir", snapshots / MODEL / "lost+found", snapshots / "s:gone:0" / "7"):
        stray.mkdir(parents=True)
    again = await start(folder)
    assert_equal(await again.weights(MODEL), weights)
    assert again.num_replayed("forward_backward") == 0
    assert {path.name for path in snapshots.iterdir()} == {".DS_Store", "@eaDir", MODEL, "~tmp"}


async def test_snapshots_whose_journal_is_gone_are_no_reason_to_begin_without_them(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process, SCRIPT[:3])
    await settled(process)
    folder = await process.crash(tmp_path / "1")
    journal, files = folder / "journal.sqlite", SnapshotFiles(folder / "snapshots")
    check_journal(journal, files.root)
    journal.rename(folder / "moved")
    for content in (None, b""):
        if content is not None:
            journal.write_bytes(content)
        with pytest.raises(
            SystemExit, match=rf"no journal {journal}, .* of 1 models \({MODEL}\).* or remove {files.root}"
        ):
            check_journal(journal, files.root)
    assert files.seq_ids(MODEL) == [2]
    files.delete_all(MODEL)
    check_journal(journal, files.root)


async def test_no_snapshot_fills_the_disk_and_without_it_the_journal_is_not_cut(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start(tmp_path / "0", policy=EVERY_STEP, min_free_bytes=2**62)
    await run(process, SCRIPT)
    await settled(process)
    weights = await process.weights(MODEL)
    assert process.count("snapshot_failures_total") >= 1
    assert f"of which {2**62} must stay free (min_free_bytes)" in caplog.text
    assert process.snapshots.files.model_ids() == []
    (summary,) = await process.journal.summaries()
    assert (summary.snapshot_seq_id, summary.cut_seq_id) == (None, -1)
    again = await start(await process.crash(tmp_path / "1"), policy=EVERY_STEP, min_free_bytes=0)
    assert_equal(await again.weights(MODEL), weights)


async def test_a_batch_of_too_many_targets_that_was_accepted_before_a_crash_is_refused_again_and_not_computed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a version without the bound, which died of it."""
    before = await start(tmp_path / "before")
    await (await before.send(creation())).wait()
    await (await before.send(batch(1))).wait()
    for seq_id in range(2, 6):
        await before.journal.append(MODEL, seq_id, Body.pack("forward_backward", batch_of_many_targets(seq_id)))
    await before.journal.append(MODEL, 6, Body.pack("optim_step", step(6)))
    folder = await before.crash(tmp_path / "after")
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        tensors, "to_numpy", lambda tensor, **_: made.append(tuple(tensor.shape)) or to_numpy(tensor, **_)
    )
    after = await start(folder)
    for seq_id in range(2, 6):
        assert "67108864 targets for a token are above" in str(await after.outcome(MODEL, seq_id))
    assert "a forward_backward before it failed" in str(await after.outcome(MODEL, 6))
    assert (1, 2**26) not in made
    await (await after.send(batch(7))).wait()
    await (await after.send(step(8))).wait()
    again = await start(await after.crash(tmp_path / "again"))  # and what failed has left its mark, no more
    await again.outcome(MODEL, 8)  # its result was perhaps not yet in the journal
    assert all(
        torch.equal(one, two)
        for one, two in zip((await after.weights(MODEL)).values(), (await again.weights(MODEL)).values(), strict=True)
    )


def batch_of_many_targets(seq_id: int) -> pb.ForwardBackwardRequest:
    return request([wide(2**26)], model_id=MODEL, seq_id=seq_id)


async def test_an_operation_that_was_executed_at_two_deaths_fails_with_the_step_after_it_and_the_next_one_works(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    await process.journal.append(MODEL, 3, Body.pack("forward_backward", batch(3)))
    await process.stop()
    executing = Executing(tmp_path / "0")
    executing.deaths[MODEL, 3] = Deaths(executing=MOST_DEATHS - 1)
    executing.begin([(MODEL, 3)])

    again = await start(tmp_path / "0")
    assert "the trainer ended twice while it ran this" in str(await again.outcome(MODEL, 3))
    await again.send(step(4))
    refused = str(await again.outcome(MODEL, 4))
    assert "was not applied" in refused
    assert "the trainer ended twice" in refused
    await run(again, [batch(5), step(6)])
    assert isinstance(await again.outcome(MODEL, 6), Answer)
    assert not again.scheduler.executing.is_suspect(MODEL, 3)


async def test_an_operation_with_an_answer_that_was_executed_at_five_deaths_leaves_its_model_for_another_try(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    answer = await process.outcome(MODEL, 1)
    await process.stop()
    executing = Executing(tmp_path / "0")
    executing.deaths[MODEL, 1] = Deaths(executing=MOST_DEATHS_OF_MODEL - 1)
    executing.begin([(MODEL, 1)])

    again = await start(tmp_path / "0")
    with pytest.raises(ModelLost, match="ended 5 times while it ran this"):
        await again.scheduler.check_held(MODEL)
    assert await again.outcome(MODEL, 1) == answer
    await again.stop()
    (tmp_path / "0" / NAME).unlink()
    third = await start(tmp_path / "0")
    await third.scheduler.check_held(MODEL)
    await run(third, [batch(3), step(4)])


async def test_an_operation_whose_checkpoint_ends_the_trainer_each_time_it_is_read_or_written_fails_in_the_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: dict[str, bytes] = {}
    folder = tmp_path / "0"

    def noting(call: str) -> None:
        plain = getattr(CheckpointStore, call)

        def noted_call(*arguments: Any, **settings: Any) -> Any:
            noted[call] = (folder / NAME).read_bytes()  # as it would be found after a death in this moment
            return plain(*arguments, **settings)

        monkeypatch.setattr(CheckpointStore, call, noted_call)

    noting("load")
    noting("save")
    process = await start(folder)
    await run(process, [creation(), batch(1), step(2), save(3, "one"), load(4, "one")])
    assert isinstance(await process.outcome(MODEL, 4), Answer)
    assert f"storing 0 0 3 {MODEL}".encode() in noted["save"]
    assert f"storing 0 0 4 {MODEL}".encode() in noted["load"]
    other = creation("other:train:0", from_location=f"{MODEL}/weights/one")
    other.ClearField("lora_config")
    await process.send(other)
    assert isinstance(await process.outcome("other:train:0", 0), Answer)
    assert b"storing 0 0 0 other:train:0" in noted["load"]

    await process.journal.append(MODEL, 5, Body.pack("save_checkpoint", save(5, "two")))
    await process.journal.append(MODEL, 6, Body.pack("load_checkpoint", load(6, "one")))
    await process.stop()
    executing = Executing(folder)
    for seq_id in (5, 6):
        executing.deaths[MODEL, seq_id] = Deaths(storing=MOST_DEATHS - 1)
    with executing.storing(MODEL, 5), executing.storing(MODEL, 6):
        again = await start(folder)
    for seq_id in (5, 6):
        assert "ended twice while it read or wrote the checkpoint of this" in str(await again.outcome(MODEL, seq_id))
    await run(again, [batch(7), step(8)])
    assert isinstance(await again.outcome(MODEL, 8), Answer)


async def test_a_snapshot_that_ends_the_trainer_each_time_it_is_written_is_given_up_and_its_model_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name, written = tmp_path / "0", other_work(f"snapshot {MODEL}", b""), SnapshotFiles.write
    noted: list[bytes] = []

    def noting(files: SnapshotFiles, *arguments: Any) -> int:
        noted.append((folder / NAME).read_bytes())
        return written(files, *arguments)

    monkeypatch.setattr(SnapshotFiles, "write", noting)
    process = await start(folder, policy=SnapshotPolicy(1, 0, 0))
    await run(process, [creation(), batch(1), step(2)])
    await until(lambda: process.count("snapshot_bytes_total") > 0)
    assert f"storing 0 0 {name[1]} {name[0]}".encode() in noted[0]
    await until(lambda: name[0].encode() not in (folder / NAME).read_bytes())
    await process.stop()
    executing = Executing(folder)
    executing.deaths[name] = Deaths(storing=MOST_DEATHS_OF_MODEL - 1)
    with executing.storing(*name):
        again = await start(folder, policy=SnapshotPolicy(1, 0, 0))
    noted.clear()
    await run(again, [batch(3), step(4), batch(5), step(6)])
    assert isinstance(await again.outcome(MODEL, 6), Answer)
    await until(lambda: again.count("snapshot_failures_total") == 2)
    assert noted == []


async def test_a_request_of_the_journal_that_ends_the_trainer_each_time_it_is_read_fails_unread(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    await process.journal.append(MODEL, 3, Body.pack("forward_backward", batch(3)))
    await process.journal.append(MODEL, 4, Body.pack("save_checkpoint", save(4, "one")))
    await process.stop()
    names = [(f"replay {MODEL}", 3), (f"replay {MODEL}", 4)]
    executing = Executing(tmp_path / "0")
    executing.deaths = {name: Deaths(executing=MOST_DEATHS - 1) for name in names}
    executing.begin(names)

    again = await start(tmp_path / "0")
    for seq_id in (3, 4):
        assert "the trainer ended twice while it ran this" in str(await again.outcome(MODEL, seq_id))
    await again.send(step(5))
    assert "was not applied" in str(await again.outcome(MODEL, 5))
    await run(again, [batch(6), step(7)])
    assert isinstance(await again.outcome(MODEL, 7), Answer)


async def test_requests_are_noted_while_a_restart_reads_them_and_forgotten_when_they_have_been_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    await process.stop()
    executing = Executing(tmp_path / "0")
    executing.begin([(f"replay {MODEL}", 1)])
    unpack, noted = Body.unpack, dict[str, bytes]()

    def noting(body: Body) -> bytes:
        noted[body.kind] = (tmp_path / "0" / NAME).read_bytes()
        return unpack(body)

    monkeypatch.setattr(Body, "unpack", noting)
    again = await start(tmp_path / "0")
    await again.scheduler.check_held(MODEL)
    assert f"executing 1 0 1 replay {MODEL}".encode() in noted["forward_backward"]
    assert f"executing 0 0 2 replay {MODEL}".encode() in noted["optim_step"]
    assert not again.scheduler.executing.deaths


async def test_a_snapshot_that_ends_the_trainer_each_time_it_is_read_leaves_its_model_for_another_try(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, noted = SnapshotFiles.read, list[bytes]()

    def noting(*arguments: Any) -> Any:
        noted.append((tmp_path / "0" / NAME).read_bytes())
        return read(*arguments)

    monkeypatch.setattr(SnapshotFiles, "read", noting)
    policy = EVERY_STEP
    process = await start(tmp_path / "0", policy=policy)
    await run(process, [creation(), batch(1), step(2)])
    await process.snapshots.close()
    await run(process, [batch(3)])
    await process.stop()
    executing = Executing(tmp_path / "0")
    executing.deaths[MODEL, 2] = Deaths(storing=MOST_DEATHS_OF_MODEL - 2)
    with executing.storing(MODEL, 2):
        again = await start(tmp_path / "0", policy=policy)
    await again.scheduler.check_held(MODEL)
    assert f"storing 0 4 2 {MODEL}".encode() in noted[-1]
    assert not again.scheduler.executing.deaths
    await again.stop()
    executing = Executing(tmp_path / "0")
    executing.deaths[MODEL, 2] = Deaths(storing=MOST_DEATHS_OF_MODEL - 1)
    with executing.storing(MODEL, 2):
        third = await start(tmp_path / "0", policy=policy)
    with pytest.raises(ModelLost, match="ended 5 times while it read or wrote the checkpoint of this"):
        await third.scheduler.check_held(MODEL)


def custom_batch(seq_id: int, name: str) -> pb.ForwardBackwardRequest:
    """Datums of five lengths."""
    total = graph(node("call_method", "total", "sum", ref("logprobs")), loss="total")
    data = [random_datum(2 + number, seq_id, vocab_size=VOCAB_SIZE) for number in range(5)]
    made = request(data, model_id=MODEL, seq_id=seq_id, loss_fn="custom")
    made.custom_loss.CopyFrom(custom_loss(total, {"logprobs": 1}, name=name))
    return made


async def test_a_custom_loss_that_has_run_is_not_checked_again_and_a_slow_check_holds_up_no_other_model(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, num_steps = "s:train:1", 30
    before = await start(tmp_path / "before")
    for model_id in (MODEL, other):
        await (await before.send(creation(model_id))).wait()
    answer = await (await before.send(custom_batch(1, "has run"))).wait()
    await before.journal.append(MODEL, 2, Body.pack("forward_backward", custom_batch(2, "has not run")))
    for seq_id in range(1, num_steps + 1):
        await before.journal.append(other, seq_id, Body.pack("optim_step", step(seq_id, model_id=other)))
    folder = await before.crash(tmp_path / "after")
    begun, goes_on = threading.Event(), threading.Event()
    checked: list[tuple[str, int]] = []
    check = CustomLoss.check_shapes

    def slow(loss: CustomLoss, datums: Sequence[Any]) -> list[float]:
        checked.append((loss.name, len(datums)))
        if checked[-1] == ("has not run", 5):
            begun.set()
            assert goes_on.wait(60)
        return check(loss, datums)

    monkeypatch.setattr(CustomLoss, "check_shapes", slow)
    after = await start(folder)
    try:
        assert await asyncio.to_thread(begun.wait, 30)
        async with asyncio.timeout(30):
            await after.outcome(other, num_steps)
    finally:
        goes_on.set()
    assert isinstance(await after.outcome(MODEL, 2), Answer)
    assert await after.outcome(MODEL, 1) == answer
    assert [one for one in checked if one[0] == "has run"] == [("has run", 1)]


async def test_a_fault_of_the_device_while_a_restart_makes_a_models_work_ends_the_process_and_loses_no_model(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(), batch(1), step(2)])
    await process.stop()
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with mock.patch.object(Operations, "work_of", side_effect=fault):
        again = await start(tmp_path / "0")
        async with asyncio.timeout(20):
            await again.scheduler.compute.engine_died.wait()
        assert again.count("unrestored_models") == 0
    deaths = Executing(tmp_path / "0").deaths
    assert deaths.pop((MODEL, 1)) == Deaths(executing=1)
    assert set(deaths) <= {(MODEL, 0)}  # the creation may not have ended when the next work is made
    await again.stop()
    third = await start(tmp_path / "0")
    await third.scheduler.check_held(MODEL)
    assert isinstance(await third.outcome(MODEL, 2), Answer)


async def test_a_restart_that_a_models_snapshots_end_each_time_leaves_the_model_for_another_try(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, noted, name = SnapshotFiles.verify, list[bytes](), other_work(f"restore {MODEL}", b"")

    def noting(*arguments: Any) -> Any:
        noted.append((tmp_path / "0" / NAME).read_bytes())
        return verify(*arguments)

    monkeypatch.setattr(SnapshotFiles, "verify", noting)
    process = await start(tmp_path / "0", policy=EVERY_STEP)
    await run(process, [creation(), batch(1), step(2)])
    await process.snapshots.close()
    await run(process, [batch(3)])
    await process.stop()
    for deaths, is_lost in ((MOST_DEATHS_OF_MODEL - 1, False), (MOST_DEATHS_OF_MODEL, True)):
        executing = Executing(tmp_path / "0")
        executing.deaths[name] = Deaths(storing=deaths - 1)
        noted.clear()
        with executing.storing(*name):
            again = await start(tmp_path / "0")
        if is_lost:
            with pytest.raises(ModelLost, match="ended 5 times while it read or wrote the checkpoint of this"):
                await again.scheduler.check_held(MODEL)
            assert noted == []
        else:
            await again.scheduler.check_held(MODEL)
            assert f"storing 0 {deaths} {name[1]} {name[0]}".encode() in noted[0]
            assert not again.scheduler.executing.deaths
        await again.stop()
