"""The kernels of the flash-attn package, if it is installed. Unlike torch's, they support the capped scores of Gemma
2."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels.varlen import Segments, flash_shapes, left_of

_FORWARD = "_flash_attn_varlen_forward"
_BACKWARD = "_flash_attn_varlen_backward"
_NEEDED = {"softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"}
"""Parameters of both functions, by which flash-attn 2.7 and later are recognised."""


class FlashAttn:
    """flash-attn's functions as a varlen.Kernel. It calls private functions of the package, because the public function
    does not accept another log-sum-exp for backward."""

    def __init__(self, interface: Any) -> None:
        """`interface`: the module flash_attn.flash_attn_interface.

        Raises ImportError if its functions lack a parameter that this class uses.
        """
        self._forward = getattr(interface, _FORWARD, None)
        self._backward = getattr(interface, _BACKWARD, None)
        for name, function in ((_FORWARD, self._forward), (_BACKWARD, self._backward)):
            missing = _NEEDED if function is None else _NEEDED - set(inspect.signature(function).parameters)
            if missing:
                raise ImportError(f"flash_attn.flash_attn_interface.{name} has no {', '.join(sorted(missing))}")

    def takes(self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> bool:
        return flash_shapes(q_T_N_D, k_T_K_D, v_T_K_D)

    def forward(
        self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, segments: Segments, heads: Heads
    ) -> tuple[Tensor, Tensor]:
        assert self._forward is not None
        out_T_N_D, lse_N_T, *_ = self._forward(
            q_T_N_D, k_T_K_D, v_T_K_D, **_arguments(segments, heads), return_softmax=False
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
        assert self._backward is not None
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_T_N_D, k_T_K_D, v_T_K_D)]
        self._backward(
            grad_T_N_D,
            q_T_N_D,
            k_T_K_D,
            v_T_K_D,
            out_T_N_D,
            lse_N_T.contiguous(),
            *grads,
            **_arguments(segments, heads),
            deterministic=False,
        )
        return grads[0], grads[1], grads[2]


def _arguments(segments: Segments, heads: Heads) -> dict[str, Any]:
    left = left_of(heads, segments)
    return {
        "cu_seqlens_q": segments.starts,
        "cu_seqlens_k": segments.starts,
        "max_seqlen_q": segments.longest,
        "max_seqlen_k": segments.longest,
        "dropout_p": 0.0,
        "softmax_scale": heads.scale,
        "causal": left < 0,
        "window_size_left": left,
        "window_size_right": 0,
        "softcap": heads.softcap or 0.0,
        "alibi_slopes": None,
    }
