"""Calls of tools in XML, with an element for each argument. Qwen3-Coder and Qwen3.5 write

    <tool_call>
    <function=NAME>
    <parameter=ARGUMENT>
    VALUE
    </parameter>
    </function>
    </tool_call>

and GLM 4.5 and later

    <tool_call>NAME
    <arg_key>ARGUMENT</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A value is text as it is if the argument's schema allows text, else JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gateway.openai.schemas import FunctionTool, compiled_text
from tinsmith.errors import InvalidRequest

_PYTHON = {"True": True, "False": False, "None": None}
"""Values that models write as in Python."""
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "enum", "const"}
"""Keywords of a string's schema that allow any text, or that the grammar enforces."""
_MOST_NESTED = 16
"""Most references and alternatives, one within the other, that are followed to find a value's types."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The elements of a call. In the texts, $name stands for the tool's name, $key for the name of an argument, and
    $line for at most one line break."""

    call: re.Pattern[str]
    """Matches the text between the marks of a call. Groups: the tool's name, the arguments."""
    argument: re.Pattern[str]
    """Matches an argument. Groups: its name, its value."""
    name: str
    """Text before the arguments."""
    key: str
    """Text before a value."""
    end: str
    """Text after a value."""
    tail: str
    """Text after the arguments."""

    def is_whole(self, text: str) -> bool:
        """Whether a mark that follows the text closes the call; otherwise it is part of a value."""
        begin = (self.name if self.tail else self.key).split("$")[0]
        end = self.tail or self.end.removesuffix("$line")
        return text.rstrip().endswith(end) or begin not in text


QWEN = Syntax(
    call=re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL),
    argument=re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    name="<function=$name>\n",
    key="<parameter=$key>\n",
    end="\n</parameter>\n",
    tail="</function>",
)
GLM = Syntax(
    call=re.compile(r"\s*([\w.-]{1,64})\s*((?:<arg_key>.*</arg_value>)?)\s*", re.DOTALL),
    argument=re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    name="$name$line",
    key="<arg_key>$key</arg_key>$line<arg_value>",
    end="</arg_value>$line",
    tail="",
)


def call_of(text: str, syntax: Syntax, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """The name of a call, and its arguments as JSON; None for a broken call. `text`: the text between the marks of the
    call. `schemas`: JSON Schema of each tool's arguments."""
    found = syntax.call.fullmatch(text)
    if found is None:
        return None
    name = found[1].strip()
    schema = schemas.get(name, {})
    known = schema.get("properties")
    arguments: dict[str, Any] = {}
    for one in syntax.argument.finditer(found[2]):
        key, text = one[1].strip(), one[2]
        arguments[key] = _value(text, known[key], schema) if isinstance(known, dict) and key in known else text
    return name, json.dumps(arguments, ensure_ascii=False)


def rules(n: int, tool: FunctionTool, syntax: Syntax, write: Callable[..., list[str]]) -> Iterator[tuple[str, str]]:
    """Lines of a grammar in Lark's syntax for the call of the tool `n`, each with the field of the request behind it.
    The first line defines `xml_{n}`. `write(text, **values)`: gives the parts of a rule that stand for a text with
    marks and placeholders.

    Raises InvalidRequest for an invalid schema, and for a strict tool with a string that no grammar of this form can
    hold to its schema.
    """
    field = f"tools[{n}].function.parameters"
    schema = tool.function.get("parameters") or {}
    known, required = _arguments(schema, field)
    parts = [f"xml_{n}_{k}{'' if name in required else '?'}" for k, name in enumerate(known)] or [f"xml_{n}_any*"]
    end = write(syntax.end)
    yield f"xml_{n}: {' '.join([*write(syntax.name, name=tool.name), *parts, *write(syntax.tail)])}", ""
    if not known:
        before, after = syntax.key.split("$key")
        key, value = _Text(f"xml_{n}_key", write(after)), _Text(f"xml_{n}_value", end)
        yield f"xml_{n}_any: {' '.join([*write(before), *key.parts, *value.parts])}", ""
        yield from [*key.lines(), *value.lines()]
    for k, (name, value) in enumerate(known.items()):
        rule, begin, types = f"xml_{n}_{k}", write(syntax.key, key=name), _types(value, schema)
        texts = value.get("enum", [value["const"]] if "const" in value else [])
        if types and "string" not in types:
            defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            json_text = compiled_text({**defined, **value}, strict=tool.is_strict)
            yield f"{rule}: {' '.join([*begin, '%json', json_text, *end])}", f"{field}.properties.{name}"
        elif texts and types == {"string"}:
            yield f"{rule}: {' '.join([*begin, '(', ' | '.join(map(json.dumps, texts)), ')', *end])}", ""
        else:
            if tool.is_strict and types == {"string"} and (others := value.keys() - _ANNOTATIONS):
                _refuse(f"{field}.properties.{name}.{min(others)}")
            text = _Text(f"{rule}_text", end)
            yield f"{rule}: {' '.join([*begin, *text.parts])}", ""
            yield from text.lines()


class _Text:
    """The parts and lines of a grammar for any text, up to the parts that end the text."""

    def __init__(self, rule: str, end: Sequence[str]) -> None:
        """`end`: the parts that end the text. TEXT cannot match a mark that is a token. It can match a mark that is
        plain text, so such a mark needs a lazy rule of its own."""
        self._rule = "" if end[0].startswith("<") else f"{rule}[lazy]: TEXT {end[0]}"
        self.parts = ["TEXT", *end] if not self._rule else [rule, *end[1:]]
        """Parts of a rule that stand for the text and its end."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """The line of the grammar that `parts` need, if any, with an empty field of the request."""
        if self._rule:
            yield self._rule, ""


def _arguments(schema: Mapping[str, Any], field: str) -> tuple[dict[str, dict[str, Any]], Sequence[str]]:
    """The schema of each argument, and the names of the required arguments. Raises InvalidRequest."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{field}.required: is no list of names", field=f"{field}.required")
    if not isinstance(known, dict):
        raise InvalidRequest(f"{field}.properties: is no object", field=f"{field}.properties")
    found: dict[str, dict[str, Any]] = {}
    for name, value in [*known.items(), *((name, True) for name in required if name not in known)]:
        if value is not True and not isinstance(value, dict):
            where = f"{field}.properties.{name}"
            raise InvalidRequest(f"{where}: is no schema that a call can have a value of", field=where)
        if isinstance(value, dict) and not isinstance(value.get("enum", []), list):
            where = f"{field}.properties.{name}.enum"
            raise InvalidRequest(f"{where}: is no list", field=where)
        found[name] = value if isinstance(value, dict) else {}
    return found, required


def _refuse(field: str) -> NoReturn:
    raise InvalidRequest(
        f"{field}: this model writes text in calls as it is, and nothing can hold it to this keyword; leave strict or "
        "the keyword out",
        field=field,
    )


def _value(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    types = _types(schema, root)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return value if not types or _type(value) in types or (type(value) is int and "number" in types) else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows. Empty when it allows any type, or when the types cannot be found."""
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return set()
    if isinstance(kind := schema.get("type"), str | list):
        return {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_type(value) for value in schema.get("enum", [schema.get("const")])}
    if isinstance(reference := schema.get("$ref"), str):
        _, key, name, *rest = [*reference.split("/"), "", ""][:4]
        found = root.get(key, {}) if key in ("$defs", "definitions") else {}
        return _types(found.get(name), root, depth + 1) if isinstance(found, dict) and not any(rest) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            of_parts = [_types(part, root, depth + 1) for part in parts]
            if key == "allOf":
                return next(filter(None, of_parts), set())
            return set().union(*of_parts) if all(of_parts) else set()
    return set()


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
