"""Decoder layers of the Llama family as one autograd node each, differentiated by hand.

Each operation costs a fixed time with a short sequence, and a pass through memory with a long one. There are fewer
operations here than in the layer's own code under autograd. Layers are recognised by their structure, and each is
compared with its own code on random numbers, gradients included. A layer that computes anything else stays as it is.

Passes with gradients are computed here, on a CPU, in float32 or float64. Passes without gradients are computed in
generation.py, also in bfloat16.

Shapes: T packed tokens, H hidden, N query heads, K key/value heads, D head dimension, C = N D, F feed-forward features,
S features side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.modeling_outputs import BaseModelOutputWithPast

from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.attention import Layout, Packed, attend, attend_backward
from tinsmith.modeling.generation import GenerationLayer, JoinedLinear, generate
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels.cpu import (
    CPU,
    gemma_factor,
    normalize,
    normalize_backward,
    rotate,
    rotate_backward,
    swiglu_backward,
)
from tinsmith.modeling.kernels.install import FusedMLP, FusedRMSNorm
from tinsmith.modeling.lora import LoraLinear, backward, forward, parameters_of

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest relative difference from a layer's own code, by the type of its weights. It allows for rounding, and is
exceeded by any other computation."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, norm: FusedRMSNorm) -> _Norm:
        return cls(gemma_factor(norm.weight) if norm.gemma else norm.weight, norm.variance_epsilon)


@dataclass(frozen=True, slots=True)
class WholeLayer:
    """A decoder layer that is computed as one autograd node: its norms and linear layers."""

    index: int
    heads: Heads
    head_dim: int
    before_attention: _Norm
    qkv: JoinedLinear
    of_heads: _Norm | None
    """Norm over each head of the queries and keys, with a weight [N + K, D]; None for a layer without such norms."""
    out: JoinedLinear
    before_mlp: _Norm
    gate_up: JoinedLinear
    down: JoinedLinear

    @property
    def num_heads(self) -> tuple[int, int]:
        """Number of query heads, and of key/value heads."""
        queries, keys, _ = (layer.num_outputs for layer in self.qkv.layers)
        return queries // self.head_dim, keys // self.head_dim

    def rotates_whole_heads(self, angles: Tensor) -> bool:
        """Whether the angles rotate whole heads. If only a part of each head is rotated, the layer's own code runs."""
        return angles.shape[-1] == self.head_dim

    def run(self, x_T_H: Tensor, cos_T_1_D: Tensor, sin_T_1_D: Tensor, layout: Packed, runs: Sequence[Run]) -> Tensor:
        """The layer's output [T, H]."""
        parameters = parameters_of(self.linear_layers, runs)
        return _LayerFunction.apply(x_T_H, cos_T_1_D, sin_T_1_D, self, layout, runs, *parameters)

    @property
    def dtype(self) -> torch.dtype:
        return self.down.layers[0].dtype

    @property
    def differentiable(self) -> bool:
        """Whether `run` works. In bfloat16, gradients go through the layer's own code."""
        return self.dtype != torch.bfloat16

    @property
    def linear_layers(self) -> list[LoraLinear]:
        """The layer's linear layers, in the order in which the gradients of their adapters are returned."""
        return [*self.qkv.layers, *self.out.layers, *self.gate_up.layers, *self.down.layers]


class _LayerFunction(torch.autograd.Function):
    """The autograd node: norm, projections, the heads' norms, rotation, attention, output projection, residual, norm,
    SwiGLU, residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x_T_H: Tensor,
        cos_T_1_D: Tensor,
        sin_T_1_D: Tensor,
        layer: WholeLayer,
        layout: Packed,
        runs: Sequence[Run],
        *parameters: Tensor,
    ) -> Tensor:
        num_queries, num_keys = layer.num_heads
        normal_T_H, scale_T_1 = normalize(x_T_H, layer.before_attention.weight, layer.before_attention.eps)
        qkv_T_S, lows_qkv = forward(normal_T_H, layer.qkv.layers, runs)
        heads = qkv_T_S.view(qkv_T_S.shape[0], -1, layer.head_dim)
        qk, v = torch.split_with_sizes(heads, [num_queries + num_keys, num_keys], 1)  # q and k are rotated as one
        normal_qk, of_heads = qk, ()
        if layer.of_heads is not None:
            normal_qk, scale = normalize(qk, layer.of_heads.weight, layer.of_heads.eps)
            of_heads = (qk, scale)
        q, k = torch.split_with_sizes(rotate(normal_qk, cos_T_1_D, sin_T_1_D), [num_queries, num_keys], 1)
        attended, sums = attend(q, k, v, layout, layer.heads)
        attended_T_C = attended.flatten(1)
        middle_T_H, lows_out = forward(attended_T_C, layer.out.layers, runs)
        middle_T_H.add_(x_T_H)
        second_T_H, second_T_1 = normalize(middle_T_H, layer.before_mlp.weight, layer.before_mlp.eps)
        gate_up_T_S, lows_gate_up = forward(second_T_H, layer.gate_up.layers, runs)
        gate_T_F, up_T_F = gate_up_T_S.chunk(2, 1)
        active_T_F = silu(gate_T_F).mul_(up_T_F)
        y_T_H, lows_down = forward(active_T_F, layer.down.layers, runs)
        groups = (
            (x_T_H, scale_T_1, normal_T_H, cos_T_1_D, sin_T_1_D, q, k, v, attended, attended_T_C),
            (middle_T_H, second_T_1, second_T_H, gate_T_F, up_T_F, active_T_F),
            of_heads,
            sums,
            *(lows_qkv, lows_out, lows_gate_up, lows_down),
        )
        ctx.save_for_backward(*chain.from_iterable(groups))
        ctx.sizes = [len(group) for group in groups]
        ctx.layer, ctx.layout, ctx.runs = layer, layout, runs
        return y_T_H.add_(middle_T_H)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y_T_H,) = grad_outputs
        layer: WholeLayer = ctx.layer
        runs: Sequence[Run] = ctx.runs
        tensors = iter(ctx.saved_tensors)
        first, second, of_heads, sums, *lows = (list(islice(tensors, size)) for size in ctx.sizes)

        middle_T_H, second_T_1, second_T_H, gate_T_F, up_T_F, active_T_F = second
        grad_active, grads_down = backward(active_T_F, layer.down.layers, runs, lows[3], grad_y_T_H, need_x=True)
        assert grad_active is not None
        grad_gate_up = grad_y_T_H.new_empty(gate_T_F.shape[0], 2 * gate_T_F.shape[1])
        swiglu_backward(grad_active, gate_T_F, up_T_F, out=grad_gate_up.chunk(2, 1))
        grad_second, grads_up = backward(second_T_H, layer.gate_up.layers, runs, lows[2], grad_gate_up, need_x=True)
        assert grad_second is not None
        grad_middle = normalize_backward(grad_second, middle_T_H, second_T_1, layer.before_mlp.weight).add_(grad_y_T_H)

        x_T_H, scale_T_1, normal_T_H, cos, sin, q, k, v, attended, attended_T_C = first
        need_x = ctx.needs_input_grad[0]
        need_attended = need_x or bool(parameters_of(layer.qkv.layers, runs))
        grad_attended, grads_out = backward(
            attended_T_C, layer.out.layers, runs, lows[1], grad_middle, need_x=need_attended
        )
        grad_x, grads_qkv = None, []
        if grad_attended is not None:
            together = attend_backward(
                grad_attended.view_as(attended), q, k, v, attended, sums, ctx.layout, layer.heads
            )
            grad_qk = together[:, : -v.shape[1]]
            grad_normal_qk = rotate_backward(grad_qk, cos, sin)
            if layer.of_heads is None:
                grad_qk.copy_(grad_normal_qk)
            else:
                qk, scale = of_heads
                normalize_backward(grad_normal_qk, qk, scale, layer.of_heads.weight, out=grad_qk)
            grad_normal, grads_qkv = backward(
                normal_T_H, layer.qkv.layers, runs, lows[0], together.flatten(1), need_x=need_x
            )
            if grad_normal is not None:
                grad_x = normalize_backward(grad_normal, x_T_H, scale_T_1, layer.before_attention.weight)
                grad_x.add_(grad_middle)
        return grad_x, None, None, None, None, None, *grads_qkv, *grads_out, *grads_up, *grads_down


def take_over(decoder: nn.Module, layers: Sequence[nn.Module], active: ActiveRuns) -> int:
    """Replaces the forward of each layer that a WholeLayer can compute. Returns the number of replaced layers.

    If all layers of the decoder are replaced, the decoder's own forward is replaced by a shorter one, too.
    """
    count = 0
    for index, layer in enumerate(layers):
        whole = _whole(layer, index)
        if whole is not None:
            generating = partial(generate, layer.forward, GenerationLayer(whole), active)
            layer.forward = partial(_forward, generating, whole, active) if whole.differentiable else generating
            count += 1
    if count and count == len(layers) and _is_plain(decoder, layers):
        decoder.forward = partial(_forward_decoder, decoder.forward, decoder)
    return count


def give_back(decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Undoes take_over."""
    for module in (decoder, *layers):
        module.__dict__.pop("forward", None)


def _forward_decoder(
    own: Any, decoder: Any, *, position_ids: Tensor, layout: Any, input_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    """Forward of a plain decoder. It runs `own`, the forward that the decoder had before, for passes that `_through`
    does not compute."""
    if input_ids is None or (type(layout) is not Packed and torch.is_grad_enabled()):
        return own(input_ids=input_ids, position_ids=position_ids, layout=layout, **kwargs)
    hidden: Any = _through(decoder, input_ids, position_ids, layout)  # transformers names a type of its own here
    return BaseModelOutputWithPast(last_hidden_state=hidden)


def _through(decoder: Any, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
    """The hidden states [1, T, H] of a plain decoder: embedding, layers, norm."""
    hidden = decoder.embed_tokens(input_ids)
    angles = decoder.rotary_emb(hidden, position_ids)
    for layer in decoder.layers:
        hidden = layer(
            hidden, attention_mask=None, position_ids=position_ids, position_embeddings=angles, layout=layout
        )
    return decoder.norm(hidden)


@torch.no_grad()
def _is_plain(decoder: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether the decoder consists of an embedding, the layers and a norm, and nothing else."""
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if list(decoder.layers) != list(layers):  # type: ignore[arg-type]
        return False
    tokens, positions = torch.tensor([[1, 0, 2, 1]]), torch.tensor([[0, 1, 0, 1]])
    try:
        ours = _through(decoder, tokens, positions, Packed([2, 2]))
        theirs = decoder(input_ids=tokens, position_ids=positions, use_cache=False, layout=Packed([2, 2]))[0]
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    return _near(ours, theirs)


def _forward(
    own: Any,
    whole: WholeLayer,
    active: ActiveRuns,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    layout: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Forward of a decoder layer. It runs `whole` in passes with gradients that it can compute, and otherwise `own`,
    the forward that the layer had before."""
    plain = type(layout) is Packed and layout.flash is None and layout.ahead is None and active.groups is None
    rotates = position_embeddings is not None and whole.rotates_whole_heads(position_embeddings[0])
    if args or not rotates or not plain or not torch.is_grad_enabled():
        return own(hidden_states, *args, position_embeddings=position_embeddings, layout=layout, **kwargs)
    assert position_embeddings is not None
    cos, sin = (angles.transpose(0, 1) for angles in position_embeddings)
    return whole.run(hidden_states[0], cos, sin, layout, active.runs)[None]


@dataclass(slots=True)
class _RecordingLayout:
    """A layout that records the `heads` with which a layer attends."""

    packed: Packed
    heads: Heads | None = None

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        self.heads = heads
        return self.packed.attend(layer, q_T_N_D, k_T_K_D, v_T_K_D, heads)


def _whole(layer: nn.Module, index: int) -> WholeLayer | None:
    """The WholeLayer that computes the same as `layer`, or None if there is none."""
    parts = dict(layer.named_children())
    if set(parts) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return None
    attention, mlp = dict(parts["self_attn"].named_children()), parts["mlp"]
    for name in "qkvo":
        attention.pop(f"{name}_proj", None)
    of_heads = [attention.pop(f"{name}_norm") for name in "qk" if f"{name}_norm" in attention]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"], *of_heads]
    if attention or type(mlp) is not FusedMLP or len(of_heads) == 1:
        return None
    linear = _linear_layers(layer)
    if len(linear) < 7 or len({one.dtype for one in linear}) > 1 or linear[0].dtype not in _TOLERANCE:
        return None
    if any(type(norm) is not FusedRMSNorm or norm.backend is not CPU for norm in norms):
        return None
    q, k, v, o, gate, up, down = linear
    head_dim = getattr(parts["self_attn"], "head_dim", None)
    if not isinstance(head_dim, int) or head_dim % 2:
        return None
    first, second, *of_heads = [_Norm.of(norm) for norm in norms]  # type: ignore[arg-type]
    together = None
    if of_heads:
        if any(norm.weight.shape != (head_dim,) for norm in of_heads) or of_heads[0].eps != of_heads[1].eps:
            return None
        counts = [one.num_outputs // head_dim for one in (q, k)]
        weights = [norm.weight.expand(count, -1) for norm, count in zip(of_heads, counts, strict=True)]
        together = _Norm(torch.cat(weights), of_heads[0].eps)
    found = WholeLayer(
        index=index,
        heads=Heads(scale=1.0),
        head_dim=head_dim,
        before_attention=first,
        qkv=JoinedLinear([q, k, v]),
        of_heads=together,
        out=JoinedLinear([o]),
        before_mlp=second,
        gate_up=JoinedLinear([gate, up]),
        down=JoinedLinear([down]),
    )
    return _tried(found, layer)


def _linear_layers(layer: nn.Module) -> list[LoraLinear]:
    """The seven linear layers of a Llama layer, without those that are no LoraLinear."""
    names = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    modules = dict(layer.named_modules())
    return [one for name in names if type(one := modules.get(name)) is LoraLinear]


def _tried(whole: WholeLayer, layer: nn.Module) -> WholeLayer | None:
    """`whole` with the `heads` of the layer's attention; None if `whole` and the layer disagree on random numbers."""
    num_features, differentiable = whole.before_attention.weight.shape[0], whole.differentiable
    lengths, random = [5, 3], partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=whole.dtype)
    x = random(sum(lengths), num_features).requires_grad_(differentiable)
    angles = random(1, sum(lengths), whole.head_dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    layout = _RecordingLayout(Packed(lengths))
    with torch.set_grad_enabled(differentiable):
        try:
            theirs = layer(
                x[None], attention_mask=None, position_ids=None, position_embeddings=(cos, sin), layout=layout
            )[0]
            heads = layout.heads
            if heads is None or heads.softcap is not None or heads.sinks_N is not None:
                return None
            whole = replace(whole, heads=heads)
            run = whole.run if differentiable else GenerationLayer(whole).run
            pairs = [(run(x, cos.transpose(0, 1), sin.transpose(0, 1), layout.packed, []), theirs)]
            if differentiable:
                grad = random(theirs.shape)
                ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in pairs[0])
                pairs.append((ours, theirs))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None  # the layer takes other arguments, or returns something else
    return whole if all(_near(mine, other) for mine, other in pairs) else None


def _near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).float().norm() <= _TOLERANCE[theirs.dtype] * theirs.float().norm())
