"""A place of checkpoints that answers slowly delays those who ask it, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.stores import StoreLocation
from tests.unit.trainer_service.test_checkpoints import at, make_info, make_state
from tests.unit.trainer_service.test_servicer import (  # noqa: F401 - fixtures
    MODEL,
    Accepted,
    Service,
    batch,
    save,
    service,
    start,
    step,
    stub,
)
from tinsmith import errors
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import _THREADS, CheckpointStore
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.locations import Location
from trainer_service.storage.objects import ObjectStorage

AT_ONCE_S = 60.0
"""Far more than anything takes that does not wait for the store, which answers when the test says so."""
NUM_CALLS = 40
"""More than the event loop's own threads are on any machine of this size."""


class Stuck:
    """A store in which what reads the files of a checkpoint goes on when the test says so."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.num_waiting = 0
        self._changed = threading.Condition()

    def wait(self) -> None:
        with self._changed:
            self.num_waiting += 1
            self._changed.notify_all()
        assert self.goes_on.wait(10 * AT_ONCE_S)

    def until_waiting(self, num: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.num_waiting >= num, timeout=AT_ONCE_S)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck()
    for kind in (LocalStorage, ObjectStorage):
        files = kind.files

        @contextlib.contextmanager
        def slow(self: Any, *arguments: Any, files: Any = files) -> Iterator[Path]:
            stuck.wait()
            with files(self, *arguments) as folder:
                yield folder

        monkeypatch.setattr(kind, "files", slow)
    yield stuck
    stuck.goes_on.set()


@contextlib.asynccontextmanager
async def loads(stub: Any, location: str, stuck: Stuck) -> AsyncIterator[None]:  # noqa: F811
    """Very many at once, none of which ends before the block does."""
    asked = [pb.PublishCheckpointRequest(location=location, version_id=f"none@{n}") for n in range(NUM_CALLS)]
    calls = [asyncio.ensure_future(stub.PublishCheckpoint(one)) for one in asked]
    try:
        assert await asyncio.to_thread(stuck.until_waiting, 1)
        yield
        assert not any(call.done() for call in calls)
    finally:
        stuck.goes_on.set()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_store_that_does_not_answer_delays_no_batch_and_no_save(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    stuck: Stuck,
) -> None:
    saved = (await stub.SaveCheckpoint(save(1, "first"))).checkpoint.location
    large = request([random_datum(64, seed, vocab_size=VOCAB_SIZE) for seed in range(200)], model_id=MODEL, seq_id=2)
    assert large.ByteSize() > 2**16  # it is packed on a thread
    async with loads(stub, saved, stuck):
        async with asyncio.timeout(AT_ONCE_S):
            accepted = await Accepted.of(service, large)
            await stub.SaveCheckpoint(save(3, "second"))
            await stub.SaveCheckpoint(save(4, "second", overwrite=True))
        assert not stuck.goes_on.is_set()
    assert (await accepted.result()).metrics["num_tokens:sum"] == 64 * 200
    await stub.OptimStep(step(5))


async def test_deletions_of_a_checkpoint_that_is_being_read_wait_for_nobody_and_hold_up_no_save(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    stuck: Stuck,
) -> None:
    saved = (await stub.SaveCheckpoint(save(1, "first"))).checkpoint.location
    deletion = pb.DeleteCheckpointRequest(location=saved)
    async with loads(stub, saved, stuck):
        assert await asyncio.to_thread(stuck.until_waiting, _THREADS)  # a load that begins later finds nothing
        async with asyncio.timeout(AT_ONCE_S):
            await asyncio.gather(*(stub.DeleteCheckpoint(deletion) for _ in range(NUM_CALLS)))
            await stub.SaveCheckpoint(save(2, "second"))
            await stub.SaveCheckpoint(save(3, "first"))  # the name is free
            accepted = await Accepted.of(service, batch(4))
        assert not stuck.goes_on.is_set()
    await accepted.result()


async def test_deletions_that_the_store_does_not_answer_hold_up_no_save_under_another_name(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    stuck: Stuck,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = (await stub.SaveCheckpoint(save(1, "first"))).checkpoint.location
    delete = LocalStorage.delete

    def slow(self: LocalStorage, location: Location, **settings: Any) -> None:
        stuck.wait()
        delete(self, location, **settings)

    monkeypatch.setattr(LocalStorage, "delete", slow)
    asked = pb.DeleteCheckpointRequest(location=first)
    deletions = [asyncio.ensure_future(stub.DeleteCheckpoint(asked)) for _ in range(NUM_CALLS)]
    assert await asyncio.to_thread(stuck.until_waiting, 1)
    over = await Accepted.of(service, save(2, "first", overwrite=True))  # waits for them
    async with asyncio.timeout(AT_ONCE_S):
        await stub.SaveCheckpoint(save(3, "second"))
        accepted = await Accepted.of(service, batch(4))
    assert not any(call.done() for call in deletions)
    assert stuck.num_waiting == 1
    stuck.goes_on.set()
    await asyncio.gather(*deletions)
    await over.result()
    await accepted.result()


def test_a_checkpoint_that_is_replaced_and_deleted_is_read_to_its_end_and_removed_then(
    place: StoreLocation, base: BaseModel, stuck: Stuck
) -> None:
    store = place.open()
    old, new = make_state(base, value=0.1), make_state(base, value=0.2)
    store.save(make_info(old), old, overwrite=False)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(store.load, at("one"), base, with_optimizer=True) for _ in range(2)]
        assert stuck.until_waiting(2)
        store.save(make_info(new), new, overwrite=True)
        assert store.info(at("one")).created_at.ToNanoseconds() > 0
        store.delete(at("one"))
        with pytest.raises(errors.CheckpointNotFound):
            store.info(at("one"))
        assert place.leftovers() != []
        assert not any(load.done() for load in loads)
        stuck.goes_on.set()
        for load in loads:
            assert torch.equal(load.result(AT_ONCE_S)[1].adapter.flat, old.adapter.flat)
    assert place.leftovers() == []
    assert place.objects() == []


def test_a_restart_does_not_put_back_what_was_replaced_and_deleted_while_it_was_read(
    tmp_path: Path, base: BaseModel
) -> None:
    metrics = Metrics(CollectorRegistry())
    storage = LocalStorage(tmp_path, metrics)
    store, state = CheckpointStore(storage, metrics), make_state(base)
    store.save(make_info(state), state, overwrite=False)
    with storage.reading(at("one")):
        store.save(make_info(state), state, overwrite=True)
        store.delete(at("one"))
        store.close()  # as a process that dies here
        after = CheckpointStore(tmp_path, Metrics(CollectorRegistry()))
        with pytest.raises(errors.CheckpointNotFound):
            after.info(at("one"))
        assert list((tmp_path / "~tmp").iterdir()) == []
        after.close()


def test_a_checkpoint_is_read_where_open_folders_have_no_paths(
    tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on other systems than Linux."""
    monkeypatch.setattr("trainer_service.storage.local._OPEN_FOLDERS", tmp_path / "none")
    store, state = CheckpointStore(tmp_path / "root", Metrics(CollectorRegistry())), make_state(base)
    store.save(make_info(state), state, overwrite=False)
    assert torch.equal(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat, state.adapter.flat)


def test_reading_one_checkpoint_holds_up_no_other(place: StoreLocation, base: BaseModel, stuck: Stuck) -> None:
    store = place.open()
    for name in ("one", "two"):
        store.save(make_info(make_state(base), name), make_state(base), overwrite=False)
    loading = threading.Thread(target=lambda: store.load(at("one"), base, with_optimizer=True))
    loading.start()
    assert stuck.until_waiting(1)
    done: list[str] = []

    def others() -> None:
        state = make_state(base, value=0.7)
        store.info(at("one"))
        store.save(make_info(state, "two"), state, overwrite=True)
        store.copy(at("one"), at("three"), ttl=None)
        store.put_certificate(at("two"), types_pb2.PublishCertificate(version_id="x"))
        store.delete(at("two"))
        done.append("all")

    other = threading.Thread(target=others)
    other.start()
    other.join(AT_ONCE_S)
    assert done
    assert loading.is_alive()
    stuck.goes_on.set()
    loading.join()


@pytest.mark.slow
def test_a_read_during_many_replacements_gives_one_of_the_versions(place: StoreLocation, base: BaseModel) -> None:
    store = place.open()
    states = [make_state(base, value=value) for value in (0.1, 0.2)]
    store.save(make_info(states[0]), states[0], overwrite=False)
    stop = threading.Event()
    seen: list[float] = []
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.append(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat[0].item())
            except errors.ServiceError as error:
                wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for n in range(12):
        state = states[n % 2]
        store.save(make_info(state), state, overwrite=True)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert {round(value, 3) for value in seen} <= {round(state.adapter.flat[0].item(), 3) for state in states}
