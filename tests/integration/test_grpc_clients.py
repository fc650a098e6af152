"""gRPC clients that are not ours: the documented example, and buf's curl, which knows nothing but what reflection says.

grpcurl, which the documentation shows, asks the same reflection service; buf comes as a Python package.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tinker
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.conftest import KEY
from tests.support.examples import ADAM, BASE_MODEL, PROMPT, batch, new_model
from tests.support.stack import Stack

EXAMPLE = Path(__file__).parents[2] / "examples/grpc_client.py"
BUF = Path(sys.executable).parent / "buf"


@dataclass(frozen=True)
class Target:
    stack: Stack
    key: str


@pytest.fixture(params=["without keys", "with keys"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "without keys":
        return Target(request.getfixturevalue("stack"), "")
    return Target(request.getfixturevalue("second_stack"), KEY)


def run_example(stack: Stack, *, key: str) -> subprocess.CompletedProcess[str]:
    addresses = ["--trainer", stack.trainers[0], "--sampler", stack.samplers[0]]
    env = os.environ | {"TINSMITH_API_KEY": key}
    command = [sys.executable, "-W", "error", str(EXAMPLE), *addresses]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def curl(address: str, *flags: str, method: str = "", key: str, body: object = None) -> tuple[int, str]:
    """Exit status and output of `buf curl`; the status of a refused call is its gRPC code times 8."""
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *flags]
    if method:
        command += ["--header", f"x-api-key: {key}", "--data", json.dumps(body or {})]
    if "--schema" not in flags:
        command += ["--reflect-header", f"x-api-key: {key}"]
    url = f"http://{address}/{method}" if method else f"http://{address}"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_example_learns_a_sentence_and_streams_it(target: Target) -> None:
    done = run_example(target.stack, key=target.key)
    assert done.returncode == 0, done.stderr
    assert "is in 1 sampler(s)" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss per token ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] / 3
    line = next(line for line in done.stdout.splitlines() if line.startswith("> "))
    assert line.startswith("> The harbour at dawn| is quiet, and")
    assert "deleted grpc-" in done.stdout


@pytest.mark.parametrize("key", ["", "tml-wrong"])
def test_the_example_explains_a_refusal(second_stack: Stack, key: str) -> None:
    done = run_example(second_stack, key=key)
    assert done.returncode == 1
    assert done.stderr.startswith("UNAUTHENTICATED UNAUTHENTICATED: the metadata x-api-key")
    assert "Traceback" not in done.stderr


def test_reflection_lists_services_and_methods(target: Target) -> None:
    for address, service, method in (
        (target.stack.trainers[0], "tinsmith.v1.TrainerService", "ForwardBackward"),
        (target.stack.samplers[0], "tinsmith.v1.SamplerService", "StreamSample"),
    ):
        status, output = curl(address, "--list-services", key=target.key)
        assert status == 0, output
        assert {service, "grpc.health.v1.Health"} <= set(output.split())
        status, output = curl(address, "--list-methods", key=target.key)
        assert status == 0, output
        assert f"{service}/{method}" in output.split()


def test_methods_can_be_called_with_what_reflection_says_alone(target: Target) -> None:
    trainer, sampler = target.stack.trainers[0], target.stack.samplers[0]
    status, output = curl(trainer, method="tinsmith.v1.TrainerService/GetTrainerInfo", key=target.key)
    assert status == 0, output
    assert BASE_MODEL in json.loads(output)["baseModels"]

    tokens = base64.b64encode(np.array([5, 6, 7], "<i4").tobytes()).decode()
    params = {"maxTokens": 3, "seed": "1", "stop": {}}
    body = {"prompt": [{"encodedText": {"tokens": tokens}}], "numSamples": 2, "samplingParams": params}
    status, output = curl(sampler, method="tinsmith.v1.SamplerService/Sample", key=target.key, body=body)
    assert status == 0, output
    sequences = json.loads(output)["sequences"]
    assert [len(base64.b64decode(sequence["tokens"])) for sequence in sequences] == [12, 12]

    request = {"request": body}
    status, output = curl(sampler, method="tinsmith.v1.SamplerService/StreamSample", key=target.key, body=request)
    assert status == 0, output
    assert output.count('"delta"') >= 2
    assert output.count('"result"') == 1


def test_an_error_shows_its_reason_to_a_client_without_our_code(target: Target) -> None:
    method, body = "tinsmith.v1.TrainerService/GetModel", {"modelId": "no:train:0"}
    status, output = curl(target.stack.trainers[0], method=method, key=target.key, body=body)
    assert status == grpc.StatusCode.NOT_FOUND.value[0] * 8
    (detail,) = json.loads(output)["details"]
    assert detail["type"] == "google.rpc.ErrorInfo"
    info = error_details_pb2.ErrorInfo.FromString(base64.b64decode(detail["value"] + "=="))
    assert (info.reason, info.domain) == ("MODEL_NOT_FOUND", "tinsmith")


def test_without_the_key_nothing_but_health_answers(second_stack: Stack) -> None:
    methods = {"trainers": "TrainerService/GetTrainerInfo", "samplers": "SamplerService/GetSamplerInfo"}
    schema = str(EXAMPLE.parents[1] / "proto")
    for addresses, method in methods.items():
        address = getattr(second_stack, addresses)[0]
        assert curl(address, "--list-services", key="")[0] != 0
        for key in ("", "tml-wrong"):
            status, output = curl(address, "--schema", schema, method=f"tinsmith.v1.{method}", key=key)
            assert status == grpc.StatusCode.UNAUTHENTICATED.value[0] * 8, output
            assert "x-api-key" in output
        with grpc.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
            health = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_key_of_a_client_reaches_no_admin_service(second_stack: Stack) -> None:
    """Neither the journal of all runs, nor weights on probation, nor the weights themselves."""
    trainer, sampler = second_stack.trainers[0], second_stack.samplers[0]
    calls = [(trainer, "TrainerAdminService/ListJournal"), (trainer, "TrainerAdminService/PruneJournal")]
    calls += [
        (sampler, f"WeightSyncService/{name}") for name in ("SampleOnProbation", "ConfirmVersion", "RemoveVersion")
    ]
    for address, method in calls:
        status, output = curl(address, method=f"tinsmith.v1.{method}", key=KEY)
        assert status == grpc.StatusCode.PERMISSION_DENIED.value[0] * 8, output
        assert "holds an ordinary key" in output


def test_gateway_and_weight_channel_work_with_keys_and_so_does_the_sdk(second_stack: Stack) -> None:
    """The gateway's calls and the trainer's publishing carry the key that `tinsmith up` has made."""
    with tinker.ServiceClient(base_url=second_stack.base_url, api_key=KEY) as service:
        training = new_model(service, rank=4)
        training.forward_backward(batch(1), "cross_entropy").result()
        training.optim_step(ADAM).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=2)
        assert len(sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params).result().sequences) == 1
    with pytest.raises(tinker.AuthenticationError, match="holds no key of this server"):
        tinker.RestClient(base_url=second_stack.base_url, api_key="tml-wrong").get_server_capabilities().result()


def test_no_key_is_in_a_command_line_or_a_log(second_stack: Stack) -> None:
    commands = [" ".join(process.cmdline()) for process in second_stack.processes()]
    logs = [log.read_text() for log in second_stack.logs.glob("*.log")]
    assert len(logs) == 3
    environments = [process.environ() for process in second_stack.processes()]
    secrets = {env["GATEWAY_SERVICE_KEY"] for env in environments if "GATEWAY_SERVICE_KEY" in env} | {KEY}
    assert len(secrets) == 2
    assert not any(secret in text for secret in secrets for text in (*commands, *logs))
