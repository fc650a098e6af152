"""The slow, obvious version: plain transformers + PEFT + autograd, one sequence at a time, float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import peft
import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, Target
from tinsmith.modeling.config import load_config
from tinsmith.modeling.pretrained import auto_class


class Oracle:
    """A base model with one adapter, loaded by stock PEFT from the files that Tinsmith writes."""

    def __init__(
        self, model_folder: Path, adapter: Adapter, scratch: Path, *, dtype: torch.dtype = torch.float32
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        adapter.save_peft(scratch, base_model=str(model_folder))
        kind = auto_class(load_config(model_folder))
        model = kind.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products have no float64
        self.model = peft.PeftModel.from_pretrained(model, scratch, is_trainable=True).to(dtype)
        self.targets = adapter.targets

    def logprobs(self, tokens: Sequence[int], targets: Tensor) -> Tensor:
        """log P(target | tokens up to its position), of the shape of targets: [N] or [N, K]."""
        table = self.model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
        return table.gather(1, targets.reshape(len(tokens), -1)).view(targets.shape)

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """Gradient of a scalar with respect to every A and B, in the order of the adapter's buffer."""
        self.model.zero_grad()
        loss().backward()
        named = {name.replace(".default", ""): p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        return [grad for target in self.targets for grad in _gradients(target, *(named[n] for n in target.peft_names))]


def _gradients(target: Target, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of both factors. PEFT copies a shared factor for each expert: its gradient is the sum of theirs."""
    assert a is not None
    assert b is not None
    if target.num_experts is None:
        return a, b
    a_E_R_I = a.reshape(target.num_experts, -1, target.in_features)
    b_E_O_R = b.reshape(target.out_features, -1, target.num_experts).permute(2, 0, 1)
    return (a_E_R_I.sum(0), b_E_O_R) if target.shared == "A" else (a_E_R_I, b_E_O_R.sum(0))
