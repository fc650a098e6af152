"""Ids in the services' logs: of the request, and of the run where there is one."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, train
from tests.support.stack import Stack

SERVICES = ("gateway", "trainer", "sampler")


@pytest.fixture(scope="module")
def model_id(stack: Stack, service: tinker.ServiceClient) -> str:
    """A run that was trained, saved, sampled from and scored in every way; the base model was too."""
    model = new_model(service)
    train(model, batch(1), steps=1)
    sampler = model.save_weights_and_get_sampling_client().result()
    path = model.save_weights_for_sampler("logged").result().path
    prompt = ModelInput.from_ints(PROMPT)
    for one in (sampler, service.create_sampling_client(base_model=BASE_MODEL).result()):
        one.sample(prompt, 1, SamplingParams(max_tokens=4)).result()
        one.compute_logprobs(prompt).result()
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-test", max_retries=0) as client:
        client.completions.create(model=path, prompt=PROMPT, max_tokens=4)
        list(client.completions.create(model=path, prompt=PROMPT, max_tokens=4, stream=True))
    return model.model_id


def lines(stack: Stack, service: str, *, session_id: str) -> list[dict[str, Any]]:
    """Log lines that name something of the session, in whatever field. The score of the base model is left out: the
    first publish measures it for all."""
    (log,) = stack.logs.glob(f"{service}*.log")
    found = [json.loads(line) for line in log.read_text().splitlines() if session_id in line]
    of_base = f"{session_id}:train:", "sample of the base model"
    return [
        line
        for line in found
        if not (line.get("request_id", "").startswith(of_base[0]) and line["message"].startswith(of_base[1]))
    ]


@pytest.mark.parametrize("name", SERVICES)
def test_work_for_a_request_is_logged_with_its_id_and_that_of_its_run(stack: Stack, model_id: str, name: str) -> None:
    session_id = model_id.partition(":")[0]
    found = lines(stack, name, session_id=session_id)
    assert found
    assert [line for line in found if not line.get("request_id")] == []
    of_base = [line for line in found if line["request_id"].startswith(f"{session_id}:sample:1:")]
    assert len(of_base) == (0 if name == "trainer" else 2)
    assert [line for line in of_base if "model_id" in line] == []
    assert {line.get("model_id") for line in found if line not in of_base} == {model_id}


def test_a_save_has_one_id_in_all_services(stack: Stack, model_id: str) -> None:
    session_id = model_id.partition(":")[0]
    found = {service: lines(stack, service, session_id=session_id) for service in SERVICES}
    saves = [line for line in found["gateway"] if line["message"].startswith("save_weights_for_sampler: ok")]
    assert len(saves) == 2
    for save in saves:
        same = {
            service: [line["message"].split(maxsplit=1)[0] for line in found[service]
                      if line["request_id"] == save["request_id"]]
            for service in SERVICES
        }  # fmt: skip
        assert same["trainer"] == ["save_checkpoint"]
        assert same["sampler"] == ["version", "sample", "version"]  # it is here, it is measured, it is visible


@pytest.mark.skipif(sys.platform != "linux", reason="files of memory are Linux's")
@pytest.mark.parametrize("name", ["trainer", "sampler"])
def test_a_service_says_how_much_of_the_base_model_it_shares(stack: Stack, name: str) -> None:
    (log,) = stack.logs.glob(f"{name}*.log")
    said = [line for line in log.read_text().splitlines() if "base model's weights" in line]
    assert said
    assert all("are in pages that services share" in line for line in said), said
