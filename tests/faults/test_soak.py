"""The short form of soak.py: a minute, each service killed now and then. The long form measures growth, too."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.faults import soak
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_a_minute_of_everything_with_random_kills(tmp_path: Path) -> None:
    assert soak.main(["--minutes", "1", "--kill-every", "6", "12", "--folder", str(tmp_path)]) == 0


class Refusal(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(400)

    do_POST = do_GET

    def log_message(self, format: str, *_: object) -> None:
        """Nothing is said."""


@pytest.fixture
def refusing() -> Iterator[str]:
    """Address of a server that every request fails at."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_error_that_a_client_saw_before_it_was_killed_is_reported(refusing: str) -> None:
    client = soak.ClientProcess(refusing, seed=0)
    wait_until(lambda: bool(client.said()), what="it has failed")
    assert all("Traceback" in error for error in client.kill())


def test_a_kill_itself_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = soak.ClientProcess(f"http://127.0.0.1:{silent.getsockname()[1]}", seed=0)
        connection, _ = silent.accept()
        with connection:
            assert client.kill() == []


def test_a_client_that_ends_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    client = soak.ClientProcess("", seed=0)
    errors, _ = client.wait(timeout_s=60)
    assert errors == ["a client ended with status 1"]
    assert client.kill() == ["a client ended by itself, with status 1"]
