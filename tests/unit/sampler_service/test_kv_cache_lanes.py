"""Operations on the cache that the sampler needs beside attention."""

import pytest
import torch

from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kv_cache import Cached, KVCache


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache()
    cache.reserve(4, 8)
    keys, values = cache.layer(0, torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))
    keys.copy_(torch.randn(keys.shape))
    values.copy_(torch.randn(values.shape))
    return cache


def test_resizing_keeps_what_lies_within_both_sizes(cache: KVCache) -> None:
    before = cache.keys[0].clone()
    cache.resize(2, 16)
    assert cache.keys[0].shape == (2, 2, 16, 3)
    assert torch.equal(cache.keys[0][:, :, :8], before[:2])
    assert not cache.keys[0][:, :, 8:].any()
    cache.resize(3, 4)
    assert torch.equal(cache.keys[0][:2], before[:2, :, :4])


def test_forking_copies_a_prefix_to_a_range_of_lanes(cache: KVCache) -> None:
    before = cache.values[0].clone()
    cache.fork(0, slice(1, 3), 5)
    for lane in (1, 2):
        assert torch.equal(cache.values[0][lane, :, :5], before[0, :, :5])
        assert torch.equal(cache.values[0][lane, :, 5:], before[lane, :, 5:])
    assert torch.equal(cache.values[0][3], before[3])


def test_wiping_leaves_zeros(cache: KVCache) -> None:
    cache.keys[0][2] = float("nan")
    cache.wipe(2)
    assert not cache.keys[0][2].any()
    assert cache.keys[0][3].any()


@pytest.mark.parametrize("lanes", [None, [3, 0, 2]])
@pytest.mark.parametrize("window", [None, 7])
def test_rows_of_very_different_lengths_are_each_the_row_alone(lanes: list[int] | None, window: int | None) -> None:
    lengths = [3, 700, 20, 21]
    rows = list(range(4)) if lanes is None else lanes
    cache = KVCache()
    cache.reserve(4, 1024)
    keys, values = cache.layer(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    keys.copy_(torch.randn(keys.shape))
    values.copy_(torch.randn(values.shape))
    q, k, v = (torch.randn(len(rows), heads, 4) for heads in (6, 2, 2))
    positions_B = torch.tensor([lengths[row] - 1 for row in rows])
    lanes_B = None if lanes is None else torch.tensor(lanes)
    heads = Heads(scale=0.5, window=window)
    together = Cached(cache, positions_B, [], lanes_B=lanes_B).attend(0, q, k, v, heads)
    for n, row in enumerate(rows):
        layout = Cached(cache, positions_B[n : n + 1], [], lanes_B=torch.tensor([row]))
        alone = layout.attend(0, q[n : n + 1], k[n : n + 1], v[n : n + 1], heads)
        torch.testing.assert_close(together[n], alone[0], atol=1e-6, rtol=0)
        length = lengths[row]
        first = 0 if window is None else max(0, length - window)
        mine = torch.nn.functional.scaled_dot_product_attention(
            q[n, :, None], keys[row, :, first:length], values[row, :, first:length], scale=0.5, enable_gqa=True
        )
        torch.testing.assert_close(together[n], mine[:, 0], atol=1e-6, rtol=0)
