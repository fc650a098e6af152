"""The obvious version of a generation whose weights change between tokens: plain transformers, float32, all tokens of
one model at once. Keys and values that one model has computed are kept when the next one goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    assert sum(count for _, count in spans) == len(tokens)
    cache, new, rest, logprobs = DynamicCache(), list(prompt), list(tokens), []
    for name, count in spans:
        drawn, rest = rest[:count], rest[count:]
        if drawn:
            inputs = torch.tensor([new + drawn[:-1]])
            logits = models[name](input_ids=inputs, past_key_values=cache, use_cache=True).logits
            logprobs += logits[0, -count:].log_softmax(-1)[range(count), drawn].tolist()
            new = drawn[-1:]
    return np.array(logprobs)
