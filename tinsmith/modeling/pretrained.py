"""Causal language models as transformers loads them, and what their files lack, which it would draw at random."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

logger = logging.getLogger(__name__)

_SHOWN = 4


def load_causal_lm(path: str | Path, *, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model in host memory, and what is not in its files, by name: such parameters have random values.

    Tied parameters of which one is there, and those that transformers knows to be absent, are not among them.
    Raises OSError when there is no such model, a file of its weights is damaged, or a tensor has another shape than the
    configuration makes it. Code that comes with a model is never run.
    """
    try:
        # transformers names the tensors that do not fit only to those who ask it to go on.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except SafetensorError as error:
        raise OSError(f"a file of weights is damaged ({error}); fetch it again") from error
    model, report = loaded
    if mismatched := sorted(report["mismatched_keys"]):
        (name, stored, expected), *rest = mismatched
        more = f", and {len(rest)} more do not fit" if rest else ""
        raise OSError(
            f"{name} is {list(stored)} in the weights and {list(expected)} by config.json{more}: they are not of one "
            "model; fetch both again"
        )
    if unexpected := report["unexpected_keys"]:
        logger.info("%s: the model has no use for %s", path, listed(sorted(unexpected)))
    return model, sorted(report["missing_keys"])


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the files of a model hold besides its parameters, by Hugging Face name."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if name not in computed}


def listed(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
