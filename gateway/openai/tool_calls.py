"""Reads calls of tools from a model's text, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import regex

from gateway.openai import xml_calls
from gateway.openai.call_forms import FORMS
from tinsmith.tool_calls import ToolCallFormat


@dataclass(slots=True, eq=False)
class GeneratedCall:
    """A call of a tool, which grows while it is read."""

    index: int
    """Index among the calls of its message, from 0."""
    name: str
    id: str
    arguments: str = ""
    """The arguments as JSON, as the model wrote them. Incomplete when the model's text is incomplete."""


@dataclass(frozen=True, slots=True)
class MessagePiece:
    """New text of a message, or of a call's arguments."""

    text: str
    call: GeneratedCall | None = None
    """The call to which the arguments belong; None for text of the message."""
    begins: bool = False
    """True for the first piece of a call."""


class ToolCallReader:
    """Splits one message into text and calls of tools. A broken call is text."""

    def __init__(self, form: ToolCallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON Schema of the arguments of each of the request's tools, by name."""
        self.calls: list[GeneratedCall] = []
        self._form = FORMS[form]
        self._schemas = schemas
        self._state: Literal["text", "whole", "arguments", "object", "after", "plain"] = "text"
        self._rest = ""
        """Text that was pushed, but is not in a piece yet."""
        self._opening = ""
        """Mark of the whole call that is being read, and the spaces before it."""
        self._num_searched = 0
        """Number of characters of `_rest` in which no mark was found that closes the whole call."""
        self._closing: list[str] = []
        """Marks that may follow the last call."""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_in_arguments(self) -> bool:
        """Whether the arguments of the last call have begun, and not ended."""
        return self._state == "arguments"

    def push(self, text: str) -> list[MessagePiece]:
        """Adds text. Returns the pieces that are certain now."""
        self._rest += text
        pieces: list[MessagePiece] = []
        while True:
            before = (self._state, len(self._rest))
            match self._state:
                case "text":
                    pieces += self._text()
                case "whole":
                    pieces += self._whole()
                case "arguments":
                    pieces += self._arguments()
                case "object":
                    self._object()
                case "after":
                    pieces += self._after()
                case "plain":
                    pieces += self._take(len(self._rest))
            if before == (self._state, len(self._rest)):
                return pieces

    def end(self) -> list[MessagePiece]:
        """The remaining pieces, after the last text."""
        if self._state == "whole":
            self._drop_beginning_of_close()
            return self._call_or_text(self._rest, closed=False)
        if self._state == "text" and not self._form.anywhere:
            return self._call_or_text(self._rest, closed=False)
        if self._state == "after":
            self._rest = self._rest.lstrip()
            if any(mark.startswith(self._rest) for mark in self._closing):
                return []
        return self._take(len(self._rest)) if self._state in ("text", "after") else []

    def _take(self, size: int) -> list[MessagePiece]:
        """The first characters of the rest, as text of the message, without hidden marks."""
        text, self._rest = self._rest[:size], self._rest[size:]
        for mark in self._form.hidden:
            text = text.replace(mark, "")
        return [MessagePiece(text)] if text else []

    def _text(self) -> list[MessagePiece]:
        """Takes text up to the beginning of a call, or up to text that may become one, and up to the spaces before."""
        find = self._form.reads.search if self._form.anywhere else self._form.reads.match
        found = find(self._rest, partial=True)
        at = self._rest.find(self._form.opens) if self._form.opens else -1
        if at >= 0 and (found is None or at < found.start() or "arguments" not in found.re.groupindex):
            pieces = self._take(len(self._rest[:at].rstrip()))
            start = self._rest.index(self._form.opens) + len(self._form.opens)
            self._opening, self._rest = self._rest[:start], self._rest[start:]
            self._state, self._num_searched = "whole", 0
            return pieces
        if not self._form.anywhere and (found is None or not (found.partial or _name(found) in self._schemas)):
            self._state = "plain"
            return []
        if found is None or found.partial:
            return self._take(len(self._rest[: len(self._rest) if found is None else found.start()].rstrip()))
        if not _name(found):
            return self._take(found.end())
        pieces = self._take(len(self._rest[: found.start()].rstrip()))
        return [*pieces, self._begin(found)]

    def _begin(self, found: regex.Match[str]) -> MessagePiece:
        """Begins a call whose arguments follow."""
        self._rest = found.string[found.start("arguments") :]
        self._state = "arguments"
        return self._new(_name(found), found.groupdict().get("id"))

    def _new(self, name: str, own_id: str | None = None) -> MessagePiece:
        made = f"{self._form.id_prefix}{uuid4().hex[: self._form.id_length]}"
        call = GeneratedCall(len(self.calls), name, own_id or made)
        self.calls.append(call)
        self._closing = [*self._form.closes]
        return MessagePiece("", call, begins=True)

    def _arguments(self) -> list[MessagePiece]:
        """Takes text up to the brace that closes the arguments."""
        text, is_closed = self._closed()
        if is_closed:
            self._state, self._depth = ("object", 1) if self._form.in_object else ("after", 0)
        call = self.calls[-1]
        call.arguments += text
        return [MessagePiece(text, call)] if text else []

    def _object(self) -> None:
        """Skips the text from the end of the arguments to the brace that closes the call's object."""
        if self._closed()[1]:
            self._state = "after"

    def _closed(self) -> tuple[str, bool]:
        """Takes text up to the closing brace of the open object. Returns the text, and whether the brace was found."""
        size = 0
        for char in self._rest:
            size += 1
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    break
        text, self._rest = self._rest[:size], self._rest[size:]
        return text, not self._depth

    def _after(self) -> list[MessagePiece]:
        """Takes the text that follows a call: the beginning of another call, or marks that close the call, and
        spaces."""
        if self._form.more is not None:
            found = self._form.more.match(self._rest, partial=True)
            if found is not None and found.partial:
                return []
            if found is not None and (self._form.anywhere or _name(found) in self._schemas):
                return [self._begin(found)]
        self._rest = self._rest.lstrip(None if self._form.anywhere else " \n;")
        while self._closing:
            if self._rest.startswith(self._closing[0]):
                self._rest = self._rest[len(self._closing[0]) :].lstrip()
            elif self._closing[0].startswith(self._rest):
                return []
            self._closing.pop(0)
        if self._rest:
            self._state = "text" if self._form.anywhere else "plain"
        return []

    def _whole(self) -> list[MessagePiece]:
        """Takes a call that is read as a whole, once all of it is there. Such a call is in XML, or has its members in
        an unusual order."""
        close, xml = self._form.closes[0], self._form.xml
        while (at := self._rest.find(close, self._num_searched)) >= 0:
            if xml is None or xml.is_whole(self._rest[:at]):
                return self._call_or_text(self._rest[:at], closed=True)
            self._num_searched = at + 1
        self._num_searched = max(0, len(self._rest) - len(close))
        return []

    def _call_or_text(self, text: str, *, closed: bool) -> list[MessagePiece]:
        """Takes a whole call. A broken call becomes text."""
        close = self._form.closes[0] if closed else ""
        self._rest = self._rest[len(text) + len(close) :]
        self._state = "text"
        found = self._read(text)
        if found is None:
            return [MessagePiece(self._opening + text + close)] if self._opening + text else []
        begun = self._new(found[0])
        assert begun.call is not None
        begun.call.arguments = found[1]
        self._closing, self._state = [], "after"
        return [begun, MessagePiece(begun.call.arguments, begun.call)]

    def _drop_beginning_of_close(self) -> None:
        """Drops the first part of a closing mark at the end of the text, if the call before it is whole."""
        close = self._form.closes[0]
        size = next((size for size in range(len(close) - 1, 0, -1) if self._rest.endswith(close[:size])), 0)
        call = self._rest[: len(self._rest) - size]
        if self._read(call) is not None:
            self._rest = call

    def _read(self, text: str) -> tuple[str, str] | None:
        """The name of a whole call, and its arguments as JSON; None for a broken call."""
        if self._form.xml is not None:
            return xml_calls.call_of(text, self._form.xml, self._schemas)
        try:
            value: Any = json.loads(text)
            name, arguments = value["name"], value.get("arguments" if self._form.anywhere else "parameters", {})
        except (ValueError, RecursionError, TypeError, KeyError):
            return None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return None
        if not self._form.anywhere and name not in self._schemas:
            return None
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments)


def _name(found: regex.Match[str]) -> str:
    groups = found.groupdict()
    if "quoted" not in groups:
        return groups["name"] or ""
    try:
        return json.loads(groups["quoted"] or '""', strict=False)
    except ValueError:
        return ""
