"""States of recurrent layers, one lane for each running generation, beside the lanes of keys and values (kv_cache.py).

A layer of transformers that carries a state has a window of the newest inputs of its convolution, the state of its
recurrence, or both. It reads and writes them by the methods of transformers' `Cache`, which `LaneStates` offers.

Shapes: S lanes, B sequences, T tokens of each, C channels, W inputs in a convolution's window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, cat
from torch.nn.functional import pad

Kind = Literal["window", "state"]
Key = tuple[Kind, int, int]
"""Kind, number of the layer, and number of the state among those of its kind in the layer."""


@dataclass(slots=True)
class RecurrentCache:
    """Windows [S, C, W] and states [S, ...] of all layers. A tensor is made when its layer first writes."""

    num_lanes: int = 0
    stores: dict[Key, Tensor] = field(default_factory=dict)

    def resize(self, num_lanes: int) -> None:
        """Grows or shrinks to exactly this number of lanes. States of lanes within both numbers stay."""
        self.num_lanes = num_lanes
        for key, old in self.stores.items():
            if old.shape[0] != num_lanes:
                new = self.stores[key] = _zeros(key, num_lanes, old)
                kept = old[:num_lanes]
                new[: kept.shape[0]] = kept

    def clear(self) -> None:
        """Frees the memory. To be called while no generation runs."""
        self.num_lanes = 0
        self.stores.clear()

    def move(self, source: int, target: int) -> None:
        for store in self.stores.values():
            store[target] = store[source]

    def fork(self, source: int, targets: slice) -> None:
        """Copies a lane to a range of lanes that does not hold it."""
        for store in self.stores.values():
            store[targets] = store[source]

    def wipe(self, lane: int) -> None:
        for store in self.stores.values():
            store[lane].zero_()

    def read(self, lane: int) -> RecurrentCache:
        """A copy of a lane, as a cache of one lane."""
        return RecurrentCache(1, {key: store[lane : lane + 1].clone() for key, store in self.stores.items()})

    def write(self, lane: int, copied: RecurrentCache) -> None:
        """Writes a copy, which `read` of this or another cache returned, to a lane."""
        for key, one in copied.stores.items():
            self.store(key, one)[lane] = one[0]

    def num_bytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def store(self, key: Key, like: Tensor) -> Tensor:
        """The tensor of all lanes. If there is none, it is made with the type of `like` [B, ...], and with the shape of
        `like` after the first dimension."""
        if key not in self.stores:
            self.stores[key] = _zeros(key, self.num_lanes, like)
        return self.stores[key]


def _zeros(key: Key, num_lanes: int, like: Tensor) -> Tensor:
    """Zeros [num_lanes, ...], with the type of `like` [B, ...] and its other dimensions. In a window, the channels of
    one input lie next to each other in memory, because causal_conv_step reads them so."""
    if key[0] == "window":
        return like.new_zeros(num_lanes, like.shape[2], like.shape[1]).transpose(1, 2)
    return like.new_zeros(num_lanes, *like.shape[1:])


class LaneStates:
    """The states of the B sequences that a layer computes in one call, in the order of the rows. To the layer it is a
    `Cache` of transformers."""

    def __init__(
        self, cache: RecurrentCache, lanes: slice | Tensor, *, begun: bool, copy: RecurrentCache | None = None
    ) -> None:
        """`lanes`: the lanes of the sequences, a slice or int64 [B]. `begun`: whether the sequences have states; if
        not, the layers begin anew, whatever the lanes hold. `copy`: cache that gets a copy of the states after this
        call; for a single sequence only."""
        self.begun = begun
        self._cache = cache
        self._lanes = lanes
        self._copy = copy
        self._uncopied: set[Key] = set()
        """Keys of the states that the layer has read or written since `end_layer`."""
        self._copies: dict[Key, Tensor] = {}
        """Copies of the states if the lanes are not a slice. A layer may change the copies in place."""

    def read(self, key: Key) -> Tensor | None:
        """The states [B, ...]; None if there are none. The layer may change them in place, and `keep` stores them."""
        store = self._cache.stores.get(key)
        if store is None or not self.begun:
            return None
        self._uncopied.add(key)
        if isinstance(self._lanes, slice):
            return store[self._lanes]
        if key not in self._copies:
            self._copies[key] = store[self._lanes]
        return self._copies[key]

    def write(self, key: Key, value: Tensor) -> None:
        store = self._cache.store(key, value)
        self._uncopied.add(key)
        self._copies.pop(key, None)
        if not isinstance(self._lanes, slice) or value.data_ptr() != store[self._lanes].data_ptr():
            store[self._lanes] = value  # otherwise the layer has changed the lanes in place

    def keep(self) -> None:
        """Stores the copies of states that a layer has changed in place. To be called after each call of a layer."""
        for key, value in self._copies.items():
            self._cache.stores[key][self._lanes] = value
        self._copies.clear()

    def end_layer(self) -> None:
        """Copies the layer's states to `copy`, if it is given. To be called when the layer has computed all tokens."""
        if self._copy is not None:
            for key in self._uncopied:
                self._copy.stores[key] = self._cache.stores[key][self._lanes].clone()
        self._uncopied.clear()

    # The methods that layers of transformers call, under its names.

    @property
    def layers(self) -> LaneStates:
        return self

    def __getitem__(self, layer_idx: int) -> _LayerStates:
        return _LayerStates(self, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.begun

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Adds new inputs [B, C, T] to the window. Returns the window's earlier inputs and the new ones, [B, C, W + T].
        If there were no earlier inputs, zeros precede the new ones up to the length W."""
        key: Key = ("window", layer_idx, state_idx)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        earlier = self.read(key)
        if earlier is not None:
            whole = cat([earlier, conv_states], -1)
        else:
            whole = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.write(key, whole[..., -size:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.write(("state", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for the state of its lightning attention."""
        return self.read(("state", layer_idx, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.write(("state", layer_idx, 0), linear_cache)


@dataclass(frozen=True, slots=True)
class _LayerStates:
    """The states of one layer: an element of the `layers` of transformers' `Cache`."""

    lanes: LaneStates
    layer_idx: int

    record_past: ClassVar[bool] = False
    """transformers' name for a layer that can be cut back, for speculative decoding."""

    @property
    def conv_states(self) -> _Numbered:
        return _Numbered(self.lanes, "window", self.layer_idx)

    @property
    def recurrent_states(self) -> _Numbered:
        return _Numbered(self.lanes, "state", self.layer_idx)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The windows or the states of one layer, by their numbers."""

    lanes: LaneStates
    kind: Kind
    layer_idx: int

    def __getitem__(self, state_idx: int) -> Tensor | None:
        return self.lanes.read((self.kind, self.layer_idx, state_idx))
