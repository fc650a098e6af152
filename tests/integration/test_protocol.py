"""Unwritten promises on which the SDK relies: order, repeats, long polls, encodings, and where errors appear."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from tests.integration.conftest import LONG_POLL_S
from tests.support.examples import BASE_MODEL, random_tokens
from tests.support.stack import Stack
from tests.support.wire import Failed, Wire, logprobs, next_token_datum

DATA = [next_token_datum(random_tokens(length, length)) for length in (5, 9, 6, 12)]


@pytest.fixture
def model_id(wire: Wire) -> str:
    return wire.model(wire.session(), base_model=BASE_MODEL)


def accumulate(wire: Wire, model_id: str, order: Sequence[int]) -> tuple[list[float], float]:
    """Three chunks, then a step; sent in the given order of seq_ids. The losses by seq_id, and the gradient's norm."""
    ids = {}
    for seq_id in order:
        if seq_id == 4:
            ids[seq_id] = wire.optim_step(model_id, seq_id)
        else:
            ids[seq_id] = wire.forward_backward(model_id, seq_id, DATA[seq_id - 1 : seq_id])
    losses = [wire.output(ids[seq_id]).metrics["loss:sum"] for seq_id in (1, 2, 3)]
    return losses, wire.grad_norm(ids[4])


def test_ids_are_those_that_the_sdk_computes_itself(wire: Wire) -> None:
    session_id = wire.session()
    assert wire.model(session_id, base_model=BASE_MODEL, model_seq_id=3) == f"{session_id}:train:3"


def test_operations_run_by_seq_id_whatever_order_they_come_in(wire: Wire) -> None:
    """Each receipt is given at once, also for what cannot run yet; the last chunk and the step may come first."""
    session_id = wire.session()
    models = [wire.model(session_id, base_model=BASE_MODEL, model_seq_id=n) for n in range(4)]
    wanted = accumulate(wire, models[0], (1, 2, 3, 4))
    for model_id, order in zip(models[1:], ((2, 3, 1, 4), (4, 3, 2, 1), (3, 4, 1, 2)), strict=True):
        losses, norm = accumulate(wire, model_id, order)
        np.testing.assert_allclose(losses, wanted[0], rtol=1e-6)
        assert norm == pytest.approx(wanted[1], rel=1e-5)


def test_a_step_sees_nothing_later(wire: Wire, model_id: str) -> None:
    in_order = wire.model(wire.session(), base_model=BASE_MODEL)
    wire.forward_backward(in_order, 1, DATA[:1])
    wanted = wire.grad_norm(wire.optim_step(in_order, 2))
    later = wire.forward_backward(model_id, 3, DATA[2:])
    step = wire.optim_step(model_id, 2)
    wire.forward_backward(model_id, 1, DATA[:1])
    assert wire.grad_norm(step) == pytest.approx(wanted, rel=1e-6)
    assert wire.output(later).metrics["loss:sum"] > 0


def test_a_repeat_has_the_same_id_and_one_gradient(wire: Wire, model_id: str) -> None:
    once = wire.model(wire.session(), base_model=BASE_MODEL)
    wire.forward_backward(once, 1, DATA)
    wanted = wire.grad_norm(wire.optim_step(once, 2))
    first = wire.forward_backward(model_id, 1, DATA)
    assert wire.forward_backward(model_id, 1, DATA) == first  # while it runs
    result = wire.output(first)
    assert wire.forward_backward(model_id, 1, DATA) == first  # after it has run
    assert wire.output(first) == result  # and the answer can be had again
    step = wire.optim_step(model_id, 2)
    assert wire.optim_step(model_id, 2) == step
    assert wire.grad_norm(step) == pytest.approx(wanted, rel=1e-6)
    assert wire.optim_step(model_id, 2) == step
    assert wire.grad_norm(wire.optim_step(model_id, 3)) == 0.0


def test_another_body_under_a_used_number_is_refused_and_changes_nothing(wire: Wire, model_id: str) -> None:
    first = wire.forward_backward(model_id, 1, DATA[:1])
    loss = wire.output(first).metrics["loss:sum"]
    response = wire.post_forward_backward(wire.forward_backward_body(model_id, 1, DATA[1:]))
    assert response.status_code not in (400, 409)  # 409 is a retry code of the SDK
    assert 400 < response.status_code < 500
    assert "seq_id 1" in response.json()["detail"]
    assert wire.output(first).metrics["loss:sum"] == loss


def test_repeats_of_everything_else_are_the_same_thing_too(wire: Wire) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    headers = {"X-Idempotency-Key": f"stainless-python-retry-{random.random()}"}
    sessions = {wire.http.post("create_session", json=body, headers=headers).json()["session_id"] for _ in range(2)}
    assert len(sessions) == 1
    (session_id,) = sessions
    assert wire.model(session_id, base_model=BASE_MODEL) == wire.model(session_id, base_model=BASE_MODEL)
    ids = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    made = [wire.post("create_sampling_session", **ids).json() for _ in range(2)]
    assert made[0] == made[1]
    asked = {
        "sampling_session_id": made[0]["sampling_session_id"],
        "seq_id": 7 * 10**17 + 1,  # beyond 53 bits
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    }
    receipts = [wire.post("asample", **asked).json() for _ in range(2)]
    assert receipts[0] == receipts[1]
    assert str(7 * 10**17 + 1) in receipts[0]["request_id"]
    assert len(set(receipts[0]["sample_sequence_ids"])) == 2
    answers = [wire.sampled(receipts[0]["request_id"]) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(answers[0].sequences) == 2


def test_a_poll_is_held_and_then_says_try_again(wire: Wire, model_id: str) -> None:
    waiting = wire.forward_backward(model_id, 2, DATA)  # number 1 has not come
    started = time.monotonic()
    answer = wire.poll(waiting).json()
    assert time.monotonic() - started >= LONG_POLL_S  # an earlier answer would make the SDK ask in a busy loop
    assert (answer["type"], answer["request_id"]) == ("try_again", waiting)
    assert answer["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")
    wire.forward_backward(model_id, 1, DATA)
    assert wire.output(waiting).metrics["loss:sum"] > 0


def test_zstd_and_plain_bodies_mean_the_same(wire: Wire, model_id: str) -> None:
    outputs = []
    for seq_id, zstd in ((1, False), (2, True)):
        body = wire.forward_backward_body(model_id, seq_id, DATA)
        outputs.append(wire.output(wire.request_id(wire.post_forward_backward(body, zstd=zstd))))
    for plain, compressed in zip(*(logprobs(output) for output in outputs), strict=True):
        np.testing.assert_array_equal(plain, compressed)
    assert all(key.count(":") == 1 for key in outputs[0].metrics)


def test_all_that_carries_a_number_fails_as_a_future_and_the_model_goes_on(wire: Wire, model_id: str) -> None:
    def post(endpoint: str, seq_id: int, /, **body: object) -> httpx.Response:
        return wire.post(endpoint, model_id=model_id, seq_id=seq_id, **body)

    refused = [
        wire.post_forward_backward(wire.forward_backward_body(model_id, 1, DATA, loss_fn="no_such_loss")),
        post("optim_step", 2, adam_params={"learning_rate": "much"}),
        post("optim_step", 3, adam_params={"beta1": 1.5}),
        post("optim_step", 4),
        post("optim_step", 5, optimizer_params={"type": "dimuon", "learning_rate": 1.0}),
        post("save_weights", 6, path="a/b"),
        post("save_weights", 7, path="x", ttl_seconds=5),
        post("save_weights_for_sampler", 8, path="x", sampling_session_seq_id=1),
        post("save_weights_for_sampler", 9, sampling_session_seq_id=1, kind="moving"),
        post("load_weights", 10, path="tinker://nobody:train:0/weights/none", optimizer=True),
        post("load_weights", 11, path="not a path", optimizer=True),
    ]
    for response in refused:
        with pytest.raises(Failed) as failed:
            wire.json_result(wire.request_id(response))
        assert failed.value.category == "user"
    wire.forward_backward(model_id, 12, DATA)
    with pytest.raises(Failed, match="no_such_loss"):  # the client could not know which gradients it applies
        wire.json_result(wire.optim_step(model_id, 13))
    wire.forward_backward(model_id, 14, DATA)
    assert wire.grad_norm(wire.optim_step(model_id, 15)) > 0


def test_what_nobody_knows(wire: Wire) -> None:
    session_id = wire.session()
    unknown_sample = wire.poll(f"{session_id}:sample:0:5")
    assert unknown_sample.status_code == 410  # the SDK sends such a sample again
    assert unknown_sample.json()["detail"]
    assert wire.poll("nonsense").status_code == 410
    nowhere = wire.http.get("no_such_endpoint")
    assert nowhere.status_code == 404
    assert "no_such_endpoint" in nowhere.json()["detail"]
    assert wire.http.get("samplers/nobody:sample:0").status_code == 404
    assert wire.post("session_heartbeat", session_id="nobody").status_code == 404
    assert wire.post("create_model", session_id="nobody", model_seq_id=0).status_code == 404
    assert wire.post("get_info", model_id="nobody:train:0").status_code == 404


def test_health_and_the_calls_before_a_session(wire: Wire) -> None:
    assert wire.http.get("healthz").json() == {"status": "ok"}
    for path in ("client/config", "client/dynamic_config"):
        response = wire.post(path, sdk_version="0.38.0")
        assert response.status_code == 200
        assert isinstance(response.json(), dict)
    assert wire.post("telemetry", events=[{"anything": 1}]).json() == {"status": "accepted"}


MOVING = {
    "gateway": [
        'gateway_requests_total{method="POST",route="forward_backward",status="200"}',
        'gateway_future_seconds_count{kind="optim_step",outcome="ok"}',
        "gateway_accept_seconds_count",
        "gateway_trained_tokens_total",
        "gateway_sampled_tokens_total",
    ],
    "trainer": [
        'trainer_operations_total{kind="forward_backward",outcome="ok"}',
        'trainer_queue_seconds_count{kind="forward_backward"}',
        'trainer_step_seconds_count{kind="optim_step"}',
        "trainer_tokens_total",
        "trainer_publish_seconds_count",
        "trainer_publish_bytes_total",
    ],
    "sampler": [
        'sampler_requests_total{outcome="ok"}',
        "sampler_queue_time_seconds_count",
        "sampler_step_seconds_count",
        "sampler_sampled_tokens_total",
        "sampler_publish_seconds_count",
        "sampler_publish_bytes_total",
    ],
}
"""Requests, time in the queue, time of a step, tokens, and publishing. Lengths of queues are back at 0 afterwards."""

QUEUES = {
    "gateway": 'gateway_pending_futures{kind="forward_backward"}',
    "trainer": 'trainer_queue_length{kind="forward_backward"}',
    "sampler": "sampler_waiting_requests",
}


def test_metrics_of_all_services_move(stack: Stack, wire: Wire, model_id: str) -> None:
    # The first publish of a stack has the canary scored without a version, too.
    first = wire.post("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)
    wire.json_result(wire.request_id(first))
    before = {service: wire.metrics(stack.metrics_url(service)) for service in MOVING}
    wire.forward_backward(model_id, 2, DATA)
    wire.json_result(wire.optim_step(model_id, 3))
    saved = wire.post("save_weights_for_sampler", model_id=model_id, seq_id=4, sampling_session_seq_id=1)
    receipt = wire.post(
        "asample",
        sampling_session_id=wire.json_result(wire.request_id(saved))["sampling_session_id"],
        seq_id=0,
        num_samples=1,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        sampling_params={"max_tokens": 5, "stop": []},
    )
    assert len(wire.sampled(wire.request_id(receipt)).sequences) == 1
    after = {service: wire.metrics(stack.metrics_url(service)) for service in MOVING}
    for service, names in MOVING.items():
        for name in names:
            assert after[service][name] > before[service].get(name, 0.0), name
        assert after[service][QUEUES[service]] == 0.0
    trained = sum(len(datum.model_input[0].encoded_text.tokens) // 4 for datum in DATA)
    for service, name in (("gateway", "gateway_trained_tokens_total"), ("trainer", "trainer_tokens_total")):
        assert after[service][name] - before[service].get(name, 0.0) == trained
    drawn = {"gateway": 5, "sampler": 5 + 1}  # a token is drawn where the canary of the publish is scored
    for service, num_tokens in drawn.items():
        name = f"{service}_sampled_tokens_total"
        assert after[service][name] - before[service].get(name, 0.0) == num_tokens
