"""A network between machines that are network namespaces: frames are late, some are lost, and a machine can be cut off.

The kernel's own tool for this, `tc netem`, is a module that not every kernel has. So a process of its own is the switch
between the machines, each of which has a TAP device of it: `python -m tests.faults.networks DELAY_S LOSS NAMESPACE...`.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from tests.faults.cables import ip

HERE = "here"
"""In the place of a namespace: the one of the tests."""
MTU = 9000
"""As in a data centre. TCP's rate with losses is proportional to it."""
_DEVICE = "eth0"
_TUNSETIFF, _TAP, _WITHOUT_INFO = 0x400454CA, 0x0002, 0x1000
_PROBE_S = 5.0
"""TCP sends a lost first segment again after 1 s, and once more after 3 s."""
_BROADCAST = 1
"""Bit of the first byte of a MAC address."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A namespace with an address of its own."""

    namespace: str
    address: str

    @property
    def within(self) -> Sequence[str]:
        """Before a command that is to run there."""
        return ("ip", "netns", "exec", self.namespace)

    def is_reached(self) -> bool:
        """Whether a frame comes through to the machine and back: nobody listens at the port, and it says so."""
        with socket.socket() as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect((self.address, 9))
            except ConnectionRefusedError:
                return True
            except OSError:  # includes TimeoutError
                return False
        raise AssertionError(f"something listens at port 9 of {self.address}")


class Network:
    def __init__(self, switch: subprocess.Popen[str], machines: Sequence[Machine]) -> None:
        self.machines = machines
        self._switch = switch

    def cut(self, machine: Machine) -> None:
        """From now on all frames from and to the machine are lost; its own interface stays up."""
        self._tell(f"cut {machine.namespace}")

    def mend(self, machine: Machine) -> None:
        self._tell(f"mend {machine.namespace}")

    def _tell(self, line: str) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()


@contextmanager
def network(count_: int, *, delay_s: float, loss: float) -> Iterator[Network]:
    """Machines that reach each other, and that the tests reach, through a network on which every frame takes `delay_s`
    and of which the part `loss` is lost. Raises OSError for who may not lay one."""
    prefix = f"198.18.{os.getpid() % 256}"  # for tests of networks, says RFC 2544
    machines = [Machine(f"tsm{os.getpid()}n{n}", f"{prefix}.{n + 2}") for n in range(count_)]
    made: list[str] = []
    switch: subprocess.Popen[str] | None = None
    try:
        try:
            for machine in machines:
                ip("netns", "add", machine.namespace)
                made.append(machine.namespace)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise PermissionError(f"no network namespaces: {reason}") from None
        command = [sys.executable, "-m", "tests.faults.networks", str(delay_s), str(loss), f"tst{os.getpid()}", *made]
        switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert switch.stdout is not None
        if switch.stdout.readline() != "switching\n":
            raise PermissionError("the switch has no TAP devices (/dev/net/tun)")
        ip("addr", "add", f"{prefix}.1/24", "dev", f"tst{os.getpid()}")
        ip("link", "set", f"tst{os.getpid()}", "mtu", str(MTU), "up")
        for machine in machines:
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", _DEVICE)
            ip("-n", machine.namespace, "link", "set", _DEVICE, "mtu", str(MTU), "up")
            ip("-n", machine.namespace, "link", "set", "lo", "up")
        yield Network(switch, machines)
    finally:
        if switch is not None:
            switch.kill()
            switch.communicate()
        for namespace in made:
            ip("netns", "del", namespace)


# The switch


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _TAP | _WITHOUT_INFO, b""))
    return descriptor


def _switch(delay_s: float, loss: float, here: str, namespaces: Sequence[str]) -> None:
    ports = {HERE: _tap(here)}
    for number, namespace in enumerate(namespaces):
        name = f"{here}n{number}"
        ports[namespace] = _tap(name)
        ip("link", "set", name, "netns", namespace, "name", _DEVICE)
    print("switching", flush=True)
    rng, numbers = random.Random(0), count()
    port_of: dict[bytes, str] = {}
    cut: set[str] = set()
    waiting: list[tuple[float, int, str, bytes]] = []
    selector = selectors.DefaultSelector()
    for name, descriptor in ports.items():
        selector.register(descriptor, selectors.EVENT_READ, name)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    orders = b""
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(pause_s):
            if key.data is None:
                if not (read := os.read(sys.stdin.fileno(), 4096)):
                    return
                *lines, orders = (orders + read).split(b"\n")
                for line in lines:
                    verb, name = line.decode().split()
                    (cut.add if verb == "cut" else cut.discard)(name)
                continue
            source: str = key.data
            for frame in _frames(ports[source]):
                port_of[frame[6:12]] = source
                others = [name for name in ports if name != source]
                known = port_of.get(frame[:6])
                targets = others if frame[0] & _BROADCAST or known is None else [known]
                for target in targets:
                    if not cut & {source, target} and rng.random() >= loss:
                        heapq.heappush(waiting, (time.monotonic() + delay_s, next(numbers), target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            if target not in cut:
                with suppress(OSError):  # the interface is down, or full: one more frame is lost
                    os.write(ports[target], frame)


def _frames(descriptor: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(descriptor, MTU + 64)
        except OSError:  # none left, or the interface is down
            return


if __name__ == "__main__":
    _switch(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
