"""Whether decoding computes this model: tokens drawn one by one, from the cache, against the same tokens as a prompt.

That prompts are scored as the plain model scores them was checked when the base model was loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sampler_service.core.request import Ints, Params, Request, Result
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.tower import PlacedPicture


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drawn sequence, with its logprobs."""

    prompt: Ints
    version_id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pictures: tuple[PlacedPicture, ...] = ()

    @classmethod
    def of(cls, request: Request, result: Result) -> list[Comparison]:
        sequences = result.sequences
        return [
            cls(request.prompt, request.version_id, one.tokens, one.logprobs, request.pictures) for one in sequences
        ]

    @property
    def request(self) -> Request:
        """A request that scores the drawn tokens as the end of a prompt."""
        whole = np.concatenate([self.prompt, np.array(self.tokens, np.int32)])
        params = Params(max_tokens=1)
        return Request(whole, self.version_id, params=params, prompt_logprobs=True, pictures=self.pictures)

    def check(self, result: Result, *, tolerance: float) -> None:
        """Raises UnsupportedModel when `result`, the answer to `request`, gives the drawn tokens other logprobs."""
        assert result.prompt.logprobs is not None
        scored = result.prompt.logprobs[-len(self.tokens) :]
        gap = float(np.abs(scored - np.array(self.logprobs)).max())
        if not gap <= tolerance:
            raise UnsupportedModel(
                f"decoding is wrong for this model: tokens drawn from {'an adapter' if self.version_id else 'it'} have "
                f"logprobs that differ by {gap:.3g} (limit {tolerance:g}) from those of the same tokens in a prompt"
            )
