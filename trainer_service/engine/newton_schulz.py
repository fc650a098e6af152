"""The nearest matrix with orthonormal rows, by Newton-Schulz iterations in float32.

See Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and Liu et al. 2025, arXiv:2502.16982.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEEP = ((3.4445, -4.7750, 2.0315),) * 5
"""Muon's quintic, five times: it lifts small singular values quickly and takes large ones to between 0.7 and 1.2."""
_EXACT = ((15 / 8, -10 / 8, 3 / 8),) * 3
"""The quintic with a third-order fixed point at 1, three times: it takes singular values near 1 to exactly 1."""


def orthogonalize(matrices_K_R_N: Tensor) -> Tensor:
    """U V^T for each matrix U S V^T [K, R, N], with R <= N. A zero matrix stays zero.

    Singular values below about 1e-3 of the matrix's norm end between 0 and 1: eight iterations are too few for them.
    """
    peak_K = matrices_K_R_N.abs().amax((1, 2), keepdim=True)
    scaled_K_R_N = matrices_K_R_N / torch.where(peak_K > 0, peak_K, 1.0)  # else squares of tiny elements underflow to 0
    x_K_R_N = scaled_K_R_N / frobenius(scaled_K_R_N).clamp(min=1.0)
    for a, b, c in (*_STEEP, *_EXACT):
        gram_K_R_R = x_K_R_N @ x_K_R_N.mT
        x_K_R_N = a * x_K_R_N + (b * gram_K_R_R + c * (gram_K_R_R @ gram_K_R_R)) @ x_K_R_N
    return x_K_R_N


def frobenius(matrices_K_R_N: Tensor) -> Tensor:
    """Frobenius norm of each matrix, [K, 1, 1]. Sums row by row: on a CPU one large float32 sum loses small squares."""
    norms_K_R_1 = torch.linalg.vector_norm(matrices_K_R_N, dim=2, keepdim=True)
    return torch.linalg.vector_norm(norms_K_R_1, dim=1, keepdim=True)
