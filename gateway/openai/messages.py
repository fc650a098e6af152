"""Turns the choices of a chat into messages, with text and calls of tools."""

from __future__ import annotations

from gateway.openai.answers import Json
from gateway.openai.draws import Update
from gateway.openai.structured import Structure
from gateway.openai.tool_calls import GeneratedCall, MessagePiece, ToolCallReader


class Messages:
    """Reads the choices of one request, update by update."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._readers: dict[int, ToolCallReader | None] = {}
        """Index of a choice -> its reader; None when calls are not read."""

    def read(self, update: Update) -> list[MessagePiece]:
        """The pieces that an update adds to its choice."""
        if update.index not in self._readers:
            self._readers[update.index] = self._structure.reader()
        reader = self._readers[update.index]
        if reader is None:
            return [MessagePiece(update.text)] if update.text else []
        pieces = reader.push(update.text)
        return pieces + reader.end() if update.finish_reason is not None else pieces

    def calls(self, update: Update) -> list[GeneratedCall]:
        """The calls of tools in the update's choice so far."""
        reader = self._readers.get(update.index)
        return [] if reader is None else reader.calls

    def finish_reason(self, update: Update) -> str | None:
        """The finish reason of the update's choice; "tool_calls" if the choice's calls are whole. This method must be
        called after `read` has seen the update."""
        reader = self._readers.get(update.index)
        calls_tools = reader is not None and reader.calls and not reader.is_in_arguments
        return "tool_calls" if update.finish_reason == "stop" and calls_tools else update.finish_reason

    def message(self, update: Update) -> Json:
        """The message of a choice, from an update that holds all of it."""
        pieces = self.read(update)
        content = "".join(piece.text for piece in pieces if piece.call is None)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls := self.calls(update):
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def deltas(self, update: Update) -> list[Json]:
        """The deltas of an update, one for each chunk."""
        return [_delta(piece) for piece in self.read(update)]


def _delta(piece: MessagePiece) -> Json:
    call = piece.call
    if call is None:
        return {"content": piece.text}
    if not piece.begins:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": piece.text}}]}
    function = {"name": call.name, "arguments": ""}
    return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}
