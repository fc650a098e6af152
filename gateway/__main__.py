"""python -m gateway"""

from __future__ import annotations

import logging

import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from gateway.config import GatewayConfig
from gateway.server import serve
from tinsmith.rpc import logs
from tinsmith.rpc.server import stop_event

logger = logging.getLogger(__name__)


async def run(config: GatewayConfig) -> None:
    async with stop_event() as stop:
        await serve(config, stop=stop)


def main() -> None:
    try:
        config = CliApp.run(GatewayConfig)
    except ValidationError as error:
        raise SystemExit(f"the gateway's configuration is not valid:\n{error}") from None
    logs.setup(config.log_level)
    logger.info("starting with %s", config)
    uvloop.run(run(config))


if __name__ == "__main__":
    main()
