"""JSON answers and calls of tools, by the official `openai` client against the real stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, Field

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

MESSAGES: list[Any] = [{"role": "user", "content": "Name a colour."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "...", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strong"}}}}}


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    shade: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-test", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": BASE_MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1, **fields}
    )


def formatted(schema: Any, **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def test_parse_gives_an_object_of_the_clients_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=BASE_MODEL, messages=MESSAGES, response_format=Colour, n=2, seed=1, max_tokens=300
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Colour)


def test_json_is_the_same_streamed_and_whole_and_with_the_same_seed(client: openai.OpenAI) -> None:
    fields = {"response_format": formatted(PARAMETERS), "n": 2}
    whole = [choice.message.content for choice in ask(client, **fields).choices]
    again = [choice.message.content for choice in ask(client, **fields).choices]
    streamed = ["", ""]
    for chunk in ask(client, **fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert whole == again == streamed
    for text in whole:
        jsonschema.validate(json.loads(text), PARAMETERS)


def test_a_json_object_is_any_object_and_is_cut_at_max_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=6).choices[0]
    assert answer.message.content.startswith("{")
    assert answer.finish_reason in ("length", "stop")
    cut = ask(client, response_format=formatted({"type": "string", "minLength": 90}), max_tokens=6).choices[0]
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_tool_that_has_to_be_called_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert call.id
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_calls_are_streamed_as_the_client_library_reads_them(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = ask(client, **fields).choices[0].message.tool_calls
    state = ChatCompletionStreamState()
    num_chunks = 0
    for chunk in ask(client, **fields, stream=True, logprobs=True):
        state.handle_chunk(chunk)
        num_chunks += 1
    choice = state.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)  # type: ignore[union-attr]
    assert num_chunks > 4
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) > 4


def test_a_conversation_goes_on_from_a_tools_answer(client: openai.OpenAI) -> None:
    call = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [*MESSAGES, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}]
    answer = ask(client, messages=messages, tools=[WEATHER], max_tokens=5)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_tools_that_may_be_called_leave_the_answer_as_it_is(client: openai.OpenAI) -> None:
    asked = {"tools": [WEATHER, CLOCK], "max_tokens": 8, "extra_body": {"return_token_ids": True}}
    free, none = ask(client, **asked), ask(client, **asked, tool_choice="none")
    assert free.prompt_token_ids != none.prompt_token_ids  # the template shows them
    assert none.choices[0].message.tool_calls is None


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "schema": (
        {"response_format": formatted({"type": "object", "properties": {"a": {"type": "strong"}}})},
        "response_format.json_schema.schema",
        "strong",
    ),
    "strict": (
        {"response_format": formatted({"type": "array", "uniqueItems": True}, strict=True)},
        "response_format.json_schema.schema",
        "uniqueItems",
    ),
    "tool": (
        {"tools": [CLOCK, BROKEN], "tool_choice": "required"},
        "tools[1].function.parameters",
        "parameters: Invalid type: strong$",  # and nothing of the grammar that was made of it
    ),
    "no object": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function",
        "an object",
    ),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "another tool": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "none"}}},
        "tool_choice",
        "none of the tools",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function", "letters"),
}


@pytest.mark.parametrize(("fields", "param", "named"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(
    client: openai.OpenAI, fields: dict[str, Any], param: str, named: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        ask(client, stream=stream, **fields)
    assert refused.value.param == param
