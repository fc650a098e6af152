"""Checkpoints: folders "<training run>/<kind>/<name>" under one root, on a local disk or in an object store.

    adapter_config.json, adapter_model.safetensors   a plain PEFT folder; or, of a model trained in full,
    config.json, model*.safetensors, ...             a plain Hugging Face model with its tokenizer
    optimizer.safetensors                            the optimizer's state, of kind TRAINING only
    manifest.json                                    what it is, size and SHA-256 of every file above
    certificate.json                                 of the version's last publish; made later, replaced as a whole

Files of kind EXTERNAL may be encrypted; then ".age" is appended to their names.

It is there whole or not at all, and no file is ever written again: `storage` says how. Whatever is read was compared
with the manifest. The methods block; they may be called from several threads, and the event loop has them called by
`reads` and `writes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, config_of
from tinsmith.rpc.errors import BudgetExceeded, DataCorrupted, InvalidRequest, NotFound, OutOfCapacity, ServiceError
from tinsmith.rpc.times import timestamp
from tinsmith.rpc.words import word_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import OptimizerState, State
from trainer_service.engine.optimizers import DEFAULT_OPTIMIZER
from trainer_service.metrics import Metrics
from trainer_service.older_forms import certificate_of_any_age
from trainer_service.storage import manifest
from trainer_service.storage.encryption import Recipient, encrypt_folder
from trainer_service.storage.local import LocalStorage
from trainer_service.storage.locations import KINDS, Location
from trainer_service.storage.manifest import Manifest
from trainer_service.storage.protocol import CERTIFICATE, Draft, Storage
from trainer_service.storage.space import Space

logger = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 8
"""That read, and as many that write: most calls of a place that does not answer. Others wait for one of them."""

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_OPTIMIZER = "optimizer.safetensors"
_OTHER_BYTES = 2**20
"""More than all small files of an adapter's checkpoint have."""
_OTHER_FULL_BYTES = 2**26
"""The same of a whole model's: its tokenizer is one of them."""


class CheckpointStore:
    def __init__(self, storage: Storage | Path, metrics: Metrics) -> None:
        """A path is a local folder, which is made."""
        self._storage = LocalStorage(storage, metrics) if isinstance(storage, Path) else storage
        self._metrics = metrics
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-read")
        self._writers = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-write")

    async def reads(self, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Makes a call that only reads, on a thread of its own kind: a place that is slow to answer leaves saves, and
        the event loop's threads, alone."""
        return await _on_thread(self._readers, partial(call, *arguments, **settings))

    async def writes(self, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Runs a call that writes, on the threads for writing."""
        return await _on_thread(self._writers, partial(call, *arguments, **settings))

    @property
    def space(self) -> Space:
        return self._storage.space

    def close(self) -> None:
        """Leaves the place to others; nothing may be written after it."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._storage.close()

    def exists(self, location: Location) -> bool:
        return self._storage.exists(location)

    def save(
        self,
        info: pb.CheckpointInfo,
        state: State,
        *,
        overwrite: bool,
        recipients: Sequence[Recipient] = (),
        max_bytes: int | None = None,
    ) -> pb.CheckpointInfo:
        """Stores a state at info.location, encrypted when there are recipients. Returns `info` with size and time.

        Raises CheckpointExists when the location is taken and `overwrite` is false, OutOfCapacity when it would fill
        the disk, BudgetExceeded when it has more than `max_bytes`, NotReady when the object store cannot be reached.
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
            written = Manifest.of(stored, [manifest.describe(path) for path in sorted(draft.folder.iterdir())])
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
        """Makes the same weights available at a second location, which does not change when the first one does.

        Of kind EPHEMERAL, which any kind can be copied to, it has no optimizer. The bytes are shared where the file
        system can do that, and copied by an object store itself. Raises CheckpointNotFound, CheckpointExists,
        OutOfCapacity, DataCorrupted, and InvalidRequest for another kind.
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
            with self._storage.reading(source) as found:
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
    def scratch(self) -> Iterator[Path]:
        """An empty folder on this machine, which is gone afterwards. A full disk raises OutOfCapacity."""
        with self._storage.scratch() as folder:
            yield folder

    @contextlib.contextmanager
    def _new(self, location: Location, *, overwrite: bool, num_bytes: int) -> Iterator[Draft]:
        try:
            with self._storage.new(location, overwrite=overwrite, num_bytes=num_bytes) as draft:
                yield draft
        except OutOfCapacity as error:
            raise OutOfCapacity(f"checkpoint {location} was not saved: {error.message}", **error.metadata) from error
        except (OSError, SafetensorError) as error:  # a disk that fails, is read-only, or whose owner has changed
            raise ServiceError(f"checkpoint {location} was not saved: {error}") from error

    def info(self, location: Location) -> pb.CheckpointInfo:
        """What the manifest says. Raises CheckpointNotFound, DataCorrupted."""
        return self.manifest(location).checkpoint

    def manifest(self, location: Location) -> Manifest:
        """Raises CheckpointNotFound, DataCorrupted."""
        with self._storage.reading(location) as found:
            return found

    def open_file(self, location: Location, name: str) -> BinaryIO:
        """One of the manifest's files, to read; it stays readable when the checkpoint is deleted or replaced.

        Raises NotFound for another name, CheckpointNotFound, and DataCorrupted unless it is what was written.
        """
        with self._damage_counted():
            return self._storage.open_file(location, name)

    def verify(self, location: Location) -> tuple[list[pb.CheckpointFile], dict[str, str]]:
        """Reads every file. What they should be, and what is wrong with each, by name.

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

    def load(self, location: Location, base: BaseModel, *, with_optimizer: bool) -> tuple[pb.CheckpointInfo, State]:
        """Raises CheckpointNotFound, DataCorrupted (a file is not what was written), and InvalidRequest when the
        checkpoint is encrypted, does not fit the base model, or has no optimizer that is asked for."""
        with self._damage_counted(), self._storage.reading(location) as found:
            info = found.checkpoint
            if info.encrypted:
                raise InvalidRequest(f"checkpoint {location} is encrypted with age: it can be downloaded, not loaded")
            if with_optimizer and not info.has_optimizer:
                raise InvalidRequest(
                    f"load_optimizer: checkpoint {location} holds no optimizer state; load it without the optimizer",
                    field="load_optimizer",
                )
            config = config_of(info.lora_config, max_rank=info.lora_config.rank)
            weights = _ADAPTER if config.rank else [name for name in found.files if name != _OPTIMIZER]
            names = [*weights, _OPTIMIZER] if with_optimizer else weights
            with self._storage.files(location, found, names) as folder:
                adapter = (
                    Adapter.load_peft(folder, config, base.targets)
                    if config.rank
                    else FullWeights.load_model(folder, base)
                )
                optimizer = None
                if with_optimizer:
                    kind = word_of(pb.Optimizer, info.optimizer) or DEFAULT_OPTIMIZER
                    optimizer = OptimizerState(kind, load_file(folder / _OPTIMIZER))
        return info, State(config=config, adapter=adapter, step=info.step, optimizer=optimizer)

    @contextlib.contextmanager
    def _damage_counted(self) -> Iterator[None]:
        try:
            yield
        except DataCorrupted as error:
            self._metrics.storage.damaged_checkpoints.inc()
            logger.error("%s", error.message)
            raise

    def put_certificate(self, location: Location, certificate: pb.PublishCertificate) -> None:
        """Does nothing when the version is no longer there. A full disk raises OutOfCapacity."""
        content = json_format.MessageToJson(certificate, preserving_proto_field_name=True) + "\n"
        self._storage.put_certificate(location, certificate.version_id, content.encode())

    def certificate(self, location: Location) -> pb.PublishCertificate:
        """Raises CheckpointNotFound, NotFound when the version was never published, DataCorrupted."""
        with self._storage.reading(location) as found:
            try:
                content = self._storage.certificate(location, found)
            except FileNotFoundError:
                raise NotFound(f"{location}: its version was never published, so it has no certificate") from None
        try:
            return json_format.ParseDict(certificate_of_any_age(json.loads(content)), pb.PublishCertificate())
        except (json_format.ParseError, ValueError, TypeError) as error:
            raise found.damaged(CERTIFICATE, str(error), location=str(location)) from None

    def delete(self, location: Location, *, version_id: str = "") -> None:
        """An unknown one is no error. Given a version, another one stays, and that is no error either."""
        self._storage.delete(location, version_id=version_id)

    def delete_ephemeral(self, run_id: str) -> None:
        """Removes the checkpoints of a run that have no public path."""
        self._storage.delete_all(run_id, KINDS[pb.CHECKPOINT_KIND_EPHEMERAL])


async def _on_thread(pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """With the context of the caller, for the ids in log lines."""
    return await asyncio.get_running_loop().run_in_executor(pool, contextvars.copy_context().run, call)


def _num_bytes(state: State) -> int:
    """A little more than the files of a checkpoint will have."""
    if isinstance(state.adapter, FullWeights):
        weights = state.adapter.flat.numel() * _stored_dtype(state, state.adapter).itemsize + _OTHER_FULL_BYTES
    else:
        weights = state.adapter.peft_bytes + _OTHER_BYTES
    return weights + (0 if state.optimizer is None else sum(t.nbytes for t in state.optimizer.tensors.values()))


def _stored_dtype(state: State, weights: FullWeights) -> torch.dtype:
    """Training goes on from float32; who only uses the weights gets them as they are computed with."""
    return weights.flat.dtype if state.optimizer is not None else weights.sent_dtype


def _write_files(folder: Path, state: State, info: pb.CheckpointInfo) -> None:
    if isinstance(state.adapter, FullWeights):
        state.adapter.save_model(folder, dtype=_stored_dtype(state, state.adapter))
    else:
        is_external = info.kind == pb.CHECKPOINT_KIND_EXTERNAL
        adapter = state.adapter.with_tinker_names() if is_external else state.adapter
        adapter.save_peft(folder, base_model=info.base_model)
    if state.optimizer is not None:
        save_file(state.optimizer.tensors, folder / _OPTIMIZER)
