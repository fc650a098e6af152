"""Object stores alone: a save is complete with its one manifest, and a save without a manifest leaves nothing."""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.stores import BUCKET, StoreLocation
from tests.unit.trainer_service.test_checkpoints import RUN, at, make_info, make_state
from tinsmith.errors import CheckpointExists, CheckpointNotFound, NotReady
from tinsmith.modeling.base_model import BaseModel
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.choice import open_storage
from trainer_service.storage.objects import ObjectStorage
from trainer_service.storage.protocol import StorageUnusable

DATA = "adapter_model.safetensors"


class Died(BaseException):
    """As a killed process: nothing that would clean up runs."""


def save(store: CheckpointStore, base: BaseModel, *, value: float = 0.5, overwrite: bool = False) -> torch.Tensor:
    state = make_state(base, value=value)
    store.save(make_info(state), state, overwrite=overwrite)
    return state.adapter.flat


def loaded(store: CheckpointStore, base: BaseModel) -> torch.Tensor:
    return store.load(at("one"), base, with_optimizer=True)[1].adapter.flat


def file_system_of(store: CheckpointStore) -> Any:
    storage = store.storage
    assert isinstance(storage, ObjectStorage)
    return storage._fs


def die_in(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Died

    monkeypatch.setattr(ObjectStorage, method, die)
    monkeypatch.setattr(ObjectStorage, "_settle", die)


@pytest.mark.parametrize("method", ["upload", "install"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_leftovers_of_a_dead_writer_are_gone_after_its_restart_and_the_old_checkpoint_stays(
    objects: StoreLocation, base: BaseModel, method: str, overwrite: bool
) -> None:
    store = objects.open()
    old = save(store, base, value=0.1) if overwrite else None
    before = objects.objects()
    with pytest.MonkeyPatch.context() as patch:
        die_in(patch, method)
        with pytest.raises(Died):
            save(store, base, value=0.2, overwrite=overwrite)
    assert objects.leftovers()
    store = objects.open()
    assert sorted(objects.objects()) == sorted(before)
    if old is None:
        assert not store.exists(at("one"))
    else:
        assert torch.equal(loaded(store, base), old)


def test_a_writer_that_dies_after_the_manifest_has_saved(objects: StoreLocation, base: BaseModel) -> None:
    store = objects.open()
    save(store, base, value=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStorage, "_settle", lambda *_: (_ for _ in ()).throw(Died()))
        with pytest.raises(Died):
            save(store, base, value=0.2, overwrite=True)
    assert len(objects.leftovers()) == 2  # of the new generation and of the old one
    store = objects.open()
    assert torch.equal(loaded(store, base), make_state(base, value=0.2).adapter.flat)
    assert objects.leftovers() == []
    assert len(objects.objects()) == 4


def test_files_of_another_trainer_are_no_leftovers_until_they_are_old(
    objects: StoreLocation, base: BaseModel, tmp_path: Path
) -> None:
    store = objects.open()
    with pytest.MonkeyPatch.context() as patch:
        die_in(patch, "install")
        with pytest.raises(Died):
            save(store, base)
    left = objects.objects()
    objects.open(state_dir=tmp_path / "other")
    assert objects.objects() == left
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    ObjectStorage(objects.root, metrics, scratch=tmp_path / "third", writer="third", abandoned_s=-5)
    assert objects.objects() == []
    assert registry.get_sample_value("trainer_swept_leftovers_total") == 1


def test_a_start_beside_a_trainer_that_ends_a_save_goes_on(
    objects: StoreLocation, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other trainer's marker is listed, and is gone when its age is asked for."""
    store = objects.open()
    with pytest.MonkeyPatch.context() as patch:
        die_in(patch, "install")
        with pytest.raises(Died):
            save(store, base)
    find = ObjectStorage._find

    def find_and_end(storage: ObjectStorage, folder: str) -> list[str]:
        found = find(storage, folder)
        for path in objects.leftovers():
            objects.fs.rm_file(path)
        return found

    monkeypatch.setattr(ObjectStorage, "_find", find_and_end)
    objects.open(state_dir=tmp_path / "other")
    assert objects.leftovers() == []


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(
    objects: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = objects.open()
    old = save(store, base, value=0.1)
    before = objects.objects()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the connection was lost")

    monkeypatch.setattr(file_system_of(store), "put_file", fail)
    with pytest.raises(NotReady, match=f"put_file in {objects.root} failed: .*the connection was lost"):
        save(store, base, value=0.2, overwrite=True)
    assert torch.equal(loaded(store, base), old)
    assert objects.objects() == before


def test_a_generation_stays_until_its_last_reader_is_done(objects: StoreLocation, base: BaseModel) -> None:
    store = objects.open()
    save(store, base, value=0.1)
    storage = store.storage
    with storage.reading(at("one")) as found:
        save(store, base, value=0.2, overwrite=True)
        with storage.files(at("one"), found, found.files) as folder:
            assert (folder / DATA).stat().st_size == found.files[DATA].size_bytes
        assert len(objects.objects()) == 4 + 3 + 1  # both, and the marker of the old one
    assert len(objects.objects()) == 4
    with storage.reading(at("one")):
        store.delete(at("one"))
        assert not store.exists(at("one"))
        assert len(objects.objects()) == 3 + 1
    assert objects.objects() == []


def test_a_version_that_was_replaced_is_not_deleted(objects: StoreLocation, base: BaseModel) -> None:
    store = objects.open()
    save(store, base)
    store.delete(at("one"), version_id="another")
    assert store.exists(at("one"))
    store.delete(at("one"), version_id=store.info(at("one")).version_id)
    assert objects.objects() == []


def test_a_copy_is_made_by_the_store(objects: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    store = objects.open()
    flat = save(store, base)

    def travels(*_: Any, **__: Any) -> None:
        raise AssertionError("bytes came to this machine, or left it")

    with monkeypatch.context() as patch:
        for method in ("get_file", "put_file", "open"):
            patch.setattr(file_system_of(store), method, travels)
        store.copy(at("one"), at("two"), ttl=None)
    store.delete(at("one"))
    assert torch.equal(store.load(at("two"), base, with_optimizer=True)[1].adapter.flat, flat)
    with pytest.raises(CheckpointExists, match="weights/two exists"):
        store.save(make_info(make_state(base), "two"), make_state(base), overwrite=False)


def test_a_file_damaged_on_its_way_is_read_again(
    objects: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = objects.open()
    flat = save(store, base)
    get_file, damaged = file_system_of(store).get_file, []

    def damage_once(source: str, destination: str) -> None:
        get_file(source, destination)
        if source.endswith(DATA) and not damaged:
            damaged.append(source)
            Path(destination).write_bytes(Path(destination).read_bytes()[:-1])

    monkeypatch.setattr(file_system_of(store), "get_file", damage_once)
    assert torch.equal(loaded(store, base), flat)
    assert damaged


def test_nothing_stays_in_the_scratch_folder(objects: StoreLocation, base: BaseModel) -> None:
    scratch = objects.state_dir / "checkpoints.scratch"
    (scratch / "of-a-dead-process").mkdir(parents=True)
    store = objects.open()
    assert list(scratch.iterdir()) == []
    save(store, base)
    loaded(store, base)
    with store.open_file(at("one"), DATA) as file:
        assert list(scratch.iterdir()) == []
        assert len(file.read()) == store.manifest(at("one")).files[DATA].size_bytes


def test_checkpoints_move_between_the_stores_by_copying_files(
    objects: StoreLocation, base: BaseModel, tmp_path: Path
) -> None:
    here = StoreLocation.of(str(tmp_path / "root"), tmp_path / "here")
    store, others = here.open(), objects.open()
    flat = save(store, base)
    objects.fs.put(f"{here.root}/{RUN}", f"{objects.root}/{RUN}", recursive=True)
    assert torch.equal(loaded(others, base), flat)
    assert others.verify(at("one"))[1] == {}
    new = save(others, base, value=0.7, overwrite=True)
    assert len(objects.objects()) == 4
    shutil.rmtree(Path(here.root) / RUN)
    objects.fs.get(f"{objects.root}/{RUN}", f"{here.root}/{RUN}", recursive=True)
    assert torch.equal(loaded(store, base), new)
    copied = store.copy(at("one"), at("two"), ttl=None)
    assert store.verify(at("two"))[1] == {}
    assert copied.size_bytes == store.info(at("one")).size_bytes


def test_a_checkpoint_that_came_from_a_folder_is_deleted_whole(
    objects: StoreLocation, base: BaseModel, tmp_path: Path
) -> None:
    here, others = StoreLocation.of(str(tmp_path / "root"), tmp_path / "here"), objects.open()
    save(here.open(), base)
    objects.fs.put(f"{here.root}/{RUN}", f"{objects.root}/{RUN}", recursive=True)
    others.delete(at("one"))
    assert objects.objects() == []


# At start


class _Forbidden(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        content = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET = do_HEAD = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def forbidding() -> Iterator[str]:
    """Address of a store that permits nothing."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Forbidden)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def open_at(url: str, tmp_path: Path) -> None:
    open_storage(url, state_dir=tmp_path, metrics=Metrics(CollectorRegistry()), min_free_bytes=None)


@pytest.fixture
def fresh_clients(objects: StoreLocation) -> Iterator[None]:
    """fsspec keeps its clients, and with them what was in the environment."""
    type(objects.fs).clear_instance_cache()
    yield
    type(objects.fs).clear_instance_cache()


@pytest.mark.usefixtures("fresh_clients")
def test_a_missing_bucket_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(StorageUnusable, match="s3://none/x cannot be used: there is no such bucket"):
        open_at("s3://none/x", tmp_path)


@pytest.mark.usefixtures("fresh_clients")
def test_missing_credentials_are_said_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageUnusable, match=f"s3://{BUCKET}/x cannot be used: no credentials"):
        open_at(f"s3://{BUCKET}/x", tmp_path)


@pytest.mark.usefixtures("fresh_clients")
def test_missing_permission_is_said_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidding: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", forbidding)
    with pytest.raises(StorageUnusable, match=f"s3://{BUCKET}/x cannot be used: no permission"):
        open_at(f"s3://{BUCKET}/x", tmp_path)


@pytest.mark.usefixtures("fresh_clients")
def test_a_store_that_cannot_be_reached_is_said_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageUnusable, match=f"s3://{BUCKET}/x cannot be used: .*127.0.0.1:1"):
        open_at(f"s3://{BUCKET}/x", tmp_path)


@pytest.mark.parametrize("root", ["s4://bucket", "s3://", "s3:/bucket/x", "gs:bucket", "http://example.org/x"])
def test_an_unknown_kind_of_store_is_refused_by_the_settings(root: str) -> None:
    with pytest.raises(ValueError, match="neither a path, nor s3://BUCKET/PREFIX, nor gs://BUCKET/PREFIX"):
        TrainerConfig(base_model="x", checkpoint_dir=root)


def test_a_folder_that_cannot_be_made_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnusable, match=r"file/root cannot be used: .*Not a directory"):
        open_at(str(tmp_path / "file" / "root"), tmp_path)


def test_reading_what_is_gone_is_not_damage(objects: StoreLocation, base: BaseModel) -> None:
    store = objects.open()
    save(store, base)
    with store.storage.reading(at("one")) as found:
        objects.fs.rm(f"{objects.root}/{RUN}", recursive=True)  # another process deletes the run
        with pytest.raises(CheckpointNotFound), store.storage.files(at("one"), found, [DATA]):
            pass
