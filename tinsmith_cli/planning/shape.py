"""Sizes of a base model: its parameters, its layers that take adapters, its keys and values. families.py computes
them."""

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
    """Group of the layer; None if the layer takes no adapter, as a router."""
    num_experts: int = 0
    """Number of experts; 0 for a layer without experts."""
    shares: Literal["A", "B"] | None = None
    """Which of an adapter's A and B all experts share; None for a layer without experts."""
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
    """Sizes of a decoder layer."""

    matrices: Sequence[Matrix]
    others: int
    """Parameters outside of the matrices: norms, sinks."""
    kv_elements: int
    """Elements of the keys and values of a token."""
    widths: Widths
    """Features that the layer keeps for its backward pass."""

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices) + self.others


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of features that a layer keeps of each token for its backward pass, by kind."""

    queries: int
    """Features of all query heads."""
    keys: int
    """Features of all key heads; the value heads have as many."""
    inner: int
    """Inner features of the feed-forward layers that a token passes, of all experts of the token together."""
    num_pairs: int = 0
    """Number of experts of a token. Inputs and outputs are kept once for each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Sizes of a base model."""

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
    """Whether keys and values of all heads are one latent vector (multi-head latent attention)."""
    recurrent: bool = False
    """Whether layers carry a state from token to token."""
    state_heads: int = 0
    """Key heads of Gated DeltaNet's layers; 0 without such layers."""
    outside_more: int = 0
    """Number of further parameters, outside of the layers, the embedding, the last norm and the output layer, such as
    those of a tower."""
    tower: Sequence[Matrix] = ()
    """The linear layers of the vision tower that take adapters, in runs with train_vision. Their parameters are part of
    outside_more."""
    tower_parameters: int = 0
    """Number of parameters beside the language model: those of the towers for pictures and sound, and of the layers
    between towers and language model."""
    is_estimate: bool = False
    """Whether some of these sizes are estimates; `note` names them."""
    note: str = ""
    """A sentence about estimates or quantised files, for the user; empty if there is nothing to say."""

    @property
    def outside_parameters(self) -> int:
        """Number of parameters outside of the layers: embedding, last norm, output layer, and `outside_more`."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden + self.outside_more

    @property
    def layer_parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.outside_parameters

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters of the layers' matrices that take adapters, which are the ones that are quantised."""
        return sum(m.parameters for layer in self.layers for m in layer.matrices if m.group is not None)

    @property
    def targets(self) -> list[Matrix]:
        """Every matrix that takes an adapter, outside of the tower. The last one is the output layer."""
        found = [matrix for layer in self.layers for matrix in layer.matrices if matrix.group is not None]
        return [*found, Matrix(self.hidden, self.vocab, "unembed")]

    def adapter_elements(self, rank: int, *, vision: bool = False) -> int:
        """Elements of an adapter on all targets. `vision`: also on those of the tower."""
        return rank * sum(target.rank_elements for target in [*self.targets, *(self.tower if vision else ())])

    def slot_elements(self, rank: int) -> int:
        """Elements of a slot of vLLM, which does not include the output layer."""
        return rank * sum(target.slot_elements for target in self.targets[:-1])

    @property
    def kv_elements(self) -> int:
        return max(1, sum(layer.kv_elements for layer in self.layers))

    def divides(self, size: int) -> bool:
        """Whether vLLM can divide the attention among `size` GPUs: query heads evenly, and key heads evenly or, if they
        are few, with copies. Key heads of Gated DeltaNet must be divided evenly."""
        kv = self.latent or not self.kv_heads % size or not size % self.kv_heads
        return not self.heads % size and kv and not self.state_heads % size

    def kv_elements_of_each(self, size: int) -> int:
        """Elements of a token's keys and values on each of `size` GPUs that divide the model."""
        if self.latent:
            return self.kv_elements
        part = max(1, self.kv_heads // size)
        return -(-self.kv_elements * part // self.kv_heads)
