"""Checking custom losses, which may take seconds for a small request, delays the model that sends them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.waiting import until
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tests.unit.trainer_service.test_servicer import (  # noqa: F401 - fixtures
    MODEL,
    Accepted,
    Service,
    creation,
    service,
    start,
    stub,
)
from tinsmith.errors import InvalidRequest, OutOfCapacity
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.intake import _MAX_CHECKS_OF_NO_MODEL
from trainer_service.objectives import custom_loss as module
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.objectives.custom_loss_cost import LossPace
from trainer_service.requests import loss_of

AT_ONCE_S = 30.0
"""Far more than anything takes that does not wait for a check, which ends when the test says so."""
NUM_REQUESTS = 19
"""More than the event loop's own threads are on a machine of up to 14 cores; the queue of one model has 20."""
OTHER = "s:train:1"


@dataclass(frozen=True)
class Checks:
    """Checks of custom losses, each of which waits until the test lets all go on."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    names: list[str] = field(default_factory=list)
    """Losses whose checks have begun."""


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    made, check = Checks(), CustomLoss.check_shapes

    def slow(loss: CustomLoss, datums: Sequence[Any]) -> list[float]:
        made.names.append(loss.name)
        made.begun.set()
        assert made.go_on.wait(10 * AT_ONCE_S)
        return check(loss, datums)

    monkeypatch.setattr(CustomLoss, "check_shapes", slow)
    return made


def custom(model_id: str, seq_id: int, *, name: str) -> pb.ForwardBackwardRequest:
    loss = custom_loss(
        graph(node("call_method", "total", "sum", ref("logprobs")), loss="total"), {"logprobs": 1}, name=name
    )
    data = [random_datum(4, seq_id, vocab_size=VOCAB_SIZE)]
    made = request(data, model_id=model_id, seq_id=seq_id, loss_fn="custom")
    made.custom_loss.CopyFrom(loss)
    return made


async def test_checks_of_one_models_losses_delay_no_large_batch_and_one_check_of_another(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    checks: Checks,
) -> None:
    await stub.CreateModel(creation(OTHER))
    large = request([random_datum(64, seed, vocab_size=VOCAB_SIZE) for seed in range(100)], model_id=OTHER, seq_id=1)
    many = [custom(MODEL, seq_id, name="slow") for seq_id in range(1, NUM_REQUESTS + 1)]
    calls = [asyncio.ensure_future(stub.ForwardBackward(one)) for one in many]
    try:
        assert await asyncio.to_thread(checks.begun.wait, AT_ONCE_S)
        async with asyncio.timeout(AT_ONCE_S):
            accepted = await Accepted.of(service, large)
            assert (await accepted.result()).metrics["num_tokens:sum"] == 64 * 100
        assert checks.names == ["slow"]
        calls.append(asyncio.ensure_future(stub.ForwardBackward(custom(OTHER, 2, name="other"))))
        await until(lambda: service.trainer.journal.find(OTHER, 2), limit_s=AT_ONCE_S)  # it has come, and waits
    finally:
        checks.go_on.set()
        await asyncio.gather(*calls)
    assert checks.names.index("other") <= 2  # behind the check that ran, and at most one that waited
    assert len(checks.names) == NUM_REQUESTS + 1


async def test_checks_of_a_deleted_model_do_not_run(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    checks: Checks,
) -> None:
    calls = [
        asyncio.ensure_future(stub.ForwardBackward(custom(MODEL, seq_id, name=f"of {seq_id}")))
        for seq_id in range(1, 13)
    ]
    try:
        assert await asyncio.to_thread(checks.begun.wait, AT_ONCE_S)
        async with asyncio.timeout(AT_ONCE_S):
            await Accepted.of(service, request([random_datum(4, 1, vocab_size=VOCAB_SIZE)], model_id=MODEL, seq_id=13))
            await stub.DeleteModel(pb.DeleteModelRequest(model_id=MODEL))
    finally:
        checks.go_on.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert len(checks.names) == 1


async def test_losses_that_no_model_uses_yet_are_checked_one_at_a_time_and_only_so_many_wait(
    service: Service,  # noqa: F811
    stub: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    check = service.trainer.operations.check_custom_loss

    def slow(one: pb.CheckCustomLossRequest) -> None:
        begun.release()
        assert go_on.wait(10 * AT_ONCE_S)
        check(one)

    monkeypatch.setattr(service.trainer.operations, "check_custom_loss", slow)
    losses = [custom(MODEL, 1, name=f"of {number}").custom_loss for number in range(_MAX_CHECKS_OF_NO_MODEL + 1)]
    calls = [asyncio.ensure_future(stub.CheckCustomLoss(pb.CheckCustomLossRequest(custom_loss=one))) for one in losses]
    try:
        assert await asyncio.to_thread(begun.acquire, timeout=AT_ONCE_S)
        refused, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=AT_ONCE_S)
        (error,) = [from_rpc_error(one.exception()) for one in refused]
        assert isinstance(error, OutOfCapacity)
        assert f"{_MAX_CHECKS_OF_NO_MODEL} custom losses wait to be checked" in error.message
        async with asyncio.timeout(AT_ONCE_S):  # a model's own check finds a thread meanwhile
            await stub.ForwardBackward(custom(MODEL, 1, name="own"))
        assert not begun.acquire(blocking=False)
        calls[0].cancel()
    finally:
        go_on.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, pb.CheckCustomLossResponse) for one in outcomes) == _MAX_CHECKS_OF_NO_MODEL - 1


def long_loss(name: str) -> CustomLoss:
    """A loss of 900 nodes that work on few elements."""
    calls = [node("call_method", f"n{number}", "exp", ref("logprobs")) for number in range(900)]
    total = node("call_method", "total", "sum", ref("n0"))
    return loss_of(custom_loss(graph(*calls, total, loss="total"), {"logprobs": 1}, name=name))


def test_all_checks_together_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module._load_shape_functions()
    monkeypatch.setattr(module, "CHECKS", LossPace(share=0.2, burst_s=0.05))
    used: list[float] = []

    def check(name: str) -> None:
        loss = long_loss(name)
        started = time.thread_time()
        loss.check_shapes([((length,), {}) for length in range(2, 4)])
        used.append(time.thread_time() - started)

    threads = [threading.Thread(target=check, args=[name]) for name in ("one", "other")]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(used) == 2
    assert sum(used) < 0.05 + 0.25 * (time.monotonic() - started)


def test_the_processor_time_of_a_check_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    module._load_shape_functions()
    loss = long_loss("long")
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.005)
    with pytest.raises(InvalidRequest, match=r"takes more than 0.005 s of processor time"):
        loss.check_shapes([((2,), {})])


def test_each_node_has_an_expected_time_however_few_its_elements() -> None:
    """Or 900 nodes on two elements would cost nothing in their model's turns."""
    (seconds,) = long_loss("long").check_shapes([((2,), {})])
    assert 900 * 5e-6 < seconds < 900 * 1e-3
