"""Bodies of forward_backward that are nearly right, or not at all, against the real services: every one is answered,
nothing dies, and a right one works afterwards."""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tests.faults.moments import ALL_FAULTS
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.wire import Wire, next_token_datum, tensor

# Threads of the client under test use `random` while a strategy draws, which Hypothesis takes for the strategy's use.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

PROTOBUF = "application/x-protobuf"
NUM_DRAWN = 10_000 if ALL_FAULTS else 2_000
"""Bodies that are drawn. Three in ten are not equal to an earlier one, and are sent."""
AT_ONCE = 8
"""Bodies that are sent at the same time, each to a model of its own."""
REFUSED = {400, 413, 422, 429}
"""Statuses that a body may get instead of a receipt."""
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}

Mutation = Callable[[pb.ForwardBackwardRequest], None]
Body = Callable[[str, int], tuple[bytes, dict[str, str]]]
"""Makes a body, and its headers, for a model and a seq_id."""

HUGE = st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -1, -(2**63), 0])
FLOATS = st.sampled_from([float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-45, 0.0, -1.0, 1.0])
NAMES = st.sampled_from(
    ["target_tokens", "weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "x", "", "\0"]
)
LOSSES = st.sampled_from(
    [
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
        "stable_reinforce",
        "custom",
        "",
        "x" * 5000,
    ]
)


def request(*lengths: int) -> pb.ForwardBackwardRequest:
    """A right one, for cross_entropy; it has all inputs of the others too."""
    data = []
    for length in lengths:
        tokens = list(range(1, length + 1))
        ones = np.ones(length - 1, np.float32)
        data.append(next_token_datum(tokens, weights=ones))
    return pb.ForwardBackwardRequest(data=data, loss_fn="cross_entropy")


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    """Bytes, shape, and layout that may not fit together."""
    made = pb.Tensor(dtype=draw(st.integers(0, 6)), shape=draw(st.lists(HUGE | st.integers(0, 9), max_size=3)))  # type: ignore[arg-type]
    data = draw(
        st.binary(max_size=40) | st.lists(FLOATS, max_size=9).map(lambda each: struct.pack(f"<{len(each)}f", *each))
    )
    if draw(st.booleans()):
        made.dense = data
    else:
        made.sparse_csr.values = data
        made.sparse_csr.crow_indices = draw(st.binary(max_size=32) | st.just(struct.pack("<3q", 0, 1, 2**62)))
        made.sparse_csr.col_indices = draw(st.binary(max_size=32))
    return made


@st.composite
def changes(draw: st.DrawFn) -> Mutation:
    """One change of a right request, that may leave it right."""
    which = draw(st.integers(0, 9))
    name, loss, number = draw(NAMES), draw(LOSSES), draw(FLOATS)
    made, token, where = draw(tensors()), draw(HUGE), draw(st.integers(0, 3))
    raw = draw(st.binary(max_size=24))

    def change(message: pb.ForwardBackwardRequest) -> None:
        datum = message.data[where % len(message.data)] if message.data else message.data.add()
        match which:
            case 0:
                message.loss_fn = loss
            case 1:
                message.loss_fn_config[name] = number
            case 2:
                datum.loss_fn_inputs[name].CopyFrom(made)
            case 3:
                datum.loss_fn_inputs.pop(name, None)
            case 4:
                datum.model_input.add().encoded_text.tokens = raw
            case 5:
                ids = struct.pack("<i", max(-(2**31), min(token, 2**31 - 1)))
                datum.model_input.add().encoded_text.tokens = ids
            case 6:
                datum.model_input.add().image.data = raw
            case 7:
                del message.data[:]
            case 8:
                values = np.full(5, number, np.float32)
                datum.loss_fn_inputs[name].CopyFrom(tensor(values))
            case 9:
                message.data.add().ParseFromString(b"")

    return change


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    kind = draw(st.sampled_from(["changed", "changed", "changed", "cut", "flipped", "random", "zstd", "json", "type"]))
    mutations = draw(st.lists(changes(), max_size=3))
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
    place, noise = draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=200))
    size = draw(st.sampled_from([0, 1, 2**20, 2**63 - 1]))
    media_type = draw(st.sampled_from(["", "text/plain", "application/json", "application/x-protobuf; x=y"]))
    encoding = draw(st.sampled_from(["zstd", "gzip", "br", "identity", "ZSTD"]))

    def make(model_id: str, seq_id: int) -> tuple[bytes, dict[str, str]]:
        message = request(*lengths)
        message.model_id, message.seq_id = model_id, seq_id
        for mutate in mutations:
            mutate(message)
        body, headers = message.SerializeToString(), {"Content-Type": PROTOBUF}
        at = int(place * len(body))
        match kind:
            case "cut":
                body = body[:at]
            case "flipped":
                body = body[:at] + noise[:3] + body[at + 3 :]
            case "random":
                body = noise
            case "zstd":
                headers["Content-Encoding"] = encoding
                packed = zstandard.compress(body)
                # A frame whose header promises another size, is cut, or is no frame.
                body = packed[: int(place * len(packed)) + 1] if size else noise
            case "json":
                headers["Content-Type"] = "application/json"
                text = json.dumps({"model_id": model_id, "seq_id": seq_id, "forward_backward_input": noise.hex()})
                body = text.encode()[: max(1, int(place * 2 * len(text)))]
            case "type":
                headers["Content-Type"] = media_type
        return body, headers

    return make


def drawn() -> list[Body]:
    """Bodies that differ for one and the same model and seq_id."""
    found: dict[tuple[bytes, tuple[str, ...]], Body] = {}

    @settings(max_examples=NUM_DRAWN, **SETTINGS)
    @given(make=bodies())
    def draw(make: Body) -> None:
        body, headers = make("model", 1)
        found[body, tuple(headers.values())] = make

    draw()
    return [*found.values()]


class Target:
    """A session with one model after another: a gap in the numbers of one holds up what follows, as it should."""

    def __init__(self, stack: Stack, wire: Wire) -> None:
        self.stack = stack
        self.wire = wire
        self.answers: Counter[str] = Counter()
        self._session_id = wire.session()
        self._models = itertools.count()
        self._pids = {process.pid for process in stack.processes()}
        self.renew()

    def renew(self) -> None:
        self.model_id = self.wire.model(self._session_id, base_model=BASE_MODEL, model_seq_id=next(self._models))
        self.seq_id = 1

    def attack(self, make: Body) -> None:
        body, headers = make(self.model_id, self.seq_id)
        try:
            reply = self.wire.http.post("forward_backward", content=body, headers=headers, timeout=20)
        except httpx.TimeoutException:
            pytest.fail(f"forward_backward gave no answer: {body[:200]!r}")
        self.answers[str(reply.status_code)] += 1
        if reply.status_code != 200:
            assert reply.status_code in REFUSED, f"{reply.status_code} {reply.text} to {body[:200]!r}"
            assert reply.json()["detail"]
            return
        request_id = reply.json()["request_id"]
        if request_id == f"{self.model_id}:{self.seq_id}":
            self.finish(request_id)
            self.seq_id += 1
        elif request_id.startswith(f"{self.model_id}:"):
            self.renew()  # a number out of order: it waits for those before it
        else:
            self.finish(request_id)  # of a model that does not exist

    def finish(self, request_id: str) -> None:
        """The future ends, well or with a failure that says why."""
        content: dict[str, Any] = {"type": "try_again"}
        for _ in range(30):
            reply = self.wire.poll(request_id)
            assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
            content = reply.json()
            if content.get("type") != "try_again":
                break
        assert content.get("type") != "try_again", f"{request_id} has no end: {content}"
        self.answers[content.get("category", "ok")] += 1
        assert content.get("category", "user") == "user", content

    def check_alive(self) -> None:
        """Asserts that no process was restarted, and that the attacked model and a new one take valid requests."""
        assert {process.pid for process in self.stack.processes()} == self._pids
        for _ in range(2):
            message = request(5, 3)
            message.model_id, message.seq_id = self.model_id, self.seq_id
            reply = self.wire.post_forward_backward(message.SerializeToString())
            output = self.wire.output(self.wire.request_id(reply))
            assert np.isfinite(output.metrics["loss:sum"])
            with_step = self.wire.optim_step(self.model_id, self.seq_id + 1)
            if self.seq_id == 1:
                assert self.wire.grad_norm(with_step) > 0
            self.renew()


def check_alive(targets: Sequence[Target]) -> None:
    for target in targets:
        target.check_alive()


@pytest.fixture(scope="module")
def targets(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Target]]:
    """All of one stack."""
    env = {"GATEWAY_LONG_POLL_S": "2"}
    with (
        Stack(tmp_path_factory.mktemp("stack"), base_models=[f"{BASE_MODEL}={toy}"], env=env) as stack,
        Wire(stack.base_url) as wire,
    ):
        targets = [Target(stack, wire) for _ in range(AT_ONCE)]
        yield targets
        check_alive(targets)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_wrong_batches_are_answered_and_nothing_dies(targets: Sequence[Target]) -> None:
    makes = drawn()
    left = iter(makes)

    def attack(target: Target) -> None:
        while (make := next(left, None)) is not None:
            target.attack(make)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in threads.map(attack, targets):
            pass
    check_alive(targets)
    answers = sum((target.answers for target in targets), Counter[str]())
    print(f"{len(makes)} bodies", answers)
    assert {"200", "400", "ok", "user"} <= answers.keys(), answers
    assert 500 < len(makes) <= answers.total()
