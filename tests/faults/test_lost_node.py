"""A trainer with its journal in PostgreSQL: its disk is lost with it, it is taken for dead, its database goes away."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tinker

from tests.faults import runs
from tests.faults.cluster import Cluster
from tests.faults.lone_trainer import Trainer
from tests.faults.moments import repeated
from tests.faults.test_trainer_recovery import MODEL, NUM_STEPS, results, submit
from tests.support.models import make_model
from tests.support.postgres import Postgres
from tests.support.postgres import running as running_postgres
from tests.support.waiting import wait_until
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1.trainer_pb2_grpc import TrainerServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AWAY_S = (1.0, 6.0)
EXACT = {"TRAINER_DETERMINISTIC": "true", "TRAINER_TOKEN_BUDGET": "40", "TRAINER_SNAPSHOT_STEPS": "6"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as cluster:
        yield cluster


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.new_database().replace("+asyncpg", "")


@pytest.fixture(scope="module")
def running(model: Path, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    url = postgres.new_database().replace("+asyncpg", "")
    env = {**EXACT, "TRAINER_JOURNAL": url}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, trainer_env=env) as cluster:
        yield cluster


@repeated
def test_a_trainer_that_is_lost_with_its_disk_comes_back_elsewhere_with_all_runs(
    cluster: Cluster, undisturbed: list[runs.Outcome], service: tinker.ServiceClient, rng: random.Random
) -> None:
    trainer, folder = cluster.trainer, cluster.folder
    elsewhere = folder / f"trainer-{rng.randrange(1_000_000)}"
    with runs.disturbed(service, cluster.checkpoints, undisturbed, rng, exactly=True):
        trainer.kill()
        for state in folder.glob("trainer*/"):
            shutil.rmtree(state)
        trainer.set_flag("--state-dir", str(elsewhere))
        trainer.start()
        trainer.wait_serving()
    assert list(folder.glob("trainer*/")) == [elsewhere]


@repeated
def test_an_outage_of_the_journals_database_delays_training(
    undisturbed: list[runs.Outcome],
    cluster: Cluster,
    service: tinker.ServiceClient,
    rng: random.Random,
    postgres: Postgres,
) -> None:
    with runs.disturbed(service, cluster.checkpoints, undisturbed, rng, exactly=True):
        postgres.stop()
        time.sleep(rng.uniform(*AWAY_S))
        postgres.start()


def test_a_trainer_that_was_taken_for_dead_can_do_nothing_more_and_ends(url: str, tmp_path: Path) -> None:
    """The older one is stopped in the middle of accepted work. A newer one takes over, and does all of it."""
    model = make_model(tmp_path / "model")
    alone = Trainer(tmp_path / "alone", model)
    older, newer = (Trainer(tmp_path / name, model, TRAINER_JOURNAL=url) for name in ("older", "newer"))
    for trainer in (older, newer):
        trainer.set_flag("--checkpoint-dir", str(tmp_path / "shared"))
    try:
        with alone.stub() as stub:
            submit(stub)
            expected = results(stub)
        alone.kill()
        older.start()
        older.wait_serving()
        with grpc.insecure_channel(older.address) as channel:
            late = TrainerServiceStub(channel)
            submit(late)
            older.pause()
            with newer.stub() as stub:
                assert results(stub) == expected, newer.tail()
                older.resume()
                wait_until(lambda: not older.is_running, what="the older trainer ends", limit_s=60)
                assert older.status == 1
                assert "has taken over the journal" in older.tail()
                assert "generation 2 of trainer 'm', process" in older.tail()
                with pytest.raises(grpc.RpcError):
                    late.OptimStep(pb.OptimStepRequest(model_id=MODEL, seq_id=2 * NUM_STEPS + 2))
                assert results(stub) == expected
                assert newer.is_serving()
    finally:
        for trainer in (alone, older, newer):
            if trainer.is_running:
                trainer.send(signal.SIGCONT)
            trainer.kill()
