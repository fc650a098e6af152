"""What the sampler needs of the cache beside attention."""

import pytest
import torch

from tinsmith.modeling.kv_cache import KVCache


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
