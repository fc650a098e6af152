"""Journals, manifests and certificates of earlier versions are read as they were meant."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest

from tinsmith.errors import Unsupported
from tinsmith.rpc.times import duration, timestamp
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.older_forms import carried_over, certificate_of_any_age
from trainer_service.storage.manifest import Manifest

AT = 1_700_000_000.25


def text(number: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return bytes([*varint(number << 3 | 2), *varint(len(data))]) + data


def varint(value: int) -> list[int]:
    return [value & 127 | 128, *varint(value >> 7)] if value > 127 else [value]


def double(number: int, value: float) -> bytes:
    return bytes(varint(number << 3 | 1)) + struct.pack("<d", value)


def integer(number: int, value: int) -> bytes:
    return bytes([*varint(number << 3), *varint(value)])


CHECKPOINT = text(1, "m/weights/one") + double(8, AT) + integer(11, 3600) + text(13, "dimuon")


@pytest.mark.parametrize(("word", "kind"), [("adamw", 1), ("dimuon", 2), ("sgd", -1)])
def test_a_creation_in_an_older_journal_keeps_its_optimizer(word: str, kind: int) -> None:
    old = text(1, "m") + text(4, word) + text(5, "m/weights/one")
    request = carried_over(pb.CreateModelRequest.FromString(old))
    assert request == pb.CreateModelRequest(model_id="m", optimizer=kind, from_location="m/weights/one")  # type: ignore[arg-type]


def test_a_save_in_an_older_journal_keeps_its_lifetime() -> None:
    old = text(1, "m") + integer(2, 7) + integer(3, 1) + text(4, "one") + integer(6, 3600)
    request = carried_over(pb.SaveCheckpointRequest.FromString(old))
    kind = types_pb2.CHECKPOINT_KIND_TRAINING
    assert request == pb.SaveCheckpointRequest(model_id="m", seq_id=7, kind=kind, name="one", ttl=duration(3600))


def test_an_answer_in_an_older_journal_keeps_its_times() -> None:
    certificate = text(1, "m@7") + double(4, 0.5) + double(8, AT + 1)
    old = text(4, text(1, CHECKPOINT) + integer(2, 1) + text(3, certificate))
    answer = carried_over(pb.WaitResultResponse.FromString(old))
    assert answer.save_checkpoint == pb.SaveCheckpointResponse(
        checkpoint=types_pb2.CheckpointInfo(
            location="m/weights/one",
            created_at=timestamp(AT),
            ttl=duration(3600),
            optimizer=types_pb2.OPTIMIZER_DIMUON,
        ),
        num_samplers=1,
        certificate=types_pb2.PublishCertificate(
            version_id="m@7", publish_time=duration(0.5), issued_at=timestamp(AT + 1)
        ),
    )


def test_files_of_this_version_are_carried_over_as_they_are() -> None:
    written = pb.WaitResultResponse(create_model=pb.CreateModelResponse(model=pb.ModelInfo(model_id="m", optimizer=2)))  # type: ignore[arg-type]
    assert carried_over(pb.WaitResultResponse.FromString(written.SerializeToString())) == written


def signed(content: dict[str, Any]) -> bytes:
    """A manifest with its own SHA-256."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}).encode()


def test_a_manifest_of_format_1_is_read_and_one_of_a_later_format_is_refused() -> None:
    content: dict[str, Any] = {
        "format": 1,
        "checkpoint": {"location": "m/weights/one", "created_at": AT, "ttl_seconds": "3600", "optimizer": "adamw"},
        "files": {},
    }
    info = Manifest.parse(signed(content), location="l").checkpoint
    assert (info.created_at, info.ttl) == (timestamp(AT), duration(3600))
    assert info.optimizer == types_pb2.OPTIMIZER_ADAMW
    again = Manifest.parse(Manifest.of(info, []).to_bytes(), location="l").checkpoint
    assert again == info
    with pytest.raises(Unsupported, match=r"^l: format 4 of the manifest; this trainer reads 1 to 3$"):
        Manifest.parse(signed(content | {"format": 4}), location="l")


@pytest.mark.parametrize(("digest", "written"), [("sha256", 2), ("xxh3_128", 3)])
def test_a_manifest_has_the_first_format_that_knows_its_digests(digest: str, written: int) -> None:
    """So trainers of the version before read checkpoints with a name, which are those that others load."""
    manifest = Manifest.of(types_pb2.CheckpointInfo(), [types_pb2.CheckpointFile(name="f", **{digest: "ab"})])
    assert json.loads(manifest.to_bytes())["format"] == written
    assert Manifest.parse(manifest.to_bytes(), location="l").files == manifest.files


def test_a_certificate_with_numbers_of_seconds_is_read() -> None:
    found = certificate_of_any_age({"version_id": "m@1", "publish_seconds": 0.25, "issued_at": AT})
    assert found == {"version_id": "m@1", "publish_time": "0.250s", "issued_at": "2023-11-14T22:13:20.250Z"}
    assert certificate_of_any_age(found) == found
