"""The HTTP server: runs the application until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator

import uvicorn

from gateway.config import GatewayConfig
from gateway.gateway import StartError
from gateway.http import connections
from gateway.http.app import create_app
from tinsmith.allocator import exempt_from_collections
from tinsmith.rpc.tls import warn_of_clear_text
from tinsmith.tasks import cancel_all

logger = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256
"""Number of file descriptors for everything but HTTP connections: the database, the services, the log."""
_TELL_INTERVAL_S = 0.05
"""Pause before connections are told to end once more, in seconds."""


class GatewayServer(uvicorn.Server):
    """A uvicorn server without signal handlers; it ends when `stop` is called."""

    def __init__(self, config: GatewayConfig) -> None:
        self.app = create_app(config)
        self._config = config
        super().__init__(
            uvicorn.Config(
                self.app,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http=connections.bounded(config),
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # the setting public_url says what clients see
                timeout_keep_alive=120,  # longer than proxies', so that the proxy closes an idle connection, not we
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        watching = asyncio.create_task(connections.watch(self.server_state.connections, self._config))
        try:
            await super().serve(sockets)
        finally:
            await cancel_all([watching])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down, and tells all connections to end until they have. uvicorn tells them once, and would wait for a
        connection that was being accepted at that moment."""
        telling = asyncio.create_task(self._tell_all_to_end())
        try:
            await super().shutdown(sockets)
        finally:
            await cancel_all([telling])

    async def _tell_all_to_end(self) -> None:
        while True:
            await asyncio.sleep(_TELL_INTERVAL_S)
            for connection in list(self.server_state.connections):
                connection.shutdown()

    def stop(self) -> None:
        """Stops the server: long polls are answered now, and running requests have two seconds."""
        self.app.state.gateway.futures.end_polls()
        self.should_exit = True

    @property
    def bound_port(self) -> int:
        """The port that the server listens on, also when the configured port is 0."""
        return self.servers[0].sockets[0].getsockname()[1]


def allow_descriptors(num_connections: int) -> None:
    """Raises the limit of open files for this number of connections; logs a warning when it may not be high enough."""
    wanted = num_connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("max_connections %d needs %d open files, and %d are allowed", num_connections, wanted, allowed)


async def serve(config: GatewayConfig, *, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises SystemExit when the gateway cannot start."""
    allow_descriptors(config.max_connections)
    if config.tls_cert is None:
        remedy = "set tls_cert and tls_key, or have a proxy on this machine do it"
        warn_of_clear_text(config.host, what=f"HTTP at {config.host}:{config.port}", remedy=remedy)
    server = GatewayServer(config)
    gateway = server.app.state.gateway
    try:
        await gateway.start()
    except StartError as error:
        raise SystemExit(str(error)) from None
    exempt_from_collections()
    try:
        await _serve(server, stop=stop)
    finally:
        await gateway.stop()
    if not server.started:
        raise SystemExit(f"cannot listen on {config.host}:{config.port}; the log has the cause")


async def _serve(server: GatewayServer, *, stop: asyncio.Event) -> None:
    async def run() -> None:
        with contextlib.suppress(SystemExit):  # uvicorn could not start, and has logged the cause
            await server.serve()

    serving = asyncio.create_task(run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.stop()
    await serving
