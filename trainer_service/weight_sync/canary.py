"""The canary: short fixed sequences. Trainer and samplers score them, to verify that they compute the same model."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from tinsmith.modeling.adapter import VISION, Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_logprobs import full_target_logprobs
from tinsmith.modeling.full_weights import FullWeights, ParameterSwitch, TrainedWeights, Weights
from tinsmith.modeling.tower import PlacedPicture, positions_with_pictures

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pictured:
    """A sequence with a picture, which shows whether an adapter of the vision tower is applied."""

    tokens: Tokens
    """The sequence's tokens, with those that stand for the picture."""
    placed: PlacedPicture
    png: bytes


Scores = npt.NDArray[np.float32]
"""Logprobs of the tokens of all sequences, end to end, without the first token of each sequence."""

_LENGTH = 16
_SEED = 20


def canary_of(base: BaseModel) -> Sequence[Tokens]:
    """The canary for this base model: one sequence on a CPU, four on a GPU.

    On a CPU every token takes time, and every sequence may take a step of the sampler, while a publish must be short. A
    GPU scores dozens of tokens as fast as one.
    """
    num_sequences = 1 if base.device.type == "cpu" else 4
    return canary(num_sequences, vocab_size=base.vocab_size, max_context_length=base.max_context_length)


def canary(num_sequences: int, *, vocab_size: int, max_context_length: int) -> Sequence[Tokens]:
    """Sequences that are the same for every model with this vocabulary size, and shorter than its context.

    Token ids are drawn uniformly in their logarithm. In most vocabularies low ids are common tokens, on which models
    differ more than on tokens that they have never seen.
    """
    length = max(2, min(_LENGTH, max_context_length - 1))
    drawn = np.random.default_rng(_SEED).random((num_sequences, length))
    return list((np.power(float(vocab_size), drawn) - 1).astype(np.int32).clip(0, vocab_size - 1))


def with_picture(base: BaseModel) -> Sequence[Pictured]:
    """A sequence with a small picture between two texts, for versions that adapt the vision tower. Empty if no
    adapter of it can be had, or if the context is too short."""
    if base.tower is None or VISION not in base.groups:
        return []
    rng = np.random.default_rng(_SEED)
    width, height = base.tower.processor.counting.examples()[0]
    file = io.BytesIO()
    Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8)).save(file, "PNG")
    picture = base.tower.processor.picture(file.getvalue(), "png", expected_tokens=None, field="canary")
    text = rng.integers(base.vocab_size, size=_LENGTH, dtype=np.int32)
    text[text == base.tower.processor.picture_token] += 1  # texts never contain this token
    before, after = np.split(text, 2)
    tokens = np.concatenate([before, picture.tokens, after])
    if tokens.size >= base.max_context_length:
        return []
    return [Pictured(tokens, PlacedPicture(before.size, picture), file.getvalue())]


def score(base: BaseModel, weights: Weights | None, sequences: Sequence[Tokens | Pictured]) -> Scores:
    """Scores the sequences by the forward pass of training.

    `weights`: a live model's own, or a copy in host memory; None means the base model without an adapter. Runs on the
    compute thread, and leaves the base model unchanged.
    """
    device = base.device
    tokens = [tokens_of(one) for one in sequences]
    lengths = [one.size for one in tokens]
    starts = np.cumsum([0, *lengths])
    placed = [
        replace(one.placed, start=int(start) + one.placed.start)
        for one, start in zip(sequences, starts, strict=False)
        if isinstance(one, Pictured)
    ]
    rows_M = np.concatenate([np.arange(start, start + n - 1) for start, n in zip(starts, lengths, strict=False)])
    targets_M = np.concatenate([one[1:] for one in tokens]).astype(np.int64)
    tokens_T = torch.from_numpy(np.concatenate(tokens)).long().to(device)
    runs: list[Run] = []
    if isinstance(weights, Adapter):
        here = weights.like(weights.flat.detach().to(device))
        runs.append(Run(here, slice(0, tokens_T.shape[0])))
    # With gradients disabled, layers would take the sampler's code path instead of the one that trains.
    with _holding(base, weights), torch.enable_grad():
        positions, picture_features = positions_of(lengths, device), None
        if placed and base.tower is not None:
            positions = positions_with_pictures(lengths, placed, device)
            picture_features = base.tower.features_of(placed, runs)
        hidden_T_H = base.hidden_states(tokens_T, positions, Packed(lengths), runs, picture_features)
        named = torch.from_numpy(rows_M), torch.from_numpy(targets_M)
        if base.trainable:
            logprobs_M = full_target_logprobs(base.head, hidden_T_H, *(x.to(device) for x in named))
        else:
            logprobs_M = base.target_logprobs(hidden_T_H, *named, runs)
        return logprobs_M.detach().float().cpu().numpy()


@dataclass(frozen=True, slots=True)
class Canary:
    """Sequences, and the trainer's scores of them by the base model alone."""

    sequences: Sequence[Tokens | Pictured]
    unadapted: Scores

    @property
    def num_tokens(self) -> int:
        return sum(tokens_of(one).size for one in self.sequences)


def tokens_of(sequence: Tokens | Pictured) -> Tokens:
    return sequence.tokens if isinstance(sequence, Pictured) else sequence


@contextmanager
def _holding(base: BaseModel, weights: Weights | None) -> Iterator[None]:
    """A context in which the base model computes with these weights, if they are full weights."""
    if weights is None or isinstance(weights, (Adapter, TrainedWeights)):
        yield
    elif base.device.type == "cpu":
        parameters = ParameterSwitch(base)
        parameters.use(FullWeights(base, weights.flat.to(base.dtype)))
        try:
            yield
        finally:
            parameters.use(None)
    else:
        with _in_place(list(base.parameters.values()), weights.tensors()):
            yield


@contextmanager
def _in_place(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the parameters have these values. Their own values wait in host memory, because a second set
    may not fit on the device."""
    here = [parameter.detach() for parameter in parameters]
    own = [parameter.to("cpu", copy=True) for parameter in here]
    try:
        torch._foreach_copy_(here, list(values))
        yield
    finally:
        torch._foreach_copy_(here, own)
