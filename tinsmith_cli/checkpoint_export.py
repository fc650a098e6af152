"""`tinsmith checkpoints export`: downloads the weights of a checkpoint as a folder or an archive, and verifies them."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinsmith.formatting import size_text
from tinsmith_cli import client
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.client import ApiClient

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_OPTIMIZER = "optimizer."
_PIECE_BYTES = 2**20
_TIMEOUT_S = 300.0
_TRIES = 5
"""Number of consecutive tries without a new byte after which the download fails."""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "export",
        help="write the weights of a checkpoint as a folder or a tar archive",
        description="Downloads a checkpoint's weights (a PEFT folder, or a Hugging Face model after full-parameter "
        "training), and compares every file with its SHA-256. A download that was cut off is resumed.",
    )
    parser.add_argument("path", metavar="PATH", help="tinker:// path")
    parser.add_argument(
        "out", type=Path, metavar="FOLDER_OR_TAR", help="folder to write, or archive if it ends in .tar"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    client.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if out.exists():
        raise UsageError(f"{out}: exists; name another place")
    server = ApiClient.of(arguments)
    found = server.checkpoint(arguments.path)
    sums = {file["name"]: file["sha256"] for file in found["files"] if not file["name"].startswith(_OPTIMIZER)}
    archive = out.parent / f"{out.name}.part"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: its folder cannot be made: {error}") from None
    url = server.checkpoint(arguments.path, "archive")["url"]
    try:
        download(url, archive, progress=sys.stderr if sys.stderr.isatty() and not arguments.json else None)
    except OSError as error:
        raise UsageError(f"the download was cut off ({error}); repeat the command to resume it") from None
    try:
        if out.suffix == ".tar":
            check(archive, sums)
            archive.rename(out)
        else:
            unpack(archive, out, sums)
    except Damaged as error:
        raise UsageError(f"{error}; nothing was written") from None
    finally:
        archive.unlink(missing_ok=True)
        _tag_file(archive).unlink(missing_ok=True)
    num_bytes = sum(file["size_bytes"] for file in found["files"] if file["name"] in sums)
    if arguments.json:
        print(json.dumps({"tinker_path": arguments.path, "out": str(out), "num_bytes": num_bytes, "sha256": sums}))
    else:
        print(f"{out}: {', '.join(sums)}; {size_text(num_bytes)}, every SHA-256 matches")
    return 0


class Damaged(Exception):
    """The downloaded files are not those of the checkpoint."""


def download(url: str, part: Path, *, progress: IO[str] | None = None) -> None:
    """Downloads to the file `part`, which may already hold the beginning from an earlier call. `progress`: gets a line
    that counts bytes. Raises UsageError with the server's message if it refuses, and OSError if the server cannot be
    reached."""
    tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _go_on(url, part, progress)
        except urllib.error.HTTPError as error:
            if error.code <= 500:
                raise UsageError(f"the server refused it: {client.detail(error)}") from None
            failure: OSError = error
        except http.client.HTTPException as error:
            failure = ConnectionError(str(error) or type(error).__name__)
        except OSError as error:
            failure = error
        tries = 0 if part.exists() and part.stat().st_size > before else tries + 1
        if tries == _TRIES:
            raise failure
        time.sleep(min(0.2 * 2**tries, 5.0))


def _go_on(url: str, part: Path, progress: IO[str] | None) -> None:
    tag_file = _tag_file(part)
    start = part.stat().st_size if part.exists() and tag_file.exists() else 0
    request = urllib.request.Request(url)  # noqa: S310 - the server has given it
    if start:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", tag_file.read_text())
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers["Content-Range"] == f"bytes */{start}":
            return  # `part` is already complete
        raise
    with response:
        size = int(response.headers["Content-Length"])
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"])
            if match is None or int(match[1]) != start:
                raise ConnectionError(f"the server answers with {response.headers['Content-Range']}")
            size = int(match[2])
        else:
            start = 0
        tag_file.write_text(response.headers["ETag"] or "")
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            while data := response.read(_PIECE_BYTES):
                file.write(data)
                if progress is not None:
                    progress.write(f"\r{size_text(file.tell())} of {size_text(size)} ")
            if progress is not None:
                progress.write("\n")
            if file.tell() != size:
                raise ConnectionError(f"{file.tell()} of {size} bytes came")


def _tag_file(part: Path) -> Path:
    """File with the ETag of the archive to which `part` belongs."""
    return part.parent / f"{part.name}.etag"


def check(archive: Path, sums: Mapping[str, str]) -> None:
    """Raises Damaged, naming a file, unless the archive holds exactly the files in `sums`."""
    _read(archive, sums, None)


def unpack(archive: Path, out: Path, sums: Mapping[str, str]) -> None:
    """Unpacks the archive to the folder `out`, which appears complete or not at all. Raises Damaged."""
    folder = out.parent / f"{out.name}.unpacking"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        _read(archive, sums, folder)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(archive: Path, sums: Mapping[str, str], folder: Path | None) -> None:
    """Compares every file of the archive with its SHA-256 in `sums`, and copies it to `folder` if one is given. Raises
    Damaged."""
    missing = dict(sums)
    try:
        with tarfile.open(archive, mode="r:") as tar:
            for member in tar:
                expected = missing.pop(member.name, None)
                source = tar.extractfile(member) if member.isreg() else None
                if expected is None or source is None or "/" in member.name:
                    raise Damaged(f"the archive holds {member.name}, which is not a file of the checkpoint")
                if _copy(source, None if folder is None else folder / member.name) != expected:
                    raise Damaged(f"{member.name} is damaged: its SHA-256 is not {expected}")
    except tarfile.TarError as error:
        raise Damaged(f"the downloaded file is not a tar archive ({error})") from None
    if missing:
        raise Damaged(f"the archive lacks {', '.join(missing)}")


def _copy(source: IO[bytes], path: Path | None) -> str:
    """Copies `source` to the file, if one is given. Returns its SHA-256."""
    digest: Any = hashlib.sha256()
    destination = None if path is None else path.open("xb")
    try:
        while data := source.read(_PIECE_BYTES):
            digest.update(data)
            if destination is not None:
                destination.write(data)
    finally:
        if destination is not None:
            destination.close()
    return digest.hexdigest()
