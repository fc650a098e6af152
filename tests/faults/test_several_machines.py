"""Machines of a deployment that are lost or cut off, on a network with latency and losses, under the SDK.

The gateway, with PostgreSQL where it is installed, a trainer whose two ranks are on two machines, and two samplers:
five network namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tinker

from tests.faults.networks import Machine, Network, network
from tests.faults.runs import Outcome, check_all, run_all, under_way
from tests.support.examples import BASE_MODEL
from tests.support.postgres import installed
from tests.support.postgres import running as running_postgres
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DELAY_S = 0.02
LOSS = 0.01
CUT_S = 20.0
KEY = "tml-test"
FIRST, SERVES, FOLLOWS, SAMPLES, SAMPLES_TOO = range(5)
ROLES = ("gateway", "trainer", "trainer", "sampler", "sampler")
NAMES = ("gateway", "trainer's first", "trainer's second", "sampler", "other sampler")


@dataclass
class Deployment:
    folder: Path
    network: Network
    model: Path
    database_url: str
    stacks: dict[int, Stack] = field(default_factory=dict)

    def machine(self, number: int) -> Machine:
        return self.network.machines[number]

    @property
    def checkpoints(self) -> Path:
        return self.stacks[SERVES].checkpoints

    def launch(self, number: int) -> None:
        machine = self.machine(number)
        flags, env, base_models = ["--role", ROLES[number]], {}, []
        if number == FIRST:
            flags += ["--address", machine.address, "--host", machine.address, "--port", "8000"]
            env = {"GATEWAY_DATABASE_URL": self.database_url, "GATEWAY_API_KEYS": f'["{KEY}"]'}
            base_models = [f"{BASE_MODEL}={self.model}"]
        else:
            env = {"TINSMITH_JOIN": self.token.read_text()}
        if ROLES[number] == "trainer":
            flags += ["--trainer-nodes", "2"]
        self.stacks[number] = Stack(
            self._folder(number),
            base_models=base_models,
            flags=flags,
            env=env,
            within=machine.within,
            joins=number != FIRST,
        )
        self.stacks[number].launch()

    def has_token(self) -> bool:
        return self.token.exists() and self.token.read_text().endswith("\n")

    def has_trainer(self) -> bool:
        members = self.token.with_name("members.json")
        return members.exists() and f'"{BASE_MODEL}"' in members.read_text()

    @property
    def token(self) -> Path:
        return self._folder(FIRST) / "cluster/join-token"

    def _folder(self, number: int) -> Path:
        return self.folder / str(number)

    def report(self) -> str:
        return "\n".join(f"==== {NAMES[number]}\n{stack.report()}" for number, stack in self.stacks.items())


@pytest.fixture(scope="module")
def deployment(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with ExitStack() as exits:
        try:
            laid = exits.enter_context(network(5, delay_s=DELAY_S, loss=LOSS))
        except OSError as error:
            pytest.skip(f"this user may not make a network: {error}")
        first = laid.machines[FIRST]
        database_url = ""  # SQLite
        if installed() is not None:
            postgres = exits.enter_context(running_postgres(address=first.address, within=first.within))
            database_url = postgres.new_database()
        deployment = Deployment(tmp_path_factory.mktemp("machines"), laid, toy, database_url)
        try:
            deployment.launch(FIRST)
            wait_until(deployment.has_token, what="a token", limit_s=120)
            deployment.launch(SERVES)  # the first to join serves
            wait_until(deployment.has_trainer, what="a trainer", limit_s=120)
            for number in (FOLLOWS, SAMPLES, SAMPLES_TOO):
                deployment.launch(number)
            for stack in deployment.stacks.values():
                stack.wait_ready()
            yield deployment
        finally:
            for number in sorted(deployment.stacks, reverse=True):
                deployment.stacks[number].kill()


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> list[Outcome]:
    with connected(deployment) as service:
        return run_all(service, deployment.checkpoints)


def connected(deployment: Deployment) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=deployment.stacks[FIRST].base_url, api_key=KEY)


def check_disturbed(deployment: Deployment, undisturbed: list[Outcome], *, lost: int, killed: bool) -> None:
    """Loses a machine in the middle of the runs; it comes back while they go on or wait. Everything ends as without."""
    machine = deployment.machine(lost)
    try:
        with connected(deployment) as service, under_way(service, deployment.checkpoints) as outcomes:
            time.sleep(0.3 * max(outcome.seconds for outcome in undisturbed))
            if killed:
                deployment.stacks[lost].kill()
                deployment.launch(lost)
                deployment.stacks[lost].wait_ready()
            else:
                assert machine.is_reached()
                deployment.network.cut(machine)
                ends = time.monotonic() + CUT_S
                assert not machine.is_reached()
                time.sleep(ends - time.monotonic())
                deployment.network.mend(machine)
                wait_until(machine.is_reached, what=f"{NAMES[lost]} can be reached again")
            check_all(outcomes(), undisturbed, exactly=False)
    except BaseException:
        print(deployment.report())
        raise


@pytest.mark.parametrize("lost", [FOLLOWS, SAMPLES], ids=lambda number: NAMES[number])
def test_a_machine_that_is_killed_and_started_again_costs_clients_a_delay(
    deployment: Deployment, undisturbed: list[Outcome], lost: int
) -> None:
    check_disturbed(deployment, undisturbed, lost=lost, killed=True)


@pytest.mark.parametrize("lost", [SERVES, FIRST], ids=lambda number: NAMES[number])
def test_a_machine_that_is_cut_off_for_20_seconds_costs_clients_a_delay(
    deployment: Deployment, undisturbed: list[Outcome], lost: int
) -> None:
    check_disturbed(deployment, undisturbed, lost=lost, killed=False)
