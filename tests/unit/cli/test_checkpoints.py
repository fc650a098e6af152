"""`tinsmith checkpoints` against a small HTTP server."""

import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tinsmith_cli import main


@dataclass
class Server:
    url: str = ""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    status: int = 200
    answer: bytes = json.dumps({"path": "tinker://s:train:0/weights/one", "notes": ["it was small"]}).encode()
    query: dict[str, list[str]] = field(default_factory=dict)
    key: str | None = None
    body: bytes = b""
    path: str = ""
    """Path of the certificate that was asked for."""
    certificate: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/certificate"):
                state.path, state.key = self.path, self.headers.get("X-API-Key")
                self.reply(state.status, json.dumps(state.certificate).encode())
                return
            models = [{"model_name": name, "trainable": True} for name in state.models]
            self.reply(200, json.dumps({"supported_models": models}).encode())

        def do_POST(self) -> None:
            state.query = parse_qs(urlsplit(self.path).query)
            state.key = self.headers.get("X-API-Key")
            state.body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(state.status, state.answer)

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        state.url = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setenv("TINKER_BASE_URL", state.url)
        monkeypatch.delenv("TINKER_API_KEY", raising=False)
        yield state
        http.shutdown()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "blob")  # as in the hub's cache
    (folder / "README.md").write_text("not sent")
    return folder


def run(*arguments: object) -> int:
    return main(["checkpoints", "import", *map(str, arguments)])


def test_a_folder_is_sent_as_an_archive_and_its_path_printed(
    server: Server, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(adapter, "--name", "one", "--ttl", "2h", "--api-key", "tml-x") == 0
    assert capsys.readouterr().out == "tinker://s:train:0/weights/one\nnote: it was small\n"
    assert server.query == {"base_model": ["tiny"], "name": ["one"], "ttl_seconds": ["7200"]}
    assert server.key == "tml-x"
    with tarfile.open(fileobj=io.BytesIO(server.body)) as tar:
        assert [(member.name, member.isreg(), member.size) for member in tar] == [
            ("adapter_config.json", True, 2),
            ("adapter_model.safetensors", True, 7),
        ]


def test_an_archive_is_sent_as_it_is(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"whatever")
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert run(tmp_path / "a.tar.gz", "--name", "one", "--base-model", "big model") == 0
    assert (server.body, server.key, server.query["base_model"]) == (b"whatever", "tml-env", ["big model"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none", "--name", "x"], "none: there is no such folder or archive"),
        ([".", "--name", "x"], "it needs adapter_config.json and adapter_model.safetensors or adapter_model.bin"),
        (["adapter", "--name", "x", "--base-url", "ftp://x"], "--base-url: 'ftp://x' does not begin with http"),
        (["adapter", "--name", "x", "--base-url", "http://127.0.0.1:1"], "no Tinsmith answers at http://127.0.0.1:1"),
    ],
)
def test_an_error_is_one_line(
    server: Server, adapter: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(adapter.parent)
    assert run(*arguments) == 2
    line = capsys.readouterr().err
    assert error in line
    assert line.startswith("tinsmith: ")
    assert line.count("\n") == 1


def test_a_time_that_is_none_is_refused(server: Server, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(adapter, "--name", "x", "--ttl", "soon")
    assert "'soon' is not a time such as 3600, 90m, 12h or 30d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'{"detail": "tensor \'x\': DoRA cannot be imported"}', "the server refused it: tensor 'x': DoRA"),
        (b"<html>", "the server refused it: 400 Bad Request"),
    ],
)
def test_a_refusal_of_the_server_is_said(
    server: Server, adapter: Path, capsys: pytest.CaptureFixture[str], answer: bytes, error: str
) -> None:
    server.status, server.answer = 400, answer
    assert run(adapter, "--name", "x") == 2
    assert error in capsys.readouterr().err


def test_with_several_models_one_must_be_named(
    server: Server, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ["tiny", "big"]
    assert run(adapter, "--name", "x") == 2
    assert "--base-model: name one of tiny, big" in capsys.readouterr().err


CERTIFICATE: dict[str, Any] = {
    "version_id": "s:train:0@5",
    "passed": True,
    "limit": 0.01,
    "mean_limit": 0.003,
    "change": 0.2,
    "samplers": [
        {
            "address": "10.0.0.7:8002",
            "engine": "torch",
            "max_gap": 2.5e-6,
            "mean_gap": 6e-7,
            "num_tokens": 60,
            "applied": "yes",
            "factor": 1.0,
        }
    ],
    "weights_hash": "c0ffee",
    "num_bytes": 4096,
    "publish_seconds": 0.0204,
    "issued_at": "2023-11-14T22:13:20.500000Z",
}


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("tinker://s:train:0/sampler_weights/one", "training_runs/s:train:0/checkpoints/sampler_weights/one"),
        ("s:sample:0", "samplers/s:sample:0"),
    ],
)
def test_a_certificate_is_shown(server: Server, capsys: pytest.CaptureFixture[str], version: str, path: str) -> None:
    server.certificate = CERTIFICATE
    assert main(["checkpoints", "certificate", version, "--api-key", "tml-x"]) == 0
    assert (server.path, server.key) == (f"/api/v1/{path}/certificate", "tml-x")
    assert capsys.readouterr().out.splitlines() == [
        "version    s:train:0@5, XXH3-128 c0ffee",
        "published  4096 bytes in 0.020 s",
        "issued     2023-11-14T22:13:20.500000Z",
        "limit      0.01 nats, of the mean 0.003 nats",
        "sampler    10.0.0.7:8002 (torch): largest gap 2.50e-06 nats, mean 6.00e-07, 60 tokens",
        "           it applies the version (factor 1.00)",
        "passed",
    ]
    assert main(["checkpoints", "certificate", version, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == CERTIFICATE


def test_one_that_was_not_passed_is_the_exit_status(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    gap = {**CERTIFICATE["samplers"][0], "max_gap": "inf"}
    server.certificate = {**CERTIFICATE, "passed": False, "samplers": [gap]}
    assert main(["checkpoints", "certificate", "s:sample:0"]) == 1
    assert "largest gap inf nats" in (shown := capsys.readouterr().out)
    assert shown.endswith("NOT passed: a gap is above a limit, or the version is not applied as it should be\n")
    server.certificate = {**CERTIFICATE, "limit": None, "samplers": []}
    assert main(["checkpoints", "certificate", "s:sample:0"]) == 0
    shown = capsys.readouterr().out
    assert "limit      none" in shown
    assert "none has scored the version" in shown


def test_the_command_line_imports_no_torch() -> None:
    code = "import sys, tinsmith_cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
