"""Waits until services answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

from tinsmith.rpc.addresses import read_addresses
from tinsmith.rpc.auth import host_of
from tinsmith.rpc.channel import connect, wait_serving
from tinsmith.rpc.tls import Certificates, pinned

_HEALTH_TIMEOUT_S = 2.0
"""Longest wait for one answer of a gateway, in seconds."""


async def wait_grpc(address: str, certificates: Certificates | None = None) -> None:
    """Waits until a gRPC service is healthy, without a limit."""
    async with connect(address, certificates=certificates) as channel:
        await wait_serving(channel, timeout_s=float("inf"))  # the supervisor sets the limit


async def wait_trainers(services_file: Path, host: str, certificates: Certificates | None = None) -> None:
    """Waits for the trainers on the machine `host`, at which the ranks of this machine join those of other machines."""
    while True:
        trainers = read_addresses(services_file).trainers
        if found := [address for address in trainers if host_of(address).strip("[]") == host]:
            break
        await asyncio.sleep(0.5)
    for address in found:
        await wait_grpc(address, certificates)


async def wait_gateway(host: str, port: int, tls_cert: Path | None = None, *, alone: bool = False) -> None:
    """Waits until a gateway is ready. `alone`: waits only until the gateway answers, even if it still waits for other
    services."""
    context = None if tls_cert is None else pinned(tls_cert)
    statuses = (b" 200 ", b" 503 ") if alone else (b" 200 ",)
    while True:
        if await _is_healthy(_reachable(host), port, context, statuses):
            return
        await asyncio.sleep(0.05)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound


async def _is_healthy(host: str, port: int, context: ssl.SSLContext | None, statuses: Sequence[bytes]) -> bool:
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
    except OSError:  # includes TimeoutError
        return False
    return any(status in status_line for status in statuses)
