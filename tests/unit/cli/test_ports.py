"""Ports that are given to one are given to nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from tinsmith_cli import ports

ANOTHER = """
from tinsmith_cli import ports
ports._BELOW_EPHEMERAL = range({start}, {stop})
print(ports.free_ports(1)[0])
"""


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[socket.socket]]:
    made: deque[socket.socket] = deque()
    monkeypatch.setattr(ports, "_held", made)
    yield made
    for one in made:
        one.close()


def test_a_given_port_is_given_to_no_other_process_though_nobody_has_bound_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tests that run beside this one take ports below 32,768, and outgoing connections take ports up to 60,999.
    first = max(port for port in range(61_000, 65_533) if all(ports._is_free(port + n) for n in range(3)))
    monkeypatch.setattr(ports, "_BELOW_EPHEMERAL", range(first, first + 3))
    given = set(ports.free_ports(2))
    (left,) = {first, first + 1, first + 2} - given
    another = [sys.executable, "-c", ANOTHER.format(start=first, stop=first + 3)]
    assert int(subprocess.run(another, check=True, capture_output=True).stdout) == left
    assert ports.free_ports(1) == [left], "the other process has ended"
    with pytest.raises(OSError, match="no 1 free ports"):
        ports.free_ports(1)


def test_few_are_remembered(held: deque[socket.socket]) -> None:
    for _ in range(3):
        ports.free_ports(ports._MOST_HELD // 2)
    assert len(held) == ports._MOST_HELD
