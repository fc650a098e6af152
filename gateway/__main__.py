"""python -m gateway"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading

import uvloop

from gateway.codec import cores
from gateway.config import GatewayConfig
from gateway.http.server import serve
from tinsmith.cores import SWITCH_S
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.server import stop_event
from tinsmith.rpc.settings import read_settings

logger = logging.getLogger(__name__)


_LONGEST_STOP_S = 6.0
"""Longest time of a stop, in seconds. Supervisors wait longer before they kill: `tinsmith up` 7 s, Docker 10 s."""


async def run(config: GatewayConfig) -> None:
    async with stop_event() as stop:
        limit = asyncio.create_task(_limit_stop(stop))
        await serve(config, stop=stop)
        limit.cancel()
    logger.info("stopped")


async def _limit_stop(stop: asyncio.Event) -> None:
    await stop.wait()
    timer = threading.Timer(_LONGEST_STOP_S, _give_up, [asyncio.get_running_loop()])
    timer.daemon = True  # it ends with the process
    timer.start()


def _give_up(loop: asyncio.AbstractEventLoop) -> None:
    """Ends a stop that hangs, and logs the tasks that it waited for. Like a kill, this loses no accepted operation."""
    tasks = "".join(f"\n{task!r}" for task in asyncio.all_tasks(loop))
    logger.error("not stopped after %g s, so it is cut short; still at work:%s", _LONGEST_STOP_S, tasks)
    faulthandler.dump_traceback()
    os._exit(1)


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    config = read_settings(GatewayConfig)
    logs.setup(config.log_level, config.log_format)
    if config.tracing:
        tracing.setup("gateway")
    logger.info("starting with %s", config)
    cores(config.cores_page)  # a wrong cores_page fails here, and not with the first large body
    try:
        uvloop.run(run(config))
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    main()
