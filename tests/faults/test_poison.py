"""A request that ends the trainer each time it is run, and a device that is broken: others notice a delay."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import load_file

from tests.faults.lone_trainer import Trainer
from tests.faults.poisoned_trainer import TOKENS
from tests.faults.runs import LARGEST_GAP
from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE, make_model
from tests.support.waiting import wait_until
from tinsmith import errors
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from tinsmith.v1.trainer_pb2_grpc import TrainerServiceStub
from trainer_service.durability.records import EntryState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = pb.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
POISONED = "s:train:99"
OTHERS = [f"s:train:{n}" for n in range(16)]
NUM_STEPS = 3
SAVE = 2 * NUM_STEPS + 1
MODULE = "tests.faults.poisoned_trainer"
TOGETHER = ("--token-budget", "512", "--snapshot-steps", "2")
"""Flags of a trainer whose models share micro-batches."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(stack: ExitStack, folder: Path, model: Path, num_ranks: int = 1, **settings: Any) -> Trainer:
    trainer = Trainer(folder, model, num_ranks, module=MODULE, **settings)
    stack.callback(trainer.kill)
    return trainer


def requests(model_id: str, *, poisoned_step: int | None = None) -> list[Any]:
    """A model, its steps and a save. The poisoned step has poisoned datums for each of two ranks."""
    lora = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
    made: list[Any] = [pb.CreateModelRequest(model_id=model_id, base_model="m", lora_config=lora)]
    number = int(model_id.rpartition(":")[2])
    for n in range(NUM_STEPS):
        data = [random_datum(length, 10 * number + n, vocab_size=VOCAB_SIZE) for length in (9, 17)]
        if n == poisoned_step:
            data += [datum([*TOKENS, 9], target_tokens=np.arange(6), weights=np.ones(6, np.float32))] * 6
        made.append(request(data, model_id=model_id, seq_id=2 * n + 1))
        made.append(pb.OptimStepRequest(model_id=model_id, seq_id=2 * n + 2, adam_params=ADAM))
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    return [*made, pb.SaveCheckpointRequest(model_id=model_id, seq_id=SAVE, kind=kind, name="last")]


def outcomes(trainer: Trainer, sent: list[Any], given_up: Event) -> list[Any]:
    """The answer or the error of each request, which is sent again while the trainer is away, as the gateway does."""
    with grpc.insecure_channel(trainer.address) as channel:
        stub = TrainerServiceStub(channel)
        results = []
        for one in sent:
            verb = getattr(stub, type(one).__name__.removesuffix("Request"))
            while not given_up.is_set():
                try:
                    results.append(verb(one))
                except grpc.RpcError as error:
                    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # type: ignore[attr-defined]
                        time.sleep(0.05)
                        continue
                    results.append(from_rpc_error(error))  # type: ignore[arg-type]  # it has what that one has
                break
        return results


def supervised(trainer: Trainer, sent: list[list[Any]], *, most_ends: int) -> tuple[list[list[Any]], int]:
    """All outcomes of each model, and how often the trainer has ended and was started again."""
    given_up = Event()
    trainer.start()
    num_ends = 0
    with ThreadPoolExecutor(len(sent)) as threads:
        running = [threads.submit(outcomes, trainer, one, given_up) for one in sent]
        try:
            while not all(one.done() for one in running):
                if not trainer.is_running:
                    num_ends += 1
                    assert num_ends <= most_ends, f"it ended {num_ends} times:\n{trainer.tail()}"
                    trainer.start()
                time.sleep(0.05)
        finally:
            given_up.set()
        return [one.result() for one in running], num_ends


def weights(trainer: Trainer, results: list[Any]) -> dict[str, Any]:
    saved = results[-1]
    assert isinstance(saved, pb.SaveCheckpointResponse), saved
    return load_file(trainer.checkpoints / saved.checkpoint.location / "adapter_model.safetensors")


def states(trainer: Trainer) -> list[EntryState]:
    """The states of all operations in the journal of a trainer that does not run."""
    with closing(sqlite3.connect(trainer.state_dir / "journal.sqlite")) as journal:
        return [EntryState(state) for (state,) in journal.execute("SELECT state FROM operations")]


@pytest.mark.parametrize("flags", [TOGETHER, (*TOGETHER, "--deterministic", "true")], ids=["usual", "deterministic"])
def test_a_request_that_kills_the_trainer_is_not_run_a_third_time_and_sixteen_models_are_unharmed(
    model: Path, tmp_path: Path, trainers: ExitStack, flags: tuple[str, ...]
) -> None:
    sent = [requests(one) for one in OTHERS]
    healthy = make(trainers, tmp_path / "healthy", model, flags=flags)
    expected, _ = supervised(healthy, sent, most_ends=0)
    healthy.kill()

    trainer = make(trainers, tmp_path / "poisoned", model, flags=flags, POISON="SIGKILL")
    (poisoned, *others), num_ends = supervised(trainer, [requests(POISONED, poisoned_step=1), *sent], most_ends=4)
    assert num_ends == 2
    for ours, theirs in zip(others, expected, strict=True):
        # Models share other micro-batches after a death. A lost or repeated step would differ by the learning rate.
        gap = 0 if "--deterministic" in flags else 10 * LARGEST_GAP
        left, right = weights(trainer, ours), weights(healthy, theirs)
        assert all(np.abs(left[name] - right[name]).max() <= gap for name in right)
    check_poisoned(poisoned)


def test_a_request_that_kills_the_trainer_before_it_is_in_the_journal_is_not_read_a_third_time(
    model: Path, tmp_path: Path, trainers: ExitStack
) -> None:
    trainer = make(trainers, tmp_path / "arrival", model, flags=TOGETHER, POISON="arrival")
    sent = [requests(POISONED, poisoned_step=1), requests(OTHERS[0])]
    (poisoned, other), num_ends = supervised(trainer, sent, most_ends=4)
    assert num_ends == 2
    check_poisoned(poisoned)
    assert weights(trainer, other)


@pytest.mark.parametrize("how", ["append", "finish", "park", "delete", "copy", "verify"])
def test_work_of_any_kind_that_kills_the_trainer_is_given_up_after_two_deaths_and_another_model_is_unharmed(
    model: Path, tmp_path: Path, trainers: ExitStack, how: str
) -> None:
    park = ("--park-after-s", "0.5") if how == "park" else ()
    flags = (*TOGETHER, *park)
    trainer = make(trainers, tmp_path / "run", model, flags=flags, POISON=how, POISON_RUN=POISONED)
    saved = f"{POISONED}/weights/last"
    last = {
        "delete": pb.DeleteModelRequest(model_id=POISONED),
        "copy": pb.CopyCheckpointRequest(source=saved, destination="t:train:0/weights/last"),
        "verify": pb.VerifyCheckpointRequest(location=saved),
    }.get(how)
    sent = [*requests(POISONED), *([last] if last else [])]
    (poisoned, other), num_ends = supervised(trainer, [sent, requests(OTHERS[0])], most_ends=4)
    if how == "park":  # it dies when the runs are idle
        while num_ends < 2:
            wait_until(lambda: not trainer.is_running, what="parking kills it", limit_s=120)
            num_ends += 1
            trainer.start()
        trainer.wait_serving()
        wait_until(lambda: "is not parked: the trainer ended twice" in trainer.log.read_text(), what="it gives up")
    assert num_ends == 2
    failed = {n: str(one) for n, one in enumerate(poisoned) if isinstance(one, errors.ServiceError)}
    if how in ("append", "finish"):
        # An answer may reach its client before the journal takes it: 3 may have been answered before the first death.
        assert failed.keys() in ({3, 4}, {4} if how == "finish" else {3, 4})
    else:
        assert failed.keys() == ({len(sent) - 1} if last else set())
    assert all("the trainer ended twice while it" in one for one in failed.values()), failed
    assert weights(trainer, other)
    assert trainer.is_running


def test_three_requests_that_kill_the_trainer_fail_no_save_beside_them(
    model: Path, tmp_path: Path, trainers: ExitStack
) -> None:
    """Their first deaths come one after the other, and each finds the other model at its saves, which are slow."""
    guilty = [requests(f"s:train:{99 - n}", poisoned_step=n) for n in range(3)]
    creation, *steps, _ = requests(OTHERS[0])
    saving = [creation, *steps[:2]]
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    for n in range(3):
        name = {"model_id": OTHERS[0], "seq_id": 3 + n, "name": f"save{n}"}
        saving.append(pb.SaveCheckpointRequest(**name, kind=kind))
    trainer = make(trainers, tmp_path / "saving", model, flags=TOGETHER, POISON="SIGKILL", POISON_SAVE_S="8")
    (saved, *failed), num_ends = supervised(trainer, [saving, *guilty], most_ends=6)
    assert 2 <= num_ends <= 6
    assert not [one for one in saved if isinstance(one, errors.ServiceError)], saved
    assert weights(trainer, saved)
    for n, results in enumerate(failed):
        names = [number for number, one in enumerate(results) if isinstance(one, errors.ServiceError)]
        assert names == [2 * n + 1, 2 * n + 2], results


def check_poisoned(results: list[Any]) -> None:
    """Its second batch and the step on it have failed. All else was done."""
    failed = {n: str(one) for n, one in enumerate(results) if isinstance(one, errors.ServiceError)}
    assert failed.keys() == {3, 4}, results
    assert "the trainer ended twice while it ran this" in failed[3]
    assert "was not applied, because a forward_backward before it failed" in failed[4]
    assert "the trainer ended twice while it ran this" in failed[4]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_request_that_kills_any_rank_is_not_run_a_third_time(
    model: Path, tmp_path: Path, trainers: ExitStack, rank: str
) -> None:
    flags = ("--token-budget", "40")
    trainer = make(trainers, tmp_path / "ranks", model, 2, flags=flags, POISON="SIGKILL", POISON_RANK=rank)
    sent = [requests(POISONED, poisoned_step=1), requests(OTHERS[0])]
    (poisoned, other), num_ends = supervised(trainer, sent, most_ends=4)
    assert num_ends == 2
    check_poisoned(poisoned)
    assert weights(trainer, other)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_broken_device_is_a_delay_and_health_says_so_before_the_trainer_ends(
    model: Path, tmp_path: Path, trainers: ExitStack, num_ranks: int
) -> None:
    sent = [requests(POISONED, poisoned_step=1), requests(OTHERS[0])]
    healthy = make(trainers, tmp_path / "healthy", model, num_ranks)
    expected, _ = supervised(healthy, sent, most_ends=0)
    healthy.kill()

    times = tmp_path / "times"
    times.write_text("1")
    folder = tmp_path / "broken"
    trainer = make(trainers, folder, model, num_ranks, POISON="fault", POISON_TIMES=str(times))
    trainer.start()
    trainer.wait_serving()
    given_up = Event()
    with ThreadPoolExecutor(3) as threads, grpc.insecure_channel(trainer.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
        told = threads.submit(watch, stub)
        for one in sent:
            threads.submit(outcomes, trainer, one, given_up)
        wait_until(lambda: not trainer.is_running, what="the trainer ends", limit_s=60)
        given_up.set()
        if num_ranks == 1:
            assert trainer.status == 1
            assert told.result() == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    assert EntryState.FAILED not in states(trainer)
    results, num_ends = supervised(trainer, sent, most_ends=0)
    assert num_ends == 0
    assert results[0][-1].checkpoint.step == NUM_STEPS
    for ours, theirs in zip(results, expected, strict=True):
        left, right = weights(trainer, ours), weights(healthy, theirs)
        assert all((left[name] == right[name]).all() for name in right)


def watch(stub: Any) -> list[int]:
    """Each status that the service has told of itself, until it is gone."""
    told = []
    try:
        for reply in stub.Watch(health_pb2.HealthCheckRequest()):
            told.append(reply.status)
    except grpc.RpcError:
        pass
    return told
