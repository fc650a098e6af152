"""The end of a session of the Tinker SDK, whatever it is doing."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import tinker
from tinker.lib import internal_client_holder

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

_HEARTBEAT_PERIOD_S = 10


@pytest.mark.slow
def test_a_session_ends_while_a_heartbeat_is_answered(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close cancels a request, which no transport that the gateway chooses may survive: 1 in 10 did so, on Python
    3.11, and close() waited for ever."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0 if seconds == _HEARTBEAT_PERIOD_S else seconds)

    busy = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(internal_client_holder, "asyncio", busy)
    for n in range(40):
        service = tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")
        service.create_sampling_client(base_model=BASE_MODEL).result()
        time.sleep(0.001 * n)
        service.close("success").result(timeout=30)
