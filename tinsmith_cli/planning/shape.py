"""Sizes of a base model: parameters, layers that take adapters, keys and values. families.py computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Group = Literal["attn", "mlp", "unembed", "vision"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, or the same layer of all experts."""

    inputs: int
    outputs: int
    group: Group | None = None
    """None if it takes no adapter, as a router."""
    num_experts: int = 0
    """0 if it is no layer of experts."""
    shares: Literal["A", "B"] | None = None
    """The one of an adapter's A and B that all experts share."""
    bias: bool = False

    @property
    def parameters(self) -> int:
        return (self.inputs * self.outputs + self.outputs * self.bias) * (self.num_experts or 1)

    @property
    def rank_elements(self) -> int:
        """Elements of an adapter of rank 1."""
        experts = self.num_experts or 1
        a = self.inputs * (1 if self.shares == "A" else experts)
        return a + self.outputs * (1 if self.shares == "B" else experts)

    @property
    def slot_elements(self) -> int:
        """Elements of an adapter of rank 1 in a slot of vLLM, in which every expert has an A and a B."""
        return (self.inputs + self.outputs) * (self.num_experts or 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer."""

    matrices: Sequence[Matrix]
    others: int
    """Parameters outside of the matrices: norms, sinks."""
    kv_elements: int
    """Elements of the keys and values of a token."""
    widths: Widths

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices) + self.others


@dataclass(frozen=True, slots=True)
class Widths:
    """Features of a token that a layer keeps for its backward pass, by their place."""

    queries: int
    keys: int
    """Features of all key heads, which values have, too."""
    inner: int
    """Inner features of the feed-forward layers that a token passes, all experts of the token together."""
    num_pairs: int = 0
    """Experts of a token, whose inputs and outputs are kept once for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    family: str
    """`model_type` of config.json."""
    hidden: int
    vocab: int
    context: int
    """Longest sequence of the model, in tokens."""
    layers: Sequence[Layer]
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    heads: int
    kv_heads: int
    latent: bool = False
    """Whether keys and values are one latent vector for all heads."""
    recurrent: bool = False
    """Whether layers carry a state from token to token."""
    state_heads: int = 0
    """Key heads of Gated DeltaNet's layers; 0 without such layers."""
    outside_more: int = 0
    """Parameters beside the layers, the embedding, the last norm and the output layer, such as those of a tower."""
    tower: Sequence[Matrix] = ()
    """The linear layers of the vision tower that take adapters, in runs that ask for it; their parameters are part of
    outside_more."""
    tower_parameters: int = 0
    """All parameters of the towers for pictures and sound, and of what joins them to the language model."""
    is_estimate: bool = False
    """Whether some of these sizes are estimates, as `note` says."""
    note: str = ""

    @property
    def outside_parameters(self) -> int:
        """Parameters of the embedding, the last norm and the output layer."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden + self.outside_more

    @property
    def layer_parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.outside_parameters

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers' matrices that take adapters, which quantisation makes smaller."""
        return sum(m.parameters for layer in self.layers for m in layer.matrices if m.group is not None)

    @property
    def targets(self) -> list[Matrix]:
        """Every layer that takes an adapter."""
        found = [matrix for layer in self.layers for matrix in layer.matrices if matrix.group is not None]
        return [*found, Matrix(self.hidden, self.vocab, "unembed")]

    def adapter_elements(self, rank: int, *, vision: bool = False) -> int:
        """Parameters of an adapter of all layers; with `vision`, of those of the tower, too."""
        return rank * sum(target.rank_elements for target in [*self.targets, *(self.tower if vision else ())])

    def slot_elements(self, rank: int) -> int:
        """Elements of a slot of vLLM, which leaves out the output layer where the model shares it."""
        return rank * sum(target.slot_elements for target in self.targets[:-1])

    @property
    def kv_elements(self) -> int:
        return max(1, sum(layer.kv_elements for layer in self.layers))

    def divides(self, size: int) -> bool:
        """Whether vLLM can divide the attention among `size` GPUs: by whole heads, or with copies of few key heads.
        Heads of Gated DeltaNet are not copied."""
        kv = self.latent or not self.kv_heads % size or not size % self.kv_heads
        return not self.heads % size and kv and not self.state_heads % size

    def kv_elements_of_each(self, size: int) -> int:
        """Elements of a token's keys and values on each of `size` GPUs that divide the model."""
        if self.latent:
            return self.kv_elements
        part = max(1, self.kv_heads // size)
        return -(-self.kv_elements * part // self.kv_heads)
