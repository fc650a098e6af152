"""Each public method of the Tinker SDK that must work, against real processes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import grpc
import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, SamplingParams, TensorData

from tests.integration.conftest import BASE_MODEL
from tests.integration.examples import (
    ADAM,
    batch,
    forward,
    logprobs,
    next_token_datum,
    random_tokens,
    sample,
    score,
    train,
)
from tests.integration.wire import Wire
from tests.stack import Stack
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2

PROMPT = random_tokens(11, 7)


def new_model(service: tinker.ServiceClient, **settings: object) -> tinker.TrainingClient:
    """Rank 8 and seed 0 unless told otherwise."""
    return service.create_lora_training_client(BASE_MODEL, **{"rank": 8, "seed": 0, **settings}).result()  # type: ignore[arg-type]


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
    """What the trainer has written down about a checkpoint."""
    with grpc.insecure_channel(stack.trainers[0]) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        location = path.removeprefix("tinker://")
        return stub.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=location)).checkpoint


# The service


def test_capabilities_name_the_model_and_its_context(service: tinker.ServiceClient) -> None:
    with pytest.warns(FutureWarning, match="RestClient"):
        deprecated = service.get_server_capabilities()
    for found in (deprecated, service.create_rest_client().get_server_capabilities().result()):
        (model,) = found.supported_models
        assert model.model_name == BASE_MODEL
        assert model.max_context_length == 32_768
        assert model.trainable
        assert model.sampleable


async def test_all_can_be_awaited_in_the_callers_loop(service: tinker.ServiceClient) -> None:
    capabilities = await service.create_rest_client().get_server_capabilities()
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
def test_only_the_chosen_layers_are_trained(group: str, service: tinker.ServiceClient) -> None:
    flags = {name: name == group for name in ("train_attn", "train_mlp", "train_unembed")}
    client = new_model(service, **flags)
    losses = train(client, batch(3), steps=4)
    assert losses[-1] < losses[0]
    path = client.save_weights_for_sampler("flags").result().path
    info = service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    assert {name: getattr(info, name) for name in flags} == flags


def test_get_info_describes_the_model(service: tinker.ServiceClient) -> None:
    client = new_model(service, rank=16, user_metadata={"owner": "me"})
    info = client.get_info()
    assert info.model_id == client.model_id
    assert info.model_data.model_name == BASE_MODEL
    assert info.model_data.arch == "Qwen3ForCausalLM"
    assert (info.is_lora, info.lora_rank) == (True, 16)


# Gradients and steps


def test_forward_gives_forward_backwards_logprobs_and_no_gradient(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    data = batch(4)
    only_forward = client.forward(data, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] == 0.0
    both = client.forward_backward(data, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0.0
    for found, wanted in zip(logprobs(only_forward), logprobs(both), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert only_forward.metrics["loss:sum"] == both.metrics["loss:sum"]
    total = -sum(float(one.sum()) for one in logprobs(both))
    assert both.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def _ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.exp(p - q)


def _ppo(p: np.ndarray, q: np.ndarray, a: np.ndarray, low: float, high: float) -> np.ndarray:
    return -np.minimum(_ratio(p, q) * a, _ratio(p, q).clip(low, high) * a)


def _cispo(p: np.ndarray, q: np.ndarray, a: np.ndarray, low: float, high: float) -> np.ndarray:
    return -_ratio(p, q).clip(low, high) * p * a


def _dro(p: np.ndarray, q: np.ndarray, a: np.ndarray, beta: float) -> np.ndarray:
    return -(p * a - beta / 2 * (p - q) ** 2)


CLIP = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}


@pytest.mark.parametrize(
    ("loss_fn", "config", "formula"),
    [
        ("importance_sampling", None, lambda p, q, a: -_ratio(p, q) * a),
        ("ppo", None, lambda p, q, a: _ppo(p, q, a, 0.8, 1.2)),
        ("ppo", CLIP, lambda p, q, a: _ppo(p, q, a, 0.95, 1.05)),
        ("cispo", None, lambda p, q, a: _cispo(p, q, a, 0.0, 4.0)),
        ("cispo", CLIP, lambda p, q, a: _cispo(p, q, a, 0.95, 1.05)),
        ("dro", {"beta": 0.3}, lambda p, q, a: _dro(p, q, a, 0.3)),
    ],
)
def test_policy_losses_are_their_formulas_and_fall(
    loss_fn: tinker.types.LossFnType,
    config: dict[str, float] | None,
    formula: Callable[..., np.ndarray],
    service: tinker.ServiceClient,
) -> None:
    client = new_model(service)
    rng = np.random.default_rng(0)
    texts = [random_tokens(length, seed) for seed, length in enumerate((6, 12))]
    inputs = [
        {
            "logprobs": (p + rng.normal(0, 0.1, p.size)).astype(np.float32),
            "advantages": rng.normal(size=p.size).astype(np.float32),
        }
        for p in forward(client, *texts)
    ]
    data = [next_token_datum(text, **one) for text, one in zip(texts, inputs, strict=True)]
    losses = []
    for _ in range(3):
        step = client.forward_backward(data, loss_fn, config), client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        output = step[0].result()
        assert step[1].result().metrics["grad_norm:mean"] > 0
        wanted = sum(
            formula(p.astype(np.float64), one["logprobs"], one["advantages"]).sum()
            for p, one in zip(logprobs(output), inputs, strict=True)
        )
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        losses.append(output.metrics["loss:sum"])
    assert losses[0] > losses[1] > losses[2]


def test_cross_entropy_weights_scale_each_token(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    weights = np.array([0.0, 1.0, -2.0, 0.5], np.float32)
    output = client.forward_backward([next_token_datum(random_tokens(5, 1), weights=weights)], "cross_entropy").result()
    (p,) = logprobs(output)
    assert p.shape == (4,)  # also where the weight is 0
    assert output.metrics["loss:sum"] == pytest.approx(-float((weights * p).sum()), rel=1e-5)


def test_many_targets_for_a_position_dense_and_sparse(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    rng = np.random.default_rng(1)
    num_tokens, num_targets = 6, 8
    targets = np.zeros((num_tokens, num_targets), np.int64)
    weights = np.zeros((num_tokens, num_targets), np.float32)
    targets[:, :2] = rng.integers(1, 500, (num_tokens, 2))
    weights[:, 1:3] = rng.random((num_tokens, 2))  # a target of 0 with a weight, and a target without one
    text = ModelInput.from_ints(random_tokens(num_tokens, 2))

    def run(**inputs: object) -> tuple[np.ndarray, float, float]:
        datum = tinker.Datum(text, {"target_tokens": inputs["targets"], "weights": inputs["weights"]})  # type: ignore[dict-item]
        step = client.forward_backward([datum], "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
        output = step[0].result()
        return logprobs(output)[0], output.metrics["loss:sum"], step[1].result().metrics["grad_norm:mean"]

    sparse = TensorData.from_torch_sparse(torch.tensor(targets))
    assert sparse.sparse_crow_indices is not None  # the SDK sends torch tensors of two dimensions so
    dense_p, dense_loss, dense_norm = run(targets=targets, weights=weights)
    sparse_p, sparse_loss, sparse_norm = run(targets=torch.tensor(targets), weights=torch.tensor(weights))
    assert dense_p.shape == (num_tokens, num_targets)
    np.testing.assert_array_equal(sparse_p, dense_p)
    assert (sparse_loss, sparse_norm) == (dense_loss, dense_norm)
    assert dense_loss == pytest.approx(-float((weights * dense_p).sum()), rel=1e-5)
    # The first column alone is an ordinary datum.
    ordinary = tinker.Datum(text, {"target_tokens": targets[:, 0], "weights": np.ones(num_tokens, np.float32)})
    both = client.forward(
        [tinker.Datum(text, {"target_tokens": targets, "weights": weights}), ordinary], "cross_entropy"
    ).result()
    wide, narrow = logprobs(both)
    np.testing.assert_allclose(narrow, wide[:, 0], atol=1e-5)


def test_a_call_larger_than_one_request_is_one_batch(service: tinker.ServiceClient) -> None:
    count = 1030  # the SDK sends at most 1024 datums in a request
    data = [next_token_datum(random_tokens(3, n)) for n in range(count)]
    client = new_model(service)
    both = client.forward_backward(data, "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
    output = both[0].result()
    assert len(output.loss_fn_outputs) == count
    assert output.metrics["loss:sum"] == pytest.approx(-sum(float(p.sum()) for p in logprobs(output)), rel=1e-5)
    parts = [client.forward_backward(data[n::2], "cross_entropy") for n in (0, 1)]
    again = client.optim_step(tinker.AdamParams(learning_rate=0)).result()
    assert sum(part.result().metrics["loss:sum"] for part in parts) == pytest.approx(output.metrics["loss:sum"])
    assert again.metrics["grad_norm:mean"] == pytest.approx(both[1].result().metrics["grad_norm:mean"], rel=1e-4)


def test_forward_backward_custom_takes_the_users_gradient(service: tinker.ServiceClient) -> None:
    def negative_log_likelihood(
        data: list[tinker.Datum], logprobs_list: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -torch.stack([p.sum() for p in logprobs_list]).sum()
        return loss, {"half:sum": float(loss) / 2}

    client = new_model(service)
    data = batch(6)
    plain = client.forward_backward(data, "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
    custom = (
        client.forward_backward_custom(data, negative_log_likelihood),
        client.optim_step(tinker.AdamParams(learning_rate=0)),
    )
    loss = plain[0].result().metrics["loss:sum"]
    assert custom[0].result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert custom[0].result().metrics["half:sum"] == pytest.approx(loss / 2, rel=1e-5)
    norms = [step.result().metrics["grad_norm:mean"] for _, step in (plain, custom)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient) -> None:
    one, two = new_model(service), new_model(service)
    data = batch(7)
    one.forward_backward(data, "cross_entropy")
    for datum in data:
        two.forward_backward([datum], "cross_entropy")
    norms = [client.optim_step(ADAM).result().metrics["grad_norm:mean"] for client in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert one.optim_step(ADAM).result().metrics["grad_norm:mean"] == 0.0  # the step has cleared them


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 2e-3},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1e-2},
        {"weight_decay": 0.5},
        {"grad_clip_norm": 1e-3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_setting_of_the_optimizer_is_honoured(changed: dict[str, float], service: tinker.ServiceClient) -> None:
    usual = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-3,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }

    def outcome(params: dict[str, float]) -> np.ndarray:
        client = new_model(service)
        for seed in (8, 9):  # two different gradients, without which the betas would cancel out
            train(client, batch(seed), steps=1, adam=tinker.AdamParams(**params))
        return forward(client, PROMPT)[0]

    first = outcome(usual)
    np.testing.assert_array_equal(outcome(usual), first)
    assert np.abs(outcome({**usual, **changed}) - first).max() > 1e-5


def test_the_loss_falls(service: tinker.ServiceClient) -> None:
    losses = train(new_model(service), batch(10), steps=12, adam=tinker.AdamParams(learning_rate=3e-3))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


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
        assert (info.kind, info.ttl_seconds, dict(info.user_metadata)) == (kind, ttl_seconds, {"run": run})
        assert (info.lora_config.rank, info.step, info.base_model) == (4, 2, BASE_MODEL)
        assert info.has_optimizer == (kind == types_pb2.CHECKPOINT_KIND_TRAINING)


def test_weights_info_describes_both_kinds_of_checkpoint(service: tinker.ServiceClient) -> None:
    client = new_model(service, rank=2, train_mlp=False)
    rest = service.create_rest_client()
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


def test_get_sampler_says_what_is_sampled(service: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    path = trained.save_weights_for_sampler("described").result().path
    client = service.create_sampling_client(model_path=path).result()
    sampler_id = client._sampling_session_id  # the SDK shows it nowhere else
    found = service.create_rest_client().get_sampler(sampler_id).result()
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


def test_inflight_weights_are_refused_by_name(trained: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"inflight.*snapshot"):
        trained.save_weights_and_get_sampling_client(kind="inflight").result()


# Samples


def test_samples_are_reproducible_and_independent(base_sampler: tinker.SamplingClient) -> None:
    first = sample(base_sampler, PROMPT, num_samples=4, seed=1)
    assert len({tuple(sequence.tokens) for sequence in first}) == 4
    assert len({sequence.sequence_id for sequence in first}) == 4
    for sequence in first:
        assert len(sequence.tokens) == 12
        assert sequence.stop_reason == "length"
        assert sequence.logprobs is not None
        assert all(p < 0 for p in sequence.logprobs)
    again = sample(base_sampler, PROMPT, num_samples=4, seed=1)
    assert [sequence.tokens for sequence in again] == [sequence.tokens for sequence in first]
    assert [sequence.logprobs for sequence in again] == [sequence.logprobs for sequence in first]
    other = sample(base_sampler, PROMPT, num_samples=4, seed=-(2**70) - 2)  # any integer is a seed
    assert [sequence.tokens for sequence in other] != [sequence.tokens for sequence in first]
    assert sample(base_sampler, PROMPT)[0].tokens != sample(base_sampler, PROMPT)[0].tokens  # no seed


def test_greedy_takes_the_most_probable_token_in_each_way_to_say_so(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    result = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=3).result()
    (greedy,) = result.sequences
    assert greedy.topk_logprobs is not None
    assert greedy.logprobs is not None
    for token, logprob, row in zip(greedy.tokens, greedy.logprobs, greedy.topk_logprobs, strict=True):
        assert row is not None
        assert len(row) == 3
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
        assert row[0] == (token, pytest.approx(logprob, abs=1e-5))
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert sample(base_sampler, PROMPT, max_tokens=8, **params)[0].tokens == greedy.tokens


def test_top_k_and_top_p_limit_the_draw(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=1, stop=[], temperature=2.0)
    table = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=5).result()
    assert table.sequences[0].topk_logprobs is not None
    best = [token for token, _ in table.sequences[0].topk_logprobs[0] or []]
    top_p = math.exp(sum(p for _, p in (table.sequences[0].topk_logprobs[0] or [])[:1])) + 1e-6  # two tokens reach it
    for limits, allowed in (({"top_k": 3}, best[:3]), ({"top_p": top_p}, best[:2])):
        drawn = sample(base_sampler, PROMPT, num_samples=64, max_tokens=1, temperature=2.0, seed=0, **limits)
        assert {sequence.tokens[0] for sequence in drawn} == set(allowed)


def test_a_stop_is_included_and_ends_the_sequence(base_sampler: tinker.SamplingClient, toy: object) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(toy))
    tokens = sample(base_sampler, PROMPT, seed=2, max_tokens=20)[0].tokens
    at = next(n for n in range(3, 20) if tokens[n] not in tokens[:n])
    by_id = sample(base_sampler, PROMPT, seed=2, max_tokens=20, stop=[tokens[at]])[0]
    assert (by_id.tokens, by_id.stop_reason) == (tokens[: at + 1], "stop")
    assert len(by_id.logprobs or []) == at + 1
    at = next(
        n
        for n in range(3, 20)
        if (text := tokenizer.decode(tokens[n])).strip() and text not in tokenizer.decode(tokens[:n])
    )
    text = tokenizer.decode(tokens[at])
    for stop in (text, ["never in there", text]):
        by_text = sample(base_sampler, PROMPT, seed=2, max_tokens=20, stop=stop)[0]
        assert (by_text.tokens, by_text.stop_reason) == (tokens[: at + 1], "stop")


def test_the_models_own_end_stops_unless_told_otherwise(service: tinker.ServiceClient, toy: object) -> None:
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(str(toy)).eos_token_id
    client = new_model(service)
    text = [*PROMPT, end, *PROMPT[:3]]
    train(client, [next_token_datum(text)], steps=25, adam=tinker.AdamParams(learning_rate=1e-2))
    sampler = client.save_weights_and_get_sampling_client().result()
    (ended,) = sample(sampler, PROMPT, temperature=0.0, stop=None)
    assert (ended.tokens, ended.stop_reason) == ([end], "stop")
    (went_on,) = sample(sampler, PROMPT, temperature=0.0, stop=[])
    assert went_on.tokens[:2] == [end, PROMPT[0]]
    assert went_on.stop_reason == "length"


def test_prompts_are_scored_in_every_way(base_sampler: tinker.SamplingClient) -> None:
    prompt, params = ModelInput.from_ints(PROMPT), SamplingParams(max_tokens=1, stop=[], seed=0)
    count = len(PROMPT)
    ids = torch.full((count - 1, 2), -1, dtype=torch.int64)
    ids[:, 0] = torch.tensor(PROMPT[1:])
    ids[3, 1] = 17
    result = base_sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=TensorData.from_torch(ids),
        prompt_alt_tokens_k=3,
    ).result()
    wanted = score(base_sampler, PROMPT)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    np.testing.assert_allclose(np.array(result.prompt_logprobs[1:], np.float32), wanted, atol=1e-5)

    assert result.topk_prompt_logprobs is not None
    assert len(result.topk_prompt_logprobs) == count
    assert result.topk_prompt_logprobs[0] is None
    tables = [dict(row or []) for row in result.topk_prompt_logprobs[1:]]
    assert all(len(table) == 4 for table in tables)
    for token, logprob, table in zip(PROMPT[1:], wanted, tables, strict=True):
        assert table.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
        assert logprob <= max(table.values()) + 1e-5

    assert result.target_prompt_logprobs is not None
    scored = result.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(scored[:, 0], wanted, atol=1e-5)
    assert scored[3, 1] < 0
    assert np.count_nonzero(scored[:, 1]) == 1
    sparse = TensorData.from_torch_sparse(torch.where(torch.eye(count - 1, 8) > 0, ids[:, :1], -1), pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    by_sparse = base_sampler.sample(prompt, 1, params, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    assert by_sparse is not None
    np.testing.assert_allclose(by_sparse.to_numpy().diagonal(), wanted[:8], atol=1e-5)

    assert result.prompt_alt_tokens is not None
    drawn, drawn_logprobs = result.prompt_alt_tokens.tokens.to_numpy(), result.prompt_alt_tokens.logprobs.to_numpy()
    assert drawn.shape == drawn_logprobs.shape == (count - 1, 3)
    assert len(np.unique(drawn)) > 3
    for tokens, values, table in zip(drawn, drawn_logprobs, tables, strict=True):
        for token, value in zip(tokens, values, strict=True):
            assert value == pytest.approx(table.get(token, value), abs=1e-5)

    last = base_sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (count - 3)
    np.testing.assert_allclose(np.array(last[-3:], np.float32), wanted[-3:], atol=1e-5)


def test_a_temperature_scales_the_returned_logprobs(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=1, stop=[], seed=3, temperature=0.5)
    result = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=20).result()
    (hot,) = (
        base_sampler.sample(
            ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=1, stop=[]), topk_sample_logprobs=20
        )
        .result()
        .sequences
    )
    (cold,) = result.sequences
    assert hot.topk_logprobs is not None
    assert cold.topk_logprobs is not None
    raw, scaled = np.array(hot.topk_logprobs[0]), np.array(cold.topk_logprobs[0])
    np.testing.assert_array_equal(scaled[:, 0], raw[:, 0])
    np.testing.assert_allclose(np.diff(scaled[:, 1]), 2 * np.diff(raw[:, 1]), atol=1e-4)


def test_many_samples_at_once_are_those_of_one_at_a_time(
    base_sampler: tinker.SamplingClient, trained: tinker.TrainingClient
) -> None:
    """Requests join and leave a running batch, and share it with other weights; nobody sees that in the numbers."""
    adapted = trained.save_weights_and_get_sampling_client().result()
    asked = [
        (
            client,
            ModelInput.from_ints(random_tokens(3 + 5 * n, n)),
            SamplingParams(max_tokens=3 + 4 * n, seed=n, stop=[]),
        )
        for n in range(4)
        for client in (base_sampler, adapted)
    ]
    alone = [client.sample(prompt, 2, params).result() for client, prompt, params in asked]
    pending = [client.sample(prompt, 2, params) for client, prompt, params in asked]
    for one, together in zip(alone, (each.result() for each in pending), strict=True):
        for left, right in zip(one.sequences, together.sequences, strict=True):
            assert right.tokens == left.tokens
            np.testing.assert_allclose(right.logprobs_np, left.logprobs_np, atol=1e-4)
