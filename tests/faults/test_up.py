"""`tinsmith up --samplers 2`, when one of them is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import tinker

from tests.faults.cluster import wait_until
from tests.integration.examples import BASE_MODEL, batch, new_model, random_tokens, sample, train
from tests.stack import Stack

pytestmark = pytest.mark.slow


def samplers(stack: Stack) -> list[psutil.Process]:
    return [process for process in stack.processes() if "sampler_service" in process.cmdline()]


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
        before = samplers(stack)
        assert len(before) == 2
        for killed in before:
            killed.kill()
            assert sample(sampler, random_tokens(20, 1), seed=1)[0].tokens == expected
        wait_until(lambda: stack.report().count(": ready again after") == 2, what="both are started again", limit_s=120)
        assert "was killed by SIGKILL" in stack.report()
        assert "starting again in 1 s; the others go on" in stack.report()
        assert {process.pid for process in samplers(stack)}.isdisjoint(process.pid for process in before)
        assert sample(sampler, random_tokens(20, 1), seed=1)[0].tokens == expected
        train(client, batch(1), steps=1)
