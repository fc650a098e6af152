"""`tinsmith up` starts again what is killed, and clients go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from tests.faults.cluster import wait_until
from tests.faults.moments import repeated
from tests.integration.examples import BASE_MODEL, batch, new_model, random_tokens, sample, train
from tests.stack import Stack

pytestmark = [pytest.mark.slow, repeated]


def running(stack: Stack, service: str) -> list[psutil.Process]:
    return [process for process in stack.processes() if service in process.cmdline()]


def test_a_killed_sampler_is_started_again_and_clients_go_on(model: Path, tmp_path: Path) -> None:
    """Leaving the block checks that nothing is left."""
    with (
        Stack(tmp_path, base_models=[f"{BASE_MODEL}={model}"], flags=["--samplers", "2"]) as stack,
        tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service,
    ):
        assert len(stack.samplers) == 2
        client = new_model(service)
        train(client, batch(1), steps=1)
        sampler = client.save_weights_and_get_sampling_client().result()
        expected = sample(sampler, random_tokens(20, 1), seed=1)[0].tokens
        before = running(stack, "sampler_service")
        assert len(before) == 2
        for killed in before:
            killed.kill()
            assert sample(sampler, random_tokens(20, 1), seed=1)[0].tokens == expected
        wait_until(lambda: stack.report().count(": ready again after") == 2, what="both are started again", limit_s=120)
        assert "was killed by SIGKILL" in stack.report()
        assert "starting again in 1 s; the others go on" in stack.report()
        after = running(stack, "sampler_service")
        assert {process.pid for process in after}.isdisjoint(process.pid for process in before)
        assert sample(sampler, random_tokens(20, 1), seed=1)[0].tokens == expected
        train(client, batch(1), steps=1)


def test_trainer_and_gateway_are_killed_while_a_client_trains(model: Path, tmp_path: Path) -> None:
    """The losses are those of training in peace."""
    with (
        Stack(tmp_path, base_models=[f"{BASE_MODEL}={model}"]) as stack,
        tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service,
    ):
        expected = train(new_model(service), batch(1), steps=12)
        client = new_model(service)
        losses = train(client, batch(1), steps=4)
        for killed in ("trainer_service", "gateway"):
            (process,) = running(stack, killed)
            process.kill()
            losses += train(client, batch(1), steps=4)
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        wait_until(lambda: stack.report().count(": ready again after") == 2, what="both are started again", limit_s=120)
