"""Every hostile request that is known, all at once, against a server with its defaults, beside 16 good clients.

They come over HTTP, and over gRPC to trainer and sampler. Then come requests that end the trainer, while sampler and
gateway are killed. The good clients see no error, and what they have trained is what each of them would have trained
alone. While nothing is killed, no thread of the services computes for longer than WAIT_LIMIT_S while a good client
waits for an answer, and nothing keeps the gateway's event loop for longer than STALL_LIMIT_S. Both are processor time,
on which a busy machine has no influence. A hostile client sees a refusal that says why, and never a 5xx.
docs/security.md names what each of them attacks.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from tests.faults import poisoned_up
from tests.faults.good_clients import ADAM, RANK, data_of
from tests.faults.hostile_clients import KEY_FLAGS, NUM_GOOD_CLIENTS, Hostile, Neighbours, attackers, send_all_at_once
from tests.faults.lone_trainer import Trainer
from tests.faults.processor_time import ProcessorTime
from tests.support import batches
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tests.support.wire import datum
from tinsmith.v1 import trainer_pb2, types_pb2

WAIT_LIMIT_S = 3.0
"""Most processor time of any thread of the services while a good client waits for one answer. It is 0.6 s on two free
cores, and 2.4 s beside six programs that take all they get, because then the good clients themselves are slow. Without
turns between models in the trainer it is 4.9 s."""
STALL_LIMIT_S = 0.3
"""Most processor time for which the gateway's event loop may leave a ready task waiting: a bucket of its metric."""
OPERATIONS = ("forward_backward", "optim_step", "sample")
"""Operations of the good clients."""
READY_AGAIN, TRAINER_KILLED = ": ready again after", "trainer was killed by SIGKILL"
"""Lines of `tinsmith up`."""
POISON = [3, 1, 4, 1, 5]
"""TOKENS of poisoned_trainer.py, which imports the trainer."""
ADAPTER = "adapter_model.safetensors"
LARGEST_GAP = 1e-6
"""Largest gap of a weight; weights are of the order of 0.01 to 1, and one step changes them by 1e-5."""


def event_loop(stack: Stack) -> dict[float, float]:
    """Seconds -> how often the gateway's event loop computed for no longer before it came to a task that was due.

    In processor time of the event loop's thread, so that others' work on this machine does not count.
    """
    text = urlopen(stack.metrics_url("gateway"), timeout=60).read().decode()
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "gateway_event_loop_seconds"]
    return {float(each.labels["le"]): each.value for each in family.samples if each.name.endswith("_bucket")}


def stalls(before: dict[float, float], after: dict[float, float]) -> float:
    """How often, between the two, the event loop computed for longer than STALL_LIMIT_S at a time."""
    counts = {most_s: after[most_s] - before[most_s] for most_s in after}
    print("event loop:", {most_s: int(counts[math.inf] - count) for most_s, count in counts.items()})
    return counts[math.inf] - counts[STALL_LIMIT_S]


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With its defaults, and a key for each of the two owners; poisoned datums end its trainer."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "POISON": "SIGKILL"}
    folder = tmp_path_factory.mktemp("hostile")
    models = [f"{BASE_MODEL}={model}"]
    with Stack(
        folder, base_models=models, flags=KEY_FLAGS, env=env, module=poisoned_up.__name__, threads=None
    ) as stack:
        yield stack


def pids(stack: Stack, service: str = "") -> list[int]:
    """Process ids of a service, or of all services if none is named."""
    return [process.pid for process in stack.processes(*([service] if service else []))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_requests_all_at_once_disturb_no_good_client(stack: Stack, model: Path, tmp_path: Path) -> None:
    neighbours = Neighbours()
    with neighbours.running(stack), attackers(stack) as attack:
        before, watch = event_loop(stack), ProcessorTime(pids(stack))
        with watch.watching():
            began = time.monotonic()
            said = attack.submit(send_all_at_once).result()
            ended = time.monotonic()
        num_stalls = stalls(before, event_loop(stack))
        poisoned(stack)
    print(f"answered within {ended - began:.1f} s")
    assert neighbours.errors == []
    for name, answers in said.items():
        bad = [answer for answer in answers if re.match(r"5\d\d |INTERNAL|UNKNOWN|UNAVAILABLE", answer)]
        assert not bad, (name, bad)
    assert num_stalls == 0
    check_waits(neighbours.during(began, ended), watch)
    check_weights(neighbours.runs, stack, model, tmp_path)


def poisoned(stack: Stack) -> None:
    """Sampler and gateway are killed, and then a request ends the trainer each time it runs. Returns when all is there
    again."""
    for service in ("sampler_service", "gateway"):
        for pid in pids(stack, service):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.report().count(READY_AGAIN) == 2, what="both are there again", limit_s=120)
    hostile = Hostile(stack.base_url, stack.trainers[0], stack.samplers[0])
    poison = datum([*POISON, 9], target_tokens=list(range(6)), weights=[1.0] * 6)
    request = hostile.train([poison], says="the trainer ended twice while it ran this", tries_again=True)
    asyncio.run(request())  # the trainer may end before the gateway knows that it has accepted the request
    assert stack.report().count(TRAINER_KILLED) == 2
    told = stack.report()
    wait_until(
        lambda: stack.report().rfind(READY_AGAIN) > told.rfind(TRAINER_KILLED), what="the trainer is back", limit_s=120
    )
    hostile.close()


def check_waits(waits: Sequence[tuple[float, str, float]], watch: ProcessorTime) -> None:
    """No thread of the services has computed for long during a wait of a good client."""
    spent = dict.fromkeys(OPERATIONS, 0.0)
    longest = dict.fromkeys(OPERATIONS, 0.0)
    for began, operation, seconds in waits:
        spent[operation] = max(spent[operation], watch.busiest(began, began + seconds))
        longest[operation] = max(longest[operation], seconds)
    print(f"{len(waits)} waits, of most processor time {spent}, longest {longest}")
    assert all(0 < each <= WAIT_LIMIT_S for each in spent.values()), spent


def check_weights(runs: Sequence[tuple[int, int, str]], stack: Stack, model: Path, folder: Path) -> None:
    """Each run ends with the weights that it has when it is alone in a trainer, one after the other."""
    assert len(runs) == NUM_GOOD_CLIENTS
    trainer = Trainer(folder / "alone", model, flags=())
    gaps = {}
    try:
        with trainer.stub() as stub:
            for seed, num_steps, path in runs:
                alone = trained_alone(stub, seed, num_steps)
                theirs = load_file(trainer.checkpoints / alone / ADAPTER)
                ours = load_file(stack.checkpoints / path.removeprefix("tinker://") / ADAPTER)
                assert ours.keys() == theirs.keys()
                gaps[seed] = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    finally:
        trainer.kill()
    print("steps:", [num_steps for _, num_steps, _ in runs], "gaps:", gaps)
    assert max(gaps.values()) <= LARGEST_GAP


def trained_alone(stub: Any, seed: int, num_steps: int) -> str:
    """Does what a good client did, without others. Returns the place of the saved state."""
    model_id = f"alone-{seed}"
    lora = types_pb2.LoraConfig(rank=RANK, seed=seed, train_attn=True, train_mlp=True, train_unembed=True)
    stub.CreateModel(trainer_pb2.CreateModelRequest(model_id=model_id, base_model="m", lora_config=lora))
    adam = trainer_pb2.AdamParams(**ADAM.model_dump(exclude_none=True))
    seq_ids, pending = count(1), []
    for step in range(num_steps):
        data = [batches.datum(d.model_input.to_ints(), **arrays(d)) for d in data_of(seed, step)]
        pending.append(stub.ForwardBackward.future(batches.request(data, model_id=model_id, seq_id=next(seq_ids))))
        step_request = trainer_pb2.OptimStepRequest(model_id=model_id, seq_id=next(seq_ids), adam_params=adam)
        pending.append(stub.OptimStep.future(step_request))
    for call in pending:
        call.result()
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    save = trainer_pb2.SaveCheckpointRequest(model_id=model_id, seq_id=next(seq_ids), kind=kind, name="last")
    saved = stub.SaveCheckpoint(save)
    stub.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id))
    return saved.checkpoint.location


def arrays(one: tinker.Datum) -> dict[str, np.ndarray]:
    return {name: tensor.to_numpy() for name, tensor in one.loss_fn_inputs.items()}
