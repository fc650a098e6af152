"""Checkpoints: folders "<training run>/<kind>/<name>" under one root, on a local file system.

    adapter_config.json, adapter_model.safetensors   a plain PEFT folder
    optimizer.safetensors                            the optimizer's state, of kind TRAINING only
    manifest.json                                    format, CheckpointInfo, size and SHA-256 of every file above

A folder is written under a temporary name, synced, then renamed: it is there whole or not at all, also after a power
cut.
The methods block; they may be called from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target
from tinsmith.rpc.errors import (
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    InvalidRequest,
    OutOfCapacity,
    Unsupported,
)
from tinsmith.rpc.paths import check_name, check_run_id
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine import State
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

FORMAT = 1
KINDS = {
    pb.CHECKPOINT_KIND_TRAINING: "weights",
    pb.CHECKPOINT_KIND_SAMPLER: "sampler_weights",
    pb.CHECKPOINT_KIND_EPHEMERAL: "ephemeral",
}

_MANIFEST = "manifest.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_OPTIMIZER = "optimizer.safetensors"
_TEMPORARY = "~tmp"
"""Not the name of any run."""
_REPLACED = "replaced-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a checkpoint below the root."""

    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str, *, field: str) -> Location:
        """Raises InvalidRequest unless it is RUN_ID/KIND/NAME with a known kind and safe names."""
        segments = text.split("/")
        if len(segments) != 3:
            raise InvalidRequest(f"{field}: {text!r} is not of the form RUN_ID/KIND/NAME", field=field)
        run_id, kind, name = segments
        if kind not in KINDS.values():
            raise InvalidRequest(
                f"{field}: kind {kind!r} of {text!r} is not one of {', '.join(KINDS.values())}", field=field
            )
        return cls(check_run_id(run_id, field=field), kind, check_name(name, field=field))

    def __str__(self) -> str:
        return f"{self.run_id}/{self.kind}/{self.name}"


class CheckpointStore:
    def __init__(self, root: Path, metrics: Metrics) -> None:
        """Makes the root, and cleans up after a process that died while it wrote."""
        self._root = root
        self._temporary = root / _TEMPORARY
        self._metrics = metrics
        self._swap = threading.Lock()
        """Held while a folder is replaced and while one is read, so that a reader sees the old or the new."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._temporary, os.O_RDONLY)
        """Shared while a trainer lives. Another one may share the root: what it is writing is no leftover."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recover()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Leaves the root to others; nothing may be written after it."""
        os.close(self._lock)

    def exists(self, location: Location) -> bool:
        return (self._path(location) / _MANIFEST).exists()

    def save(self, info: pb.CheckpointInfo, state: State, *, overwrite: bool) -> pb.CheckpointInfo:
        """Stores a state at info.location. Returns `info` with the size and time filled in.

        Raises CheckpointExists when the location is taken and `overwrite` is false, OutOfCapacity on a full disk.
        """
        started = time.perf_counter()
        location = Location.parse(info.location, field="location")
        if not overwrite:
            self._refuse_taken(location)
        stored = pb.CheckpointInfo()
        stored.CopyFrom(info)
        stored.created_at = time.time()
        folder = self._temporary / uuid.uuid4().hex
        try:
            folder.mkdir()
            _write_files(folder, state, base_model=info.base_model)
            _write_manifest(folder, stored)
            for path in folder.iterdir():
                _sync(path)
            _sync(folder)
            self._install(folder, location, overwrite=overwrite)
        except (OSError, SafetensorError) as error:
            if _is_full(error):
                raise OutOfCapacity(
                    f"checkpoint {location} was not saved: no space left under {self._root} ({error})"
                ) from error
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._metrics.checkpoint_seconds.observe(time.perf_counter() - started)
        self._metrics.checkpoint_bytes.inc(stored.size_bytes)
        return stored

    def info(self, location: Location) -> pb.CheckpointInfo:
        """What the manifest says. Raises CheckpointNotFound, DataCorrupted."""
        with self._swap:
            return self._read_manifest(location)[0]

    def load(
        self, location: Location, targets: Sequence[Target], *, with_optimizer: bool
    ) -> tuple[pb.CheckpointInfo, State]:
        """Raises CheckpointNotFound, DataCorrupted (a file is not what was written), and InvalidRequest when the
        checkpoint does not fit the base model's targets or has no optimizer that is asked for."""
        with self._swap:
            info, files = self._read_manifest(location)
            if with_optimizer and not info.has_optimizer:
                raise InvalidRequest(f"checkpoint {location} holds no optimizer state; load it without the optimizer")
            folder = self._path(location)
            wanted = [*_ADAPTER, _OPTIMIZER] if with_optimizer else _ADAPTER
            for name in wanted:
                _verify(folder / name, files, location=location)
            config = AdapterConfig.from_proto(info.lora_config, max_rank=info.lora_config.rank)
            adapter = Adapter.load_peft(folder, config, targets)
            optimizer = load_file(folder / _OPTIMIZER) if with_optimizer else None
        return info, State(config=config, adapter=adapter, step=info.step, optimizer=optimizer)

    def delete(self, location: Location) -> None:
        """An unknown one is no error."""
        self._remove(self._path(location))

    def delete_ephemeral(self, run_id: str) -> None:
        """Removes the checkpoints of a run that have no public path."""
        self._remove(self._root / run_id / KINDS[pb.CHECKPOINT_KIND_EPHEMERAL])

    def _path(self, location: Location) -> Path:
        return self._root / location.run_id / location.kind / location.name

    def _refuse_taken(self, location: Location) -> None:
        if self.exists(location):
            raise CheckpointExists(
                f"checkpoint {location} exists; use another name, or overwrite=true", location=location
            )

    def _install(self, folder: Path, location: Location, *, overwrite: bool) -> None:
        target = self._path(location)
        aside = self._temporary / f"{_REPLACED}{folder.name}"
        with self._swap:
            if not overwrite:
                self._refuse_taken(location)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                target.rename(aside)
            try:
                folder.rename(target)
            except OSError:
                if aside.exists():
                    aside.rename(target)
                raise
            for parent in (target.parent, target.parent.parent, self._root):
                _sync(parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        aside = self._temporary / uuid.uuid4().hex
        with self._swap:
            try:
                path.rename(aside)
            except FileNotFoundError:
                return
            _sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _recover(self) -> None:
        """A process that died between the two renames of an overwrite has left the old checkpoint aside."""
        for folder in self._temporary.iterdir():
            if folder.name.startswith(_REPLACED):
                try:
                    location = _parse_manifest((folder / _MANIFEST).read_bytes(), location=folder.name)[0].location
                except (OSError, DataCorrupted) as error:
                    logger.warning("%s was being replaced and cannot be put back: %s", folder, error)
                    continue
                target = self._path(Location.parse(location, field="location"))
                if not target.exists():
                    folder.rename(target)
                    continue
            shutil.rmtree(folder)

    def _read_manifest(self, location: Location) -> tuple[pb.CheckpointInfo, dict[str, Any]]:
        try:
            data = (self._path(location) / _MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no checkpoint {location}", location=location) from None
        return _parse_manifest(data, location=str(location))


def _write_files(folder: Path, state: State, *, base_model: str) -> None:
    state.adapter.save_peft(folder, base_model=base_model)
    if state.optimizer is not None:
        save_file(state.optimizer, folder / _OPTIMIZER)


def _write_manifest(folder: Path, info: pb.CheckpointInfo) -> None:
    """Fills in info.size_bytes."""
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())
    }
    info.size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    manifest = {
        "format": FORMAT,
        "checkpoint": json_format.MessageToDict(info, preserving_proto_field_name=True),
        "files": files,
    }
    manifest["sha256"] = _digest_of(manifest)
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _parse_manifest(data: bytes, *, location: str) -> tuple[pb.CheckpointInfo, dict[str, Any]]:
    try:
        manifest = json.loads(data)
        if manifest.pop("sha256") != _digest_of(manifest):
            raise ValueError("its SHA-256 does not match")
        if manifest["format"] != FORMAT:
            raise Unsupported(f"{location}: format {manifest['format']} of the manifest; this trainer reads {FORMAT}")
        return json_format.ParseDict(manifest["checkpoint"], pb.CheckpointInfo()), manifest["files"]
    except (ValueError, KeyError, AttributeError, TypeError, json_format.ParseError) as error:
        raise DataCorrupted(f"{location}/{_MANIFEST} is damaged: {error}", file=f"{location}/{_MANIFEST}") from None


def _digest_of(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest without its own sum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _verify(path: Path, files: dict[str, Any], *, location: Location) -> None:
    try:
        actual = _sha256(path)
    except FileNotFoundError:
        actual = "missing"
    expected = files.get(path.name, {}).get("sha256")
    if actual != expected:
        raise DataCorrupted(
            f"{location}/{path.name} is damaged: its SHA-256 is {actual}, the manifest says {expected}",
            file=f"{location}/{path.name}",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"os error {number}" in str(error) for number in _FULL)  # safetensors reports what Rust says
