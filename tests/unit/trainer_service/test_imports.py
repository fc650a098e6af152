"""An archive gives the adapter's files and nothing else, whatever is in it."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tinsmith.errors import InvalidRequest
from trainer_service.storage.imports import unpack

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GOOD = [
    ("a/other.txt", b"x" * 3000),
    (f"a/{CONFIG}", b"{}"),
    ("a/b/c/adapter_model.bin", b"no"),
    (f"a/{WEIGHTS}", b"w" * 5000),
]


def tar(members: Sequence[tuple[str, bytes | tarfile.TarInfo]], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, content in members:
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.name = name
            if isinstance(content, bytes):
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def special(**facts: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo()
    for key, value in facts.items():
        setattr(member, key, value)
    return member


def unpacked(data: bytes, folder: Path, *, max_bytes: int = 1 << 20) -> dict[str, bytes]:
    (folder / "archive").write_bytes(data)
    unpack(folder / "archive", folder, max_bytes=max_bytes)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "archive"}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, zstandard.compress])
@pytest.mark.parametrize("prefix", ["a/", "", "./", "./a/"])
def test_the_files_are_found_at_the_top_or_in_one_folder(
    tmp_path: Path, compress: Callable[[bytes], bytes], prefix: str
) -> None:
    data = tar([(name.replace("a/", prefix, 1), content) for name, content in GOOD])
    assert unpacked(compress(data), tmp_path) == {CONFIG: b"{}", WEIGHTS: b"w" * 5000}


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([(CONFIG, special(type=tarfile.SYMTYPE, linkname="/etc/passwd"))], "refused"),
        ([(CONFIG, special(type=tarfile.SYMTYPE, linkname="other"))], "not a plain file"),
        ([(CONFIG, special(type=tarfile.LNKTYPE, linkname="other"))], "not a plain file"),
        ([(CONFIG, special(type=tarfile.FIFOTYPE))], "refused"),
        ([(CONFIG, special(type=tarfile.DIRTYPE))], "not a plain file"),
        ([(f"../{CONFIG}", b"{}")], "refused"),
        ([(CONFIG, b"{}"), (f"a/{CONFIG}", b"{}")], "two of adapter_config.json"),
        ([(f"a/{CONFIG}", b"{}"), (f"b/{WEIGHTS}", b"")], "different folders"),
        ([(f"{n}.txt", b"") for n in range(1001)], "more than 1000 files"),
        ([("big", b"x" * 900), (CONFIG, b"x" * 200)], "1000 bytes"),
        ([("big", special(size=10**12))], "1000 bytes"),
    ],
)
def test_unexpected_content_of_an_archive_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes | tarfile.TarInfo]], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        unpacked(tar(members), tmp_path, max_bytes=1000)


def _huge_header(kind: bytes) -> bytes:
    """An extended header, which tarfile reads whole into memory, of ten gigabytes."""
    return special(name="x", type=kind, size=10 * 2**30).tobuf(tarfile.GNU_FORMAT) + bytes(10240)


def _nested_headers() -> bytes:
    one = special(name="x", type=tarfile.GNUTYPE_LONGNAME, size=1).tobuf(tarfile.GNU_FORMAT) + b"x" + bytes(511)
    return one * 5000


@pytest.mark.parametrize(
    "data",
    [
        b"", b"no archive", gzip.compress(b"no archive"), gzip.compress(tar(GOOD))[:-200], tar(GOOD)[:2000],
        b"\x28\xb5\x2f\xfd broken", b"BZh9 broken", lzma.compress(tar(GOOD)), b"PK\x03\x04zip",
        _huge_header(tarfile.GNUTYPE_LONGNAME), _huge_header(tarfile.XHDTYPE), gzip.compress(_nested_headers()),
    ],
    ids=["empty", "text", "gzip of text", "cut gzip", "cut tar", "zstd", "bzip2", "xz", "zip", "name", "pax", "nested"],
)  # fmt: skip
def test_bytes_that_are_no_archive_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read as a tar file"):
        unpacked(data, tmp_path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    data = gzip.compress(tar([("big", bytes(2**24)), (CONFIG, b"{}")]))
    with pytest.raises(InvalidRequest, match="max_import_bytes"):
        unpacked(data, tmp_path, max_bytes=2**20)
