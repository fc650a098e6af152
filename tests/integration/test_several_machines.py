"""Machines that are each started with one line: the first one, and others that join it and leave, under the SDK."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import tinker

from tests.support.examples import ADAM, BASE_MODEL, new_model, next_token_datum, random_tokens
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tinsmith.rpc.addresses import read_addresses
from tinsmith_cli.ports import free_ports


@pytest.mark.slow
def test_machines_find_each_other_and_samplers_come_and_go_while_a_client_works(toy: Path, tmp_path: Path) -> None:
    join_port, trainer_port, *sampler_ports = free_ports(4)
    flags = ["--address", "127.0.0.1", "--role", "gateway,trainer", "--join-port", str(join_port)]
    flags += ["--trainer-port", str(trainer_port)]
    first = Stack(tmp_path / "first", base_models=[f"{BASE_MODEL}={toy}"], flags=flags)
    token = first.state_dir / "cluster/join-token"
    services = first.state_dir / "cluster/services.json"

    def further(number: int) -> Stack:
        env = {"TINSMITH_JOIN": token.read_text()}
        flags = ["--role", "sampler", "--address", f"127.0.0.{number + 2}"]  # loopback has 2^24 of them
        flags += ["--sampler-port", str(sampler_ports[number])]
        return Stack(tmp_path / f"further{number}", base_models=[], flags=flags, env=env, joins=True)

    with ExitStack() as stacks:
        first.launch()
        stacks.enter_context(first.running())
        wait_until(lambda: token.exists() and token.read_text().endswith("\n"), what="a token", limit_s=120)
        one = stacks.enter_context(further(0))
        first.wait_ready()
        assert (first.trainers, first.samplers) == ([f"127.0.0.1:{trainer_port}"], [f"127.0.0.2:{sampler_ports[0]}"])

        service = tinker.ServiceClient(base_url=first.base_url, api_key="tml-test")
        model = new_model(service)
        datum = next_token_datum(random_tokens(20, 1))
        sampler = None
        for _ in range(2):
            model.forward_backward([datum], "cross_entropy").result()
            model.optim_step(ADAM).result()
            sampler = model.save_weights_and_get_sampling_client().result()
        assert sampler is not None
        prompt, params = tinker.ModelInput.from_ints(random_tokens(8, 2)), tinker.SamplingParams(max_tokens=4, seed=1)
        drawn = sampler.sample(prompt, 1, params).result().sequences[0].tokens

        two = stacks.enter_context(further(1))
        wait_until(lambda: len(read_addresses(services).samplers) == 2, what="the second sampler in the list")
        assert two.trainers == ["elsewhere"]
        one.stop()
        assert read_addresses(services).samplers == (f"127.0.0.3:{sampler_ports[1]}",)
        assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == drawn, "the trainer sent the version"
        model.forward_backward([datum], "cross_entropy").result()
        model.optim_step(ADAM).result()
        later = model.save_weights_and_get_sampling_client().result()
        assert later.sample(prompt, 2, params).result().sequences
