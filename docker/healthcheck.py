"""The containers' health check: ends with status 0 when the service answers that it is well.

healthcheck.py gateway               by GATEWAY_PORT and GATEWAY_TLS_CERT
healthcheck.py trainer HOST:PORT     by TRAINER_GRPC_CA, _CERT and _KEY; sampler likewise
"""

import asyncio
import os
import sys
import urllib.request
from pathlib import Path

from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.tls import GrpcTls, pinned


def gateway() -> int:
    cert = os.environ.get("GATEWAY_TLS_CERT")
    url = f"{'https' if cert else 'http'}://127.0.0.1:{os.environ['GATEWAY_PORT']}/api/v1/healthz"
    try:
        urllib.request.urlopen(url, timeout=4, context=pinned(Path(cert)) if cert else None).close()  # noqa: S310
    except OSError:
        return 1
    return 0


async def service(name: str, address: str) -> int:
    certificates = GrpcTls(_env_prefix=f"{name.upper()}_").certificates  # type: ignore[call-arg]
    async with connect(address, certificates=certificates) as channel:
        return 0 if await is_serving(channel) else 1


if __name__ == "__main__":
    sys.exit(gateway() if sys.argv[1] == "gateway" else asyncio.run(service(sys.argv[1], sys.argv[2])))
