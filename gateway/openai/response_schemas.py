"""Schemas of the JSON bodies of OpenAI's Responses API, with the rules of schemas.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
)

from gateway.openai.schemas import HARMLESS, UNSUPPORTED, Only, OpenAIBody
from gateway.schema_types import Listed


class OutputPart(OpenAIBody):
    """Text of a message, as a client writes it or as an earlier response had it."""

    HARMLESS = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(OpenAIBody):
    type: Literal["input_image"]
    image_url: str
    """The URL of a picture, as in a chat."""
    detail: Annotated[Any, Only("auto")] = None


class InputMessage(OpenAIBody):
    HARMLESS = frozenset({"id", "status", "phase"})
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """Role of the message. The chat template gets developer as system."""
    content: str | Listed[Annotated[OutputPart | InputImage, Field(discriminator="type")]]
    """Text; parts of text are put together. Pictures by their URLs, for models that see."""


class FunctionCall(OpenAIBody):
    HARMLESS = frozenset({"id", "status"})
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(OpenAIBody):
    HARMLESS = frozenset({"id", "status", "name"})
    type: Literal["function_call_output"]
    call_id: str
    output: str | Listed[OutputPart]


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        _item_kind,
        custom_error_type=UNSUPPORTED,
        custom_error_message="this server knows only items of the types message, function_call and "
        "function_call_output",
    ),
]


class ResponseTool(OpenAIBody):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(OpenAIBody):
    type: Literal["function"]
    name: str


class ResponseText(OpenAIBody):
    HARMLESS = frozenset({"verbosity"})
    format: dict[str, Any] | None = None
    """Form of the text: the response_format of a chat, with the fields of json_schema beside `type`."""


class ResponseStreamOptions(OpenAIBody):
    include_obfuscation: Annotated[Any, Only(False)] = None


_NOTHING_KEPT = "this server keeps nothing of earlier requests; leave it out, and send the conversation as input"


class Respond(OpenAIBody):
    HARMLESS = HARMLESS - {"metadata"}

    model: str = Field(min_length=1, max_length=1000)
    """Public name of a base model, or tinker:// path of a checkpoint."""
    input: str | Listed[InputItem]
    """Text of the user, or items: messages, calls of functions and their outputs."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Longest output; this server's openai_default_max_tokens unless given, and no further than the context."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Divides the logits; 0 is greedy; 1 unless given."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the most probable tokens that together reach this probability."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Log-probabilities of each token, and of this number of most probable tokens."""
    include: Listed[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """message.output_text.logprobs asks for log-probabilities. The other value is ignored: there is no reasoning."""
    stream: bool | None = None
    """Send server-sent events, token by token."""
    stream_options: ResponseStreamOptions | None = None
    tools: Listed[ResponseTool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    """Whether the model may call a tool, or which one it has to call, as in a chat."""
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    metadata: dict[str, Any] | None = None
    """Notes that the response repeats."""
    reasoning: dict[str, Any] | None = None
    """Ignored."""
    user: str | None = None
    """Goes into the log."""
    seed: int | None = None
    """Extension: makes the draws reproducible."""
    top_k: int | None = None
    """Extension: draw from the k most probable tokens; 0 or -1 means all."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further variables of the chat template."""
    store: Annotated[Any, Only(False)] = None
    """Nothing is stored, even if this is left out."""
    background: Annotated[Any, Only(False)] = None
    truncation: Annotated[Any, Only("disabled")] = None
    previous_response_id: Annotated[Any, Only(why=_NOTHING_KEPT)] = None
    conversation: Annotated[Any, Only(why=_NOTHING_KEPT)] = None
    prompt: Annotated[Any, Only(why=_NOTHING_KEPT)] = None
