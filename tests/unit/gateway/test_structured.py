"""Response formats and tools as grammars, held against texts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.openai.call_forms import FORMS
from gateway.openai.generator import TokenizerInfo
from gateway.openai.schemas import Chat, FunctionTool
from gateway.openai.structured import Structure, structure_of
from gateway.openai.text import Vocabulary
from sampler_service.grammar_check import error_of, source_of
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.tool_calls import ToolCallFormat

STOP = "<|stop|>"
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GET = {"type": "object", "properties": {"q": {"enum": ["x", "y"]}}, "required": ["q"], "additionalProperties": False}


def info(form: ToolCallFormat | None, *, marks: Sequence[str] = MARKS) -> TokenizerInfo:
    """A tokenizer of bytes and marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (STOP, *marks)])  # the ids of Bytes
    return TokenizerInfo(Vocabulary(tokenizer.to_str()), (0,), form)


class Bytes:
    """Bytes and marks, for the library that compiles grammars."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = marks
        self.tokens = [bytes([n]) for n in range(256)] + [mark.encode() for mark in (STOP, *marks)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.bos_token_id = self.eos_token_id = 256

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def ids(self, text: str) -> list[int]:
        for n, mark in enumerate(self.marks):
            text = text.replace(mark, chr(0xE000 + n))
        return [
            part
            for char in text
            for part in ([257 + ord(char) - 0xE000] if 0xE000 <= ord(char) < 0xE100 else char.encode())
        ]


def fits(structure: Structure, text: str, *, marks: Sequence[str] = MARKS) -> bool:
    """Whether it is a whole text of the grammar."""
    assert structure.grammar is not None
    form = structure.grammar.WhichOneof("form")
    tokenizer = Bytes(marks)
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(tokenizer)), source_of(form, getattr(structure.grammar, form)), log_level=0
    )
    assert not matcher.get_error()
    ids = tokenizer.ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> FunctionTool:
    return FunctionTool(type="function", function={"name": name, "parameters": parameters, **fields})


def made(tokenizer: TokenizerInfo, **fields: Any) -> Structure:
    body = Chat.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})
    return structure_of(
        tokenizer,
        response_format=body.response_format,
        tools=body.tools or (),
        tool_choice=body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
    )


def tools(**fields: Any) -> list[dict[str, Any]]:
    return [tool("add", ADD, **fields).model_dump(), tool("get", GET).model_dump()]


def call(name: str, arguments: str, *, key: str = "arguments") -> str:
    value = f'{{"name": "{name}", "{key}": {arguments}}}'
    return value if key == "parameters" else f"<tool_call>\n{value}\n</tool_call>"


ONE, OTHER = call("add", '{"a": 1}'), call("get", '{"q": "x"}')
WRONG = call("add", '{"a": "one"}')
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD, "strict": True}}


@pytest.mark.parametrize("marks", [MARKS, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("form", ["hermes", None])
def test_required_calls_are_one_or_more_of_the_tools(form: ToolCallFormat | None, marks: Sequence[str]) -> None:
    structure = made(info(form, marks=marks), tools=tools(), tool_choice="required")
    for text in (ONE, OTHER, f"{ONE}\n{OTHER}"):
        assert fits(structure, text, marks=marks), text
    for text in ("", "hello", WRONG, call("sub", "{}"), f"x {ONE}"):
        assert not fits(structure, text, marks=marks), text


def test_a_named_tool_is_the_one_that_is_called() -> None:
    named = {"type": "function", "function": {"name": "get"}}
    structure = made(info("hermes"), tools=tools(), tool_choice=named, parallel_tool_calls=False)
    assert fits(structure, OTHER)
    assert not fits(structure, ONE)
    assert not fits(structure, f"{OTHER}\n{OTHER}")


def test_llamas_calls_are_the_whole_answer() -> None:
    structure = made(info("llama3"), tools=tools(), tool_choice="required")
    assert fits(structure, call("add", '{"a": 1}', key="parameters"))
    assert not fits(structure, ONE)
    free = made(info("llama3"), tools=tools(strict=True))
    assert fits(free, call("add", '{"a": 1}', key="parameters"))
    assert fits(free, "Hello {there}")
    assert not fits(free, call("add", '{"a": ""}', key="parameters"))


@pytest.mark.parametrize("marks", [MARKS, ()], ids=["tokens", "text"])
def test_a_strict_tool_holds_calls_that_the_model_chooses_to_make(marks: Sequence[str]) -> None:
    structure = made(info("hermes", marks=marks), tools=tools(strict=True))
    for text in ("", "hello", ONE, f"I add. {ONE}", f"{ONE}\n{OTHER}", "<think> why </think> hello"):
        assert fits(structure, text, marks=marks), text
    assert not fits(structure, WRONG, marks=marks)
    assert not fits(structure, f"I add. {WRONG}", marks=marks)


def xml(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


FIND = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What to look for."},
        "most": {"$ref": "#/$defs/Most"},
        "how": {"enum": ["exact", "ähnlich"]},
        "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text", "most"],
    "additionalProperties": False,
    "$defs": {"Most": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize("marks", [MARKS, ()], ids=["tokens", "text"])
def test_calls_in_xml_have_each_value_as_its_schema_says(marks: Sequence[str]) -> None:
    asked = [tool("find", FIND, strict=True).model_dump(), tool("stop").model_dump()]
    structure = made(info("qwen_xml", marks=marks), tools=asked)
    whole = xml("find", text="a < b\n</parameter> or\n12", most="3", how="ähnlich", where="null")
    for text in ("", "hello", xml("find", text="", most="3"), f"I look. {whole}\n{xml('stop')}", xml("stop", x="1")):
        assert fits(structure, text, marks=marks), text
    for wrong in (
        xml("find", text="x", most="0"),
        xml("find", text="x", most="three"),
        xml("find", text="x"),
        xml("find", text="x", most="3", how="other"),
        xml("find", text="x", most="3", what="y"),
        xml("sink"),
    ):
        assert not fits(structure, wrong, marks=marks), wrong


def test_required_calls_in_xml_begin_at_once_and_one_is_enough() -> None:
    asked = [tool("find", FIND).model_dump(), tool("stop").model_dump()]
    structure = made(info("qwen_xml"), tools=asked, tool_choice="required", parallel_tool_calls=False)
    assert fits(structure, xml("stop"))
    assert not fits(structure, f"x {xml('stop')}")
    assert not fits(structure, f"{xml('stop')}\n{xml('stop')}")


def test_a_strict_string_that_xml_cannot_hold_to_its_schema_is_refused() -> None:
    parameters = {"properties": {"a": {"type": "string", "pattern": "x+"}}}
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.function\.parameters\.properties\.a\.pattern: this model"):
        made(info("qwen_xml"), tools=[tool("stop").model_dump(), tool("f", parameters, strict=True).model_dump()])
    made(info("qwen_xml"), tools=[tool("f", parameters).model_dump()], tool_choice="required")


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"properties": [1]}, "properties"),
        ({"properties": {"a": 7}}, "properties.a"),
        ({"properties": {"a": False}}, "properties.a"),
        ({"properties": {"a": {"enum": "x"}}}, "properties.a.enum"),
        ({"required": "a"}, "required"),
        ({"required": [7]}, "required"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_its_place(parameters: dict[str, Any], field: str) -> None:
    asked = [tool("f", parameters).model_dump()]
    with pytest.raises(InvalidRequest, match=rf"tools\[0\]\.function\.parameters\.{field}: "):
        made(info("qwen_xml"), tools=asked, tool_choice="required")
    assert made(info("qwen_xml"), tools=asked).reader() is not None


def test_an_argument_without_a_schema_is_any_text() -> None:
    asked = [tool("f", {"properties": {"a": True}, "required": ["b"]}).model_dump()]
    structure = made(info("qwen_xml"), tools=asked, tool_choice="required")
    assert fits(structure, xml("f", a="any", b="text"))
    assert fits(structure, xml("f", b="{"))
    assert not fits(structure, xml("f", a="any"))


def written(form: ToolCallFormat, *calls: tuple[str, str]) -> str:
    """An answer with these calls, names and arguments, as the model itself writes them."""
    parts = []
    for n, (name, arguments) in enumerate(calls):
        element = (
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            if form == "glm"
            else "<parameter={}>\n{}\n</parameter>\n"
        )
        elements = "".join(element.format(key, value) for key, value in json.loads(arguments).items())
        inner = f"{name}\n{elements}" if form == "glm" else f"<function={name}>\n{elements}</function>"
        values = {"name": name, "quoted": f'"{name}"', "arguments": arguments, "number": str(n), "xml": inner}
        parts.append(re.sub(r"\$(\w+)", lambda found, values=values: values[found[1]], FORMS[form].call))
    begin = FORMS[form].begin.replace("$space", " ")
    return begin + (FORMS[form].between or "").join(parts) + FORMS[form].end


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_held_to_the_form_of_the_model_and_read_again(form: ToolCallFormat, has_tokens: bool) -> None:
    marks = (*FORMS[form].marks, *(["<|end|>"] * bool(FORMS[form].joint))) if has_tokens else ()
    tokenizer = info(form, marks=marks)
    forced = made(tokenizer, tools=tools(), tool_choice="required")
    free = made(tokenizer, tools=tools(strict=True))
    add, get = ("add", '{"a": 1}'), ("get", '{"q": "x"}')
    one, wrong = written(form, add), written(form, ("add", '{"a": "one"}'))
    several = [written(form, add, get)] if FORMS[form].between is not None else []
    for text in (one, written(form, get), *several):
        assert fits(forced, text, marks=marks), text
        assert fits(free, text, marks=marks), text
        reader = forced.reader()
        assert reader is not None
        assert not [piece for piece in reader.push(text) + reader.end() if piece.call is None]
        assert [call.name for call in reader.calls] == (
            ["add", "get"] if text in several else [re.search("add|get", text)[0]]
        )  # type: ignore[index]
        assert json.loads(reader.calls[0].arguments) in ({"a": 1}, {"q": "x"})
    for text in (wrong, written(form, ("sub", "{}")), f"x {one}", "hello", ""):
        assert not fits(forced, text, marks=marks), text
    said = "<|channel|>analysis<|message|>Hm." if form == "harmony" and has_tokens else "Hm."
    assert fits(free, said, marks=marks)
    assert not fits(free, wrong, marks=marks)
    if FORMS[form].anywhere:
        joint = FORMS[form].joint if has_tokens else ""
        assert fits(free, f"{said}{joint}{one}", marks=marks)
        assert not fits(free, f"{said}{joint}{wrong}", marks=marks)


def test_one_call_at_most_without_parallel_calls() -> None:
    structure = made(info("hermes"), tools=tools(), parallel_tool_calls=False)
    assert fits(structure, "hello")
    assert fits(structure, f"hello {ONE}")
    assert not fits(structure, f"{ONE}\n{OTHER}")


def test_a_format_and_tools_leave_the_choice_between_them() -> None:
    structure = made(info("hermes"), tools=tools(), response_format=SCHEMA)
    assert fits(structure, '{"a": 1}')
    assert fits(structure, ONE)
    assert not fits(structure, "hello")


def test_json_is_of_the_schema_or_any_object() -> None:
    structure = made(info(None), response_format=SCHEMA)
    assert fits(structure, '{"a": 1}')
    assert fits(structure, '{"a":1}')
    assert not fits(structure, '{\n\n"a": 1}')
    assert not fits(structure, '{"a": 1, "b": 2}')
    anything = made(info(None), response_format={"type": "json_object"})
    assert fits(anything, '{"x": [1, {"y": null}]}')
    assert not fits(anything, "[1]")
    assert made(info(None), response_format={"type": "text"}) == Structure()


def test_nothing_is_constrained_where_the_model_is_free() -> None:
    assert made(info("hermes"), tools=tools()).grammar is None
    assert made(info("hermes"), tools=tools(), tool_choice="none") == Structure()
    assert made(info(None), tools=tools()).form is None


def test_a_strict_tool_is_refused_where_calls_cannot_be_told_from_text() -> None:
    with pytest.raises(Unsupported, match="strict") as refused:
        made(info(None), tools=tools(strict=True))
    assert refused.value.metadata["field"] == "tools[0].function.strict"


def test_an_error_in_a_grammar_names_the_schema_that_has_it() -> None:
    broken = {"type": "strong"}
    format_of = {"type": "json_schema", "json_schema": {"name": "n", "schema": broken}}
    add, get = tools()
    strict = tool("add", {"properties": {"q": broken}}, strict=True).model_dump()
    loose = tool("get", {"properties": {"q": broken}}).model_dump()
    cases: dict[str, dict[str, Any]] = {
        "response_format.json_schema.schema": {"response_format": format_of},
        "tools[1].function.parameters": {"tools": [add, loose], "tool_choice": "required"},
        "tools[0].function.parameters": {"tools": [strict, get], "response_format": SCHEMA},
    }
    for field, fields in cases.items():
        structure = made(info("hermes"), **fields)
        assert structure.grammar is not None
        form = structure.grammar.WhichOneof("form")
        reason = error_of(form, getattr(structure.grammar, form), MARKS)
        assert "strong" in reason
        with pytest.raises(InvalidRequest, match="strong") as blamed, structure.blaming():
            raise InvalidRequest(f"grammar.{form}: {reason}", field=f"grammar.{form}", token=7)
        assert blamed.value.metadata == {"field": field, "token": "7"}
        assert blamed.value.message.startswith(f"{field}: Invalid type: strong")


def test_a_strict_schema_with_keywords_that_are_not_enforced_is_refused() -> None:
    unique = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    for strict in (True, False):
        shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": unique, "strict": strict}}
        structure = made(info(None), response_format=shape)
        assert structure.grammar is not None
        assert bool(error_of("json_schema", structure.grammar.json_schema, ())) == strict
