"""Fields of a request beside vLLM's own parameters, for the workers: `SamplingParams.extra_args`, plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from sampler_service.core.request import Grammar, Params, Penalties, Request, Targets
from sampler_service.core.sampling import Rule

_DRAWS, _SCORES, _BASE_WEIGHTS = "tinsmith_draws", "tinsmith_scores", "tinsmith_base_weights"


@dataclass(frozen=True, slots=True)
class Draws:
    """How a sequence draws."""

    key: int
    """Key of the sequence's random stream."""
    first: int
    """Number of tokens that the sequence has drawn before this request; above 0 after a move to another version."""
    temperature: float
    top_k: int
    top_p: float
    topk: int
    """Number of columns of the sequence's top-k table."""
    min_p: float = 0.0
    penalties: Penalties = field(default_factory=Penalties)
    grammar: Grammar | None = None
    grammar_eos: Sequence[int] = ()
    """Tokens that may come after a complete text of the grammar."""

    @property
    def rule(self) -> Rule:
        return Rule(self.temperature, self.top_k, self.top_p, self.min_p)

    @classmethod
    def read(cls, extra_args: dict[str, Any]) -> Self:
        found = extra_args[_DRAWS]
        grammar = found["grammar"]
        nested = {
            "penalties": Penalties(**found["penalties"]),
            "grammar": None if grammar is None else Grammar(**grammar),
        }
        return cls(**{**found, **nested})


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores to compute for a prompt, and the name under which they wait to be taken."""

    name: str
    seed: int
    temperature: float
    prompt_logprobs: bool
    prompt_logprobs_last_n: int | None
    topk_prompt_logprobs: int
    prompt_alt_tokens_k: int
    target_rows: bytes | None
    target_tokens: bytes | None
    """int64; None when no cells are named."""

    @classmethod
    def of(cls, request: Request, *, name: str, seed: int) -> Self:
        targets = request.targets
        return cls(
            name=name,
            seed=seed,
            temperature=request.params.temperature,
            prompt_logprobs=request.prompt_logprobs,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            target_rows=None if targets is None else targets.rows_M.tobytes(),
            target_tokens=None if targets is None else targets.tokens_M.tobytes(),
        )

    @classmethod
    def read(cls, extra_args: dict[str, Any]) -> Self | None:
        found = extra_args.get(_SCORES)
        return None if found is None else cls(**found)

    @staticmethod
    def drop(extra_args: dict[str, Any]) -> None:
        """Removes the scores from a request, so that a prompt that is computed again after a preemption is not scored
        again."""
        extra_args.pop(_SCORES, None)

    def request(self, prompt: list[int]) -> Request:
        """The part of the request that its scores depend on."""
        rows, tokens = self.target_rows, self.target_tokens
        return Request(
            np.array(prompt, np.int32),
            params=Params(temperature=self.temperature),
            prompt_logprobs=self.prompt_logprobs,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            targets=None
            if rows is None or tokens is None
            else Targets(np.frombuffer(rows, np.int64), np.frombuffer(tokens, np.int64)),
        )


def extra_args(draws: Draws, scores: Scores | None, *, base_weights: int = 0) -> dict[str, Any]:
    """`base_weights`: number of the full version whose parameters the request needs; 0 is the base model itself."""
    args: dict[str, Any] = {_DRAWS: asdict(draws)}
    if scores is not None:
        args[_SCORES] = asdict(scores)
    if base_weights:
        args[_BASE_WEIGHTS] = base_weights
    return args


def base_weights(extra_args: dict[str, Any] | None) -> int:
    return (extra_args or {}).get(_BASE_WEIGHTS, 0)
