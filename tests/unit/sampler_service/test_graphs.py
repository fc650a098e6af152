"""Decode steps that are captured once and computed again, against the same steps without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sampler_service.core.request import Result
from sampler_service.torch_engine import graphs, runner
from sampler_service.torch_engine.graphs import MAX_GRAPHS, DecodeGraphs, DecodeStep, Replay
from tests.support.models import make_model
from tests.unit.sampler_service.full_versions import make_full
from tests.unit.sampler_service.serving import generate, make_adapter, prompt, serving
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kv_cache import KVCache

CPU = torch.device("cpu")


@dataclass
class Recorder:
    """A capture without CUDA: a replay calls the function again, which reads and writes the same tensors."""

    captured: int = 0
    replayed: int = 0

    def __call__(self, compute: Callable[[], None]) -> Replay:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            compute()

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Captures the steps of every engine of the test."""
    recorder = Recorder()
    monkeypatch.setattr(runner, "CudaCapture", lambda device: recorder)
    monkeypatch.setattr(runner, "why_no_graphs", lambda base: "")
    return recorder


async def drawn(folder: Path, **settings: Any) -> list[Result]:
    """Samples of requests of very different lengths, of the base model, two adapters and a full version, some one after
    the other."""
    async with serving(folder, **settings) as engine:
        for n in (1, 2):
            await engine.install(f"v{n}", make_adapter(engine.targets, seed=n))
        await engine.install("full", make_full(engine.base, seed=3))

        async def run(n: int) -> Result:
            tokens = prompt(5 + 7 * n, seed=n, vocab_size=256)
            version_id = ("", "v1", "v2", "full", "v1", "")[n]
            return await generate(
                engine, tokens, version_id=version_id, seed=n, num_samples=1 + n % 3, max_tokens=4 + 9 * n
            )

        alone = [await run(n) for n in range(6)]
        together = await asyncio.gather(*(run(n) for n in range(6)))
        return [*alone, *together]


@pytest.mark.parametrize("settings", [{}, {"max_kv_tokens": 600}], ids=["ample", "short of room"])
async def test_captured_steps_draw_what_others_draw(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path)
    plain = await drawn(folder, **settings)
    recorder = Recorder()
    monkeypatch.setattr(runner, "CudaCapture", lambda device: recorder)
    monkeypatch.setattr(runner, "why_no_graphs", lambda base: "")
    captured = await drawn(folder, **settings)
    assert recorder.replayed > 50
    assert recorder.captured < recorder.replayed / 3
    for ours, theirs in zip(captured, plain, strict=True):
        for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert mine.tokens == other.tokens
            np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=0, atol=2e-5)


async def test_a_version_that_is_gone_leaves_no_graph(tmp_path: Path, recorder: Recorder) -> None:
    async with serving(make_model(tmp_path)) as engine:
        await engine.install("v1", make_adapter(engine.targets, seed=1))
        await generate(engine, prompt(5, vocab_size=256), version_id="v1", max_tokens=20, seed=1)
        before = recorder.captured
        await generate(engine, prompt(5, vocab_size=256), version_id="v1", max_tokens=20, seed=1)
        assert recorder.captured == before
        engine.store.remove("v1")
        await engine.install("v1", make_adapter(engine.targets, seed=2))
        await generate(engine, prompt(5, vocab_size=256), version_id="v1", max_tokens=20, seed=1)
        assert recorder.captured == before + 1


async def test_a_step_that_cannot_be_captured_is_computed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model(tmp_path)
    async with serving(folder) as engine:
        plain = await generate(engine, prompt(5, vocab_size=256), max_tokens=20, seed=1)

    def capture(compute: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(runner, "CudaCapture", lambda device: capture)
    monkeypatch.setattr(runner, "why_no_graphs", lambda base: "")
    async with serving(folder) as engine:
        result = await generate(engine, prompt(5, vocab_size=256), max_tokens=20, seed=1)
    assert result.sequences[0].tokens == plain.sequences[0].tokens
    told = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert len(told) == 1
    assert "failed: operation not permitted when stream is capturing" in told[0]


async def test_a_capture_that_finds_no_memory_is_tried_again(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path)
    async with serving(folder) as engine:
        plain = await generate(engine, prompt(5, vocab_size=256), max_tokens=20, seed=1)
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def short_of_memory(compute: Callable[[], None]) -> Replay:
        if failures:
            raise failures.pop()
        return recorder(compute)

    monkeypatch.setattr(runner, "CudaCapture", lambda device: short_of_memory)
    async with serving(folder) as engine:
        before = recorder.captured
        result = await generate(engine, prompt(5, vocab_size=256), max_tokens=20, seed=1)
        assert not failures
        assert recorder.captured > before
    assert result.sequences[0].tokens == plain.sequences[0].tokens


class Steps:
    """Steps of three sequences over one cache."""

    def __init__(self, folder: Path) -> None:
        self.base = BaseModel.load(folder, device=CPU, dtype=torch.float32)
        self.recorder = Recorder()
        self.graphs = DecodeGraphs(self.base, self.recorder)
        self.cache = KVCache()
        self.cache.reserve(4, 512)

    @torch.inference_mode()
    def step(self, *, num_keys: int = 10, count: int = 3, runs: tuple[Run, ...] = ()) -> torch.Tensor | None:
        tokens_B = torch.arange(count) + 1
        positions_B = torch.full((count,), num_keys - 1)
        return self.graphs.logits(
            DecodeStep(self.cache, tokens_B, positions_B, positions_B, num_keys=num_keys, runs=runs, parameters=None)
        )

    def until_captured(self, **kind: Any) -> None:
        before = self.recorder.captured
        while self.step(**kind) is None:
            assert self.recorder.captured == before
        assert self.recorder.captured == before + 1


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(make_model(tmp_path))


def test_a_graph_serves_fewer_rows_and_more_keys(steps: Steps) -> None:
    steps.until_captured(count=4)
    assert steps.step(count=3, num_keys=200) is not None
    assert steps.recorder.captured == 1
    assert steps.step(count=2) is None
    assert steps.step(count=4, num_keys=300) is None


def test_sequences_that_are_not_running_keep_their_keys_and_values(steps: Steps) -> None:
    steps.until_captured(count=3)
    with torch.inference_mode():
        steps.cache.keys[0][3].fill_(7.0)
    assert steps.step(count=3) is not None
    assert (steps.cache.keys[0][3] == 7.0).all()


def test_a_cache_with_other_tensors_needs_another_graph(steps: Steps) -> None:
    steps.until_captured()
    steps.cache.reserve(8, 512)
    steps.step()
    assert steps.recorder.captured == 2
    steps.cache.clear()
    steps.cache.reserve(8, 512)
    steps.step()
    assert steps.recorder.captured == 3


def test_few_graphs_are_kept(steps: Steps) -> None:
    adapters = [make_adapter(steps.base.targets, seed=seed) for seed in range(MAX_GRAPHS + 1)]
    for adapter in adapters:
        steps.until_captured(runs=(Run(adapter, slice(0, 3)),))
    captured = steps.recorder.captured
    assert steps.step(runs=(Run(adapters[1], slice(0, 3)),)) is not None
    assert steps.recorder.captured == captured
    steps.until_captured(runs=(Run(adapters[0], slice(0, 3)),))


def test_many_adapters_are_not_captured(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_ADAPTERS", 1)
    runs = tuple(Run(make_adapter(steps.base.targets, seed=row), slice(row, row + 1)) for row in range(2))
    assert all(steps.step(runs=runs) is None for _ in range(5))


def test_a_model_on_a_cpu_is_not_captured(tmp_path: Path) -> None:
    base = BaseModel.load(make_model(tmp_path), device=CPU, dtype=torch.float32)
    assert "do not exist on cpu" in graphs.why_no_graphs(base)
