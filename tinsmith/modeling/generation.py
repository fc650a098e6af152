"""Decoder layers of the Llama family without gradients, in as few operations as possible.

The time of a decode step of few rows consists of the fixed costs of its operations. Layers that read the same tensor
are therefore one product, and queries and keys are normalised and rotated together. whole_layers.py finds the layers
by their structure. The self-check at the load of a base model compares them with the plain model.

Shapes: T packed tokens, H hidden, I input features, O output features, N query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tinsmith.modeling.attention import Layout
from tinsmith.modeling.kernels.cpu import normalize, rotate
from tinsmith.modeling.lora import add_rows

if TYPE_CHECKING:
    from tinsmith.modeling.adapter_runs import ActiveRuns, Run
    from tinsmith.modeling.lora import LoraLinear
    from tinsmith.modeling.whole_layers import WholeLayer


class JoinedLinear:
    """Adapted linear layers that read one input, as one product. Their matrices lie side by side in one matrix, and
    each layer's weight is a view of it. Quantised layers keep their own matrices."""

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self.layers = layers
        sizes = [layer.num_outputs for layer in layers]
        stops = list(accumulate(sizes))
        self._columns = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self._quantized = any(layer.quantized is not None for layer in layers)
        self._bias = layers[0].bias
        self._weight = None if self._quantized else layers[0].weight.data
        if len(layers) > 1 and not self._quantized:
            self._weight = torch.cat([layer.weight.data.T for layer in layers], 1).T
            for layer, rows in zip(layers, self._columns, strict=True):
                layer.weight.data = self._weight[rows]
        if len(layers) > 1:
            self._bias = None
            if any(layer.bias is not None for layer in layers):
                like = next(layer.bias for layer in layers if layer.bias is not None)
                biases = (like.new_zeros(layer.num_outputs) if layer.bias is None else layer.bias for layer in layers)
                self._bias = torch.cat(list(biases))
        for layer in layers:
            layer.joined = tuple(layers)

    @property
    def is_current(self) -> bool:
        """False while the model's parameters are other tensors than at the time when the matrices were joined, as with
        a full version."""
        return self._weight is None or self.layers[0].weight.data_ptr() == self._weight.data_ptr()

    def __call__(self, x_T_I: Tensor, runs: Sequence[Run]) -> Tensor:
        """The outputs of all layers, side by side: [T, O]."""
        prepacked = self.layers[0].prepacked
        if prepacked is not None and prepacked.gains(x_T_I):
            y_T_O = prepacked.together(x_T_I)
        elif self._weight is not None:
            y_T_O = linear(x_T_I, self._weight, self._bias)
        else:
            y_T_O = self._from_quantized(x_T_I)
        for run in runs:
            x_n_I = None
            for layer, columns in zip(self.layers, self._columns, strict=True):
                weights = run.weights(layer.name)
                if weights is not None:
                    x_n_I = x_T_I[run.rows] if x_n_I is None else x_n_I
                    low_n_R = x_n_I @ weights.a_R_I.to(x_n_I.dtype).T
                    right_R_O = weights.b_O_R.to(x_n_I.dtype).T
                    add_rows(y_T_O[:, columns], run.rows, low_n_R, right_R_O, run.adapter.scaling)
        return y_T_O

    def _from_quantized(self, x_T_I: Tensor) -> Tensor:
        """The outputs [T, O] without adapters. Only one layer's weight is dequantised at a time."""
        y_T_O = x_T_I.new_empty(x_T_I.shape[0], self._columns[-1].stop)
        for layer, columns in zip(self.layers, self._columns, strict=True):
            torch.mm(x_T_I, layer.dense().T, out=y_T_O[:, columns])
        return y_T_O if self._bias is None else y_T_O.add_(self._bias)


class GenerationLayer:
    """A decoder layer of the Llama family, computed without gradients."""

    def __init__(self, whole: WholeLayer) -> None:
        self._whole = whole

    @property
    def is_current(self) -> bool:
        return self._whole.qkv.is_current

    def rotates_whole_heads(self, angles: Tensor) -> bool:
        return self._whole.rotates_whole_heads(angles)

    def run(self, x_T_H: Tensor, cos_T_1_D: Tensor, sin_T_1_D: Tensor, layout: Layout, runs: Sequence[Run]) -> Tensor:
        """The layer's output [T, H]."""
        whole = self._whole
        before, of_heads, after = whole.before_attention, whole.of_heads, whole.before_mlp
        normal_T_H, _ = normalize(x_T_H, before.weight, before.eps)
        heads = whole.qkv(normal_T_H, runs).unflatten(1, (-1, whole.head_dim))
        num_queries, num_keys = whole.num_heads
        qk, v = heads.split([num_queries + num_keys, num_keys], 1)
        if of_heads is not None:
            qk, _ = normalize(qk, of_heads.weight, of_heads.eps)
        q, k = rotate(qk, cos_T_1_D, sin_T_1_D).split(whole.num_heads, 1)
        attended_T_C = layout.attend(whole.index, q, k, v, whole.heads).flatten(1)
        middle_T_H = whole.out(attended_T_C, runs).add_(x_T_H)
        normal_T_H, _ = normalize(middle_T_H, after.weight, after.eps)
        gate_T_F, up_T_F = whole.gate_up(normal_T_H, runs).chunk(2, 1)
        return whole.down(silu(gate_T_F).mul_(up_T_F), runs).add_(middle_T_H)


def generate(
    own: Callable[..., Tensor],
    layer: GenerationLayer,
    active: ActiveRuns,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    layout: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Forward of a decoder layer. It runs `layer` if that can compute this pass, and otherwise `own`, the forward that
    the layer had before."""
    rotates = position_embeddings is not None and layer.rotates_whole_heads(position_embeddings[0])
    if not rotates or args or active.groups is not None or torch.is_grad_enabled() or not layer.is_current:
        return own(hidden_states, *args, position_embeddings=position_embeddings, layout=layout, **kwargs)
    assert position_embeddings is not None
    cos, sin = (angles.transpose(0, 1) for angles in position_embeddings)
    return layer.run(hidden_states[0], cos, sin, layout, active.runs)[None]
