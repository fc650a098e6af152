"""Below /v1."""

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
    """A stretch of a choice's tokens that one version drew."""

    version: str
    num_tokens: int


class ChoiceExtension(TypedDict):
    """Of a choice that follows a training run."""

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
