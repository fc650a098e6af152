"""A place of checkpoints that answers slowly delays those who ask it, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.stores import Place
from tests.unit.trainer_service.test_checkpoints import at, make_info, make_state
from tests.unit.trainer_service.test_servicer import (  # noqa: F401 - fixtures
    MODEL,
    Accepted,
    Service,
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
from trainer_service.storage.local import LocalStorage
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


def test_reading_one_checkpoint_holds_up_no_other(place: Place, base: BaseModel, stuck: Stuck) -> None:
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


def test_a_read_during_many_replacements_gives_one_of_the_versions(place: Place, base: BaseModel) -> None:
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
