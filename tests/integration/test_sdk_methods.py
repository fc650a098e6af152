"""Each public method of the Tinker SDK that must work, against real processes."""

from __future__ import annotations

import pickle

import grpc
import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, SamplingParams
from tinker.lib.api_future_impl import QueueState

from tests.support.examples import ADAM, BASE_MODEL, PROMPT, batch, forward, new_model, sample, score, train
from tests.support.stack import Stack
from tests.support.wire import Wire
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2


@pytest.fixture(scope="module")
def base_sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model that some tests look at and none changes."""
    client = new_model(service, seed=3)
    train(client, batch(0), steps=4)
    return client


def checkpoint(stack: Stack, path: str) -> types_pb2.CheckpointInfo:
    """The trainer's record of a checkpoint."""
    with grpc.insecure_channel(stack.trainers[0]) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        location = path.removeprefix("tinker://")
        return stub.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=location)).checkpoint


@pytest.fixture(scope="module")
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.base_url, api_key="tml-test")


# The service


def test_capabilities_name_the_model_and_its_context(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    with pytest.warns(FutureWarning, match="RestClient"):
        deprecated = service.get_server_capabilities()
    for found in (deprecated, rest.get_server_capabilities().result()):
        (model,) = found.supported_models
        assert model.model_name == BASE_MODEL
        assert model.max_context_length == 32_768
        assert model.trainable
        assert model.sampleable


async def test_all_can_be_awaited_in_the_callers_loop(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    capabilities = await rest.get_server_capabilities()
    assert [model.model_name for model in capabilities.supported_models] == [BASE_MODEL]
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    step = client.forward_backward(batch(1), "cross_entropy"), client.optim_step(ADAM)
    assert (await step[0]).metrics["loss:sum"] > 0
    assert (await step[1]).metrics["grad_norm:mean"] > 0
    assert (await client.save_state("awaited")).path.endswith("/weights/awaited")
    sampler = await client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    result = await sampler.sample(ModelInput.from_ints(PROMPT), 1, params)
    assert len(result.sequences[0].tokens) == 3
    assert len(await sampler.compute_logprobs(ModelInput.from_ints(PROMPT))) == len(PROMPT)


@pytest.mark.filterwarnings("ignore:DEPRECATED")
async def test_every_async_twin_does_the_same(service: tinker.ServiceClient) -> None:
    assert (await service.get_server_capabilities_async()).supported_models
    client = await service.create_lora_training_client_async(BASE_MODEL, rank=4, seed=1)
    assert (await client.get_info_async()).model_data.model_name == BASE_MODEL
    before = await client.forward_async(batch(1), "cross_entropy")
    step = await client.forward_backward_async(batch(1), "cross_entropy"), await client.optim_step_async(ADAM)
    assert (await step[0]).metrics["loss:sum"] == pytest.approx((await before).metrics["loss:sum"], rel=1e-6)
    assert (await step[1]).metrics["grad_norm:mean"] > 0

    def loss(_: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {}

    assert (await (await client.forward_backward_custom_async(batch(1), loss))).metrics["loss:sum"] > 0
    await (await client.optim_step_async(ADAM))
    state = (await (await client.save_state_async("twin"))).path
    await (await client.load_state_async(state))
    await (await client.load_state_with_optimizer_async(state))
    path = (await (await client.save_weights_for_sampler_async("twin"))).path
    assert (await (await client.save_weights_external_async("twin"))).path.endswith("/external_weights/twin")
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    prompt = ModelInput.from_ints(PROMPT)
    tokens = []
    for sampler in (
        await client.save_weights_and_get_sampling_client_async(),
        await client.create_sampling_client_async(path),
        await service.create_sampling_client_async(model_path=path),
    ):
        assert await sampler.get_base_model_async() == BASE_MODEL
        tokens.append((await sampler.sample_async(prompt, 1, params)).sequences[0].tokens)
        assert len(await sampler.compute_logprobs_async(prompt)) == len(PROMPT)
    assert tokens[0] == tokens[1] == tokens[2]
    for resume in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        resumed = await resume(state)
        assert (await resumed.get_info_async()).model_data.model_name == BASE_MODEL


def test_a_closed_session_is_over(stack: Stack, wire: Wire) -> None:
    service = tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")
    client = new_model(service)
    session_id = client.model_id.split(":train:")[0]
    assert wire.post("session_heartbeat", session_id=session_id).status_code == 200
    service.close("success", detail="done").result()
    assert wire.post("session_heartbeat", session_id=session_id).status_code == 410
    assert wire.post(f"sessions/{session_id}/finish", reason={"type": "errored"}).status_code == 200
    request_id = wire.request_id(wire.post("optim_step", model_id=client.model_id, seq_id=1, adam_params={}))
    assert wire.poll(request_id).json()["category"] == "user"


def test_telemetry_is_swallowed(stack: Stack, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_TELEMETRY", raising=False)  # on by default
    name = 'gateway_requests_total{method="POST",route="telemetry",status="200"}'
    before = wire.metrics(stack.metrics_url("gateway")).get(name, 0.0)
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        new_model(service)
        assert service.get_telemetry() is not None
    assert wire.metrics(stack.metrics_url("gateway"))[name] > before
    assert "tml-test" not in (stack.logs / "gateway.log").read_text()


# Making models


def test_a_new_model_equals_the_base_model(service: tinker.ServiceClient, base_sampler: tinker.SamplingClient) -> None:
    (found,) = forward(new_model(service, rank=32), PROMPT)
    np.testing.assert_allclose(found, score(base_sampler, PROMPT), atol=1e-4)


def test_equal_seeds_give_equal_models(service: tinker.ServiceClient) -> None:
    def after_two_steps(seed: int | None) -> list[float]:
        return train(new_model(service, seed=seed), batch(2), steps=3)

    first = after_two_steps(5)
    assert after_two_steps(5) == first
    assert after_two_steps(6) != first
    assert after_two_steps(None) != after_two_steps(None)


@pytest.mark.parametrize("group", ["train_attn", "train_mlp", "train_unembed"])
def test_only_the_chosen_layers_are_trained(group: str, service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    flags = {name: name == group for name in ("train_attn", "train_mlp", "train_unembed")}
    client = new_model(service, **flags)
    losses = train(client, batch(3), steps=4)
    assert losses[-1] < losses[0]
    path = client.save_weights_for_sampler("flags").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert {name: getattr(info, name) for name in flags} == flags


def test_get_info_describes_the_model(service: tinker.ServiceClient) -> None:
    client = new_model(service, rank=16, user_metadata={"owner": "me"})
    info = client.get_info()
    assert info.model_id == client.model_id
    assert info.model_data.model_name == BASE_MODEL
    assert info.model_data.arch == "Qwen3ForCausalLM"
    assert (info.is_lora, info.lora_rank) == (True, 16)


# Saving and loading


def test_a_run_resumed_with_its_optimizer_goes_on_as_if_nothing_had_been(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    train(client, batch(11), steps=3)
    path = client.save_state("resume").result().path
    assert path == f"tinker://{client.model_id}/weights/resume"
    resumed = service.create_training_client_from_state_with_optimizer(path, user_metadata={"from": "resume"}).result()
    fresh = service.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 8
    for one in (resumed, fresh):
        np.testing.assert_array_equal(forward(one, PROMPT)[0], forward(client, PROMPT)[0])
    losses = [train(one, batch(12), steps=3) for one in (client, resumed, fresh)]
    assert losses[1] == losses[0]
    assert losses[2][0] == losses[0][0]  # the weights are the same,
    assert losses[2][2] != losses[0][2]  # the moments are not
    np.testing.assert_array_equal(forward(resumed, PROMPT)[0], forward(client, PROMPT)[0])


def test_load_state_replaces_the_weights_and_drops_pending_gradients(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    train(client, batch(13), steps=2)
    saved = forward(client, PROMPT)[0]
    path = client.save_state("back").result().path
    uninterrupted = train(client, batch(14), steps=2)
    client.forward_backward(batch(15), "cross_entropy").result()
    with pytest.warns(FutureWarning, match="create_training_client_from_state"):
        pending = client.load_state_with_optimizer(path)
    pending.result()
    np.testing.assert_array_equal(forward(client, PROMPT)[0], saved)
    assert client.optim_step(tinker.AdamParams(learning_rate=0)).result().metrics["grad_norm:mean"] == 0.0
    with pytest.warns(FutureWarning, match="create_training_client_from_state"):
        pending = client.load_state(path)
    pending.result()
    np.testing.assert_array_equal(forward(client, PROMPT)[0], saved)
    assert train(client, batch(14), steps=1)[0] == uninterrupted[0]


def test_a_checkpoint_is_replaced_only_when_that_is_asked_for(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    path = client.save_state("same").result().path
    train(client, batch(16), steps=2)
    with pytest.raises(tinker.RequestFailedError, match="same") as refused:
        client.save_state("same").result()
    assert refused.value.category == "user"
    assert client.save_state("same", overwrite=True).result().path == path
    loaded = service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(forward(loaded, PROMPT)[0], forward(client, PROMPT)[0])


def test_a_checkpoint_remembers_its_notes_and_lifetime(service: tinker.ServiceClient, stack: Stack) -> None:
    client = new_model(service, rank=4)
    train(client, batch(17), steps=2)
    state = client.save_state("noted", ttl_seconds=7200, user_metadata={"run": "a"}).result().path
    weights = client.save_weights_for_sampler("noted", ttl_seconds=3600, user_metadata={"run": "b"}).result().path
    for path, kind, ttl_seconds, run in (
        (state, types_pb2.CHECKPOINT_KIND_TRAINING, 7200, "a"),
        (weights, types_pb2.CHECKPOINT_KIND_SAMPLER, 3600, "b"),
    ):
        info = checkpoint(stack, path)
        assert (info.kind, info.ttl.seconds, dict(info.user_metadata)) == (kind, ttl_seconds, {"run": run})
        assert (info.lora_config.rank, info.step, info.base_model) == (4, 2, BASE_MODEL)
        assert info.has_optimizer == (kind == types_pb2.CHECKPOINT_KIND_TRAINING)


def test_weights_info_describes_both_kinds_of_checkpoint(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    client = new_model(service, rank=2, train_mlp=False)
    for path in (
        client.save_state("info").result().path,
        client.save_weights_for_sampler("info").result().path,
    ):
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 2)
        assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)
    with pytest.raises(tinker.NotFoundError, match="nowhere"):
        rest.get_weights_info_by_tinker_path(f"tinker://{client.model_id}/weights/nowhere").result()


# Sampling clients


def test_every_way_to_a_sampling_client_leads_to_the_same_weights(
    service: tinker.ServiceClient, trained: tinker.TrainingClient, base_sampler: tinker.SamplingClient
) -> None:
    path = trained.save_weights_for_sampler("ways").result().path
    assert path == f"tinker://{trained.model_id}/sampler_weights/ways"
    clients = [
        service.create_sampling_client(model_path=path).result(),
        service.create_sampling_client(model_path=path, base_model=BASE_MODEL).result(),
        service.create_sampling_client(model_path=trained.save_state("ways").result().path).result(),
        trained.create_sampling_client(path).result(),
        trained.save_weights_and_get_sampling_client().result(),
    ]
    wanted = score(clients[0], PROMPT)
    assert np.abs(wanted - score(base_sampler, PROMPT)).max() > 1e-2
    for client in clients:
        np.testing.assert_array_equal(score(client, PROMPT), wanted)
        assert client.get_base_model() == BASE_MODEL
    assert base_sampler.get_base_model() == BASE_MODEL


def test_get_sampler_says_what_is_sampled(
    service: tinker.ServiceClient, trained: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = trained.save_weights_for_sampler("described").result().path
    client = service.create_sampling_client(model_path=path).result()
    sampler_id = client._sampling_session_id  # the SDK shows it nowhere else
    found = rest.get_sampler(sampler_id).result()
    assert (found.sampler_id, found.base_model, found.model_path) == (sampler_id, BASE_MODEL, path)


def test_a_sampling_client_travels_to_other_processes(
    trained: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = trained.save_weights_and_get_sampling_client().result()
    wanted = sample(client, PROMPT, seed=1)[0].tokens
    copy: tinker.SamplingClient = pickle.loads(pickle.dumps(client))
    assert sample(copy, PROMPT, seed=1)[0].tokens == wanted
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    named = tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle())
    assert sample(named, PROMPT, seed=1)[0].tokens == wanted


def test_methods_that_need_no_server_work(
    service: tinker.ServiceClient,
    trained: tinker.TrainingClient,
    rest: tinker.RestClient,
    base_sampler: tinker.SamplingClient,
    stack: Stack,
) -> None:
    assert trained.model_id.partition(":")[0] in service.get_console_url()
    assert trained.model_id.partition(":")[0] in trained.get_console_url()
    admin = tinker.AdminClient(base_url=stack.base_url, api_key="tml-test")
    telemetry = [client.get_telemetry() for client in (service, trained, base_sampler, rest, admin)]
    assert telemetry[:3] == [service.holder.get_telemetry()] * 3
    made = tinker.SamplingClient.create(service.holder, base_model=BASE_MODEL).result()
    made.on_queue_state_change(QueueState.PAUSED_CAPACITY, "the sampler is full")
    assert len(score(made, PROMPT)) == len(PROMPT) - 1
    with pytest.warns(FutureWarning, match="create_rest_client"):
        assert service.create_rest_client().get_server_capabilities().result().supported_models
