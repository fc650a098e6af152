"""The canary: short fixed sequences that trainer and samplers score, to see that they compute the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_logprobs import full_target_logprobs
from tinsmith.modeling.full_weights import FullWeights, Parameters, TrainedWeights, Weights
from tinsmith.modeling.lora import Run

Tokens = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]
"""Logprobs of the tokens of all sequences, each sequence's first token left out, end to end."""

_LENGTH = 16
_SEED = 20


def canary_of(base: BaseModel) -> Sequence[Tokens]:
    """On a CPU every token costs time, of which a publish has little, and every request may be a step of the sampler;
    a GPU takes as long for one token as for some dozens."""
    num_sequences = 1 if base.device.type == "cpu" else 4
    return canary(num_sequences, vocab_size=base.vocab_size, max_context_length=base.max_context_length)


def canary(num_sequences: int, *, vocab_size: int, max_context_length: int) -> Sequence[Tokens]:
    """The same for every model of this size, and shorter than its context.

    Ids are drawn evenly over their logarithm, since in most vocabularies common tokens come first: a model says more
    about those than about tokens that it has never seen.
    """
    length = max(2, min(_LENGTH, max_context_length - 1))
    drawn = np.random.default_rng(_SEED).random((num_sequences, length))
    return list((np.power(float(vocab_size), drawn) - 1).astype(np.int32).clip(0, vocab_size - 1))


def score(base: BaseModel, weights: Weights | None, sequences: Sequence[Tokens]) -> Scores:
    """What the pass that trains gives with these weights, which may be a live model's own, or a copy in host memory.
    None: the base model as it is, without an adapter.

    Belongs to the compute thread. Afterwards the base model is what it was.
    """
    device = base.device
    lengths = [tokens.size for tokens in sequences]
    starts = np.cumsum([0, *lengths])
    rows_M = np.concatenate([np.arange(start, start + n - 1) for start, n in zip(starts, lengths, strict=False)])
    targets_M = np.concatenate([tokens[1:] for tokens in sequences]).astype(np.int64)
    tokens_T = torch.from_numpy(np.concatenate(sequences)).long().to(device)
    runs: list[Run] = []
    if isinstance(weights, Adapter):
        here = weights.like(weights.flat.detach().to(device))
        runs.append(Run(here, slice(0, tokens_T.shape[0])))
    # Without gradients layers take another way, which is the sampler's and not that of training.
    with _holding(base, weights), torch.enable_grad():
        hidden_T_H = base.hidden_states(tokens_T, positions_of(lengths, device), Packed(lengths), runs)
        named = torch.from_numpy(rows_M), torch.from_numpy(targets_M)
        if base.trainable:
            logprobs_M = full_target_logprobs(base.head, hidden_T_H, *(x.to(device) for x in named))
        else:
            logprobs_M = base.target_logprobs(hidden_T_H, *named, runs)
        return logprobs_M.detach().float().cpu().numpy()


@contextmanager
def _holding(base: BaseModel, weights: Weights | None) -> Iterator[None]:
    """While it lasts, full weights are what the base model computes with."""
    if weights is None or isinstance(weights, (Adapter, TrainedWeights)):
        yield
    elif base.device.type == "cpu":
        parameters = Parameters(base)
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
    """Where a second set of parameters may not fit beside the first: that waits in host memory."""
    here = [parameter.detach() for parameter in parameters]
    own = [parameter.to("cpu", copy=True) for parameter in here]
    try:
        torch._foreach_copy_(here, list(values))
        yield
    finally:
        torch._foreach_copy_(here, own)
