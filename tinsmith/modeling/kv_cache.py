"""Keys and values of running generations, one lane for each generation, and the states of recurrent layers.

The running generations occupy lanes 0 .. n-1, so that a decode step reads the cache as one view, without gathering.
Code that frees a lane moves the last lane into its place. All lanes of a cache have the same capacity, which grows with
the longest generation. One forward pass can use several caches, for generations of very different lengths.

Shapes: S lanes, C capacity, B decoding rows, N query heads, K key/value heads, D head dimension, T packed tokens, L
keys, U groups of rows that share a prompt, M rows of the largest group, R query heads of a key/value head, P shared
keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from tinsmith.modeling.attention import Ahead, causal, masked
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.recurrent_cache import RecurrentCache

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Largest size of a contiguous copy of shared prompts that is kept, in bytes. Larger ones are gathered in every
step."""
_KEYS_OF_A_CALL = 64
"""Fixed cost of a call of attention on a CPU, as the number of keys that one row computes in the same time."""


@dataclass(slots=True)
class KVCache:
    """Keys and values by layer, [S, K, C, D] each. A layer's tensors are made when the layer first writes. A layer
    whose values are part of its keys has keys only."""

    num_lanes: int = 0
    capacity: int = 0
    """Tokens of each lane."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    states: RecurrentCache = field(default_factory=RecurrentCache)
    """States of the recurrent layers, in the same lanes, after all computed tokens of a lane."""
    whole: dict[int, Cache] = field(default_factory=dict)
    """transformers' caches by lane, for a model that runs one sequence at a time. The other fields are unused then."""
    generation: int = 0
    """A number that changes when the tensors are replaced by others."""

    def reserve(self, num_lanes: int, capacity: int) -> None:
        """Grows to at least `num_lanes` lanes of `capacity` tokens. Stored values stay."""
        if num_lanes <= self.num_lanes and capacity <= self.capacity:
            return
        self.resize(max(num_lanes, self.num_lanes), max(capacity, self.capacity))

    def resize(self, num_lanes: int, capacity: int) -> None:
        """Grows or shrinks to exactly this size. Stored values within both sizes stay."""
        self.num_lanes, self.capacity = num_lanes, capacity
        self.generation += 1
        self.states.resize(num_lanes)
        self.whole = {lane: one for lane, one in self.whole.items() if lane < num_lanes}
        for store in (self.keys, self.values):
            for layer, old in store.items():
                kept = old[:num_lanes, :, :capacity]
                lanes, tokens = kept.shape[0], kept.shape[2]
                new = store[layer] = old.new_empty(num_lanes, old.shape[1], capacity, old.shape[3])
                new[:lanes, :, :tokens] = kept
                # A masked key takes part in a product, and 0 * NaN would be NaN, so new memory must not hold NaN.
                new[:lanes, :, tokens:].zero_()
                new[lanes:].zero_()

    def clear(self) -> None:
        """Frees the memory. To be called while no generation runs."""
        self.num_lanes = self.capacity = 0
        self.generation += 1
        self.keys.clear()
        self.values.clear()
        self.states.clear()
        self.whole.clear()

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of the lane `source`, and its states, to the lane `target`. `source` is free
        from then on."""
        self.states.move(source, target)
        if source in self.whole:
            self.whole[target] = self.whole.pop(source)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def fork(self, source: int, targets: slice, length: int) -> None:
        """Copies the first `length` tokens of one lane, and its states, to a range of lanes that does not hold it."""
        self.states.fork(source, targets)
        if source in self.whole:
            self.whole.update((lane, deepcopy(self.whole[source])) for lane in range(targets.start, targets.stop))
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[targets, :, :length] = tensor[source, :, :length]

    def wipe(self, lane: int) -> None:
        """Fills a lane with zeros. Needed for a lane that may hold NaN, because a masked key takes part in a product,
        and 0 * NaN is NaN."""
        self.states.wipe(lane)
        self.whole.pop(lane, None)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[lane].zero_()

    def read(self, lane: int, length: int) -> KVCache:
        """A copy of the first `length` tokens of a lane, and of its states, as a cache of one lane."""
        copied = KVCache(1, length, states=self.states.read(lane))
        if lane in self.whole:
            copied.whole[0] = deepcopy(self.whole[lane])
        for store, copies in ((self.keys, copied.keys), (self.values, copied.values)):
            for layer, tensor in store.items():
                copies[layer] = tensor[lane : lane + 1, :, :length].clone()
        return copied

    def write(self, lane: int, copied: KVCache) -> None:
        """Writes a copy, which `read` of this or another cache returned, to the beginning of a lane."""
        self.states.write(lane, copied.states)
        if copied.whole:
            self.whole[lane] = copied.whole[0]
        for store, copies in ((self.keys, copied.keys), (self.values, copied.values)):
            for layer, one_1_K_T_D in copies.items():
                lanes_S_K_C_D = self.lanes_of(store, layer, one_1_K_T_D[0].transpose(0, 1))
                lanes_S_K_C_D[lane, :, : copied.capacity] = one_1_K_T_D[0]

    def num_bytes(self) -> int:
        """Bytes of keys, values and states."""
        of_tokens = sum(tensor.nbytes for store in (self.keys, self.values) for tensor in store.values())
        return of_tokens + self.states.num_bytes() + sum(map(_bytes_of, self.whole.values()))

    def layer(
        self, layer: int, k_T_K_D: Tensor, v_T_K_D: Tensor, *, values_in_keys: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, [S, K, C, D] each. Missing ones are made with the heads and types of the new
        keys and values `k_T_K_D` and `v_T_K_D`, whose head dimensions may differ. `values_in_keys`: see Heads; the
        returned values are then a view of the keys."""
        keys_S_K_C_D = self.lanes_of(self.keys, layer, k_T_K_D)
        if values_in_keys:
            return keys_S_K_C_D, keys_S_K_C_D[..., : v_T_K_D.shape[2]]
        return keys_S_K_C_D, self.lanes_of(self.values, layer, v_T_K_D)

    def lanes_of(self, store: dict[int, Tensor], layer: int, like_T_K_D: Tensor) -> Tensor:
        """The layer's lanes in `store`, which is `keys` or `values`: [S, K, C, D]. Missing lanes are made with the
        heads and type of `like_T_K_D`."""
        if layer not in store:
            num_heads, head_dim = like_T_K_D.shape[1:]
            store[layer] = like_T_K_D.new_zeros(self.num_lanes, num_heads, self.capacity, head_dim)
        return store[layer]


def _bytes_of(cache: Cache) -> int:
    """Bytes of the tensors in a cache of transformers."""
    return sum(_bytes_within(vars(layer).values()) for layer in cache.layers)


def _bytes_within(values: Iterable[Any]) -> int:
    tensors = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return tensors + sum(_bytes_within(value.values()) for value in values if isinstance(value, dict))


@dataclass(frozen=True, slots=True)
class Prefill:
    """`length` new tokens of one lane, after `start` tokens that are already stored."""

    lane: int
    start: int
    length: int
    states_after: RecurrentCache | None = None
    """Cache that gets a copy of the lane's states after these tokens. A later `Prefill` of the same pass may continue
    from them."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Groups of decoding rows whose first keys and values are equal, such as the samples of one request. A product for
    a whole group reads the shared keys only once. Every decoding row is in a group. Valid as long as the same rows
    run."""

    length: int
    """Number of keys that the rows of each group share."""
    rows_U_M: Tensor
    """int64: row numbers of each group. A smaller group repeats its first row."""
    places_B: Tensor
    """int64: position of each row in the flattened rows_U_M."""
    in_order: bool
    """Whether the groups are of equal size and follow each other in row order. If so, `together` and `apart` need no
    index."""
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Copies of the shared keys and values, by layer."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], length: int, device: torch.device) -> SharedPrompts:
        most = max(len(rows) for rows in groups)
        places = {row: n * most + m for n, rows in enumerate(groups) for m, row in enumerate(rows)}
        return cls(
            length=length,
            rows_U_M=torch.tensor([[*rows, *[rows[0]] * (most - len(rows))] for rows in groups], device=device),
            places_B=torch.tensor([places[row] for row in range(len(places))], device=device),
            in_order=len(places) == most * len(groups) and all(row == place for row, place in places.items()),
        )

    def together(self, x_B_K_R_X: Tensor) -> Tensor:
        """The rows of each group side by side: [U, K, M R, X]."""
        x_U_M_K_R_X = x_B_K_R_X.unflatten(0, self.rows_U_M.shape) if self.in_order else x_B_K_R_X[self.rows_U_M]
        return x_U_M_K_R_X.transpose(1, 2).flatten(2, 3)

    def apart(self, x_U_K_MR_X: Tensor) -> Tensor:
        """The inverse of `together`: [B, K, R, X]. If `in_order`, a view of [U, M, K, R, X], the shape of
        `like_apart`."""
        x_U_M_K_R_X = x_U_K_MR_X.unflatten(2, (self.rows_U_M.shape[1], -1)).transpose(1, 2)
        return x_U_M_K_R_X if self.in_order else x_U_M_K_R_X.flatten(0, 1)[self.places_B]

    def like_apart(self, x_B_K_R_X: Tensor) -> Tensor:
        """A view of x in the shape that `apart` returns."""
        return x_B_K_R_X.unflatten(0, self.rows_U_M.shape) if self.in_order else x_B_K_R_X

    def prompts(self, layer: int, keys_S_K_C_D: Tensor, values_S_K_C_D: Tensor) -> tuple[Tensor, Tensor]:
        """Shared keys and values of each group, [U, K, P, D] each. They are gathered at the first step, and kept as far
        as MAX_KEPT_BYTES allows."""
        kept = self._kept.get(layer)
        if kept is None:
            first_U = self.rows_U_M[:, 0]
            keys, values = (x[:, :, : self.length][first_U] for x in (keys_S_K_C_D, values_S_K_C_D))
            kept = keys, values
            if sum(x.nbytes for pair in [*self._kept.values(), kept] for x in pair) <= MAX_KEPT_BYTES:
                self._kept[layer] = kept
        return kept


@dataclass(slots=True)
class _RowRange:
    """Consecutive decoding rows whose attention is one call, over `num_keys` keys each."""

    start: int
    stop: int
    num_keys: int
    equal: bool = True
    """Whether every row has exactly `num_keys` keys, so that none is masked."""


def _row_ranges(lengths: Sequence[int], device: torch.device) -> list[_RowRange]:
    """Divides rows with these numbers of keys into ranges. A new range begins where another call of attention costs
    less than computing the keys that would be masked."""
    out: list[_RowRange] = []
    for row, length in enumerate(lengths):
        if out:
            last = out[-1]
            num_keys = max(last.num_keys, length)
            num_rows = row - last.start
            more = (num_rows + 1) * num_keys - num_rows * last.num_keys
            if device.type != "cpu" or more <= length + _KEYS_OF_A_CALL:
                last.equal = last.equal and length == last.num_keys
                last.stop, last.num_keys = row + 1, num_keys
                continue
        out.append(_RowRange(row, row + 1, length))
    return out


class Cached:
    """Layout of one forward pass over a cache: first one new token for each of the lanes 0 .. B-1, then pieces of
    prompts.

    `positions_B`: position of each decoding lane's new token, int64 [B]. `lanes_B`: the decoding lanes, int64 [B], if
    they are not the first B lanes; their keys and values are gathered. `shared`: prompts that the first B lanes share;
    ignored with `lanes_B`. `num_keys`: upper bound of the number of keys, with which the host need not wait for
    `positions_B`. `written_B`: for each row the row whose new keys and values it stores, at that row's place, int64
    [B]; so that rows after the last sequence change nothing.
    """

    def __init__(
        self,
        cache: KVCache,
        positions_B: Tensor,
        prefills: Sequence[Prefill],
        *,
        lanes_B: Tensor | None = None,
        shared: SharedPrompts | None = None,
        num_keys: int | None = None,
        written_B: Tensor | None = None,
    ) -> None:
        self.cache = cache
        self.positions_B = positions_B
        self.prefills = prefills
        self.num_decoding = positions_B.shape[0]
        if num_keys is None:
            lengths = [position + 1 for position in positions_B.tolist()]
            self.num_keys = max(lengths, default=0)
            self._ranges = _row_ranges(lengths, positions_B.device)
        else:
            self.num_keys = num_keys
            self._ranges = [_RowRange(0, self.num_decoding, num_keys, equal=False)]
        self._lanes_B = torch.arange(self.num_decoding, device=positions_B.device) if lanes_B is None else lanes_B
        self._written_B = written_B
        self.ahead: Ahead | None = None
        self._gathers = lanes_B is not None
        self._places_by_shape: dict[tuple[int, int], Tensor] = {}
        keys = torch.arange(self.num_keys, device=positions_B.device)
        self._mask_B_1_1_L = (keys <= positions_B[:, None])[:, None, None]
        self._keys = keys
        self._shared = None if self._gathers else shared
        # The bias is made once for all layers. From a boolean mask, attention would make it in every call.
        hidden = ~self._mask_B_1_1_L
        self._bias_B_1_1_L = torch.zeros(hidden.shape, device=positions_B.device).masked_fill_(hidden, float("-inf"))

    @property
    def parts(self) -> Sequence[Cached]:
        """The layouts of single caches, as of CachedTogether: this layout alone."""
        return [self]

    @property
    def lanes(self) -> slice | Tensor:
        """Lanes of the decoding rows, a slice or int64 [B]."""
        return self._lanes_B if self._gathers else slice(0, self.num_decoding)

    def with_ahead(self, ahead: Ahead | None) -> Cached:
        """This layout, in which the tokens of pictures also see later tokens. Each such picture must lie in one piece
        as a whole."""
        self.ahead = ahead
        return self

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        return attend_together([self], layer, q_T_N_D, k_T_K_D, v_T_K_D, heads, self.ahead)

    def decode(self, layer: int, q_B_N_D: Tensor, k_B_K_D: Tensor, v_B_K_D: Tensor, heads: Heads) -> Tensor:
        """Stores the new keys and values of the decoding rows. Returns their attention output, [B, N, D]."""
        stores = self.cache.layer(layer, k_B_K_D, v_B_K_D, values_in_keys=heads.values_in_keys)
        written = ((stores[0], k_B_K_D), (stores[1], v_B_K_D))
        for store_S_K_C_D, new_B_K_D in written[:1] if heads.values_in_keys else written:
            places = self._places(store_S_K_C_D)
            if self._written_B is not None:
                new_B_K_D = new_B_K_D[self._written_B]
            store_S_K_C_D.view(-1, store_S_K_C_D.shape[3])[places] = new_B_K_D.flatten(0, 1)
        return self._decode(layer, q_B_N_D, *stores, heads)

    def prefill(
        self,
        piece: Prefill,
        layer: int,
        q_T_N_D: Tensor,
        k_T_K_D: Tensor,
        v_T_K_D: Tensor,
        heads: Heads,
        numbers_T: Tensor | None = None,
    ) -> Tensor:
        """Stores the keys and values of a piece of a prompt. Returns its attention output, [T, N, D]. `numbers_T`: the
        rows of Ahead.numbers_T that belong to the piece; None if no token sees later ones."""
        keys_S_K_C_D, values_S_K_C_D = self.cache.layer(layer, k_T_K_D, v_T_K_D, values_in_keys=heads.values_in_keys)
        end = piece.start + piece.length
        lane = slice(piece.lane, piece.lane + 1)
        keys_S_K_C_D[piece.lane, :, piece.start : end] = k_T_K_D.transpose(0, 1)
        if not heads.values_in_keys:
            values_S_K_C_D[piece.lane, :, piece.start : end] = v_T_K_D.transpose(0, 1)
        q = q_T_N_D.transpose(0, 1)[None]
        numbers_L = None if numbers_T is None else pad(numbers_T, (piece.start, 0), value=-1)
        out = causal(q, keys_S_K_C_D[lane, :, :end], values_S_K_C_D[lane, :, :end], heads, numbers_L)
        return out[0].transpose(0, 1)

    def _places(self, store_S_K_C_D: Tensor) -> Tensor:
        """Positions of the new keys or values in the flattened cache, int64 [B K]. Writing by one index is faster than
        by two."""
        num_heads, capacity = store_S_K_C_D.shape[1:3]
        if (places := self._places_by_shape.get((num_heads, capacity))) is None:
            heads_K = torch.arange(num_heads, device=self.positions_B.device)
            lanes_B = self._lanes_B if self._written_B is None else self._written_B
            places = ((lanes_B[:, None] * num_heads + heads_K) * capacity + self.positions_B[:, None]).flatten()
            self._places_by_shape[num_heads, capacity] = places
        return places

    def _decode(
        self, layer: int, q_B_N_D: Tensor, keys_S_K_C_D: Tensor, values_S_K_C_D: Tensor, heads: Heads
    ) -> Tensor:
        plain = heads.softcap is None and heads.sinks_N is None
        if self._shared is not None and plain and heads.window is None:
            lanes = slice(0, self.num_decoding)
            return self._decode_shared(self._shared, layer, q_B_N_D, keys_S_K_C_D[lanes], values_S_K_C_D[lanes], heads)
        outputs = [self._decode_rows(one, q_B_N_D, keys_S_K_C_D, values_S_K_C_D, heads) for one in self._ranges]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _decode_rows(
        self, span: _RowRange, q_B_N_D: Tensor, keys_S_K_C_D: Tensor, values_S_K_C_D: Tensor, heads: Heads
    ) -> Tensor:
        rows = slice(span.start, span.stop)
        lanes = self._lanes_B[rows] if self._gathers else rows
        k, v = (store[:, :, : span.num_keys][lanes] for store in (keys_S_K_C_D, values_S_K_C_D))
        q = q_B_N_D[rows]
        plain = heads.softcap is None and heads.sinks_N is None
        # The query heads of one key/value head are rows of one product, so no key is repeated.
        q_B_K_R_D = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        if plain and heads.window is None:
            bias = None if span.equal else self._bias_B_1_1_L[rows, ..., : span.num_keys].to(q.dtype)
            return masked(q_B_K_R_D, k, v, heads, bias).reshape(*q.shape[:2], -1)
        mask = self._mask_B_1_1_L[rows, ..., : span.num_keys]
        if heads.window is not None:
            first_B = self.positions_B[rows, None] - heads.window
            mask = mask & (self._keys[: span.num_keys] > first_B)[:, None, None]
        if plain:
            return masked(q_B_K_R_D, k, v, heads, mask).reshape(*q.shape[:2], -1)
        return masked(q[:, :, None], k, v, heads, mask)[:, :, 0]

    def _decode_shared(
        self,
        shared: SharedPrompts,
        layer: int,
        q_B_N_D: Tensor,
        keys_B_K_C_D: Tensor,
        values_B_K_C_D: Tensor,
        heads: Heads,
    ) -> Tensor:
        """Attention of the decoding rows in two parts: to the keys that a group shares, and to each row's own keys."""
        keys_U_K_P_D, values_U_K_P_D = shared.prompts(layer, keys_B_K_C_D, values_B_K_C_D)
        prompt, own = slice(0, shared.length), slice(shared.length, self.num_keys)
        q_B_K_R_D = q_B_N_D.unflatten(1, (keys_B_K_C_D.shape[1], -1))
        of_prompt = shared.apart(shared.together(q_B_K_R_D) @ keys_U_K_P_D.transpose(-1, -2))
        of_own = q_B_K_R_D @ keys_B_K_C_D[:, :, own].transpose(-1, -2)
        # Scores are float32, as in attention elsewhere.
        scores = torch.empty(*q_B_K_R_D.shape[:3], self.num_keys, device=q_B_N_D.device)
        torch.mul(of_prompt.float(), heads.scale, out=shared.like_apart(scores[..., prompt]))
        torch.add(self._bias_B_1_1_L[..., own], of_own.float(), alpha=heads.scale, out=scores[..., own])
        weights_B_K_R_L = scores.softmax(-1).to(values_B_K_C_D.dtype)
        out_B_K_R_D = weights_B_K_R_L[..., own] @ values_B_K_C_D[:, :, own]
        of_prompt = shared.apart(shared.together(weights_B_K_R_L[..., prompt]) @ values_U_K_P_D)
        shared.like_apart(out_B_K_R_D).add_(of_prompt)
        return out_B_K_R_D.flatten(1, 2)


class CachedTogether:
    """Layout of one forward pass over several caches: first the decoding rows of all caches, then the pieces of prompts
    of all caches."""

    def __init__(self, parts: Sequence[Cached]) -> None:
        self.parts = parts
        self.ahead: Ahead | None = None

    def with_ahead(self, ahead: Ahead | None) -> CachedTogether:
        """See Cached.with_ahead."""
        self.ahead = ahead
        return self

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        return attend_together(self.parts, layer, q_T_N_D, k_T_K_D, v_T_K_D, heads, self.ahead)


def attend_together(
    parts: Sequence[Cached],
    layer: int,
    q_T_N_D: Tensor,
    k_T_K_D: Tensor,
    v_T_K_D: Tensor,
    heads: Heads,
    ahead: Ahead | None = None,
) -> Tensor:
    """Stores the new keys and values of all rows. Returns the attention output, [T, N, D], in the order of
    CachedTogether."""
    numbers_T = ahead.numbers_T if ahead is not None and ahead.concerns(heads) else None
    outputs, first = [], 0
    for part in parts:
        if part.num_decoding:
            rows = slice(first, first + part.num_decoding)
            first = rows.stop
            outputs.append(part.decode(layer, q_T_N_D[rows], k_T_K_D[rows], v_T_K_D[rows], heads))
    for part in parts:
        for piece in part.prefills:
            rows = slice(first, first + piece.length)
            first = rows.stop
            numbers = None if numbers_T is None else numbers_T[rows]
            outputs.append(part.prefill(piece, layer, q_T_N_D[rows], k_T_K_D[rows], v_T_K_D[rows], heads, numbers))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class KVBlocks:
    """Keys and values that outlive a generation, in numbered blocks of `block_tokens` tokens, apart from the lanes.

    A layer's tensors, [num_blocks, K, block_tokens, D], are made in full size when a block of the layer is first saved.
    On a CPU the system allocates their memory as blocks are written.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def save(self, cache: KVCache, lane: int, first: int, ids: Sequence[int]) -> None:
        """Copies blocks `first`, `first` + 1, ... of a lane to the blocks `ids`."""
        start, stop = first * self.block_tokens, (first + len(ids)) * self.block_tokens
        where = None
        for pools, store in ((self._keys, cache.keys), (self._values, cache.values)):
            for layer, lanes_S_K_C_D in store.items():
                lane_K_T_D = lanes_S_K_C_D[lane, :, start:stop]
                if layer not in pools:
                    num_heads, _, head_dim = lane_K_T_D.shape
                    pools[layer] = lane_K_T_D.new_empty(self.num_blocks, num_heads, self.block_tokens, head_dim)
                where = torch.tensor(ids, device=lane_K_T_D.device) if where is None else where
                pools[layer][where] = lane_K_T_D.unflatten(1, (-1, self.block_tokens)).transpose(0, 1)

    def load(self, cache: KVCache, lane: int, ids: Sequence[int], length: int) -> None:
        """Copies the first `length` tokens of the blocks `ids`, end to end, to the beginning of a lane."""
        where = None
        for pools, store in ((self._keys, cache.keys), (self._values, cache.values)):
            for layer, pool_n_K_t_D in pools.items():
                where = torch.tensor(ids, device=pool_n_K_t_D.device) if where is None else where
                lanes_S_K_C_D = cache.lanes_of(store, layer, pool_n_K_t_D[0].transpose(0, 1))
                blocks_K_T_D = pool_n_K_t_D[where].transpose(0, 1).flatten(1, 2)
                lanes_S_K_C_D[lane, :, :length] = blocks_K_T_D[:, :length]
