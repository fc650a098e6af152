"""Calls of tools, read from text in pieces of any size."""

import json
import re
from typing import Any

import pytest

from gateway.openai.call_forms import FORMS
from gateway.openai.draws import Update
from gateway.openai.messages import Messages
from gateway.openai.structured import Structure
from gateway.openai.tool_calls import ToolCallReader
from tinsmith.tool_calls import ToolCallFormat

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


def read(text: str | list[str], *, form: ToolCallFormat, size: int = 1) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(form, SCHEMAS)
    pushes = text if isinstance(text, list) else [text[n : n + size] for n in range(0, len(text), size)]
    pieces = [piece for push in pushes for piece in reader.push(push)] + reader.end()
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
    "cut in the name": ('x <tool_call>\n{"name": "ad', 'x <tool_call>\n{"name": "ad', []),
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


BEGIN, CALL, SEP, END, LAST = FORMS["deepseek_v3"].marks
KIMI = "<|tool_calls_section_begin|>"
FENCED = f"{CALL}function{SEP}add\n```json\n{ADD_ARGS}\n```{END}"
FAMILIES: dict[ToolCallFormat, dict[str, tuple[str, str, list[tuple[str, str]]]]] = {
    "glm": {
        "text and two calls": (
            "I think.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
            "<arg_key>s</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>get\n</tool_call>",
            "I think.",
            [("add", '{"a": [1, 2], "s": "7"}'), ("get", "{}")],
        ),
        "on one line, as GLM 4.7": (
            "<tool_call>get<arg_key>q</arg_key><arg_value>\n a </tool_call> b\n</arg_value></tool_call>x",
            "x",
            [("get", '{"q": "\\n a </tool_call> b\\n"}')],
        ),
        "broken": ("<tool_call>do it now</tool_call> x", "<tool_call>do it now</tool_call> x", []),
        "cut": ("a <tool_call>get\n<arg_key>q</arg_k", "a <tool_call>get\n<arg_key>q</arg_k", []),
    },
    "mistral": {
        "two calls": (
            f"Hm. [TOOL_CALLS]add[ARGS]{ADD_ARGS}[TOOL_CALLS]get[ARGS]{GET_ARGS}",
            "Hm.",
            [("add", ADD_ARGS), ("get", GET_ARGS)],
        ),
        "with an id": (f"[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{ADD_ARGS}", "", [("add", ADD_ARGS)]),
        "cut in the arguments": ('[TOOL_CALLS]add[ARGS]{"a": [1', "", [("add", '{"a": [1')]),
        "cut in the name": ("[TOOL_CALLS]ad", "[TOOL_CALLS]ad", []),
        "broken": (
            "[TOOL_CALLS]add[ARGS]nothing, [TOOL_CALLS] is",
            "[TOOL_CALLS]add[ARGS]nothing, [TOOL_CALLS] is",
            [],
        ),
    },
    "mistral_array": {
        "two calls": (
            f'[TOOL_CALLS] [{ADD[:-1]}, "id": "a1b2c3d4e"}}, {GET}]',
            "",
            [("add", ADD_ARGS), ("get", GET_ARGS)],
        ),
        "text around": (f"Hm. [TOOL_CALLS][{ADD}]\nIs it?", "Hm.Is it?", [("add", ADD_ARGS)]),
        "cut after the first": (f'[TOOL_CALLS][{ADD}, {{"na', ', {"na', [("add", ADD_ARGS)]),
        "other JSON": ("[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    },
    "deepseek_v3": {
        "two calls": (
            f"I think.\n{BEGIN}{FENCED}\n{FENCED.replace('add', 'get')}{LAST}",
            "I think.",
            [("add", ADD_ARGS), ("get", ADD_ARGS)],
        ),
        "without a section": (FENCED, "", [("add", ADD_ARGS)]),
        "no name": (f"{BEGIN}{CALL}function{SEP}\n```json", f"{BEGIN}{CALL}function{SEP}\n```json", []),
        "cut after the arguments": (f"{BEGIN}{FENCED}"[: -len(END)], "", [("add", ADD_ARGS)]),
    },
    "deepseek_v31": {
        "two calls": (
            f"{BEGIN}{CALL}add{SEP}{ADD_ARGS}{END}{CALL}get{SEP}{GET_ARGS}{END}{LAST}",
            "",
            [("add", ADD_ARGS), ("get", GET_ARGS)],
        ),
        "the marks in text": (f"It is {BEGIN} and {SEP}.", f"It is {BEGIN} and {SEP}.", []),
        "no JSON": (f"{CALL}add{SEP}a=1{END}", f"{CALL}add{SEP}a=1{END}", []),
    },
    "kimi": {
        "two calls": (
            f"I call. {KIMI}<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ADD_ARGS}<|tool_call_end|>"
            f"<|tool_call_begin|>functions.get:1<|tool_call_argument_begin|>{GET_ARGS}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "I call.",
            [("add", ADD_ARGS), ("get", GET_ARGS)],
        ),
        "no number": (f"{KIMI}<|tool_call_begin|>add", f"{KIMI}<|tool_call_begin|>add", []),
    },
    "harmony": {
        "thought and call": (
            "<|channel|>analysis<|message|>I add to=functions.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.add <|constrain|>json<|message|>{ADD_ARGS}<|call|>",
            "analysisI add to=functions.<|end|>",
            [("add", ADD_ARGS)],
        ),
        "the recipient first": (
            f" to=functions.add<|channel|>commentary json<|message|>{ADD_ARGS}",
            "",
            [("add", ADD_ARGS)],
        ),
        "an answer": ("<|channel|>final<|message|>It is 3.", "finalIt is 3.", []),
        "a tool of its own": (
            "<|channel|>analysis to=python code<|message|>{1}",
            "analysis to=python code{1}",
            [],
        ),
    },
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [(form, *one) for form, cases in FAMILIES.items() for one in cases.values()],
    ids=[f"{form}: {name}" for form, cases in FAMILIES.items() for name in cases],
)
def test_calls_in_the_form_of_each_family_are_read(
    form: ToolCallFormat, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    """Marks are tokens of these families, so they come whole; other text comes in pieces of any size."""
    mark = "|".join(re.escape(mark) for mark in FORMS[form].marks)
    parts = [part for part in re.split(f"({mark})", text) if part]
    pushes = [
        piece
        for part in parts
        for piece in ([part] if re.fullmatch(mark, part) else [part[n : n + size] for n in range(0, len(part), size)])
    ]
    assert read(pushes, form=form) == (content, calls)


def test_ids_are_those_that_the_family_and_its_template_take() -> None:
    asked: dict[ToolCallFormat, tuple[str, str]] = {
        "kimi": (FAMILIES["kimi"]["two calls"][0], r"functions\.add:0"),
        "mistral": (FAMILIES["mistral"]["with an id"][0], "a1b2c3d4e"),
        "mistral_array": (FAMILIES["mistral_array"]["text around"][0], "[a-z0-9]{9}"),
        "hermes": (f"<tool_call>{ADD}</tool_call>", "call_[a-z0-9]{24}"),
    }
    for form, (text, expected) in asked.items():
        reader = ToolCallReader(form, SCHEMAS)
        reader.push(text)
        assert re.fullmatch(expected, reader.calls[0].id)


def test_llamas_calls_may_begin_with_its_mark() -> None:
    text = '<|python_tag|>{"name": "add", "parameters": {}}'
    assert read(text, form="llama3", size=3) == ("", [("add", "{}")])
    assert read("<|python_tag|>print()", form="llama3", size=3) == ("<|python_tag|>print()", [])


@pytest.mark.parametrize("form", FORMS)
def test_text_after_a_call_keeps_its_spaces(form: ToolCallFormat) -> None:
    written = {"mistral_array": FAMILIES["mistral_array"]["text around"][0].split("\n")[0]}.get(
        form, next(iter(FAMILIES.get(form, {"": [f"<tool_call>{ADD}</tool_call>"]}).values()))[0]
    )
    written = {"llama3": LLAMA["one call"][0], "qwen_xml": xml("add")}.get(form, written)
    content, calls = read(f"{written}\nand so on, it  is", form=form, size=1)
    assert content.endswith("and so on, it  is")
    assert calls


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


@pytest.mark.parametrize(
    ("text", "ends", "finish_reason"),
    [(ADD, "stop", "tool_calls"), (ADD[:-2], "stop", "stop"), (ADD[:-2], "length", "length")],
)
def test_only_whole_calls_are_the_reason_why_a_message_ends(text: str, ends: Any, finish_reason: str) -> None:
    messages = Messages(Structure(form="hermes", schemas=SCHEMAS))
    update = Update(0, text=f"<tool_call>{text}", finish_reason=ends)
    (call,) = messages.message(update)["tool_calls"]
    assert call["function"]["name"] == "add"
    assert messages.finish_reason(update) == finish_reason
