"""Decoder layers of the Llama family as two autograd nodes, before and after attention, differentiated by hand.

What a short sequence costs is the number of operations, and with a long one each operation is a pass through memory:
both are fewer here than in the layer's own code under autograd. Layers are known by their structure, and each is tried
on random numbers against its own code, gradients included: one that computes anything else stays as it is. On a CPU, in
full precision, and only where gradients are wanted: generation goes through the layers' own code.

Shapes: T packed tokens, H hidden, N query heads, K key/value heads, D head dimension, C = N D, F feed-forward features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.modeling_outputs import BaseModelOutputWithPast

from tinsmith.modeling.attention import Heads, Layout, Packed
from tinsmith.modeling.generation import GenerationLayer, generate
from tinsmith.modeling.kernels.cpu import (
    CPU,
    normalize,
    normalize_backward,
    rotate,
    rotate_backward,
    swiglu_backward,
)
from tinsmith.modeling.kernels.install import FusedMLP, FusedRMSNorm
from tinsmith.modeling.lora import ActiveRuns, LoraLinear, Run, shares_of
from tinsmith.modeling.projections import Frozen, Share, backward, forward, parameters_of

_TOLERANCE = 1e-4
"""Largest relative difference between a layer's own code and ours: float32's rounding, not another function's."""


@dataclass(frozen=True, slots=True)
class _Joint:
    """Layers that read the same tensor."""

    names: Sequence[str]
    layers: Sequence[Frozen]

    @classmethod
    def of(cls, *layers: LoraLinear) -> _Joint:
        return cls([layer.name for layer in layers], [Frozen(layer.weight, layer.bias) for layer in layers])

    @property
    def widths(self) -> list[int]:
        return [layer.weight_O_I.shape[0] for layer in self.layers]

    def shares(self, runs: Sequence[Run]) -> list[Share]:
        return shares_of(runs, self.names)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, norm: FusedRMSNorm) -> _Norm:
        return cls(1.0 + norm.weight if norm.gemma else norm.weight, norm.variance_epsilon)


@dataclass(frozen=True, slots=True)
class WholeLayer:
    """What the layer is made of."""

    index: int
    heads: Heads
    head_dim: int
    before_attention: _Norm
    qkv: _Joint
    of_heads: _Norm | None
    """Of queries and keys; its weight is [N + K, D]."""
    out: _Joint
    before_mlp: _Norm
    gate_up: _Joint
    down: _Joint

    def turned_by(self, angles: Tensor) -> bool:
        """False where only a part of each head turns, which is for the layer's own code."""
        return angles.shape[-1] == self.head_dim

    def run(self, x_T_H: Tensor, cos_T_1_D: Tensor, sin_T_1_D: Tensor, layout: Packed, runs: Sequence[Run]) -> Tensor:
        """The layer's output [T, H]."""
        qkv, out, gate_up, down = (one.shares(runs) for one in (self.qkv, self.out, self.gate_up, self.down))
        q, k, v = _BeforeAttention.apply(x_T_H, self, cos_T_1_D, sin_T_1_D, qkv, *parameters_of(qkv))
        attended_T_C = layout.attend(self.index, q, k, v, self.heads).flatten(1)
        shares = (out, gate_up, down)
        parameters = [tensor for one in shares for tensor in parameters_of(one)]
        return _AfterAttention.apply(attended_T_C, x_T_H, self, shares, *parameters)


class _BeforeAttention(torch.autograd.Function):
    """Norm, projections, the heads' norms, rotation: queries [T, N, D], keys and values [T, K, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_T_H: Tensor,
        layer: WholeLayer,
        cos_T_1_D: Tensor,
        sin_T_1_D: Tensor,
        shares: Sequence[Share],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        normal_T_H, scale_T_1 = normalize(x_T_H, layer.before_attention.weight, layer.before_attention.eps)
        widths = layer.qkv.widths
        together = x_T_H.new_empty(x_T_H.shape[0], sum(widths))  # side by side, so that q and k turn as one
        _, lows = forward(normal_T_H, layer.qkv.layers, shares, together.split(widths, 1))
        heads = together.unflatten(1, (-1, layer.head_dim))
        sizes = [width // layer.head_dim for width in widths]
        qk, v = heads.split([sizes[0] + sizes[1], sizes[2]], 1)
        saved_heads: tuple[Tensor, ...] = ()
        turned = qk
        if layer.of_heads is not None:
            turned, scale = normalize(qk, layer.of_heads.weight, layer.of_heads.eps)
            saved_heads = (qk, scale)
        q, k = rotate(turned, cos_T_1_D, sin_T_1_D).split(sizes[:2], 1)
        ctx.save_for_backward(x_T_H, scale_T_1, normal_T_H, cos_T_1_D, sin_T_1_D, *saved_heads, *(lows or ()))
        ctx.layer, ctx.shares, ctx.merged, ctx.sizes = layer, shares, lows is None, sizes
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: WholeLayer = ctx.layer
        x_T_H, scale_T_1, normal_T_H, cos, sin, *rest = ctx.saved_tensors
        grad_qk = rotate_backward(torch.cat(grads[:2], 1), cos, sin)
        if layer.of_heads is not None:
            qk, scale, *rest = rest
            grad_qk = normalize_backward(grad_qk, qk, scale, layer.of_heads.weight)
        grad_q, grad_k = (grad.flatten(1) for grad in grad_qk.split(ctx.sizes[:2], 1))
        grad_normal, of_parameters = backward(
            normal_T_H,
            layer.qkv.layers,
            ctx.shares,
            None if ctx.merged else rest,
            [grad_q, grad_k, grads[2].flatten(1)],
            need_x=ctx.needs_input_grad[0],
        )
        grad_x = None
        if grad_normal is not None:
            grad_x = normalize_backward(grad_normal, x_T_H, scale_T_1, layer.before_attention.weight)
        return grad_x, None, None, None, None, *of_parameters


class _AfterAttention(torch.autograd.Function):
    """Output projection, residual, norm, SwiGLU feed-forward, residual."""

    @staticmethod
    def forward(
        ctx: Any,
        attended_T_C: Tensor,
        x_T_H: Tensor,
        layer: WholeLayer,
        shares: tuple[Sequence[Share], Sequence[Share], Sequence[Share]],
        *parameters: Tensor,
    ) -> Tensor:
        (middle_T_H,), lows_out = forward(attended_T_C, layer.out.layers, shares[0])
        middle_T_H.add_(x_T_H)
        normal_T_H, scale_T_1 = normalize(middle_T_H, layer.before_mlp.weight, layer.before_mlp.eps)
        (gate_T_F, up_T_F), lows_up = forward(normal_T_H, layer.gate_up.layers, shares[1])
        active_T_F = silu(gate_T_F).mul_(up_T_F)
        (y_T_H,), lows_down = forward(active_T_F, layer.down.layers, shares[2])
        lows = (lows_out, lows_up, lows_down)
        saved = (attended_T_C, middle_T_H, scale_T_1, normal_T_H, gate_T_F, up_T_F, active_T_F)
        ctx.save_for_backward(*saved, *(low for one in lows for low in one or ()))
        ctx.layer, ctx.shares, ctx.num_lows = layer, shares, [None if one is None else len(one) for one in lows]
        return y_T_H.add_(middle_T_H)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y_T_H,) = grad_outputs
        layer: WholeLayer = ctx.layer
        attended_T_C, middle_T_H, scale_T_1, normal_T_H, gate_T_F, up_T_F, active_T_F, *rest = ctx.saved_tensors
        lows = []
        for count in ctx.num_lows:
            lows.append(None if count is None else rest[:count])
            rest = rest[count or 0 :]
        out, up, down = ctx.shares
        grad_active, of_down = backward(active_T_F, layer.down.layers, down, lows[2], [grad_y_T_H], need_x=True)
        assert grad_active is not None
        of_gate_up = swiglu_backward(grad_active, gate_T_F, up_T_F)
        grad_normal, of_up = backward(normal_T_H, layer.gate_up.layers, up, lows[1], of_gate_up, need_x=True)
        assert grad_normal is not None
        grad_middle = normalize_backward(grad_normal, middle_T_H, scale_T_1, layer.before_mlp.weight).add_(grad_y_T_H)
        need_attended = ctx.needs_input_grad[0]
        grad_attended, of_out = backward(
            attended_T_C, layer.out.layers, out, lows[0], [grad_middle], need_x=need_attended
        )
        grad_x = grad_middle if ctx.needs_input_grad[1] else None
        return grad_attended, grad_x, None, None, *of_out, *of_up, *of_down


def take_over(decoder: nn.Module, layers: Sequence[nn.Module], active: ActiveRuns) -> int:
    """Puts a WholeLayer in the place of the code of each layer that computes the same. Returns of how many.

    When they are all of the decoder's layers, what lies around them goes with less around it, too.
    """
    count = 0
    for index, layer in enumerate(layers):
        whole = _whole(layer, index)
        if whole is not None:
            generating = GenerationLayer(whole, _linear_layers(layer))
            layer.forward = partial(_forward, partial(generate, layer.forward, generating, active), whole, active)
            count += 1
    if count and count == len(layers) and _is_plain(decoder, layers):
        decoder.forward = partial(_decode, decoder.forward, decoder)
    return count


def _decode(own: Any, decoder: Any, *, input_ids: Tensor, position_ids: Tensor, layout: Any, **kwargs: Any) -> Any:
    if type(layout) is not Packed and torch.is_grad_enabled():
        return own(input_ids=input_ids, position_ids=position_ids, layout=layout, **kwargs)
    hidden: Any = _through(decoder, input_ids, position_ids, layout)  # transformers names a type of its own here
    return BaseModelOutputWithPast(last_hidden_state=hidden)


def _through(decoder: Any, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
    """What a plain decoder computes."""
    hidden = decoder.embed_tokens(input_ids)
    angles = decoder.rotary_emb(hidden, position_ids)
    for layer in decoder.layers:
        hidden = layer(
            hidden, attention_mask=None, position_ids=position_ids, position_embeddings=angles, layout=layout
        )
    return decoder.norm(hidden)


@torch.no_grad()
def _is_plain(decoder: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether there is nothing but tokens to vectors, the layers, and a norm."""
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
    plain = type(layout) is Packed and layout.flash is None and active.groups is None and active.calls is None
    turns = position_embeddings is not None and whole.turned_by(position_embeddings[0])
    if args or not turns or not plain or not torch.is_grad_enabled():
        return own(hidden_states, *args, position_embeddings=position_embeddings, layout=layout, **kwargs)
    assert position_embeddings is not None
    cos, sin = (angles.transpose(0, 1) for angles in position_embeddings)
    return whole.run(hidden_states[0], cos, sin, layout, active.runs)[None]


@dataclass(slots=True)
class _Listening:
    """A layout that remembers how a layer attends."""

    packed: Packed
    heads: Heads | None = None

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        self.heads = heads
        return self.packed.attend(layer, q_T_N_D, k_T_K_D, v_T_K_D, heads)


def _whole(layer: nn.Module, index: int) -> WholeLayer | None:
    """None when the layer is something else."""
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
    if len(linear) < 7 or any(one.weight.dtype not in (torch.float32, torch.float64) for one in linear):
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
        counts = [one.weight.shape[0] // head_dim for one in (q, k)]
        weights = [norm.weight.expand(count, -1) for norm, count in zip(of_heads, counts, strict=True)]
        together = _Norm(torch.cat(weights), of_heads[0].eps)
    found = WholeLayer(
        index=index,
        heads=Heads(scale=1.0),
        head_dim=head_dim,
        before_attention=first,
        qkv=_Joint.of(q, k, v),
        of_heads=together,
        out=_Joint.of(o),
        before_mlp=second,
        gate_up=_Joint.of(gate, up),
        down=_Joint.of(down),
    )
    return _tried(found, layer)


def _linear_layers(layer: nn.Module) -> list[LoraLinear]:
    """Those of a Llama layer's seven that are adapted ones."""
    names = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    modules = dict(layer.named_modules())
    return [one for name in names if type(one := modules.get(name)) is LoraLinear]


def _tried(whole: WholeLayer, layer: nn.Module) -> WholeLayer | None:
    """As the layer attends, when it computes what the layer does."""
    like = whole.before_attention.weight
    lengths, generator = [5, 3], torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), like.shape[0], generator=generator, dtype=like.dtype).requires_grad_()
    angles = torch.randn(1, sum(lengths), whole.head_dim // 2, generator=generator, dtype=like.dtype).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    layout = _Listening(Packed(lengths))
    with torch.enable_grad():
        try:
            theirs = layer(
                x[None], attention_mask=None, position_ids=None, position_embeddings=(cos, sin), layout=layout
            )[0]
            if layout.heads is None:
                return None
            whole = replace(whole, heads=layout.heads)
            ours = whole.run(x, cos.transpose(0, 1), sin.transpose(0, 1), layout.packed, [])
            grad = torch.randn(ours.shape, generator=generator, dtype=like.dtype)
            pairs = [(ours, theirs), tuple(torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs))]
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None  # it asks for something else, or gives it
    return whole if all(_near(mine, other) for mine, other in pairs) else None


def _near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).norm() <= _TOLERANCE * theirs.norm())
