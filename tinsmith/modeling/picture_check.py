"""Compares pictures, packed with text, with the model's own forward pass, when a base model is loaded."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinsmith.modeling.attention import Packed
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.tower import Placed, Tower, positions_with_pictures
from tinsmith.pictures.processing import Picture

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

_TEXT = (5, 3, 2, 4)
"""Lengths of the texts: a sequence by itself, and what lies before, between and after the pictures of another one."""
_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Names under which models take the kinds of tokens: 1 for those of pictures, 0 for text."""


@dataclass(frozen=True, slots=True)
class PictureProbe:
    """Two sequences, of which the second has pictures, and its logits by the model's own forward pass."""

    tokens_T: Tensor
    placed: tuple[Placed, ...]
    logits_N_V: Tensor
    """float [N, V]: the logits of the second sequence."""

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel, tower: Tower) -> PictureProbe:
        """Computes the logits. `model` must be as transformers made it."""
        rng = np.random.default_rng(0)
        pictures: list[Picture] = []
        for width, height in tower.processor.counting.examples():
            pictures.append(tower.processor.of_pixels(rng.integers(256, size=(height, width, 3), dtype=np.uint8)))
        vocab_size = model.config.get_text_config().vocab_size
        texts = [rng.integers(vocab_size, size=length) for length in _TEXT]
        first, second = (np.full(one.num_tokens, tower.picture_token) for one in pictures)
        starts = [sum(_TEXT[:2]), sum(_TEXT[:3]) + len(first)]
        tokens_T = torch.from_numpy(np.concatenate([*texts[:2], first, texts[2], second, texts[3]]))
        placed = tuple(Placed(start, picture) for start, picture in zip(starts, pictures, strict=True))
        kinds_T = torch.zeros_like(tokens_T, dtype=torch.int32)
        for one in placed:
            kinds_T[one.start : one.start + one.picture.num_tokens] = 1
        kinds_1_N = kinds_T[None, _TEXT[0] :].to(model.device)
        kinds = {name: kinds_1_N for name in _KINDS if name in inspect.signature(model.forward).parameters}
        output = model(
            input_ids=tokens_T[None, _TEXT[0] :].to(model.device), **tower.inputs(pictures), **kinds, use_cache=False
        )
        return cls(tokens_T, placed, output.logits[0].float())

    def gap(self, base: BaseModel, *, usual: bool) -> float:
        """The larger gap of a packed pass with gradients and one without: the largest difference of any token's
        logprobs, or with `usual` the median over tokens (see self_check.py)."""
        assert base.tower is not None
        lengths = [_TEXT[0], len(self.tokens_T) - _TEXT[0]]
        positions = positions_with_pictures(lengths, self.placed, base.device)
        theirs = self.logits_N_V.to(base.device).log_softmax(-1)
        worst = 0.0
        for training in (False, True):
            with torch.set_grad_enabled(training):
                sights = base.tower.look(self.placed)
                hidden = base.hidden_states(self.tokens_T.to(base.device), positions, Packed(lengths), [], sights)
                ours = logits(base.head, hidden, []).detach()[_TEXT[0] :].log_softmax(-1)
            gaps_N = (ours - theirs).abs().amax(-1)
            worst = max(worst, (gaps_N.median() if usual else gaps_N.max()).item(), key=lambda x: (math.isnan(x), x))
        return worst
