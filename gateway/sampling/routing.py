"""Which replica of a sampler gets a request. Pure: no clock, no network.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), over rendezvous hashing: a key ranks
all replicas, and its requests go to the first of them whose load is below a factor of the mean. So what shares a key
shares a prefix cache while that costs nobody much; when a replica leaves, only its own keys move, each to its next
choice, and they come back with it.

A key stands for a conversation: a prompt that continues an earlier one has that one's key, and so has the same prompt
again. Other prompts that begin alike, mostly with the same system prompt, are conversations of their own, because all
replicas soon hold what they share; only while the replica that has it is idle do they join it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 16
"""As the samplers' prefix caches cut prompts."""
_MAX_PROMPTS = 65536
_ODD = np.frombuffer(secrets.token_bytes(8 * (BLOCK_TOKENS + 2)), np.uint64) | np.uint64(1)


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """All names, in an order that depends on the key, and for two names on nothing else."""
    return sorted(names, key=lambda name: blake2b(name.encode(), key=key, digest_size=8).digest(), reverse=True)


def choose(key: bytes, loads: Mapping[str, float], *, weight: float, factor: float) -> str:
    """The first of the key's replicas whose load is below `factor` times the mean, with the new request's `weight` in
    it. `loads` is not empty; `factor` is at least 1, so that the least loaded one always is."""
    bound = factor * (sum(loads.values()) + weight) / len(loads)
    return next(name for name in ranked(key, loads) if loads[name] < bound)


class Conversations:
    """Keys of prompts. The latest prompts are remembered."""

    def __init__(self, *, max_prompts: int = _MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._keys: OrderedDict[int, bytes] = OrderedDict()
        """By the hash of everything up to a prompt's last full block; the latest used last."""

    def key(self, namespace: str, tokens: bytes, *, is_idle: Callable[[bytes], bool]) -> bytes:
        """`namespace`: what shares keys and values, a version and an owner's salt. `tokens`: int32. `is_idle`: whether
        the first choice of a key has nothing to do."""
        prefixes = _prefix_hashes(namespace, tokens)
        known = next((prefix for prefix in reversed(prefixes) if prefix in self._keys), None)
        if known is not None:
            key = self._keys[known]
            self._keys.move_to_end(known)
        else:
            opening = _digest(namespace, tokens[: 4 * BLOCK_TOKENS])
            key = opening if is_idle(opening) else _digest(namespace, tokens)
        self._keys[prefixes[-1]] = key
        self._keys.move_to_end(prefixes[-1])
        if len(self._keys) > self._max_prompts:
            self._keys.popitem(last=False)
        return key


def _prefix_hashes(namespace: str, tokens: bytes) -> list[int]:
    """Of everything up to the end of each full block; of all of it when there is none."""
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
    """Two gateways agree on it."""
    return blake2b(tokens, key=blake2b(namespace.encode(), digest_size=16).digest(), digest_size=16).digest()
