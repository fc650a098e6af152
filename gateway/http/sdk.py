"""Properties of the client's SDK and Python, by the headers of a request."""

from __future__ import annotations

import re

from starlette.requests import Request

_KNOWS_EXTERNAL = (0, 30)
"""First SDK version that knows checkpoints of type external. An older one refuses a list that holds one."""
_SENDS_PARTS_AT_ONCE = (0, 28)
"""First SDK version that sends all parts of a large batch before it waits for an answer. An older one may hear that the
first part failed, and still send the second part and the optim_step."""
_KEEPS_CANCELS = (3, 12)
"""First Python whose `asyncio.wait_for` keeps a cancellation that arrives together with the answer
(python/cpython#86296)."""


def knows_external_checkpoints(request: Request) -> bool:
    """Whether the client can read lists with checkpoints of type external. Other clients than the SDK can."""
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _KNOWS_EXTERNAL


def sends_parts_at_once(request: Request) -> bool:
    """Whether the client sends all parts of a batch before it asks for an answer. Other clients than the SDK have
    to."""
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _SENDS_PARTS_AT_ONCE


def can_use_pyqwest(request: Request) -> bool:
    """Whether the SDK may use the pyqwest transport of its HTTP client, which awaits answers in `asyncio.wait_for`.

    In an older Python a heartbeat could lose its cancellation there, and `ServiceClient.close()` would wait for ever.
    """
    version = _version(request, "x-stainless-runtime-version")
    return version is None or version >= _KEEPS_CANCELS


def _version(request: Request, header: str) -> tuple[int, int] | None:
    """Major and minor version in a header; None when it is absent or holds no version."""
    found = re.match(r"(\d+)\.(\d+)", request.headers.get(header, ""))
    return (int(found[1]), int(found[2])) if found else None
