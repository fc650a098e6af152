"""A decode step that reads shared prompts once, against the same step without."""

from collections.abc import Sequence

import pytest
import torch

from tinsmith.modeling import kv_cache
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kv_cache import Cached, KVCache, SharedPrompts

SHARED, CAPACITY, NUM_LAYERS = 5, 16, 2
HEADS = Heads(scale=0.5)


def outputs(groups: Sequence[Sequence[int]], *, shared: bool) -> list[torch.Tensor]:
    """Outputs of three steps, each through two layers."""
    generator = torch.Generator().manual_seed(1)
    num_rows = sum(len(rows) for rows in groups)
    cache = KVCache()
    cache.reserve(num_rows, CAPACITY)
    for layer in range(NUM_LAYERS):
        for store in cache.layer(layer, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)):
            store.copy_(torch.randn(store.shape, generator=generator))
            for rows in groups:
                store[list(rows), :, :SHARED] = store[rows[0], :, :SHARED].clone()
    prompts = SharedPrompts.of(groups, SHARED, torch.device("cpu")) if shared else None
    positions_B = SHARED + torch.arange(num_rows) % 3
    out = []
    for step in range(3):
        layout = Cached(cache, positions_B + step, [], shared=prompts)
        for layer in range(NUM_LAYERS):
            q, k, v = (torch.randn(num_rows, heads, 4, generator=generator) for heads in (6, 2, 2))
            out.append(layout.attend(layer, q, k, v, HEADS))
    return out


@pytest.mark.parametrize("max_kept_bytes", [1 << 20, 0])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 4], [3, 2]]])
def test_a_step_with_shared_prompts_is_the_step_without(
    groups: list[list[int]], max_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "MAX_KEPT_BYTES", max_kept_bytes)
    for ours, plain in zip(outputs(groups, shared=True), outputs(groups, shared=False), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)
