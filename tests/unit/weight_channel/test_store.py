"""The rendezvous of a trainer and its samplers, which has no keys: who can reach it."""

from __future__ import annotations

import os

import psutil
import pytest

from tinsmith.weight_channel.group import join_store, open_store


def listening() -> set[tuple[str, int]]:
    return {(c.laddr.ip, c.laddr.port) for c in psutil.Process(os.getpid()).net_connections() if c.status == "LISTEN"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_listens_on_the_given_address_alone(host: str) -> None:
    before = listening()
    store = open_store(host, timeout_s=5)
    new = listening() - before
    assert [port for _, port in new] == [store.port]
    assert {ip for ip, _ in new} <= {"127.0.0.1", "::1"}
    other = join_store(host, store.port, timeout_s=5)
    other.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(RuntimeError, match=f"channel_host: '{host}' is no address of this machine"):
        open_store(host, timeout_s=5)
