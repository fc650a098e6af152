"""Reads calls of tools from a model's text, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from gateway.openai import xml_calls

Form = Literal["hermes", "llama3", "qwen_xml"]
"""Form of calls. hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call, after any text.
llama3: {"name": ..., "parameters": {...}}, which is the whole message. qwen_xml: as hermes, with XML (xml_calls.py)
between the marks."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_BEGINS = '{"name":"'
_CALLED = {"hermes": "arguments", "llama3": "parameters"}


@dataclass(slots=True, eq=False)
class Call:
    index: int
    """Index among the calls of its message, from 0."""
    name: str
    id: str
    arguments: str = ""
    """JSON as the model wrote it; incomplete when the model's text is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a message, or of a call's arguments."""

    text: str
    call: Call | None = None
    """The call to which the arguments belong; None for text of the message."""
    begins: bool = False
    """True for the first piece of a call."""


class ToolCallReader:
    """Splits one message into text and calls of tools. A broken call is text."""

    def __init__(self, form: Form, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON Schema of the arguments of each of the request's tools, by name."""
        self.calls: list[Call] = []
        self._form: Form = form
        self._schemas = schemas
        self._state: Literal["text", "head", "arguments", "object", "tail", "plain"] = "text"
        self._rest = ""
        """Text that was pushed, but is not in a piece yet."""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[Piece]:
        """Adds text. Returns the pieces that are certain now."""
        self._rest += text
        pieces: list[Piece] = []
        while True:
            before = (self._state, len(self._rest))
            match self._state:
                case "text":
                    pieces += self._text()
                case "head":
                    pieces += self._head()
                case "arguments":
                    pieces += self._arguments()
                case "object":
                    self._object()
                case "tail":
                    self._tail()
                case "plain":
                    pieces += self._take(len(self._rest))
            if before == (self._state, len(self._rest)):
                return pieces

    def end(self) -> list[Piece]:
        """The remaining pieces, after the last text."""
        if self._state == "head":
            if self._form == "qwen_xml":
                self._drop_beginning_of_close()
            return self._whole(self._rest, closed=False)
        if self._state == "tail":  # no mark has closed the call
            self._rest = self._rest.lstrip()
            return [] if CLOSE.startswith(self._rest) else self._take(len(self._rest))
        return self._take(len(self._rest)) if self._state == "text" else []

    def _take(self, size: int) -> list[Piece]:
        text, self._rest = self._rest[:size], self._rest[size:]
        return [Piece(text)] if text else []

    def _text(self) -> list[Piece]:
        if self.calls:
            self._rest = self._rest.lstrip(" \n;" if self._form == "llama3" else None)
        if self._form == "llama3":
            start = self._rest.lstrip()
            if start:
                self._state = "head" if start.startswith("{") else "plain"
            return []
        at = self._rest.find(OPEN)
        if at < 0:
            return self._take(len(self._rest) - _num_held(self._rest))
        pieces = self._take(len(self._rest[:at].rstrip()))
        self._rest = self._rest.lstrip()[len(OPEN) :]
        self._state = "head"
        return pieces

    def _head(self) -> list[Piece]:
        if self._form == "qwen_xml":
            end = xml_calls.END.search(self._rest)
            return [] if end is None else self._whole(self._rest[: end.end() - len(CLOSE)], closed=True)
        found = _HEAD.match(self._rest)
        if found is not None and (name := _name(found[1])) and (self._form == "hermes" or name in self._schemas):
            self._rest = self._rest[found.end() :]
            self._state = "arguments"
            return [self._begin(name)]
        if self._form == "hermes":
            at = self._rest.find(CLOSE)
            return [] if at < 0 else self._whole(self._rest[:at], closed=True)
        start = "".join(self._rest.split())
        if found is not None or not (start.startswith(_HEAD_BEGINS) or _HEAD_BEGINS.startswith(start)):
            self._state = "plain"
        return []

    def _begin(self, name: str) -> Piece:
        call = Call(len(self.calls), name, f"call_{uuid4().hex[:24]}")
        self.calls.append(call)
        return Piece("", call, begins=True)

    def _arguments(self) -> list[Piece]:
        """Takes text up to the brace that closes the arguments."""
        text, is_closed = self._closing()
        if is_closed:
            self._state, self._depth = "object", 1
        call = self.calls[-1]
        call.arguments += text
        return [Piece(text, call)] if text else []

    def _object(self) -> None:
        """Skips what the model wrote from the end of the arguments to the brace that closes the call's object."""
        if self._closing()[1]:
            self._state = "tail" if self._form == "hermes" else "text"

    def _closing(self) -> tuple[str, bool]:
        """Takes text up to the closing brace of the open object. Returns it, and whether the brace was found."""
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

    def _tail(self) -> None:
        """Skips text after the object, up to the closing mark of the call; without one, up to the next call."""
        at, after = self._rest.find(CLOSE), self._rest.find(OPEN)
        if after >= 0 and (at < 0 or after < at):
            self._rest = self._rest[after:]
        elif at >= 0:
            self._rest = self._rest[at + len(CLOSE) :]
        else:
            return
        self._state = "text"

    def _whole(self, text: str, *, closed: bool) -> list[Piece]:
        """Takes a call as a whole: one of XML, or one whose members are in an unusual order. A broken call becomes
        text."""
        self._rest = self._rest[len(text) + len(CLOSE) * closed :]
        self._state = "text"
        found = xml_calls.call_of(text, self._schemas) if self._form == "qwen_xml" else self._json_call(text)
        if found is None:
            return [Piece(text if self._form == "llama3" else f"{OPEN}{text}{CLOSE * closed}")]
        begun = self._begin(found[0])
        assert begun.call is not None
        begun.call.arguments = found[1]
        return [begun, Piece(begun.call.arguments, begun.call)]

    def _drop_beginning_of_close(self) -> None:
        """Drops what has come of the mark that closes a call, if the call before it is whole."""
        sizes = range(len(CLOSE) - 1, 0, -1)
        size = next((size for size in sizes if self._rest.endswith(CLOSE[:size])), 0)
        call = self._rest[: len(self._rest) - size]
        if xml_calls.call_of(call, self._schemas) is not None:
            self._rest = call

    def _json_call(self, text: str) -> tuple[str, str] | None:
        """Name and arguments, as JSON; None for a broken call."""
        try:
            value: Any = json.loads(text)
            name, arguments = value["name"], value.get(_CALLED[self._form], {})
        except (ValueError, RecursionError, TypeError, KeyError):
            return None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return None
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments)


def _name(quoted: str) -> str:
    try:
        return json.loads(quoted, strict=False)
    except ValueError:
        return ""


def _num_held(text: str) -> int:
    """Number of characters at the end that may be the beginning of a call, or spaces before it."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return len(text) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())
