"""A gateway of its own, before the services of the shared stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.stack import Stack


@contextmanager
def own_gateway(stack: Stack, state_dir: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_TRAINERS": json.dumps(stack.trainers),
        "GATEWAY_SAMPLERS": json.dumps(stack.samplers),
        "GATEWAY_STATE_DIR": str(state_dir),
        "GATEWAY_LONG_POLL_S": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "gateway"], env={**os.environ, **env, **settings})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        assert process.wait(15) == 0
