"""`tinsmith up` on a GPU, with a model of the shape of Qwen3-0.6B and random weights, through the SDK.

python -m pytest -m gpu tests/gpu/test_stack.py -rs

Trainer and sampler share the first GPU, so versions go by CUDA IPC. The base weights are bfloat16, as by default there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from benchmarks.trainer.shapes import store_shape
from tests.gpu.device import MARKS, ONLY_CUDA
from tests.support.examples import BASE_MODEL as NAME
from tests.support.examples import batch, forward, new_model, random_tokens, sample, score, train
from tests.support.stack import Stack
from tests.support.wire import Wire

pytestmark = [*MARKS, ONLY_CUDA, pytest.mark.timeout(600)]

ADAM = tinker.AdamParams(learning_rate=1e-3)
PROMPTS = [random_tokens(length, length) for length in (9, 70, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_shape("qwen3-0.6b", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("state")
    with Stack(state, base_models=[f"{NAME}={folder}"], flags=["--gpus", "0", "--engine", "torch"], threads=None) as up:
        yield up


@pytest.fixture(scope="module")
def service(stack: Stack) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")


def test_logprobs_are_those_of_transformers(service: tinker.ServiceClient, folder: Path) -> None:
    """float32 on the same device is the oracle; bfloat16 may differ by its rounding."""
    sequences = [random_tokens(length, length) for length in (5, 64, 333)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda")
    for tokens, ours in zip(sequences, forward(new_model(service), *sequences), strict=True):
        ids = torch.tensor([tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        apart = np.abs(ours - expected)
        assert apart.mean() < 0.02
        assert apart.max() < 0.2


def test_a_run_learns_and_its_sampler_agrees(stack: Stack, service: tinker.ServiceClient) -> None:
    client = new_model(service, rank=32)
    losses = train(client, batch(0), steps=12, adam=ADAM)
    assert losses[-1] < 0.8 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    for prompt in PROMPTS:
        drawn = sample(sampler, prompt, num_samples=4, max_tokens=24, seed=1)
        sequences = [[*prompt, *one.tokens] for one in drawn]
        for one, tokens, trained in zip(drawn, sequences, forward(client, *sequences), strict=True):
            for sampled in (np.array(one.logprobs), score(sampler, tokens)[len(prompt) - 1 :]):
                apart = np.abs(sampled - trained[len(prompt) - 1 :])
                assert apart.mean() < 0.02
                assert apart.max() < 0.2
    path = client.save_weights_for_sampler("learnt").result().path
    run_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
    reply = Wire(stack.base_url).http.get(f"training_runs/{run_id}/checkpoints/{checkpoint}/certificate")
    assert reply.json()["passed"], reply.text
    (log,) = stack.logs.glob("*trainer*.log")
    groups = re.findall(r"weight group \d+: [^\"]*", log.read_text())
    assert groups
    assert all("cuda_ipc" in one for one in groups), groups


def test_sixteen_runs_at_once_learn_as_each_alone(service: tinker.ServiceClient) -> None:
    runs = [new_model(service, rank=4 + 4 * n, seed=n) for n in range(16)]
    pending = [(run.forward_backward(batch(n), "cross_entropy"), run.optim_step(ADAM)) for n, run in enumerate(runs)]
    together = [losses.result().metrics["loss:sum"] for losses, step in pending if step.result()]
    alone = [train(new_model(service, rank=4 + 4 * n, seed=n), batch(n), steps=1, adam=ADAM)[0] for n in range(16)]
    np.testing.assert_allclose(together, alone, rtol=1e-2)
    for n in (0, 15):
        again = new_model(service, rank=4 + 4 * n, seed=n)
        train(again, batch(n), steps=1, adam=ADAM)
        ours, theirs = forward(runs[n], random_tokens(40, n))[0], forward(again, random_tokens(40, n))[0]
        assert np.abs(ours - theirs).mean() < 0.02


def test_a_killed_trainer_loses_nothing(stack: Stack, service: tinker.ServiceClient) -> None:
    client = new_model(service, rank=16)
    train(client, batch(3), steps=4, adam=ADAM)
    tokens = random_tokens(50, 5)
    (before,) = forward(client, tokens)
    (trainer,) = stack.processes("trainer_service")
    trainer.kill()
    (after,) = forward(client, tokens)
    assert np.abs(before - after).mean() < 0.05
    assert train(client, batch(3), steps=2, adam=ADAM)[-1] < train(new_model(service), batch(3), steps=1)[0]
