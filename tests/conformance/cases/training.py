"""Forward passes, steps, their order, and what is refused."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pydantic
import tinker
import tinker.lib.public_interfaces.training_client as training_client
from tinker import types

from tests.conformance.kit import Absent, case
from tests.conformance.world import (
    NEAR,
    TEXTS,
    World,
    assert_close,
    datum,
    logprobs,
    raises,
    random_tokens,
    scores,
    settle,
)


@case("forward agrees with the sampler")
def forward(world: World) -> None:
    for found, text in zip(logprobs(world.forward(world.fresh)), TEXTS, strict=True):
        assert_close(found, scores(world.base_sampler, text), "logprobs", within=NEAR)


@case("forward leaves no gradient")
def forward_only(world: World) -> None:
    model = world.model()
    before = logprobs(world.forward(model))
    settle(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    for found, wanted in zip(logprobs(world.forward(model)), before, strict=True):
        assert_close(found, wanted, "logprobs")


@case("optim_step lowers the loss")
def optim_step(world: World) -> None:
    model = world.model()
    losses = [world.step(model, learning_rate=1e-3).metrics["loss:sum"] for _ in range(4)]
    assert all(later < earlier for earlier, later in pairwise(losses)), losses


@case("gradients add up until the step")
def accumulation(world: World) -> None:
    """Three batches of one text are one batch of three."""
    parts, whole = world.model(), world.model()
    for text in TEXTS:
        settle(parts.forward_backward([datum(text)], "cross_entropy"))
    settle(parts.optim_step(types.AdamParams(learning_rate=1e-2)))
    world.step(whole)
    _assert_equal(world, parts, whole)


@case("calls that do not wait for each other run in order")
def pipelined(world: World) -> None:
    waiting, pipelined = world.model(), world.model()
    for _ in range(3):
        world.step(waiting)
    futures = []
    for _ in range(3):
        futures.append(pipelined.forward_backward([datum(text) for text in TEXTS], "cross_entropy"))
        futures.append(pipelined.optim_step(types.AdamParams(learning_rate=1e-2)))
    for future in futures:
        settle(future)
    _assert_equal(world, pipelined, waiting)


@case("a batch that the SDK sends in several requests")
def chunks(world: World) -> None:
    texts = [random_tokens(4 + n % 5, 50 + n) for n in range(11)]
    data = [datum(text) for text in texts]
    singly = [logprobs(world.forward(world.fresh, [one]))[0] for one in data]
    limit = getattr(training_client, "MAX_CHUNK_LEN", None)  # from 0.25 on it is a flag
    try:
        _limit_chunks(world, 4)
        result = settle(world.fresh.forward_backward(data, "cross_entropy"))
    finally:
        _limit_chunks(world, limit or 1024)
    for found, wanted in zip(logprobs(result), singly, strict=True):
        assert_close(found, wanted, "logprobs, in the order of the datums")
    assert_close(result.metrics["loss:sum"], -sum(p.sum() for p in singly), "loss")


def _limit_chunks(world: World, limit: int) -> None:
    if hasattr(training_client, "MAX_CHUNK_LEN"):
        setattr(training_client, "MAX_CHUNK_LEN", limit)  # noqa: B010
    else:
        world.set_flags(fwdbwd_max_chunk_len=limit)


@case("more datums than fit into one request")
def large_batch(world: World) -> None:
    """As many as one request may hold, and some."""
    texts = [random_tokens(3, 1000 + n) for n in range(1030)]
    result = world.forward(world.fresh, [datum(text) for text in texts])
    last = world.forward(world.fresh, [datum(texts[-1])])
    assert len(logprobs(result)) == len(texts)
    assert_close(logprobs(result)[-1], logprobs(last)[0], "logprobs of the last datum")


@case("the async methods do the same")
def async_methods(world: World) -> None:
    async def run(model: Any) -> Any:
        future = await model.forward_backward_async([datum(text) for text in TEXTS], "cross_entropy")
        step = await model.optim_step_async(types.AdamParams(learning_rate=1e-2))
        await step.result_async()
        return await future.result_async()

    model, twin = world.model(), world.model()
    found, wanted = asyncio.run(run(model)), world.step(twin)
    assert_close(found.metrics["loss:sum"], wanted.metrics["loss:sum"], "loss")
    _assert_equal(world, model, twin)


@case("errors: an unknown loss fails its future, category user")
def unknown_loss(world: World) -> None:
    error = raises(Exception, lambda: settle(world.model().forward([datum(TEXTS[0])], "nonsense")), "'nonsense'")
    if isinstance(error, pydantic.ValidationError):
        raise Absent  # this SDK refuses the name itself
    _assert_user_error(error)
    assert "nonsense" in str(error), error


@case("errors: a bad batch fails its future, and the model goes on")
def bad_batch(world: World) -> None:
    model = world.model()
    bad = datum(TEXTS[0], weights=np.ones(3, np.float32))
    error = raises(Exception, lambda: settle(model.forward([bad], "cross_entropy")), "3 weights for 8 tokens")
    _assert_user_error(error)
    for found, text in zip(logprobs(world.forward(model)), TEXTS, strict=True):
        assert len(found) == len(text) - 1


def _assert_user_error(error: Exception) -> None:
    assert isinstance(error, tinker.RequestFailedError), repr(error)
    assert error.category.value.lower() == "user", error.category


def _assert_equal(world: World, model: Any, twin: Any) -> None:
    """Both have trained, and to the same weights."""
    three = [logprobs(world.forward(one)) for one in (model, twin, world.fresh)]
    for found, wanted, old in zip(*three, strict=True):
        assert_close(found, wanted, "logprobs", within=5e-3)
        assert np.abs(found - old).max() > 0.01, "the steps did nothing"
