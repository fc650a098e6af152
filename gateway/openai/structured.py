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
from gateway.openai.call_forms import FORMS
from gateway.openai.generator import TokenizerInfo
from gateway.openai.schemas import FunctionTool, ResponseFormat, ToolChoice
from gateway.openai.text import Vocabulary
from gateway.openai.tool_calls import ToolCallReader
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.tool_calls import ToolCallFormat
from tinsmith.v1 import sampler_pb2 as pb

_PLACE = re.compile(r"at (\d+)\(\d+\): (failed to compile JSON schema: )?")
"""Matches the place of a mistake, "at LINE(COLUMN)", before a message of the sampler's compiler."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar of an answer, and the form in which calls of tools are read from it."""

    grammar: pb.Grammar | None = None
    """Grammar for the sampler. None means any text."""
    form: ToolCallFormat | None = None
    """Form of the calls of tools. None means that calls are not read."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON Schema of the arguments of each of the request's tools, by name."""
    shown: Sequence[int] = ()
    """Special tokens that mark calls. Their text is needed to read the calls."""
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
    """The structure for a request's response_format and tools. `parallel`: True if several calls are allowed.

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
    if form is None:
        return Structure(schemas=schemas)
    shown = _shown(form, tokenizer.vocabulary)
    several = FORMS[form].between is not None
    if not (forced or strict or schema is not None or (several and not parallel)):
        return Structure(form=form, schemas=schemas, shown=shown)
    only = [n for n, name in enumerate(tool.name for tool in tools) if chosen in (None, "auto", "required", name)]
    rules = _Rules(form, tokenizer.vocabulary, tools, only, parallel=parallel and several)
    lines, fields = rules.lines(schema, forced=forced)
    return Structure(pb.Grammar(lark="\n".join(lines)), form, schemas, shown, fields)


def _shown(form: ToolCallFormat, vocabulary: Vocabulary) -> list[int]:
    marks = [vocabulary.added[mark] for mark in FORMS[form].marks if mark in vocabulary.added]
    return [token for token in marks if token in vocabulary.special]


_NAMED_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
"""Matches the text of a token that a grammar writes as it is."""
_MARK_OR_PLACEHOLDER = re.compile(r"(<[^<>\s$]+>|\[[A-Z_]+\]|\$[a-z]+)")
_RULES = {"line": '"\\n"?', "space": '" "?', "number": "NUMBER", "channel": "CHANNEL"}
"""Placeholder -> part of a rule, for placeholders with one part in all rules."""


def _split(text: str) -> tuple[str, str]:
    """The mark with which a text begins, or an empty string, and the rest of the text."""
    found = _MARK_OR_PLACEHOLDER.match(text)
    mark = "" if found is None or found[0].startswith("$") else found[0]
    return mark, text.removeprefix(mark)


class _Rules:
    """The grammar of calls of tools, in Lark's syntax. Each schema has its own line, by which errors find its field."""

    def __init__(
        self,
        form: ToolCallFormat,
        vocabulary: Vocabulary,
        tools: Sequence[FunctionTool],
        only: Sequence[int],
        *,
        parallel: bool,
    ) -> None:
        self._form = FORMS[form]
        self._vocabulary = vocabulary
        self._tools = tools
        self._only = only
        self._parallel = parallel
        self._opening, self._call = _split(self._form.call)

    def lines(self, schema: str | None, *, forced: bool) -> tuple[list[str], list[str]]:
        """The lines of the grammar, and for each the field of the request behind it, empty for most.

        `schema`: JSON Schema of an answer without calls. `forced`: the answer must be a call.
        """
        mark, begin = _split(self._form.begin)
        end = self._write(self._form.end)
        tools = f"( {' | '.join(f'tool_{n}' for n in self._only)} )"
        between = [*self._write(self._form.between or ""), "call"]
        # The first mark of an answer with calls has a rule of its own: where it is no token, text ends with it.
        first = " ".join(self._write(mark or self._opening))
        rest = [*self._write(begin), "call"] if mark else [tools]
        rest += ["(", *between, ")*", *end] if self._parallel else end
        lines = [
            "%llguidance {}",
            f"start: {self._start(schema, first, forced=forced)}",
            f"calls: {first} rest",
            f"rest: {' '.join(rest)}",
            f"call: {' '.join(self._write(self._opening))} {tools}",
            "TEXT: /(.|\\n)*/",
            "PLAIN: /[^{](.|\\n)*/",
            "NUMBER: /[0-9]{1,4}/",
            "CHANNEL: /analysis|commentary|final/",
            f"text: {self._text()}",
        ]
        if not first.startswith("<"):
            lines.append(f"head[lazy]: TEXT {first}")
        fields = ["tools", *("" for _ in lines[1:])]
        if schema is not None:
            lines.append(f"answer: %json {schema}")
            fields.append("response_format.json_schema.schema")
        for n in self._only:
            for line, mine in self._tool(n):
                lines.append(line)
                fields.append(mine)
        return lines, fields

    def _start(self, schema: str | None, first: str, *, forced: bool) -> str:
        if forced:
            return "calls"
        if schema is not None:
            return "answer | calls"
        if not self._form.anywhere:
            return "PLAIN | calls"
        if not first.startswith("<"):
            return "TEXT | head rest"
        return f"text | calls | {' '.join(['text', *self._write(self._form.joint), 'calls'])}"

    def _text(self) -> str:
        """The rule for text without calls. Marks of a thought that are tokens are listed, since no pattern matches
        them."""
        marks = [mark for mark in ("<think>", "</think>") if mark in self._vocabulary.added]
        text = f"TEXT (({' | '.join(marks)}) TEXT)*" if marks else "TEXT"
        said, joint = " ".join(self._write(self._form.text, {"text": text})), " ".join(self._write(self._form.joint))
        return f"{said} ( {joint} {said} )*" if joint else said

    def _tool(self, n: int) -> Iterator[tuple[str, str]]:
        """The lines of the rule `tool_{n}`, a call of the tool without its opening mark, each with the field of the
        request behind it."""
        tool, xml = self._tools[n], self._form.xml
        rules = {"xml": f"xml_{n}"} if xml is not None else {"arguments": f"%json {tool.schema_text()}"}
        parts = self._write(self._call, rules, name=tool.name, quoted=json.dumps(tool.name))
        yield f"tool_{n}: {' '.join(parts)}", f"tools[{n}].function.parameters"
        if xml is not None:
            yield from xml_calls.rules(n, tool, xml, self._write)

    def _write(self, text: str, rules: Mapping[str, str] = _RULES, **values: str) -> list[str]:
        """The parts of a rule that stand for a text with marks and placeholders. `rules`: placeholder -> part of the
        rule. `values`: placeholder -> text."""
        rules = _RULES | dict(rules)
        parts: list[str] = []
        literal = ""
        pieces: list[str] = _MARK_OR_PLACEHOLDER.split(text)
        for piece in pieces:
            token = self._vocabulary.added.get(piece)
            part = rules.get(piece[1:]) if piece.startswith("$") else None
            if token is not None:
                part = piece if _NAMED_TOKEN.fullmatch(piece) else f"<[{token}]>"
            if part is None:
                literal += values.get(piece[1:], piece) if piece.startswith("$") else piece
                continue
            parts += [json.dumps(literal)] * bool(literal) + [part]
            literal = ""
        return [*parts, json.dumps(literal)] if literal else parts
