"""Disks that are full for a while: training waits, a save fails with the reason, and nothing that was accepted or saved
is lost."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import tinker

from tests.faults.cluster import Cluster
from tests.faults.disks import Disk, SizeLimit, SmallDisk, small_disk
from tests.faults.moments import in_mode, repeated
from tests.faults.runs import ADAM, ROUNDING, check_tensors, tensors_of
from tests.support.examples import Floats, batch, new_model, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MEGABYTES = 64
STEPS = 30
FULL_S = (0.5, 3.0)
SAVES = 15
NO_ROOM = "was not saved: .*( free under |No space left)"
"""Error of a save on a full disk, or on one that became full in the middle."""
KINDS = ("small disk", "size limit")


@pytest.fixture(scope="module")
def small_disks(tmp_path_factory: pytest.TempPathFactory, mode: str) -> Iterator[dict[str, SmallDisk]]:
    """By name of the folder of the cluster that lies on it; none where this user may not mount."""
    folder = tmp_path_factory.mktemp(mode)
    with ExitStack() as stack:
        try:
            yield {
                name: stack.enter_context(small_disk(folder / name, megabytes=MEGABYTES))
                for name in ("trainer", "gateway", "checkpoints")
            }
        except PermissionError:
            yield {}


@pytest.fixture(scope="module")
def running(
    model: Path, tmp_path_factory: pytest.TempPathFactory, small_disks: dict[str, SmallDisk], exactly: bool
) -> Iterator[Cluster]:
    folder = small_disks["trainer"].folder.parent if small_disks else tmp_path_factory.mktemp("cluster")
    trainer_env = {"TRAINER_DETERMINISTIC": str(exactly)}
    with Cluster(folder, model, num_samplers=1, trainer_env=trainer_env) as cluster:
        yield cluster


def disk_of(kind: str, name: str, cluster: Cluster, small_disks: dict[str, SmallDisk]) -> Disk:
    """The limited disk under the service's folder."""
    if kind == "size limit":
        return SizeLimit(cluster.gateway if name == "gateway" else cluster.trainer)
    if not small_disks:
        pytest.skip("this user may not mount a file system; the size limit stands for it")
    return small_disks[name]


@in_mode("deterministic")
@repeated
@pytest.mark.parametrize("name", ["trainer", "gateway"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_waits_until_the_disk_has_room(
    cluster: Cluster,
    service: tinker.ServiceClient,
    small_disks: dict[str, SmallDisk],
    rng: random.Random,
    exactly: bool,
    kind: str,
    name: str,
) -> None:
    """So does a save, for want of room for its row; where the trainer has none, nothing is saved meanwhile."""
    disk = disk_of(kind, name, cluster, small_disks)
    data = batch(1, lengths=(9, 17, 5, 33))
    has_room = Event()
    rest = tinker.RestClient(base_url=cluster.url, api_key="tml-test")

    def run() -> tuple[list[float], dict[str, np.ndarray]]:
        client = new_model(service, seed=1)
        losses = train(client, data, steps=STEPS, adam=ADAM)
        assert name == "gateway" or has_room.wait(60)
        path = client.save_state("end").result().path
        tensors = tensors_of(cluster.checkpoints, path)
        rest.delete_checkpoint_from_tinker_path(path).result()  # the disk is small, and there are repetitions
        return losses, tensors

    has_room.set()
    began = time.monotonic()
    expected_losses, expected = run()
    took_s = time.monotonic() - began
    has_room.clear()
    with ThreadPoolExecutor(1) as threads:
        disturbed = threads.submit(run)
        time.sleep(rng.uniform(0, took_s))
        disk.fill()
        try:
            time.sleep(rng.uniform(*FULL_S))
        finally:
            disk.empty()
        has_room.set()
        losses, tensors = disturbed.result()
    np.testing.assert_allclose(losses, expected_losses, rtol=0 if exactly else ROUNDING)
    check_tensors(tensors, expected, exactly=exactly)


@in_mode("deterministic")
@repeated
def test_saves_to_a_full_disk_fail_with_the_reason_and_training_goes_on(
    cluster: Cluster,
    service: tinker.ServiceClient,
    small_disks: dict[str, SmallDisk],
    rng: random.Random,
    exactly: bool,
) -> None:
    """It fills at a random moment of many saves; what was saved before is whole. The journal lies on another one."""
    disk = disk_of("small disk", "checkpoints", cluster, small_disks)
    data = batch(1, lengths=(9, 17, 5, 33))

    def run(client: tinker.TrainingClient) -> list[str]:
        """Paths of the saves; empty where there was no room."""
        steps, saves, paths = [], [], []
        for n in range(SAVES):
            steps += [client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)]
            saves.append(client.save_state(f"save-{n}"))
        for step in steps:
            step.result()
        for save in saves:
            try:
                paths.append(save.result().path)
            except tinker.TinkerError as error:
                if not re.search(NO_ROOM, str(error)):
                    raise
                paths.append("")
        return paths

    rest = tinker.RestClient(base_url=cluster.url, api_key="tml-test")

    def taken(path: str) -> dict[str, Floats]:
        """Tensors of the checkpoint, which is then deleted: the disk is small, and there are repetitions."""
        tensors = tensors_of(cluster.checkpoints, path)
        rest.delete_checkpoint_from_tinker_path(path).result()
        return tensors

    began = time.monotonic()
    expected = [taken(path) for path in run(new_model(service, seed=1))]
    took_s = time.monotonic() - began
    client = new_model(service, seed=1)
    with ThreadPoolExecutor(1) as threads:
        disturbed = threads.submit(run, client)
        time.sleep(rng.uniform(0, took_s))
        disk.fill()
        try:
            paths = disturbed.result()
            with pytest.raises(tinker.TinkerError, match=NO_ROOM):
                client.save_state("full").result()
        finally:
            disk.empty()
    late = client.save_state("late").result().path
    service.create_training_client_from_state_with_optimizer(late).result()
    check_tensors(taken(late), expected[-1], exactly=exactly)
    for path, tensors in zip(paths, expected, strict=True):
        if path:
            check_tensors(taken(path), tensors, exactly=exactly)
