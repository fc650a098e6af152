"""A checkpoint's manifest.json: its CheckpointInfo, size and digest of its files, and the manifest's own SHA-256.

Files of checkpoints with a name have a SHA-256. Files of snapshots, and of checkpoints saved with kind EPHEMERAL, have
an XXH3-128, which takes a sixth of the time: publishes and runs wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import xxhash
from google.protobuf import json_format

from tinsmith.errors import DataCorrupted, NotFound, Unsupported
from tinsmith.v1 import types_pb2 as pb
from trainer_service.older_forms import checkpoint_of_format_1

FORMAT = 3
"""Format 2 has no XXH3-128. A manifest without one keeps it, so that trainers of the version before read it."""
NAME = "manifest.json"
_DIGESTS: dict[str, tuple[str, Any]] = {
    "sha256": ("SHA-256", hashlib.sha256),
    "xxh3_128": ("XXH3-128", xxhash.xxh3_128),
}
"""By field of CheckpointFile: the name for messages, and the function."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest.json."""

    checkpoint: pb.CheckpointInfo
    files: Mapping[str, pb.CheckpointFile]
    """The checkpoint's files by name, without the manifest itself."""
    folder: str = ""
    """Folder of the files, relative to the manifest; in an object store each save has a folder of its own."""
    opened: Path | None = field(default=None, compare=False)
    """Path of the manifest's own folder, valid while a reader on this machine has it open; None otherwise."""

    @classmethod
    def of(cls, info: pb.CheckpointInfo, files: Iterable[pb.CheckpointFile]) -> Manifest:
        """A manifest of `info`, with its size filled in, and the files."""
        by_name = {file.name: file for file in files}
        checkpoint = pb.CheckpointInfo()
        checkpoint.CopyFrom(info)
        checkpoint.size_bytes = sum(file.size_bytes for file in by_name.values())
        return cls(checkpoint, by_name)

    @classmethod
    def parse(cls, data: bytes, *, location: str) -> Manifest:
        """Raises DataCorrupted, which names the location, and Unsupported for a later format."""
        try:
            content = json.loads(data)
            if content.pop("sha256") != _digest_of(content):
                raise ValueError("its SHA-256 does not match")
            if content["format"] not in range(1, FORMAT + 1):
                raise Unsupported(
                    f"{location}: format {content['format']} of the manifest; this trainer reads 1 to {FORMAT}"
                )
            info = content["checkpoint"]
            if content["format"] == 1:
                info = checkpoint_of_format_1(info)
            checkpoint = json_format.ParseDict(info, pb.CheckpointInfo())
            files = {name: pb.CheckpointFile(name=name, **facts) for name, facts in content["files"].items()}
            return cls(checkpoint, files, content.get("folder", ""))
        except (ValueError, KeyError, AttributeError, TypeError, json_format.ParseError) as error:
            raise DataCorrupted(f"{location}/{NAME} is damaged: {error}", file=f"{location}/{NAME}") from None

    def write(self, folder: Path) -> None:
        (folder / NAME).write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "format": FORMAT if any(file.xxh3_128 for file in self.files.values()) else 2,
            "checkpoint": json_format.MessageToDict(self.checkpoint, preserving_proto_field_name=True),
            "files": {
                name: {"size_bytes": file.size_bytes, (digest := _digest_field(file)): getattr(file, digest)}
                for name, file in self.files.items()
            },
            "folder": self.folder,
        }
        content["sha256"] = _digest_of(content)
        return (json.dumps(content, indent=2) + "\n").encode()

    def check_has(self, name: str, *, location: str) -> None:
        """Raises NotFound unless `name` is one of the files."""
        if name not in self.files:
            raise NotFound(f"name: checkpoint {location} has no file {name!r}; it has {', '.join(self.files)}")

    def damaged(self, name: str, how: str, *, location: str) -> DataCorrupted:
        return DataCorrupted(f"{location}/{name} is damaged: {how}", file=f"{location}/{name}")

    def verify(self, path: Path, *, location: str) -> None:
        """Raises DataCorrupted unless the file has the size and digest that the manifest has for its name."""
        try:
            with path.open("rb") as file:
                self.verify_open(path.name, file, location=location)
        except FileNotFoundError:
            raise self.damaged(path.name, "it is missing", location=location) from None

    def verify_open(self, name: str, file: BufferedReader, *, location: str) -> None:
        """`verify` for an open file. Afterwards its position is at the beginning."""
        known = self.files.get(name)
        if known is None:
            raise self.damaged(name, "the manifest does not know it", location=location)
        if (size := file.seek(0, os.SEEK_END)) != known.size_bytes:
            raise self.damaged(name, f"it has {size} bytes, the manifest says {known.size_bytes}", location=location)
        file.seek(0)
        digest = _digest_field(known)
        called, function = _DIGESTS[digest]
        actual, expected = hashlib.file_digest(file, function).hexdigest(), getattr(known, digest)
        if actual != expected:
            raise self.damaged(name, f"its {called} is {actual}, the manifest says {expected}", location=location)
        file.seek(0)


def describe(path: Path, *, has_name: bool = False) -> pb.CheckpointFile:
    """Name, size and digest of a file. `has_name`: it belongs to a checkpoint with a name."""
    digest = "sha256" if has_name else "xxh3_128"
    with path.open("rb") as file:
        content = hashlib.file_digest(file, _DIGESTS[digest][1]).hexdigest()
    return pb.CheckpointFile(name=path.name, size_bytes=path.stat().st_size, **{digest: content})


def _digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of the manifest's content without the SHA-256 itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest_field(file: pb.CheckpointFile) -> str:
    return "xxh3_128" if file.xxh3_128 else "sha256"
