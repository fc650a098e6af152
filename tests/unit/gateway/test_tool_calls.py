"""Calls of tools, read from text in pieces of any size."""

import json
from typing import Any

import pytest

from gateway.openai.tool_calls import Form, ToolCallReader

SCHEMAS: dict[str, Any] = {
    "add": {"properties": {"a": {"type": "array"}, "n": {"type": ["integer", "null"]}, "s": {"type": "string"}}},
    "get": {
        "properties": {
            "q": {"type": "string"},
            "any": {},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ref": {"$ref": "#/$defs/Flag"},
            "self": {"$ref": "#/$defs/Loop"},
        },
        "$defs": {"Flag": {"type": "boolean"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
    },
}


def read(text: str, *, form: Form, size: int) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(form, SCHEMAS)
    pieces = [piece for n in range(0, len(text), size) for piece in reader.push(text[n : n + size])] + reader.end()
    content = "".join(piece.text for piece in pieces if piece.call is None)
    for call in reader.calls:
        told = [piece for piece in pieces if piece.call is call]
        assert told[0].begins
        assert not any(piece.begins for piece in told[1:])
        assert "".join(piece.text for piece in told) == call.arguments
    return content, [(call.name, call.arguments) for call in reader.calls]


ADD, GET = '{"name": "add", "arguments": {"a": [1, 2]}}', '{"name": "get", "arguments": {"q": "a } \\" <tool_call>"}}'
ADD_ARGS, GET_ARGS = '{"a": [1, 2]}', '{"q": "a } \\" <tool_call>"}'

HERMES = {
    "text alone": ("  some text \n", "  some text \n", []),
    "nothing": ("", "", []),
    "one call": (f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ADD_ARGS)]),
    "text and two calls": (
        f"I think.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{GET}\n</tool_call>",
        "I think.",
        [("add", ADD_ARGS), ("get", GET_ARGS)],
    ),
    "the arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "a broken call": ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
    "cut in the arguments": ('<tool_call>\n{"name": "add", "arguments": {"a": [1', "", [("add", '{"a": [1')]),
    "cut in the name": ('x <tool_call>\n{"name": "ad', 'x<tool_call>\n{"name": "ad', []),
    "cut in the mark": ("x <tool_ca", "x <tool_ca", []),
    "a call that is not closed before the next": (
        f"<tool_call>\n{ADD}\n<tool_call>\n{GET}\n</tool_call>",
        "",
        [("add", ADD_ARGS), ("get", GET_ARGS)],
    ),
    "text after a call that is not closed": (f"<tool_call>\n{ADD}\nDone. I", "Done. I", [("add", ADD_ARGS)]),
    "cut in the closing mark": (f"<tool_call>\n{ADD}\n</tool", "", [("add", ADD_ARGS)]),
    "further members": (f'<tool_call>{ADD[:-1]}, "id": "}}"}}</tool_call>x', "x", [("add", ADD_ARGS)]),
    "cut in further members": (f'<tool_call>{ADD[:-1]}, "id": "', "", [("add", ADD_ARGS)]),
    "nearly a mark": ("a <tool_box> b", "a <tool_box> b", []),
}
LLAMA = {
    "text alone": ("some text", "some text", []),
    "one call": ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "two calls": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "get", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("get", "{}")],
    ),
    "further members": ('{"name": "add", "parameters": {"a": 1}, "id": "}"}', "", [("add", '{"a": 1}')]),
    "other JSON": ('{"answer": 42}', '{"answer": 42}', []),
    "no tool": ('{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', []),
    "cut": ('{"name": "add", "parameters": {"a', "", [("add", '{"a')]),
}


def xml(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


XML = {
    "text alone": ("some <text> \n", "some <text> \n", []),
    "text and two calls": (
        f"I think.\n{xml('add', a='[1, 2]')}\n{xml('get', q='x')}",
        "I think.",
        [("add", '{"a": [1, 2]}'), ("get", '{"q": "x"}')],
    ),
    "no arguments": (xml("add"), "", [("add", "{}")]),
    "text is left as it is": (
        xml("get", q='  two\n\nlines </function> 12 "ä" '),
        "",
        [("get", '{"q": "  two\\n\\nlines </function> 12 \\"ä\\" "}')],
    ),
    "numbers in text": (xml("add", s="12"), "", [("add", '{"s": "12"}')]),
    "JSON by its schema": (
        xml("add", n="7") + xml("add", n="null") + xml("add", n="None") + xml("get", ref="True"),
        "",
        [("add", '{"n": 7}'), ("add", '{"n": null}'), ("add", '{"n": null}'), ("get", '{"ref": true}')],
    ),
    "what is not of its schema is text": (
        xml("add", n="7.5", a="[1,") + xml("get", ref="1"),
        "",
        [("add", '{"n": "7.5", "a": "[1,"}'), ("get", '{"ref": "1"}')],
    ),
    "text or null": (
        xml("get", maybe="null") + xml("get", maybe="7"),
        "",
        [("get", '{"maybe": null}'), ("get", '{"maybe": "7"}')],
    ),
    "any type": (
        xml("get", any='{"x": 1}') + xml("get", any="hello") + xml("get", any="NaN") + xml("get", self="1"),
        "",
        [("get", '{"any": {"x": 1}}'), ("get", '{"any": "hello"}'), ("get", '{"any": "NaN"}'), ("get", '{"self": 1}')],
    ),
    "an unknown argument, an unknown tool": (
        xml("add", other="1") + xml("sub", a="[1]"),
        "",
        [("add", '{"other": "1"}'), ("sub", '{"a": "[1]"}')],
    ),
    "a value on the line of its mark": (
        "<tool_call><function=add><parameter=a>[1]</parameter></function></tool_call>",
        "",
        [("add", '{"a": [1]}')],
    ),
    "a broken call": (f"<tool_call>nonsense</function></tool_call>{xml('add')}", None, [("add", "{}")]),
    "cut in a value": (xml("add", a="[1]")[:50], xml("add", a="[1]")[:50], []),
    "cut in the closing mark": (f"x\n{xml('add', a='[1]')[:-3]}", "x", [("add", '{"a": [1]}')]),
    "cut before the closing mark": (f"x\n{xml('add', a='[1]')[:-12]}", "x", [("add", '{"a": [1]}')]),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), XML.values(), ids=XML)
def test_calls_in_qwens_xml_are_read(text: str, content: str | None, calls: list[tuple[str, str]], size: int) -> None:
    if content is None:
        content = text.removesuffix(xml("add"))
    assert read(text, form="qwen_xml", size=size) == (content, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), HERMES.values(), ids=HERMES)
def test_calls_in_hermes_form_are_read(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert read(text, form="hermes", size=size) == (content, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), LLAMA.values(), ids=LLAMA)
def test_calls_in_llamas_form_are_read(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert read(text, form="llama3", size=size) == (content, calls)


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader("hermes", {})
    told = [[piece.text for piece in reader.push(part)] for part in ("Hello", " ", "wor", "ld <", "b>")]
    assert told == [["Hello"], [], [" wor"], ["ld"], [" <b>"]]


def test_arguments_are_told_as_they_come() -> None:
    reader = ToolCallReader("hermes", {})
    for part in '<tool_call>{"name": "add", "arguments": {"text": "':
        reader.push(part)
    assert [piece.text for piece in reader.push("long text")] == ["long text"]
    assert json.loads(reader.calls[0].arguments + '"}') == {"text": "long text"}
