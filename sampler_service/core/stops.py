"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sampler_service.core.request import StopCondition
from sampler_service.threads import in_thread
from sampler_service.tokenizer import load_tokenizer
from tinsmith.errors import Unsupported

Decode = Callable[[Sequence[int]], str]

_MARGIN = 4
"""Tokens before the longest match: the first ones of a window may decode differently for want of what came before."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop tokens, and strings that the decoded output may not contain without ending there."""

    token_ids: frozenset[int] = frozenset()
    strings: Sequence[str] = ()
    decode: Decode | None = None
    window: int = 0
    """Newest tokens that are decoded: each holds a byte or more, so a match that ends now began within them."""

    @classmethod
    def of_strings(cls, strings: Sequence[str], token_ids: frozenset[int], decode: Decode) -> StopRule:
        return cls(token_ids, strings, decode, max(len(string.encode()) for string in strings) + _MARGIN)

    def met(self, tokens: Sequence[int]) -> bool:
        """True when the newest token completes a stop."""
        if tokens[-1] in self.token_ids:
            return True
        if self.decode is None:
            return False
        text = self.decode(tokens[-self.window :])
        return any(string in text for string in self.strings)


class StopRules:
    """Makes the rules of one model's requests; its tokenizer is loaded when a request has a stop string."""

    def __init__(self, path: str, eos_token_ids: frozenset[int]) -> None:
        self.path = path
        self.eos_token_ids = eos_token_ids
        self._decode: Decode | None = None

    async def rule(self, stop: StopCondition | None) -> StopRule:
        """Raises Unsupported for strings without a tokenizer."""
        if stop is None:
            return StopRule(self.eos_token_ids)
        token_ids = frozenset(stop.token_ids)
        if not stop.strings:
            return StopRule(token_ids)
        if self._decode is None:
            self._decode = await in_thread(lambda: load_decode(self.path))
        return StopRule.of_strings(stop.strings, token_ids, self._decode)


def load_decode(path: str) -> Decode:
    """The tokenizer's decoder, special tokens included. Raises Unsupported when the model has none that is fast."""
    try:
        backend = cast(Any, load_tokenizer(path)).backend_tokenizer
    except Unsupported as error:
        raise Unsupported(
            f"sampling_params.stop: stop strings need a tokenizer, and {error}; use stop token ids"
        ) from error

    def decode(tokens: Sequence[int]) -> str:
        return backend.decode(list(tokens), skip_special_tokens=False)

    return decode
