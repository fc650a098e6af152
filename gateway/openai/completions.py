"""POST /v1/completions: text or tokens in, text and tokens out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from uuid import uuid4

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gateway.codec import json_response
from gateway.convert import int32_bytes
from gateway.gateway import Gateway
from gateway.load import Share
from gateway.openai.answers import Json, chunks_of, completion_logprobs, extension, head_of, log_begin, usage_of
from gateway.openai.draws import Draw, Update, sample_request, text_off_loop
from gateway.openai.events import event_stream, together, while_connected
from gateway.openai.generator import Source, TokenizerInfo
from gateway.openai.schemas import DEFAULT_MAX_TOKENS, Completion
from gateway.openai.sources import find_source
from gateway.openai.text import Vocabulary
from gateway.tenants.access import Caller
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.tensors import check_tokens
from tinsmith.v1 import sampler_pb2 as pb

TextOrTokens = str | list[int]

_TOKEN_BYTES = 8
"""Bytes of a token in an answer, as a number or as text, about."""


def prompts_of(body: Completion) -> list[TextOrTokens]:
    """The prompts of a request: each is a text or a list of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return list(cast(Sequence[TextOrTokens], prompt))


def checked_tokens(gateway: Gateway, source: Source, prompt: Sequence[int], *, field: str) -> bytes:
    """A client's token ids as int32, little endian. Raises InvalidRequest for too many, or an id out of range."""
    longest = gateway.clients.samplers.context_length(source.base_model)
    if len(prompt) > longest > 0:
        raise InvalidRequest(f"{field}: {len(prompt)} tokens are above the context length, {longest}", field=field)
    tokens = int32_bytes(prompt, field=field)
    if vocab_size := gateway.clients.samplers.vocab_size(source.base_model):
        check_tokens(np.frombuffer(tokens, "<i4"), vocab_size, field=field)
    return tokens


async def _tokens(gateway: Gateway, source: Source, prompt: TextOrTokens, *, add_special_tokens: bool) -> bytes:
    if not isinstance(prompt, str):
        return checked_tokens(gateway, source, prompt, field="prompt")
    request = pb.TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
    return await gateway.sampling.generator.tokenize(source, request)


async def complete(gateway: Gateway, request: Request, body: Completion, *, caller: Caller) -> Response:
    """Answers a completion. Raises ServiceError, and ClientDisconnect when the client has left."""
    prompts = prompts_of(body)
    num_choices, limit = len(prompts) * body.num_choices, gateway.config.max_num_samples
    if not 1 <= num_choices <= limit:
        raise InvalidRequest(
            f"prompt, n: {len(prompts)} prompts of {body.num_choices} choices each are outside 1 .. {limit} choices",
            field="prompt",
        )
    with contextlib.ExitStack() as places:
        places.enter_context(gateway.sampling.places.hold(caller.owner, num_prompts=len(prompts)))
        return await _answer(gateway, request, body, prompts, caller=caller, places=places)


async def _answer(
    gateway: Gateway,
    request: Request,
    body: Completion,
    prompts: Sequence[TextOrTokens],
    *,
    caller: Caller,
    places: contextlib.ExitStack,
) -> Response:
    source = await find_source(gateway, body.model, caller=caller)
    tokenizer = await gateway.sampling.generator.tokenizer(source)
    add_special_tokens = body.add_special_tokens is not False
    tokens = await together(
        [_tokens(gateway, source, prompt, add_special_tokens=add_special_tokens) for prompt in prompts]
    )
    request_id = f"cmpl-{uuid4().hex}"
    log_begin(request_id, source, user=body.user)
    num_tokens = sum(len(prompt_tokens) // 4 for prompt_tokens in tokens)
    if body.echo and body.logprobs is not None:
        num_values = num_tokens * body.num_choices * (1 + body.logprobs)
        if num_values > gateway.config.max_body_values:
            raise InvalidRequest(
                f"prompt, logprobs: the answer would hold {num_values} log-probabilities of prompts, and this server's "
                f"max_body_values is {gateway.config.max_body_values}; send fewer or shorter prompts",
                field="prompt",
            )
    _hold_repeats(gateway, request, body, num_tokens)
    draws = await text_off_loop(
        lambda: [
            _draw(gateway, source, tokenizer, body, prompt, prompt_tokens, request_id=request_id, n=n)
            for n, (prompt, prompt_tokens) in enumerate(zip(prompts, tokens, strict=True))
        ],
        num_tokens=num_tokens,
    )
    head = head_of(request_id, source, kind="text_completion")
    choices = _CompletionChoices(body, tokenizer.vocabulary, draws)
    if body.stream:
        return await event_stream(
            request,
            draws,
            lambda updates: chunks_of(
                updates, head=head, choices=choices.of, draws=draws, include_usage=body.include_usage
            ),
            places=places.pop_all(),
        )
    results = await while_connected(request, together([draw.result() for draw in draws]))
    updates = [update for updates in results for update in updates]
    num_made = sum(max(len(update.entries), len(update.tokens)) for update in updates)
    made = await text_off_loop(lambda: [choices.make(update) for update in updates], num_tokens=num_made)
    return json_response(head | {"choices": made, "usage": usage_of(draws).to_json()})


def _hold_repeats(gateway: Gateway, request: Request, body: Completion, num_tokens: int) -> None:
    """Counts the memory of prompts that are repeated in each choice of the answer, until the answer is sent.
    `num_tokens`: number of tokens of all prompts.

    Raises InvalidRequest for more than max_body_bytes, and OutOfCapacity when others take the memory.
    """
    num_repeats = body.num_choices * (bool(body.echo) + bool(body.return_token_ids))
    num_bytes, limit = _TOKEN_BYTES * num_tokens * num_repeats, gateway.config.max_body_bytes
    if num_bytes > limit:
        raise InvalidRequest(
            f"n: with echo or return_token_ids the answer would repeat {num_tokens} tokens of prompts {num_repeats} "
            f"times, about {num_bytes} bytes, and this server's max_body_bytes is {limit}; ask for fewer choices",
            field="n",
        )
    cast(Share, request.state.body_share).take(num_bytes)


def _draw(
    gateway: Gateway,
    source: Source,
    tokenizer: TokenizerInfo,
    body: Completion,
    prompt: TextOrTokens,
    tokens: bytes,
    *,
    request_id: str,
    n: int,
) -> Draw:
    """The draw of the nth prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sample_request(
        body,
        source,
        tokenizer,
        tokens,
        max_tokens=max(1, max_tokens),
        topk=body.logprobs or 0,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )
    return Draw(
        gateway.sampling.generator,
        source,
        tokenizer,
        sampling,
        tokens,
        request_id=f"{request_id}:{n}",
        first_index=n * body.num_choices,
        scores_only=max_tokens == 0,
        echo=bool(body.echo),
        prompt_text=prompt if isinstance(prompt, str) else "",
        with_entries=body.logprobs is not None,
    )


@dataclass(frozen=True, slots=True)
class _CompletionChoices:
    """Turns updates of the draws into choices of the answer."""

    body: Completion
    vocabulary: Vocabulary
    draws: Sequence[Draw]
    _begun: set[int] = field(default_factory=set)
    """Indices of the choices that have the tokens of their prompt already."""

    def of(self, update: Update) -> list[Json]:
        """The choice that an update makes, in a list, which is empty for an update without news."""
        says = update.text or update.finish_reason or update.entries or (self.body.return_token_ids and update.tokens)
        return [self.make(update)] if says else []

    def make(self, update: Update) -> Json:
        body, logprobs = self.body, None
        if body.logprobs is not None:
            logprobs = completion_logprobs(update.entries, self.vocabulary, has_top=body.logprobs > 0)
        made = {
            "index": update.index,
            "text": update.text,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
            **extension(update),
        }
        if body.return_token_ids:
            made["token_ids"] = update.tokens
            if update.index not in self._begun:
                made["prompt_token_ids"] = self.draws[update.index // body.num_choices].prompt
                self._begun.add(update.index)
        return made
