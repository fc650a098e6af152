"""Samplers that follow a training run."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.support.waiting import until
from tests.unit.gateway.stack import Client, Stack, sample_body


async def save(client: Client, model_id: str, seq_id: int, **fields: Any) -> Any:
    """With `path` it is named, with `sampling_session_seq_id` it is not."""
    body = {"model_id": model_id, "seq_id": seq_id, "kind": "inflight"} | fields
    return await client.result(await client.call("save_weights_for_sampler", body))


async def drawn_from(stack: Stack, client: Client, sampler_id: str, seq_id: int) -> str:
    await client.result(await client.call("asample", sample_body(sampler_id, seq_id)))
    return stack.sampler.requests[-1].version_id


async def test_every_inflight_sampler_of_a_run_follows_its_newest_inflight_save(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    first = (await save(client, model_id, 1, sampling_session_seq_id=1))["sampling_session_id"]
    assert await drawn_from(stack, client, first, 0) == f"{model_id}@1"
    snapshot = (await save(client, model_id, 2, sampling_session_seq_id=2, kind="snapshot"))["sampling_session_id"]
    assert await drawn_from(stack, client, first, 1) == f"{model_id}@1"
    path = (await save(client, model_id, 3, path="named"))["path"]
    by_path = await client.sampling_session(session_id, seq=3, model_path=path)
    for seq_id, sampler_id in enumerate((first, by_path), start=2):
        assert await drawn_from(stack, client, sampler_id, seq_id) == f"{model_id}@3"
    await save(client, model_id, 4, sampling_session_seq_id=4)
    for seq_id, sampler_id in enumerate((first, by_path), start=4):
        assert await drawn_from(stack, client, sampler_id, seq_id) == f"{model_id}@4"
    assert await drawn_from(stack, client, snapshot, 0) == f"{model_id}@2"
    other = await client.model(session_id, seq=1)
    await save(client, other, 1, sampling_session_seq_id=5)
    assert await drawn_from(stack, client, first, 9) == f"{model_id}@4"


async def test_an_inflight_save_moves_what_is_generating(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = (await save(client, model_id, 1, sampling_session_seq_id=1))["sampling_session_id"]
    await stack.sampler.moved.wait()
    assert stack.sampler.moves == [(model_id, f"{model_id}@1")]
    snapshot = (await save(client, model_id, 2, sampling_session_seq_id=2, kind="snapshot"))["sampling_session_id"]
    stack.sampler.moved.clear()
    await save(client, model_id, 3, path="named")
    await stack.sampler.moved.wait()
    assert stack.sampler.moves[1:] == [(model_id, f"{model_id}@3")]
    for each, follows in ((sampler_id, model_id), (snapshot, "")):
        await client.result(await client.call("asample", sample_body(each, 0)))
        assert stack.sampler.requests[-1].follow_run == follows


async def test_a_sampler_that_does_not_move_fails_no_save(
    stack: Stack, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    caplog.set_level(logging.DEBUG, "gateway.sampling.inflight")
    stack.trainer.samplers.clear()  # it does not get the version
    await save(client, model_id, 1, sampling_session_seq_id=1)
    await until(lambda: "cannot be moved" in caplog.text)
    assert f"generations of {model_id} at 127.0.0.1" in caplog.text
    assert "is not resident" in caplog.text


async def test_a_save_that_is_answered_again_moves_no_sampler_back(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = (await save(client, model_id, 1, sampling_session_seq_id=1))["sampling_session_id"]
    await save(client, model_id, 2, sampling_session_seq_id=2)
    moves = stack.sampler.moves
    await until(lambda: moves and moves[-1][1] == f"{model_id}@2")  # the answer does not wait for the move
    moves = moves[:]
    await stack.restart_gateway()
    again = await save(client, model_id, 1, sampling_session_seq_id=1)
    assert again["sampling_session_id"] == sampler_id
    assert stack.sampler.moves == moves
    assert await drawn_from(stack, client, sampler_id, 0) == f"{model_id}@2"


async def test_a_repeat_is_the_sample_that_runs_whatever_was_saved_meanwhile(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = (await save(client, model_id, 1, sampling_session_seq_id=1))["sampling_session_id"]
    stack.sampler.go.clear()
    receipt = await client.call("asample", sample_body(sampler_id, 0))
    await stack.sampler.called.wait()
    await save(client, model_id, 2, sampling_session_seq_id=2)
    assert await client.call("asample", sample_body(sampler_id, 0)) == receipt
    stack.sampler.go.set()
    await client.result(receipt)
    assert [request.version_id for request in stack.sampler.requests] == [f"{model_id}@1"]


@pytest.mark.gateway(reap_interval_s=0.2)
async def test_a_sampler_of_another_session_goes_on_when_the_run_is_released(stack: Stack, client: Client) -> None:
    training, sampling = await client.session(), await client.session()
    model_id = await client.model(training)
    path = (await save(client, model_id, 1, path="named"))["path"]
    sampler_id = await client.sampling_session(sampling, model_path=path)
    await save(client, model_id, 2, sampling_session_seq_id=1)
    await client.call(f"sessions/{training}/finish", {"reason": {"type": "success"}})
    async with asyncio.timeout(60):
        while model_id not in stack.trainer.deleted_models:
            await stack.trainer.deletion.wait()
            stack.trainer.deletion.clear()
    stack.sampler.versions = {""}
    assert await drawn_from(stack, client, sampler_id, 0) == f"{model_id}@2"


async def test_a_replaced_version_is_not_waited_for(stack: Stack, client: Client) -> None:
    """It goes away while it is published again; the run has moved on meanwhile."""
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = (await save(client, model_id, 1, sampling_session_seq_id=1))["sampling_session_id"]
    stack.sampler.versions = {""}
    publishing, go = asyncio.Event(), asyncio.Event()
    publish = stack.trainer.PublishCheckpoint

    async def slow(request: Any, context: Any) -> Any:
        publishing.set()
        await go.wait()
        return await publish(request, context)

    stack.trainer.PublishCheckpoint = slow  # type: ignore[method-assign]
    await stack.trainer_backend.stop()
    await stack.trainer_backend.start()
    receipt = await client.call("asample", sample_body(sampler_id, 0))
    await publishing.wait()
    await save(client, model_id, 2, sampling_session_seq_id=2)
    del stack.trainer.checkpoints[f"{model_id}/ephemeral/e1"]
    go.set()
    await client.result(receipt)
    assert stack.sampler.requests[-1].version_id == f"{model_id}@2"
