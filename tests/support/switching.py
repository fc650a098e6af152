"""The slow, obvious version of a generation whose weights change between tokens: plain transformers, token by token,
float32. Keys and values that one model has computed are kept when the next one goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def plain_model(folder: Path, adapter: Path | None = None) -> Any:
    """A base model, with an adapter in PEFT's files when one is given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


@torch.no_grad()
def switching_logprobs(
    models: Mapping[str, Any], prompt: Sequence[int], tokens: Sequence[int], spans: Sequence[tuple[str, int]]
) -> np.ndarray:
    """Logprobs of the output `tokens`. `spans`: name of a model, and how many tokens it draws, in order."""
    drawn_by = [model for name, count in spans for model in repeat(models[name], count)]
    assert len(drawn_by) == len(tokens)
    cache, new, logprobs = DynamicCache(), list(prompt), []
    for model, token in zip(drawn_by, tokens, strict=True):
        logits = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True).logits
        logprobs.append(logits[0, -1].log_softmax(-1)[token].item())
        new = [token]
    return np.array(logprobs)
