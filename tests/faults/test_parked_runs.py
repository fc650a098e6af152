"""A trainer with 500 known runs: the memory of one with 16, and after a kill they go on as if each were alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.faults.lone_trainer import Trainer
from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE, make_model
from tinsmith.v1 import metrics_pb2, metrics_pb2_grpc, types_pb2
from tinsmith.v1 import trainer_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = pb.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
PLACES, KNOWN = 16, 500
COMPARED = range(KNOWN - 1, 0, -10)
"""Runs that are held against the same run alone, from the last one on: in places, and parked for short and for long."""
FLAGS = ("--max-models", str(PLACES), "--token-budget", "40", "--deterministic", "true")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "trainer", make_model(tmp_path / "model"), flags=FLAGS)
    yield trainer
    trainer.kill()


def create(stub: Any, name: str, *, seed: int = 1) -> None:
    lora = types_pb2.LoraConfig(rank=4, seed=seed, train_attn=True, train_mlp=True, train_unembed=True)
    stub.CreateModel(pb.CreateModelRequest(model_id=name, base_model="m", lora_config=lora))


def train(stub: Any, name: str, seq_id: int, *, seed: int = 0) -> dict[str, float]:
    data = [random_datum(length, seed + length, vocab_size=VOCAB_SIZE) for length in (9, 17)]
    answer = stub.ForwardBackward(request(data, model_id=name, seq_id=seq_id))
    step = stub.OptimStep(pb.OptimStepRequest(model_id=name, seq_id=seq_id + 1, adam_params=ADAM))
    return {**answer.metrics, **step.metrics}


def saved(trainer: Trainer, stub: Any, name: str, seq_id: int) -> list[bytes]:
    """Adapter and optimizer of the run, as a save writes them."""
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    save = pb.SaveCheckpointRequest(model_id=name, seq_id=seq_id, kind=kind, name="end", overwrite=True)
    folder = trainer.checkpoints / stub.SaveCheckpoint(save).checkpoint.location
    return [(folder / f"{part}.safetensors").read_bytes() for part in ("adapter_model", "optimizer")]


def figure(trainer: Trainer, name: str) -> float:
    with grpc.insecure_channel(trainer.address) as channel:
        reply = metrics_pb2_grpc.MetricsServiceStub(channel).GetMetrics(metrics_pb2.GetMetricsRequest())
    return next(float(line.split()[1]) for line in reply.exposition.splitlines() if line.startswith(f"{name} "))


def test_a_trainer_that_knows_500_runs_takes_no_more_memory_than_with_16(trainer: Trainer) -> None:
    names = [f"run-{n}" for n in range(KNOWN)]
    with trainer.stub() as stub, ThreadPoolExecutor(PLACES) as pool:

        def live(n: int) -> dict[str, float]:
            create(stub, names[n], seed=n)
            return train(stub, names[n], 1, seed=n)

        first = [*pool.map(live, range(PLACES))]
        with_16 = psutil.Process(trainer.pid).memory_info().rss
        first += pool.map(live, range(PLACES, KNOWN))
        with_500 = psutil.Process(trainer.pid).memory_info().rss
        assert figure(trainer, "trainer_models") == PLACES
        assert figure(trainer, "trainer_parked_models") == KNOWN - PLACES
        print(f"{with_16 / 1e6:.1f} MB with {PLACES} runs, {with_500 / 1e6:.1f} MB with {KNOWN}")
        assert with_500 <= 1.05 * with_16
        trainer.kill()
    with trainer.stub() as stub:
        assert figure(trainer, "trainer_parked_models") >= KNOWN - PLACES
        for n in COMPARED:
            later = [train(stub, names[n], seq_id, seed=n + seq_id) for seq_id in (3, 5)]
            parked = saved(trainer, stub, names[n], 7)
            create(stub, "alone", seed=n)
            assert first[n] == train(stub, "alone", 1, seed=n)
            assert later == [train(stub, "alone", seq_id, seed=n + seq_id) for seq_id in (3, 5)]
            assert parked == saved(trainer, stub, "alone", 7)
            stub.DeleteModel(pb.DeleteModelRequest(model_id="alone"))


def test_runs_of_several_ranks_are_parked_with_the_gradients_of_all(tmp_path: Path) -> None:
    flags = ("--max-models", "1", "--token-budget", "40", "--deterministic", "true")
    trainer = Trainer(tmp_path / "trainer", make_model(tmp_path / "model"), 2, flags=flags)

    def accumulate(stub: Any, name: str, seq_id: int) -> None:
        data = [random_datum(length, seq_id + length, vocab_size=VOCAB_SIZE) for length in (9, 17, 12, 5)]
        stub.ForwardBackward(request(data, model_id=name, seq_id=seq_id))

    def step(stub: Any, name: str, seq_id: int) -> float:
        answer = stub.OptimStep(pb.OptimStepRequest(model_id=name, seq_id=seq_id, adam_params=ADAM))
        return answer.metrics["grad_norm:mean"]

    try:
        with trainer.stub() as stub:
            create(stub, "plain")
            expected = []
            for seq_id in (1, 4):
                accumulate(stub, "plain", seq_id)
                accumulate(stub, "plain", seq_id + 1)
                expected.append(step(stub, "plain", seq_id + 2))
            found: dict[str, list[float]] = {"one": [], "other": []}
            for name in found:
                create(stub, name)
            for seq_id in (1, 4):
                for call in (accumulate, accumulate, step):
                    for name, norms in found.items():
                        norm = call(stub, name, seq_id)
                        norms += [] if norm is None else [norm]
                    seq_id += 1
            assert found["one"] == found["other"]
            assert found["one"] == pytest.approx(expected, rel=1e-5)
            assert figure(trainer, "trainer_park_seconds_count") >= 12
    finally:
        trainer.kill()
