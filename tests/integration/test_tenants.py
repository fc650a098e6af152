"""Keys of the database with the SDK, on a real stack: what a rate looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.integration.examples import ADAM, batch, new_model
from tests.integration.gateways import own_gateway
from tests.stack import Stack
from tinsmith.cli import main

NewKey = Callable[..., str]


@pytest.fixture
def new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> NewKey:
    def create(owner: str, *argv: str) -> str:
        database = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
        assert main(["keys", "create", "--owner", owner, "--database-url", database, *argv]) == 0
        return capsys.readouterr().out.strip()

    return create


@pytest.fixture
def url(stack: Stack, tmp_path: Path, new_key: NewKey) -> Iterator[str]:
    new_key("operator")  # from the start a key is needed
    with own_gateway(stack, tmp_path, {}) as url:
        yield url


def test_a_rate_slows_training_down_and_loses_nothing(url: str, new_key: NewKey) -> None:
    tokens = sum(datum.model_input.length for datum in batch(1))
    key = new_key("ada", "--tokens-per-minute", str(20 * tokens))
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = new_model(service, rank=4)
        futures = [training.forward_backward(batch(1), "cross_entropy") for _ in range(22)]  # without waiting
        step = training.optim_step(ADAM)
        losses = [future.result().metrics["loss:sum"] for future in futures]
        assert losses == pytest.approx([losses[0]] * 22)  # all before the step
        step.result()
