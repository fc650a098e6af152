"""JWT mode in front of a real trainer and sampler: tokens expire while the SDK works, and it does not notice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.integration.gateways import own_gateway
from tests.support.examples import ADAM, PROMPT, batch, new_model
from tests.support.stack import Stack

KEY = {"key": "tml-jwt", "name": "laptop", "email": "ada@example.org"}
LIFETIME_S = 2


@pytest.fixture
def url(stack: Stack, tmp_path: Path) -> Iterator[str]:
    settings = {
        "GATEWAY_API_KEYS": json.dumps([KEY]),
        "GATEWAY_JWT_AUTH": "true",
        "GATEWAY_JWT_LIFETIME_S": str(LIFETIME_S),
    }
    with own_gateway(stack, tmp_path, settings) as url:
        yield url


def test_a_run_outlives_its_tokens(url: str) -> None:
    identity = tinker.RestClient(base_url=url, api_key=KEY["key"]).whoami().result()
    assert (identity.email, identity.org_urn) == ("ada@example.org", "tml:organization:tinsmith")
    with tinker.ServiceClient(base_url=url, api_key=KEY["key"]) as service:
        training = new_model(service, rank=4)
        for _ in range(2):
            training.forward_backward(batch(1), "cross_entropy").result()
            training.optim_step(ADAM).result()
            time.sleep(LIFETIME_S)
        sampler = training.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, tinker.SamplingParams(max_tokens=2)).result()
        assert len(sampled.sequences) == 1
