"""The index of the prefix cache and its blocks, with keys that are the tokens themselves."""

import numpy as np
import torch

from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS, PrefixCache, digests_of
from tinsmith.modeling.kv_cache import KVCache
from tinsmith.modeling.recurrent_cache import RecurrentCache

BYTES_PER_TOKEN = 32
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


def cache_of(num_blocks: int) -> PrefixCache:
    return PrefixCache(max_bytes=num_blocks * BLOCK_BYTES + 1, bytes_per_token=BYTES_PER_TOKEN)


def lanes(*rows: np.ndarray) -> KVCache:
    """One lane for each row of tokens; a value is its key's negative."""
    cache = KVCache()
    cache.reserve(len(rows), max(len(row) for row in rows))
    keys, values = cache.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    for lane, row in enumerate(rows):
        keys[lane, 0, : len(row), 0] = torch.from_numpy(row)
        values[lane] = -keys[lane]
    return cache


def tokens(*blocks: int) -> np.ndarray:
    """Each number names the content of a block."""
    return np.repeat(np.array(blocks, np.int32), BLOCK_TOKENS) * BLOCK_TOKENS + np.tile(
        np.arange(BLOCK_TOKENS, dtype=np.int32), len(blocks)
    )


def put(cache: PrefixCache, *blocks: int, namespace: int = 0) -> None:
    cache.put(namespace, digests_of(namespace, tokens(*blocks)), lanes(tokens(*blocks)), 0)


def found(cache: PrefixCache, *blocks: int, namespace: int = 0) -> int:
    """How many of the blocks are there, with their right content."""
    ids = cache.match(digests_of(namespace, tokens(*blocks)))
    if ids:
        out = KVCache()
        out.reserve(2, len(ids) * BLOCK_TOKENS)
        cache.load(out, 1, ids, len(ids) * BLOCK_TOKENS)
        wanted = torch.from_numpy(tokens(*blocks[: len(ids)])).float()
        assert torch.equal(out.keys[0][1, 0, :, 0], wanted)
        assert torch.equal(out.values[0][1, 0, :, 0], -wanted)
    return len(ids)


def test_digests_stand_for_everything_before_them_and_for_full_blocks_only() -> None:
    first = digests_of(0, tokens(1, 2, 3)[:-1])
    assert len(first) == 2
    assert digests_of(0, tokens(1, 2, 3))[:2] == first
    assert digests_of(0, tokens(1, 2, 3), first) == digests_of(0, tokens(1, 2, 3))
    assert len({*first, *digests_of(0, tokens(4, 2)), *digests_of(1, tokens(1, 2))}) == 6
    assert digests_of(0, tokens(1)[:-1]) == []


def test_a_salt_has_digests_of_its_own_whatever_its_bytes() -> None:
    salted = digests_of(0, tokens(1, 2), salt="s")
    assert digests_of(0, tokens(1, 2), salted[:1], salt="s") == salted
    assert len({*salted, *digests_of(0, tokens(1, 2)), *digests_of(0, tokens(1, 2), salt="t")}) == 6
    looks_like_a_block = tokens(1).astype("<i4").tobytes().decode()
    assert not {*digests_of(0, tokens(2), salt=looks_like_a_block)} & {*digests_of(0, tokens(1, 2))}


def test_the_longest_common_beginning_is_found() -> None:
    cache = cache_of(8)
    put(cache, 1, 2, 3)
    put(cache, 1, 2, 4, 5)
    assert cache.num_bytes == 5 * BLOCK_BYTES
    assert [found(cache, 1, 2, 3, 9), found(cache, 1, 2, 4, 5), found(cache, 1, 9), found(cache, 2)] == [3, 4, 1, 0]
    assert found(cache, 1, 2, namespace=1) == 0


def test_only_so_many_tokens_as_asked_are_loaded() -> None:
    cache = cache_of(8)
    put(cache, 1, 2)
    out = KVCache()
    out.reserve(1, BLOCK_TOKENS + 3)
    cache.load(out, 0, cache.match(digests_of(0, tokens(1, 2))), BLOCK_TOKENS + 1)
    assert torch.equal(out.keys[0][0, 0, :-2, 0], torch.from_numpy(tokens(1, 2)[: BLOCK_TOKENS + 1]).float())
    assert not out.keys[0][0, 0, -2:].any()


def test_the_least_recently_used_leaves_first_and_ends_before_beginnings() -> None:
    cache = cache_of(4)
    put(cache, 1, 2, 3)
    put(cache, 4)
    found(cache, 1, 2, 3)
    put(cache, 5)  # in the place of 4
    assert (found(cache, 4), found(cache, 1, 2, 3), found(cache, 5)) == (0, 3, 1)
    put(cache, 6)  # in the place of 3, the end of what was used least recently
    assert (found(cache, 1, 2, 3), found(cache, 5), found(cache, 6)) == (2, 1, 1)


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = cache_of(2)
    put(cache, 7)
    put(cache, 1, 2, 3)
    assert (found(cache, 1, 2, 3), found(cache, 7)) == (2, 0)


def test_a_forgotten_namespace_gives_its_room_back() -> None:
    cache = cache_of(4)
    put(cache, 1, 2, namespace=1)
    put(cache, 1, 2, namespace=2)
    cache.forget(1)
    cache.forget(3)
    assert (found(cache, 1, 2, namespace=1), found(cache, 1, 2, namespace=2)) == (0, 2)
    put(cache, 3, 4)
    assert found(cache, 1, 2, namespace=2) == 2
    cache.clear()
    assert cache.num_bytes == 0
    put(cache, 1, 2, 3, 4)
    assert found(cache, 1, 2, 3, 4) == 4


def test_no_room_at_all_is_off() -> None:
    assert not PrefixCache(max_bytes=BLOCK_BYTES - 1, bytes_per_token=BYTES_PER_TOKEN).enabled


LANE_BYTES = 2 * BLOCK_BYTES


def with_states(num_states: int) -> PrefixCache:
    """Room for so many states, and for twice as many blocks."""
    size = 2 * num_states * LANE_BYTES
    return PrefixCache(max_bytes=size, bytes_per_token=BYTES_PER_TOKEN, bytes_per_lane=LANE_BYTES)


def put_states(cache: PrefixCache, *blocks: int) -> None:
    """With the states after the last block, which are its number."""
    states = RecurrentCache(1, {("state", 0, 0): torch.full((1, 2), float(blocks[-1]))})
    cache.make_room(1)
    chain = digests_of(0, tokens(*blocks))
    cache.put(0, chain, lanes(tokens(*blocks)), 0, {len(blocks) * BLOCK_TOKENS: states})


def begun(cache: PrefixCache, *blocks: int) -> tuple[int, float]:
    """How many blocks a request with these tokens begins after, and the states that its lane gets."""
    ids = cache.up_to_states(cache.match(digests_of(0, tokens(*blocks))))
    if not ids:
        return 0, 0.0
    out = KVCache()
    out.reserve(2, len(ids) * BLOCK_TOKENS)
    cache.load(out, 1, ids, len(ids) * BLOCK_TOKENS)
    assert torch.equal(out.keys[0][1, 0, :, 0], torch.from_numpy(tokens(*blocks[: len(ids)])).float())
    assert not out.states.stores["state", 0, 0][0].any()
    return len(ids), out.states.stores["state", 0, 0][1, 0].item()


def test_a_request_begins_only_where_there_are_states() -> None:
    cache = with_states(4)
    put_states(cache, 1, 2)
    put_states(cache, 1, 2, 3, 4)
    assert begun(cache, 1, 2, 3, 4, 9) == (4, 4.0)
    assert begun(cache, 1, 2, 3, 9) == (2, 2.0)
    assert begun(cache, 1, 9) == (0, 0.0)
    assert cache.num_bytes == 4 * BLOCK_BYTES + 2 * LANE_BYTES


def test_the_states_used_least_recently_leave_for_others_and_their_blocks_stay() -> None:
    cache = with_states(2)
    put_states(cache, 1)
    put_states(cache, 2)
    assert begun(cache, 1) == (1, 1.0)
    put_states(cache, 3)
    assert [begun(cache, n) for n in (1, 2, 3)] == [(1, 1.0), (0, 0.0), (1, 3.0)]
    assert found(cache, 2) == 1
    cache.make_room(2)
    assert [begun(cache, n) for n in (1, 2, 3)] == [(0, 0.0)] * 3


def test_states_leave_with_their_block() -> None:
    cache = with_states(2)
    put_states(cache, 1)
    put(cache, 5, 6, 7, 8)  # all the room for blocks
    assert begun(cache, 1) == (0, 0.0)
    assert cache.num_bytes == 4 * BLOCK_BYTES
    put_states(cache, 5, 6)
    cache.forget(0)
    assert cache.num_bytes == 0
    put(cache, 5, 6)
    assert begun(cache, 5, 6) == (0, 0.0)


def test_content_is_right_and_no_block_is_lost_after_any_operations() -> None:
    random, cache = np.random.default_rng(0), cache_of(7)
    parents: dict[bytes, bytes | None] = {}
    for _ in range(300):
        blocks = random.integers(3, size=random.integers(1, 6)).tolist()
        namespace = int(random.integers(2))
        chain = digests_of(namespace, tokens(*blocks))
        parents.update(zip(chain, [None, *chain], strict=False))
        match random.integers(8):
            case 0:
                cache.forget(namespace)
                assert found(cache, *blocks, namespace=namespace) == 0
            case 1 | 2 | 3:
                found(cache, *blocks, namespace=namespace)
            case _:
                put(cache, *blocks, namespace=namespace)
                assert found(cache, *blocks, namespace=namespace) == len(blocks)
        held = set(cache._index)
        assert {parents[digest] for digest in held} - {None} <= held
        assert cache.num_bytes == len(held) * BLOCK_BYTES <= 7 * BLOCK_BYTES
