"""manifest.json of a checkpoint's folder: CheckpointInfo, size and SHA-256 of every other file, and its own SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from tinsmith.rpc.errors import DataCorrupted, Unsupported
from tinsmith.v1 import types_pb2 as pb

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    checkpoint: pb.CheckpointInfo
    files: Mapping[str, pb.CheckpointFile]
    """By name; the manifest itself is not one of them."""

    @classmethod
    def of(cls, info: pb.CheckpointInfo, files: Iterable[pb.CheckpointFile]) -> Manifest:
        """`info` with the size of the files filled in."""
        by_name = {file.name: file for file in files}
        checkpoint = pb.CheckpointInfo()
        checkpoint.CopyFrom(info)
        checkpoint.size_bytes = sum(file.size_bytes for file in by_name.values())
        return cls(checkpoint, by_name)

    @classmethod
    def parse(cls, data: bytes, *, location: str) -> Manifest:
        """Raises DataCorrupted, naming the location, and Unsupported for a later format."""
        try:
            content = json.loads(data)
            if content.pop("sha256") != _digest_of(content):
                raise ValueError("its SHA-256 does not match")
            if content["format"] != FORMAT:
                raise Unsupported(
                    f"{location}: format {content['format']} of the manifest; this trainer reads {FORMAT}"
                )
            checkpoint = json_format.ParseDict(content["checkpoint"], pb.CheckpointInfo())
            files = {name: pb.CheckpointFile(name=name, **facts) for name, facts in content["files"].items()}
            return cls(checkpoint, files)
        except (ValueError, KeyError, AttributeError, TypeError, json_format.ParseError) as error:
            raise DataCorrupted(f"{location}/{NAME} is damaged: {error}", file=f"{location}/{NAME}") from None

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {
            "format": FORMAT,
            "checkpoint": json_format.MessageToDict(self.checkpoint, preserving_proto_field_name=True),
            "files": {
                name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for name, file in self.files.items()
            },
        }
        content["sha256"] = _digest_of(content)
        (folder / NAME).write_text(json.dumps(content, indent=2) + "\n")

    def verify(self, path: Path, *, location: str) -> None:
        """Raises DataCorrupted unless the file is what was written under its name."""
        try:
            actual = _sha256(path)
        except FileNotFoundError:
            actual = "missing"
        known = self.files.get(path.name)
        expected = known.sha256 if known is not None else "that there is none"
        if actual != expected:
            raise DataCorrupted(
                f"{location}/{path.name} is damaged: its SHA-256 is {actual}, the manifest says {expected}",
                file=f"{location}/{path.name}",
            )


def describe(path: Path) -> pb.CheckpointFile:
    return pb.CheckpointFile(name=path.name, size_bytes=path.stat().st_size, sha256=_sha256(path))


def _digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of the manifest without its own sum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
