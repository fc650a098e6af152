"""Compares the packed forward pass with the model's own forward pass, on a few tokens, when a base model is loaded.

Only the forward pass is checked. The parts of the backward pass that are written by hand (low-rank layers, output
layer) are the same for every model, and have tests. `tinsmith doctor` compares one model's gradients with autograd's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinsmith.modeling.adapter import GROUPS, Adapter, AdapterConfig, Group, Target
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.kv_cache import Cached, KVCache, Prefill
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.reference import adapted

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel
    from tinsmith.modeling.picture_check import PictureProbe

_LENGTHS = (5, 3, 3)
"""Lengths of the sequences, one for each group. Two are equal, because attention computes sequences of equal length as
one batch."""
_PIECES = (2, 2, 1)
"""Lengths of the pieces in which the first sequence is computed from a cache."""
_SHARED = 2
"""Number of tokens at the beginning of the first sequence that another sequence shares."""
_RANK = 4
"""Rank of the random adapters."""
LOST = 0.7
"""An adapter counts as lost if its gap is at least this fraction of its effect. The adapters here change logprobs by
0.6 to 3."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest allowed gap of a logprob, which separates wrong computations from rounding. A token that sees another
sequence's tokens, or a missing adapter, changes logprobs by 0.1 to 10. Rounding changes them by 1e-5, and in bfloat16
by up to 0.2 (measured on random weights, whose rounding errors are larger than those of trained weights)."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Largest differences of logprobs between two passes."""

    base: float
    """Between the packed and the plain forward pass, without an adapter."""
    groups: Mapping[Group, float]
    """Between the packed and the plain forward pass, with an adapter on the group."""
    effects: Mapping[Group, float]
    """Between the plain forward pass with and without the adapter. A packed pass that does not apply the adapter has a
    gap of this size."""

    def __str__(self) -> str:
        return ", ".join(f"{gap:.2g} ({name})" for name, gap in {"base": self.base, **self.groups}.items())

    def refused(self, tolerance: float) -> dict[Group, str]:
        """The groups whose adapters are computed wrongly, with the reasons."""
        limits = {group: min(tolerance, LOST * effect) for group, effect in self.effects.items()}
        return {
            group: f"its adapters are computed wrongly here: logprobs differ by {gap:.3g} (limit "
            f"{limits[group]:.3g}) from those of the model with W + scaling * B A"
            for group, gap in self.groups.items()
            if not gap <= limits[group]
        }


@dataclass(slots=True)
class Probe:
    """Logits of the model's own forward, computed one sequence at a time."""

    sequences: Sequence[Tensor]
    base: Sequence[Tensor]
    adapters: dict[Group, Adapter] = field(default_factory=dict)
    groups: dict[Group, Tensor] = field(default_factory=dict)
    """Logits of the group's sequence with the group's adapter."""
    pictures: PictureProbe | None = None
    """Logits of a sequence with pictures; None for a model that takes no pictures."""

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel) -> Probe:
        """Computes the base model's logits. `model` must be as transformers made it."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size
        sequences = [torch.randint(vocab_size, (length,), generator=generator).to(model.device) for length in _LENGTHS]
        return cls(sequences, [_plain(model, tokens) for tokens in sequences])

    @property
    def is_finite(self) -> bool:
        """Whether the base model's logprobs are numbers."""
        return all(bool(logits_T_V.log_softmax(-1).isfinite().all()) for logits_T_V in self.base)

    @torch.no_grad()
    def run_groups(self, model: PreTrainedModel, targets: Sequence[Target]) -> None:
        """Computes logits with a random adapter on each group. `model` must have its own attention; its layers may be
        replaced by adapted ones.

        Only the first and the last layer of each kind get an adapter, to save memory.
        """
        for group, tokens in zip(GROUPS, self.sequences, strict=True):
            chosen = ends([target for target in targets if target.group == group])
            if chosen:
                adapter = random_adapter(only(group, rank=_RANK, seed=0), chosen, model.device)
                self.adapters[group] = adapter
                with adapted(model, adapter):
                    self.groups[group] = _plain(model, tokens)

    def gaps(self, base: BaseModel) -> Gaps:
        """The gaps of the packed forward pass, without adapters, and with the adapters of all groups in one batch.

        Each gap is the larger one of a pass with gradients and a pass without gradients, which run different code
        (whole_layers.py, generation.py).
        """
        self._move(base.device)
        starts = [sum(_LENGTHS[:n]) for n in range(len(_LENGTHS) + 1)]
        rows = {group: slice(starts[n], starts[n + 1]) for n, group in enumerate(GROUPS)}
        runs = [Run(adapter, rows[group]) for group, adapter in self.adapters.items()]
        passes = []
        for training in (False, True):
            with torch.set_grad_enabled(training):
                passes.append((self._packed(base, []).detach(), self._packed(base, runs).detach()))
        usual = _rounds_to_others(base)
        plain = torch.cat(list(self.base))
        return Gaps(
            _worst(_gap(packed, plain, usual=usual) for packed, _ in passes),
            {
                group: _worst(_gap(mixed[rows[group]], theirs, usual=usual) for _, mixed in passes)
                for group, theirs in self.groups.items()
            },
            {group: _gap(theirs, self.base[GROUPS.index(group)], usual=usual) for group, theirs in self.groups.items()},
        )

    def shared_gap(self, base: BaseModel) -> float:
        """The gap of the first sequence and a copy of it that shares the rows of the first tokens. The larger one of a
        pass with gradients and a pass without gradients."""
        tokens, length = self.sequences[0], _LENGTHS[0] - _SHARED
        begin, end = tokens[:_SHARED], tokens[_SHARED:]
        positions = torch.arange(_LENGTHS[0], device=base.device)
        layout = Packed([_SHARED, length, length], below=[2 * length, 0, 0])
        theirs = torch.cat([self.base[0], self.base[0][_SHARED:]])
        gaps = []
        for training in (False, True):
            with torch.set_grad_enabled(training):
                hidden = base.hidden_states(
                    torch.cat([begin, end, end]), torch.cat([positions, positions[_SHARED:]]), layout, []
                )
                gaps.append(_gap(logits(base.head, hidden, []).detach(), theirs, usual=_rounds_to_others(base)))
        return _worst(gaps)

    @torch.no_grad()
    def continued_gap(self, base: BaseModel) -> float:
        """The gap of the first sequence if it is computed in pieces, each of which continues from a cache."""
        cache, outputs, start = KVCache(), [], 0
        cache.reserve(1, sum(_PIECES))
        none = torch.empty(0, dtype=torch.int64, device=base.device)
        for length in _PIECES:
            rows = slice(start, start + length)
            layout = Cached(cache, none, [Prefill(0, start, length)])
            positions = torch.arange(rows.start, rows.stop, device=base.device)
            outputs.append(base.hidden_states(self.sequences[0][rows], positions, layout, []))
            start += length
        return _gap(logits(base.head, torch.cat(outputs), []), self.base[0], usual=_rounds_to_others(base))

    def _move(self, device: torch.device) -> None:
        """Moves the probe to the model's device. The probe of a divided model that was read whole is in host memory."""
        self.sequences = [tokens.to(device) for tokens in self.sequences]
        self.base = [logits_T_V.to(device) for logits_T_V in self.base]
        self.adapters = {group: adapter.like(adapter.flat.to(device)) for group, adapter in self.adapters.items()}
        self.groups = {group: logits_T_V.to(device) for group, logits_T_V in self.groups.items()}

    def _packed(self, base: BaseModel, runs: Sequence[Run]) -> Tensor:
        positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(base.device)
        hidden = base.hidden_states(torch.cat(list(self.sequences)), positions_T, Packed(_LENGTHS), runs)
        return logits(base.head, hidden, runs)


def _rounds_to_others(base: BaseModel) -> bool:
    """Whether rounding may choose another expert for a token, which changes its logprobs completely."""
    return base.dtype != torch.float32 and any(target.num_experts is not None for target in base.targets)


def only(group: Group, *, rank: int, seed: int) -> AdapterConfig:
    """The configuration of an adapter on one group."""
    return AdapterConfig(
        rank=rank,
        train_attn=group == "attn",
        train_mlp=group == "mlp",
        train_unembed=group == "unembed",
        seed=seed,
        train_vision=group == "vision",
    )


def random_adapter(config: AdapterConfig, targets: Sequence[Target], device: torch.device) -> Adapter:
    """An adapter whose B is not zero, so that it changes the model. It depends only on `targets` and on `config`, which
    holds the seed."""
    adapter = Adapter.create(config, targets, torch.device("cpu"))
    generator = torch.Generator().manual_seed(config.seed or 0)
    for weights in adapter.weights.values():
        # With this B, each feature of scaling * B A x has about 0.3 times the size of x, independent of the rank.
        weights.b_O_R.normal_(0, 0.5 * config.rank**0.5 / 32, generator=generator)
    return adapter.like(adapter.flat.to(device))


def _plain(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    return model(tokens_T[None], use_cache=False).logits[0].float()


def _gap(ours_T_V: Tensor, theirs_T_V: Tensor, *, usual: bool) -> float:
    """Largest difference of logprobs over all tokens, or with `usual` the median over tokens of each token's largest
    difference. A wrong computation is wrong for most tokens, so the median shows it, too."""
    gaps_T = (ours_T_V.log_softmax(-1) - theirs_T_V.log_softmax(-1)).abs().amax(-1)
    return (gaps_T.median() if usual else gaps_T.max()).item()


def _worst(gaps: Iterable[float]) -> float:
    """The largest gap; NaN if any gap is NaN."""
    return max(gaps, key=lambda gap: (math.isnan(gap), gap))


def ends(targets: Sequence[Target]) -> list[Target]:
    """The first and the last target of each kind, whose names differ in numbers only."""
    kinds: dict[str, list[Target]] = {}
    for target in targets:
        kinds.setdefault(re.sub(r"\d+", "#", target.name), []).append(target)
    return [target for kind in kinds.values() for target in dict.fromkeys((kind[0], kind[-1]))]
