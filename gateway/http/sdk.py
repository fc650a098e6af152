"""What the SDK says of itself in the headers of each request."""

from __future__ import annotations

import re

from starlette.requests import Request

_KNOWS_EXTERNAL = (0, 30)
"""First SDK version that knows checkpoints of type external; an older one refuses a list with one in it."""
_SENDS_PARTS_AT_ONCE = (0, 28)
"""SDK version that sends the first part of a large batch last. Earlier ones may be told that the first part has failed
before they send the second, and send it, and the optim_step behind it, all the same."""
_KEEPS_CANCELS = (3, 12)
"""First Python whose `asyncio.wait_for` keeps a cancel that arrives together with the answer (python/cpython#86296)."""


def knows_external_checkpoints(request: Request) -> bool:
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _KNOWS_EXTERNAL


def sends_parts_at_once(request: Request) -> bool:
    """Whether all parts of a batch are there before the answer of any is. Other clients than the SDK are held to it."""
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _SENDS_PARTS_AT_ONCE


def can_use_pyqwest(request: Request) -> bool:
    """Whether a request of the SDK that is cancelled ends. The pyqwest transport of its HTTP client awaits answers in
    `wait_for`; where a heartbeat loses its cancel there, `ServiceClient.close()` waits for ever."""
    version = _version(request, "x-stainless-runtime-version")
    return version is None or version >= _KEEPS_CANCELS


def _version(request: Request, header: str) -> tuple[int, int] | None:
    """None where the header is absent, or no version."""
    found = re.match(r"(\d+)\.(\d+)", request.headers.get(header, ""))
    return (int(found[1]), int(found[2])) if found else None
