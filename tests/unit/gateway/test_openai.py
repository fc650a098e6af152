"""The OpenAI endpoints, in front of a sampler that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from openai.types.chat import ChatCompletionMessage
from tokenizers import AddedToken

from gateway.openai import schemas as openai_schemas
from gateway.openai.call_forms import FORMS
from tests.support.waiting import until
from tests.unit.gateway.stack import ALIAS, BASE_MODEL, Client, Stack
from tests.unit.gateway.talking import END, START, TalkingSampler, logprob
from tinsmith.errors import InvalidRequest, OutOfCapacity, ServiceError
from tinsmith.rpc.words import word_of
from tinsmith.tool_calls import ToolCallFormat
from tinsmith.v1 import sampler_pb2 as pb

pytestmark = pytest.mark.gateway(sampler=TalkingSampler, openai_wait_s=0.3)

CHAT: dict[str, Any] = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 100}
OWNERS = ("ada", "bob", "eve")
CONTEXT = 2048
"""Context length of the stack's sampler, in tokens."""
SAYS = "the snow ❄ and the sand"


@pytest.fixture
def sampler(stack: Stack) -> TalkingSampler:
    assert isinstance(stack.sampler, TalkingSampler)
    return stack.sampler


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"authorization": "Bearer tml-test"}) as client:
        yield client


async def ask(client: Client, endpoint: str, body: dict[str, Any], *, status: int = 200, **fields: Any) -> Any:
    reply = await client.post(f"/v1/{endpoint}", json=body | fields)
    assert reply.status_code == status, reply.text
    return reply.json()


async def refusal(client: Client, endpoint: str, body: dict[str, Any], *, status: int = 400, **fields: Any) -> Any:
    error = (await ask(client, endpoint, body, status=status, **fields))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def events(client: Client, endpoint: str, body: dict[str, Any], **fields: Any) -> list[Any]:
    """Events of a stream that ends well."""
    async with client.stream("POST", f"/v1/{endpoint}", json=body | fields | {"stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def saved(client: Client, *, kind: str = "sampler") -> str:
    """A tinker:// path."""
    model_id = await client.model(await client.session())
    endpoint = "save_weights_for_sampler" if kind == "sampler" else "save_weights"
    receipt = await client.call(endpoint, {"model_id": model_id, "seq_id": 1, "path": "step1"})
    return (await client.result(receipt))["path"]


# Models


async def test_models_are_the_base_models_and_the_callers_checkpoints(client: Client) -> None:
    path = await saved(client)
    listed = (await ask_models(client))["data"]
    assert [each["id"] for each in listed] == [BASE_MODEL, ALIAS, path]
    assert listed[2]["parent"] == BASE_MODEL
    for each in listed:
        assert (await client.get(f"/v1/models/{each['id']}")).json() == each
        quoted = str(each["id"]).replace("/", "%2F").replace(":", "%3A")
        assert (await client.get(f"/v1/models/{quoted}")).json() == each


async def ask_models(client: Client) -> Any:
    return (await client.get("/v1/models")).json()


async def test_unknown_models_are_404_by_name(client: Client) -> None:
    for name in ("no/model", "tinker://nobody/weights/x", "tinker://a:train:0/sampler_weights/x"):
        error = await refusal(client, "chat/completions", CHAT, model=name, status=404)
        assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "invalid_request_error")
        assert name in error["message"]
        reply = await client.get(f"/v1/models/{name}")
        assert reply.status_code == 404
        assert reply.json()["error"]["param"] == "model"
    assert (await refusal(client, "completions", COMPLETION, model="tinker://x"))["param"] == "model"


CALLS = [{"type": "function", "function": {"name": "add", "arguments": text}} for text in ("{}", "{a")]
"""The arguments of the second one are not JSON."""


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat/completions", {"stop": 5}, "stop"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat/completions", {"tool_choice": "any"}, "tool_choice"),
        ("chat/completions", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": CALLS}]},
            "messages[1].tool_calls[1].function.arguments",
        ),
        ("completions", {"prompt": {}}, "prompt"),
        ("completions", {"prompt": [["a"]]}, "prompt[0][0]"),
        ("responses", {"messages": None, "input": [5]}, "input[0]"),
        ("responses", {"messages": None, "input": [{"type": "function_call"}]}, "input[0].call_id"),
        (
            "responses",
            {
                "messages": None,
                "input": [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{a"}],
            },
            "input",
        ),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named_by_its_place_in_the_body(
    client: Client, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    error = await refusal(client, endpoint, COMPLETION if endpoint == "completions" else CHAT, **fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


async def test_other_paths_answer_in_openais_form(client: Client) -> None:
    paths = (("POST", "/v1/embeddings", 404), ("DELETE", "/v1/models/x", 405), ("GET", "/v1/completions", 405))
    for method, path, status in paths:
        reply = await client.request(method, path)
        assert reply.status_code == status
        assert path in reply.json()["error"]["message"]
        assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.gateway(api_keys=["tml-one"])
async def test_a_key_is_needed_where_there_are_keys(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        reply = await client.get("/v1/models")
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert "set OPENAI_API_KEY" in reply.json()["error"]["message"]
        for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            wrong = await client.get("/oai/api/v1/models", headers=headers)
            assert wrong.status_code == 401
            assert "set OPENAI_API_KEY" in wrong.json()["error"]["message"]
            assert "TINKER_API_KEY" in (await client.get("/api/v1/sessions", headers=headers)).text
        for headers in ({"authorization": "Bearer tml-one"}, {"x-api-key": "tml-one"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


# Answers


async def test_a_chat(client: Client, sampler: TalkingSampler) -> None:
    answer = await ask(client, "chat/completions", CHAT)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == BASE_MODEL
    assert answer["version"] is None
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAYS, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    num_prompt = len(sampler.tokenizer.encode(f"{START}user:Hi{END}").ids)
    num_sampled = len(sampler.tokenizer.encode(SAYS).ids) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert sampler.chat.add_generation_prompt


async def test_every_sampling_field_reaches_the_sampler(client: Client, sampler: TalkingSampler) -> None:
    fields = {"n": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 7, "seed": -1, "max_tokens": 5}
    answer = await ask(client, "chat/completions", CHAT, **fields, stop=["sand", "zzz"], stop_token_ids=[3])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    request = sampler.requests[-1]
    params = request.sampling_params
    assert request.num_samples == 2
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.75, 7, 5)
    assert params.seed == 2**63 - 1
    assert list(params.stop.strings) == ["sand", "zzz"]
    assert list(params.stop.token_ids) == [3]  # the sampler adds the model's own
    await ask(client, "chat/completions", CHAT, max_completion_tokens=6)
    assert sampler.requests[-1].sampling_params.max_tokens == 6
    assert not sampler.requests[-1].sampling_params.HasField("stop")
    await ask(client, "completions", {"model": BASE_MODEL, "prompt": "Hi"})
    assert sampler.requests[-1].sampling_params.max_tokens == 16


async def test_stop_takes_token_ids_as_the_tinker_api_does(client: Client, sampler: TalkingSampler) -> None:
    """Renderers give the end of a turn as a token id, and clients send it as the `stop` of both APIs."""
    for endpoint, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        await ask(client, endpoint, body, stop=[639, 7], stop_token_ids=[3])
        stop = sampler.requests[-1].sampling_params.stop
        assert (list(stop.strings), list(stop.token_ids)) == ([], [639, 7, 3])
        await ask(client, endpoint, body, stop=[])
        assert not sampler.requests[-1].sampling_params.HasField("stop")
        for wrong in ([2**40], [True], [5, "a"], [None], 5):
            assert (await refusal(client, endpoint, body, stop=wrong))["param"].startswith("stop"), wrong


async def test_the_chat_goes_to_the_template_as_it_came(client: Client, sampler: TalkingSampler) -> None:
    bounds = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**200}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": bounds}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is"},
    ]
    fields = {"messages": messages, "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    await ask(client, "chat/completions", CHAT, **fields, continue_final_message=True)
    sent = json.loads(sampler.chat.messages)
    assert sent[0]["content"] == "Be kind."
    assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert sent[2] == messages[2]
    assert json.loads(sampler.chat.tools) == [tool]
    assert json.loads(sampler.chat.template_kwargs) == {"enable_thinking": False}
    assert sampler.chat.continue_final_message
    assert not sampler.chat.add_generation_prompt
    await ask(client, "chat/completions", CHAT, **fields, tool_choice="none")
    assert sampler.chat.tools == ""  # the model does not hear of them, so it cannot call them


async def test_a_completion_of_text_has_the_tokenizers_own_tokens(client: Client, sampler: TalkingSampler) -> None:
    answer = await ask(client, "completions", COMPLETION)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": SAYS, "logprobs": None, "finish_reason": "stop"}]
    assert prompt_of(sampler) == sampler.tokenizer.encode(f"{START}Hi").ids
    await ask(client, "completions", COMPLETION, add_special_tokens=False)
    assert prompt_of(sampler) == sampler.tokenizer.encode("Hi").ids


def prompt_of(sampler: TalkingSampler, n: int = -1) -> list[int]:
    return [token for (token,) in struct.iter_unpack("<i", sampler.requests[n].prompt[0].encoded_text.tokens)]


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]]), (["a", "b"], None), ("a", None)]
)
async def test_prompts_are_text_or_tokens_or_lists_of_them(
    client: Client, sampler: TalkingSampler, prompt: Any, tokens: list[list[int]] | None
) -> None:
    answer = await ask(client, "completions", COMPLETION, prompt=prompt, n=2, return_token_ids=True)
    given = [choice["prompt_token_ids"] for choice in answer["choices"]]
    if tokens is None:
        tokens = [sampler.tokenizer.encode(f"{START}{text}").ids for text in ([prompt] if prompt == "a" else prompt)]
    assert given == [each for each in tokens for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(tokens)))
    assert answer["usage"]["prompt_tokens"] == sum(len(each) for each in tokens)
    streamed = await events(client, "completions", COMPLETION, prompt=prompt, n=2)
    for index in range(2 * len(tokens)):
        own = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == SAYS
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


async def test_length_and_stop_are_told_apart(client: Client) -> None:
    cut = (await ask(client, "completions", COMPLETION, max_tokens=2))["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("the snow"[: len(cut["text"])], "length")
    for stop, text in (("❄", "the snow "), (["sand", " the s"], "the snow ❄ and"), ("and", "the snow ❄ ")):
        for chunk in ({}, {"stream": True}):
            if chunk:
                parts = await events(client, "completions", COMPLETION, stop=stop)
                found = "".join(part["choices"][0]["text"] for part in parts)
                reason = parts[-1]["choices"][0]["finish_reason"]
            else:
                choice = (await ask(client, "completions", COMPLETION, stop=stop))["choices"][0]
                found, reason = choice["text"], choice["finish_reason"]
            assert (found, reason) == (text, "stop")


async def test_tokens_in_and_tokens_out(client: Client, sampler: TalkingSampler) -> None:
    """RL needs the exact prompt and output, one log-probability for each token, and the version."""
    fields = {"messages": [], "prompt_token_ids": [5, 6, 7], "return_token_ids": True, "logprobs": True}
    answer = await ask(client, "chat/completions", CHAT, **fields)
    assert answer["prompt_token_ids"] == [5, 6, 7]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*sampler.tokenizer.encode(SAYS).ids, sampler.end]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [logprob(n) for n in range(len(choice["token_ids"]))]
    parts = await events(client, "chat/completions", CHAT, **fields)
    assert [part.get("prompt_token_ids") for part in parts] == [[5, 6, 7], *[None] * (len(parts) - 1)]
    pieces = [part["choices"][0] for part in parts]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
    assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == entries


async def test_log_probabilities_of_a_chat(client: Client, sampler: TalkingSampler) -> None:
    answer = await ask(client, "chat/completions", CHAT, logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == SAYS + END
    snow = next(n for n, entry in enumerate(entries) if entry["bytes"][0] > 127)
    assert entries[snow]["token"].startswith(r"\xe2")  # a part of a character
    own, other = entries[0]["top_logprobs"]  # without the empty cell
    assert own == {key: entries[0][key] for key in ("token", "logprob", "bytes")}
    assert (other["token"], other["logprob"]) == (END, logprob(0) - 1)
    parts = await events(client, "chat/completions", CHAT, logprobs=True, top_logprobs=3)
    assert [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]] == entries
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == SAYS
    assert max(len(part["choices"][0]["logprobs"]["content"]) for part in parts) == 1  # with its token


async def test_log_probabilities_of_a_completion(client: Client, sampler: TalkingSampler) -> None:
    choice = (await ask(client, "completions", COMPLETION, logprobs=1, stop="❄"))["choices"][0]
    listed = choice["logprobs"]
    assert choice["text"] == "the snow "
    assert len({len(listed[name]) for name in listed}) == 1
    assert listed["token_logprobs"][:2] == [logprob(0), logprob(1)]
    assert listed["top_logprobs"][0] == {listed["tokens"][0]: logprob(0)}
    for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token) or offset == len(choice["text"])
    plain = (await ask(client, "completions", COMPLETION, logprobs=0))["choices"][0]["logprobs"]
    assert plain["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt_and_its_log_probabilities(
    client: Client, sampler: TalkingSampler, stream: bool
) -> None:
    async def choice_of(**fields: Any) -> Any:
        if not stream:
            return (await ask(client, "completions", COMPLETION, **fields))["choices"][0]
        parts = [part["choices"][0] for part in await events(client, "completions", COMPLETION, **fields)]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = None
        if parts[0]["logprobs"] is not None:
            logprobs = {name: [x for part in parts for x in part["logprobs"][name] or []] for name in names}
        return {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}

    assert (await choice_of(echo=True))["text"] == f"Hi{SAYS}"
    assert (await choice_of(echo=True, prompt=f"Hi{END}"))["text"] == f"Hi{END}{SAYS}"
    scored = await choice_of(echo=True, logprobs=2)
    listed = scored["logprobs"]
    assert listed["tokens"][:3] == [START, "H", "i"]
    assert listed["token_logprobs"][:4] == [None, -1.0, -1.0, logprob(0)]
    assert listed["text_offset"][:4] == [0, 0, 1, 2]
    assert listed["top_logprobs"][1]["H"] == -1.0
    only = await choice_of(echo=True, logprobs=2, max_tokens=0)
    assert only["text"] == "Hi"
    assert only["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


async def saved_inflight(client: Client) -> str:
    model_id = await client.model(await client.session())
    body = {"model_id": model_id, "seq_id": 1, "path": "step1", "kind": "inflight"}
    return (await client.result(await client.call("save_weights_for_sampler", body)))["path"]


@pytest.mark.parametrize(("endpoint", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_a_completion_that_follows_a_run_names_the_versions_of_its_tokens(
    client: Client, sampler: TalkingSampler, endpoint: str, body: dict[str, Any]
) -> None:
    path = await saved_inflight(client)
    answer = await ask(client, endpoint, body, model=path, n=2)
    run_id, version_id = sampler.requests[-1].follow_run, sampler.requests[-1].version_id
    assert version_id == f"{run_id}@1" == answer["version"]
    num_tokens = answer["usage"]["completion_tokens"] // 2
    spans = [{"version": "before", "num_tokens": num_tokens - 1}, {"version": version_id, "num_tokens": 1}]
    assert [choice["tinsmith"] for choice in answer["choices"]] == 2 * [{"version_spans": spans}]
    parts = [part["choices"][0] for part in await events(client, endpoint, body, model=path, n=2)]
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert own[-1]["finish_reason"] == "stop"
        assert [part.get("tinsmith") for part in own] == [*[None] * (len(own) - 1), {"version_spans": spans}]
    assert "tinsmith" not in (await ask(client, endpoint, body))["choices"][0]
    assert sampler.requests[-1].follow_run == ""


# Streams


async def test_a_streamed_chat(client: Client) -> None:
    parts = await events(client, "chat/completions", CHAT, n=2, stream_options={"include_usage": True})
    *parts, last = parts
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(part["usage"] is None for part in parts)
    for index in (0, 1):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == SAYS
        assert [choice["finish_reason"] for choice in own] == [*[None] * (len(own) - 1), "stop"]
    assert not any("�" in json.dumps(part, ensure_ascii=False) for part in parts)
    without = await events(client, "chat/completions", CHAT)
    assert all("usage" not in part for part in without)


async def test_tokens_are_sent_as_they_come(client: Client, sampler: TalkingSampler) -> None:
    sampler.pauses = True
    sampler.go.clear()
    seen = ""
    async with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if seen.startswith("the"):
                    sampler.go.set()
    assert seen == SAYS


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "prompt": ["a", "b"]}])
async def test_a_client_that_leaves_stops_the_generation(
    client: Client, stack: Stack, sampler: TalkingSampler, fields: dict[str, Any]
) -> None:
    sampler.pauses = True
    sampler.go.clear()
    request = client.build_request("POST", "/v1/completions", json=COMPLETION | fields)
    if "stream" in fields:
        reply = await client.send(request, stream=True)
        await anext(reply.aiter_lines())
        await reply.aclose()
    else:
        sending = asyncio.create_task(client.send(request))
        await until(lambda: bool(sampler.requests))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await asyncio.wait_for(sampler.stopped.wait(), 5)
    assert stack.server is not None
    places = stack.server.app.state.gateway.sampling.places
    await until(lambda: places.num_prompts == 0)


async def test_a_failure_in_the_middle_of_a_stream_is_an_event(client: Client, sampler: TalkingSampler) -> None:
    sampler.error, sampler.error_after = ServiceError("the engine has died"), 2
    async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    assert reply.status_code == 200
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["message"] == "the engine has died"
    assert last["error"]["type"] == "server_error"


# Refused requests


REFUSED_IN_A_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    ({"presence_penalty": True}, "presence_penalty", "True"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"min_p": 1.5}, "min_p", "1.5"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "bias of token 5 is no number of -100 .. 100"),
    ({"logit_bias": {"5": True}}, "logit_bias", "bias of token 5"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "'the' is no token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no token id"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "'²' is no token id"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias", "99999999999"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "1024"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict", "form"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function", "strict"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "one name"),
    ({"messages": None}, "messages", "Field required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "wrong": 1}}},
        "response_format.json_schema.wrong",
        "not supported",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none of the tools"),
    ({"functions": []}, "functions", "not supported"),
    ({"store": True}, "store", "True"),
    ({"wrong": 1}, "wrong", "not supported"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"top_p": 0}, "top_p", "0"),
    ({"n": 0}, "n", "0"),
    ({"n": 2000}, "n", "max_num_samples 1024"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 2**40}, "max_tokens", "1099511627776"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "Field required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
    ({"messages": [{"role": "martian", "content": "Hi"}]}, "messages", "martian"),
    ({"prompt_token_ids": [1]}, "prompt_token_ids", "messages"),
    ({"prompt_token_ids": [2**31], "messages": []}, "prompt_token_ids", "2147483648"),
    (
        {"prompt_token_ids": [5, 100_000], "messages": []},
        "prompt_token_ids",
        "token id 100000 at position 1 is outside",
    ),
    ({"prompt_token_ids": [], "messages": []}, "prompt", "empty"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "together"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids", "1099511627776"),
    ({"separate_reasoning": True}, "separate_reasoning", "send false"),
]


async def test_unsupported_fields_of_a_chat_are_refused_by_name(client: Client) -> None:
    for fields, param, part in REFUSED_IN_A_CHAT:
        error = await refusal(client, "chat/completions", CHAT, **fields)
        assert error["type"] == "invalid_request_error", fields
        assert part in error["message"], fields
        assert param in (None, error["param"]), fields


REFUSED_IN_A_COMPLETION: list[tuple[dict[str, Any], str | None, str]] = [
    ({"best_of": 3}, "best_of", "equals n"),
    ({"suffix": "x"}, "suffix", "supports only ''"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": []}, "prompt", "0 prompts"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt", "1024"),
    ({"prompt": [2**31]}, "prompt", "2147483648"),
    ({"prompt": [[5], [5, 100_000]]}, "prompt", "token id 100000 at position 1 is outside the vocabulary [0, 100000)"),
    ({"prompt": None}, "prompt", "Field required"),
    ({"best_of": 1, "n": 2}, "best_of", "equals n"),
    ({"prompt": [1, "a"]}, None, "prompt"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": 2**31}, "logprobs", "2147483648"),
]


async def test_unsupported_fields_of_a_completion_are_refused_by_name(client: Client) -> None:
    for fields, param, part in REFUSED_IN_A_COMPLETION:
        error = await refusal(client, "completions", COMPLETION | {"add_special_tokens": False}, **fields)
        assert error["type"] == "invalid_request_error", fields
        assert part in error["message"], fields
        assert param in (None, error["param"]), fields


async def test_fields_that_change_nothing_are_accepted(client: Client) -> None:
    nothing = {
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "min_p": 0,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": "me",
        "n": 1,
    }
    await ask(client, "completions", COMPLETION, **nothing, best_of=1, suffix=None)
    chat = {"response_format": {"type": "text"}, "tool_choice": "auto", "store": False, "modalities": ["text"]}
    await ask(client, "chat/completions", CHAT, **nothing, **chat, separate_reasoning=False)


async def test_null_is_absent_everywhere(client: Client, sampler: TalkingSampler) -> None:
    """Clients of typed languages send all fields that they know."""
    schemas = ((openai_schemas.Chat, CHAT, "chat/completions"), (openai_schemas.Completion, COMPLETION, "completions"))
    for schema, body, endpoint in schemas:
        nulls = dict.fromkeys([*schema.model_fields, "unknown", *openai_schemas.HARMLESS])
        await ask(client, endpoint, nulls | body)
    call = {"type": None, "id": None, "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "name": None, "tool_calls": [call], "audio": None}]
    await ask(client, "chat/completions", CHAT, messages=messages, stream_options=None)
    (sent,) = json.loads(sampler.chat.messages)
    assert sent == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    await ask(client, "chat/completions", CHAT, chat_template_kwargs={"enable_thinking": None, "now": "noon"})
    assert json.loads(sampler.chat.template_kwargs) == {"now": "noon"}
    await ask(client, "chat/completions", CHAT, logprobs=False, top_logprobs=0)
    await ask(client, "completions", COMPLETION, parallel_tool_calls=True)
    function = {"name": "f", "description": None, "parameters": None, "strict": None, "unknown": None}
    await ask(client, "chat/completions", CHAT, tools=[{"type": "function", "function": function, "unknown": None}])
    (sent,) = json.loads(sampler.chat.tools)
    assert sent == {"type": "function", "function": {"name": "f"}}, "a template would show a null"


async def test_an_answer_is_sent_back_as_the_clients_hold_it(client: Client, sampler: TalkingSampler) -> None:
    """As model_dump() gives messages of the openai package, parsed and streamed ones too, and of litellm."""
    plain = {"role": "assistant", "content": "7", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    for message in (
        ChatCompletionMessage(role="assistant", content="7", annotations=[]).model_dump(),
        {**plain, "parsed": {"a": 7}},
        {"role": "assistant", "content": "7", "provider_specific_fields": {"refusal": None}},
        {"role": "assistant", "content": [{"type": "text", "text": "7", "annotations": []}]},
    ):
        await ask(client, "chat/completions", CHAT, messages=[message])
        assert json.loads(sampler.chat.messages) == [{"role": "assistant", "content": "7"}]
    calls = [{"id": "c", "index": 0, "type": "function", "function": function}]
    await ask(client, "chat/completions", CHAT, messages=[{**plain, "content": None, "tool_calls": calls}])
    (sent,) = json.loads(sampler.chat.messages)
    assert sent["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    for field in ("refusal", "audio"):
        assert (await refusal(client, "chat/completions", CHAT, messages=[{**plain, field: "no"}]))["param"]


async def test_fields_that_do_not_concern_the_model_are_accepted_and_ignored(
    client: Client, sampler: TalkingSampler
) -> None:
    harmless = {
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "safety_identifier": "s",
        "service_tier": "flex",
        "verbosity": "high",
    }
    assert harmless.keys() == openai_schemas.HARMLESS
    for endpoint, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        await ask(client, endpoint, body, seed=1)
        await ask(client, endpoint, body, seed=1, **harmless, store=False)
        assert sampler.requests[-1] == sampler.requests[-2]
        assert (await refusal(client, endpoint, body, store=True))["param"] == "store"


async def test_penalties_and_biases_reach_the_sampler(client: Client, sampler: TalkingSampler) -> None:
    fields = {
        "frequency_penalty": -0.5,
        "presence_penalty": 2,
        "repetition_penalty": 1.25,
        "min_p": 0.125,
        "logit_bias": {"5": -100, "17": 0.5},
    }
    for endpoint, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        await ask(client, endpoint, body, **fields)
        params = sampler.requests[-1].sampling_params
        assert {name: getattr(params, name) for name in fields if name != "logit_bias"} == {
            name: value for name, value in fields.items() if name != "logit_bias"
        }
        assert dict(params.logit_bias) == {5: -100, 17: 0.5}
        await ask(client, endpoint, body)
        assert not sampler.requests[-1].sampling_params.HasField("repetition_penalty")


async def test_logprobs_true_of_a_completion_is_1(client: Client) -> None:
    (one,) = (await ask(client, "completions", COMPLETION, logprobs=1))["choices"]
    (true,) = (await ask(client, "completions", COMPLETION, logprobs=True))["choices"]
    assert one["logprobs"] is not None
    assert true == one
    (none,) = (await ask(client, "completions", COMPLETION, logprobs=False))["choices"]
    assert none["logprobs"] is None


async def test_a_chat_without_a_maximum_ends_at_the_servers_default(stack: Stack, sampler: TalkingSampler) -> None:
    async def maximum(**fields: Any) -> int | None:
        async with Client(base_url=stack.url, headers={"authorization": "Bearer tml-test"}) as client:
            await ask(client, "chat/completions", CHAT, **fields)
        params = sampler.requests[-1].sampling_params
        return params.max_tokens if params.HasField("max_tokens") else None

    assert await maximum(max_tokens=None, max_completion_tokens=7) == 7
    room = CONTEXT - len(sampler.requests[-1].prompt[0].encoded_text.tokens) // 4
    assert await maximum() == room  # the default is above the context
    await stack.restart_gateway(openai_default_max_tokens=9)
    assert await maximum() == 9
    assert await maximum(max_tokens=10) == 10
    await stack.restart_gateway(openai_default_max_tokens=0)
    assert await maximum() is None


async def test_the_user_goes_into_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gateway.openai"):
        await ask(client, "completions", COMPLETION, user="someone")
        await ask(client, "chat/completions", CHAT, user="someone")
    assert [record.getMessage() for record in caplog.records if "someone" in record.getMessage()] == [
        f"samples from {BASE_MODEL} for user 'someone'"
    ] * 2


async def test_a_body_that_is_no_json_object_is_400(client: Client) -> None:
    for content in (b"{", b"[]", b"\xff"):
        reply = await client.post("/v1/completions", content=content)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


# Waiting requests


async def test_a_checkpoint_is_published_when_the_sampler_lacks_it(
    client: Client, stack: Stack, sampler: TalkingSampler
) -> None:
    for kind in ("sampler", "training"):
        path = await saved(client, kind=kind)
        sampler.versions.clear()
        answer = await ask(client, "chat/completions", CHAT, model=path)
        assert answer["model"] == path
        assert answer["version"] == stack.trainer.published[-1] == sampler.requests[-1].version_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_sampler_is_429_after_a_while(client: Client, sampler: TalkingSampler, stream: bool) -> None:
    sampler.error = OutOfCapacity("the queue is full")
    reply = await client.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert len(sampler.requests) > 1
    sampler.error = None
    await ask(client, "completions", COMPLETION)


async def test_a_sampler_that_is_gone_is_503_after_a_while(client: Client, stack: Stack) -> None:
    await ask(client, "completions", COMPLETION)
    await stack.sampler_backend.stop()
    reply = await client.post("/v1/completions", json=COMPLETION)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    await stack.sampler_backend.start()
    await stack.restart_gateway(openai_wait_s=20)  # it waits for the connection that comes back
    await ask(client, "completions", COMPLETION)


@pytest.mark.gateway(max_pending_samples=1)
async def test_too_many_requests_at_once_are_429(client: Client, sampler: TalkingSampler) -> None:
    sampler.go.clear()
    first = asyncio.create_task(ask(client, "completions", COMPLETION))
    await until(lambda: bool(sampler.requests))
    assert "max_pending_samples" in (await refusal(client, "completions", COMPLETION, status=429))["message"]
    sampler.go.set()
    await first


def slow_template(sampler: TalkingSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering takes long enough for other requests to come meanwhile."""
    tokenize = sampler.Tokenize

    async def slowly(request: Any, context: Any) -> Any:
        await asyncio.sleep(0.1)
        return await tokenize(request, context)

    monkeypatch.setattr(sampler, "Tokenize", slowly)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("endpoint", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
@pytest.mark.gateway(max_pending_samples=8)
async def test_requests_that_come_at_once_hold_their_places_while_their_prompts_are_rendered(
    stack: Stack, sampler: TalkingSampler, monkeypatch: pytest.MonkeyPatch, endpoint: str, body: Any, stream: bool
) -> None:
    slow_template(sampler, monkeypatch)
    assert stack.server is not None
    places = stack.server.app.state.gateway.sampling.places
    sampler.pauses = stream
    sampler.go.clear()
    limits = httpx.Limits(max_connections=24)
    async with httpx.AsyncClient(base_url=stack.url, timeout=20, limits=limits) as client:
        await asyncio.gather(*[client.get("/v1/models") for _ in range(24)])  # the connections are warm
        sent = [asyncio.create_task(client.post(f"/v1/{endpoint}", json=body | {"stream": stream})) for _ in range(24)]
        await until(lambda: sum(each.done() for each in sent) >= 24 - 8 or len(sampler.requests) > 8)
        assert places.num_prompts == 8
        sampler.go.set()
        replies = await asyncio.gather(*sent)
        assert sorted({reply.status_code for reply in replies}) == [200, 429]
        assert sum(reply.status_code == 200 for reply in replies) == len(sampler.requests) == 8
        await until(lambda: places.num_prompts == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.gateway(max_pending_samples=4, max_pending_samples_per_owner=3)
async def test_each_prompt_of_a_list_takes_a_place(client: Client, sampler: TalkingSampler, stream: bool) -> None:
    sampler.go.clear()
    sampler.pauses = True
    asked = COMPLETION | {"stream": stream}
    first = asyncio.create_task(client.post("/v1/completions", json=asked | {"prompt": ["Hi", "Ho"], "n": 2}))
    await until(lambda: len(sampler.requests) == 2)
    refused = await refusal(client, "completions", asked, status=429, prompt=["Hi", "Ho"])
    assert "2 more would be above max_pending_samples_per_owner 3" in refused["message"]
    refused = await refusal(client, "completions", asked, prompt=["a", "b", "c", "d"])
    assert refused["message"].startswith("prompt: 4 prompts are more than this server has places")
    assert refused["param"] == "prompt"
    third = asyncio.create_task(client.post("/v1/completions", json=asked))  # choices take no place of their own
    await until(lambda: len(sampler.requests) == 3)
    sampler.go.set()
    assert [reply.status_code for reply in await asyncio.gather(first, third)] == [200, 200]
    assert (await client.post("/v1/completions", json=asked | {"prompt": ["a", "b", "c"]})).status_code == 200


@pytest.mark.gateway(max_pending_samples=2)
async def test_both_apis_share_the_places(stack: Stack, sampler: TalkingSampler) -> None:
    sampler.go.clear()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    sample = {"base_model": BASE_MODEL, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
    async with httpx.AsyncClient(base_url=stack.url, timeout=20) as client:
        assert (await client.post("/api/v1/asample", json=sample)).status_code == 200
        sent = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: len(sampler.requests) == 2)
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 429
        assert (await client.post("/api/v1/asample", json=sample)).status_code == 429
        sampler.go.set()
        assert (await sent).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.gateway(max_pending_samples=1)
async def test_a_place_is_free_again_whatever_a_request_ended_with(
    client: Client, sampler: TalkingSampler, stream: bool
) -> None:
    asked = CHAT | {"stream": stream}
    for _ in range(2):
        martian = [{"role": "martian", "content": "?"}]
        await refusal(client, "chat/completions", asked, messages=martian)
        await refusal(client, "chat/completions", asked, model="no/model", status=404)
        sampler.error = InvalidRequest("prompt: is bad", field="prompt")
        await refusal(client, "chat/completions", asked)
        sampler.error = None
        await ask(client, "chat/completions", CHAT)
        await events(client, "chat/completions", CHAT)


async def test_a_refusal_of_the_sampler_names_the_field_of_this_api(client: Client, sampler: TalkingSampler) -> None:
    sampler.error = InvalidRequest("topk_sample_logprobs: 500 is outside 0..128", field="topk_sample_logprobs")
    error = await refusal(client, "completions", COMPLETION)
    assert (error["param"], error["message"]) == ("top_logprobs", "top_logprobs: 500 is outside 0..128")
    sampler.error = InvalidRequest("sampling_params.logit_bias: token id 9 is out", field="sampling_params.logit_bias")
    error = await refusal(client, "completions", COMPLETION)
    assert (error["param"], error["message"]) == ("logit_bias", "logit_bias: token id 9 is out")


async def test_the_tokenizer_is_asked_for_once(client: Client, sampler: TalkingSampler) -> None:
    await asyncio.gather(*[ask(client, "completions", COMPLETION) for _ in range(5)])
    assert sampler.num_tokenizers == 1


async def test_samplers_with_one_tokenizer_share_it_and_that_of_one_that_is_gone_goes(
    client: Client, stack: Stack, sampler: TalkingSampler
) -> None:
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    await ask(client, "completions", COMPLETION)
    (replica,), generator = gateway.clients.samplers.all, gateway.sampling.generator
    (first,) = (last,) = generator._tokenizers.values()
    for _ in range(3):
        assert replica.info is not None
        replica.info.boot_id += "+"  # it was started again
        await ask(client, "completions", COMPLETION)
        (last,) = generator._tokenizers.values()
    assert sampler.num_tokenizers == 4
    assert last is not first
    assert last.result().vocabulary is first.result().vocabulary


@pytest.mark.gateway(
    openai_wait_s=0.3, api_keys=[{"key": f"tml-{name}", "owner": name, "admin": name == "ada"} for name in OWNERS]
)
async def test_every_owner_who_samples_a_checkpoint_is_in_the_audit_log_once(stack: Stack) -> None:
    clients = [Client(base_url=stack.url, timeout=20, headers={"x-api-key": f"tml-{name}"}) for name in OWNERS]
    path = await saved(clients[0])
    published = f"/api/v1/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}/publish"
    assert (await clients[0].post(published)).status_code == 200
    for one in clients * 2:
        await ask(one, "completions", COMPLETION, model=path)
    entries = (await clients[0].get("/api/v1/audit")).json()["entries"]
    readers = [each["event_details"]["actor"] for each in entries if each["event"] == "checkpoint_read"]
    assert sorted(readers) == [f"tml:organization_user:{name}" for name in OWNERS]
    for one in clients:
        await one.aclose()


async def test_a_refused_reading_is_refused_again_and_leaves_no_audit_event(client: Client, stack: Stack) -> None:
    """The refusal was taken for the owner's first sample: the next request got as far as the sampler."""
    model_id = await client.model(await client.session())
    body = {"model_id": model_id, "seq_id": 1, "path": "x"}
    path = (await client.result(await client.call("save_weights_external", body)))["path"]
    for _ in range(2):
        reply = await client.post("/v1/completions", json=COMPLETION | {"model": path})
        assert reply.status_code == 400, reply.text
        assert "made for download" in reply.json()["error"]["message"]
    entries = (await client.get("/api/v1/audit")).json()["entries"]
    assert not [each for each in entries if each["event"] == "checkpoint_read"]


async def test_tokens_are_counted_also_for_clients_that_leave(
    client: Client, stack: Stack, sampler: TalkingSampler
) -> None:
    await ask(client, "completions", COMPLETION, prompt=[1, 2, 3])
    sampler.pauses = True
    sampler.go.clear()
    reply = await client.send(
        client.build_request("POST", "/v1/completions", json=COMPLETION | {"prompt": [1, 2, 3], "stream": True}),
        stream=True,
    )
    await anext(reply.aiter_lines())
    await reply.aclose()
    await asyncio.wait_for(sampler.stopped.wait(), 5)
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    await until(lambda: gateway.sampling.places.num_prompts == 0)
    num_sampled = len(sampler.tokenizer.encode(SAYS).ids) + 1
    assert (gateway.metrics.registry.get_sample_value("gateway_sampled_tokens_total") or 0) >= num_sampled + 1
    assert gateway.metrics.registry.get_sample_value("gateway_prompt_tokens_total") == 6


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("says", [CALL, f"I add.\n{CALL}\n{CALL}", "I do not."], ids=["call", "both", "text"])
async def test_calls_of_the_models_own_choice_are_read(client: Client, sampler: TalkingSampler, says: str) -> None:
    sampler.tool_call_format, sampler.says = pb.TOOL_CALL_FORMAT_HERMES, says
    (choice,) = (await ask(client, "chat/completions", CHAT, tools=TOOLS))["choices"]
    message = choice["message"]
    assert message["content"] == (says.split("<tool_call>")[0].rstrip() or None)
    calls = message.get("tool_calls", [])
    assert len(calls) == says.count(CALL)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert not sampler.requests[-1].HasField("grammar")  # it may say anything
    content, streamed, reasons = "", [""] * len(calls), []
    for chunk in await events(client, "chat/completions", CHAT, tools=TOOLS):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for part in choice["delta"].get("tool_calls", ()):
            streamed[part["index"]] += part["function"]["arguments"]
    assert content == (message["content"] or "")
    assert streamed == [call["function"]["arguments"] for call in calls]
    assert reasons == ["tool_calls" if calls else "stop"]


SPECIAL: dict[Any, tuple[str, str]] = {
    pb.TOOL_CALL_FORMAT_MISTRAL: ('I add.[TOOL_CALLS]add[ARGS]{"a": 1}', "I add."),
    pb.TOOL_CALL_FORMAT_KIMI: (
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        "I add.",
    ),
    pb.TOOL_CALL_FORMAT_HARMONY: (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
    ),
}
"""Form -> an answer with a call, and its text."""


@pytest.mark.parametrize("form", SPECIAL, ids=pb.ToolCallFormat.Name)
async def test_calls_marked_by_special_tokens_are_read(client: Client, sampler: TalkingSampler, form: Any) -> None:
    sampler.tool_call_format = form
    sampler.says, content = SPECIAL[form]
    marks = FORMS[cast(ToolCallFormat, word_of(pb.ToolCallFormat, form))].marks
    sampler.tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    (choice,) = (await ask(client, "chat/completions", CHAT, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (content or None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    chunks = [chunk["choices"][0] for chunk in await events(client, "chat/completions", CHAT, tools=TOOLS)]
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"a": 1}'
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == content
    (choice,) = (await ask(client, "chat/completions", CHAT))["choices"]
    assert "tool_calls" not in choice["message"]  # without tools nothing is read


async def test_calls_stay_text_where_their_form_is_not_known(client: Client, sampler: TalkingSampler) -> None:
    sampler.says = CALL
    (choice,) = (await ask(client, "chat/completions", CHAT, tools=TOOLS))["choices"]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


async def test_a_schema_that_the_sampler_refuses_is_refused_with_its_place(
    client: Client, sampler: TalkingSampler
) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strong"}}}
    sampler.error = InvalidRequest("grammar.json_schema: Invalid type: strong", field="grammar.json_schema")
    for stream in (False, True):
        error = await refusal(client, "chat/completions", CHAT, response_format=shape, stream=stream)
        assert error["param"] == "response_format.json_schema.schema"
        assert error["message"] == "response_format.json_schema.schema: Invalid type: strong"
    assert json.loads(sampler.requests[-1].grammar.json_schema)["type"] == "strong"
