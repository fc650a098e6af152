"""POST /v1/chat/completions: a conversation, rendered by the model's chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from uuid import uuid4

import orjson
from starlette.responses import Response

from gateway import codec
from gateway.codec import Request, json_response
from gateway.gateway import Gateway
from gateway.load import Share
from gateway.openai.answers import Json, chat_logprobs, chunks_of, extension, head_of, log_begin
from gateway.openai.completions import checked_tokens
from gateway.openai.draws import Draw, Update, sample_request, text_off_loop
from gateway.openai.events import event_stream, while_connected
from gateway.openai.generator import Source, TokenizerInfo
from gateway.openai.messages import Messages
from gateway.openai.pictures import images_of, placed
from gateway.openai.response_schemas import OutputPart
from gateway.openai.schemas import Chat, ChatMessage, ImagePart, TextPart
from gateway.openai.sources import find_source
from gateway.openai.structured import Structure, structure_of
from gateway.openai.text import Vocabulary
from gateway.tenants.access import Caller
from tinsmith.errors import InvalidRequest
from tinsmith.v1 import sampler_pb2 as pb


def put_together(content: str | Sequence[TextPart | ImagePart | OutputPart] | None) -> str:
    """The text of a message's content."""
    if isinstance(content, str | None):
        return content or ""
    return "".join(part.text for part in content if not isinstance(part, ImagePart))


_MAX_JSON_CHARACTERS = 4 * 2**20
"""Most characters of the messages, of the tools, or of the variables of a chat, as JSON. Samplers have the same
bound."""


def _json(value: Any, *, field: str) -> str:
    """The value as JSON. Raises InvalidRequest when it is longer than a sampler takes, or nested too deeply."""
    # orjson cannot write integers of any size, which a tool's schema may hold. ASCII would take many times as long.
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError as error:  # arguments of a call may be deeper than a body
        raise InvalidRequest(f"{field}: its JSON is nested too deeply", field=field) from error
    if len(text) > _MAX_JSON_CHARACTERS:
        raise InvalidRequest(
            f"{field}: {len(text)} characters of JSON are above the limit of {_MAX_JSON_CHARACTERS}", field=field
        )
    return text


def _check_arguments(messages: Sequence[ChatMessage], *, max_values: int) -> None:
    """Raises InvalidRequest when the arguments of all tool calls hold more values than a body may.

    The arguments are JSON inside a string, which counts as only one value of the body.
    """
    num_values = 0
    for call in (call for message in messages for call in message.tool_calls or ()):
        if isinstance(call.function.arguments, str):
            num_values += codec.json_values(call.function.arguments.encode(), limit=max_values)
        if num_values > max_values:
            raise InvalidRequest(
                f"messages: the arguments of tool calls hold more values than this server's max_body_values, "
                f"{max_values}",
                field="messages",
            )


def _message(message: ChatMessage, *, index: int) -> dict[str, Any]:
    """A message in the form of chat templates: content is text, or parts if there are pictures, and arguments of tool
    calls are objects. `index`: the message's place in the request.

    Raises InvalidRequest for arguments that are not JSON.
    """
    made = message.model_dump(exclude_none=True, exclude={"content"})
    if isinstance(message.content, list) and any(isinstance(part, ImagePart) for part in message.content):
        made["content"] = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
            for part in message.content
        ]
    else:
        made["content"] = put_together(message.content)
    for number, call in enumerate(made.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = orjson.loads(arguments)
            except orjson.JSONDecodeError as error:
                field = f"messages[{index}].tool_calls[{number}].function.arguments"
                raise InvalidRequest(
                    f"{field}: the arguments of a tool call are not JSON: {arguments[:100]!r}", field=field
                ) from error
    return made


def chat_of(body: Chat, *, max_values: int) -> pb.Chat:
    """The chat for the sampler, which renders it. `max_values`: most values of all arguments. Raises InvalidRequest."""
    _check_arguments(body.messages, max_values=max_values)
    tools = [tool.model_dump() for tool in body.tools or ()] if body.tool_choice != "none" else []
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if opens and continues:
        raise InvalidRequest(
            "continue_final_message: is not possible together with add_generation_prompt",
            field="continue_final_message",
        )
    kwargs = {name: value for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    return pb.Chat(
        messages=_json([_message(each, index=index) for index, each in enumerate(body.messages)], field="messages"),
        tools=_json(tools, field="tools") if tools else "",
        add_generation_prompt=opens,
        continue_final_message=continues,
        template_kwargs=_json(kwargs, field="chat_template_kwargs") if kwargs else "",
    )


def _has_images(body: Chat) -> bool:
    return any(
        isinstance(part, ImagePart)
        for message in body.messages
        for part in (message.content if isinstance(message.content, list) else ())
    )


async def _prompt(request: Request, source: Source, body: Chat) -> bytes:
    gateway = request.gateway
    if body.prompt_token_ids is not None:
        return checked_tokens(gateway, source, body.prompt_token_ids, field="prompt_token_ids")
    rendered = await request.work(lambda: chat_of(body, max_values=gateway.config.max_body_values))
    return await gateway.sampling.generator.tokenize(source, pb.TokenizeRequest(chat=rendered))


def default_max_tokens(gateway: Gateway, source: Source, prompt: bytes) -> int | None:
    """Longest answer to a request that names no maximum, in tokens; None means to the end of the context. `prompt`:
    int32 tokens, little endian."""
    default = gateway.config.openai_default_max_tokens
    if not default:
        return None
    room = gateway.clients.samplers.context_length(source.base_model) - len(prompt) // 4
    return min(default, room) if room > 0 else None  # the sampler refuses a prompt that fills the context


class AnswerForm(Protocol):
    """Turns the answer of a chat into the answer of another API."""

    def whole(self, answer: Json) -> Json:
        """The other API's answer, from a whole chat completion."""
        ...

    def events(self, chunks: AsyncIterator[Json]) -> AsyncGenerator[Json, None]:
        """The other API's events, each with its name in `type`, from the chunks of a chat. A failure becomes an event,
        too."""
        ...


async def chat(
    gateway: Gateway, request: Request, body: Chat, *, caller: Caller, form: AnswerForm | None = None
) -> Response:
    """Answers a chat. `form`: another API's form of the answer.

    Raises ServiceError, and ClientDisconnect when the client has left.
    """
    limit = gateway.config.max_num_samples
    if body.num_choices > limit:
        raise InvalidRequest(f"n: {body.num_choices} is above this server's max_num_samples {limit}", field="n")
    with contextlib.ExitStack() as places:
        places.enter_context(gateway.sampling.places.hold(caller.owner))
        return await _answer(gateway, request, body, caller=caller, places=places, form=form)


async def _answer(
    gateway: Gateway,
    request: Request,
    body: Chat,
    *,
    caller: Caller,
    places: contextlib.ExitStack,
    form: AnswerForm | None,
) -> Response:
    source = await find_source(gateway, body.model, caller=caller)
    tokenizer = await gateway.sampling.generator.tokenizer(source)
    draw, structure = await _draw(gateway, request, body, source, tokenizer)
    choices = _ChatChoices(body, tokenizer.vocabulary, Messages(structure))
    prompt = {"prompt_token_ids": draw.prompt} if body.return_token_ids else {}
    if body.stream:
        return await _stream(request, body, draw, structure, choices, prompt, places=places, form=form)
    with structure.blaming():
        updates = await while_connected(request, draw.result())
    head = head_of(draw.request_id, draw.source, kind="chat.completion")
    num_tokens = sum(len(update.entries) for update in updates)
    made = await text_off_loop(lambda: [*map(choices.whole, updates)], num_tokens=num_tokens)
    answer = head | prompt | {"choices": made, "usage": draw.usage.to_json()}
    return json_response(answer if form is None else form.whole(answer))


async def _draw(
    gateway: Gateway, request: Request, body: Chat, source: Source, tokenizer: TokenizerInfo
) -> tuple[Draw, Structure]:
    """The draw that answers the chat, which has not begun, and the structure that its text has to have."""
    share = cast(Share, request.state.body_share)
    images = await images_of(gateway.assets, body.messages, share) if _has_images(body) else []
    prompt_tokens = await _prompt(request, source, body)
    seen = placed(gateway, source.base_model, prompt_tokens, images) if images else None
    if seen is not None:
        prompt_tokens = seen.tokens
    max_tokens = default_max_tokens(gateway, source, prompt_tokens) if body.limit is None else body.limit
    topk = body.top_logprobs or 0
    sample = sample_request(body, source, tokenizer, prompt_tokens, max_tokens=max_tokens, topk=topk)
    if seen is not None:
        del sample.prompt[:]
        sample.prompt.extend(seen.chunks)
    request_id = f"chatcmpl-{uuid4().hex}"
    log_begin(request_id, source, user=body.user)
    structure = await request.work(
        lambda: structure_of(
            tokenizer,
            response_format=body.response_format,
            tools=body.tools or (),
            tool_choice=body.tool_choice,
            parallel=body.parallel_tool_calls is not False,
        )
    )
    if structure.grammar is not None:
        sample.grammar.CopyFrom(structure.grammar)
    draw = Draw(
        gateway.sampling.generator,
        source,
        tokenizer,
        sample,
        prompt_tokens,
        request_id=request_id,
        shown=structure.shown,
    )
    return draw, structure


async def _stream(
    request: Request,
    body: Chat,
    draw: Draw,
    structure: Structure,
    choices: _ChatChoices,
    prompt: Json,
    *,
    places: contextlib.ExitStack,
    form: AnswerForm | None,
) -> Response:
    """The answer as server-sent events. `prompt`: fields of the first event only. Takes over `places`, which are closed
    at the end of the stream."""
    head = head_of(draw.request_id, draw.source, kind="chat.completion.chunk")

    def parts(updates: AsyncIterator[Update]) -> AsyncGenerator[Json, None]:
        chunks = chunks_of(
            updates,
            head=head,
            choices=choices.of,
            draws=[draw],
            include_usage=body.include_usage,
            first=prompt,
        )
        return chunks if form is None else form.events(chunks)

    with structure.blaming():
        return await event_stream(request, [draw], parts, places=places.pop_all(), are_named=form is not None)


@dataclass(frozen=True, slots=True)
class _ChatChoices:
    body: Chat
    vocabulary: Vocabulary
    messages: Messages
    _begun: set[int] = field(default_factory=set)
    """Indices of the choices whose first chunk was sent."""

    def whole(self, update: Update) -> Json:
        return self._make(update, message=self.messages.message(update))

    def of(self, update: Update) -> list[Json]:
        """The choices of an update, one for each chunk."""
        made = []
        if update.index not in self._begun:
            self._begun.add(update.index)
            made.append(self._make(Update(update.index), delta={"role": "assistant", "content": ""}))
        deltas = self.messages.deltas(update)
        if not deltas and update.entries and (self.body.logprobs or self.body.return_token_ids):
            deltas = [{"content": ""}]
        part = Update(update.index, update.text, update.tokens, update.entries)  # the first delta has the tokens
        for delta in deltas:
            made.append(self._make(part, delta=delta))
            part = Update(update.index)
        if update.finish_reason is not None:
            end = Update(update.index, finish_reason=update.finish_reason, spans=update.spans)
            made.append(self._make(end, delta={}))
        return made

    def _make(self, update: Update, **content: Json) -> Json:
        token_ids = {"token_ids": update.tokens} if self.body.return_token_ids else {}
        return {
            "index": update.index,
            **content,
            "logprobs": chat_logprobs(update.entries, self.vocabulary) if self.body.logprobs else None,
            "finish_reason": self.messages.finish_reason(update),
            **token_ids,
            **extension(update),
        }
