"""Snapshots on the trainer's disk: folders "<model_id>/<seq_id>" below one root, each a model as it was after that
operation. A SnapshotStore of stored_snapshots.py.

    adapter.npy            flat buffer of the adapter or the full model, float32 [numel]
    optimizer.<name>.npy   the optimizer's tensors
    gradient.npy           gradients accumulated for the next step, if there are any
    accumulation.json      the batch that has failed since the last step, and the largest ratio of those that have not;
                           exists if one has failed, or if there is a gradient
    layout.json            name and shape of each tensor in the flat buffer
    manifest.json          as for a checkpoint: CheckpointInfo, and size and XXH3-128 of every file above

Files are plain arrays: they are written often, read only by this trainer, and writing them does not hold the
interpreter's lock. As with checkpoints, a folder exists whole or not at all, even after a power cut. The methods block.
Several threads may call them, but only one at a time for each model.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import DataCorrupted
from tinsmith.lora_config import config_from_proto
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.rpc.words import word_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import Accumulation, CapturedState, OptimizerState
from trainer_service.storage import manifest
from trainer_service.storage.local import sync
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.space import least_free_bytes

_ADAPTER = "adapter"
_OPTIMIZER = "optimizer."
_GRADIENT = "gradient"
_ACCUMULATION = "accumulation.json"
_LAYOUT = "layout.json"
_TEMPORARY = "~tmp"
_SEQ_ID = re.compile(r"0|[1-9][0-9]*", re.ASCII)


class SnapshotFiles:
    """Writes, reads and deletes snapshots."""

    def __init__(self, root: Path, *, min_free_bytes: int | None = None) -> None:
        """Creates the root, and cleans up after a process that died while it wrote. `min_free_bytes`: bytes that must
        stay free on the root's disk; see `least_free_bytes`."""
        self.root = root
        self._temporary = root / _TEMPORARY
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._min_free_bytes = least_free_bytes(root, min_free_bytes)

    def write(self, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> int:
        """Writes a snapshot. Returns its size in bytes once it is durable. After an OSError nothing is left of it."""
        self._check_room(state)
        target = self._path(info.model_id, seq_id)
        folder = self._temporary / uuid.uuid4().hex
        try:
            folder.mkdir()
            save_state(folder, state)
            written = Manifest.of(info, [manifest.describe(path) for path in sorted(folder.iterdir())])
            written.write(folder)
            for path in [*folder.iterdir(), folder]:
                sync(path)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # a snapshot after the same operation, from before a restart
            folder.rename(target)
            sync(target.parent)
            sync(self.root)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return written.checkpoint.size_bytes

    def _check_room(self, state: CapturedState) -> None:
        """Raises OSError when the snapshot would leave too little free. The journal is on the same disk, and training
        stops when the journal cannot be written."""
        needed = num_bytes_of(state)
        free = shutil.disk_usage(self.root).free
        if free - needed < self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"it needs {needed} bytes, and {free} are free under {self.root}, of which {self._min_free_bytes} "
                "must stay free (min_free_bytes)",
            )

    def seq_ids(self, model_id: str) -> list[int]:
        """seq_ids of a model's snapshots, damaged ones included, the newest first."""
        try:
            names = [path.name for path in (self.root / model_id).iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return newest_first(names)

    def model_ids(self) -> list[str]:
        """Ids of the models that have snapshots, damaged ones included."""
        folders = [path.name for path in self.root.iterdir() if path.name != _TEMPORARY]
        return sorted(name for name in folders if self.seq_ids(name))

    def verify(self, model_id: str, seq_id: int) -> pb.CheckpointInfo:
        """Reads a whole snapshot and compares it with its manifest. Raises DataCorrupted, which names the file."""
        found = self._manifest(model_id, seq_id)
        for name in found.files:
            found.verify(self._path(model_id, seq_id) / name, location=f"{model_id}/{seq_id}")
        return found.checkpoint

    def read(self, model_id: str, seq_id: int, base: BaseModel) -> tuple[pb.CheckpointInfo, CapturedState]:
        """Reads a snapshot's state. Raises DataCorrupted when it cannot be read, or was made for other layers."""
        found = self._manifest(model_id, seq_id)
        return found.checkpoint, load_state(self._path(model_id, seq_id), found, base, name=f"{model_id}/{seq_id}")

    def delete(self, model_id: str, seq_ids: Iterable[int]) -> None:
        """Deletes snapshots, those that exist."""
        for seq_id in seq_ids:
            shutil.rmtree(self._path(model_id, seq_id), ignore_errors=True)

    def delete_all(self, model_id: str) -> None:
        shutil.rmtree(self.root / model_id, ignore_errors=True)

    def _path(self, model_id: str, seq_id: int) -> Path:
        return self.root / model_id / str(seq_id)

    def _manifest(self, model_id: str, seq_id: int) -> Manifest:
        location = f"{model_id}/{seq_id}"
        try:
            data = (self._path(model_id, seq_id) / manifest.NAME).read_bytes()
        except OSError as error:
            raise DataCorrupted(f"the snapshot {location} cannot be read: {error}") from None
        return Manifest.parse(data, location=location)


def newest_first(names: Iterable[str]) -> list[int]:
    """The seq_ids among names of folders."""
    return sorted((int(name) for name in names if _SEQ_ID.fullmatch(name)), reverse=True)


def save_state(folder: Path, state: CapturedState) -> None:
    """Writes a snapshot's files, all but the manifest."""
    _save(folder / f"{_ADAPTER}.npy", state.adapter.flat)
    if state.optimizer is not None:
        for name, tensor in state.optimizer.tensors.items():
            _save(folder / f"{_OPTIMIZER}{name}.npy", tensor)
    if (accumulation := state.accumulation) is not None:
        known: dict[str, Any] = {"tainted": accumulation.tainted, "tainted_by": accumulation.tainted_by}
        if accumulation.largest_ratio is not None:
            known["largest_ratio"] = accumulation.largest_ratio
        (folder / _ACCUMULATION).write_text(json.dumps(known))
        if accumulation.gradient is not None:
            _save(folder / f"{_GRADIENT}.npy", accumulation.gradient)
    (folder / _LAYOUT).write_text(json.dumps(_layout(state.adapter)))


def load_state(folder: Path, found: Manifest, base: BaseModel, *, name: str) -> CapturedState:
    """Reads a snapshot's files. `name`: the snapshot's, for messages. Raises DataCorrupted when they cannot be read, or
    were made for other layers."""
    info = found.checkpoint
    config = config_from_proto(info.lora_config, max_rank=info.lora_config.rank)
    try:
        tensors = {file: _load(folder / file) for file in found.files if file.endswith(".npy")}
        flat, gradient = tensors.pop(f"{_ADAPTER}.npy"), tensors.pop(f"{_GRADIENT}.npy", None)
        accumulation = None
        if _ACCUMULATION in found.files:
            accumulation = Accumulation(gradient, **json.loads((folder / _ACCUMULATION).read_text()))
        weights = Adapter(config, base.targets, flat) if config.rank else FullWeights(base, flat)
        fits = json.loads((folder / _LAYOUT).read_text()) == _layout(weights)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DataCorrupted(f"the snapshot {name} cannot be read: {error}") from None
    if not fits:
        raise DataCorrupted(f"the snapshot {name} was made for other layers of a base model")
    optimizer = {file.removeprefix(_OPTIMIZER).removesuffix(".npy"): tensor for file, tensor in tensors.items()}
    state = OptimizerState(word_of(pb.Optimizer, info.optimizer), optimizer) if optimizer else None
    return CapturedState(config, weights, info.step, state, accumulation)


def num_bytes_of(state: CapturedState) -> int:
    """Size of a snapshot's arrays, in bytes; its other files are small."""
    tensors = [state.adapter.flat, *(state.optimizer.tensors.values() if state.optimizer is not None else ())]
    if state.accumulation is not None and state.accumulation.gradient is not None:
        tensors.append(state.accumulation.gradient)
    return sum(tensor.nbytes for tensor in tensors)


def _layout(weights: Weights) -> list[Any]:
    return [[name, list(shape)] for name, shape in weights.specs()]


def _save(path: Path, tensor: Tensor) -> None:
    np.save(path, tensor.detach().numpy(), allow_pickle=False)


def _load(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False))
