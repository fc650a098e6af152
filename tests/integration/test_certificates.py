"""Certificates and mismatch metrics as a user of the whole stack sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker

from tests.support.examples import PROMPT, batch, new_model, next_token_datum, sample, train
from tests.support.stack import Stack
from tests.support.wire import Wire
from tinsmith_cli import main


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = new_model(service, rank=4)
    train(client, batch(2), steps=3, adam=tinker.AdamParams(learning_rate=5e-3))
    return client


def get(wire: Wire, path: str, *, status: int = 200) -> Any:
    reply = wire.http.get(path)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_every_published_version_has_a_certificate(
    stack: Stack, wire: Wire, trained: tinker.TrainingClient, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained.save_weights_for_sampler("certified").result().path
    run_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
    certificate = get(wire, f"training_runs/{run_id}/checkpoints/{checkpoint}/certificate")
    assert certificate["passed"]
    assert certificate["limit"] == 0.01
    (gap,) = certificate["samplers"]
    assert gap["engine"] == "torch"
    assert gap["max_gap"] < 1e-3
    assert gap["num_tokens"] == 15
    assert main(["checkpoints", "certificate", path, "--base-url", stack.base_url, "--api-key", "tml-test"]) == 0
    shown = capsys.readouterr().out
    assert certificate["version_id"] in shown
    assert shown.endswith("passed\n")
    metrics = wire.metrics(stack.metrics_url("trainer"))
    assert metrics['trainer_publish_certificates_total{outcome="passed"}'] >= 1
    assert metrics['trainer_publish_gap_nats_count{engine="torch"}'] >= 1


def test_a_sampler_without_a_path_has_one(wire: Wire, trained: tinker.TrainingClient) -> None:
    client = trained.save_weights_and_get_sampling_client().result()
    sampler_id = client._sampling_session_id  # the SDK shows it nowhere else
    assert get(wire, f"samplers/{sampler_id}/certificate")["passed"]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_on_policy_data_shows_no_mismatch_and_older_data_does(
    trained: tinker.TrainingClient, loss_fn: tinker.types.LossFnType
) -> None:
    client = trained.save_weights_and_get_sampling_client().result()
    data = []
    for sequence in sample(client, PROMPT, num_samples=4, max_tokens=10, seed=1):
        tokens, logprobs = sequence.tokens, sequence.logprobs
        assert logprobs is not None
        prompt = np.zeros(len(PROMPT) - 1, np.float32)
        data.append(
            next_token_datum(
                [*PROMPT, *tokens],
                logprobs=np.concatenate([prompt, np.array(logprobs, np.float32)]),
                advantages=np.concatenate([prompt, np.ones(len(tokens), np.float32)]),
            )
        )
    fresh = trained.forward(data, loss_fn).result().metrics
    assert 0 <= fresh["sampler_kl:mean"] < 1e-9
    assert fresh["ess:mean"] == pytest.approx(1, abs=1e-6)
    assert fresh["ratio:max"] == pytest.approx(1, abs=1e-3)
    train(trained, batch(3), steps=3, adam=tinker.AdamParams(learning_rate=5e-3))
    old = trained.forward(data, loss_fn).result().metrics
    assert old["sampler_kl:mean"] > 1e-4
    assert old["ess:mean"] < 0.999
