"""A cable that a test can pull: what lies at its other end is silent then, as a machine that has lost its power."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Cable:
    """To a network namespace of its own."""

    def __init__(self, namespace: str, link: str, address: str) -> None:
        self.address = address
        """Address of the other end."""
        self.within: Sequence[str] = ("ip", "netns", "exec", namespace)
        """Before a command that is to run there."""
        self._link = link

    def pull(self) -> None:
        ip("link", "set", self._link, "down")

    def plug(self) -> None:
        ip("link", "set", self._link, "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def cable() -> Iterator[Cable]:
    """Raises OSError for who may not lay one."""
    number = os.getpid()
    namespace, here, there = (f"{name}{number}" for name in ("tinsmith", "tsa", "tsb"))
    network = f"198.18.{number % 256}"  # for tests of networks, says RFC 2544
    try:
        ip("netns", "add", namespace)
    except subprocess.CalledProcessError as error:
        raise PermissionError(error.stderr.decode().strip()) from None
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", namespace)
        ip("addr", "add", f"{network}.1/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", namespace, "addr", "add", f"{network}.2/24", "dev", there)
        for one in ("lo", there):
            ip("-n", namespace, "link", "set", one, "up")
        yield Cable(namespace, here, f"{network}.2")
    finally:
        ip("netns", "del", namespace)
