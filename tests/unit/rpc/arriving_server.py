"""A gRPC server of Sample, whose memory a test measures while messages arrive.

    python -m tests.unit.rpc.arriving_server MESSAGE_BYTES NUM_TOGETHER

`MESSAGE_BYTES`: the largest message. `NUM_TOGETHER`: a call is answered once so many have begun.
The port is the first line of the output. It ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tinsmith.rpc import server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc


class Sampler(sampler_pb2_grpc.SamplerServiceServicer):
    def __init__(self, num_together: int) -> None:
        self._missing = num_together
        self._are_together = asyncio.Event()

    async def Sample(self, request: sampler_pb2.SampleRequest, context: Any) -> sampler_pb2.SampleResponse:
        self._missing -= 1
        if self._missing <= 0:
            self._are_together.set()
        await self._are_together.wait()
        return sampler_pb2.SampleResponse()


async def main() -> None:
    server.MAX_MESSAGE_BYTES = int(sys.argv[1])
    serving = server.Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR])
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(int(sys.argv[2])), serving.grpc)
    await serving.start()
    print(serving.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await serving.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
