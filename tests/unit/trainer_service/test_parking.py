"""Models that are parked come back as they were, bit for bit, whenever something is asked of them."""

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.waiting import until
from tests.unit.trainer_service.restoring import Process
from tests.unit.trainer_service.test_restore import (
    MODEL,
    SCRIPT,
    Start,
    assert_equal,
    load,
    outcomes,
    run,
    save,
    settled,
)
from tests.unit.trainer_service.test_restore import start as start
from tinsmith.errors import FailedPrecondition, ModelLost, ModelMoved, ModelNotFound, OutOfCapacity
from tinsmith.lora_config import config_from_proto
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability.executing import NAME, Deaths, Executing, other_work
from trainer_service.durability.records import Body
from trainer_service.durability.run_file import Move
from trainer_service.durability.snapshots import SnapshotPolicy
from trainer_service.engine.batch import Batch
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.operation import Answer, Operation
from trainer_service.operations.missing import LostOperations
from trainer_service.requests import batch_of, params_of
from trainer_service.scheduling import parking
from trainer_service.scheduling.model_queue import ModelQueue
from trainer_service.storage.locations import Location

ADAM = pb.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


def creation(model_id: str, *, seed: int = 1) -> pb.CreateModelRequest:
    lora = types_pb2.LoraConfig(rank=4, seed=seed, train_attn=True, train_mlp=True)
    return pb.CreateModelRequest(model_id=model_id, base_model="tiny", lora_config=lora)


def batch(model_id: str, seq_id: int, *, seed: int = 0) -> pb.ForwardBackwardRequest:
    data = [random_datum(length, seed + length, vocab_size=VOCAB_SIZE) for length in (9, 5)]
    return request(data, model_id=model_id, seq_id=seq_id)


def step(model_id: str, seq_id: int) -> pb.OptimStepRequest:
    return pb.OptimStepRequest(model_id=model_id, seq_id=seq_id, adam_params=ADAM)


def in_memory(process: Process) -> set[str]:
    return set(process.engine.models)


async def park(process: Process) -> None:
    """Parks all models that are idle."""
    await asyncio.gather(*process.scheduler.tasks)  # answers are being stored
    await process.scheduler.parking.park_idle(0)


async def test_a_model_that_is_parked_after_each_operation_changes_no_bit_and_no_answer(
    start: Start, tmp_path: Path
) -> None:
    plain, parked = await start(tmp_path / "plain"), await start(tmp_path / "parked")
    for one in SCRIPT:
        await run(plain, [one])
        await run(parked, [one])
        await park(parked)
        assert in_memory(parked) == set()
    assert await outcomes(parked) == await outcomes(plain)
    assert_equal(await parked.weights(MODEL), await plain.weights(MODEL))
    assert parked.count("unpark_seconds_count") == len(SCRIPT)
    assert parked.count("replayed_operations_total", kind="forward_backward") == 0


async def test_a_step_that_is_refused_for_its_norm_names_the_datum_also_after_parking(
    start: Start, tmp_path: Path
) -> None:
    sampled = {"logprobs": np.full(3, -70, np.float32), "advantages": np.ones(3, np.float32)}
    one = datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), **sampled)
    requests = [creation("m"), request([one], "importance_sampling", model_id="m", seq_id=1), step("m", 2)]
    plain, parked = await start(tmp_path / "plain"), await start(tmp_path / "parked")
    for sent in requests:
        await run(plain, [sent])
        await park(parked)
        await run(parked, [sent])
    error = await parked.outcome("m", 2)
    assert "The largest ratio is that of data[0] of seq_id 1: e^" in str(error)
    assert str(error) == str(await plain.outcome("m", 2))


async def test_a_model_without_work_is_parked_after_the_idle_time_and_one_with_work_is_not(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation("idle"), creation("busy")])
    await process.send(step("busy", 2))  # waits for 1
    looking = asyncio.create_task(process.scheduler.parking.run(idle_s=0.05))
    await until(lambda: in_memory(process) == {"busy"})
    await asyncio.sleep(0.1)
    looking.cancel()
    assert in_memory(process) == {"busy"}
    assert process.count("parked_models") == 1


async def test_the_one_used_longest_ago_makes_place_for_another(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", max_models=2)
    for name in ("a", "b"):
        await run(process, [creation(name)])
    await run(process, [batch("a", 1), creation("c")])
    assert in_memory(process) == {"a", "c"}
    assert process.count("parked_models") == 1
    await run(process, [batch("b", 1)])
    assert in_memory(process) == {"b", "c"}
    assert process.count("models") == 2


def alone(engine: TrainingEngine, requests: Sequence[Any], *, seed: int) -> dict[str, Tensor]:
    """Tensors of a run after these requests, when the run has this engine for itself."""
    config = config_from_proto(creation("alone", seed=seed).lora_config, max_rank=4)
    engine.create_model("alone", config, "adamw")
    for one in requests:
        if isinstance(one, pb.ForwardBackwardRequest):
            engine.forward_backward([("alone", batch_of(one, engine.limits))])
        elif isinstance(one, pb.OptimStepRequest):
            engine.optim_step("alone", params_of(one))
    state = engine.capture("alone", with_optimizer=True)
    engine.delete_model("alone")
    return tensors_of(state)


def tensors_of(state: CapturedState) -> dict[str, Tensor]:
    assert state.optimizer is not None
    return {"adapter": state.adapter.flat, **state.optimizer.tensors}


@pytest.fixture(scope="module")
def lonely(base: BaseModel) -> TrainingEngine:
    return TrainingEngine(base, max_tokens_per_microbatch=24, deterministic=True)


@pytest.mark.slow
async def test_500_runs_in_16_places_have_the_weights_of_500_runs_alone(
    start: Start, lonely: TrainingEngine, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=16, max_bytes=1 << 28)
    names = [f"run-{n}" for n in range(500)]
    scripts = {
        name: [creation(name, seed=n), batch(name, 1, seed=n), step(name, 2), batch(name, 3, seed=2 * n), step(name, 4)]
        for n, name in enumerate(names)
    }
    for turn in ((0, 3), (3, 5)):
        for first in range(0, len(names), 16):
            together = [run(process, scripts[name][slice(*turn)]) for name in names[first : first + 16]]
            await asyncio.gather(*together)
            assert len(in_memory(process)) <= 16
    assert process.count("parked_models") == len(names) - 16
    assert process.count("unpark_seconds_count") >= len(names) - 16
    await park(process)
    for n, name in enumerate(names):
        _, state = process.snapshots.files.read(name, 4, process.engine.base)
        assert_equal(tensors_of(state), alone(lonely, scripts[name], seed=n))


async def test_a_kill_at_any_moment_of_parking_and_coming_back_changes_no_bit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0", policy=SnapshotPolicy(1, 0, 0))
    script = [creation(MODEL), batch(MODEL, 1), step(MODEL, 2), batch(MODEL, 3)]
    await run(process, script)
    await settled(process)
    folders: list[Path] = []

    def copied_around(owner: Any, name: str) -> None:
        """Copies the folder that a kill just before, and just after, this call would leave."""
        call = getattr(owner, name)

        async def around(*arguments: Any, **settings: Any) -> Any:
            folders.append(await process.crash(tmp_path / f"{len(folders)}-before-{name}"))
            result = await call(*arguments, **settings)
            folders.append(await process.crash(tmp_path / f"{len(folders)}-after-{name}"))
            return result

        monkeypatch.setattr(owner, name, around)

    for owner, name in (
        (process.snapshots, "_store"),
        (process.snapshots, "_count"),
        (process.scheduler.compute, "run_alone"),
        (process.journal, "live_model"),
        (process.scheduler.replay, "restored"),
    ):
        copied_around(owner, name)
    await park(process)
    assert in_memory(process) == set()
    await process.scheduler.check_held(MODEL)
    assert len(folders) == 12  # run_alone twice: to capture, and to free the memory
    expected = await process.weights(MODEL)
    await run(process, [step(MODEL, 4)])
    after = await process.weights(MODEL)
    monkeypatch.undo()
    for folder in folders[:12]:
        again = await start(folder)
        assert_equal(await again.weights(MODEL), expected)
        await run(again, [step(MODEL, 4)])
        assert_equal(await again.weights(MODEL), after)


async def test_after_a_restart_parked_models_stay_parked_until_something_is_asked_of_them(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=2)
    names = [f"run-{n}" for n in range(6)]
    for name in names:
        await run(process, [creation(name), batch(name, 1), step(name, 2)])
    await run(process, [batch("run-5", 3)])
    again = await start(await process.crash(tmp_path / "1"), max_models=2)
    assert again.count("parked_models") == 4
    assert again.count("models") == 2
    assert isinstance(await again.outcome("run-0", 2), Answer)
    assert "run-0" not in in_memory(again)  # an answer needs no model
    for name in names:
        assert_equal(await again.weights(name), await process.weights(name))


async def test_a_creation_waits_while_all_models_have_work_and_is_refused_in_the_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0", max_models=1)
    await run(process, [creation("a")])
    await process.send(step("a", 2))  # waits for 1
    monkeypatch.setattr(parking, "_PATIENCE_S", 0.05)
    with pytest.raises(OutOfCapacity, match="1 models are in memory, this server's max_models, and none"):
        await process.send(creation("b"))
    assert in_memory(process) == {"a"}
    monkeypatch.setattr(parking, "_PATIENCE_S", 60)
    creating = asyncio.create_task(process.send(creation("b")))
    await asyncio.sleep(0.01)
    assert not creating.done()
    await process.send(batch("a", 1))
    await (await creating).wait()
    assert in_memory(process) == {"b"}
    assert isinstance(await process.outcome("a", 2), Answer)


async def test_runs_that_share_one_place_all_come_to_their_turns(
    start: Start, lonely: TrainingEngine, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=1)
    scripts = {
        name: [creation(name, seed=n), batch(name, 1), step(name, 2), batch(name, 3), step(name, 4)]
        for n, name in enumerate("abcd")
    }
    await asyncio.gather(*[run(process, script) for script in scripts.values()])
    for n, (name, script) in enumerate(scripts.items()):
        assert_equal(await process.weights(name), alone(lonely, script, seed=n))


@pytest.mark.parametrize("in_order", [True, False])
async def test_runs_that_are_parked_at_every_moment_end_where_those_alone_end(
    start: Start, lonely: TrainingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_order: bool
) -> None:
    """Batches are pipelined, asked about and deleted, while everything without work is parked all the time. `in_order`:
    each arrives after the one before it; otherwise runs are parked with operations that wait for others, too."""
    monkeypatch.setattr(parking, "_MISSING_S", 0)
    monkeypatch.setattr(parking, "_PATIENCE_S", 60)  # however slow the machine is, a run has its place in the end
    process = await start(tmp_path / "0", max_models=2, policy=SnapshotPolicy(2, 0, 0))
    scripts: dict[str, list[Any]] = {}
    for n in range(6):
        name = f"run-{n}"
        batches = [one for k in range(1, 13, 3) for one in (batch(name, k), batch(name, k + 1), step(name, k + 2))]
        scripts[name] = [creation(name, seed=n), *batches]

    sent: list[Operation] = []
    parked_with_work: list[str] = []
    set_aside = process.scheduler.parking._set_aside

    def noted(model: ModelQueue) -> None:
        parked_with_work.append(model.model_id)
        set_aside(model)

    monkeypatch.setattr(process.scheduler.parking, "_set_aside", noted)

    async def client(name: str, *, seed: int) -> None:
        chance = random.Random(seed)
        made, *others = scripts[name]
        if not in_order:
            others = [one for k in range(0, 12, 4) for one in chance.sample(others[k : k + 4], 4)]
        for one in (made, *others):
            operation = await process.send(one)
            sent.append(operation)
            if chance.random() < 0.6 and (in_order or one is made):
                await asyncio.wait([operation.outcome])
            if chance.random() < 0.3:
                await process.scheduler.check_held(name)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() / 50)

    async def passer_by(n: int) -> None:
        await run(process, [creation(f"short-{n}"), batch(f"short-{n}", 1)])
        await delete(process, f"short-{n}")

    parker = asyncio.create_task(process.scheduler.parking.run(idle_s=0.001))
    clients = [client(name, seed=n) for n, name in enumerate(scripts)]
    await asyncio.gather(*clients, *(passer_by(n) for n in range(6)))
    assert all(isinstance(one, Answer) for one in [await operation.wait() for operation in sent])
    parker.cancel()
    assert bool(parked_with_work) == (not in_order)
    await asyncio.gather(*process.scheduler.tasks)
    again = await start(await process.crash(tmp_path / "1"), max_models=2)
    for n, (name, script) in enumerate(scripts.items()):
        expected = alone(lonely, script, seed=n)
        assert_equal(await process.weights(name), expected)
        assert_equal(await again.weights(name), expected)
    assert process.count("models") + process.count("parked_models") == len(scripts)
    assert process.snapshots.files.model_ids() == sorted(scripts)


async def test_more_models_than_max_known_models_are_refused(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", max_models=1, max_known_models=3)
    for name in "abc":
        await run(process, [creation(name)])
    with pytest.raises(OutOfCapacity, match=r"3 models are live, in memory or parked, .* max_known_models \(3\)"):
        await process.send(creation("d"))
    await run(process, [batch("a", 1)])  # one that is known has its place
    await delete(process, "b")
    await run(process, [creation("d")])
    assert isinstance(await process.outcome("d", 0), Answer)


async def delete(process: Process, model_id: str) -> None:
    await process.scheduler.delete(model_id, lambda: process.engine.delete_model(model_id))
    await process.operations.delete_files(model_id)


async def test_a_parked_model_is_saved_loaded_described_and_deleted_as_any_other(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation(MODEL), batch(MODEL, 1), step(MODEL, 2)])
    await park(process)
    await process.scheduler.check_held(MODEL)
    info = process.operations.models.get(MODEL).to_proto(next_seq_id=process.scheduler.models[MODEL].next_seq_id)
    assert (info.step, info.next_seq_id, info.optimizer, info.lora_config.rank) == (1, 3, types_pb2.OPTIMIZER_ADAMW, 4)
    for one in (save(3, "one"), batch(MODEL, 4), step(MODEL, 5), load(6, "one", load_optimizer=True)):
        await park(process)
        await run(process, [one])
        assert isinstance(await process.outcome(MODEL, one.seq_id), Answer)
    loaded = await process.weights(MODEL)
    await park(process)
    await delete(process, MODEL)
    assert process.count("parked_models") == 0
    assert process.snapshots.files.model_ids() == []
    with pytest.raises(ModelNotFound):
        await process.send(batch(MODEL, 7))
    await run(process, [creation(MODEL, seed=2)])
    assert not torch.equal((await process.weights(MODEL))["adapter"], loaded["adapter"])


async def test_a_parked_model_is_published_and_exported_as_one_in_memory(start: Start, tmp_path: Path) -> None:
    kinds = {
        "sampler_weights": types_pb2.CHECKPOINT_KIND_SAMPLER,
        "external_weights": types_pb2.CHECKPOINT_KIND_EXTERNAL,
    }
    stored: list[dict[str, bytes]] = []
    for is_parked in (False, True):
        process = await start(tmp_path / str(is_parked))
        await run(process, [creation(MODEL), batch(MODEL, 1), step(MODEL, 2)])
        files = {}
        for seq_id, (name, kind) in enumerate(kinds.items(), 3):
            if is_parked:
                await park(process)
            assert (MODEL in in_memory(process)) != is_parked
            await run(process, [save(seq_id, "one", kind=kind)])
            answer = await process.outcome(MODEL, seq_id)
            assert isinstance(answer, Answer), answer
            location = Location(MODEL, name, "one")
            with process.operations.loads.checkpoints.open_file(location, "adapter_model.safetensors") as file:
                files[name] = file.read()
        stored.append(files)
    assert stored[0] == stored[1]


async def test_a_model_that_is_deleted_while_it_moves_is_gone(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation("a"), creation("b")])
    await asyncio.gather(*process.scheduler.tasks)
    parking = asyncio.create_task(process.scheduler.parking.park_idle(0))
    await asyncio.sleep(0)
    await delete(process, "a")
    await parking
    coming = asyncio.create_task(process.scheduler.check_held("b"))
    await asyncio.sleep(0)
    await delete(process, "b")
    await coming
    assert (in_memory(process), process.count("models"), process.count("parked_models")) == (set(), 0, 0)
    assert process.snapshots.files.model_ids() == []


async def test_a_model_for_which_the_disk_has_no_room_stays_in_memory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0", max_models=1)
    await run(process, [creation("a"), batch("a", 1)])
    await asyncio.gather(*process.scheduler.tasks)
    monkeypatch.setattr(parking, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(parking, "_TRY_AGAIN_S", 0)
    with monkeypatch.context() as full:
        full.setattr(process.snapshots.files, "_min_free_bytes", 1 << 60)
        with pytest.raises(OutOfCapacity, match="or their disk is full"):
            await process.send(creation("b"))
    await run(process, [step("a", 2)])
    assert isinstance(await process.outcome("a", 2), Answer)
    await run(process, [creation("b")])
    assert in_memory(process) == {"b"}


async def test_a_parked_model_whose_snapshot_is_damaged_comes_back_from_the_one_before(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", policy=SnapshotPolicy(1, 0, 0))
    await run(process, [creation("a"), batch("a", 1), step("a", 2), batch("a", 3)])
    expected = await process.weights("a")
    await park(process)
    files = process.snapshots.files
    assert files.seq_ids("a") == [3, 2]
    (files.root / "a" / "3" / "adapter.npy").write_bytes(b"")
    assert_equal(await process.weights("a"), expected)
    assert process.num_replayed("forward_backward") == 1  # with the gradients of 3
    await run(process, [step("a", 4)])
    await park(process)
    for seq_id in files.seq_ids("a"):
        (files.root / "a" / str(seq_id) / "adapter.npy").write_bytes(b"")
    with pytest.raises(ModelLost, match="no snapshot from there on is intact"):
        await process.send(batch("a", 5))
    assert process.count("unrestored_models_total") == 1


async def test_models_are_parked_where_memory_for_another_is_short(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0")
    await run(process, [creation("a")])
    one = process.engine._bytes_in_training(process.operations.models.get("a").config)
    process.engine.follow(Plan(token_budget=24, models_bytes=2 * one))
    await run(process, [creation("b"), creation("c"), batch("a", 1)])
    assert in_memory(process) == {"c", "a"}
    await process.send(step("a", 3))  # waits for 2: it has work
    await process.send(step("c", 2))
    with monkeypatch.context() as impatient:
        impatient.setattr(parking, "_PATIENCE_S", 0.05)
        with pytest.raises(OutOfCapacity, match="this trainer's memory for models"):
            await process.send(batch("b", 1))
    await run(process, [batch("c", 1)])
    await run(process, [batch("b", 1)])  # tried again
    assert isinstance(await process.outcome("b", 1), Answer)


async def test_a_second_run_that_trains_all_parameters_parks_the_first(
    start: Start, model_folder: Path, tmp_path: Path
) -> None:
    def full() -> BaseModel:
        return BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)

    def script(name: str, *, seed: int) -> list[Any]:
        everything = types_pb2.LoraConfig(rank=0, train_attn=True, train_mlp=True, train_unembed=True)
        made = pb.CreateModelRequest(model_id=name, base_model="tiny", lora_config=everything)
        return [made, batch(name, 1, seed=seed), step(name, 2), batch(name, 3, seed=2 * seed), step(name, 4)]

    async def trained(process: Process, name: str) -> dict[str, Tensor]:
        await asyncio.gather(*process.scheduler.tasks)
        return {key: tensor.clone() for key, tensor in (await process.weights(name)).items()}

    expected = {}
    for seed, name in enumerate(("a", "b")):
        process = await Process.start(tmp_path / name, full(), max_models=1)
        await run(process, script(name, seed=seed))
        expected[name] = await trained(process, name)
        await delete(process, name)
        await process.stop()
    together = await Process.start(tmp_path / "together", full(), max_models=1)
    try:
        for one, other in zip(script("a", seed=0), script("b", seed=1), strict=True):
            await run(together, [one, other])
        for name in ("a", "b"):
            assert_equal(await trained(together, name), expected[name])
        assert together.count("parked_models") == 1
    finally:
        await together.stop()


async def test_a_run_whose_parking_ends_the_trainer_each_time_stays_in_memory_and_another_is_parked(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, noted = tmp_path / "0", dict[str, dict[tuple[str, int], Deaths]]()
    name = other_work("park a", b"")

    def noting(call: str) -> None:
        plain = getattr(TrainingEngine, call)

        def noted_call(engine: TrainingEngine, model_id: str, *arguments: Any, **settings: Any) -> Any:
            if model_id == "a":
                (tmp_path / call).mkdir(exist_ok=True)
                shutil.copy(folder / NAME, tmp_path / call / NAME)
                noted[call] = Executing(tmp_path / call).deaths  # as the next process finds it after a death
            return plain(engine, model_id, *arguments, **settings)

        monkeypatch.setattr(TrainingEngine, call, noted_call)

    noting("capture")
    noting("delete_model")
    process = await start(folder)
    await run(process, [creation("a"), creation("b")])
    process.scheduler.executing.deaths[name] = Deaths(executing=1)
    await park(process)
    assert in_memory(process) == set()
    assert noted == {call: {name: Deaths(executing=2)} for call in ("capture", "delete_model")}
    assert not process.scheduler.executing.deaths

    await run(process, [batch("a", 1), batch("b", 1)])
    process.scheduler.executing.deaths[name] = Deaths(executing=2)
    noted.clear()
    await park(process)
    assert in_memory(process) == {"a"}
    assert noted == {}
    await run(process, [step("a", 2), step("b", 2)])
    assert isinstance(await process.outcome("a", 2), Answer)


def forsaken(name: str, *, seed: int) -> list[Any]:
    """Requests of a client that died while it sent them: number 3 is missing."""
    return [creation(name, seed=seed), batch(name, 1, seed=seed), step(name, 2), batch(name, 4), step(name, 5)]


async def send_all(process: Process, requests: Sequence[Any]) -> list[Operation]:
    """Sends the requests. Returns the operations behind the missing number, once those before it are done."""
    *before, late, last = [await process.send(one) for one in requests]
    for operation in before:
        await operation.wait()
    await asyncio.gather(*process.scheduler.tasks)
    return [late, last]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_MISSING_S", 0)


@pytest.mark.usefixtures("hasty")
async def test_runs_that_wait_for_a_number_that_never_comes_keep_nobody_out(
    start: Start, lonely: TrainingEngine, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=2)
    names, waiting = [f"run-{n}" for n in range(5)], dict[str, list[Operation]]()
    for n, name in enumerate(names):
        waiting[name] = await send_all(process, forsaken(name, seed=n))
    assert process.count("parked_models") == 3
    status = await process.scheduler.describe("run-0", 5)
    assert status.reason == "waits for seq_id 3 of this model, which has not arrived"
    held = process.scheduler.held.total
    repeated, is_new = await process.scheduler.accept(
        "run-0", 4, Body.pack("forward_backward", batch("run-0", 4)), message_bytes=1
    )
    assert (repeated, is_new) == (waiting["run-0"][0], False)
    assert (process.count("parked_models"), process.scheduler.held.total) == (3, held)  # a repeat brings nothing back
    for operation in waiting["run-0"]:
        assert operation.work is None
    missing = {name: batch(name, 3, seed=9) for name in names}
    await asyncio.gather(*[run(process, [one]) for one in missing.values()])
    for n, name in enumerate(names):
        assert all(isinstance(one, Answer) for one in [await operation.wait() for operation in waiting[name]])
        made, one, two, four, five = forsaken(name, seed=n)
        script = [made, one, two, missing[name], four, five]
        assert_equal(await process.weights(name), alone(lonely, script, seed=n))
    assert process.scheduler.held.total == 0
    assert (
        process.count("queue_length", kind="forward_backward") == process.count("queue_length", kind="optim_step") == 0
    )


@pytest.mark.usefixtures("hasty")
async def test_a_kill_while_runs_wait_for_a_number_loses_none_of_their_operations(
    start: Start, lonely: TrainingEngine, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=2)
    names = [f"run-{n}" for n in range(5)]
    for n, name in enumerate(names):
        await send_all(process, forsaken(name, seed=n))
    again = await start(await process.crash(tmp_path / "1"), max_models=2)
    assert len(in_memory(again)) <= 2
    assert again.count("models") == 2
    for n, name in enumerate(names):
        made, one, two, four, five = forsaken(name, seed=n)
        three = batch(name, 3, seed=9)
        await run(again, [three])
        assert isinstance(await again.outcome(name, 5), Answer)
        assert_equal(await again.weights(name), alone(lonely, [made, one, two, three, four, five], seed=n))
        assert len(in_memory(again)) <= 2
    assert again.num_replayed("forward_backward") == 2  # of the two that were in memory at the kill


@pytest.mark.usefixtures("hasty")
async def test_a_missing_number_is_given_up_in_its_time_also_while_the_run_is_parked(
    start: Start, tmp_path: Path
) -> None:
    process = await start(tmp_path / "0", max_models=1)
    looking = LostOperations(process.scheduler, process.operations.work_of, timeout_s=10)
    late, last = await send_all(process, forsaken("a", seed=0))
    await looking.look(0)
    await run(process, [creation("b")])
    assert in_memory(process) == {"b"}
    await looking.look(9)
    assert in_memory(process) == {"b"}
    await looking.look(10)
    assert isinstance(await late.wait(), Answer)
    with pytest.raises(FailedPrecondition, match="seq_id 3 has not arrived"):
        await last.wait()
    await run(process, [batch("a", 6), step("a", 7)])
    assert isinstance(await process.outcome("a", 7), Answer)


async def test_a_run_whose_operations_arrive_in_disorder_stays_in_memory_for_a_while(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0", max_models=1)
    await send_all(process, forsaken("a", seed=0))
    creating = asyncio.create_task(process.send(creation("b")))
    await asyncio.sleep(0.1)
    assert not creating.done()
    monkeypatch.setattr(parking, "_MISSING_S", 0.2)
    await (await creating).wait()
    assert in_memory(process) == {"b"}


@pytest.mark.usefixtures("hasty")
async def test_a_parked_run_whose_operations_wait_can_be_deleted(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    waiting = await send_all(process, forsaken("a", seed=0))
    await park(process)
    assert in_memory(process) == set()
    await delete(process, "a")
    for operation in waiting:
        with pytest.raises(ModelNotFound, match="'a' was deleted"):
            await operation.wait()
    assert process.scheduler.models.gaps() == []
    assert process.scheduler.held.total == 0
    await run(process, [creation("a")])
    assert isinstance(await process.outcome("a", 0), Answer)


@pytest.mark.usefixtures("hasty")
async def test_a_parked_run_whose_operations_wait_can_move(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0")
    waiting = await send_all(process, forsaken("a", seed=0))
    await park(process)
    await process.moving.release("a", Move("a" * 32, "target"))
    for operation in waiting:
        with pytest.raises(ModelMoved):
            await operation.wait()
    target = await start(tmp_path / "1", store=tmp_path / "0" / "checkpoints", trainer_id="target")
    await target.moving.adopt("a", "a" * 32)
    await run(target, [batch("a", 3)])
    assert isinstance(await target.outcome("a", 5), Answer)


@pytest.mark.usefixtures("hasty")
async def test_operations_of_a_parked_run_wait_on_while_there_is_no_memory_for_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(tmp_path / "0")
    waiting = await send_all(process, forsaken("a", seed=0))
    await park(process)
    with monkeypatch.context() as full:
        full.setattr(parking, "_PATIENCE_S", 0.05)
        full.setattr(process.engine, "has_room_for", lambda _: False)
        full.setattr(process.engine, "create_model", _no_memory)
        with pytest.raises(OutOfCapacity, match="no memory"):
            await process.send(batch("a", 3))
    assert not any(operation.outcome.done() for operation in waiting)
    await run(process, [batch("a", 3)])
    assert all(isinstance(one, Answer) for one in [await operation.wait() for operation in waiting])


def _no_memory(*_: object) -> None:
    raise OutOfCapacity("no memory")


@pytest.mark.usefixtures("hasty")
async def test_operations_of_a_parked_run_whose_files_are_gone_fail(start: Start, tmp_path: Path) -> None:
    process = await start(tmp_path / "0", policy=SnapshotPolicy(1, 0, 0))
    before = [creation("a"), batch("a", 1), step("a", 2), batch("a", 3), step("a", 4)]
    waiting = await send_all(process, [*before, batch("a", 6), step("a", 7)])
    await park(process)
    shutil.rmtree(process.snapshots.files.root / "a")
    with pytest.raises(ModelLost):
        await process.scheduler.check_held("a")
    for operation in waiting:
        with pytest.raises(ModelLost):
            await operation.wait()


class AtOnce:
    """A Shelf whose calls end without waiting for anything."""

    async def put_away(self, model_id: str, seq_id: int) -> None: ...

    async def bring_back(self, model_id: str) -> None: ...


@pytest.mark.timeout(60)
async def test_a_caller_that_comes_as_a_move_ends_goes_on(start: Start, tmp_path: Path) -> None:
    """Its task ran between the end of the move and the callbacks of that, and waited for the move without ever giving
    the event loop back: the whole trainer hung."""
    process = await start(tmp_path / "0")
    await run(process, [creation("one")])
    await asyncio.gather(*process.scheduler.tasks)
    process.scheduler.parking.shelf = AtOnce()

    async def comes(passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)
        await process.scheduler.parking.have("one")

    parked = process.scheduler.parking.park_idle(0)
    await asyncio.gather(parked, *(comes(passes) for passes in range(6)))
    assert process.count("unpark_seconds_count") == 0  # it has nothing to bring back
    assert process.count("parked_models") == 0


@pytest.mark.usefixtures("hasty")
async def test_memory_of_operations_stays_counted_while_their_run_is_parked(start: Start, tmp_path: Path) -> None:
    """Otherwise any number of runs could have as many bytes as one may, and come back at once."""
    process = await start(tmp_path / "0")
    late, last = [batch("a", 3), step("a", 4)]
    body, num_bytes = Body.pack("forward_backward", late), 1 << 20
    await run(process, [creation("a"), batch("a", 1)])
    operation, _ = await process.scheduler.accept("a", 3, body, held_bytes=num_bytes)
    work = process.operations.work_of(late)
    assert isinstance(work, Batch)
    await process.scheduler.begin(operation, work)
    await process.send(last)
    await asyncio.gather(*process.scheduler.tasks)
    held = process.scheduler.held.total
    assert held >= num_bytes
    for _ in range(3):
        await park(process)
        assert process.scheduler.held.total == held
        await process.scheduler.check_held("a")
        assert process.scheduler.held.total > 0
        held = process.scheduler.held.total  # of the batch as it was read
    await run(process, [batch("a", 2)])
    await operation.wait()
    await process.outcome("a", 4)
    await asyncio.gather(*process.scheduler.tasks)
    assert process.scheduler.held.total == 0
