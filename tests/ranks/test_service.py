"""The trainer of several ranks as a service: served by rank 0, ended together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tinsmith.v1 import trainer_pb2, types_pb2
from tinsmith.v1.trainer_pb2_grpc import TrainerServiceStub
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun

pytestmark = pytest.mark.slow

MODEL = "s:train:0"


@contextmanager
def two_ranks(folder: Path, model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """The process of torchrun, the port of rank 0, and the log of all."""
    port, ranks_port = free_ports(2)
    command = [
        *(sys.executable, "-m", *torchrun(2, ranks_port), "trainer_service"),
        *("--base-model", str(model), "--listen", f"127.0.0.1:{port}"),
        *("--state-dir", str(folder / "state"), "--checkpoint-dir", str(folder / "checkpoints"), *flags),
    ]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield process, port, log
    finally:
        process.kill()
        process.wait()


def train(stub: TrainerServiceStub) -> dict[str, float]:
    """A model, one batch and one step."""
    config = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
    stub.CreateModel(trainer_pb2.CreateModelRequest(model_id=MODEL, base_model="m", lora_config=config))
    data = [random_datum(n, n, vocab_size=VOCAB_SIZE) for n in (5, 20, 9)]
    done = stub.ForwardBackward(request(data, model_id=MODEL, seq_id=1))
    adam = trainer_pb2.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    step = stub.OptimStep(trainer_pb2.OptimStepRequest(model_id=MODEL, seq_id=2, adam_params=adam))
    return {**done.metrics, **step.metrics}


def wait_for(log: Path, text: str, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: text in log.read_text() or process.poll() is not None, what=f"{text} in {log}", limit_s=90)
    assert text in log.read_text(), log.read_text()


def test_a_killed_rank_ends_all_of_them_and_says_so(model_folder: Path, tmp_path: Path) -> None:
    with two_ranks(tmp_path, model_folder, "--shard-base", "true", "--model-names", '["m"]') as (process, port, log):
        wait_for(log, '"serving m"', process)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            metrics = train(TrainerServiceStub(channel))
            assert metrics["grad_norm:mean"] > 0
            ranks = {lines["rank"] for lines in map(json.loads, filter(_is_json, log.read_text().splitlines()))}
            assert ranks == {0, 1}  # each line says whose it is
            children = psutil.Process(process.pid).children(recursive=True)
            follower = rank_1(children)
            started = time.monotonic()
            follower.kill()
            assert process.wait(20) != 0
        assert time.monotonic() - started < 15
        assert not alive(children)
        assert "Signal 9 (SIGKILL)" in log.read_text()
        assert f"(pid: {follower.pid})" in log.read_text()


def test_a_stopped_rank_is_noticed_within_the_timeout_and_ends_all_of_them(model_folder: Path, tmp_path: Path) -> None:
    timeout_s = 5
    flags = ("--shard-base", "true", "--rank-timeout-s", str(timeout_s), "--model-names", '["m"]')
    with two_ranks(tmp_path, model_folder, *flags) as (process, port, log):
        wait_for(log, '"serving m"', process)
        time.sleep(timeout_s + 1)  # without work ranks wait for each other as long as it takes
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = TrainerServiceStub(channel)
            train(stub)
            data = [random_datum(60, n, vocab_size=VOCAB_SIZE) for n in range(8)]
            jobs = [stub.ForwardBackward.future(request(data, model_id=MODEL, seq_id=n)) for n in range(3, 40)]
            jobs[0].result(30)
            children = psutil.Process(process.pid).children(recursive=True)
            started = time.monotonic()
            rank_1(children).suspend()
            jobs.append(stub.ForwardBackward.future(request(data, model_id=MODEL, seq_id=40)))
            assert jobs[-1].exception(20).code() is grpc.StatusCode.UNAVAILABLE
            assert process.wait(20) != 0
        assert time.monotonic() - started < timeout_s + 15
        assert not alive(children)
        (line,) = [line for line in log.read_text().splitlines() if "rank 0 of 2 ends" in line]
        assert json.loads(line)["level"] == "CRITICAL"
        assert "rank 1 did not answer: gone, or stopped (ranks wait at most 5 s, --rank-timeout-s" in line


def rank_1(processes: list[psutil.Process]) -> psutil.Process:
    return next(one for one in processes if one.environ().get("RANK") == "1")


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def _is_json(line: str) -> bool:
    return line.startswith("{")


def test_a_stack_with_ranks_trains_shows_one_endpoint_of_metrics_and_stops_in_seconds(
    toy: Path, tmp_path: Path
) -> None:
    with Stack(tmp_path / "state", base_models=[f"m={toy}"], flags=["--trainer-ranks", "2"]) as stack:
        with grpc.insecure_channel(stack.trainers[0]) as channel:
            assert train(TrainerServiceStub(channel))["num_tokens:sum"] == 34
        tokens = httpx.get(stack.metrics_url("trainer")).text
        assert "\ntrainer_tokens_total 34.0\n" in tokens
        assert (stack.logs / "trainer.log").read_text().count("metrics on http://") == 1
        stack.stop(signal.SIGTERM)
