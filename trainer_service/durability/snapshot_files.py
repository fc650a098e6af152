"""Snapshots on disk: folders "<model_id>/<seq_id>" below one root, each a model as it is after that operation.

    adapter.npy            the adapter's, or the full model's, flat buffer, float32 [numel]
    optimizer.<name>.npy   the optimizer's tensors
    gradient.npy           the gradients accumulated for the next step, where there are any
    accumulation.json      the batch that has failed since the last step, where there is one or a gradient.npy
    layout.json            name and shape of each tensor in the buffer
    manifest.json          as that of a checkpoint: what it is, size and SHA-256 of every file above

Plain arrays, because these files are written often, and read only by the trainer that wrote them: a write does not hold
the interpreter's lock. As with checkpoints, a folder is there whole or not at all, also after a power cut.
The methods block; they may be called from several threads, but for one model by one at a time.
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

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, Weights, config_of
from tinsmith.rpc.errors import DataCorrupted
from tinsmith.rpc.words import word_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import Accumulation, OptimizerState, State
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
    def __init__(self, root: Path, *, min_free_bytes: int | None = None) -> None:
        """Makes the root, and cleans up after a process that died while it wrote. `min_free_bytes`: what must stay free
        on its disk; see `least_free_bytes`."""
        self.root = root
        self._temporary = root / _TEMPORARY
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._min_free_bytes = least_free_bytes(root, min_free_bytes)

    def write(self, seq_id: int, info: pb.CheckpointInfo, state: State) -> int:
        """Returns its bytes once it is durable. Raises OSError, and leaves nothing then."""
        self._check_room(state)
        target = self._path(info.model_id, seq_id)
        folder = self._temporary / uuid.uuid4().hex
        try:
            folder.mkdir()
            _save(folder / f"{_ADAPTER}.npy", state.adapter.flat)
            if state.optimizer is not None:
                for name, tensor in state.optimizer.tensors.items():
                    _save(folder / f"{_OPTIMIZER}{name}.npy", tensor)
            if (accumulation := state.accumulation) is not None:
                tainted = {"tainted": accumulation.tainted, "tainted_by": accumulation.tainted_by}
                (folder / _ACCUMULATION).write_text(json.dumps(tainted))
                if accumulation.gradient is not None:
                    _save(folder / f"{_GRADIENT}.npy", accumulation.gradient)
            (folder / _LAYOUT).write_text(json.dumps(_layout(state.adapter)))
            written = Manifest.of(info, [manifest.describe(path) for path in sorted(folder.iterdir())])
            written.write(folder)
            for path in [*folder.iterdir(), folder]:
                sync(path)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # of a run before the last restart
            folder.rename(target)
            sync(target.parent)
            sync(self.root)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return written.checkpoint.size_bytes

    def _check_room(self, state: State) -> None:
        """Raises OSError. What a snapshot fills is also the journal's disk, which training cannot do without."""
        needed = _num_bytes(state)
        free = shutil.disk_usage(self.root).free
        if free - needed < self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"it needs {needed} bytes, and {free} are free under {self.root}, of which {self._min_free_bytes} "
                "must stay free (min_free_bytes)",
            )

    def seq_ids(self, model_id: str) -> list[int]:
        """Of its snapshots, damaged ones too, the newest first."""
        try:
            names = [path.name for path in (self.root / model_id).iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((int(name) for name in names if _SEQ_ID.fullmatch(name)), reverse=True)

    def model_ids(self) -> list[str]:
        """Of which there are snapshots, damaged ones too."""
        folders = [path.name for path in self.root.iterdir() if path.name != _TEMPORARY]
        return sorted(name for name in folders if self.seq_ids(name))

    def verify(self, model_id: str, seq_id: int) -> pb.CheckpointInfo:
        """Reads all of it. Raises DataCorrupted, naming the file, when something is not what was written."""
        found = self._manifest(model_id, seq_id)
        for name in found.files:
            found.verify(self._path(model_id, seq_id) / name, location=f"{model_id}/{seq_id}")
        return found.checkpoint

    def read(self, model_id: str, seq_id: int, base: BaseModel) -> tuple[pb.CheckpointInfo, State]:
        """Raises DataCorrupted for one that cannot be read, or that was made for other layers."""
        found = self._manifest(model_id, seq_id)
        info, folder = found.checkpoint, self._path(model_id, seq_id)
        config = config_of(info.lora_config, max_rank=info.lora_config.rank)
        try:
            tensors = {name: _load(folder / name) for name in found.files if name.endswith(".npy")}
            flat, gradient = tensors.pop(f"{_ADAPTER}.npy"), tensors.pop(f"{_GRADIENT}.npy", None)
            accumulation = None
            if _ACCUMULATION in found.files:
                accumulation = Accumulation(gradient, **json.loads((folder / _ACCUMULATION).read_text()))
            weights = Adapter(config, base.targets, flat) if config.rank else FullWeights(base, flat)
            fits = json.loads((folder / _LAYOUT).read_text()) == _layout(weights)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise DataCorrupted(f"the snapshot {model_id}/{seq_id} cannot be read: {error}") from None
        if not fits:
            raise DataCorrupted(f"the snapshot {model_id}/{seq_id} was made for other layers of a base model")
        optimizer = {name.removeprefix(_OPTIMIZER).removesuffix(".npy"): tensor for name, tensor in tensors.items()}
        state = OptimizerState(word_of(pb.Optimizer, info.optimizer), optimizer) if optimizer else None
        return info, State(config, weights, info.step, state, accumulation)

    def delete(self, model_id: str, seq_ids: Iterable[int]) -> None:
        """Unknown ones are no error."""
        for seq_id in seq_ids:
            shutil.rmtree(self._path(model_id, seq_id), ignore_errors=True)

    def delete_all(self, model_id: str) -> None:
        shutil.rmtree(self.root / model_id, ignore_errors=True)

    def delete_others(self, model_ids: Iterable[str]) -> None:
        """Those of all models but these. What is no snapshot stays."""
        for model_id in set(self.model_ids()) - set(model_ids):
            self.delete_all(model_id)

    def _path(self, model_id: str, seq_id: int) -> Path:
        return self.root / model_id / str(seq_id)

    def _manifest(self, model_id: str, seq_id: int) -> Manifest:
        location = f"{model_id}/{seq_id}"
        try:
            data = (self._path(model_id, seq_id) / manifest.NAME).read_bytes()
        except OSError as error:
            raise DataCorrupted(f"the snapshot {location} cannot be read: {error}") from None
        return Manifest.parse(data, location=location)


def _num_bytes(state: State) -> int:
    """Of the arrays; the other files are small."""
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
