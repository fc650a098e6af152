"""python -m gateway"""

from __future__ import annotations

import logging

import uvloop

from gateway.config import GatewayConfig
from gateway.http.server import serve
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.server import stop_event
from tinsmith.rpc.settings import read_settings

logger = logging.getLogger(__name__)


async def run(config: GatewayConfig) -> None:
    async with stop_event() as stop:
        await serve(config, stop=stop)


def main() -> None:
    config = read_settings(GatewayConfig)
    logs.setup(config.log_level, config.log_format)
    if config.tracing:
        tracing.setup("gateway")
    logger.info("starting with %s", config)
    try:
        uvloop.run(run(config))
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    main()
