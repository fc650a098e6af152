"""One trace from the client's HTTP request to what the compute threads do, on a real stack."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.examples import PROMPT, random_tokens
from tests.support.stack import Stack
from tests.support.wire import Failed, Wire, next_token_datum
from tests.tracing.conftest import BASE_MODEL, Collector, Span

pytestmark = pytest.mark.slow

GATEWAY, TRAINER, SAMPLER = "tinsmith-gateway", "tinsmith-trainer", "tinsmith-sampler"
RPC = "/tinsmith.v1.TrainerService/"


@pytest.fixture(scope="module")
def wire(stack: Stack) -> Iterator[Wire]:
    with Wire(stack.base_url) as wire:
        yield wire


@pytest.fixture(scope="module")
def model_id(wire: Wire) -> str:
    return wire.model(wire.session(), base_model=BASE_MODEL)


def names(spans: list[Span]) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in spans}


def one(spans: list[Span], service: str, name: str) -> Span:
    (found,) = [span for span in spans if (span.service, span.name) == (service, name)]
    return found


def as_client(wire: Wire, trace_id: str, *, sampled: bool = True) -> None:
    """From now on the client's requests belong to this trace of its own."""
    wire.http.headers["traceparent"] = f"00-{trace_id}-00f067aa0ba902b7-{int(sampled):02x}"


def test_a_training_operation_is_one_trace_down_to_its_micro_batch(
    wire: Wire, model_id: str, collector: Collector, stack: Stack
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    as_client(wire, trace_id)
    data = [next_token_datum(random_tokens(9, 1), weights=[1.0] * 8)]
    wire.output(wire.forward_backward(model_id, 1, data))
    wire.grad_norm(wire.optim_step(model_id, 2))

    call = f"{RPC}ForwardBackward"
    path = [(GATEWAY, "POST forward_backward"), (GATEWAY, "forward_backward"), (GATEWAY, call), (TRAINER, call)]
    parts = [(TRAINER, "journal"), (TRAINER, "queue"), (TRAINER, "micro_batch")]
    spans = collector.trace(trace_id, *path, *parts, (TRAINER, "optim_step"))
    parent = "00f067aa0ba902b7"  # the client's own span
    for service, name in path:
        span = one(spans, service, name)
        assert span.parent_id == parent, name
        parent = span.span_id
    micro_batch = one(spans, TRAINER, "micro_batch")
    assert micro_batch.parent_id == parent
    assert micro_batch.attributes["tinsmith.tokens"] == 8
    assert one(spans, TRAINER, call).start_ns <= micro_batch.start_ns < micro_batch.end_ns
    assert not [span for span in spans if span.failed]
    assert f"trace_id={trace_id}" in (stack.logs / "gateway.log").read_text()
    assert re.search(rf"model_id={model_id} trace_id={trace_id}", (stack.logs / "trainer.log").read_text())


def test_a_publish_and_a_sample_reach_the_sampler(wire: Wire, model_id: str, collector: Collector) -> None:
    trace_id = "1af7651916cd43dd8448eb211c80319c"
    as_client(wire, trace_id)
    saved = wire.json_result(
        wire.request_id(wire.post("save_weights_for_sampler", model_id=model_id, seq_id=3, path="a"))
    )
    spans = collector.trace(
        trace_id,
        (GATEWAY, f"{RPC}SaveCheckpoint"),
        (TRAINER, "publish"),
        (TRAINER, "/tinsmith.v1.WeightSyncService/FinishWeightUpdate"),
        (SAMPLER, "/tinsmith.v1.WeightSyncService/FinishWeightUpdate"),
    )
    publish = one(spans, TRAINER, "publish")
    finish = one(spans, TRAINER, "/tinsmith.v1.WeightSyncService/FinishWeightUpdate")
    assert finish.parent_id == publish.span_id
    assert publish.attributes["tinsmith.num_bytes"] > 0

    trace_id = "2af7651916cd43dd8448eb211c80319c"
    as_client(wire, trace_id)
    session_id = model_id.partition(":")[0]
    created = wire.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, model_path=saved["path"]
    ).json()
    sampled = wire.post(
        "asample",
        sampling_session_id=created["sampling_session_id"],
        seq_id=1,
        num_samples=1,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": 4},
    )
    wire.sampled(wire.request_id(sampled))
    call = "/tinsmith.v1.SamplerService/Sample"
    spans = collector.trace(
        trace_id, (GATEWAY, "POST asample"), (GATEWAY, call), (SAMPLER, call), (SAMPLER, "queue"), (SAMPLER, "generate")
    )
    assert one(spans, SAMPLER, "generate").parent_id == one(spans, SAMPLER, call).span_id
    assert one(spans, SAMPLER, call).parent_id == one(spans, GATEWAY, call).span_id


def test_polls_and_health_checks_are_in_no_trace_and_what_a_client_does_not_sample_is_not_kept(
    wire: Wire, model_id: str, collector: Collector
) -> None:
    unsampled, sampled = "3af7651916cd43dd8448eb211c80319c", "4af7651916cd43dd8448eb211c80319c"
    as_client(wire, unsampled, sampled=False)
    wire.grad_norm(wire.optim_step(model_id, 4))
    as_client(wire, sampled)
    wire.grad_norm(wire.optim_step(model_id, 5))
    collector.trace(sampled, (GATEWAY, "POST optim_step"), (TRAINER, "optim_step"))
    spans = collector.spans
    assert unsampled not in {span.trace_id for span in spans}
    paths = {str(span.attributes.get("url.path", "")) for span in spans}
    assert "/api/v1/optim_step" in paths
    assert not [path for path in paths if "retrieve_future" in path or "healthz" in path]
    assert not [name for _, name in names(spans) if "health" in name.lower() or "Describe" in name]


def test_a_failed_call_is_marked_in_its_trace(wire: Wire, collector: Collector) -> None:
    trace_id = "5af7651916cd43dd8448eb211c80319c"
    as_client(wire, trace_id)
    session_id = wire.session()
    response = wire.post(
        "create_model", session_id=session_id, model_seq_id=0, base_model=BASE_MODEL, lora_config={"rank": 10_000}
    )
    with pytest.raises(Failed, match="rank"):
        wire.json_result(wire.request_id(response))
    spans = collector.trace(trace_id, (GATEWAY, "create_model"))
    assert one(spans, GATEWAY, "create_model").failed


def test_an_unknown_path_has_a_name_without_it(wire: Wire, collector: Collector) -> None:
    trace_id = "6af7651916cd43dd8448eb211c80319c"
    as_client(wire, trace_id)
    assert wire.http.get("/api/v1/none/of/these").status_code == 404
    spans = collector.trace(trace_id, (GATEWAY, "GET unknown"))
    assert one(spans, GATEWAY, "GET unknown").attributes["http.response.status_code"] == 404
