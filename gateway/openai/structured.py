"""Grammars for the sampler that make an answer JSON of a schema, or calls of tools.

A tool's `parameters` and a `response_format` are JSON Schemas. Keywords that the sampler's compiler cannot enforce are
refused in a strict schema, and left to the model otherwise.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.openai import xml_calls
from gateway.openai.generator import TokenizerInfo
from gateway.openai.schemas import FunctionTool, ResponseFormat, ToolChoice
from gateway.openai.text import Vocabulary
from gateway.openai.tool_calls import CLOSE, OPEN, Form, ToolCallReader
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.v1 import sampler_pb2 as pb

_PLACE = re.compile(r"at (\d+)\(\d+\): (failed to compile JSON schema: )?")
"""Matches the place of a mistake, "at LINE(COLUMN)", before a message of the sampler's compiler."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar of an answer, and the form in which calls of tools are read from it."""

    grammar: pb.Grammar | None = None
    """Grammar for the sampler; None: any text."""
    form: Form | None = None
    """Form of the calls of tools; None: calls are not read."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON Schema of the arguments of each of the request's tools, by name."""
    shown: Sequence[int] = ()
    """Special tokens that mark calls; their text is needed to read the calls."""
    fields: Sequence[str] = ()
    """The field of the request behind each line of the grammar, for errors."""

    def reader(self) -> ToolCallReader | None:
        return None if self.form is None else ToolCallReader(self.form, self.schemas)

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Turns an error about the grammar into one that names the field of the request behind it."""
        try:
            yield
        except InvalidRequest as error:
            field = error.metadata.get("field", "")
            if self.grammar is None or not field.startswith("grammar"):
                raise
            reason = error.message.removeprefix(f"{field}: ")
            place = _PLACE.match(reason)
            line = int(place[1]) - 1 if place else 0
            mine = self.fields[line] if line < len(self.fields) and self.fields[line] else self.fields[0]
            raise InvalidRequest(
                f"{mine}: {reason[place.end() :] if place else reason}", **{**error.metadata, "field": mine}
            ) from error


def structure_of(
    tokenizer: TokenizerInfo,
    *,
    response_format: ResponseFormat | None = None,
    tools: Sequence[FunctionTool] = (),
    tool_choice: ToolChoice | None = None,
    parallel: bool = True,
) -> Structure:
    """The structure for a request's response_format and tools. `parallel`: several calls are allowed.

    Raises Unsupported for a strict tool when the model's form of calls is not known.
    """
    schema = None if response_format is None else response_format.schema_text()
    if not tools or tool_choice == "none":
        if schema is None:
            return Structure()
        return Structure(pb.Grammar(json_schema=schema), fields=["response_format.json_schema.schema"])
    schemas = {tool.name: tool.function.get("parameters") or {} for tool in tools}
    chosen = tool_choice if isinstance(tool_choice, str | None) else tool_choice.function.name
    forced = chosen not in (None, "auto")
    strict = [n for n, tool in enumerate(tools) if tool.is_strict]
    form = tokenizer.tool_calls
    if form is None and strict and not forced:
        field = f"tools[{strict[0]}].function.strict"
        raise Unsupported(
            f"{field}: this model's chat template shows calls in a form that is not known here, so nothing can hold it "
            'to the schema; leave strict out, or set tool_choice to "required"',
            field=field,
        )
    form = form or ("hermes" if forced else None)
    if form is None or not (forced or strict or schema is not None or (not parallel and form != "llama3")):
        return Structure(form=form, schemas=schemas, shown=_shown(tokenizer.vocabulary))
    only = [n for n, name in enumerate(tool.name for tool in tools) if chosen in (None, "auto", "required", name)]
    rules = _Rules(form, tokenizer.vocabulary, tools, only, parallel=parallel and form != "llama3")
    lines, fields = rules.lines(schema, forced=forced)
    return Structure(pb.Grammar(lark="\n".join(lines)), form, schemas, _shown(tokenizer.vocabulary), fields)


def _shown(vocabulary: Vocabulary) -> list[int]:
    marks = [vocabulary.added[mark] for mark in (OPEN, CLOSE) if mark in vocabulary.added]
    return [token for token in marks if token in vocabulary.special]


class _Rules:
    """The grammar of calls of tools, in Lark's syntax. Each schema has its own line, by which errors find its field."""

    def __init__(
        self, form: Form, vocabulary: Vocabulary, tools: Sequence[FunctionTool], only: Sequence[int], *, parallel: bool
    ) -> None:
        self._form: Form = form
        self._vocabulary = vocabulary
        self._tools = tools
        self._only = only
        self._parallel = parallel

    def lines(self, schema: str | None, *, forced: bool) -> tuple[list[str], list[str]]:
        """The lines of the grammar, and for each the field of the request behind it, empty for most.

        `schema`: JSON Schema of an answer without calls. `forced`: the answer must be a call.
        """
        lines, fields = ["%llguidance {}", f"start: {self._start(schema, forced=forced)}"], ["tools", ""]
        tool = " | ".join(f"tool_{n}" for n in self._only)
        if self._form != "llama3":
            body = f'"\\n" ({tool}) "\\n" {self._tag(CLOSE)}'
            lines += [f"body: {body}", f"call: {self._tag(OPEN)} body", f"more: {self._more()}"]
        else:
            lines += [f"call: {tool}", 'more: ""', ""]
        lines += [
            "TEXT: /(.|\\n)*/",
            f"text: {self._text()}",
            'head[lazy]: TEXT "<tool_call>"',
            "PLAIN: /[^{](.|\\n)*/",
        ]
        if schema is not None:
            fields += [""] * (len(lines) - len(fields)) + ["response_format.json_schema.schema"]
            lines.append(f"answer: %json {schema}")
        for n in self._only:
            for line, mine in self._tool(n):
                fields += [""] * (len(lines) - len(fields)) + [mine]
                lines.append(line)
        return lines, fields

    def _start(self, schema: str | None, *, forced: bool) -> str:
        if forced:
            return "call more"
        if schema is not None:
            return "answer | call more"
        if self._form == "llama3":
            return "PLAIN | call"
        return "text | text call more" if self._is_token(OPEN) else "TEXT | head body more"

    def _more(self) -> str:
        return '("\\n" call)*' if self._parallel else '""'

    def _text(self) -> str:
        """The rule for text without calls. Marks of a thought that are tokens are listed, since no pattern matches
        them."""
        marks = [mark for mark in ("<think>", "</think>") if self._is_token(mark)]
        return f"TEXT (({' | '.join(marks)}) TEXT)*" if marks else "TEXT"

    def _tool(self, n: int) -> Iterator[tuple[str, str]]:
        """The lines of the rule `tool_{n}`, a call of the tool, each with the field of the request behind it."""
        if self._form == "qwen_xml":
            yield from xml_calls.rules(n, self._tools[n])
            return
        called = "arguments" if self._form == "hermes" else "parameters"
        head = f'{{"name": {json.dumps(self._tools[n].name)}, "{called}": '
        yield (
            f'tool_{n}: {json.dumps(head)} %json {self._tools[n].schema_text()} "}}"',
            f"tools[{n}].function.parameters",
        )

    def _tag(self, tag: str) -> str:
        return tag if self._is_token(tag) else json.dumps(tag)

    def _is_token(self, text: str) -> bool:
        return text in self._vocabulary.added
