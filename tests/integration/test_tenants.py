"""Two owners with the SDK, on one real stack: what each sees, and what a budget and a rate look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.integration.gateways import own_gateway
from tests.support.examples import ADAM, PROMPT, batch, new_model
from tests.support.stack import Stack
from tinsmith_cli import main

NewKey = Callable[..., str]
SAMPLING = tinker.SamplingParams(max_tokens=2)


@pytest.fixture
def new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> NewKey:
    def create(owner: str, *argv: str) -> str:
        database = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
        assert main(["keys", "create", "--owner", owner, "--database-url", database, *argv]) == 0
        return capsys.readouterr().out.strip()

    return create


@pytest.fixture
def url(stack: Stack, tmp_path: Path, new_key: NewKey) -> Iterator[str]:
    new_key("operator")  # from the start a key is needed
    with own_gateway(stack, tmp_path, {}) as url:
        yield url


def test_one_owner_reads_what_another_has_published_and_nothing_else(url: str, new_key: NewKey) -> None:
    ada, bob = new_key("ada"), new_key("bob")  # while the gateway runs
    with (
        tinker.ServiceClient(base_url=url, api_key=ada) as hers,
        tinker.ServiceClient(base_url=url, api_key=bob) as his,
    ):
        training = new_model(hers, rank=4)
        training.forward_backward(batch(1), "cross_entropy").result()
        training.optim_step(ADAM).result()
        saved = training.save_state("one").result().path
        sampled = training.save_weights_for_sampler("two").result().path
        rest, own = (tinker.RestClient(base_url=url, api_key=key) for key in (bob, ada))
        assert rest.list_training_runs().result().training_runs == []
        assert rest.list_sessions().result().sessions == []
        assert len(own.list_training_runs().result().training_runs) == 1
        for path in (saved, sampled):
            with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
                rest.delete_checkpoint_from_tinker_path(path).result()
            with pytest.raises(tinker.NotFoundError):
                rest.publish_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
            his.create_training_client_from_state(saved).result()
        with pytest.raises(tinker.NotFoundError):
            his.create_sampling_client(model_path=sampled).result()
        for path in (saved, sampled):
            own.publish_checkpoint_from_tinker_path(path).result()
        resumed = his.create_training_client_from_state(saved).result()
        resumed.forward_backward(batch(1), "cross_entropy").result()
        sampler = his.create_sampling_client(model_path=sampled).result()
        assert len(sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, SAMPLING).result().sequences) == 1
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(saved).result()


def test_a_budget_that_is_used_up_is_said_at_once_and_the_work_can_be_saved(url: str, new_key: NewKey) -> None:
    tokens = sum(datum.model_input.length for datum in batch(1))
    key = new_key("ada", "--tokens-budget", str(2 * tokens))
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = new_model(service, rank=4)
        for _ in range(2):
            training.forward_backward(batch(1), "cross_entropy").result()
        training.optim_step(ADAM).result()
        with pytest.raises(tinker.RequestFailedError, match="the token budget of 'ada' does not allow this request"):
            training.forward_backward(batch(1), "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        with pytest.raises(tinker.RequestFailedError, match="token budget"):
            sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, SAMPLING).result()
        assert training.save_state("kept").result().path.endswith("/weights/kept")


def test_a_rate_slows_training_down_and_loses_nothing(url: str, new_key: NewKey) -> None:
    tokens = sum(datum.model_input.length for datum in batch(1))
    key = new_key("ada", "--tokens-per-minute", str(20 * tokens))
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = new_model(service, rank=4)
        futures = [training.forward_backward(batch(1), "cross_entropy") for _ in range(22)]  # without waiting
        step = training.optim_step(ADAM)
        losses = [future.result().metrics["loss:sum"] for future in futures]
        assert losses == pytest.approx([losses[0]] * 22)  # all before the step
        step.result()
