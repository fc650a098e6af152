"""Whether the packed forward pass computes this model: held at load against the model's own, on a few tokens.

Forward only: of the backward pass, all that is not autograd's (the low-rank layers, the output layer) is the same for
every model, and tested; `tinsmith doctor` holds gradients against autograd for one model.
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
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.lora import Run
from tinsmith.modeling.reference import adapted

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

_LENGTHS = (5, 3, 3)
"""One sequence for each group; two of one length, because attention batches those."""
_RANK = 4
_LOST = 0.7
"""A gap of this share of what an adapter does is a lost adapter; the adapters here move logprobs by 0.6 to 3."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest gap of any logprob. It tells a wrong computation from rounding: a token that sees a neighbour's tokens, or a
missing adapter, moves logprobs by some 0.1 to 10; rounding moves them by 1e-5, and in bfloat16 by up to 0.2 (measured
on random weights, which are worse than trained ones)."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Largest differences of logprobs."""

    base: float
    groups: Mapping[Group, float]
    """Of the packed forward pass with an adapter from the plain one with it."""
    effects: Mapping[Group, float]
    """Of the plain one with the adapter from the one without. An adapter that is not applied has a gap of this size."""

    def __str__(self) -> str:
        return ", ".join(f"{gap:.2g} ({name})" for name, gap in {"base": self.base, **self.groups}.items())

    def refused(self, tolerance: float) -> dict[Group, str]:
        """Groups whose adapters are computed wrongly, and by how much."""
        limits = {group: min(tolerance, _LOST * effect) for group, effect in self.effects.items()}
        return {
            group: f"its adapters do not do here what they mean: logprobs differ by {gap:.3g} (limit "
            f"{limits[group]:.3g}) from those of the model with W + scaling * B A"
            for group, gap in self.groups.items()
            if not gap <= limits[group]
        }


@dataclass(slots=True)
class Probe:
    """Logits of the model's own forward, one sequence at a time."""

    sequences: Sequence[Tensor]
    base: Sequence[Tensor]
    adapters: dict[Group, Adapter] = field(default_factory=dict)
    groups: dict[Group, Tensor] = field(default_factory=dict)
    """Logits of the sequence that belongs to the group, with its adapter."""

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel) -> Probe:
        """The base model's. `model` is as transformers made it."""
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
        """With a random adapter on each group. `model` still has its own attention; its layers may be adapted ones.

        Only the first and the last layer of each kind are adapted, so that this needs no memory to speak of.
        """
        for group, tokens in zip(GROUPS, self.sequences, strict=True):
            chosen = _ends([target for target in targets if target.group == group])
            if chosen:
                adapter = random_adapter(only(group, rank=_RANK, seed=0), chosen, model.device)
                self.adapters[group] = adapter
                with adapted(model, adapter):
                    self.groups[group] = _plain(model, tokens)

    def gaps(self, base: BaseModel) -> Gaps:
        """Of the packed forward pass: the base model's, and all groups' adapters in one batch.

        The worse one of training and generation, which go through code of their own (whole_layers.py, generation.py).
        """
        self._move(base.device)
        starts = [sum(_LENGTHS[:n]) for n in range(len(_LENGTHS) + 1)]
        rows = {group: slice(starts[n], starts[n + 1]) for n, group in enumerate(GROUPS)}
        runs = [Run(adapter, rows[group]) for group, adapter in self.adapters.items()]
        passes = []
        for training in (False, True):
            with torch.set_grad_enabled(training):
                passes.append((self._packed(base, []).detach(), self._packed(base, runs).detach()))
        # Rounding may choose another expert for a token, whose logprobs are then others altogether.
        usual = base.dtype != torch.float32 and any(target.num_experts is not None for target in base.targets)
        plain = torch.cat(list(self.base))
        return Gaps(
            _worst(_gap(packed, plain, usual=usual) for packed, _ in passes),
            {
                group: _worst(_gap(mixed[rows[group]], theirs, usual=usual) for _, mixed in passes)
                for group, theirs in self.groups.items()
            },
            {group: _gap(theirs, self.base[GROUPS.index(group)], usual=usual) for group, theirs in self.groups.items()},
        )

    def _move(self, device: torch.device) -> None:
        """A model that is divided among ranks is elsewhere by now."""
        self.sequences = [tokens.to(device) for tokens in self.sequences]
        self.base = [logits_T_V.to(device) for logits_T_V in self.base]
        self.adapters = {group: adapter.like(adapter.flat.to(device)) for group, adapter in self.adapters.items()}
        self.groups = {group: logits_T_V.to(device) for group, logits_T_V in self.groups.items()}

    def _packed(self, base: BaseModel, runs: Sequence[Run]) -> Tensor:
        positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(base.device)
        hidden = base.hidden_states(torch.cat(list(self.sequences)), positions_T, Packed(_LENGTHS), runs)
        return logits(base.head, hidden, runs)


def only(group: Group, *, rank: int, seed: int) -> AdapterConfig:
    """An adapter of one group."""
    return AdapterConfig(
        rank=rank, train_attn=group == "attn", train_mlp=group == "mlp", train_unembed=group == "unembed", seed=seed
    )


def random_adapter(config: AdapterConfig, targets: Sequence[Target], device: torch.device) -> Adapter:
    """With a B, so that it changes the model. The same config (its seed) and targets give the same one everywhere."""
    adapter = Adapter.create(config, targets, torch.device("cpu"))
    generator = torch.Generator().manual_seed(config.seed or 0)
    for weights in adapter.weights.values():
        # scaling * B A x is then some 0.3 of the size of x in each feature, whatever the rank.
        weights.b_O_R.normal_(0, 0.5 * config.rank**0.5 / 32, generator=generator)
    return adapter.like(adapter.flat.to(device))


def _plain(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    return model(tokens_T[None], use_cache=False).logits[0].float()


def _gap(ours_T_V: Tensor, theirs_T_V: Tensor, *, usual: bool) -> float:
    """The largest one of any token, or of the token in the middle. What is computed wrongly is wrong for most."""
    gaps_T = (ours_T_V.log_softmax(-1) - theirs_T_V.log_softmax(-1)).abs().amax(-1)
    return (gaps_T.median() if usual else gaps_T.max()).item()


def _worst(gaps: Iterable[float]) -> float:
    """The largest, or NaN."""
    return max(gaps, key=lambda gap: (math.isnan(gap), gap))


def _ends(targets: Sequence[Target]) -> list[Target]:
    """The first and the last of those whose names differ in numbers only."""
    kinds: dict[str, list[Target]] = {}
    for target in targets:
        kinds.setdefault(re.sub(r"\d+", "#", target.name), []).append(target)
    return [target for kind in kinds.values() for target in dict.fromkeys((kind[0], kind[-1]))]
