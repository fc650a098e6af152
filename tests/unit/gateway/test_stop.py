"""SIGTERM to a gateway in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith_cli.ports import free_ports

HANGS = """
import asyncio

import gateway.__main__ as gateway
from gateway.gateway import Gateway


async def deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


async def stop(self):
    await asyncio.create_task(deaf())


Gateway.stop = stop
gateway._LONGEST_STOP_S = 3.0  # on a busy machine it takes over 0.5 s until Gateway.stop is called at all
gateway.main()
"""


def stopped(tmp_path: Path, *command: str) -> tuple[int, str]:
    """Status and output of one that is stopped once it serves."""
    (port,) = free_ports(1)
    flags = ["--port", str(port), "--state-dir", str(tmp_path), "--trainers", "[]", "--samplers", "[]"]
    with subprocess.Popen(
        [sys.executable, *command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "Uvicorn running" in line:
                process.send_signal(signal.SIGTERM)
        return process.wait(), output


def test_it_says_that_it_has_stopped(tmp_path: Path) -> None:
    status, output = stopped(tmp_path, "-m", "gateway")
    assert status == 0, output
    assert '"message": "stopped"' in output


@pytest.mark.slow
def test_a_stop_that_hangs_is_cut_short_and_the_log_says_what_it_waited_for(tmp_path: Path) -> None:
    status, output = stopped(tmp_path, "-c", HANGS)
    assert status == 1, output
    assert "not stopped after 3 s, so it is cut short" in output
    assert "deaf()" in output
    assert "most recent call first" in output
