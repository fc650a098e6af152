"""Ports for services of this machine."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_768)
"""Linux and macOS give others to connections that are made: one of those could be taken before the service binds it."""


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that are free now and all different. Raises OSError when there are not so many."""
    found: list[int] = []
    for port in random.sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)):
        if len(found) == count:
            break
        if _is_free(port):
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
