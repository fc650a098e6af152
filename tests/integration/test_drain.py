"""Two trainers: one is drained under load, and no client notices more than a delay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.integration.test_several_trainers import greedy, trainer_of, trainer_process
from tests.support.examples import ADAM, BASE_MODEL, batch, forward, new_model, random_tokens
from tests.support.stack import Stack
from tinsmith_cli import main

pytestmark = [pytest.mark.slow]

TEXT = random_tokens(12, 3)
NUM_RUNS = 6
NUM_STEPS = 24


@pytest.fixture(scope="module")
def two(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Deterministic trainers: equal runs are equal to the last bit, on whichever trainer."""
    flags = ["--trainers", "2", "--deterministic"]
    models = [f"{BASE_MODEL}={toy}"]
    with Stack(tmp_path_factory.mktemp("drain"), base_models=models, flags=flags, startup_timeout_s=600) as stack:
        yield stack


class Run(threading.Thread):
    """A client that trains, with all steps of a round submitted ahead, two batches a step, and saves in between."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        super().__init__(daemon=True)
        self.client = new_model(service)
        self.step, self.num_steps, self.pause_s = 0, NUM_STEPS, 0.0
        self.losses: list[float] = []
        self.paths: list[str] = []
        self.slowest_s = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.step < self.num_steps:
                self._round()
                time.sleep(self.pause_s)
        except BaseException as error:
            self.error = error

    def _round(self) -> None:
        results, stepped = [], []
        for number in range(self.step, self.step + 4):
            results += [self.client.forward_backward(batch(2 * number + half), "cross_entropy") for half in (0, 1)]
            stepped.append(self.client.optim_step(ADAM))
        saved = self.client.save_weights_for_sampler(f"step-{self.step}")
        for result in results:
            began = time.monotonic()
            self.losses.append(result.result().metrics["loss:sum"])
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        for result in stepped:
            result.result()
        self.paths.append(saved.result().path)
        self.step += 4


def run_all(runs: list[Run]) -> None:
    for run in runs:
        run.start()
    for run in runs:
        run.join(timeout=500)
        assert not run.is_alive()
        if run.error is not None:
            raise run.error


def test_a_trainer_is_drained_under_load_stopped_and_comes_back(
    two: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", two.base_url)
    with tinker.ServiceClient(base_url=two.base_url, api_key="tml-test") as service:
        undisturbed = Run(service)
        run_all([undisturbed])
        runs = [Run(service) for _ in range(NUM_RUNS)]
        idle = new_model(service)
        drained, other = two.trainers
        assert {trainer_of(two, run.client) for run in runs} == set(two.trainers)
        training = threading.Thread(target=lambda: run_all(runs), daemon=True)
        training.start()
        while max(run.step for run in runs) < 4:
            time.sleep(0.05)
        assert main(["drain", drained, "--base-url", two.base_url, "--api-key", "tml-test"]) == 0
        assert f"{drained} can be stopped: none of its runs is left there" in capsys.readouterr().out
        assert any(run.step < NUM_STEPS for run in runs), "the runs were over before"
        trainer_process(two, drained).kill()
        training.join(timeout=500)
        for run in runs:
            assert run.error is None
            assert run.losses == undisturbed.losses
            np.testing.assert_array_equal(
                forward(run.client, TEXT)[0], forward(undisturbed.client, TEXT)[0], err_msg=run.client.model_id
            )
            assert trainer_of(two, run.client) == other
        assert len(forward(idle, TEXT)[0])
        assert trainer_of(two, new_model(service)) == other, "a drained trainer gets no new run, also after a restart"
        samplers = [service.create_sampling_client(model_path=run.paths[-1]).result() for run in (*runs, undisturbed)]
        assert len({tuple(greedy(sampler)) for sampler in samplers}) == 1
        assert main(["drain", drained, "--undo", "--base-url", two.base_url, "--api-key", "tml-test"]) == 0
        assert f"{drained} takes runs again" in capsys.readouterr().out
        print("slowest answer in seconds:", *(f"{run.slowest_s:.1f}" for run in runs))


def test_all_trainers_are_restarted_one_after_the_other_under_load(
    two: Stack, capfd: pytest.CaptureFixture[str]
) -> None:
    with tinker.ServiceClient(base_url=two.base_url, api_key="tml-test") as service:
        runs = [Run(service) for _ in range(2)]
        for run in runs:
            run.num_steps, run.pause_s = 1_000_000, 1.0  # the undisturbed run has to make as many steps
        training = threading.Thread(target=lambda: run_all(runs), daemon=True)
        training.start()
        while max(run.step for run in runs) < 4:
            time.sleep(0.05)
        before = {address: trainer_process(two, address).pid for address in two.trainers}
        commands = "; ".join(f"[ $TINSMITH_TRAINER != {address} ] || kill {pid}" for address, pid in before.items())
        server = ["--base-url", two.base_url, "--api-key", "tml-test"]
        assert main(["drain", "--restart", commands, *server]) == 0
        undisturbed = Run(service)
        undisturbed.num_steps = max(run.step for run in runs) + 8  # a round of 4 steps is in work
        for run in runs:
            run.num_steps = undisturbed.num_steps
        training.join(timeout=500)
        run_all([undisturbed])
        said = capfd.readouterr().out
        for address in two.trainers:
            assert f"{address} takes runs again" in said
            assert trainer_process(two, address).pid != before[address]
        for run in runs:
            assert run.error is None
            assert run.losses == undisturbed.losses
            np.testing.assert_array_equal(
                forward(run.client, TEXT)[0], forward(undisturbed.client, TEXT)[0], err_msg=run.client.model_id
            )
