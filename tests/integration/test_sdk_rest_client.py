"""A REST client beside a training client that is being made: what docs/api.md says of the SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import tinker

from tests.integration import rest_client_deadlock
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

pytestmark = pytest.mark.filterwarnings("ignore:.*create_rest_client:FutureWarning")


def after_the_result(service: tinker.ServiceClient) -> tuple[tinker.RestClient, tinker.TrainingClient]:
    client = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    return service.create_rest_client(), client


def before_the_training_client(service: tinker.ServiceClient) -> tuple[tinker.RestClient, tinker.TrainingClient]:
    rest = service.create_rest_client()
    return rest, service.create_lora_training_client(BASE_MODEL, rank=4).result()


def by_itself(service: tinker.ServiceClient) -> tuple[tinker.RestClient, tinker.TrainingClient]:
    future = service.create_lora_training_client(BASE_MODEL, rank=4)
    return tinker.RestClient(), future.result()


@pytest.mark.parametrize("way", [after_the_result, before_the_training_client, by_itself])
def test_each_way_around_the_sdks_lock_gives_both_clients(
    stack: Stack, way: Callable[..., tuple[tinker.RestClient, tinker.TrainingClient]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", stack.base_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    for _ in range(3):
        with tinker.ServiceClient() as service:
            rest, client = way(service)
            run = rest.get_training_run(client.model_id).result()
            assert (run.training_run_id, run.base_model) == (client.model_id, BASE_MODEL)


@pytest.mark.slow
def test_the_sdk_locks_up_as_the_docs_say(stack: Stack) -> None:
    """If this fails, the installed SDK has mended it, and docs/api.md need not tell the ways around any more."""
    done = subprocess.run(
        [sys.executable, "-m", rest_client_deadlock.__name__],
        env={**os.environ, "TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "locked up", done.stderr[-2000:]
