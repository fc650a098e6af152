"""Forms of requests that clients of other servers of the Tinker API send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tinker.types import CreateSessionRequest

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, batch, sample_body

TEXT_OF = {"text": "a", "1": 7, "2": 0.5, "3": True, "4": None, "5": {"a": [1]}}
NOTES = {"text": "a", "1": "7", "2": "0.5", "3": "true", "4": "null", "5": '{"a": [1]}'}


async def test_a_model_without_lora_config_has_the_defaults_of_the_sdk(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    for seq, fields in enumerate(({}, {"lora_config": None}, {"lora_config": {"seed": 1}})):
        body: Any = {"session_id": session_id, "model_seq_id": seq, "base_model": BASE_MODEL}
        made = await client.result(await client.call("create_model", body | fields))
        config = stack.trainer.models[made["model_id"]].info.lora_config
        assert (config.rank, config.train_attn, config.train_mlp, config.train_unembed) == (32, True, True, True)


async def test_notes_may_be_numbers_and_are_kept_as_their_text(stack: Stack, client: Client) -> None:
    session_id = (await client.call("create_session", {"user_metadata": TEXT_OF}))["session_id"]
    assert (await client.get(f"/api/v1/sessions/{session_id}")).json()["user_metadata"] == NOTES
    model_id = await client.model(session_id, user_metadata=TEXT_OF)
    assert dict(stack.trainer.models[model_id].info.user_metadata) == NOTES
    assert (await client.get(f"/api/v1/training_runs/{model_id}")).json()["user_metadata"] == NOTES
    search = {"user_metadata": {"1": 7}, "limit": 5}
    assert [each["session_id"] for each in (await client.call("sessions/search", search))["sessions"]] == [session_id]


async def test_notes_of_a_session_may_be_null_as_in_the_type_of_the_sdk(client: Client) -> None:
    body = CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0").model_dump(mode="json")
    assert body["user_metadata"] is None
    session_id = (await client.call("create_session", body))["session_id"]
    assert (await client.get(f"/api/v1/sessions/{session_id}")).json()["user_metadata"] is None


@pytest.mark.parametrize(
    ("method", "action"),
    [("DELETE", ""), ("GET", "/archive"), ("POST", "/publish"), ("DELETE", "/publish"), ("PUT", "/ttl")],
)
async def test_a_bare_name_of_a_checkpoint_is_asked_for_its_kind(client: Client, method: str, action: str) -> None:
    model_id = await client.model(await client.session())
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"}))
    checkpoints = f"/api/v1/training_runs/{model_id}/checkpoints"
    body = {"ttl_seconds": 3600} if action == "/ttl" else None
    reply = await client.request(method, f"{checkpoints}/one{action}", json=body)
    assert reply.status_code == 400
    assert "'one' lacks its kind" in reply.json()["detail"]
    assert f"/training_runs/{model_id}/checkpoints/weights/one{action} or" in reply.json()["detail"]
    reply = await client.request(method, f"{checkpoints}/weights/one{action}", json=body)
    assert reply.status_code == (302 if action == "/archive" else 200)


async def test_a_checkpoint_may_have_the_name_of_an_action(client: Client) -> None:
    model_id = await client.model(await client.session())
    for seq_id, name in enumerate(("archive", "publish", "ttl"), start=1):
        await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": seq_id, "path": name}))
        path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/{name}"
        assert (await client.get(path)).json()["tinker_path"] == f"tinker://{model_id}/weights/{name}"
        assert (await client.delete(path)).status_code == 200
        assert (await client.get(path)).status_code == 404


async def test_top_prompt_logprobs_may_be_asked_for_alone(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    await client.result(await client.call("asample", sample_body(sampler_id, 0, topk_prompt_logprobs=3)))
    assert (stack.sampler.requests[-1].topk_prompt_logprobs, stack.sampler.requests[-1].prompt_logprobs) == (3, False)


async def submitted(client: Client, model_id: str, what: str) -> Any:
    """The receipt of an operation without a seq_id."""
    if what == "protobuf":
        content, kind = batch(model_id, 0).SerializeToString(), {"content-type": "application/x-protobuf"}
        return (await client.post("/api/v1/forward_backward", content=content, headers=kind)).json()
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "step": ("optim_step", {"adam_params": {}}),
        "null": ("optim_step", {"adam_params": {}, "seq_id": None}),
        "bad": ("optim_step", {"adam_params": {"eps": "x"}}),
        "save": ("save_weights", {"path": "one", "overwrite": True}),
        "json": (
            "forward_backward",
            {
                "forward_backward_input": {
                    "data": [{"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {}}],
                    "loss_fn": "cross_entropy",
                }
            },
        ),
    }
    path, body = bodies[what]
    return await client.call(path, body | {"model_id": model_id})


async def test_operations_without_seq_id_run_in_the_order_in_which_they_come(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    kinds = ["protobuf", "json", "step", "bad", "null", "save", "protobuf", "step"]
    receipts = [await submitted(client, model_id, kind) for kind in kinds]
    assert [receipt["request_id"] for receipt in receipts] == [f"{model_id}:{n}" for n in range(1, 9)]
    results = [await client.result(receipt) for receipt in receipts]
    assert [kind for kind, one in zip(kinds, results, strict=True) if b"error" in str(one).encode()] == ["bad"]
    assert stack.trainer.orders[model_id] == list(range(9))


async def test_equal_operations_without_seq_id_are_as_many_as_were_sent(stack: Stack, client: Client) -> None:
    """Two equal steps are two steps, also at once, after a restart, and behind what is only queued."""
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipts = await asyncio.gather(*[submitted(client, model_id, "step") for _ in range(5)])
    await stack.restart_gateway()
    receipts += await asyncio.gather(*[submitted(client, model_id, "step") for _ in range(5)])
    assert sorted(int(receipt["request_id"].rpartition(":")[2]) for receipt in receipts) == list(range(1, 11))
    stack.trainer.go.set()
    for receipt in receipts:
        await client.result(receipt)
    assert stack.trainer.orders[model_id] == list(range(11))


async def test_an_operation_that_was_not_accepted_leaves_no_gap(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    await client.result(await submitted(client, model_id, "step"))
    stack.trainer.is_full = True
    assert (await client.post("/api/v1/optim_step", json={"model_id": model_id, "adam_params": {}})).status_code == 429
    stack.trainer.is_full = False
    assert (await submitted(client, model_id, "step"))["request_id"] == f"{model_id}:2"
    await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
    receipt = await submitted(client, model_id, "step")  # numbers of the client's own count, too
    assert receipt["request_id"] == f"{model_id}:4"
    await client.result(receipt)
    for body in ({"seq_id": 0}, {"seq_id": "1"}):
        await client.call("optim_step", {"model_id": model_id, "adam_params": {}} | body, status=400)
    unknown = await client.call("optim_step", {"model_id": "nobody:train:0", "adam_params": {}})
    assert "there is no such model" in (await client.result(unknown))["error"]


def unnumbered(**fields: Any) -> dict[str, Any]:
    """A sample without ids but those in `fields`."""
    body = sample_body("", 0)
    del body["sampling_session_id"], body["seq_id"]
    return body | fields


async def test_samples_without_seq_id_get_numbers_of_their_own(stack: Stack, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    body = unnumbered(sampling_session_id=sampler_id)
    receipts = [await client.call("asample", body) for _ in range(3)]
    receipts.append(await client.call("asample", sample_body(sampler_id, 0)))
    for receipt in receipts:
        await client.result(receipt)
    await stack.restart_gateway()
    later = [await client.call("asample", body) for _ in range(3)]
    for receipt in later:
        await client.result(receipt)
    assert len({receipt["request_id"] for receipt in receipts + later}) == 7 == len(stack.sampler.requests)
    error = await client.result(await client.call("asample", unnumbered(sampling_session_id="nobody:sample:0")))
    assert "there is no" in error["error"]


async def test_samples_may_name_weights_instead_of_a_sampling_session(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    body = {"model_id": model_id, "seq_id": 1, "path": "one"}
    path = (await client.result(await client.call("save_weights_for_sampler", body)))["path"]
    versions = []
    for fields in (
        {"model_path": path},
        {"base_model": BASE_MODEL},
        {"model_path": path, "base_model": BASE_MODEL},
    ) * 2:
        await client.result(await client.call("asample", unnumbered(**fields)))
        versions.append(stack.sampler.requests[-1].version_id)
    assert versions == [f"{model_id}@1", "", f"{model_id}@1"] * 2
    assert len((await client.get("/api/v1/sessions")).json()["sessions"]) == 2  # one for all that named none
    for bad in ({"model_path": "tinker://a/b"}, {"model_path": f"{path}x"}, {"base_model": "no/model"}, {}):
        reply = await client.post("/api/v1/asample", json=unnumbered(**bad))
        assert reply.status_code in (400, 404), bad
        assert next(iter(bad), "model_path") in reply.json()["detail"]


async def test_a_path_stands_for_what_lies_there_when_it_is_sampled(stack: Stack, client: Client) -> None:
    """Also when its checkpoint is another one than at the sample before."""
    model_id = await client.model(await client.session())
    for seq_id in (1, 2):
        body = {"model_id": model_id, "seq_id": seq_id, "path": "newest"}
        path = (await client.result(await client.call("save_weights_for_sampler", body)))["path"]
        await client.result(await client.call("asample", unnumbered(model_path=path)))
        assert stack.sampler.requests[-1].version_id == f"{model_id}@{seq_id}"
        await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/sampler_weights/newest")


async def test_the_description_of_the_api_says_which_ids_may_be_absent(client: Client) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    required = {name: set(schemas[name]["required"]) for name in ("OptimStep", "SaveWeights", "Sample", "CreateModel")}
    assert required["OptimStep"] == {"model_id"}
    assert required["SaveWeights"] == {"model_id", "path"}
    assert required["Sample"] == {"prompt", "sampling_params"}
    assert "lora_config" not in required["CreateModel"]
