"""Tensor parallelism of the adapted layers, by the model's own plan (transformers' tp_plan).

A rank holds some output features of a "colwise" layer, and some input features of a "rowwise" layer. It computes some
rows of the output layer. Every rank has the whole adapters, and uses the part of A or B that belongs to its features.
The gradient of an adapter is the sum of all ranks' gradients.

Shapes: T packed tokens, M named tokens, H hidden, I input features, O output features, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.modeling.adaptation import decoder_of
from tinsmith.modeling.adapter import Adapter, LoraWeights
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.logprobs import Head, target_logprobs
from tinsmith.modeling.lora import LoraLinear
from tinsmith.modeling.parallel_ops import Peers, joined, own_part, replicated, shared_gradient, summed
from tinsmith.modeling.weight_parts import own_features

_COLWISE = ("colwise", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_split_input")
_FROZEN_COPY = ("replicated_with_grad_allreduce",)
"""Styles of norms over single heads. Every rank holds their whole weights, which are frozen and need no gradient."""
_ALTERNATIVE = "set tensor_parallel to 1; shard_base divides the memory of any model"


class CannotDivide(ValueError):
    """The model cannot be divided among the given number of ranks. The message says why, and what would work."""


@dataclass(slots=True)
class TensorParallel:
    """The division of the features of a model's layers among ranks."""

    peers: Peers
    styles: Mapping[str, str]
    """Style of each divided layer, by the layer's name."""
    _copied: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """The last input of a colwise layer, and its `replicated` form. All layers that read this input share the form, so
    that the gradient is summed over the ranks only once."""

    @classmethod
    def divide(cls, model: PreTrainedModel, active: ActiveRuns, peers: Peers, *, by_columns: bool) -> TensorParallel:
        """Replaces every layer in the model's plan by this rank's part of it. `by_columns`: see LoraLinear. Raises
        CannotDivide."""
        styles = _styles(model, peers.size, LoraLinear)
        parallel = cls(peers, styles)
        for name, style in styles.items():
            whole = model.get_submodule(name)
            assert isinstance(whole, LoraLinear)
            model.set_submodule(name, _Divided(whole, active, style, parallel, by_columns=by_columns))
            # The whole layer is in a reference cycle, so its parameters would stay until a garbage collection.
            whole._parameters.clear()
        return parallel

    def runs(self, runs: Sequence[Run]) -> list[Run]:
        """The runs with the parts of their adapters that this rank's layers need. The gradient of an adapter is the sum
        of the ranks' gradients."""
        return [replace(run, adapter=self._part(run), gradient=None) for run in runs]

    def _part(self, run: Run) -> Adapter:
        adapter = copy(run.adapter)
        adapter.weights = {name: self._weights(name, weights) for name, weights in run.adapter.weights.items()}
        return adapter

    def _weights(self, name: str, weights: LoraWeights) -> LoraWeights:
        style = self.styles.get(name)
        a_R_I, b_O_R = weights.a_R_I, weights.b_O_R
        if style in _COLWISE:
            return LoraWeights(a_R_I, b_O_R.chunk(self.peers.size, 0)[self.peers.rank])
        if style in _ROWWISE:
            return LoraWeights(a_R_I.chunk(self.peers.size, 1)[self.peers.rank], b_O_R)
        return LoraWeights(shared_gradient(a_R_I, self.peers), shared_gradient(b_O_R, self.peers))

    def target_logprobs(
        self, head: Head, hidden_T_H: Tensor, rows_M: Tensor, tokens_M: Tensor, runs: Sequence[Run]
    ) -> Tensor:
        """Computes logprobs.target_logprobs. The arguments must be equal on every rank. Each rank computes some of the
        rows."""
        first, last = (hidden_T_H.shape[0] * n // self.peers.size for n in (self.peers.rank, self.peers.rank + 1))
        named = slice(*torch.searchsorted(rows_M, torch.tensor([first, last])).tolist())
        logprobs_m = target_logprobs(
            head,
            replicated(hidden_T_H, self.peers)[first:last],
            rows_M[named] - first,
            tokens_M[named],
            [_clipped(run, first, last) for run in runs],
        )
        return summed(nn.functional.pad(logprobs_m, (named.start, rows_M.shape[0] - named.stop)), self.peers)

    def copied(self, x: Tensor) -> Tensor:
        """`replicated(x)`, which is made once for all layers that read x one after the other."""
        if self._copied is None or self._copied[0] is not x:
            self._copied = x, replicated(x, self.peers)
        return self._copied[1]

    def forget(self) -> None:
        """Drops the kept input, which belongs to the graph of one forward pass. To be called after each pass."""
        self._copied = None


class _Divided(LoraLinear):
    """This rank's part of an adapted layer."""

    def __init__(
        self, whole: LoraLinear, active: ActiveRuns, style: str, parallel: TensorParallel, *, by_columns: bool
    ) -> None:
        super().__init__(_part_of(whole, style, parallel.peers), whole.name, active, by_columns=by_columns)
        self._before, self._after = _around(style, parallel)
        # Every rank has the whole bias of a rowwise layer. It is added after the sum over ranks, so that it counts
        # once.
        self._late_bias = whole.bias if style in _ROWWISE else None

    def forward(self, x: Tensor) -> Tensor:
        y = self._after(super().forward(self._before(x)))
        return y if self._late_bias is None else y + self._late_bias


def _around(style: str, parallel: TensorParallel) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The functions that a layer of this style applies to its input and its output."""
    peers = parallel.peers
    match style:
        case "colwise":
            return parallel.copied, _same
        case "colwise_gather_output":
            return parallel.copied, partial(joined, peers=peers)
        case "rowwise":
            return _same, partial(summed, peers=peers)
        case _:
            return partial(own_part, peers=peers), partial(summed, peers=peers)


def _same(x: Tensor) -> Tensor:
    return x


def _part_of(whole: LoraLinear, style: str, peers: Peers) -> nn.Linear:
    axis = 0 if style in _COLWISE else 1
    weight = own_features(whole.weight, axis, peers)
    bias = None
    if whole.bias is not None and style in _COLWISE:
        bias = whole.bias.detach().chunk(peers.size)[peers.rank].clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias, requires_grad=False)
    return part


def _clipped(run: Run, first: int, last: int) -> Run:
    """The run's rows from `first` to `last`, counted from `first`. There may be none.

    A run without rows is not left out: a rank whose logprobs depend on no parameter could not take part in backward.
    """
    assert isinstance(run.rows, slice)
    start, stop = (min(max(row, first), last) - first for row in (run.rows.start, run.rows.stop))
    return Run(run.adapter, slice(start, stop))


def divided_axes(model: PreTrainedModel, size: int) -> dict[str, int]:
    """The axis along which each layer's weight is divided, by the layer's name. The layers of `model` must not be
    adapted yet. Raises CannotDivide."""
    return {name: 0 if style in _COLWISE else 1 for name, style in _styles(model, size, nn.Linear).items()}


def _styles(model: PreTrainedModel, size: int, kind: type[nn.Module]) -> dict[str, str]:
    """The style of each layer that is divided, by the layer's name. Raises CannotDivide if such a layer is not of class
    `kind`, or if `size` does not divide its features."""
    plan = _plan(model)
    _check_heads(model, plan, size)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = plan.get(_pattern(name))
        if style in (*_COLWISE, *_ROWWISE):
            if not isinstance(module, kind):
                raise CannotDivide(
                    f"tensor_parallel: {name} ({type(module).__name__}) is {style!r} in the plan of "
                    f"{type(model).__name__}, and only plain linear layers can be divided; {_ALTERNATIVE}"
                )
            features = module.get_parameter("weight").shape[0 if style in _COLWISE else 1]
            if features % size:
                raise CannotDivide(
                    f"tensor_parallel: {size} does not divide the {features} features of {name}; {_ALTERNATIVE}"
                )
            found[name] = style
    if not found:
        raise CannotDivide(f"tensor_parallel: the plan of {type(model).__name__} names no layer of it; {_ALTERNATIVE}")
    return found


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """The plan of the decoder, without the embedding and the output layer, which are not divided."""
    decoder = next(name for name, module in model.named_modules() if module is decoder_of(model))
    outside = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    kept = {_pattern(name) for name, module in model.named_modules() if id(module) in outside}
    plan = {
        pattern: style
        for pattern, style in (model.tp_plan or {}).items()
        if pattern.startswith(f"{decoder}.") and pattern not in kept
    }
    if not plan:
        raise CannotDivide(
            f"tensor_parallel: transformers has no plan (tp_plan) for {type(model).__name__}; {_ALTERNATIVE}"
        )
    for pattern, style in plan.items():
        if style not in (*_COLWISE, *_ROWWISE, *_FROZEN_COPY):
            raise CannotDivide(
                f"tensor_parallel: {pattern} is {style!r} in the plan of {type(model).__name__}; this trainer can do "
                f"{', '.join((*_COLWISE, *_ROWWISE))}; {_ALTERNATIVE}"
            )
    return plan


def _check_heads(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    """Raises CannotDivide if `size` does not divide the number of heads. The projections' outputs stay divided, so
    attention would get parts of heads."""
    if not any(style == "colwise" and "attn" in pattern for pattern, style in plan.items()):
        return
    config = model.config.get_text_config()
    for field_name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field_name, None)
        if heads is not None and heads % size:
            largest = max(n for n in range(1, size) if not heads % n)
            raise CannotDivide(
                f"tensor_parallel: {size} does not divide {field_name} {heads} of this model; {largest} does"
            )


def _pattern(name: str) -> str:
    """A module's name as plans write it, with * in place of the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
