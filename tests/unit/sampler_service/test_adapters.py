import asyncio
import weakref

import pytest
import torch
from prometheus_client import CollectorRegistry

from sampler_service.core import versions
from sampler_service.core.versions import Version, VersionStore
from sampler_service.metrics import SamplerMetrics, Versions
from tinsmith.errors import AlreadyExists, OutOfCapacity, VersionNotLoaded
from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target

TARGET = Target("q_proj", "attn", 6, 4)
CONFIG = AdapterConfig(rank=1, train_mlp=False, train_unembed=False)
SIZE = 40


def store_of(count: int, gone: list[Version] | None = None) -> VersionStore:
    return VersionStore(max_bytes=count * SIZE, metrics=metrics(), on_gone=([] if gone is None else gone).append)


def metrics() -> Versions:
    return SamplerMetrics(CollectorRegistry()).versions


def adapter() -> Adapter:
    return Adapter(CONFIG, [TARGET], torch.zeros(10))


def test_the_least_recently_used_version_leaves_first() -> None:
    store = store_of(2)
    store.install("a", adapter())
    store.install("b", adapter())
    store.release(store.acquire("a"))
    store.install("c", adapter())
    assert [version.version_id for version in store.versions()] == ["a", "c"]
    with pytest.raises(VersionNotLoaded, match="'b' is not loaded"):
        store.acquire("b")


def test_a_version_in_use_stays_and_a_full_store_refuses() -> None:
    store = store_of(2)
    for name in ("a", "b"):
        store.install(name, adapter())
    held = store.acquire("a")
    store.install("c", adapter())
    store.acquire("c")
    with pytest.raises(OutOfCapacity, match="needs 40 bytes, and 2 versions in use hold 80 of adapter_memory_bytes 80"):
        store.install("d", adapter())
    store.release(held)
    store.install("d", adapter())
    assert [version.version_id for version in store.versions()] == ["c", "d"]


def test_a_version_is_immutable() -> None:
    store = store_of(2)
    store.install("a", adapter())
    with pytest.raises(AlreadyExists, match="resident already"):
        store.install("a", adapter())


def test_a_removed_version_is_hidden_at_once_and_freed_after_its_last_use() -> None:
    store = store_of(2)
    store.install("a", adapter())
    held = store.acquire("a")
    store.remove("a")
    store.remove("unknown")
    assert store.versions() == []
    assert store.num_bytes == SIZE
    store.release(held)
    assert store.num_bytes == 0


def test_a_version_is_gone_when_it_is_evicted_or_removed_and_nobody_uses_it() -> None:
    gone: list[Version] = []
    store = store_of(1, gone)
    for name in ("a", "b"):
        store.install(name, adapter())
    assert [version.version_id for version in gone] == ["a"]
    held = store.acquire("b")
    store.remove("b")
    assert len(gone) == 1
    store.release(held)
    assert gone[1:] == [held]
    store.install("b", adapter())
    store.remove("b")
    assert [version.version_id for version in gone] == ["a", "b", "b"]
    assert len({version.namespace for version in gone}) == 3


async def test_a_version_on_probation_is_found_by_those_who_ask_for_it_as_such() -> None:
    store = store_of(2)
    store.install("a", adapter(), on_probation=True)
    assert "a" not in store
    assert store.versions() == []
    assert store.num_bytes == SIZE
    for use in (store.acquire, lambda version_id: store.move("run", version_id)):
        with pytest.raises(VersionNotLoaded, match="'a' is not loaded"):
            use("a")
    held = store.acquire("a", on_probation=True)
    store.confirm("a")
    store.confirm("a")
    assert store.acquire("a") is held
    assert store.acquire("a", on_probation=True) is held
    assert [version.version_id for version in store.versions()] == ["a"]
    for name in ("unknown", "b"):
        with pytest.raises(VersionNotLoaded):
            store.confirm(name)


async def test_a_version_on_probation_gives_way_to_the_same_published_again() -> None:
    gone: list[Version] = []
    store = store_of(2, gone)
    store.install("a", adapter(), on_probation=True)
    first = store.acquire("a", on_probation=True)
    store.make_room("a", SIZE)
    with pytest.raises(VersionNotLoaded):
        store.confirm("a")
    store.install("a", adapter(), on_probation=True)
    store.confirm("a")
    assert store.acquire("a") is not first
    assert gone == []
    store.release(first)
    assert gone == [first]


async def test_a_version_that_has_left_is_held_by_nobody_for_the_rest_of_its_probation() -> None:
    """The memory of versions would be above adapter_memory_bytes by all that is published in a minute."""
    store = VersionStore(max_bytes=2 * SIZE, metrics=metrics(), on_gone=lambda _: None)
    held = {name: adapter() for name in ("removed", "confirmed", "evicted")}
    left = [weakref.ref(each) for each in held.values()]
    for name in ("removed", "confirmed"):
        store.install(name, held.pop(name), on_probation=True)
    store.confirm("confirmed")
    store.remove("confirmed")
    store.remove("removed")
    store.install("evicted", held.pop("evicted"), on_probation=True)
    for name in ("a", "b"):
        store.install(name, adapter())
    assert [version.version_id for version in store.versions()] == ["a", "b"]
    assert [each() for each in left] == [None] * 3


async def test_a_version_that_nobody_confirms_is_dropped_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PROBATION_S", 0.01)
    dropped = asyncio.Event()
    gone: list[Version] = []

    def on_gone(version: Version) -> None:
        gone.append(version)
        if version.version_id == "late":
            dropped.set()

    store = VersionStore(max_bytes=10 * SIZE, metrics=metrics(), on_gone=on_gone)
    store.install("again", adapter(), on_probation=True)
    monkeypatch.setattr(versions, "PROBATION_S", 60.0)
    store.install("again", adapter(), on_probation=True)
    monkeypatch.setattr(versions, "PROBATION_S", 0.01)
    store.install("confirmed", adapter(), on_probation=True)
    store.confirm("confirmed")
    store.install("late", adapter(), on_probation=True)
    await dropped.wait()
    assert [version.version_id for version in gone] == ["again", "late"]
    store.confirm("again")
    assert [version.version_id for version in store.versions()] == ["again", "confirmed"]
    with pytest.raises(VersionNotLoaded):
        store.confirm("late")
