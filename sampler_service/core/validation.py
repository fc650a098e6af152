"""Bounds of a request. A request is checked completely before it is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sampler_service.core.request import Params, Penalties, Request, Targets
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.tensors import check_tokens

MAX_BIASES = 1024
"""Most tokens in one logit_bias."""
MAX_STOP_BYTES = 4096
"""Most bytes of the stop strings of one request, in UTF-8. Behind each drawn token as many tokens are decoded as the
longest of them has bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    max_context_length: int
    max_kv_tokens: int
    max_num_samples: int
    max_topk_logprobs: int

    @property
    def max_length(self) -> int:
        """Longest prompt and output of one sequence."""
        return min(self.max_context_length, self.max_kv_tokens)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, naming the field, its value and what would be right."""
        length = len(request.prompt)
        if length == 0:
            raise InvalidRequest("prompt: is empty; at least one token is needed", field="prompt")
        check_tokens(request.prompt, self.vocab_size, field="prompt")
        _check_range("num_samples", request.num_samples, 1, self.max_num_samples)
        self._check_params(request.params, length)
        self._check_scores(request, length)

    def _check_params(self, params: Params, length: int) -> None:
        if params.max_tokens is not None and params.max_tokens < 1:
            raise InvalidRequest(
                f"sampling_params.max_tokens: {params.max_tokens} is below 1; leave it out for no limit of your own",
                field="sampling_params.max_tokens",
            )
        wanted = 1 if params.max_tokens is None else params.max_tokens
        field = "sampling_params.max_tokens" if length < self.max_length else "prompt"
        if length + wanted > self.max_context_length:
            raise InvalidRequest(
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{length} + {wanted} > {self.max_context_length}",
                field=field,
            )
        if length + wanted > self.max_kv_tokens:
            raise InvalidRequest(
                "Prompt length plus max_tokens exceeds this sampler's key/value cache (max_kv_tokens): "
                f"{length} + {wanted} > {self.max_kv_tokens}",
                field=field,
            )
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise InvalidRequest(
                f"sampling_params.temperature: {params.temperature} is not a finite number of at least 0",
                field="sampling_params.temperature",
            )
        if params.top_k < -1:
            raise InvalidRequest(
                f"sampling_params.top_k: {params.top_k} is neither a number of tokens nor -1 or 0, all of them",
                field="sampling_params.top_k",
            )
        if not 0 < params.top_p <= 1:
            raise InvalidRequest(
                f"sampling_params.top_p: {params.top_p} is outside (0, 1]", field="sampling_params.top_p"
            )
        if not 0 <= params.min_p <= 1:
            raise InvalidRequest(
                f"sampling_params.min_p: {params.min_p} is outside [0, 1]", field="sampling_params.min_p"
            )
        self._check_penalties(params.penalties)
        if params.stop is not None:
            stop = "sampling_params.stop"
            if "" in params.stop.strings:
                raise InvalidRequest(f"{stop}.strings: an empty one would stop everything", field=f"{stop}.strings")
            num_bytes = sum(len(string.encode()) for string in params.stop.strings)
            if num_bytes > MAX_STOP_BYTES:
                raise InvalidRequest(
                    f"{stop}.strings: {num_bytes} bytes in all are above the limit of {MAX_STOP_BYTES}",
                    field=f"{stop}.strings",
                )
            check_tokens(np.array(params.stop.token_ids, np.int64), self.vocab_size, field=f"{stop}.token_ids")

    def _check_penalties(self, penalties: Penalties) -> None:
        for name, value, low, high in (
            ("frequency_penalty", penalties.frequency, -2, 2),
            ("presence_penalty", penalties.presence, -2, 2),
            ("repetition_penalty", penalties.repetition, 0.01, 100),
        ):
            if not low <= value <= high:
                field = f"sampling_params.{name}"
                raise InvalidRequest(f"{field}: {value} is outside [{low}, {high}]", field=field)
        if len(penalties.logit_bias) > MAX_BIASES:
            raise InvalidRequest(
                f"sampling_params.logit_bias: {len(penalties.logit_bias)} tokens are above {MAX_BIASES}",
                field="sampling_params.logit_bias",
            )
        for token, bias in penalties.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"sampling_params.logit_bias: token id {token} is outside the vocabulary [0, {self.vocab_size})",
                    field="sampling_params.logit_bias",
                )
            if not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"sampling_params.logit_bias: {bias} for token {token} is outside [-100, 100]",
                    field="sampling_params.logit_bias",
                )

    def _check_scores(self, request: Request, length: int) -> None:
        last_n = request.prompt_logprobs_last_n
        if last_n is not None:
            if not request.prompt_logprobs:
                raise InvalidRequest(
                    f"prompt_logprobs_last_n: {last_n} is given without prompt_logprobs", field="prompt_logprobs_last_n"
                )
            _check_range("prompt_logprobs_last_n", last_n, 1, length - 1)
        setting = "this server's max_topk_logprobs"
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            _check_range(field, getattr(request, field), 0, self.max_topk_logprobs, setting=setting)
        if request.targets is not None:
            _check_targets(request.targets, self.vocab_size)


def _check_targets(targets: Targets, vocab_size: int) -> None:
    bad = (targets.tokens_M < -1) | (targets.tokens_M >= vocab_size)
    if bad.any():
        where = int(bad.argmax())
        raise InvalidRequest(
            f"target_prompt_logprobs: token id {targets.tokens_M[where]} in row {targets.rows_M[where]} is neither -1 "
            f"nor in the vocabulary [0, {vocab_size})",
            field="target_prompt_logprobs",
        )


def _check_range(field: str, value: int, low: int, high: int, *, setting: str = "") -> None:
    """`setting`: what `high` comes from."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} is outside {low}..{high}{setting and ', ' + setting}", field=field)
