"""Chooses the replica of a sampler for a request. Pure functions: no clock, no network.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), over rendezvous hashing: a key ranks
all replicas, and its requests go to the first one whose load is below a factor of the mean. So requests with one key
share a prefix cache as long as that does not overload a replica. When a replica leaves, only its own keys move, each to
its next choice; they move back when the replica returns.

A key stands for a conversation: a prompt gets the key of an earlier prompt that it continues or repeats. Prompts that
only begin alike, mostly with the same system prompt, are separate conversations, since all replicas soon hold that
beginning. As an exception, such a prompt joins the replica of its beginning while that replica is idle.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache

BLOCK_TOKENS = 16
"""Block size of the samplers' prefix caches, in tokens."""
_MAX_PROMPTS = 65536
"""Most prompts that are remembered."""
_ODD = np.frombuffer(secrets.token_bytes(8 * (BLOCK_TOKENS + 2)), np.uint64) | np.uint64(1)
"""Random odd factors of the hashes of prompts."""


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """All names, ranked by the key. The order of two names does not depend on the other names."""
    return sorted(names, key=lambda name: blake2b(name.encode(), key=key, digest_size=8).digest(), reverse=True)


def choose(key: bytes, loads: Mapping[str, float], *, weight: float, factor: float) -> str:
    """The first of the key's replicas whose load is below `factor` times the mean load.

    The mean counts the new request's `weight`, too. `loads` must not be empty. `factor` must be at least 1, so that the
    least loaded replica is always below the bound.
    """
    bound = factor * (sum(loads.values()) + weight) / len(loads)
    return next(name for name in ranked(key, loads) if loads[name] < bound)


class Conversations:
    """Finds the keys of prompts, and remembers the latest prompts."""

    def __init__(self, *, max_prompts: int = _MAX_PROMPTS) -> None:
        self._keys: LRUCache[int, bytes] = LRUCache(max_prompts)
        """Hash of a prompt up to its last full block -> key."""

    def key(self, namespace: str, tokens: bytes, *, is_idle: Callable[[bytes], bool]) -> bytes:
        """The key of a prompt.

        `namespace`: the version and the owner's salt; only within it prompts share a cache. `tokens`: int32, as bytes.
        `is_idle`: whether the first replica of a key has no work.
        """
        prefixes = _prefix_hashes(namespace, tokens)
        known = next((prefix for prefix in reversed(prefixes) if prefix in self._keys), None)
        if known is not None:
            key = self._keys[known]
        else:
            opening = _digest(namespace, tokens[: 4 * BLOCK_TOKENS])
            key = opening if is_idle(opening) else _digest(namespace, tokens)
        self._keys[prefixes[-1]] = key
        return key


def _prefix_hashes(namespace: str, tokens: bytes) -> list[int]:
    """Hashes of the prompt up to the end of each full block; of the whole prompt when it has no full block."""
    values = np.frombuffer(tokens, "<u4").astype(np.uint64)
    blocks = values[: len(values) // BLOCK_TOKENS * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS)
    if not len(blocks):
        return [hash((namespace, tokens))]
    mixed = (blocks * _ODD[:BLOCK_TOKENS]).sum(1)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _ODD[-2]
    places = np.full(len(blocks), _ODD[-1]).cumprod()
    start = np.uint64(hash(namespace) & (2**64 - 1))
    return (start + (mixed * places).cumsum()).tolist()


def _digest(namespace: str, tokens: bytes) -> bytes:
    """A digest that is the same in all gateways."""
    return blake2b(tokens, key=blake2b(namespace.encode(), digest_size=16).digest(), digest_size=16).digest()
