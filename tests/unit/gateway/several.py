"""Several gateways behind one database, and a client whose requests go to one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.http.server import GatewayServer
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tinsmith_cli.ports import free_ports


class Several:
    """The gateways of one trainer and one sampler."""

    def __init__(self, backends: Stack, state_dir: Path, *, database_url: str) -> None:
        self.backends = backends
        self._state_dir = state_dir
        self._database_url = database_url
        self.servers: dict[int, GatewayServer] = {}
        """By port."""
        self._serving: dict[int, asyncio.Task[None]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.servers]

    def gateway(self, port: int) -> Gateway:
        return self.servers[port].app.state.gateway

    async def start(self, count: int = 2, **settings: Any) -> None:
        """All at the same time."""
        ports = free_ports(count)
        await asyncio.gather(*(self.start_one(port, **settings) for port in ports))

    async def start_one(self, port: int, **settings: Any) -> None:
        url = f"http://127.0.0.1:{port}"
        config = GatewayConfig(
            port=port,
            peer_url=url,
            trainers=[f"127.0.0.1:{self.backends.trainer_backend.port}"],
            samplers=[f"127.0.0.1:{self.backends.sampler_backend.port}"],
            state_dir=self._state_dir,
            database_url=self._database_url,
            **{"long_poll_s": 5.0, "submit_timeout_s": 2.0, "reap_interval_s": 0.2, **settings},
        )
        server = GatewayServer(config)
        await server.app.state.gateway.start()
        self._serving[port] = asyncio.create_task(server.serve())
        while not server.started:
            assert not self._serving[port].done(), self._serving[port].result()
            await asyncio.sleep(0.01)
        self.servers[port] = server
        clients = server.app.state.gateway.clients
        await clients.settle(lambda: clients.serving(BASE_MODEL))
        await server.app.state.gateway.clients.samplers.wait(BASE_MODEL)

    async def stop_one(self, port: int, *, leaves: bool = True) -> None:
        """With `leaves` false the others are not told, as after kill -9."""
        server = self.servers.pop(port)
        gateway = server.app.state.gateway
        if not leaves:
            for task in gateway.tasks:
                task.cancel()

            async def nothing() -> None:
                pass

            gateway.peers.stop = nothing
        server.stop()
        await self._serving.pop(port)
        await gateway.stop()

    async def stop(self) -> None:
        for port in list(self.servers):
            await self.stop_one(port)


class _InTurn(httpx.AsyncBaseTransport):
    """Each request to the next of the gateways that run."""

    def __init__(self, several: Several) -> None:
        self._several = several
        self._http = httpx.AsyncHTTPTransport()
        self._count = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        ports = list(self._several.servers)
        self._count += 1
        request.url = request.url.copy_with(port=ports[self._count % len(ports)])
        return await self._http.handle_async_request(request)

    async def aclose(self) -> None:
        await self._http.aclose()


def client_of(several: Several) -> Client:
    return Client(
        base_url="http://127.0.0.1", transport=_InTurn(several), timeout=30, headers={"x-api-key": "tml-test"}
    )
