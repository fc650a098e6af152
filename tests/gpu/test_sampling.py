"""The sampler's torch engine on CUDA: its tokens are the CPU's, and its logprobs those of the trainer's pass.

python -m pytest -m gpu tests/gpu/test_sampling.py -rs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sampler_service.core.request import Result
from sampler_service.torch_engine import runner
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.graphs import CudaCapture, Replay
from tests.gpu.device import DEVICE, MARKS, ONLY_CUDA
from tests.support.models import make_model, make_recurrent_model, make_sparse_model
from tests.unit.sampler_service.serving import generate, make_adapter, prompt, serving
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs

pytestmark = MARKS

families = pytest.mark.parametrize("make", [make_recurrent_model, make_model])
TIE = 1e-3
"""Two tokens are a tie if their logprobs differ by less. The rounding errors of two devices then choose."""


def tokens_of(length: int, seed: int) -> Any:
    return prompt(length, seed=seed, vocab_size=256)


async def install(engine: TorchEngine) -> Adapter:
    """Installs an adapter as version "v1", and returns a copy in host memory."""
    adapter = make_adapter(engine.targets, seed=1)
    await engine.install("v1", adapter.like(adapter.flat.clone()))
    return adapter


async def greedy(folder: Path, device: str) -> list[Result]:
    """Continuations of three prompts by the base model and by an adapter, all in one batch."""
    async with serving(folder, device=device, dtype="float32") as engine:
        await install(engine)
        asked = [(version, tokens_of(length, length)) for length in (5, 17, 40) for version in ("", "v1")]
        wanted = {"max_tokens": 12, "temperature": 0.0, "topk_sample_logprobs": 2}
        return await asyncio.gather(*(generate(engine, one, version_id=version, **wanted) for version, one in asked))


@families
async def test_greedy_tokens_are_the_cpus(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    results = [await greedy(folder, device) for device in (DEVICE.type, "cpu")]
    for result, reference in zip(*results, strict=True):
        (ours,), (theirs,) = result.sequences, reference.sequences
        assert theirs.topk is not None
        first, second = theirs.topk.logprobs.T
        ties = np.flatnonzero(first - second < TIE)
        count = ties[0] if len(ties) else len(theirs.tokens)  # after a tie the two may go on differently
        assert count >= 4
        assert ours.tokens[:count] == theirs.tokens[:count]
        np.testing.assert_allclose(ours.logprobs[:count], theirs.logprobs[:count], rtol=0, atol=3e-4)


@ONLY_CUDA
@pytest.mark.parametrize(("make", "dtype"), [(make_model, "float32"), (make_sparse_model, "bfloat16")])
async def test_captured_steps_draw_what_others_draw(
    make: Callable[[Path], Path], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of the base model and of an adapter, some of which end long before the others. Grouped products of
    float32 make the host wait, so that steps of experts are captured in bfloat16 only."""
    folder = make(tmp_path)
    replayed = 0

    async def drawn() -> list[Result]:
        async with serving(folder, device=DEVICE.type, dtype=dtype) as engine:
            await install(engine)
            asked = [(version, tokens_of(5 + n, n), n) for n in range(4) for version in ("", "v1")]
            return await asyncio.gather(
                *(
                    generate(engine, tokens, version_id=version, seed=n, num_samples=3, max_tokens=20 + 20 * n)
                    for version, tokens, n in asked
                )
            )

    def counted(capture: CudaCapture, compute: Callable[[], None]) -> Replay:
        replay = own(capture, compute)

        def replaying() -> None:
            nonlocal replayed
            replayed += 1
            replay()

        return replaying

    own = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", counted)
    captured = await drawn()
    assert replayed > 40
    monkeypatch.setattr(runner, "why_no_graphs", lambda _: "to be compared")
    before = replayed
    plain = await drawn()
    assert replayed == before
    pairs = [
        pair
        for ours, theirs in zip(captured, plain, strict=True)
        for pair in zip(ours.sequences, theirs.sequences, strict=True)
    ]
    if dtype == "float32":
        for mine, other in pairs:
            assert mine.tokens == other.tokens
            np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=0, atol=1e-4)
    else:  # rounding decides some draws, after which two sequences go on differently
        gaps = [
            abs(mine.logprobs[n] - other.logprobs[n]) for mine, other in pairs for n in _until_they_part(mine, other)
        ]
        assert len(gaps) > 100
        assert np.median(gaps) <= 0.03


def _until_they_part(mine: Any, other: Any) -> range:
    same = np.asarray(mine.tokens) == np.asarray(other.tokens)
    return range(len(same) if same.all() else int(np.argmin(same)))


def trained(base: BaseModel, drawn: Sequence[tuple[Any, Adapter | None, Result]]) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of prompts and samples: those that the sampler has given, and those of the trainer, in one packed pass.
    `drawn`: prompt, adapter and result of each request. Requests of one adapter follow each other."""
    rows: list[torch.Tensor] = []
    runs: dict[Adapter, list[int]] = {}
    sampled = []
    for asked, adapter, result in drawn:
        known = result.prompt.logprobs  # None of a prompt that was in the cache
        of_prompt = np.full(len(asked) - 1, np.nan) if known is None else known[1:]
        for sequence in result.sequences:
            start = sum(len(row) - 1 for row in rows)
            rows.append(torch.tensor(np.concatenate([asked, sequence.tokens]).astype(np.int64)))
            sampled.append(np.concatenate([of_prompt, sequence.logprobs]))
            if adapter is not None:
                runs.setdefault(adapter, [start])[1:] = [start + len(rows[-1]) - 1]
    lengths = [len(row) - 1 for row in rows]
    tokens, targets = torch.cat([row[:-1] for row in rows]), torch.cat([row[1:] for row in rows])
    tenants = [
        Run(adapter.like(adapter.flat.to(base.device)), slice(start, stop)) for adapter, (start, stop) in runs.items()
    ]
    with torch.no_grad():
        positions = positions_of(lengths, base.device)
        hidden = base.hidden_states(tokens.to(base.device), positions, Packed(lengths), tenants)
        logprobs = target_logprobs(base.head, hidden, torch.arange(len(tokens)), targets, tenants)
    given = np.concatenate(sampled)
    is_given = ~np.isnan(given)
    return given[is_given], logprobs.cpu().numpy()[is_given]


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
async def test_the_sampler_is_the_trainer(make: Callable[[Path], Path], dtype: torch.dtype, tmp_path: Path) -> None:
    """Several samples of one prompt, of the base model and of an adapter, and then of longer prompts with that
    beginning, which is in the prefix cache."""
    folder = make(tmp_path)
    base = BaseModel.load(folder, device=DEVICE, dtype=dtype)
    beginning = tokens_of(48, 1)
    longer = [np.concatenate([beginning, tokens_of(9, seed)]) for seed in (2, 3)]
    wanted = {"num_samples": 3, "max_tokens": 9}
    async with serving(
        folder, device=DEVICE.type, dtype=str(dtype).removeprefix("torch."), prefix_cache_bytes=1 << 24
    ) as engine:
        adapter = await install(engine)
        drawn: list[tuple[Any, Adapter | None, Result]] = []
        for version_id, own in (("", None), ("v1", adapter)):
            first = await generate(engine, beginning, version_id=version_id, seed=1, prompt_logprobs=True, **wanted)
            more = await asyncio.gather(
                *(generate(engine, one, version_id=version_id, seed=n, **wanted) for n, one in enumerate(longer))
            )
            assert all(result.prompt_cache_hit_tokens >= 32 for result in more)
            drawn.append((beginning, own, first))
            drawn += [(one, own, result) for one, result in zip(longer, more, strict=True)]
    assert len({tuple(sequence.tokens) for sequence in drawn[0][2].sequences}) == 3
    sampled, scored = trained(base, drawn)
    gaps = np.abs(sampled - scored)
    if dtype == torch.float32:
        assert gaps.max() <= 1e-4
    else:
        assert np.median(gaps) <= 0.03
        assert np.quantile(gaps, 0.9) <= 0.1
