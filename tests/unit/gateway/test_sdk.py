"""The real SDK against a real gateway. The SDK blocks its caller, so it runs in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tinker
from tinker import types

from tests.unit.gateway.stack import BASE_MODEL, Stack


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


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


def _train_save_load_and_sample(url: str) -> str:
    with service_client(url) as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        assert training.get_info().model_data.model_name == BASE_MODEL
        forward_backward = training.forward_backward([datum()] * 2500, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-3))
        result = forward_backward.result()
        assert len(result.loss_fn_outputs) == 2500
        assert result.metrics["loss:sum"] == 2500
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
        return model_id


async def test_sdk_trains_saves_loads_and_samples(stack: Stack) -> None:
    model_id = await asyncio.to_thread(_train_save_load_and_sample, stack.url)
    await stack.trainer.deletion.wait()
    assert model_id in stack.trainer.deleted_models
    assert stack.trainer.orders[model_id] == [0, 1, 2, 3, 4, 5, 6, 7]


def _fail_and_go_on(url: str) -> None:
    with service_client(url) as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        with pytest.raises(tinker.RequestFailedError, match="loss_fn: 'ppo'"):
            training.forward_backward([datum()], "ppo").result()
        with pytest.raises(tinker.RequestFailedError, match="ttl_seconds: 5 is outside"):
            training.save_state("short", ttl_seconds=5).result()
        assert training.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"] == 1
        with pytest.raises(tinker.RequestFailedError, match="rank"):
            service.create_lora_training_client(base_model=BASE_MODEL, rank=999).result()


async def test_sdk_sees_failed_futures_and_goes_on(stack: Stack) -> None:
    await asyncio.to_thread(_fail_and_go_on, stack.url)


def _capabilities(url: str) -> list[str | None]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    with pytest.warns(FutureWarning):
        return [model.model_name for model in client.get_server_capabilities().supported_models]


async def test_sdk_lists_the_models(stack: Stack) -> None:
    assert BASE_MODEL in await asyncio.to_thread(_capabilities, stack.url)
