"""The work of training, and the peak rate of the machine, from which figures "of peak" are computed.

The work counts operations that no implementation can leave out, with 2 FLOP per multiply-add:

- each frozen linear layer once forward and once backward to its input, except backward into the first layer's q, k and
  v, below which nothing is trained; the output layer is one of them, with logits for every token;
- LoRA, three products each way for A and B: forward, backward to the input (not the first layer's), weight gradients;
- attention scores and their products with the values, of the pairs that the causal mask leaves: two products forward,
  four backward.

It does not count values that are computed twice (logits or attention weights again in backward), norms, rotations,
activations, softmax, and the loss. Dense models with plain attention only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from benchmarks.figure import describe_machine
from tinsmith.modeling.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class ModelWork:
    """FLOP of a forward_backward with rank-R adapters on every linear layer."""

    linear: int
    """Multiply-adds of one token through all frozen linear layers."""
    unused_input: int
    """The part of the linear layers' multiply-adds in layers whose input needs no gradient."""
    features: int
    """Input and output features of all linear layers, added up."""
    unused_features: int
    """Input features that need no gradient through A."""
    attention: int
    """Heads * head dimension * layers."""

    @classmethod
    def of(cls, base: BaseModel) -> ModelWork:
        """Raises ValueError for a model with experts, whose work depends on the data."""
        config = base.config
        if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
            raise ValueError(f"{base.architecture}: the work of a mixture of experts depends on the data")
        first = [
            target
            for target in base.targets
            if ".layers.0." in target.name and target.name.rsplit(".", 1)[-1] in ("q_proj", "k_proj", "v_proj")
        ]
        return cls(
            linear=sum(target.in_features * target.out_features for target in base.targets),
            unused_input=sum(target.in_features * target.out_features for target in first),
            features=sum(target.in_features + target.out_features for target in base.targets),
            unused_features=sum(target.in_features for target in first),
            attention=config.num_attention_heads * _head_dim(config) * config.num_hidden_layers,
        )

    def flop(self, lengths: Sequence[int], *, rank: int) -> float:
        """FLOP of one forward_backward of sequences of these lengths."""
        num_tokens = sum(lengths)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        frozen = (2 * self.linear - self.unused_input) * num_tokens
        lora = rank * (3 * self.features - self.unused_features) * num_tokens
        return 2.0 * (frozen + lora + 6 * self.attention * pairs)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Peak:
    """The machine's measured matrix-product rate in one dtype: the best of large squares and of the model's shapes."""

    def __init__(self, base: BaseModel, *, rows: int) -> None:
        side = 8192 if base.device.type == "cuda" else 2048
        shapes = {(side, side, side)} | {(rows, target.in_features, target.out_features) for target in base.targets}
        self._operands = [
            tuple(torch.randn(shape, dtype=base.dtype, device=base.device) for shape in ((m, k), (k, n), (m, n)))
            for m, k, n in sorted(shapes)
        ]
        rates = [self._rate(*operands) for operands in self._operands for _ in range(2)][1::2]  # the first warms up
        self.rates = dict(zip(sorted(shapes), rates, strict=True))
        """FLOP per second by (rows, inner, columns)."""
        best = max(range(len(rates)), key=rates.__getitem__)
        self.shape = sorted(shapes)[best]
        self._operands = [self._operands[best]]

    def __call__(self) -> float:
        """FLOP per second at the best shape, measured now."""
        return self._rate(*self._operands[0])

    @staticmethod
    def _rate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
        flop = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        repeats = max(2, int((4e12 if a.is_cuda else 4e10) / flop))
        synchronize(a.device)
        begin = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        synchronize(a.device)
        return flop * repeats / (time.perf_counter() - begin)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiplies_bfloat16() -> bool:
    """True on a GPU, and on a CPU with instructions for products of matrices in bfloat16."""
    return torch.cuda.is_available() or "bf16" in describe_machine()["isa"]
