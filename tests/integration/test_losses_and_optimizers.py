"""The losses beyond the first five and both optimizers, on the real stack.

Through the SDK, and over gRPC where a client brings what the gateway would add.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tinker
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tinker.lib.public_interfaces.custom_loss import encode_graph, run_loss_handle, trace_loss

from tests.support.batches import random_datum, request
from tests.support.examples import ADAM, BASE_MODEL, batch, logprobs, new_model, next_token_datum, random_tokens
from tests.support.stack import Stack
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import trainer_pb2_grpc, types_pb2

TOKENS = random_tokens(9, 1)
DIMUON = tinker.types.DimuonParams(learning_rate=5e-2)


@pytest.fixture(scope="module")
def client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return new_model(service)


@pytest.fixture(scope="module")
def trainer(stack: Stack) -> Iterator[trainer_pb2_grpc.TrainerServiceStub]:
    with grpc.insecure_channel(stack.trainers[0]) as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel)


def refusal(error: BaseException) -> tuple[str, str]:
    """Reason and message of a failed call."""
    assert isinstance(error, grpc.RpcError)
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is one too
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason, status.message


def policy_inputs(*, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    n = len(TOKENS) - 1
    return {
        "logprobs": rng.normal(-6, 1, n).astype(np.float32),
        "advantages": rng.normal(size=n).astype(np.float32),
    }


def test_the_trainer_names_every_loss_and_optimizer(trainer: trainer_pb2_grpc.TrainerServiceStub) -> None:
    info = trainer.GetTrainerInfo(pb.GetTrainerInfoRequest())
    assert {*info.loss_fns} == {
        *("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom")
    }
    assert [*info.optimizers] == [types_pb2.OPTIMIZER_ADAMW, types_pb2.OPTIMIZER_DIMUON]


def test_gspo_is_its_formula(client: tinker.TrainingClient) -> None:
    mask = np.float32([0, 0, 1, 1, 1, 1, 1, 1])
    inputs = policy_inputs()
    one = next_token_datum(TOKENS, **inputs, sequence_ratio_mask=mask)
    output = client.forward_backward([one], "gspo", {"clip_high_threshold": 1.1}).result()
    (p,) = logprobs(output)
    ratio = np.exp((mask * (p - inputs["logprobs"])).sum() / mask.sum())
    advantages = inputs["advantages"]
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.1) * advantages).sum()
    assert output.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)


def test_thresholds_of_each_target_are_honoured(client: tinker.TrainingClient) -> None:
    inputs = policy_inputs()
    low, high = np.linspace(0.1, 0.9, 8, dtype=np.float32), np.linspace(1.0, 30, 8, dtype=np.float32)
    one = next_token_datum(TOKENS, **inputs, clip_low_threshold=low, clip_high_threshold=high)
    output = client.forward_backward([one], "ppo").result()
    ratio, advantages = np.exp(logprobs(output)[0] - inputs["logprobs"]), inputs["advantages"]
    expected = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages).sum()
    assert output.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    swapped = next_token_datum(TOKENS, **inputs, clip_low_threshold=high, clip_high_threshold=low)
    with pytest.raises(
        tinker.RequestFailedError, match=r"clip_low_threshold\[0\]: .* is above clip_high_threshold\[0\]"
    ):
        client.forward([swapped], "ppo").result()


@pytest.fixture(scope="module")
def remote(trainer: trainer_pb2_grpc.TrainerServiceStub) -> Iterator[str]:
    """A model that was made over gRPC."""
    model_id = "losses:train:0"
    config = types_pb2.LoraConfig(rank=4, seed=0, train_attn=True)
    trainer.CreateModel(pb.CreateModelRequest(model_id=model_id, base_model=BASE_MODEL, lora_config=config))
    yield model_id
    trainer.DeleteModel(pb.DeleteModelRequest(model_id=model_id))


def test_stable_reinforce_takes_what_the_sampler_recorded(
    trainer: trainer_pb2_grpc.TrainerServiceStub, remote: str
) -> None:
    one = random_datum(8, 0, vocab_size=2000, policy=True)
    mask = np.float32([0, 0, 1, 1, 1, 1, 1, 1])
    q, a = (np.frombuffer(one.loss_fn_inputs[name].dense, "<f4") for name in ("logprobs", "advantages"))
    a = a * mask
    one.loss_fn_inputs["advantages"].CopyFrom(from_numpy(a))
    one.loss_fn_inputs["sampled_mask"].CopyFrom(from_numpy(mask))
    config = {"kl_coeff": 0.5, "ratio_cap": 1.5}
    done = trainer.ForwardBackward(
        request([one], "stable_reinforce", model_id=remote, seq_id=1, config=config, forward_only=True)
    )
    p = np.frombuffer(done.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    expected = (mask * (0.25 * (p - q) ** 2 - np.minimum(np.exp(p - q), 1.5) * a)).sum()
    assert done.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)


def contrast(logprobs: Any, sign: Any) -> tuple[Any, dict[str, Any]]:
    margin = (logprobs * sign).sum()
    return -torch.nn.functional.logsigmoid(0.1 * margin), {"custom/margin:mean": margin}


def test_a_custom_loss_is_checked_and_run_in_one_pass(
    trainer: trainer_pb2_grpc.TrainerServiceStub, remote: str
) -> None:
    handle = trace_loss(contrast, {"logprobs": 1, "sign": 1}, "session")
    loss = pb.CustomLoss(
        name="contrast",
        inputs=[pb.CustomLossInput(name=one.name, rank=one.rank) for one in handle.inputs],
        graph=json.dumps(encode_graph(handle).model_dump()),
    )
    trainer.CheckCustomLoss(pb.CheckCustomLossRequest(custom_loss=loss))

    data = [random_datum(n, n, vocab_size=2000) for n in (5, 12)]
    signs = [np.where(np.arange(n) % 2, 1, -1) for n in (5, 12)]
    for one, sign in zip(data, signs, strict=True):
        one.loss_fn_inputs["sign"].CopyFrom(from_numpy(sign))
    message = request(data, "custom", model_id=remote, seq_id=2)
    message.custom_loss.CopyFrom(loss)
    done = trainer.ForwardBackward(message)
    found = np.frombuffer(done.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    leaves = [torch.tensor(part) for part in np.split(found, [5])]
    sdk_data = [
        next_token_datum(random_tokens(len(sign) + 1, 0), sign=sign) for sign in signs
    ]  # its loss reads the signs only
    expected, metrics = run_loss_handle(handle, sdk_data, leaves)
    assert done.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    assert done.metrics["custom/margin:mean"] == pytest.approx(metrics["custom/margin:mean"], rel=1e-4)
    step = pb.OptimStepRequest(
        model_id=remote, seq_id=3, adam_params=pb.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    )
    assert trainer.OptimStep(step).metrics["grad_norm:mean"] > 0

    loss.graph = loss.graph.replace("torch._C._nn.log_sigmoid", "os.system")
    with pytest.raises(grpc.RpcError) as failed:
        trainer.CheckCustomLoss(pb.CheckCustomLossRequest(custom_loss=loss))
    reason, text = refusal(failed.value)
    assert reason == "INVALID_REQUEST"
    assert "node 'log_sigmoid' (os.system): is not on this server's list" in text


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state
def test_dimuon_trains_and_its_state_is_restored_with_its_kind(
    service: tinker.ServiceClient, trainer: trainer_pb2_grpc.TrainerServiceStub
) -> None:
    client = new_model(service, optimizer=tinker.types.DimuonOptimizerConfig())
    data, losses = batch(0), []
    for _ in range(4):
        losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        metrics = client.optim_step(DIMUON).result().metrics
        assert metrics is not None
        assert metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params: are for optimizer 'adamw', but .* 'dimuon'"):
        client.optim_step(ADAM).result()
    path = client.save_state("dimuon").result().path

    def next_losses(one: tinker.TrainingClient, params: Any) -> list[float]:
        done = [one.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]]
        one.optim_step(params).result()
        return [*done, one.forward(data, "cross_entropy").result().metrics["loss:sum"]]

    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().optimizer_config.type == "dimuon"
    went_on = next_losses(client, DIMUON)
    assert next_losses(resumed, DIMUON) == went_on
    fresh = service.create_training_client_from_state(path).result()  # of the default kind
    assert next_losses(fresh, ADAM)[0] == went_on[0]
    with pytest.raises(tinker.RequestFailedError, match="the checkpoint's optimizer is 'dimuon', the model's 'adamw'"):
        fresh.load_state_with_optimizer(path).result()
    fresh.load_state(path).result()

    location = path.removeprefix("tinker://")
    create = pb.CreateModelRequest(
        model_id="kinds:train:0", from_location=location, load_optimizer=True, optimizer=types_pb2.OPTIMIZER_ADAMW
    )
    with pytest.raises(grpc.RpcError) as failed:
        trainer.CreateModel(create)
    assert "the checkpoint's optimizer is 'dimuon', the model's 'adamw'" in refusal(failed.value)[1]
    stored = trainer.GetCheckpoint(pb.GetCheckpointRequest(location=location)).checkpoint
    assert stored.optimizer == types_pb2.OPTIMIZER_DIMUON
