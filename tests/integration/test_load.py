"""Many requests at once: nobody sees an error. How long they take, `python -m benchmarks load` measures."""

from __future__ import annotations

import os

import pytest

from benchmarks.press import press
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

IS_FULL = bool(os.environ.get("TINSMITH_FULL_LOAD"))
NUM_SAMPLES, NUM_SESSIONS = (1000, 200) if IS_FULL else (300, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_samples_of_a_client_at_once_beside_many_sessions(stack: Stack) -> None:
    times = press(
        stack.base_url, BASE_MODEL, api_key="tml-test", num_samples=NUM_SAMPLES, num_sessions=NUM_SESSIONS, num_tokens=4
    )
    assert times.errors == []
    assert len(times.samples) == NUM_SAMPLES
    assert times.heartbeats
    assert times.trivial
