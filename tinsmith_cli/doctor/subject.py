"""The subject of an examination: a model, its device and type, and the tokens and adapters of every comparison.

Shapes: N tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import GROUPS, AdapterConfig, Group
from tinsmith.modeling.config import load_config
from tinsmith.modeling.pretrained import UnsupportedModel, auto_class
from tinsmith.modeling.self_check import only
from tinsmith.quantization import Quantization

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Logprobs = Sequence[Floats]
"""Logprobs of each sequence's targets, [N] each."""

BASE = "base model"
"""Name of the base model among the adapters."""
ALL = "adapter on all"
"""Name of the adapter on all groups."""
_SHORT = (1, 3, 3, 6, 17, 40)
"""Lengths of the sequences before the long one, in tokens. Two consecutive lengths are equal, because attention
computes such sequences as one batch."""


class Unloadable(Exception):
    """The model cannot be loaded. The message is one line that says why."""


class NoSuchModel(Unloadable):
    """There is no such model, or the hub cannot be reached."""


class Unfit(Unloadable):
    """The model's files are right, but an engine cannot run the model."""


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence of tokens, and for each token the target that is scored after it."""

    tokens_N: Ints
    targets_N: Ints
    weights_N: Floats
    """Weights of the loss whose gradient is compared, the sum of -weight * logprob."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is examined, and the settings of the examination."""

    path: str
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    rank: int
    """Rank of the adapters."""
    num_tokens: int
    """Approximate number of tokens of all sequences together."""
    num_threads: int
    """CPU threads; 0 is torch's default."""
    quick: bool
    """Whether measurements are short."""
    quantize: Quantization | None = None
    """Form in which trainer, sampler and oracle quantise the base weights; None if they do not."""

    @property
    def text_config(self) -> PretrainedConfig:
        return self.config.get_text_config()

    @property
    def context(self) -> int:
        """Context length, in tokens; 2**20 for a model without position embeddings, which has no limit."""
        return getattr(self.text_config, "max_position_embeddings", None) or 2**20

    @property
    def has_experts(self) -> bool:
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return any((getattr(self.text_config, name, None) or 0) > 1 for name in names)

    @property
    def window(self) -> int | None:
        """Sliding window of the layers that have one, in tokens; None if no layer has one."""
        config = self.text_config.to_dict()
        kinds = config.get("layer_types")
        used = "sliding_attention" in kinds if kinds else config.get("use_sliding_window") is not False
        return config.get("sliding_window") if used else None

    def sequences(self) -> list[Example]:
        """Sequences of random tokens. Some of them repeat one token or a phrase. The last sequence is the longest."""
        vocab_size = self.text_config.vocab_size
        generator = np.random.default_rng(0)
        found = []
        for n, length in enumerate([*_SHORT, max(41, self.num_tokens - sum(_SHORT))]):
            length = min(length, self.context - 1)  # the samplers draw one token after the sequence
            tokens = generator.integers(vocab_size, size=length + 1)
            if n % 3 == 2:  # one of the two sequences of equal length, and another sequence
                tokens[:] = tokens[0]
            elif n > 3:
                tokens[length // 2 :] = np.resize(tokens[:5], length + 1 - length // 2)
            weights = generator.normal(size=length).astype(np.float32)
            found.append(Example(tokens[:-1], tokens[1:], weights))
        return found

    def adapters(self, groups: Collection[Group]) -> Mapping[str, AdapterConfig]:
        """Configurations of the adapters to compare: one on each group, and one on all groups, by name."""
        found = {f"adapter on {group}": only(group, rank=self.rank, seed=n) for n, group in enumerate(GROUPS)}
        found = {name: config for name, config in found.items() if config.groups <= set(groups)}
        if len(groups) > 1:
            flags = {f"train_{group}": group in groups for group in GROUPS}
            found[ALL] = AdapterConfig(rank=self.rank, seed=len(GROUPS), **flags)
        return found


def read_config(path: str) -> PretrainedConfig:
    """The model's configuration. Raises NoSuchModel if there is no such model, and Unloadable if it is not a causal
    language model of transformers."""
    try:
        config = load_config(path)
    except (OSError, HfHubHTTPError) as error:
        raise NoSuchModel(_in_one_line(path, error)) from None
    except ValueError as error:
        raise Unloadable(_in_one_line(path, error)) from None
    if auto_class(config) is None:
        raise Unloadable(f"{path}: {type(config).__name__} is no causal language model that transformers knows")
    return config


def _in_one_line(path: str, error: Exception) -> str:
    """The first line of the error, with the model's path before it unless the line begins with the path."""
    line = first_line(error)
    return line if line.startswith(path) else f"{path}: {line}"


def check_weights(path: str, config: PretrainedConfig) -> None:
    """Raises NoSuchModel for a folder without weights. A hub id is not checked, because the download of the weights
    would fail."""
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    if own := getattr(config, "transformers_weights", None):
        names = [own]
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in names):
        raise NoSuchModel(f"{path}: holds no weights: there is none of {', '.join(names)}")


def loading(path: str, load: Callable[[], T]) -> T:
    """Calls `load` and returns its result. Raises Unloadable in place of its errors."""
    try:
        return load()
    except Exception as error:
        raise failed(path, error) from error


def failed(path: str, error: Exception) -> Unloadable:
    """The Unloadable for an error while a model was loaded. Broken files can raise errors of any type."""
    match error:
        case UnsupportedModel() | ServiceError():
            return Unfit(first_line(error))
        case OSError() | ValueError():
            return Unloadable(f"{path}: {first_line(error)}")
        case _:
            return Unloadable(f"{path}: {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters; the name of its class if there is no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 300 else f"{lines[0][:300]}..."


def free(device: torch.device) -> None:
    """Frees the memory of models to which nothing refers any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
