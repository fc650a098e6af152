"""Checkpoint stores of each kind, for tests: a folder, and buckets of imitations of S3 and GCS in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer
from prometheus_client import CollectorRegistry

from tinsmith_cli.ports import free_ports
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.choice import open_storage
from trainer_service.storage.locations import Location
from trainer_service.storage.protocol import STORE_ID

BUCKET = "tinsmith"
_KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """A server with BUCKET; what a client needs to reach it is in the environment, and given."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    env = {**_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    try:
        with mock.patch.dict(os.environ, env):
            type(file_system("s3")).clear_instance_cache()  # fsspec keeps clients, of an earlier server too
            file_system("s3").makedirs(BUCKET, exist_ok=True)  # servers of one process share what they have
            yield env
    finally:
        server.stop()


@contextmanager
def gs() -> Iterator[dict[str, str]]:
    """An imitation of Google Cloud Storage with BUCKET. Gives the environment that a client needs to reach it."""
    port = free_ports(1)[0]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    finally:
        server.stop()


def file_system(protocol: str) -> Any:
    return fsspec.filesystem(protocol, use_listings_cache=False)


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where the checkpoints of a test lie, seen past the store."""

    root: str
    state_dir: Path
    fs: Any

    @classmethod
    def of(cls, root: str, state_dir: Path) -> StoreLocation:
        return cls(root, state_dir, file_system(root.partition("://")[0] if "://" in root else "file"))

    @property
    def in_objects(self) -> bool:
        return "://" in self.root

    def open(
        self,
        *,
        state_dir: Path | None = None,
        min_free_bytes: int | None = None,
        registry: CollectorRegistry | None = None,
    ) -> CheckpointStore:
        """Opens the store as a trainer with this state folder does. `registry` gets its metrics."""
        metrics = Metrics(registry or CollectorRegistry())
        storage = open_storage(
            self.root, state_dir=state_dir or self.state_dir, metrics=metrics, min_free_bytes=min_free_bytes
        )
        return CheckpointStore(storage, metrics)

    def path(self, store: CheckpointStore, location: Location, name: str) -> str:
        """Path of a checkpoint's file."""
        folder = "" if name == "manifest.json" else store.manifest(location).folder
        return "/".join(part for part in (self.root, str(location), folder, name) if part)

    def read(self, store: CheckpointStore, location: Location, name: str) -> bytes:
        return self.fs.cat_file(self.path(store, location, name))

    def write(self, store: CheckpointStore, location: Location, name: str, data: bytes) -> None:
        self.fs.pipe_file(self.path(store, location, name), data)

    def flip(self, store: CheckpointStore, location: Location, name: str) -> None:
        """Flips one bit in the middle of the file."""
        data = bytearray(self.read(store, location, name))
        data[len(data) // 2] ^= 1
        self.write(store, location, name, bytes(data))

    def remove(self, store: CheckpointStore, location: Location, name: str) -> None:
        self.fs.rm_file(self.path(store, location, name))

    def fetch(self, store: CheckpointStore, location: Location, folder: Path) -> Path:
        """Copies all files of a checkpoint into a local folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in store.manifest(location).files:
            (folder / name).write_bytes(self.read(store, location, name))
        return folder

    def leftovers(self) -> list[str]:
        """Everything that is neither a checkpoint's manifest nor one of its files."""
        found = self.fs.find(self.root)
        return [path for path in found if "/~tmp/" in path]

    def objects(self) -> list[str]:
        """Everything but the store's id."""
        return [path for path in self.fs.find(self.root) if not path.endswith(f"/{STORE_ID}")]
