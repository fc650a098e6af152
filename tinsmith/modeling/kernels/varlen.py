"""Variable-length flash attention: one call for all sequences of a packed batch, of any lengths.

The kernels do not support attention sinks. But they return the log-sum-exp (lse) of each row's scores, and a sink adds
one more term to that sum, by which the output shrinks. Flash attention's backward computes the probabilities again, as
exp(score - lse), and computes each row's correction from the output. If it gets the lse and the output *with* the sink,
it therefore yields the exact gradients of attention with a sink.

Shapes: T packed tokens, B sequences, N query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels.transfer import table


@dataclass(frozen=True, slots=True)
class Segments:
    """Positions of the sequences of a packed batch, in the form for the kernels. Made once for each forward pass."""

    starts: Tensor
    """int32 [B + 1], on the device: the first row of each sequence, then T."""
    longest: int
    """Length of the longest sequence, in tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        return cls(table(starts, torch.int32, device), max(lengths))


class Kernel(Protocol):
    """Causal attention within each segment, and its gradient, outside of autograd."""

    def takes(self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> bool:
        """Whether the kernel supports this layer."""
        ...

    def forward(
        self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, segments: Segments, heads: Heads
    ) -> tuple[Tensor, Tensor]:
        """The output [T, N, D], and the log-sum-exp of the scores, float32 [N, T]."""
        ...

    def backward(
        self,
        grad_T_N_D: Tensor,
        q_T_N_D: Tensor,
        k_T_K_D: Tensor,
        v_T_K_D: Tensor,
        out_T_N_D: Tensor,
        lse_N_T: Tensor,
        segments: Segments,
        heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, from the probabilities exp(score - lse)."""
        ...


def attend(
    kernel: Kernel, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, segments: Segments, heads: Heads
) -> Tensor:
    """Attention output [T, N, D], differentiable in q, k, v and the sinks."""
    return _Attention.apply(q_T_N_D, k_T_K_D, v_T_K_D, heads.sinks_N, kernel, segments, heads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_T_N_D: Tensor,
        k_T_K_D: Tensor,
        v_T_K_D: Tensor,
        sinks_N: Tensor | None,
        kernel: Kernel,
        segments: Segments,
        heads: Heads,
    ) -> Tensor:
        out_T_N_D, lse_N_T = kernel.forward(q_T_N_D, k_T_K_D, v_T_K_D, segments, heads)
        if sinks_N is not None:
            with_sink_N_T = torch.logaddexp(lse_N_T, sinks_N.float()[:, None])
            kept_T_N = (lse_N_T - with_sink_N_T).exp().T
            out_T_N_D = (out_T_N_D * kept_T_N[..., None]).to(q_T_N_D.dtype)
            lse_N_T = with_sink_N_T
        ctx.save_for_backward(q_T_N_D, k_T_K_D, v_T_K_D, sinks_N, out_T_N_D, lse_N_T)
        ctx.kernel, ctx.segments, ctx.heads = kernel, segments, heads
        return out_T_N_D

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T_N_D,) = grad_outputs
        q_T_N_D, k_T_K_D, v_T_K_D, sinks_N, out_T_N_D, lse_N_T = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.kernel.backward(
            grad_T_N_D, q_T_N_D, k_T_K_D, v_T_K_D, out_T_N_D, lse_N_T, ctx.segments, ctx.heads
        )
        grad_sinks_N = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            # The sink's value vector is zero, so its probability only lowers the output.
            taken_N_T = (sinks_N.float()[:, None] - lse_N_T).exp()
            lowered_T_N = (grad_T_N_D.float() * out_T_N_D.float()).sum(-1)
            grad_sinks_N = -(taken_N_T * lowered_T_N.T).sum(1).to(sinks_N.dtype)
        return grad_q, grad_k, grad_v, grad_sinks_N, None, None, None


class TorchVarlen:
    """The kernels of torch.nn.attention.varlen as a Kernel. They are called as operators, because sinks need a backward
    with another log-sum-exp, which torch's public function does not allow."""

    def __init__(self) -> None:
        import torch.nn.attention.varlen  # noqa: F401  # registers the operators

    def takes(self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> bool:
        return heads.softcap is None and flash_shapes(q_T_N_D, k_T_K_D, v_T_K_D)

    def forward(
        self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, segments: Segments, heads: Heads
    ) -> tuple[Tensor, Tensor]:
        left = left_of(heads, segments)
        out_T_N_D, lse_N_T, _ = torch.ops.torch_attn._varlen_attn(
            q_T_N_D,
            k_T_K_D,
            v_T_K_D,
            segments.starts,
            segments.starts,
            segments.longest,
            segments.longest,
            left < 0,
            heads.scale,
            [left, 0],
            q_T_N_D.shape[1] != k_T_K_D.shape[1],
        )
        return out_T_N_D, lse_N_T

    def backward(
        self,
        grad_T_N_D: Tensor,
        q_T_N_D: Tensor,
        k_T_K_D: Tensor,
        v_T_K_D: Tensor,
        out_T_N_D: Tensor,
        lse_N_T: Tensor,
        segments: Segments,
        heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        left = left_of(heads, segments)
        # The kernel's random state, which only dropout uses.
        no_randomness = torch.zeros(2, dtype=torch.uint64, device=q_T_N_D.device)
        return torch.ops.torch_attn._varlen_attn_backward(
            grad_T_N_D,
            q_T_N_D,
            k_T_K_D,
            v_T_K_D,
            out_T_N_D,
            lse_N_T.contiguous(),
            segments.starts,
            segments.starts,
            segments.longest,
            segments.longest,
            left < 0,
            no_randomness,
            heads.scale,
            [left, 0],
        )


def left_of(heads: Heads, segments: Segments) -> int:
    """Flash attention's size of the window: the number of tokens before itself that a token sees; -1 means all. The
    window of Heads counts the token itself, too."""
    if heads.window is None or heads.window >= segments.longest:
        return -1
    return heads.window - 1


_LARGE_SHARED_MEMORY = {(8, 0), (9, 0), (10, 0)}
"""Compute capabilities for which flash attention has a backward for heads of more than 192 dimensions."""


def flash_shapes(q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> bool:
    """Whether flash attention has a kernel for these tensors."""
    if not q_T_N_D.is_cuda or q_T_N_D.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not q_T_N_D.dtype == k_T_K_D.dtype == v_T_K_D.dtype:
        return False
    head_dim = q_T_N_D.shape[2]
    capability = torch.cuda.get_device_capability(q_T_N_D.device)
    largest = 256 if capability in _LARGE_SHARED_MEMORY else 192
    same = k_T_K_D.shape[2] == head_dim and v_T_K_D.shape[2] == head_dim
    return same and head_dim % 8 == 0 and head_dim <= largest and capability >= (8, 0)
