"""POST /v1/responses: OpenAI's Responses API, on top of chats. Nothing is stored between requests.

A request becomes a chat, and the chat's answer becomes a response. So limits, usage, tools and errors are those of
chats.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from starlette.responses import Response

from gateway.codec import Request
from gateway.gateway import Gateway
from gateway.openai.answers import Json
from gateway.openai.chat import chat, put_together
from gateway.openai.errors import body_of, invalid
from gateway.openai.response_schemas import InputImage, OutputPart, Respond
from gateway.openai.schemas import Chat
from gateway.tenants.access import Caller
from tinsmith.errors import InvalidRequest, ServiceError

LOGPROBS = "message.output_text.logprobs"

_NAMES = (
    # The place below messages is dropped, because instructions and calls give messages other indices than items.
    (re.compile(r"messages\b[^\s:]*"), "input"),
    (re.compile(r"max_tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)
"""Field of a chat -> field of a response."""


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Makes errors about a field of the chat name the field of the response from which it came."""
    try:
        yield
    except ServiceError as error:
        field = error.metadata.get("field", "")
        for before, after in _NAMES:
            if before.match(field):
                message = _renamed(before, after, error.message)
                raise type(error)(message, **{**error.metadata, "field": _renamed(before, after, field)}) from error
        raise


def _renamed(pattern: re.Pattern[str], name: str, text: str) -> str:
    """The text, with the name at its beginning replaced if it matches the pattern."""
    found = pattern.match(text)
    return found.expand(name) + text[found.end() :] if found else text


def _messages(body: Respond) -> list[Json]:
    """The messages of the chat. A call of a tool is added to the assistant's message before it."""
    messages: list[Json] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "content": put_together(item.output), "tool_call_id": item.call_id})
        else:
            role = "system" if item.role == "developer" else item.role  # most templates do not know developer
            messages.append({"role": role, "content": _content(item.content)})
    return messages


def _content(content: str | Sequence[OutputPart | InputImage]) -> str | list[Json]:
    """The content of a chat's message: text, or parts if there is a picture among them."""
    if isinstance(content, str):
        return content
    parts: list[Json] = [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]
    return parts if any(part["type"] == "image_url" for part in parts) else "".join(part["text"] for part in parts)


def chat_of(body: Respond) -> Chat:
    """The chat that answers the request. Raises InvalidRequest and Unsupported."""
    asked: Json = {
        "model": body.model,
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "user": body.user,
        "parallel_tool_calls": body.parallel_tool_calls,
        **body.model_dump(include={"temperature", "top_p", "top_k", "seed", "chat_template_kwargs"}),
    }
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        asked |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        asked["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, str):
        asked["tool_choice"] = choice
    elif choice is not None:
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if body.text is not None and body.text.format is not None:
        form = dict(body.text.format)
        kind = form.pop("type", None)
        asked["response_format"] = {"type": kind, **({"json_schema": form} if kind == "json_schema" else form)}
    if body.stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        return Chat.model_validate(asked)
    except ValidationError as error:
        raise invalid(error, asked) from None


async def respond(gateway: Gateway, request: Request, body: Respond, *, caller: Caller) -> Response:
    """Answers a request. Raises ServiceError, and ClientDisconnect when the client has left."""
    if not body.input:
        raise InvalidRequest("input: is empty; send text or at least one item", field="input")
    with named():
        asked, form = await request.work(lambda: (chat_of(body), ResponseForm(body)))
        return await chat(gateway, request, asked, caller=caller, form=form)


class ResponseForm:
    """Builds one response from the answer of its chat, at once or as a stream of events."""

    def __init__(self, body: Respond) -> None:
        self._response = _opening(body)
        self._text: Json | None = None
        """The open text part of the message in `_item`; None while no text is open."""
        self._item: Json | None = None
        """The open output item; None between two items."""
        self._call = -1
        """The chat's index of the open call."""
        self._reason: str | None = None
        self._number = 0

    def whole(self, answer: Json) -> Json:
        """The response that a chat's answer makes."""
        self._begin(answer)
        (choice,) = answer["choices"]
        list(self._take(choice["message"], choice))
        list(self._end(answer["usage"]))
        return self._response

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncGenerator[Json, None]:
        """The events of a stream, from the chunks of a chat. A failure in the middle becomes an event, too."""
        usage: Json = {}
        try:
            async for chunk in chunks:
                if not self._number:
                    self._begin(chunk)
                    yield self._event("created", response=self._shown())
                    yield self._event("in_progress", response=self._shown())
                for choice in chunk["choices"]:
                    for event in self._take(choice["delta"], choice):
                        yield event
                usage = chunk["usage"] or usage
        except ServiceError as error:
            found = body_of(error)[1]["error"]
            yield self._event("error", **{name: found[name] for name in ("code", "message", "param")})
            self._response["status"] = "failed"
            self._response["error"] = {"code": "server_error", "message": found["message"]}
            yield self._event("failed", response=self._shown())
            return
        for event in self._end(usage):
            yield event

    def _begin(self, answer: Json) -> None:
        """Takes over the chat's id, time and version. `answer`: the chat's answer, or a chunk of it."""
        self._response["id"] = answer["id"].replace("chatcmpl-", "resp_", 1)
        self._response["created_at"] = answer["created"]
        self._response["version"] = answer["version"]

    def _event(self, kind: str, /, **fields: Any) -> Json:
        self._number += 1
        if kind != "error":
            kind = f"response.{kind}"
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _shown(self) -> Json:
        """A copy of the response as it is now, because an event may be read after the response has changed."""
        return {**self._response, "output": [*self._response["output"]]}

    @property
    def _place(self) -> Json:
        """The id and the index of the open item, for its events."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._response["output"])}

    def _take(self, said: Json, choice: Json) -> Iterator[Json]:
        """Adds text and calls to the response, and yields the events. `said`: the chat's message, or a delta of it."""
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if said.get("content") or logprobs:
            if self._text is None:
                yield from self._close("completed")
                yield from self._open_text()
            yield from self._add_text(said.get("content") or "", logprobs)
        for n, call in enumerate(said.get("tool_calls") or ()):
            index = call.get("index", n)
            if index != self._call or self._text is not None:
                yield from self._close("completed")
                self._call = index
                yield from self._open_call(call)
            if more := call["function"].get("arguments"):
                assert self._item is not None
                self._item["arguments"] += more
                yield self._event("function_call_arguments.delta", **self._place, delta=more)
        self._reason = choice["finish_reason"] or self._reason
        if "tinsmith" in choice:
            self._response["tinsmith"] = choice["tinsmith"]

    def _open_text(self) -> Iterator[Json]:
        self._item = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("output_item.added", output_index=len(self._response["output"]), item=dict(self._item))
        yield self._event("content_part.added", **self._place, content_index=0, part=dict(self._text))

    def _add_text(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        assert self._text is not None
        self._text["text"] += text
        self._text["logprobs"] = [*self._text["logprobs"], *logprobs]
        yield self._event("output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs)

    def _open_call(self, call: Json) -> Iterator[Json]:
        self._item = {
            "id": f"fc_{uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
        }
        yield self._event("output_item.added", output_index=len(self._response["output"]), item=dict(self._item))

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the open item, if there is one."""
        item, text = self._item, self._text
        if item is None:
            return
        if text is not None:
            place = {**self._place, "content_index": 0}
            yield self._event("output_text.done", **place, text=text["text"], logprobs=text["logprobs"])
            yield self._event("content_part.done", **place, part=text)
            item["content"] = [text]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._place, **done)
        item["status"] = status
        output_index = len(self._response["output"])
        self._response["output"].append(item)
        self._item = self._text = None
        yield self._event("output_item.done", output_index=output_index, item=item)

    def _end(self, usage: Json) -> Iterator[Json]:
        status = "incomplete" if self._reason == "length" else "completed"
        if self._item is None and not self._response["output"]:
            yield from self._open_text()  # the model has generated no text
        is_call = self._item is not None and self._text is None
        # A call whose arguments a stop has broken off is not the reason why its message ended.
        yield from self._close("incomplete" if is_call and self._reason != "tool_calls" else status)
        self._response["status"] = status
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        yield self._event(status, response=self._shown())


def _opening(body: Respond) -> Json:
    """The response before anything is generated. Like OpenAI's, it repeats the settings of its request."""
    choice = body.tool_choice
    return {
        "object": "response",
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "metadata": body.metadata or {},
        "user": body.user,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
    }
