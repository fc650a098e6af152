"""Keys, values and states of the running sequences, in lanes, and of earlier prompts and outputs, in the prefix cache.
Lanes and prefix cache belong to the compute thread."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from sampler_service.core.request import Ints
from sampler_service.core.sequence import Sequence
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.planner import Piece
from sampler_service.torch_engine.waiting import Job
from tinsmith.modeling.kv_cache import KVBlocks, KVCache
from tinsmith.modeling.recurrent_cache import RecurrentCache
from tinsmith.modeling.tower import PlacedPicture

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Tokens of a block of the prefix cache."""
_RECORD_BYTES = 400
"""Size of a block's record in the index, in bytes. Models without attention have blocks of nothing else."""
_MAX_BLOCKS = 2**20
IDLE_CACHE_BYTES = 64 * 1024 * 1024
"""Larger lanes are given back when nothing runs."""


def digests_of(
    namespace: int, tokens: Ints, known: Iterable[bytes] = (), *, salt: str = "", pictures: Iterable[PlacedPicture] = ()
) -> list[bytes]:
    """Digests of the full blocks of `tokens`. `known`: digests of the first blocks. The digest of a block with tokens
    of `pictures` covers the pictures, too."""
    digests = list(known)
    digest = digests[-1] if digests else _root(namespace, salt)
    data = memoryview(tokens.astype("<i4").tobytes())
    size = 4 * BLOCK_TOKENS
    for start in range(len(digests) * size, len(data) - size + 1, size):
        # The digest has 128 bits, instead of Python's hash(), so that nobody can find tokens with the digest of another
        # tenant's block.
        block = data[start : start + size]
        first, stop = start // 4, start // 4 + BLOCK_TOKENS
        for one in pictures:
            if one.start < stop and one.start + one.picture.num_tokens > first:
                # Blocks without pictures have one size, so that no tokens can be taken for a picture.
                block = bytes(block) + one.picture.digest + (one.start - first).to_bytes(8, "little", signed=True)
        digest = blake2b(block, key=digest, digest_size=16).digest()
        digests.append(digest)
    return digests


def _root(namespace: int, salt: str) -> bytes:
    # `person` distinguishes the root from the digest of a block whose tokens have the salt's bytes.
    return blake2b(salt.encode(), key=namespace.to_bytes(16, "little"), digest_size=16, person=b"salt").digest()


@dataclass(frozen=True, slots=True)
class _Block:
    id: int
    namespace: int


class PrefixCache:
    """Keys and values of what was computed before, for requests that begin with the same tokens.

    Tokens are cut into blocks. A block's digest covers its tokens and the digest of the block before it, so it stands
    for all tokens up to its end. The first block's parent is the namespace, one for each version, with the request's
    salt, so that nothing is found of requests with another one. A request copies the longest chain of blocks that it
    finds into its lane, and a chain is copied out when a prompt or a generation is complete: lanes stay contiguous, and
    nothing that is running ever depends on a block that is evicted.

    A request that uses a block also uses the blocks before it, and those count as used later. So the least recently
    used block is always the last one of its chain, and what is left is never out of reach.

    A state of recurrent layers stands for all tokens before it, and cannot be joined from blocks. With such layers,
    some blocks have the states after their last token, and a request can begin only there. States leave with their
    block, or before it when others need their room."""

    def __init__(self, *, max_bytes: int, bytes_per_token: int, bytes_per_lane: int = 0) -> None:
        """`bytes_per_lane`: bytes of a sequence's states, 0 without recurrent layers. States get half of
        `max_bytes`."""
        self._block_bytes = max(BLOCK_TOKENS * bytes_per_token, _RECORD_BYTES)
        self._bytes_per_lane = bytes_per_lane
        self.max_states = max_bytes // 2 // bytes_per_lane if bytes_per_lane else 0
        """Most states, including those that running passes are filling."""
        num_blocks = min((max_bytes - self.max_states * bytes_per_lane) // self._block_bytes, _MAX_BLOCKS)
        if bytes_per_lane and not self.max_states:
            num_blocks = 0
        self._blocks = KVBlocks(num_blocks, BLOCK_TOKENS)
        self._states: OrderedDict[int, RecurrentCache] = OrderedDict()
        """States by the number of the block after whose last token they are; least recently used first."""
        self._index: OrderedDict[bytes, _Block] = OrderedDict()
        """Least recently used first."""
        self._namespaces: dict[int, set[bytes]] = {}
        self._free: list[int] = []
        self._unused = range(num_blocks)
        """Numbers of free blocks that were never filled. A range, because a list of a million numbers takes 40 MB."""

    @property
    def enabled(self) -> bool:
        return self._blocks.num_blocks > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are filled, and of their states."""
        return len(self._index) * self._block_bytes + len(self._states) * self._bytes_per_lane

    def match(self, digests: list[bytes]) -> list[int]:
        """Numbers of the blocks of the longest cached chain. These blocks count as used now."""
        found = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block.id)
        for digest in reversed(digests[: len(found)]):
            self._index.move_to_end(digest)
        return found

    def has_states(self, block_id: int) -> bool:
        return block_id in self._states

    def up_to_states(self, ids: list[int]) -> list[int]:
        """The first of these blocks, up to the last one with states. These states count as used now."""
        count = len(ids)
        while count and ids[count - 1] not in self._states:
            count -= 1
        if count:
            self._states.move_to_end(ids[count - 1])
        return ids[:count]

    def load(self, cache: KVCache, lane: int, ids: list[int], length: int) -> None:
        """Copies `length` tokens of matched blocks into a lane, and the last block's states. Must be called before the
        next `put`, which may evict the blocks."""
        self._blocks.load(cache, lane, ids, length)
        if (states := self._states.get(ids[-1])) is not None:
            cache.states.write(lane, states)

    def make_room(self, num_states: int) -> None:
        """Drops states until there is room for `num_states` new ones, at most `max_states`."""
        while len(self._states) + num_states > self.max_states:
            self._states.popitem(last=False)

    def put(
        self,
        namespace: int,
        digests: list[bytes],
        cache: KVCache,
        lane: int,
        states: Mapping[int, RecurrentCache] | None = None,
    ) -> None:
        """Copies those of a lane's blocks that are not cached yet. If not all fit, the first ones are copied. `states`:
        states of recurrent layers, by the number of tokens before them; there must be room for these states."""
        chain = digests[: self._blocks.num_blocks]
        num_old = len(self.match(chain))
        new = chain[num_old:]
        if new:
            fresh = self._unused[: max(0, len(new) - len(self._free))]
            self._unused = self._unused[len(fresh) :]
            self._free += fresh
            # The chain's own blocks have just been used, so the least recently used blocks belong to others.
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
        for num_tokens, one in (states or {}).items():
            if num_tokens <= len(chain) * BLOCK_TOKENS:
                block_id = self._index[chain[num_tokens // BLOCK_TOKENS - 1]].id
                self._states[block_id] = one
                self._states.move_to_end(block_id)

    def forget(self, namespace: int) -> None:
        """Drops the blocks of a version that is gone."""
        for digest in list(self._namespaces.get(namespace, ())):
            self._drop(digest)

    def clear(self) -> None:
        for digest in list(self._index):
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        block = self._index.pop(digest)
        self._free.append(block.id)
        self._states.pop(block.id, None)
        mine = self._namespaces[block.namespace]
        mine.discard(digest)
        if not mine:
            del self._namespaces[block.namespace]


@dataclass(slots=True)
class Wanted:
    """Numbers of lanes and tokens that one cache must hold."""

    lanes: int = 0
    tokens: int = 0
    """Number of tokens of the longest lane in this step."""
    promised: int = 0
    """Number of tokens to which the longest lane may grow."""

    def add(self, lanes: int, tokens: int, promised: int) -> None:
        self.lanes += lanes
        self.tokens = max(self.tokens, tokens)
        self.promised = max(self.promised, promised, tokens)


class KVCacheManager:
    def __init__(
        self,
        *,
        max_lanes: int,
        max_tokens: int,
        bytes_per_token: int,
        prefix_bytes: int,
        bytes_per_lane: int,
        metrics: SamplerMetrics,
    ) -> None:
        """`max_tokens`: most tokens of all caches together; a cache counts its lanes times the tokens of one lane.
        `prefix_bytes`: size of the prefix cache, 0 for none. `bytes_per_lane`: bytes of the states of recurrent layers,
        0 without such layers."""
        self.caches: defaultdict[int, KVCache] = defaultdict(KVCache)
        """The caches, by the size of their sequences (planner.py)."""
        self.prefixes = PrefixCache(
            max_bytes=prefix_bytes, bytes_per_token=bytes_per_token, bytes_per_lane=bytes_per_lane
        )
        if prefix_bytes and bytes_per_lane and not self.prefixes.enabled:
            logger.warning(
                "no prefix cache: half of prefix_cache_bytes (%d) is less than the states of one sequence, %d bytes",
                prefix_bytes,
                bytes_per_lane,
            )
        self._max_lanes = max_lanes
        self._max_tokens = max_tokens
        self._bytes_per_token = bytes_per_token
        self._metrics = metrics
        metrics.cache.limit_bytes.set(max_tokens * bytes_per_token)
        metrics.cache.prefix_limit_bytes.set(prefix_bytes)

    def fit(self, wanted: Mapping[int, Wanted]) -> None:
        """Resizes the caches so that each has room for what is wanted. A cache without room doubles. Near the bound
        each cache takes what is promised, which the scheduler keeps within the bound."""
        grown: dict[int, tuple[int, int]] = {}
        for size, want in wanted.items():
            cache = self.caches[size]
            if want.lanes > cache.num_lanes or want.tokens > cache.capacity:
                more_lanes = max(cache.num_lanes, min(power_of_two(want.lanes), self._max_lanes))
                grown[size] = more_lanes, max(cache.capacity, power_of_two(want.tokens))
        if not grown:
            return
        others = sum(cache.num_lanes * cache.capacity for size, cache in self.caches.items() if size not in grown)
        if others + sum(lanes * tokens for lanes, tokens in grown.values()) > self._max_tokens:
            grown = {size: (want.lanes, want.promised) for size, want in wanted.items()}
            for size in self.caches.keys() - wanted.keys():
                self.caches[size].clear()
        # Shrinking caches are resized first, so that the bound holds in between.
        for size, (lanes, tokens) in sorted(grown.items(), key=lambda item: item[1][0] * item[1][1]):
            self.caches[size].resize(lanes, tokens)

    def place(self, job: Job, first: int, count: int) -> None:
        """Copies a prompt to `count` lanes from `first` on. `first` is the prompt's own lane or lies below."""
        below = slice(first, min(job.lane, first + count))
        above = slice(job.lane + 1, first + count)
        for lanes in (below, above):
            if lanes.start < lanes.stop:
                self.caches[job.size].fork(job.lane, lanes, job.length)

    def clear(self) -> None:
        """Drops all keys and values. Called after a step that broke off, because some of them may be half written."""
        self._clear_caches()
        self.prefixes.clear()

    def _clear_caches(self) -> None:
        for cache in self.caches.values():
            cache.clear()

    def _num_bytes(self) -> int:
        return sum(cache.num_bytes() for cache in self.caches.values())

    def observe(self, *, running_tokens: int, idle: bool) -> None:
        """Updates the metrics after each step. `running_tokens`: tokens of the running sequences, including prompts."""
        self._metrics.cache.used_bytes.set(running_tokens * self._bytes_per_token)
        self._metrics.cache.allocated_bytes.set(self._num_bytes())
        self._metrics.cache.prefix_bytes.set(self.prefixes.num_bytes)
        if idle and self._num_bytes() > IDLE_CACHE_BYTES:
            self._clear_caches()

    def reuse(self, job: Job) -> int:
        """Number of a job's tokens that need not be computed, because the prefix cache has them. Tokens from the first
        scored row on are computed, and so is the last token, which gives the first draw."""
        if not self.prefixes.enabled:
            return 0
        group = job.group
        most = job.length - 1
        if job.scored and group.scorer is not None:
            most = min(most, group.scorer.first_row)
        digests = _digests(job.sequences[0])
        if self.prefixes.max_states:
            tokens = self._reuse_with_states(job, digests, most)
        else:
            num_blocks = -(-most // BLOCK_TOKENS)
            job.blocks = self.prefixes.match(digests[:num_blocks]) if most else []
            tokens = min(most, len(job.blocks) * BLOCK_TOKENS)
            for one in group.request.pictures:
                tokens = one.whole(tokens)
        self._metrics.cache.prefix_lookups.inc()
        self._metrics.cache.prefix_hits.inc(tokens > 0)
        self._metrics.cache.prefix_hit_tokens.inc(tokens)
        return tokens

    def _reuse_with_states(self, job: Job, digests: list[bytes], most: int) -> int:
        """Like `reuse`, but up to a block with states, and at most `most` tokens. Asks the job for states at the last
        block border at which a request with the same tokens can begin, and at the border where its tokens part from
        other requests' tokens."""
        last = (job.length - 1) // BLOCK_TOKENS
        chain = self.prefixes.match(digests[:last])
        job.blocks = self.prefixes.up_to_states(chain[: most // BLOCK_TOKENS])
        wanted = {last, len(chain)}
        if chain and self.prefixes.has_states(chain[-1]):
            wanted.discard(len(chain))
        job.borders = [number * BLOCK_TOKENS for number in sorted(wanted) if number > len(job.blocks)]
        return len(job.blocks) * BLOCK_TOKENS

    def want_states(self, pieces: list[Piece]) -> None:
        """Lets the next pass copy states at the block borders within its pieces, as many as the prefix cache can
        hold."""
        room = self.prefixes.max_states - sum(len(piece.job.states) for piece in pieces)
        for piece in pieces:
            for border in piece.job.borders:
                if piece.start < border <= piece.stop and room > 0:
                    piece.job.states[border] = RecurrentCache(1)
                    room -= 1
        self.prefixes.make_room(sum(len(piece.job.states) for piece in pieces))

    def load(self, piece: Piece) -> None:
        """Copies a job's reused tokens into its lane, before the job's first piece is computed."""
        job = piece.job
        if job.blocks:
            self.prefixes.load(self.caches[job.size], job.lane, job.blocks, piece.start)
            job.blocks = []

    def remember(self, sequence: Sequence, lane: int, states: Mapping[int, RecurrentCache] | None = None) -> None:
        """Puts the computed tokens of a sequence into the prefix cache, before its lane is given away or shared. Tokens
        of more than one version are not put there, because no request may find them. `states`: as in
        PrefixCache.put."""
        if self.prefixes.enabled and not sequence.mixed:
            cache = self.caches[sequence.size]
            self.prefixes.put(sequence.namespace, _digests(sequence), cache, lane, states)


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _digests(sequence: Sequence) -> list[bytes]:
    """Digests of the full blocks of a sequence's tokens, without the newest token, whose keys and values are not
    computed yet."""
    group = sequence.group
    namespace, salt, pictures = sequence.namespace, group.request.cache_salt, group.request.pictures
    prompt = group.prompt_digests.get(namespace)
    if prompt is None:
        prompt = group.prompt_digests[namespace] = digests_of(
            namespace, group.request.prompt, salt=salt, pictures=pictures
        )
    if not sequence.tokens:
        return prompt
    return digests_of(namespace, sequence.all_tokens()[:-1], prompt, salt=salt, pictures=pictures)
