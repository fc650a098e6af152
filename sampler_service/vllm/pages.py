"""Blocks of vLLM's cache for a model with recurrent layers, which keep a state for each sequence.

vLLM divides its memory into blocks of one size. The layers of each kind form groups of equal size, and a block holds
one page for each layer of a group: the keys and values of some tokens, or the state of a sequence. So a block has as
many tokens as make a page as large as a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from sampler_service.core.sequence import PASSING
from sampler_service.core.sizing import Sizes, kv_bytes_per_token
from tinsmith.modeling.kv_cache import KVCache

BLOCK_TOKENS = 32
"""Tokens of a block of a model without states. On a CPU vLLM needs a multiple of 32. With its default of 128, the
samples of one prompt would share little of the prompt."""
_STATES = 2
"""Number of states that a running sequence has in each layer: with a prefix cache, vLLM keeps the state of the last
block beside the newest state."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks on one device."""

    block_tokens: int
    block_bytes: int
    token_groups: int = 1
    """Number of groups of layers with keys and values. Each group needs blocks for all tokens."""
    state_groups: int = 0
    """Number of groups of layers with states."""

    @classmethod
    def of(cls, cache: KVCache, *, kv_part: Fraction, num_devices: int) -> Pages:
        """The blocks for a model. `cache`: a cache of one token of this model. `kv_part`: a device's share of keys and
        values. States are divided evenly."""
        token_bytes = ceil(kv_bytes_per_token(cache) * kv_part)
        state_layers = {layer for _, layer, _ in cache.states.stores}
        if not state_layers:
            return cls(BLOCK_TOKENS, BLOCK_TOKENS * token_bytes)
        token_layers = len(cache.keys)
        if not token_layers:
            raise ValueError("no layer keeps keys and values, by which vLLM's blocks are sized")
        state_bytes = max(_state_bytes(cache, layer) for layer in state_layers)
        step = BLOCK_TOKENS * ceil(token_bytes / token_layers)
        steps = ceil(state_bytes / num_devices / step)
        fewest, most = sorted((token_layers, len(state_layers)))
        size = most if most < 1.5 * fewest else fewest  # vLLM's rule for the layers of a group
        return cls(BLOCK_TOKENS * steps, step * steps * size, ceil(token_layers / size), ceil(len(state_layers) / size))

    @property
    def bytes_per_lane(self) -> int:
        """Bytes that a running sequence takes beside its tokens: those of its states, and those that its newest blocks
        do not use yet."""
        return self.block_bytes * (_STATES * self.state_groups + self.token_groups) if self.state_groups else 0

    def cache_bytes(self, sizes: Sizes) -> int:
        """Bytes of a cache of these sizes."""
        tokens = -(-sizes.max_kv_tokens // self.block_tokens) * self.token_groups
        lanes = sizes.max_running + PASSING
        more = -(-(sizes.prefix_cache_bytes + lanes * self.bytes_per_lane) // self.block_bytes)
        return (tokens + more + 2) * self.block_bytes  # one block is vLLM's own, and one more may be begun

    def most_running(self, sizes: Sizes, wanted: int) -> int:
        """Most sequences that run at once: the `wanted` ones, unless their states have no room in such a cache. vLLM
        lends a sequence all blocks that others do not use."""
        if not self.state_groups:
            return wanted
        return max(sizes.max_running, min(wanted, self.cache_bytes(sizes) // self.bytes_per_lane - PASSING))


def _state_bytes(cache: KVCache, layer: int) -> int:
    """Bytes of a layer's states of one sequence. vLLM keeps them in float32 or in a smaller type."""
    return sum(
        store.numel() * max(4, store.itemsize) if kind == "state" else store.nbytes
        for (kind, number, _), store in cache.states.stores.items()
        if number == layer
    )
