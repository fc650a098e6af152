"""Ports for services of this machine."""

from __future__ import annotations

import random
import socket
import sys
from collections import deque

_BELOW_EPHEMERAL = range(20_000, 32_768)
"""Linux and macOS give others to connections that are made: one of those could be taken before the service binds it."""
_MOST_HELD = 64
_held: deque[socket.socket] = deque()


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that are free now and all different. Raises OSError when there are not so many.

    On Linux no other call gives the same ones, in any process of this machine, while this process lives: what starts
    many seconds later would else find them taken. The last 64 are remembered.
    """
    found: list[int] = []
    for port in random.sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)):
        if len(found) == count:
            break
        if _is_free(port) and _hold(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"there are no {count} free ports in {_BELOW_EPHEMERAL.start} to {_BELOW_EPHEMERAL.stop - 1}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _hold(port: int) -> bool:
    """By a name that goes with this process, and lies in no folder."""
    if sys.platform != "linux":
        return True
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0tinsmith-port-{port}")
    except OSError:
        held.close()
        return False
    _held.append(held)
    if len(_held) > _MOST_HELD:
        _held.popleft().close()
    return True
