"""Programs for the real SDK, each run in a process of its own by `tests.support.forking`: the SDK blocks its caller and
keeps threads and connections until its process ends."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

os.environ["TINKER_TELEMETRY"] = "0"

import pytest
import tinker
from tinker import types

BASE_MODEL = "Qwen/Qwen3-8B"


@contextmanager
def service_client(url: str) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test", user_metadata={"a": "b"})
    yield service
    service.close("success", detail="done").result()


def datum(num_tokens: int = 3) -> types.Datum:
    tokens = list(range(num_tokens))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[num_tokens]),
            "weights": types.TensorData(data=[1.0] * num_tokens, dtype="float32", shape=[num_tokens]),
        },
    )


def train_save_load_and_sample(url: str) -> None:
    with service_client(url) as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        assert training.get_info().model_data.model_name == BASE_MODEL
        forward_backward = training.forward_backward([datum()] * 5000, "cross_entropy")  # two requests
        step = training.optim_step(types.AdamParams(learning_rate=1e-3))
        result = forward_backward.result()
        assert len(result.loss_fn_outputs) == 5000
        assert result.metrics["loss:sum"] == 5000
        assert math.isnan(step.result().metrics["grad_norm:mean"])
        model_id = training.model_id

        saved = training.save_state("first").result()
        assert saved.path == f"tinker://{model_id}/weights/first"
        resumed = service.create_training_client_from_state_with_optimizer(saved.path).result()
        assert resumed.model_id.endswith(":train:1")
        resumed.optim_step(types.AdamParams(learning_rate=1e-3)).result()

        sampling = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        sampled = sampling.sample(prompt, 3, types.SamplingParams(max_tokens=2, seed=-(2**70))).result()
        assert [sequence.tokens for sequence in sampled.sequences] == [[5, 6]] * 3
        assert sampling.compute_logprobs(prompt).result() == [None, -1.0, -1.0]

        named = training.save_weights_for_sampler("named").result()
        by_path = service.create_sampling_client(model_path=named.path).result()
        assert by_path.get_base_model() == BASE_MODEL
        assert by_path.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result().sequences[0].tokens == [5, 6]


def rest_client_beside_a_training_client(url: str) -> None:
    """In the orders that do not lock SDK 0.38.0 up: docs/api.md."""
    warnings.simplefilter("ignore", FutureWarning)
    with service_client(url) as service:
        service.create_rest_client()
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        run = service.create_rest_client().get_training_run(training.model_id).result()
        assert run.training_run_id == training.model_id
    with service_client(url) as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
        rest = tinker.RestClient(base_url=url, api_key="tml-test")
        assert rest.list_training_runs().result() is not None
        assert training.result().model_id


def fail_and_go_on(url: str) -> None:
    with service_client(url) as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        with pytest.raises(tinker.RequestFailedError, match="loss_fn: 'ppo'"):
            training.forward_backward([datum()], "ppo").result()
        with pytest.raises(tinker.RequestFailedError, match="ttl_seconds: 5 is outside"):
            training.save_state("short", ttl_seconds=5).result()
        assert training.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"] == 1
        with pytest.raises(tinker.RequestFailedError, match="rank"):
            service.create_lora_training_client(base_model=BASE_MODEL, rank=999).result()


def sample_and_wait(url: str) -> None:
    with service_client(url) as service:
        sampling = service.create_sampling_client(base_model=BASE_MODEL).result()
        prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
        for future in [sampling.sample(prompt, 1, params) for _ in range(5)]:
            assert future.result().sequences[0].tokens == [5, 6]


def capabilities(url: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    assert BASE_MODEL in [model.model_name for model in client.get_server_capabilities().supported_models]


def whoami(*keys: str) -> None:
    for key in keys:
        identity = tinker.RestClient(api_key=key).whoami().result()
        print(identity.user_urn, identity.org_urn, identity.email)


def train_before_and_after(trained: Event, may_go_on: Event) -> None:
    training = tinker.ServiceClient().create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
    trained.set()
    assert may_go_on.wait(60)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
