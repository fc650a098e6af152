from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.gateway.stack import ALIAS, BASE_MODEL, Client, Stack, sample_body
from tinsmith.v1 import sampler_pb2


async def sampler_of_a_save(client: Client, session_id: str) -> tuple[str, str]:
    """A sampling session of saved weights, and their path."""
    model_id = await client.model(session_id)
    body = {"model_id": model_id, "seq_id": 1, "path": "one"}
    path = (await client.result(await client.call("save_weights_for_sampler", body)))["path"]
    return await client.sampling_session(session_id, seq=5, model_path=path), path


async def test_a_sample_names_its_sequences_and_runs_once(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    seq_id = 10**18
    receipts = await asyncio.gather(*[client.call("asample", sample_body(sampler_id, seq_id)) for _ in range(3)])
    request_id = f"{sampler_id}:{seq_id}"
    expected = {
        "request_id": request_id,
        "model_id": None,
        "sample_sequence_ids": [f"{request_id}:0", f"{request_id}:1"],
    }
    assert receipts == [expected] * 3
    response = sampler_pb2.SampleResponse.FromString(await client.result(receipts[0]))
    assert len(response.sequences) == 2
    assert len(stack.sampler.requests) == 1
    await client.call("asample", sample_body(sampler_id, seq_id, num_samples=1), status=422)


async def test_every_field_reaches_the_sampler(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    body = sample_body(
        sampler_id,
        0,
        sampling_params={"max_tokens": 7, "seed": -1, "stop": [], "temperature": 0, "top_k": 3, "top_p": 0.5},
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=5,
        prompt_alt_tokens_k=6,
        target_prompt_logprobs={
            "data": [9],
            "dtype": "int64",
            "shape": [2, 6],
            "sparse_crow_indices": [0, 0, 1],
            "sparse_col_indices": [0],
        },
    )
    await client.result(await client.call("asample", body))
    (request,) = stack.sampler.requests
    params = request.sampling_params
    assert (params.max_tokens, params.seed, params.temperature) == (7, 2**63 - 1, 0.0)
    assert (params.top_k, params.top_p) == (3, 0.5)
    assert params.HasField("stop")
    assert not params.stop.strings
    assert not params.stop.token_ids
    assert (request.prompt_logprobs, request.prompt_logprobs_last_n, request.prompt_alt_tokens_k) == (True, 2, 6)
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs) == (4, 5)
    assert list(request.target_prompt_logprobs.shape) == [2, 6]
    assert request.target_prompt_logprobs.sparse_csr.values == (9).to_bytes(8, "little")
    assert not request.cache_salt  # any key is accepted, so there is one owner


async def test_a_version_that_is_not_loaded_is_published_once(stack: Stack, client: Client) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    stack.sampler.versions = {""}
    receipts = [await client.call("asample", sample_body(sampler_id, seq_id)) for seq_id in range(5)]
    for receipt in receipts:
        assert sampler_pb2.SampleResponse.FromString(await client.result(receipt)).sequences
    assert len(set(stack.trainer.published)) == 1
    assert len(stack.trainer.published) < 5


async def test_a_version_that_is_gone_fails_the_sample(stack: Stack, client: Client) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    stack.sampler.versions = {""}
    stack.trainer.checkpoints.clear()
    failure = await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    assert failure["category"] == "user"
    assert "no checkpoint" in failure["error"]


@pytest.mark.gateway(long_poll_s=0.5)
async def test_a_sampler_restart_is_a_delay(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    stack.sampler.go.clear()
    receipt = await client.call("asample", sample_body(sampler_id, 0))
    await stack.sampler_backend.stop()
    waiting = (await client.poll(receipt["request_id"])).json()
    assert (waiting["type"], waiting["queue_state"]) == ("try_again", "paused_capacity")
    assert "unreachable" in waiting["queue_state_reason"]
    stack.sampler.go.set()
    await stack.sampler_backend.start()
    while (reply := await client.poll(receipt["request_id"])).headers["content-type"] != "application/x-protobuf":
        assert reply.json()["type"] == "try_again"


@pytest.mark.gateway(max_pending_samples=2)
async def test_too_many_samples_get_429(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    stack.sampler.go.clear()
    receipts = [await client.call("asample", sample_body(sampler_id, seq_id)) for seq_id in (0, 1)]
    await client.call("asample", sample_body(sampler_id, 2), status=429)
    stack.sampler.go.set()
    for receipt in receipts:
        await client.result(receipt)
    await client.call("asample", sample_body(sampler_id, 2))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"num_samples": -1}, "num_samples"),
        ({"num_samples": 10**6}, "max_num_samples 1024"),
        ({"num_samples": "two"}, "'two'"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2**40]}]}}, "tokens[1]: 1099511627776"),
        ({"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "x"}]}}, "no image_folder"),
        ({"prompt": {"chunks": [{"type": "image", "data": "!", "format": "png"}]}}, "base64"),
        ({"sampling_params": {"max_tokens": 2**40}}, "max_tokens: 1099511627776"),
        ({"sampling_params": {"stop": [1.5]}}, "sampling_params.stop"),
        ({"model_path": "tinker://a/weights/b"}, "model_path"),
        ({"sampling_params": {"max_tokens": 1, "min_p": 0.5}}, "sampling_params.min_p"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, True]}]}}, "tokens[1]: True"),
    ],
)
async def test_an_error_in_a_sample_fails_its_future(client: Client, fields: dict[str, Any], part: str) -> None:
    sampler_id = await client.sampling_session(await client.session())
    receipt = await client.call("asample", sample_body(sampler_id, 0, **fields))
    failure = await client.result(receipt)
    assert failure["category"] == "user"
    assert part in failure["error"]
    await client.result(await client.call("asample", sample_body(sampler_id, 1)))


async def test_samples_need_ids_and_a_sampling_session_that_lives(client: Client) -> None:
    await client.call("asample", {"seq_id": 1}, status=400)
    await client.call("asample", sample_body("x", -1), status=400)
    lasting = await client.sampling_session(await client.session())
    await client.result(await client.call("asample", sample_body(lasting, 2**63 - 1)))
    await client.call("asample", sample_body(lasting, 2**63), status=400)
    for sampler_id in ("a:sample:0", "nonsense"):
        failure = await client.result(await client.call("asample", sample_body(sampler_id, 0)))
        assert failure["category"] == "user"
        assert repr(sampler_id) in failure["error"]
    assert (await client.get("/api/v1/samplers/nobody")).status_code == 404


async def test_unknown_samples_are_gone_after_a_restart(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    receipt = await client.call("asample", sample_body(sampler_id, 0))
    await client.result(receipt)
    await client.result(receipt)
    await stack.restart_gateway()
    assert (await client.poll(receipt["request_id"])).status_code == 410
    await client.result(await client.call("asample", sample_body(sampler_id, 1)))


async def test_every_client_that_joins_gets_a_number_of_its_own(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    join = {"sampling_session_id": await client.sampling_session(session_id), "type": "join_sampling_session"}
    replies = await asyncio.gather(*[client.call("join_sampling_session", join) for _ in range(5)])
    assert sorted(reply["client_counter"] for reply in replies) == [1, 2, 3, 4, 5]
    await stack.restart_gateway()
    expected = {"type": "join_sampling_session", "client_counter": 6}
    assert await client.call("join_sampling_session", join) == expected
    await client.call("join_sampling_session", {"sampling_session_id": "nobody:sample:0"}, status=404)
    await client.call("join_sampling_session", {}, status=400)
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    detail = (await client.call("join_sampling_session", join, status=404))["detail"]
    assert "has ended" in detail


async def test_sampling_sessions(client: Client) -> None:
    session_id = await client.session()
    assert await client.sampling_session(session_id) == await client.sampling_session(session_id)
    body = {"session_id": session_id, "sampling_session_seq_id": 1}
    detail = (await client.call("create_sampling_session", body | {"base_model": "no/model"}, status=400))["detail"]
    assert "'no/model'" in detail
    assert BASE_MODEL in detail
    await client.call("create_sampling_session", body, status=400)
    await client.call("create_sampling_session", body | {"session_id": "x", "base_model": BASE_MODEL}, status=404)
    sampler_id, path = await sampler_of_a_save(client, session_id)
    assert (await client.get(f"/api/v1/samplers/{sampler_id}")).json()["model_path"] == path
    both = body | {"model_path": path, "base_model": ALIAS}
    assert (await client.call("create_sampling_session", both))["sampling_session_id"] == f"{session_id}:sample:1"
    other = body | {"model_path": path, "base_model": "no/model", "sampling_session_seq_id": 2}
    await client.call("create_sampling_session", other, status=400)


async def test_sampling_sessions_of_live_sessions_take_a_bounded_place_in_memory(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner may have a million of them, and each end of a session looks at all rows in memory."""
    monkeypatch.setattr("gateway.database.sessions._MAX_LIVING", 2)
    await stack.restart_gateway()
    session_id = await client.session()
    sampler_ids = [await client.sampling_session(session_id, seq=seq) for seq in range(4)]
    rows = stack.gateway.store.samplers._living._rows
    assert len(rows) <= 2
    for sampler_id in sampler_ids:
        await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    assert len(rows) <= 2
    ended = {"reason": {"type": "success"}, "detail": None}
    await client.call(f"sessions/{session_id}/finish", ended)
    assert len(rows) == 0
    for sampler_id in sampler_ids:
        refused = await client.result(await client.call("asample", sample_body(sampler_id, 1)))
        assert "has ended" in refused["error"]
