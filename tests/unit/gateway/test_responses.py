"""POST /v1/responses, by the `openai` package and by hand, in front of a sampler that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.openai import responses
from gateway.openai.response_schemas import Respond
from gateway.openai.responses import ResponseForm, chat_of
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.talking import TalkingSampler
from tinsmith.errors import InvalidRequest, RateLimited, ServiceError
from tinsmith.v1 import sampler_pb2 as pb

pytestmark = pytest.mark.gateway(sampler=TalkingSampler, openai_wait_s=0.3)

SAYS = "the snow ❄ and the sand"
ASKED: dict[str, Any] = {"model": BASE_MODEL, "input": "Hi"}


@pytest.fixture
def sampler(stack: Stack) -> TalkingSampler:
    assert isinstance(stack.sampler, TalkingSampler)
    return stack.sampler


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="tml-test", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"authorization": "Bearer tml-test"}) as client:
        yield client


async def test_text_in_and_text_out(client: openai.AsyncOpenAI, sampler: TalkingSampler) -> None:
    response = await client.responses.create(model=BASE_MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert response.output_text == SAYS
    assert (response.status, response.object, response.model) == ("completed", "response", BASE_MODEL)
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert response.to_dict()["store"] is False
    assert json.loads(sampler.chat.messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert response.usage is not None
    assert response.usage.output_tokens == len(sampler.tokenizer.encode(SAYS).ids) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 2


async def test_items_become_messages(client: openai.AsyncOpenAI, sampler: TalkingSampler) -> None:
    first = await client.responses.create(model=BASE_MODEL, input=[{"role": "user", "content": "Hi"}])
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be "},
                                                             {"type": "input_text", "text": "kind."}]},
        {"role": "user", "content": "Hi"},
        *first.output,  # as the documentation of the package sends it back
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]  # fmt: skip
    await client.responses.create(model=BASE_MODEL, input=items)
    function = {"name": "add", "arguments": {"a": 1}}
    assert json.loads(sampler.chat.messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": SAYS,
            "tool_calls": [
                {"type": "function", "id": "c1", "function": function},
                {"type": "function", "id": "c2", "function": {"name": "add", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


async def test_sampling_fields_reach_the_sampler(client: openai.AsyncOpenAI, sampler: TalkingSampler) -> None:
    asked = {"temperature": 0.5, "top_p": 0.75, "max_output_tokens": 5}
    response = await client.responses.create(**ASKED, **asked, extra_body={"seed": 3, "top_k": 7})
    params = sampler.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed, params.top_k) == (0.5, 0.75, 5, 3, 7)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.75, 5)


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = await client.responses.create(**ASKED, **fields)  # type: ignore[call-overload]
        (part,) = response.output[0].content
        assert [entry.logprob for entry in part.logprobs][:2] == [-0.25, -0.5]
        assert len(part.logprobs[0].top_logprobs) == fields.get("top_logprobs", 0)


async def test_a_stream_is_the_events_that_the_package_knows(client: openai.AsyncOpenAI) -> None:
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 5
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAYS
    assert events[0].type == "response.created"
    assert events[0].response.output == []
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == SAYS
    assert last.response.id == events[0].response.id
    assert last.response.usage is not None
    assert last.response.usage.output_tokens > deltas
    async with client.responses.stream(**ASKED) as stream:
        assert (await stream.get_final_response()).output_text == SAYS
    async with client.responses.stream(**ASKED, max_output_tokens=3) as stream:
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_events_have_their_names_and_no_done_follows(http: Client) -> None:
    for path in ("/v1/responses", "/oai/api/v1/responses", "/services/tinker-prod/oai/api/v1/responses"):
        reply = await http.post(path, json=ASKED | {"stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *blocks, rest = reply.text.split("\n\n")
        assert rest == ""
        for block in blocks:
            name, data = block.split("\n")
            assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_a_failure_in_the_middle_is_an_event(client: openai.AsyncOpenAI, sampler: TalkingSampler) -> None:
    sampler.error, sampler.error_after = ServiceError("the engine has died"), 3
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert [event.type for event in events][-2:] == ["error", "response.failed"]
    assert "the engine has died" in events[-2].message  # type: ignore[union-attr]
    assert events[-1].response.status == "failed"  # type: ignore[union-attr]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "only False"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps nothing of earlier requests"),
    ({"conversation": "conv_1"}, "conversation", "keeps nothing of earlier requests"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "keeps nothing of earlier requests"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "keeps nothing of earlier requests"),
    ({"background": True}, "background", "only False"),
    ({"truncation": "auto"}, "truncation", "only 'disabled'"),
    ({"input": None}, "input", "Field required"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "types message, function_call and"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]}, "", "input_audio"),
    ({"input": [{"role": "martian", "content": "Hi"}]}, "", "martian"),
    ({"max_output_tokens": 0}, "max_output_tokens", "0"),
    ({"max_output_tokens": 2**40}, "max_output_tokens", "max_output_tokens: 1099511627776"),
    ({"top_logprobs": 2**31}, "", "2147483648"),
    ({"include": ["web_search_call.results"]}, "include[0]", "web_search_call.results"),
    ({"tools": [{"type": "web_search"}]}, "", "web_search"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "text.format.schema"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]", "a b"),
    ({"frequency_penalty": 1}, "frequency_penalty", "not supported"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input", "not JSON"),
]


async def test_what_cannot_be_had_is_refused_by_name(http: Client) -> None:
    for fields, param, part in REFUSED:
        reply = await http.post("/v1/responses", json=ASKED | fields)
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()["error"]
        assert part in error["message"], fields
        assert param in ("", error["param"]), (fields, error)
    reply = await http.post("/v1/responses", json=ASKED | {"model": "no/model"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_null_is_absent_and_what_asks_for_nothing_is_ignored(http: Client, sampler: TalkingSampler) -> None:
    ignored = {"service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "store": False}
    ignored |= {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "truncation": "disabled"}
    for fields in (dict.fromkeys([*Respond.model_fields, "unknown"]), ignored):
        reply = await http.post("/v1/responses", json=fields | ASKED | {"seed": 1})
        assert reply.status_code == 200, reply.text
    assert sampler.requests[-1] == sampler.requests[-2]


async def test_a_response_counts_as_a_chat_does(stack: Stack, http: Client, sampler: TalkingSampler) -> None:
    async def counted() -> float:
        text = (await http.get("/metrics")).text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("gateway_sampled_tokens_total")
        )

    before = await counted()
    reply = await http.post("/v1/responses", json=ASKED)
    assert await counted() - before == reply.json()["usage"]["output_tokens"]


# Schemas and calls of tools


async def test_a_schema_and_calls_of_tools_are_those_of_chats(
    client: openai.AsyncOpenAI, sampler: TalkingSampler
) -> None:
    sampler.tool_call_format = pb.TOOL_CALL_FORMAT_HERMES
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    await client.responses.create(**ASKED, text={"format": form})
    assert json.loads(sampler.requests[-1].grammar.json_schema)["properties"] == schema["properties"]
    sampler.says = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools: Any = [{"type": "function", "name": "add", "parameters": schema, "strict": True}]
    for choice in ("auto", {"type": "function", "name": "add"}):
        response = await client.responses.create(**ASKED, tools=tools, tool_choice=choice)  # type: ignore[call-overload]
        assert sampler.requests[-1].grammar.lark
        assert [item.type for item in response.output] == ["message", "function_call"]
        called = response.output[1]
        assert (called.name, json.loads(called.arguments), called.status) == ("add", {"a": 1}, "completed")
        async with client.responses.stream(**ASKED, tools=tools) as stream:
            streamed = (await stream.get_final_response()).output[1]
        assert (streamed.name, json.loads(streamed.arguments)) == ("add", {"a": 1})  # type: ignore[union-attr]


def chunk(**choice: Any) -> dict[str, Any]:
    made = {"delta": {}, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "created": 1, "version": None, "choices": [made], "usage": None}


def call(index: int, arguments: str, *, name: str | None = None) -> dict[str, Any]:
    begins = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return chunk(delta={"tool_calls": [{"index": index, **begins, "function": function}]})


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_calls_of_tools_are_items_of_their_own() -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield chunk(delta={"role": "assistant", "content": ""})
        yield chunk(delta={"content": "I add."})
        yield call(0, "", name="add")
        yield call(0, '{"a":')
        yield call(0, " 1}")
        yield call(1, "{}", name="sub")
        yield chunk(finish_reason="tool_calls")
        yield {**chunk(), "choices": [], "usage": USAGE}

    body = Respond(model="m", input="Hi", stream=True)
    events = [event async for event in ResponseForm(body).events(chunks())]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    output = events[-1]["response"]["output"]
    shown = [(one.get("name"), one.get("arguments"), one["status"]) for one in output]
    done = "completed"
    assert shown == [(None, None, done), ("add", '{"a": 1}', done), ("sub", "{}", done)]
    called = [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": "I add.", "tool_calls": called}
    choice = {"message": message, "finish_reason": "tool_calls"}
    head = {"id": "chatcmpl-1", "created": 1, "version": None}
    whole = ResponseForm(body).whole(head | {"choices": [choice], "usage": USAGE})["output"]
    assert [{**one, "id": 0} for one in whole] == [{**one, "id": 0} for one in output]


@pytest.mark.parametrize(("finish_reason", "status"), [("tool_calls", "completed"), ("stop", "incomplete")])
async def test_a_call_that_a_stop_breaks_off_is_incomplete(finish_reason: str, status: str) -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield call(0, '{"a":', name="add")
        yield chunk(finish_reason=finish_reason)
        yield {**chunk(), "choices": [], "usage": USAGE}

    *_, last = [event async for event in ResponseForm(Respond(model="m", input="Hi", stream=True)).events(chunks())]
    assert last["response"]["status"] == "completed"
    assert [one["status"] for one in last["response"]["output"]] == [status]


def test_tools_go_to_the_chat_in_its_form() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    made = chat_of(Respond.model_validate(ASKED | {"tools": [tool], "tool_choice": "auto"}))
    assert made.tools is not None
    assert made.tools[0].function == {"name": "add", "parameters": {"type": "object"}, "strict": False}


def test_an_error_that_names_another_field_keeps_the_rest_of_what_it_says() -> None:
    with pytest.raises(RateLimited, match="max_output_tokens: 9 are too many") as caught, responses.named():
        raise RateLimited("max_tokens: 9 are too many", field="max_tokens", retry_after_s=7)
    assert caught.value.metadata == {"field": "max_output_tokens", "retry_after_s": "7"}


def test_an_error_about_a_message_names_the_input_without_an_index_of_the_chat() -> None:
    field = "messages[3].tool_calls"
    with pytest.raises(InvalidRequest, match="input: the template") as caught, responses.named():
        raise InvalidRequest(f"{field}: the template does not show them", field=field)
    assert caught.value.metadata == {"field": "input"}
