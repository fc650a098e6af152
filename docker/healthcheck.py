"""Ends with status 0 when the gRPC service at HOST:PORT (the one argument) is SERVING: the containers' health check."""

import asyncio
import sys

from tinsmith.rpc.channel import connect, is_serving


async def main(address: str) -> int:
    async with connect(address) as channel:
        return 0 if await is_serving(channel) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
