"""A download that is cut off goes on where it was; what is not what was stored is not written."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tinsmith_cli import checkpoint_export, main

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 4000}
PATH = "tinker://s:train:0/weights/one"


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@dataclass
class Server:
    url: str = ""
    archive: bytes = tar(FILES)
    tag: str = '"1"'
    cuts: list[int] = field(default_factory=list)
    """Bytes after which each download is cut off, the next first."""
    starts: list[int] = field(default_factory=list)
    """Where each download began."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    files = [{"name": name, "size_bytes": len(FILES[name]), "sha256": digest} for name, digest in sums.items()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/archive"):
                return self.reply(302, json.dumps({"url": f"{state.url}/download"}).encode(), Location="/download")
            if self.path != "/download":
                optimizer = {"name": "optimizer.safetensors", "size_bytes": 1, "sha256": "0"}
                return self.reply(200, json.dumps({"files": [*files, optimizer]}).encode())
            start, size = 0, len(state.archive)
            if "Range" in self.headers and self.headers["If-Range"] == state.tag:
                start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            state.starts.append(start)
            if start == size:
                return self.reply(416, b"", **{"Content-Range": f"bytes */{size}"})
            extra = {"ETag": state.tag} | ({"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {})
            cut = state.cuts.pop(0) if state.cuts else size
            self.reply(206 if start else 200, state.archive[start : start + cut], size=size - start, **extra)

        def reply(self, status: int, content: bytes, *, size: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) if size is None else size))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        state.url = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setenv("TINKER_BASE_URL", state.url)
        monkeypatch.setattr(checkpoint_export.time, "sleep", lambda _: None)
        yield state
        http.shutdown()


def export(out: Path) -> int:
    return main(["checkpoints", "export", PATH, str(out)])


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_goes_on_after_each_cut(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000, 500_000, 10]
    assert export(tmp_path / "out") == 0
    assert server.starts == [0, 1000, 501_000, 501_010]
    assert written(tmp_path / "out") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_same_command_goes_on_where_the_last_one_gave_up(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cuts = [1000, 0, 0, 0, 0, 0]
    assert export(tmp_path / "out") == 2
    assert "repeat the command to resume it" in capsys.readouterr().err
    server.starts.clear()
    assert export(tmp_path / "out") == 0
    assert server.starts == [1000]
    assert written(tmp_path / "out") == FILES


def test_a_checkpoint_replaced_meanwhile_is_loaded_from_its_beginning(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000, 0, 0, 0, 0, 0]
    assert export(tmp_path / "out.tar") == 2
    server.tag = '"2"'
    server.starts.clear()
    assert export(tmp_path / "out.tar") == 0
    assert server.starts == [0]
    assert (tmp_path / "out.tar").read_bytes() == server.archive


def test_one_that_is_complete_is_not_loaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "out.part").write_bytes(server.archive)
    (tmp_path / "out.part.etag").write_text(server.tag)
    assert export(tmp_path / "out") == 0
    assert server.starts == [len(server.archive)]
    assert written(tmp_path / "out") == FILES


CHANGED = {**FILES, "adapter_config.json": b"[]"}


@pytest.mark.parametrize(
    ("archive", "error"),
    [
        (tar(CHANGED), "adapter_config.json is damaged: its SHA-256 is not"),
        (tar({"adapter_config.json": b"{}"}), "the archive lacks adapter_model.safetensors"),
        (tar({**FILES, "other": b"x"}), "the archive holds other, which is not a file of the checkpoint"),
        (b"no archive at all", "the downloaded file is not a tar archive"),
    ],
)
@pytest.mark.parametrize("out", ["out", "out.tar"])
def test_bytes_that_differ_from_those_stored_are_not_written(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], archive: bytes, error: str, out: str
) -> None:
    server.archive = archive
    assert export(tmp_path / out) == 2
    shown = capsys.readouterr().err
    assert error in shown
    assert "nothing was written" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["weights/one", "tinker://s:train:0", "tinker://s:train:0/weights/one/two"])
def test_an_invalid_path_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    assert main(["checkpoints", "export", path, str(tmp_path / "out")]) == 2
    assert f"{path!r} is not a path of a checkpoint" in capsys.readouterr().err
