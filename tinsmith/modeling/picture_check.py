"""Compares the packed forward pass with pictures with the model's own forward pass, when a base model is loaded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.modeling.adapter import VISION, Adapter, Target
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.pretrained import beside_text
from tinsmith.modeling.reference import adapted
from tinsmith.modeling.self_check import LOST, ends, only, random_adapter
from tinsmith.modeling.tower import PlacedPicture, Tower, positions_with_pictures
from tinsmith.pictures.processing import Picture

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

_TEXT = (5, 3, 2, 4)
"""Lengths of the texts, in tokens: a sequence of text, and the texts before, between and after the two pictures of
another sequence."""
_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Names under which models take the kinds of tokens: 1 for tokens of pictures, 0 for tokens of text."""


@dataclass(slots=True)
class PictureProbe:
    """Two sequences, and the logits of the second one, which has pictures, by the model's own forward pass."""

    tokens_T: Tensor
    placed: tuple[PlacedPicture, ...]
    logits_N_V: Tensor
    """float [N, V]: the logits of the second sequence."""
    adapter: Adapter | None = None
    """A random adapter on some layers for pictures; None if the model has no such layers."""
    adapted_N_V: Tensor | None = None
    """The logits with the adapter."""
    layers: frozenset[str] = frozenset()
    """Names of the linear layers on which the pictures' features depend. A tower may have other layers, such as a head
    for another task."""

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
        first, second = (one.tokens for one in pictures)
        starts = [sum(_TEXT[:2]), sum(_TEXT[:3]) + len(first)]
        tokens_T = torch.from_numpy(np.concatenate([*texts[:2], first, texts[2], second, texts[3]]))
        placed = tuple(PlacedPicture(start, picture) for start, picture in zip(starts, pictures, strict=True))
        logits_N_V = _plain(model, tower, tokens_T, placed)
        return cls(tokens_T, placed, logits_N_V, layers=_layers(model, tower, pictures))

    @torch.no_grad()
    def run_adapter(self, model: PreTrainedModel, tower: Tower, targets: Sequence[Target]) -> None:
        """Computes logits with a random adapter on the first and last layer for pictures of each kind. `model` must
        have its own attention; its layers may be replaced by adapted ones."""
        chosen = ends([target for target in targets if target.group == VISION])
        if chosen:
            self.adapter = random_adapter(only(VISION, rank=4, seed=0), chosen, model.device)
            with adapted(model, self.adapter):
                self.adapted_N_V = _plain(model, tower, self.tokens_T, self.placed)

    def gap(self, base: BaseModel, *, usual: bool) -> float:
        """The gap of the packed forward pass, which is the larger one of a pass with gradients and a pass without. A
        gap is the largest difference of logprobs over all tokens, or with `usual` the median over tokens
        (self_check.py)."""
        return self._gap(base, self.logits_N_V, [], usual=usual)

    def why_not_adapted(self, base: BaseModel, limit: float, *, usual: bool) -> str:
        """The reason for which layers for pictures cannot be adapted; empty if their adapters are computed
        correctly."""
        if self.adapter is None or self.adapted_N_V is None:
            return "it has no linear layers for pictures"
        effect = _apart(self.adapted_N_V, self.logits_N_V, usual=usual)
        gap = self._gap(base, self.adapted_N_V, [Run(self.adapter, slice(0, len(self.tokens_T)))], usual=usual)
        limit = min(limit, LOST * effect)
        if gap <= limit:
            return ""
        return (
            f"its adapters are computed wrongly here: with pictures, logprobs differ by {gap:.3g} (limit "
            f"{limit:.3g}) from those of the model with W + scaling * B A"
        )

    def _gap(self, base: BaseModel, theirs_N_V: Tensor, runs: Sequence[Run], *, usual: bool) -> float:
        assert base.tower is not None
        lengths = [_TEXT[0], len(self.tokens_T) - _TEXT[0]]
        positions = positions_with_pictures(lengths, self.placed, base.device)
        worst = 0.0
        for training in (False, True):
            with torch.set_grad_enabled(training):
                picture_features = base.tower.features_of(self.placed, runs)
                hidden = base.hidden_states(
                    self.tokens_T.to(base.device), positions, Packed(lengths), runs, picture_features
                )
                ours = logits(base.head, hidden, []).detach()[_TEXT[0] :]
            gap = _apart(ours, theirs_N_V.to(base.device), usual=usual)
            worst = max(worst, gap, key=lambda x: (math.isnan(x), x))
        return worst


@torch.enable_grad()
def _layers(model: PreTrainedModel, tower: Tower, pictures: Sequence[Picture]) -> frozenset[str]:
    """Names of the linear layers on which the pictures' features depend."""
    beside = {one for _, part in beside_text(model) for one in part.modules() if type(one) is nn.Linear}
    anchors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module in beside:
                anchors[name] = torch.zeros((), device=model.device, requires_grad=True)
                stack.callback(module.register_forward_hook(partial(_anchored, anchors[name])).remove)
        total = torch.stack([one.float().sum() for one in tower.encode(pictures)]).sum()
    if not total.requires_grad:
        return frozenset()
    grads = torch.autograd.grad(total, list(anchors.values()), allow_unused=True)
    return frozenset(name for name, grad in zip(anchors, grads, strict=True) if grad is not None)


def _anchored(anchor: Tensor, module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Forward hook that adds the anchor, which is zero, so that the output depends on it."""
    return output + anchor.to(output.dtype)


def _plain(model: PreTrainedModel, tower: Tower, tokens_T: Tensor, placed: Sequence[PlacedPicture]) -> Tensor:
    """The logits of the second sequence by the model's own forward pass, float32 [N, V]."""
    kinds_T = torch.zeros_like(tokens_T, dtype=torch.int32)
    for one in placed:
        kinds_T[one.start : one.stop] = 1
    kinds_1_N = kinds_T[None, _TEXT[0] :].to(model.device)
    kinds = {name: kinds_1_N for name in _KINDS if name in inspect.signature(model.forward).parameters}
    seen = tower.inputs([one.picture for one in placed])
    output = model(input_ids=tokens_T[None, _TEXT[0] :].to(model.device), **seen, **kinds, use_cache=False)
    return output.logits[0].float()


def _apart(ours_N_V: Tensor, theirs_N_V: Tensor, *, usual: bool) -> float:
    gaps_N = (ours_N_V.log_softmax(-1) - theirs_N_V.log_softmax(-1)).abs().amax(-1)
    return (gaps_N.median() if usual else gaps_N.max()).item()
