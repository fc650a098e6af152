"""Snapshots beside the checkpoints, and in the trainer's own folder: one contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.stores import StoreLocation
from tests.unit.trainer_service.test_checkpoints import make_state
from tinsmith.errors import DataCorrupted, NotReady
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import types_pb2
from trainer_service.durability import stored_snapshots
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.stored_snapshots import SnapshotStore, StoredSnapshots
from trainer_service.engine.engine import CapturedState
from trainer_service.metrics import Metrics
from trainer_service.storage.choice import open_storage
from trainer_service.storage.protocol import Storage

MODEL, OTHER = "s:train:0", "s:train:1"


def storage_at(place: StoreLocation) -> Storage:
    metrics = Metrics(CollectorRegistry())
    root = f"{place.root}/{stored_snapshots.FOLDER}/a1"
    return open_storage(root, state_dir=place.state_dir, metrics=metrics, min_free_bytes=None, scratch="s.scratch")


@pytest.fixture(params=["own folder", "checkpoints"])
def files(request: pytest.FixtureRequest, place: StoreLocation, tmp_path: Path) -> SnapshotStore:
    if request.param == "own folder":
        if place.in_objects:
            pytest.skip("a folder is no object store")
        return SnapshotFiles(tmp_path / "snapshots")
    return StoredSnapshots(storage_at(place))


def info_of(state: CapturedState, model_id: str, seq_id: int) -> types_pb2.CheckpointInfo:
    return types_pb2.CheckpointInfo(
        location=f"{model_id}/{seq_id}",
        kind=types_pb2.CHECKPOINT_KIND_TRAINING,
        model_id=model_id,
        lora_config=config_to_proto(state.config),
        version_id=f"{model_id}@{seq_id}",
        step=state.step,
        optimizer=types_pb2.OPTIMIZER_ADAMW,
    )


def write(files: SnapshotStore, base: BaseModel, model_id: str, seq_id: int) -> CapturedState:
    state = make_state(base, value=0.25 + seq_id)
    files.write(seq_id, info_of(state, model_id, seq_id), state)
    return state


def test_a_snapshot_comes_back_bit_for_bit(files: SnapshotStore, base: BaseModel) -> None:
    written = write(files, base, MODEL, 7)
    assert files.verify(MODEL, 7).version_id == f"{MODEL}@7"
    info, state = files.read(MODEL, 7, base)
    assert (info.model_id, state.step) == (MODEL, written.step)
    assert torch.equal(state.adapter.flat, written.adapter.flat)
    assert state.optimizer is not None
    assert written.optimizer is not None
    for name, tensor in written.optimizer.tensors.items():
        assert torch.equal(state.optimizer.tensors[name], tensor)


def test_snapshots_are_listed_replaced_and_deleted(files: SnapshotStore, base: BaseModel) -> None:
    assert files.model_ids() == files.seq_ids(MODEL) == []
    for model_id, seq_id in ((MODEL, 9), (MODEL, 10), (MODEL, 2), (OTHER, 1), (MODEL, 10)):
        write(files, base, model_id, seq_id)
    assert files.seq_ids(MODEL) == [10, 9, 2]
    assert files.model_ids() == [MODEL, OTHER]
    files.delete(MODEL, [2, 9, 77])
    assert files.seq_ids(MODEL) == [10]
    files.delete_all(MODEL)
    assert files.seq_ids(MODEL) == []
    files.read(OTHER, 1, base)


def test_a_damaged_or_missing_snapshot_is_told_as_such(place: StoreLocation, base: BaseModel) -> None:
    files = StoredSnapshots(storage_at(place))
    write(files, base, MODEL, 3)
    (path,) = [one for one in place.objects() if one.endswith("/adapter.npy")]
    data = bytearray(place.fs.cat_file(path))
    data[-1] ^= 1
    place.fs.pipe_file(path, bytes(data))
    for call in (lambda: files.verify(MODEL, 3), lambda: files.read(MODEL, 3, base), lambda: files.verify(MODEL, 4)):
        with pytest.raises(DataCorrupted):
            call()


def test_a_storage_that_is_away_is_waited_for_and_keeps_what_cannot_be_deleted(
    place: StoreLocation, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_snapshots, "_READ_AGAIN_S", 0.0)
    storage: Any = storage_at(place)
    files = StoredSnapshots(storage)
    write(files, base, MODEL, 3)
    times_away = {"names": 2, "reading": 3, "delete": 1, "delete_all": 1}

    def away(method: str) -> Any:
        there = getattr(storage, method)

        def call(*arguments: Any, **settings: Any) -> Any:
            if times_away[method]:
                times_away[method] -= 1
                raise NotReady("the store is away")
            return there(*arguments, **settings)

        return call

    for method in times_away:
        monkeypatch.setattr(storage, method, away(method))
    files.delete(MODEL, [3])
    files.delete_all(MODEL)
    assert files.seq_ids(MODEL) == [3]
    assert files.verify(MODEL, 3).model_id == MODEL
    assert not any(times_away.values())
