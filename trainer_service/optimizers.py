"""Optimizers, one for each model, over the adapter's one flat buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.rpc.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one step; they may change from step to step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Largest global L2 norm of the gradients; 0 or less means no limit."""

    @classmethod
    def from_proto(cls, params: trainer_pb2.AdamParams) -> AdamParams:
        """Raises InvalidRequest, naming the field and the value."""
        ranges = {
            "learning_rate": (0.0, math.inf),
            "beta1": (0.0, 1.0),
            "beta2": (0.0, 1.0),
            "eps": (0.0, math.inf),
            "weight_decay": (0.0, math.inf),
            "grad_clip_norm": (-math.inf, math.inf),
        }
        values: dict[str, float] = {name: getattr(params, name) for name in ranges}
        for name, (low, high) in ranges.items():
            if not (math.isfinite(values[name]) and low <= values[name] < high):
                raise InvalidRequest(f"adam_params.{name}: {values[name]} is outside [{low}, {high})", field=name)
        return cls(**values)


class AdamW:
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with its settings given at every step."""

    def __init__(self, like: Tensor) -> None:
        self.exp_avg = torch.zeros_like(like)
        self.exp_avg_sq = torch.zeros_like(like)
        self.num_steps = torch.zeros(())

    @torch.no_grad()
    def step(self, parameter: Tensor, gradient: Tensor, params: AdamParams) -> None:
        adamw(
            [parameter],
            [gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.num_steps],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=False,
            has_complex=False,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory: float32 [numel] moments, and the number of steps as float32 [1]."""
        return {
            "exp_avg": self.exp_avg.detach().to("cpu", copy=True),
            "exp_avg_sq": self.exp_avg_sq.detach().to("cpu", copy=True),
            "num_steps": self.num_steps.reshape(1).clone(),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.num_steps.copy_(state["num_steps"].reshape(()))


@torch.no_grad()
def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scales the gradient in place to at most `max_norm` (no limit at 0 or less). Returns its L2 norm before."""
    norm = torch.linalg.vector_norm(gradient).item()
    if 0 < max_norm < norm:
        gradient.mul_(max_norm / norm)
    return norm
