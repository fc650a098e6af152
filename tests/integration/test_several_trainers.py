"""Two trainers of one base model: runs spread over them, exchange checkpoints, and survive the death of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.support.examples import ADAM, BASE_MODEL, PROMPT, batch, forward, new_model, random_tokens
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning"),
]

TEXT = random_tokens(12, 3)


@pytest.fixture(scope="module")
def two(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Deterministic trainers: equal runs are equal to the last bit, on whichever trainer."""
    flags = ["--trainers", "2", "--deterministic"]
    models = [f"{BASE_MODEL}={toy}"]
    with Stack(tmp_path_factory.mktemp("two"), base_models=models, flags=flags, startup_timeout_s=600) as stack:
        yield stack


@pytest.fixture
def service(two: Stack) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=two.base_url, api_key="tml-test") as service:
        yield service


def has_run(address: str, model_id: str) -> bool:
    """Whether the trainer has the run. Waits for a trainer that starts."""
    told: list[bool] = []

    def is_told() -> bool:
        try:
            stub.GetModel(trainer_pb2.GetModelRequest(model_id=model_id), timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                told.append(False)
            elif error.code() != grpc.StatusCode.UNAVAILABLE:  # its base model is still being loaded
                raise
        else:
            told.append(True)
        return bool(told)

    with grpc.insecure_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        wait_until(is_told, what=f"the trainer at {address}")
    return told[0]


def trainer_of(stack: Stack, client: tinker.TrainingClient) -> str:
    """Address of the only trainer that has the run."""
    (address,) = [address for address in stack.trainers if has_run(address, client.model_id)]
    return address


def one_of_each(stack: Stack, service: tinker.ServiceClient) -> list[tinker.TrainingClient]:
    """Equal runs, one at each trainer."""
    clients: dict[str, tinker.TrainingClient] = {}
    for _ in range(6):
        client = new_model(service)
        clients.setdefault(trainer_of(stack, client), client)
        if len(clients) == 2:
            return list(clients.values())
    raise AssertionError("all runs went to one trainer")


def train(clients: Sequence[tinker.TrainingClient], steps: Sequence[int]) -> None:
    """Steps of all clients at once, pipelined."""
    futures = []
    for step in steps:
        for client in clients:
            futures += [client.forward_backward(batch(step), "cross_entropy"), client.optim_step(ADAM)]
    for future in futures:
        future.result()


def assert_equal(clients: Sequence[tinker.TrainingClient]) -> None:
    one, other = (forward(client, TEXT)[0] for client in clients)
    np.testing.assert_array_equal(one, other)


def greedy(sampler: tinker.SamplingClient) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    return list(sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result().sequences[0].tokens)


def trainer_process(stack: Stack, address: str) -> psutil.Process:
    (found,) = stack.processes("trainer_service", address)
    return found


def gateway_process(stack: Stack) -> psutil.Process:
    (found,) = stack.processes("gateway")
    return found


def test_runs_spread_train_publish_at_once_and_load_each_others_checkpoints(
    two: Stack, service: tinker.ServiceClient
) -> None:
    assert len(two.trainers) == 2
    clients = one_of_each(two, service)
    train(clients, range(2))
    assert_equal(clients)
    saved = [client.save_weights_for_sampler("spread") for client in clients]
    samplers = [service.create_sampling_client(model_path=future.result().path).result() for future in saved]
    one, other = map(greedy, samplers)
    assert one == other
    train(clients[:1], range(2, 4))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_equal(clients)
    path = clients[0].save_state("ahead").result().path
    clients[1].load_state_with_optimizer(path).result()
    train(clients, range(4, 5))
    assert_equal(clients)
    copy = service.create_training_client_from_state_with_optimizer(path).result()
    assert trainer_of(two, copy) in two.trainers


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_trainer_and_a_killed_gateway_delay_runs_and_change_nothing(
    two: Stack, service: tinker.ServiceClient, victim: int
) -> None:
    clients = one_of_each(two, service)
    train(clients, range(2))
    address = trainer_of(two, clients[victim])
    trainer_process(two, address).kill()
    train(clients, range(2, 4))
    gateway_process(two).kill()
    trainer_process(two, address).kill()
    train(clients, range(4, 6))
    assert_equal(clients)
    assert [trainer_of(two, client) for client in clients][victim] == address
    paths = [client.save_weights_for_sampler(f"killed-{victim}").result().path for client in clients]
    one, other = (greedy(service.create_sampling_client(model_path=path).result()) for path in paths)
    assert one == other
