"""Finds free ports for services of this machine."""

from __future__ import annotations

import random
import socket
import sys
from collections import deque

_BELOW_EPHEMERAL = range(20_000, 32_768)
"""Ports that Linux and macOS do not give to outgoing connections. An ephemeral port could be taken before the service
binds it."""
_MOST_HELD = 64
_held: deque[socket.socket] = deque()


def free_ports(count: int) -> list[int]:
    """`count` different ports on 127.0.0.1 that are free now. Raises OSError if there are too few.

    On Linux the last 64 returned ports are reserved: no other call, in any process of this machine, returns them while
    this process lives. Otherwise a service that starts many seconds later could find its port taken.
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
    """Reserves the port by an abstract socket, which ends with this process and leaves no file. Returns False if
    another process has reserved the port."""
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
