"""Names that clients choose become paths: none of them leads out of the root, whatever it is made of."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidRequest
from tinsmith.rpc.paths import KINDS, TinkerPath
from trainer_service.storage.imports import unpack
from trainer_service.storage.locations import KINDS as FOLDERS
from trainer_service.storage.locations import Location

ROOT = Path("/root-of-checkpoints")

FOLDED = ("\0", "\n", " ", "\u2024\u2024", "\uff0e\uff0e", "\uff0f", "\xe9")
PARTS = (
    "..",
    ".",
    "/",
    "//",
    "\\",
    "~",
    ":",
    "-",
    "%2e%2e",
    "%2f",
    "weights",
    "ephemeral",
    "a",
    "run",
    "tinker://",
    "C:",
)
PIECES = st.sampled_from((*FOLDED, *PARTS))
HOSTILE = st.lists(PIECES, max_size=8).map("".join)
NAMED = st.builds("{}/{}/{}".format, HOSTILE, st.sampled_from([*FOLDERS.values()]) | HOSTILE, HOSTILE)


def stays_inside(text: str) -> bool:
    path = ROOT / text
    is_inside = Path(*path.parts).is_relative_to(ROOT) and ".." not in path.parts
    return is_inside and len(path.relative_to(ROOT).parts) == 3 and "\0" not in text


@settings(max_examples=200, deadline=None)
@given(HOSTILE | NAMED)
def test_a_location_names_a_folder_below_the_root_or_is_refused(text: str) -> None:
    try:
        location = Location.parse(text, field="location")
    except InvalidRequest:
        return
    assert str(location) == text
    assert stays_inside(str(location))


@settings(max_examples=200, deadline=None)
@given((HOSTILE | NAMED).map("tinker://{}".format) | HOSTILE)
def test_a_tinker_path_names_a_folder_below_the_root_or_is_refused(text: str) -> None:
    try:
        path = TinkerPath.parse(text, field="path")
    except InvalidRequest:
        return
    assert path.kind in KINDS
    assert stays_inside(path.location)
    assert Location.parse(path.location, field="location") is not None


@pytest.mark.parametrize(
    "text",
    ["../x/weights/y", "a/weights/..", "../weights/a", "a/weights/b/", "/a/weights/b", "a:../weights/b", "a/weights/.",
     "a/weights/b\0c", "a/weights/b\n", "a//weights/b", "a/../b", "..:../weights/a", "a/weights/" + "b" * 129],
)  # fmt: skip
def test_these_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Location.parse(text, field="location")


TYPES = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
NAMES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MEMBERS = st.tuples(
    st.sampled_from(NAMES) | st.builds("{}/adapter_config.json".format, HOSTILE) | HOSTILE.filter(bool),
    st.sampled_from([*TYPES, tarfile.GNUTYPE_SPARSE]),
    st.sampled_from(["/etc/passwd", "../../outside", "adapter_config.json", ""]),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=st.lists(MEMBERS, min_size=1, max_size=5))
def test_an_archive_writes_three_names_in_its_folder_and_nothing_else(
    members: list[tuple[str, bytes, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    outer = tmp_path_factory.mktemp("outer")
    inside = outer / "inside"
    inside.mkdir()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name.replace("\0", ""))
            member.type, member.linkname = kind, link
            member.size = 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"abc"))
    archive = outer / "archive"
    archive.write_bytes(content.getvalue())
    with suppress(InvalidRequest):
        unpack(archive, inside, max_bytes=10_000)
    assert {path.name for path in outer.iterdir()} == {"inside", "archive"}
    for path in inside.iterdir():
        assert path.name in NAMES
        assert not path.is_symlink()
        assert path.read_bytes() in (b"abc", b"")
