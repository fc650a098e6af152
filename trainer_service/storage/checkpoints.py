"""Checkpoints: folders "<training run>/<kind>/<name>" under one root, on a local disk or in an object store.

    adapter_config.json, adapter_model.safetensors   an adapter: a plain PEFT folder
    config.json, model*.safetensors, ...             a model trained in full: a plain Hugging Face folder with tokenizer
    optimizer.safetensors                            the optimizer's state, in checkpoints of kind TRAINING only
    manifest.json                                    facts about the checkpoint, size and digest of the files above
    certificate.json                                 certificate of the version's last publish; may be replaced later

Files of kind EXTERNAL may be encrypted; then ".age" is appended to their names.

A checkpoint exists whole or not at all, and its other files are never written again (local.py and objects.py say how).
Files are compared with the manifest before they are used. The methods block and may be called from several threads; the
event loop calls them through `reads` and `writes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from weakref import WeakValueDictionary

import torch
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinsmith.errors import BudgetExceeded, DataCorrupted, InvalidRequest, NotFound, OutOfCapacity, ServiceError
from tinsmith.lora_config import config_from_proto
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights
from tinsmith.rpc.times import timestamp
from tinsmith.rpc.words import word_of
from tinsmith.threads import in_pool_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import CapturedState, OptimizerState
from trainer_service.engine.optimizers import DEFAULT_OPTIMIZER
from trainer_service.metrics import Metrics
from trainer_service.older_forms import certificate_of_any_age
from trainer_service.storage import manifest
from trainer_service.storage.encryption import Recipient, encrypt_folder
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.locations import KINDS, Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import CERTIFICATE, Draft, Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 8
"""Threads that read, and as many that write. Further calls wait, so a storage that hangs blocks only these."""

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_OPTIMIZER = "optimizer.safetensors"
_OTHER_BYTES = 2**20
"""Upper bound of the small files in an adapter's checkpoint, in bytes."""
_OTHER_FULL_BYTES = 2**26
"""Upper bound of the small files in a full model's checkpoint, its tokenizer included, in bytes."""


class CheckpointStore:
    """Saves, loads, copies and deletes checkpoints."""

    def __init__(self, storage: Storage | Path, metrics: Metrics) -> None:
        """`storage`: a Path means a local folder, which is created if it does not exist."""
        self.storage = LocalStorage(storage, metrics) if isinstance(storage, Path) else storage
        self._metrics = metrics
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-read")
        self._writers = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-write")
        self._turns: WeakValueDictionary[Location, asyncio.Lock] = WeakValueDictionary()
        """A lock for each location that is being changed. The storage has locks of its own, for calls without it."""

    async def reads(self, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Runs a call that only reads on the threads for reading, so that a slow storage delays neither saves nor the
        event loop's own threads."""
        return await in_pool_of(self._readers, call, *arguments, **settings)

    async def writes(self, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Runs a call that writes, on the threads for writing."""
        return await in_pool_of(self._writers, call, *arguments, **settings)

    async def writes_to(self, location: Location, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Runs a call that changes the checkpoint at one location. It waits for earlier calls for that location,
        without a thread."""
        turn = self._turns.setdefault(location, asyncio.Lock())
        async with turn:
            return await self.writes(call, *arguments, **settings)

    def close(self) -> None:
        """Releases the storage for other processes. Nothing may be written afterwards."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.storage.close()

    def exists(self, location: Location) -> bool:
        return self.storage.exists(location)

    def save(
        self,
        info: pb.CheckpointInfo,
        state: CapturedState,
        *,
        overwrite: bool,
        recipients: Sequence[Recipient] = (),
        max_bytes: int | None = None,
    ) -> pb.CheckpointInfo:
        """Stores a state at info.location, encrypted if there are recipients. Returns `info` with size and time.

        Raises CheckpointExists when the location is taken and `overwrite` is false, OutOfCapacity when the checkpoint
        would fill the disk, BudgetExceeded when it is larger than `max_bytes`, and NotReady when the object store
        cannot be reached.
        """
        started = time.perf_counter()
        location = Location.parse(info.location, field="location")
        stored = pb.CheckpointInfo()
        stored.CopyFrom(info)
        stored.created_at.CopyFrom(timestamp(time.time()))
        stored.encrypted = bool(recipients)
        num_bytes = _num_bytes(state) * (2 if recipients else 1)
        with self._new(location, overwrite=overwrite, num_bytes=num_bytes) as draft:
            _write_files(draft.folder, state, info)
            if recipients:
                encrypt_folder(draft.folder, recipients)
            draft.begin_sync()
            has_name = info.kind != pb.CHECKPOINT_KIND_EPHEMERAL
            files = [manifest.describe(path, has_name=has_name) for path in sorted(draft.folder.iterdir())]
            written = Manifest.of(stored, files)
            if max_bytes is not None and (size := written.checkpoint.size_bytes) > max_bytes:
                raise BudgetExceeded(
                    f"checkpoint {location} was not saved: it has {size} bytes, and {max_bytes} are left of the "
                    "storage quota; delete checkpoints, or ask whoever runs the server to raise it",
                    budget="storage_bytes",
                )
            draft.install(written)
        self._metrics.storage.checkpoint_seconds.observe(time.perf_counter() - started)
        self._metrics.storage.checkpoint_bytes.inc(written.checkpoint.size_bytes)
        return written.checkpoint

    def copy(self, source: Location, destination: Location, *, ttl: Duration | None) -> pb.CheckpointInfo:
        """Copies a checkpoint. The copy does not change when the source is replaced or deleted.

        The destination has the kind of the source, or EPHEMERAL: then the optimizer is left out. A local file system
        shares the bytes where it can, and an object store copies them itself. Raises CheckpointNotFound,
        CheckpointExists, OutOfCapacity, DataCorrupted, and InvalidRequest for a destination of another kind.
        """
        ephemeral = KINDS[pb.CHECKPOINT_KIND_EPHEMERAL]
        if destination.kind not in (source.kind, ephemeral):
            raise InvalidRequest(
                f"destination: kind {destination.kind!r} of {destination} is not that of the source {source}, "
                f"nor {ephemeral!r}",
                field="destination",
            )
        copied = pb.CheckpointInfo()
        with self._new(destination, overwrite=False, num_bytes=0) as draft:
            with self.storage.reading(source) as found:
                files = [f for f in found.files.values() if destination.kind != ephemeral or f.name != _OPTIMIZER]
                for file in files:
                    try:
                        draft.take(source, found, file.name)
                    except FileNotFoundError:
                        raise found.damaged(file.name, "it is missing", location=str(source)) from None
                with contextlib.suppress(FileNotFoundError):
                    draft.take(source, found, CERTIFICATE)
            copied.CopyFrom(found.checkpoint)
            copied.location = str(destination)
            copied.kind = destination.kind_number
            copied.created_at.CopyFrom(timestamp(time.time()))
            copied.has_optimizer = any(file.name == _OPTIMIZER for file in files)
            copied.ClearField("ttl")
            if ttl is not None:
                copied.ttl.CopyFrom(ttl)
            written = Manifest.of(copied, files)
            draft.install(written)
        return written.checkpoint

    @contextlib.contextmanager
    def _new(self, location: Location, *, overwrite: bool, num_bytes: int) -> Iterator[Draft]:
        try:
            with self.storage.new(location, overwrite=overwrite, num_bytes=num_bytes) as draft:
                yield draft
        except OutOfCapacity as error:
            raise OutOfCapacity(f"checkpoint {location} was not saved: {error.message}", **error.metadata) from error
        except (OSError, SafetensorError) as error:  # the disk fails, is read-only or belongs to another user
            raise ServiceError(f"checkpoint {location} was not saved: {error}") from error

    def info(self, location: Location) -> pb.CheckpointInfo:
        """The facts in the manifest. Raises CheckpointNotFound, DataCorrupted."""
        return self.manifest(location).checkpoint

    def manifest(self, location: Location) -> Manifest:
        """Reads the manifest. Raises CheckpointNotFound, DataCorrupted."""
        with self.storage.reading(location) as found:
            return found

    def open_file(self, location: Location, name: str) -> BinaryIO:
        """Opens one of the manifest's files for reading. It stays readable when the checkpoint is deleted or replaced.

        Raises CheckpointNotFound, NotFound when the manifest has no file of this name, and DataCorrupted when the file
        differs from the manifest.
        """
        with self._damage_counted():
            return self.storage.open_file(location, name)

    def verify(self, location: Location) -> tuple[list[pb.CheckpointFile], dict[str, str]]:
        """Reads every file and compares it with the manifest. Returns the manifest's files, and the problems found, by
        file name.

        Raises CheckpointNotFound, and DataCorrupted for a damaged manifest.
        """
        found = self.manifest(location)
        problems = {}
        for name in found.files:
            try:
                self.open_file(location, name).close()
            except DataCorrupted as error:
                problems[name] = error.message
        return list(found.files.values()), problems

    def load(
        self, location: Location, base: BaseModel, *, with_optimizer: bool
    ) -> tuple[pb.CheckpointInfo, CapturedState]:
        """Loads a checkpoint's state into host memory.

        Raises CheckpointNotFound, DataCorrupted when a file differs from the manifest, and InvalidRequest when the
        checkpoint is encrypted, does not fit the base model, or lacks the optimizer that is asked for.
        """
        with self._damage_counted(), self.storage.reading(location) as found:
            info = found.checkpoint
            if info.encrypted:
                raise InvalidRequest(f"checkpoint {location} is encrypted with age: it can be downloaded, not loaded")
            if with_optimizer and not info.has_optimizer:
                raise InvalidRequest(
                    f"load_optimizer: checkpoint {location} holds no optimizer state; load it without the optimizer",
                    field="load_optimizer",
                )
            config = config_from_proto(info.lora_config, max_rank=info.lora_config.rank)
            weights = _ADAPTER if config.rank else [name for name in found.files if name != _OPTIMIZER]
            names = [*weights, _OPTIMIZER] if with_optimizer else weights
            with self.storage.files(location, found, names) as folder:
                adapter = (
                    Adapter.load_peft(folder, config, base.targets)
                    if config.rank
                    else FullWeights.load_model(folder, base)
                )
                optimizer = None
                if with_optimizer:
                    kind = word_of(pb.Optimizer, info.optimizer) or DEFAULT_OPTIMIZER
                    optimizer = OptimizerState(kind, load_file(folder / _OPTIMIZER))
        return info, CapturedState(config=config, adapter=adapter, step=info.step, optimizer=optimizer)

    @contextlib.contextmanager
    def _damage_counted(self) -> Iterator[None]:
        try:
            yield
        except DataCorrupted as error:
            self._metrics.storage.damaged_checkpoints.inc()
            logger.error("%s", error.message)
            raise

    def put_certificate(self, location: Location, certificate: pb.PublishCertificate) -> None:
        """Stores the certificate of a version's publish. Does nothing when the location no longer holds that version.

        Raises OutOfCapacity when the disk is full.
        """
        content = json_format.MessageToJson(certificate, preserving_proto_field_name=True) + "\n"
        self.storage.put_certificate(location, certificate.version_id, content.encode())

    def certificate(self, location: Location) -> pb.PublishCertificate:
        """The certificate of the version's last publish. Raises CheckpointNotFound, DataCorrupted, and NotFound when
        the version was never published."""
        with self.storage.reading(location) as found:
            try:
                content = self.storage.certificate(location, found)
            except FileNotFoundError:
                raise NotFound(f"{location}: its version was never published, so it has no certificate") from None
        try:
            return json_format.ParseDict(certificate_of_any_age(json.loads(content)), pb.PublishCertificate())
        except (json_format.ParseError, ValueError, TypeError) as error:
            raise found.damaged(CERTIFICATE, str(error), location=str(location)) from None

    def delete(self, location: Location, *, version_id: str = "") -> None:
        """Deletes a checkpoint, if it exists. With a `version_id`, a checkpoint of another version stays."""
        self.storage.delete(location, version_id=version_id)

    def delete_ephemeral(self, run_id: str) -> None:
        """Deletes a run's checkpoints of kind EPHEMERAL, which have no public path."""
        self.storage.delete_all(run_id, KINDS[pb.CHECKPOINT_KIND_EPHEMERAL])


def _num_bytes(state: CapturedState) -> int:
    """Upper bound of the size of a checkpoint's files, in bytes."""
    if isinstance(state.adapter, FullWeights):
        weights = state.adapter.flat.numel() * _stored_dtype(state, state.adapter).itemsize + _OTHER_FULL_BYTES
    else:
        weights = state.adapter.peft_bytes + _OTHER_BYTES
    return weights + (0 if state.optimizer is None else sum(t.nbytes for t in state.optimizer.tensors.values()))


def _stored_dtype(state: CapturedState, weights: FullWeights) -> torch.dtype:
    """float32 with an optimizer, to continue training exactly; otherwise the dtype that the model computes with."""
    return weights.flat.dtype if state.optimizer is not None else weights.sent_dtype


def _write_files(folder: Path, state: CapturedState, info: pb.CheckpointInfo) -> None:
    if isinstance(state.adapter, FullWeights):
        state.adapter.save_model(folder, dtype=_stored_dtype(state, state.adapter))
    else:
        is_external = info.kind == pb.CHECKPOINT_KIND_EXTERNAL
        adapter = state.adapter.with_tinker_names() if is_external else state.adapter
        adapter.save_peft(folder, base_model=info.base_model)
    if state.optimizer is not None:
        save_file(state.optimizer.tensors, folder / _OPTIMIZER)
