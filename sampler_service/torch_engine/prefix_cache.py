"""Keys and values of what was computed before, for requests that begin with the same tokens.

Tokens are cut into blocks. A block's digest covers its tokens and the digest of the block before it, so it stands for
all tokens up to its end. The first block's parent is the namespace, one for each version, with the request's salt, so
that nothing is found of requests with another one. A request copies the longest chain of blocks that it finds into its
lane, and a chain is copied out when a prompt or a generation is complete: lanes stay contiguous, and nothing that is
running ever depends on a block that is evicted.

A request that uses a block also uses the blocks before it, and those count as used later. So the least recently used
block is always the last one of its chain, and what is left is never out of reach."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sampler_service.core.request import Ints
from tinsmith.modeling.kv_cache import KVBlocks, KVCache

BLOCK_TOKENS = 16


def digests_of(namespace: int, tokens: Ints, known: Sequence[bytes] = (), *, salt: str = "") -> list[bytes]:
    """Digests of the full blocks of `tokens`; `known` are those of its first ones."""
    digests = list(known)
    digest = digests[-1] if digests else _root(namespace, salt)
    data = memoryview(tokens.astype("<i4").tobytes())
    size = 4 * BLOCK_TOKENS
    for start in range(len(digests) * size, len(data) - size + 1, size):
        # 128 bits, and not Python's hash(): nobody can find other tokens that meet another tenant's block.
        digest = blake2b(data[start : start + size], key=digest, digest_size=16).digest()
        digests.append(digest)
    return digests


def _root(namespace: int, salt: str) -> bytes:
    # `person` sets it apart from the digest of a block whose tokens have the salt's bytes.
    return blake2b(salt.encode(), key=namespace.to_bytes(16, "little"), digest_size=16, person=b"salt").digest()


@dataclass(frozen=True, slots=True)
class _Block:
    id: int
    namespace: int


class PrefixCache:
    """Belongs to the compute thread."""

    def __init__(self, *, max_bytes: int, bytes_per_token: int) -> None:
        self._block_bytes = BLOCK_TOKENS * bytes_per_token
        num_blocks = max_bytes // self._block_bytes
        self._blocks = KVBlocks(num_blocks, BLOCK_TOKENS)
        self._index: OrderedDict[bytes, _Block] = OrderedDict()
        """Least recently used first."""
        self._namespaces: dict[int, set[bytes]] = {}
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def enabled(self) -> bool:
        return self._blocks.num_blocks > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are filled."""
        return len(self._index) * self._block_bytes

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest chain that is there; they count as used."""
        found = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block.id)
        for digest in reversed(digests[: len(found)]):
            self._index.move_to_end(digest)
        return found

    def load(self, cache: KVCache, lane: int, ids: Sequence[int], length: int) -> None:
        """Copies `length` tokens of matched blocks into a lane; before anything else is put."""
        self._blocks.load(cache, lane, ids, length)

    def put(self, namespace: int, digests: Sequence[bytes], cache: KVCache, lane: int) -> None:
        """Copies what is new of a lane's blocks out of it, the first of them if not all have room."""
        chain = digests[: self._blocks.num_blocks]
        num_old = len(self.match(chain))
        new = chain[num_old:]
        if new:
            # The chain's own blocks have just been used, and others hold all the room that is missing.
            while len(self._free) < len(new):
                self._drop(next(iter(self._index)))
            ids = self._free[-len(new) :]
            self._blocks.save(cache, lane, num_old, ids)
            del self._free[-len(new) :]
            mine = self._namespaces.setdefault(namespace, set())
            for digest, block_id in zip(reversed(new), reversed(ids), strict=True):
                self._index[digest] = _Block(block_id, namespace)
                mine.add(digest)
            for digest in reversed(chain[:num_old]):
                self._index.move_to_end(digest)

    def forget(self, namespace: int) -> None:
        """Drops what belongs to a version that is gone."""
        for digest in list(self._namespaces.get(namespace, ())):
            self._drop(digest)

    def clear(self) -> None:
        for digest in list(self._index):
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        block = self._index.pop(digest)
        self._free.append(block.id)
        mine = self._namespaces[block.namespace]
        mine.discard(digest)
        if not mine:
            del self._namespaces[block.namespace]
