"""A trainer alone, of one rank or two, killed in the middle of accepted work, comes back bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lone_trainer import Trainer
from tests.faults.moments import fresh_seed, repeated
from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE, make_model
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "s:train:0"
ADAM = pb.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
NUM_STEPS = 20
KINDS = {"one rank": 1, "two ranks": 2}


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@repeated
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_is_killed_ends_where_one_that_was_not_ends(
    base_model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num_ranks = KINDS[kind]
    undisturbed = Trainer(tmp_path / "undisturbed", base_model, num_ranks)
    try:
        with undisturbed.stub() as stub:
            submit(stub)
            began = time.monotonic()
            expected = results(stub)
            longest_s = time.monotonic() - began
    finally:
        undisturbed.kill()
    seed = fresh_seed()
    trainer = Trainer(tmp_path / "killed", base_model, num_ranks)
    try:
        with trainer.stub() as stub:
            submit(stub)
            time.sleep(random.Random(seed).uniform(0, longest_s))
            trainer.kill()
        shown = tinsmith("journal", "show", "--state-dir", str(trainer.state_dir))
        assert f"{MODEL}  live, " in shown
        with trainer.stub() as stub:
            assert results(stub) == expected, f"{trainer.tail()}\nseed {seed}"
            shown = tinsmith("journal", "show", "--trainer", trainer.address)
            assert f"{MODEL}  live, " in shown
    finally:
        trainer.kill()


def submit(stub: Any) -> None:
    """All of it; returns when it is accepted."""
    lora = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
    stub.CreateModel(pb.CreateModelRequest(model_id=MODEL, base_model="m", lora_config=lora))
    calls = []
    for n in range(NUM_STEPS):
        data = [random_datum(length, n + length, vocab_size=VOCAB_SIZE) for length in (9, 30, 17, 5)]
        calls.append(stub.ForwardBackward.future(request(data, model_id=MODEL, seq_id=2 * n + 1)))
        calls.append(stub.OptimStep.future(pb.OptimStepRequest(model_id=MODEL, seq_id=2 * n + 2, adam_params=ADAM)))
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    save = pb.SaveCheckpointRequest(model_id=MODEL, seq_id=2 * NUM_STEPS + 1, kind=kind, name="last")
    calls.append(stub.SaveCheckpoint.future(save))
    for call in calls:
        call.initial_metadata()


def results(stub: Any) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The metrics of all operations, and the SHA-256 of each file of the checkpoint at the end."""
    answers = [stub.WaitResult(pb.WaitResultRequest(model_id=MODEL, seq_id=n)) for n in range(1, 2 * NUM_STEPS + 2)]
    metrics = [dict(one.forward_backward.metrics or one.optim_step.metrics) for one in answers]
    location = answers[-1].save_checkpoint.checkpoint.location
    files = stub.GetCheckpoint(pb.GetCheckpointRequest(location=location)).files
    return metrics, {file.name: file.sha256 for file in files}


def tinsmith(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tinsmith_cli", *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout
