"""Checkpoints: folders "<training run>/<kind>/<name>" under one root, on a local file system.

    adapter_config.json, adapter_model.safetensors   a plain PEFT folder; or, of a model trained in full,
    config.json, model*.safetensors, ...             a plain Hugging Face model with its tokenizer
    optimizer.safetensors                            the optimizer's state, of kind TRAINING only
    manifest.json                                    what it is, size and SHA-256 of every file above
    certificate.json                                 of the version's last publish; made later, replaced as a whole

Files of kind EXTERNAL may be encrypted; then ".age" is appended to their names.

A folder is written under a temporary name, synced, then renamed: it is there whole or not at all, also after a power
cut. No file is ever written again, so a copy of a checkpoint may share its bytes.
The methods block; they may be called from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, config_of
from tinsmith.rpc.errors import (
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
)
from tinsmith.v1 import types_pb2 as pb
from trainer_service import manifest
from trainer_service.encryption import Recipient, encrypt_folder
from trainer_service.engine import OptimizerState, State
from trainer_service.locations import KINDS, Location
from trainer_service.manifest import Manifest
from trainer_service.metrics import Metrics
from trainer_service.optimizers import DEFAULT_OPTIMIZER

logger = logging.getLogger(__name__)

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_OPTIMIZER = "optimizer.safetensors"
_CERTIFICATE = "certificate.json"
_TEMPORARY = "~tmp"
"""Not the name of any run."""
_REPLACED = "replaced-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}


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
        return (self._path(location) / manifest.NAME).exists()

    def save(
        self, info: pb.CheckpointInfo, state: State, *, overwrite: bool, recipients: Sequence[Recipient] = ()
    ) -> pb.CheckpointInfo:
        """Stores a state at info.location, encrypted when there are recipients. Returns `info` with size and time.

        Raises CheckpointExists when the location is taken and `overwrite` is false, OutOfCapacity on a full disk.
        """
        started = time.perf_counter()
        location = Location.parse(info.location, field="location")
        stored = pb.CheckpointInfo()
        stored.CopyFrom(info)
        stored.created_at = time.time()
        stored.encrypted = bool(recipients)
        with self._new_folder(location, overwrite=overwrite) as folder:
            _write_files(folder, state, base_model=info.base_model)
            if recipients:
                encrypt_folder(folder, recipients)
            written = Manifest.of(stored, [manifest.describe(path) for path in sorted(folder.iterdir())])
            written.write(folder)
        self._metrics.checkpoint_seconds.observe(time.perf_counter() - started)
        self._metrics.checkpoint_bytes.inc(written.checkpoint.size_bytes)
        return written.checkpoint

    def copy(self, source: Location, destination: Location, *, ttl_seconds: int | None) -> pb.CheckpointInfo:
        """Makes the same weights available at a second location, which does not change when the first one does.

        Of kind EPHEMERAL, which any kind can be copied to, it has no optimizer. The bytes are shared where the file
        system can do that. Raises CheckpointNotFound, CheckpointExists, OutOfCapacity, DataCorrupted, and
        InvalidRequest for another kind.
        """
        ephemeral = KINDS[pb.CHECKPOINT_KIND_EPHEMERAL]
        if destination.kind not in (source.kind, ephemeral):
            raise InvalidRequest(
                f"destination: kind {destination.kind!r} of {destination} is not that of the source {source}, "
                f"nor {ephemeral!r}",
                field="destination",
            )
        copied = pb.CheckpointInfo()
        with self._new_folder(destination, overwrite=False) as folder:
            with self._swap:
                found = self._read_manifest(source)
                files = [f for f in found.files.values() if destination.kind != ephemeral or f.name != _OPTIMIZER]
                for file in files:
                    try:
                        _link(self._path(source) / file.name, folder / file.name)
                    except FileNotFoundError:
                        raise DataCorrupted(f"{source}/{file.name} is missing", file=f"{source}/{file.name}") from None
                with contextlib.suppress(FileNotFoundError):
                    _link(self._path(source) / _CERTIFICATE, folder / _CERTIFICATE)
            copied.CopyFrom(found.checkpoint)
            copied.location = str(destination)
            copied.kind = destination.kind_number
            copied.created_at = time.time()
            copied.has_optimizer = any(file.name == _OPTIMIZER for file in files)
            copied.ClearField("ttl_seconds")
            if ttl_seconds is not None:
                copied.ttl_seconds = ttl_seconds
            written = Manifest.of(copied, files)
            written.write(folder)
        return written.checkpoint

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the same file system, which is gone afterwards. A full disk raises OutOfCapacity."""
        folder = self._temporary / uuid.uuid4().hex
        try:
            folder.mkdir()
            yield folder
        except (OSError, SafetensorError) as error:
            if _is_full(error):
                raise OutOfCapacity(f"no space left under {self._root} ({error})") from error
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _new_folder(self, location: Location, *, overwrite: bool) -> Iterator[Path]:
        """A folder to write into, which becomes the location's when the block ends without an error."""
        if not overwrite:
            self._refuse_taken(location)
        try:
            with self.scratch() as folder:
                yield folder
                for path in folder.iterdir():
                    _sync(path)
                _sync(folder)
                self._install(folder, location, overwrite=overwrite)
        except OutOfCapacity as error:
            raise OutOfCapacity(f"checkpoint {location} was not saved: {error.message}") from error

    def info(self, location: Location) -> pb.CheckpointInfo:
        """What the manifest says. Raises CheckpointNotFound, DataCorrupted."""
        return self.manifest(location).checkpoint

    def manifest(self, location: Location) -> Manifest:
        """Raises CheckpointNotFound, DataCorrupted."""
        with self._swap:
            return self._read_manifest(location)

    def open_file(self, location: Location, name: str) -> BinaryIO:
        """One of the manifest's files, to read; it stays readable when the checkpoint is deleted or replaced.

        Raises NotFound for another name, CheckpointNotFound, DataCorrupted.
        """
        with self._swap:
            files = self._read_manifest(location).files
            if name not in files:
                raise NotFound(f"name: checkpoint {location} has no file {name!r}; it has {', '.join(files)}")
            try:
                return (self._path(location) / name).open("rb")
            except FileNotFoundError:
                raise DataCorrupted(f"{location}/{name} is missing", file=f"{location}/{name}") from None

    def load(self, location: Location, base: BaseModel, *, with_optimizer: bool) -> tuple[pb.CheckpointInfo, State]:
        """Raises CheckpointNotFound, DataCorrupted (a file is not what was written), and InvalidRequest when the
        checkpoint is encrypted, does not fit the base model, or has no optimizer that is asked for."""
        with self._swap:
            found = self._read_manifest(location)
            info = found.checkpoint
            if info.encrypted:
                raise InvalidRequest(f"checkpoint {location} is encrypted with age: it can be downloaded, not loaded")
            if with_optimizer and not info.has_optimizer:
                raise InvalidRequest(f"checkpoint {location} holds no optimizer state; load it without the optimizer")
            folder = self._path(location)
            config = config_of(info.lora_config, max_rank=info.lora_config.rank)
            weights = _ADAPTER if config.rank else [name for name in found.files if name != _OPTIMIZER]
            for name in [*weights, _OPTIMIZER] if with_optimizer else weights:
                found.verify(folder / name, location=str(location))
            adapter = (
                Adapter.load_peft(folder, config, base.targets) if config.rank else FullWeights.load_model(folder, base)
            )
            optimizer = None
            if with_optimizer:
                optimizer = OptimizerState(info.optimizer or DEFAULT_OPTIMIZER, load_file(folder / _OPTIMIZER))
        return info, State(config=config, adapter=adapter, step=info.step, optimizer=optimizer)

    def put_certificate(self, location: Location, certificate: pb.PublishCertificate) -> None:
        """Does nothing when the version is no longer there. A full disk raises OutOfCapacity."""
        with self.scratch() as folder:
            written = folder / _CERTIFICATE
            content = json_format.MessageToJson(certificate, preserving_proto_field_name=True)
            written.write_text(content + "\n")
            _sync(written)
            with self._swap, contextlib.suppress(CheckpointNotFound):
                if self._read_manifest(location).checkpoint.version_id == certificate.version_id:
                    written.rename(self._path(location) / _CERTIFICATE)

    def certificate(self, location: Location) -> pb.PublishCertificate:
        """Raises CheckpointNotFound, NotFound when the version was never published, DataCorrupted."""
        with self._swap:
            self._read_manifest(location)
            try:
                content = (self._path(location) / _CERTIFICATE).read_text()
            except FileNotFoundError:
                raise NotFound(f"{location}: its version was never published, so it has no certificate") from None
        try:
            return json_format.Parse(content, pb.PublishCertificate())
        except json_format.ParseError as error:
            name = f"{location}/{_CERTIFICATE}"
            raise DataCorrupted(f"{name} is damaged: {error}", file=name) from None

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
            instead = ", or overwrite=true" if location.kind == KINDS[pb.CHECKPOINT_KIND_TRAINING] else ", or delete it"
            raise CheckpointExists(f"checkpoint {location} exists; use another name{instead}", location=location)

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
                    data = (folder / manifest.NAME).read_bytes()
                    location = Manifest.parse(data, location=folder.name).checkpoint.location
                except (OSError, DataCorrupted) as error:
                    logger.warning("%s was being replaced and cannot be put back: %s", folder, error)
                    continue
                target = self._path(Location.parse(location, field="location"))
                if not target.exists():
                    folder.rename(target)
                    continue
            shutil.rmtree(folder)

    def _read_manifest(self, location: Location) -> Manifest:
        try:
            data = (self._path(location) / manifest.NAME).read_bytes()
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no checkpoint {location}", location=location) from None
        return Manifest.parse(data, location=str(location))


def _write_files(folder: Path, state: State, *, base_model: str) -> None:
    if isinstance(state.adapter, FullWeights):
        # Training goes on from float32; who only uses the weights gets them as they are computed with.
        dtype = state.adapter.flat.dtype if state.optimizer is not None else state.adapter.sent_dtype
        state.adapter.save_model(folder, dtype=dtype)
    else:
        state.adapter.save_peft(folder, base_model=base_model)
    if state.optimizer is not None:
        save_file(state.optimizer.tensors, folder / _OPTIMIZER)


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, destination)


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
