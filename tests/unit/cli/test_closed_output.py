"""A command whose output nobody reads to its end, as in `tinsmith keys list | head -1`, or that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tinsmith_cli import main
from tinsmith_cli.up import _report
from trainer_service.durability.journal import Journal
from trainer_service.metrics import Metrics

CHECKPOINT = {
    "tinker_path": "tinker://s:train:0/weights/a",
    "size_bytes": 1,
    "time": "2026-01-01T00:00:00Z",
    "public": False,
    "expires_at": None,
    "files": [{"name": "adapter_model.safetensors", "size_bytes": 1, "sha256": "0"}],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server with one checkpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_list = "/checkpoints?" in self.path
            answer = {"checkpoints": [CHECKPOINT], "cursor": {"total_count": 1}} if is_list else CHECKPOINT
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a key and a journal."""
    folder = tmp_path_factory.mktemp("state")
    assert main(["keys", "create", "--owner", "ada", "--state-dir", str(folder)]) == 0
    Journal(
        folder / "journal.sqlite", max_bytes=1 << 20, result_retention_s=0.0, metrics=Metrics(CollectorRegistry())
    ).close()
    return folder


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        ("keys list", ""),
        ("keys list", "1"),
        ("journal show", ""),
        ("checkpoints list", "1"),
        (f"checkpoints show {CHECKPOINT['tinker_path']}", ""),
    ],
)
def test_it_ends_without_a_word(command: str, unbuffered: str, state_dir: Path, url: str) -> None:
    argv = command.split()
    argv += ["--base-url", url] if argv[0] == "checkpoints" else ["--state-dir", str(state_dir)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith_cli", *argv],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},  # each line is written at once, or all at the end
        timeout=120,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_named(state_dir: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tinsmith_cli", "keys", "list", "--state-dir", str(state_dir)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr == "tinsmith: the output cannot be written: [Errno 28] No space left on device\n"


def test_up_goes_on_when_its_report_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report about one dead service that cannot be written must not end the other services."""
    full = open("/dev/full", "w")  # noqa: SIM115 - its buffer cannot be written when it is closed either
    monkeypatch.setattr(sys, "stdout", full)
    for _ in range(2):
        _report("gateway was killed by SIGKILL")
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()
