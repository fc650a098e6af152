"""A write that would fill the disk is refused beforehand, with the numbers; nothing that was saved is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.stores import StoreLocation
from tests.unit.trainer_service.test_checkpoints import at, make_info, make_state
from tests.unit.trainer_service.test_imports import GOOD, tar
from tinsmith.errors import OutOfCapacity
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import trainer_pb2
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore, _num_bytes
from trainer_service.storage.imports import Importer
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.space import Space

Usage = namedtuple("Usage", "total used free")


def has_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * 2**30, 100 * 2**30 - free, free))


def make_space(tmp_path: Path, *, min_free_bytes: int | None = None) -> Space:
    return Space(tmp_path, min_free_bytes=min_free_bytes, metrics=Metrics(CollectorRegistry()))


def test_the_refusal_names_what_is_free_what_is_needed_and_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = make_space(tmp_path, min_free_bytes=1000)
    has_free(monkeypatch, 5000)
    space.check(4000, what="it")
    with pytest.raises(OutOfCapacity, match=r"it needs 4001 bytes, and 5000 are free under .*, of which 1000 must"):
        space.check(4001, what="it")


def test_bytes_that_are_being_written_are_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = make_space(tmp_path, min_free_bytes=1000)
    has_free(monkeypatch, 5000)
    with space.reserve(3000, what="one"):
        with pytest.raises(OutOfCapacity, match="two needs 1001 bytes, 3000 more are promised to others"):
            space.check(1001, what="two")
        space.check(1000, what="three")
    space.check(4000, what="two")


def test_a_disk_that_hangs_when_it_is_asked_keeps_no_write_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = make_space(tmp_path, min_free_bytes=1000)
    asked, goes_on = threading.Event(), threading.Event()
    usage = [5000, 2000, 2000]
    has_free(monkeypatch, 5000)

    def hangs(_: Path) -> Usage:
        free = usage.pop(0)
        asked.set()
        assert goes_on.wait(60)
        return Usage(2**30, 2**30 - free, free)

    writing = ExitStack()
    writing.enter_context(space.reserve(3000, what="one"))
    monkeypatch.setattr(shutil, "disk_usage", hangs)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(space.check, 1001, what="two")
        try:
            assert asked.wait(60)
            threads.submit(writing.close).result(20)
        finally:
            goes_on.set()
        # The disk was asked before the end of the first write, so it is asked again.
        with pytest.raises(OutOfCapacity, match="two needs 1001 bytes, and 2000 are free"):
            other.result(60)
    assert usage == [2000]


@pytest.mark.parametrize(("total", "reserve"), [(16 * 2**20, 16 * 2**20 // 20), (2**40, 2**30)])
def test_the_reserve_follows_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, reserve: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, 0, total))
    assert make_space(tmp_path).min_free_bytes == reserve


def test_a_save_is_refused_before_it_writes_and_what_was_saved_stays(
    place: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    store = place.open(min_free_bytes=2**20, registry=registry)
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    before = place.objects()
    has_free(monkeypatch, 2**20 + _num_bytes(state) - 1)
    for overwrite, name in ((True, "one"), (False, "two")):
        with pytest.raises(OutOfCapacity, match=f"weights/{name} was not saved: .* must stay free") as caught:
            store.save(make_info(make_state(base, value=0.9), name), state, overwrite=overwrite)
        assert caught.value.metadata["min_free_bytes"] == str(2**20)
    assert place.objects() == before
    assert registry.get_sample_value("trainer_refused_saves_total") == 2
    has_free(monkeypatch, 2**20 + _num_bytes(state))
    assert torch.equal(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat, state.adapter.flat)
    store.save(make_info(state, "two"), state, overwrite=False)
    store.close()


def test_the_estimate_is_what_is_written_and_little_more(place: StoreLocation, base: BaseModel) -> None:
    store = place.open()
    for state in (make_state(base), make_state(base, optimizer=False)):
        saved = store.save(make_info(state), state, overwrite=False)
        assert saved.size_bytes <= _num_bytes(state) <= saved.size_bytes + 2**20
    store.close()


def test_a_copy_without_links_is_refused_too(tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(CollectorRegistry())
    store = CheckpointStore(LocalStorage(tmp_path, metrics, min_free_bytes=1000), metrics)
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    has_free(monkeypatch, 1010)
    store.copy(at("one"), at("linked"), ttl=None)

    def no_link(source: Path, destination: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(OutOfCapacity, match=r"weights/two was not saved: .* 1010 are free"):
        store.copy(at("one"), at("two"), ttl=None)
    assert not store.exists(at("two"))


def test_reading_from_an_object_store_needs_room_for_the_copy(
    objects: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = objects.open(min_free_bytes=1000)
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    has_free(monkeypatch, 1010)
    with pytest.raises(OutOfCapacity, match=r"reading .*weights/one needs"):
        store.load(at("one"), base, with_optimizer=True)


@pytest.mark.parametrize("size_is_known", [False, True])
async def test_an_import_is_refused_before_the_disk_is_full(
    tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch, size_is_known: bool
) -> None:
    metrics = Metrics(CollectorRegistry())
    store = CheckpointStore(LocalStorage(tmp_path, metrics, min_free_bytes=1000), metrics)
    importer = Importer(base, store, max_rank=8, max_bytes=2**20)
    archive = tar(GOOD)
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for start in range(0, len(archive), 1024):
            sent += 1
            yield archive[start : start + 1024]

    has_free(monkeypatch, 1000 + len(archive) if size_is_known else 2000)
    header = trainer_pb2.ImportCheckpointHeader(location=str(at("one")), base_model="tiny")
    if size_is_known:
        header.archive_bytes = len(archive)
    last = trainer_pb2.ImportCheckpointRequest(complete=True)
    with pytest.raises(OutOfCapacity, match=r"the import needs .* of which 1000 must stay free"):
        await importer.run(header, pieces(), last=last, converting=lambda _: nullcontext())
    assert sent == (0 if size_is_known else 1)
    assert list((tmp_path / "~tmp").iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_refuses_saves_until_there_is_room_again(tiny_disk: Path, base: BaseModel) -> None:
    metrics = Metrics(CollectorRegistry())
    store = CheckpointStore(LocalStorage(tiny_disk / "root", metrics), metrics)
    state = make_state(base)
    saved = []

    def fill() -> None:
        for n in range(1000):
            store.save(make_info(state, f"n{n}"), state, overwrite=False)
            saved.append(f"n{n}")

    with pytest.raises(OutOfCapacity, match="must stay free"):
        fill()
    assert saved
    assert shutil.disk_usage(tiny_disk).free >= store.storage.space.min_free_bytes > 0
    for name in saved:
        assert store.verify(at(name))[1] == {}
    store.delete(at(saved[0]))
    store.save(make_info(state, saved[0]), state, overwrite=False)
    (tiny_disk / "other").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))  # somebody else fills it
    with pytest.raises(OutOfCapacity, match="must stay free"):
        store.save(make_info(state, "last"), state, overwrite=False)
    assert store.verify(at(saved[-1]))[1] == {}
    store.close()
