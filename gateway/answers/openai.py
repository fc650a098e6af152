"""Answers below /v1."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class OpenAIErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    error: OpenAIErrorFields


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None


class ModelCards(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class VersionSpan(TypedDict):
    """Consecutive tokens of a choice that one version generated."""

    version: str
    num_tokens: int


class ChoiceExtension(TypedDict):
    """Extension of a choice that follows a training run."""

    version_spans: list[VersionSpan]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    tinsmith: NotRequired[ChoiceExtension]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    version: str | None
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    tinsmith: NotRequired[ChoiceExtension]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    version: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(TypedDict):
    """A response, which repeats the settings of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    version: str | None
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    metadata: dict[str, Any]
    user: str | None
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    tinsmith: NotRequired[ChoiceExtension]
