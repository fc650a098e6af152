"""Parts of answers: lists of log-probabilities, and chunks of streams."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from gateway.openai.draws import AnswerUsage, Draw, LogprobEntry, Update, text_off_loop
from gateway.openai.generator import Source
from gateway.openai.text import Vocabulary
from tinsmith.rpc import logs
from tinsmith.rpc.paths import run_of

logger = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]


def log_begin(request_id: str, source: Source, *, user: str | None) -> None:
    """Logs that a request begins. `user`: the client's name of its user."""
    logs.request_id.set(request_id)
    logs.model_id.set(run_of(source.version_id))
    logger.info("samples from %s%s", source.name, "" if user is None else f" for user {user[:200]!r}")


def chat_logprobs(entries: Sequence[LogprobEntry], vocabulary: Vocabulary) -> Json:
    """Log-probabilities as a list of objects, one for each token, for chats."""

    def named(token: int, logprob: float | None) -> Json:
        return {"token": vocabulary.text_of(token), "logprob": logprob, "bytes": list(vocabulary.bytes_of(token))}

    return {
        "content": [
            named(entry.token, entry.logprob) | {"top_logprobs": [named(*each) for each in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[LogprobEntry], vocabulary: Vocabulary, *, has_top: bool) -> Json:
    """Log-probabilities as parallel lists, for completions. A top list also has the token itself, whatever its rank."""
    tops: list[Json | None] = []
    for entry in entries:
        own = {} if entry.logprob is None else {vocabulary.text_of(entry.token): entry.logprob}
        tops.append({vocabulary.text_of(token): logprob for token, logprob in entry.top} | own or None)
    return {
        "tokens": [vocabulary.text_of(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if has_top else None,
        "text_offset": [entry.offset for entry in entries],
    }


def extension(update: Update) -> Json:
    """Fields of a choice that OpenAI does not have."""
    if not update.spans:
        return {}
    return {"tinsmith": {"version_spans": [{"version": name, "num_tokens": count} for name, count in update.spans]}}


def head_of(request_id: str, source: Source, *, kind: str) -> Json:
    """Fields that all chunks of an answer share."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": source.name,
        "version": source.version_id or None,
    }


def usage_of(draws: Sequence[Draw]) -> AnswerUsage:
    total = AnswerUsage()
    for draw in draws:
        total.add(draw.usage)
    return total


async def chunks_of(
    updates: AsyncIterator[Update],
    *,
    head: Json,
    choices: Callable[[Update], list[Json]],
    draws: Sequence[Draw],
    include_usage: bool,
    first: Json | None = None,
) -> AsyncGenerator[Json, None]:
    """The chunks of a stream: one for each choice of an update, and a last one with the usage.

    `first`: fields of the first chunk only.
    """
    if include_usage:
        head = head | {"usage": None}
    extra = first or {}
    async for update in updates:
        for choice in await text_off_loop(partial(choices, update), num_tokens=len(update.entries)):
            yield head | extra | {"choices": [choice]}
            extra = {}
    if include_usage:
        yield head | {"choices": [], "usage": usage_of(draws).to_json()}
