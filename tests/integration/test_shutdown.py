"""`tinsmith up` ends when it is told to, whatever is going on."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.wire import Wire, next_token_datum


# Every stack of the fast tests is stopped by SIGTERM, too, though without open polls.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_everything_with_polls_open(number: signal.Signals, toy: Path, tmp_path: Path) -> None:
    """Stack.stop raises unless all is gone within 10 s."""
    with Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"]) as stack, Wire(stack.base_url) as wire:
        session_id = wire.session()
        model_id = wire.model(session_id, base_model=BASE_MODEL)
        never_runs = wire.forward_backward(model_id, 2, [next_token_datum([1, 2, 3])])  # number 1 never comes
        ids = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        long_sample = wire.request_id(
            wire.post(
                "asample",
                sampling_session_id=wire.post("create_sampling_session", **ids).json()["sampling_session_id"],
                seq_id=0,
                num_samples=8,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                sampling_params={"max_tokens": 30_000, "stop": []},
            )
        )
        with ThreadPoolExecutor() as pool:
            polls = [pool.submit(wire.poll, request_id) for request_id in (never_runs, long_sample)]
            name = 'gateway_requests_total{method="POST",route="retrieve_future",status="200"}'
            answered = wire.metrics(stack.metrics_url("gateway"))[name]
            assert not any(poll.done() for poll in polls)
            stack.stop(number)
            for poll in polls:
                response = poll.result()
                assert response.status_code == 200
                assert response.json()["type"] == "try_again"  # so the SDK asks again, of the next gateway
        assert answered == 1.0  # of the creation of the model
