"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2 and others) in generation, on compressed keys and values.

Such a layer makes the keys and values of all heads from one latent vector of each token, by its `kv_b_proj`; to each
key it appends rotated features that all heads share. In generation the cache holds the latent vector and the rotated
features only. With k = U c and v = V c, a score q k is (U^T q) c, and a weighted sum of values is V times the weighted
sum of latent vectors (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1). So attention sees a single head of keys [C + E],
whose first C features are the values. An adapter of `kv_b_proj` adds its share to U and V on its own rows.

Shapes: T rows, N heads, C features of a latent vector, K features of a head's key without the rotated ones, E rotated
features, D = K + E, V features of a value, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.lora import LoraLinear

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest relative difference from the layer's own attention on random numbers."""
_ROUGH = 0.05
"""Largest difference for types that _TOLERANCE does not name."""


@dataclass(frozen=True, slots=True)
class Latent:
    """The computation of one attention layer on latent vectors, in place of keys and values."""

    projection: nn.Linear | LoraLinear
    """kv_b_proj, which maps latent vectors to the keys and values of each head, side by side."""
    active: ActiveRuns
    num_heads: int
    num_key_features: int
    """K, the features of a head's key without the rotated ones."""

    @property
    def in_use(self) -> bool:
        """Whether the present pass keeps its tokens in a cache."""
        return self.active.layout is not None and not isinstance(self.active.layout, Packed)

    def queries(self, q_T_N_D: Tensor) -> Tensor:
        """Queries [T, N, C + E] for keys that are latent vectors and rotated features."""
        q_T_N_K, rotated_T_N_E = q_T_N_D.tensor_split([self.num_key_features], -1)
        q_N_T_K = q_T_N_K.transpose(0, 1)
        out_N_T_C = q_N_T_K @ self._by_head(_weight_of(self.projection))[:, : self.num_key_features]
        for rows, a_R_C, b_N_O_R in self._shares(q_T_N_D.dtype):
            out_N_T_C[:, rows] += q_N_T_K[:, rows] @ b_N_O_R[:, : self.num_key_features] @ a_R_C
        return torch.cat([out_N_T_C.transpose(0, 1), rotated_T_N_E], -1)

    def values(self, x_T_N_C: Tensor) -> Tensor:
        """The weighted sums of values, [T, N, V], from weighted sums of latent vectors."""
        x_N_T_C = x_T_N_C.transpose(0, 1)
        out_N_T_V = x_N_T_C @ self._by_head(_weight_of(self.projection))[:, self.num_key_features :].transpose(1, 2)
        for rows, a_R_C, b_N_O_R in self._shares(x_T_N_C.dtype):
            b_N_R_V = b_N_O_R[:, self.num_key_features :].transpose(1, 2)
            out_N_T_V[:, rows] += x_N_T_C[:, rows] @ a_R_C.T @ b_N_R_V
        return out_N_T_V.transpose(0, 1)

    def _by_head(self, x_NO_X: Tensor) -> Tensor:
        """The outputs of `projection` by head: [N, K + V, X] from [N (K + V), X]."""
        return x_NO_X.unflatten(0, (self.num_heads, -1))

    def _shares(self, dtype: torch.dtype) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """For each run with an adapter of `projection`: its rows, A [R, C], and B [N, K + V, R] times the scaling."""
        if not isinstance(self.projection, LoraLinear):
            return
        for run in self.active.runs:
            weights = run.adapter.weights.get(self.projection.name)
            if weights is not None:
                b_NO_R = weights.b_O_R.to(dtype) * run.adapter.scaling
                yield run.rows, weights.a_R_I.to(dtype), self._by_head(b_NO_R)


def _weight_of(projection: nn.Linear | LoraLinear) -> Tensor:
    return projection.dense() if isinstance(projection, LoraLinear) else projection.weight


def compress(decoder: nn.Module, active: ActiveRuns) -> list[str]:
    """Makes the layers with latent attention keep latent vectors in generation. A layer is changed if its structure is
    known, and if attention on latent vectors agrees with its own keys and values on random numbers. Returns the names
    of the classes of the changed layers."""
    taken = set()
    for module in decoder.modules():
        latent = _latent_of(module, active)
        if latent is not None:
            module.latent = latent  # type: ignore[assignment]  # attention.py looks for it
            module.expand_kv = partial(_expand, module.expand_kv, latent)  # type: ignore[assignment]
            taken.add(type(module).__name__)
    return sorted(taken)


def _expand(theirs: Callable[..., tuple[Tensor, Tensor]], latent: Latent, latents: Tensor, rotated: Tensor) -> object:
    """Replaces transformers' expand_kv, which makes keys and values from latent vectors [1, 1, T, C] and rotated
    features [1, 1, T, E]. In generation it returns the two inputs joined as keys, and the latent vectors as values."""
    if not latent.in_use:
        return theirs(latents, rotated)
    return torch.cat([latents, rotated], -1), latents


@torch.no_grad()
def _latent_of(module: nn.Module, active: ActiveRuns) -> Latent | None:
    """The computation on latent vectors of an attention layer; None for a module that `compress` does not change."""
    expand: Callable[..., tuple[Tensor, Tensor]] | None = getattr(module, "expand_kv", None)
    projection = getattr(module, "kv_b_proj", None)
    if expand is None or not isinstance(projection, nn.Linear | LoraLinear) or projection.bias is not None:
        return None
    config: Any = module
    try:
        num_heads, num_own, num_rotated = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    except AttributeError:
        return None
    weight = _weight_of(projection)
    num_outputs, num_latent = weight.shape
    if num_outputs % num_heads or num_outputs // num_heads <= num_own:
        return None
    latent = Latent(projection, active, num_heads, num_own)
    generator = torch.Generator().manual_seed(0)
    shapes = (4, num_latent), (4, num_rotated), (4, num_heads, num_own + num_rotated)
    c_T_C, rotated_T_E, q_T_N_D = (torch.randn(shape, generator=generator).to(weight) for shape in shapes)
    keys, values = expand(c_T_C[None, None], rotated_T_E[None, None])
    theirs = torch.einsum("tnd,nld->tnl", q_T_N_D, keys[0]), values[0].transpose(0, 1)
    ours = (
        latent.queries(q_T_N_D) @ torch.cat([c_T_C, rotated_T_E], -1).T,
        latent.values(c_T_C[:, None].expand(-1, num_heads, -1)),
    )
    limit = _TOLERANCE.get(weight.dtype, _ROUGH)
    for mine, expected in zip(ours, theirs, strict=True):
        if mine.shape != expected.shape or not (mine - expected).norm() <= limit * expected.norm():
            return None
    return latent
