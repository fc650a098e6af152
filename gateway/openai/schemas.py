"""Schemas of the JSON bodies of completions and chats. An unknown field is refused, so nothing that is set is dropped.

Fields that OpenAI does not have are marked as extensions.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.schema_types import Id, Known, Listed, ShortStops, Stops

UNSUPPORTED = "unsupported"
"""Type of validation errors about values that this server does not support."""

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Spaces in JSON: at most one after each comma and colon. Otherwise a model might write spaces until max_tokens."""

DEFAULT_MAX_TOKENS = 16
"""Longest output of a completion that names no maximum, in tokens, as in OpenAI's API. Chats have a setting for it."""


class Only:
    """Marks a field that may be sent only with values that change nothing: null, or one of `values`.

    `why`: error text for other values. Without it, the error lists `values`.
    """

    def __init__(self, *values: Any, why: str = "") -> None:
        self._values = values
        self._why = why

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._values]}

    def _check(self, value: Any) -> Any:
        # true does not equal 1, but 0.0 equals 0.
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in self._values
        ):
            if self._why:
                raise PydanticCustomError(UNSUPPORTED, "{why}", {"why": self._why})
            accepted = " or ".join(repr(known) for known in self._values)
            raise PydanticCustomError(UNSUPPORTED, "this server supports only {accepted} here", {"accepted": accepted})
        return value


class OpenAIBody(Known):
    model_config = ConfigDict(strict=True, protected_namespaces=(), use_attribute_docstrings=True)


MAX_BIASES = 1024
"""Most tokens in one logit_bias."""


def _biases(value: dict[str, Any]) -> dict[str, Any]:
    """Checks token ids and biases, up to the first wrong entry."""
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise PydanticCustomError(
                "logit_bias", "{token} is no token id: whole numbers from 0, as text", {"token": repr(token[:100])}
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError(
                "logit_bias", "the bias of token {token} is no number of -100 .. 100", {"token": token}
            )
    return value


class StreamOptions(OpenAIBody):
    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    include_obfuscation: Annotated[Any, Only(False)] = None


HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "verbosity",
    }
)
"""Fields about how OpenAI runs, bills or stores a request, or how its own models think. They are ignored, because none
of them changes what is sampled here."""


class Generate(OpenAIBody):
    """Fields of completions and of chats."""

    HARMLESS = HARMLESS

    model: str = Field(min_length=1, max_length=1000)
    """Public name of a base model, or tinker:// path of a checkpoint."""
    n: int | None = Field(default=None, ge=1)
    """Number of choices for each prompt; 1 unless given."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Divides the logits; 0 is greedy; 1 unless given. Log-probabilities are computed after it."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the most probable tokens that together reach this probability."""
    top_k: int | None = None
    """Extension: draw from the k most probable tokens; 0 or -1 means all."""
    seed: int | None = None
    """Makes the draws reproducible."""
    stop: Annotated[str | Stops[str] | Stops[int], ShortStops] | None = None
    """Texts before which the output ends; it also ends at the model's own end. Extension: token ids, as
    stop_token_ids."""
    stop_token_ids: Stops[int] | None = None
    """Extension: tokens at which the output also ends; their text is not shown."""
    stream: bool | None = None
    """Send server-sent events, token by token."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    user: Id | None = None
    """Goes into the log."""
    return_token_ids: bool | None = None
    """Extension: answer with prompt_token_ids and, in each choice, token_ids."""
    store: Annotated[Any, Only(False)] = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from a token's logit for each occurrence in the output so far."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted once from the logit of each token that occurs in the output so far."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Extension: divides the positive and multiplies the negative logits of tokens that occur in prompt or output; 1
    unless given."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Extension: leave out tokens whose probability is below this share of the most probable token's."""
    logit_bias: Annotated[dict[str, Any], Field(max_length=MAX_BIASES), AfterValidator(_biases)] | None = None
    """Token id -> bias that is added to the token's logit, -100 .. 100. Log-probabilities are the model's own:
    penalties, min_p and logit_bias do not change them."""

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return [item for item in self.stop or () if isinstance(item, str)]

    @property
    def stop_tokens(self) -> list[int]:
        """Token ids in `stop`."""
        return [item for item in self.stop or () if isinstance(item, int)]


class Completion(Generate):
    HARMLESS = HARMLESS | {"parallel_tool_calls"}  # there are no tools

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    """Text, token ids, or a list of either: n choices are drawn for each."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Longest output; 16 unless given. 0 scores the prompt, with echo and logprobs."""
    logprobs: int | None = Field(default=None, ge=0)
    """Log-probabilities of each token, and of this number of most probable tokens; true means 1."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    best_of: int | None = None
    """Must equal n."""
    add_special_tokens: bool | None = None
    """Extension: add the tokenizer's special tokens to a prompt of text; true unless given."""
    suffix: Annotated[Any, Only("")] = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _true_is_one(cls, value: Any) -> Any:
        """Takes true for 1, and false for none."""
        return (1 if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Completion:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise PydanticCustomError("best_of", "best_of is supported only when it equals n")
        return self

    @model_validator(mode="after")
    def _no_tokens_needs_echo(self) -> Completion:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens 0 is only allowed with echo")
        return self


class TextPart(OpenAIBody):
    HARMLESS = frozenset({"annotations"})
    type: Literal["text"]
    text: str


class ImageUrl(OpenAIBody):
    url: str
    """A data URL, data:image/png;base64,... or data:image/jpeg;base64,...; or an https URL of one of image_hosts."""
    detail: Annotated[Any, Only("auto")] = None


class ImagePart(OpenAIBody):
    type: Literal["image_url"]
    image_url: ImageUrl


class ToolCallFunction(OpenAIBody):
    HARMLESS = frozenset({"parsed_arguments"})
    name: str
    arguments: str | dict[str, Any]


class ToolCall(OpenAIBody):
    HARMLESS = frozenset({"index"})
    type: Literal["function"] = "function"
    id: str | None = None
    function: ToolCallFunction


class ChatMessage(OpenAIBody):
    """A message of a chat. The model's chat template decides how its fields are used."""

    HARMLESS = frozenset({"annotations", "parsed", "provider_specific_fields"})
    """Fields that clients put beside the content of an answer, and send back with it."""
    role: str = Field(min_length=1)
    content: str | Listed[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    """Text; parts of text are put together. Pictures by their URLs, for models that see."""
    reasoning_content: str | None = None
    """Extension: the assistant's thoughts."""
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(OpenAIBody):
    type: Literal["function"]
    function: dict[str, Any]
    """The function as the chat template gets it: `name`, `description`, and `parameters`, a JSON Schema. With `strict`
    calls must match the schema."""

    @field_validator("function")
    @classmethod
    def _has_a_name(cls, function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(name := function.get("name"), str) or not _TOOL_NAME.fullmatch(name):
            raise PydanticCustomError("tool_name", "name must be 1 to 64 letters, digits, '_', '-' or '.'")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError("tool_parameters", "parameters must be the JSON Schema of an object")
        if not isinstance(function.get("strict"), bool | None):
            raise PydanticCustomError("tool_strict", "strict must be true or false")
        # The chat template would show a field that is null.
        return {name: value for name, value in function.items() if value is not None}

    @property
    def name(self) -> str:
        return self.function["name"]

    @property
    def is_strict(self) -> bool:
        return bool(self.function.get("strict"))

    def schema_text(self) -> str:
        """The schema of a call's arguments, which are an object, for the sampler's compiler."""
        return compiled_text({"type": "object", **(self.function.get("parameters") or {})}, strict=self.is_strict)


class ToolName(OpenAIBody):
    name: str


class NamedTool(OpenAIBody):
    type: Literal["function"]
    function: ToolName


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class JsonSchema(OpenAIBody):
    name: str = Field(min_length=1)
    """Only for the client's own use."""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON Schema of the answer; any object unless given."""
    strict: bool | None = None
    """Refuse a schema with keywords that cannot be enforced; otherwise these are left to the model."""


class ResponseFormat(OpenAIBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """Only with type json_schema."""

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema is needed with type 'json_schema', and only with it")
        return self

    def schema_text(self) -> str | None:
        """The schema of the answer, for the sampler's compiler. None means any text."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return compiled_text({"type": "object"}, strict=True)
        return compiled_text(self.json_schema.schema_, strict=bool(self.json_schema.strict))


def compiled_text(schema: dict[str, Any], *, strict: bool) -> str:
    """A JSON Schema for the sampler's compiler."""
    return json.dumps({**schema, "x-guidance": {"lenient": not strict, **_SPACES}})


WHOLE_ANSWER = "this server does not split an answer into thoughts and text: the thoughts are in content; send false"


class Chat(Generate):
    messages: Listed[ChatMessage]
    """Rendered by the model's chat template."""
    prompt_token_ids: Listed[int] | None = None
    """Extension: the prompt as tokens, with messages []."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest output; this server's openai_default_max_tokens unless given, and no further than the context."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Log-probability of each token."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Log-probabilities of this number of most probable tokens, too; only with logprobs."""
    tools: Listed[FunctionTool] | None = None
    """Tools for the chat template. Calls are read from the answer if the template has a known form for them."""
    tool_choice: ToolChoice | None = None
    """"none" hides the tools from the model; "required", or the name of a tool, makes the answer a call."""
    parallel_tool_calls: bool | None = None
    """false means at most one call."""
    response_format: ResponseFormat | None = None
    """Make the answer JSON: of a schema, or any object."""
    modalities: Annotated[Any, Only(["text"])] = None
    add_generation_prompt: bool | None = None
    """Extension: open the assistant's next message; true unless given, or continue_final_message."""
    continue_final_message: bool | None = None
    """Extension: leave the last message open, so that the model continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further variables of the chat template."""
    separate_reasoning: Annotated[Any, Only(False, why=WHOLE_ANSWER)] = None

    @model_validator(mode="after")
    def _one_maximum(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _chosen_tools_are_there(self) -> Chat:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "tools: two of them have one name")
        if self.tool_choice == "required" and not names:
            raise PydanticCustomError("tool_choice", "tool_choice: 'required' needs tools, and there are none")
        if isinstance(self.tool_choice, NamedTool) and (name := self.tool_choice.function.name) not in names:
            raise PydanticCustomError("tool_choice", "tool_choice: {name} is none of the tools", {"name": repr(name)})
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> Chat:
        if self.prompt_token_ids is None:
            if not self.messages:
                raise PydanticCustomError("messages", "messages is empty; send at least one message")
            return self
        template = (self.tools, self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        if self.messages or any(value is not None for value in template):
            raise PydanticCustomError(
                "prompt_token_ids", "prompt_token_ids is the whole prompt: messages must be [], and tools and settings "
                "of the chat template must be left out"
            )  # fmt: skip
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
