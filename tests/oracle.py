"""The slow, obvious version: plain transformers + PEFT + autograd, one sequence at a time, float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tinsmith.modeling.adapter import Adapter


class Oracle:
    """A base model with one adapter, loaded by stock PEFT from the files that Tinsmith writes."""

    def __init__(self, model_folder: Path, adapter: Adapter, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        adapter.save_peft(scratch, base_model=str(model_folder))
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
        self.model = peft.PeftModel.from_pretrained(model, scratch, is_trainable=True)
        self.names = [name for name, _ in adapter.specs()]

    def logprobs(self, tokens: Sequence[int], targets: Tensor) -> Tensor:
        """log P(target | tokens up to its position), of the shape of targets: [N] or [N, K]."""
        table = self.model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
        return table.gather(1, targets.reshape(len(tokens), -1)).view(targets.shape)

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """Gradient of a scalar with respect to every A and B, in the order of the adapter's buffer."""
        self.model.zero_grad()
        loss().backward()
        named = {name.replace(".default", ""): p for name, p in self.model.named_parameters() if p.requires_grad}
        return [named[name].grad for name in self.names]
