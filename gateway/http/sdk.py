"""What the SDK says of itself in the headers of each request."""

from __future__ import annotations

import re

from starlette.requests import Request

_KNOWS_EXTERNAL = (0, 30)
"""First SDK version that knows checkpoints of type external; an older one refuses a list with one in it."""
_KEEPS_CANCELS = (3, 12)
"""First Python whose `asyncio.wait_for` keeps a cancel that arrives together with the answer (python/cpython#86296)."""


def knows_external_checkpoints(request: Request) -> bool:
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _KNOWS_EXTERNAL


def can_use_pyqwest(request: Request) -> bool:
    """Whether a request of the SDK that is cancelled ends. The pyqwest transport of its HTTP client awaits answers in
    `wait_for`; where a heartbeat loses its cancel there, `ServiceClient.close()` waits for ever."""
    version = _version(request, "x-stainless-runtime-version")
    return version is None or version >= _KEEPS_CANCELS


def _version(request: Request, header: str) -> tuple[int, int] | None:
    """None where the header is absent, or no version."""
    found = re.match(r"(\d+)\.(\d+)", request.headers.get(header, ""))
    return (int(found[1]), int(found[2])) if found else None
