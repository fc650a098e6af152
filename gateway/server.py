"""Serves the application until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import uvicorn

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.gateway import StartError

logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """uvicorn, without its signal handlers: it ends when `stop` is called."""

    def __init__(self, config: GatewayConfig) -> None:
        self.app = create_app(config)
        super().__init__(
            uvicorn.Config(
                self.app,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # the setting public_url says what clients see
                timeout_keep_alive=120,  # longer than clients keep idle connections, so that they close them
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Long polls are answered now; running requests have two seconds."""
        self.app.state.gateway.futures.end_polls()
        self.should_exit = True

    @property
    def bound_port(self) -> int:
        """The port, also when the configured one is 0."""
        return self.servers[0].sockets[0].getsockname()[1]


async def serve(config: GatewayConfig, *, stop: asyncio.Event) -> None:
    """Returns after `stop` is set. Raises SystemExit when the gateway cannot start."""
    server = GatewayServer(config)
    gateway = server.app.state.gateway
    try:
        await gateway.start()
    except StartError as error:
        raise SystemExit(str(error)) from None
    try:
        await _serve(server, stop=stop)
    finally:
        await gateway.stop()
    if not server.started:
        raise SystemExit(f"cannot listen on {config.host}:{config.port}; the log says why")


async def _serve(server: GatewayServer, *, stop: asyncio.Event) -> None:
    async def run() -> None:
        with contextlib.suppress(SystemExit):  # how uvicorn says that it could not start; it has logged the cause
            await server.serve()

    serving = asyncio.create_task(run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.stop()
    await serving
