"""Models whose layers carry a state from token to token, and models that run one sequence at a time: the sampler gives
what the trainer computes, however its steps cut prompts and mix requests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor
from transformers import AutoModelForCausalLM

from sampler_service.config import SamplerConfig
from sampler_service.core import sizing
from sampler_service.core.request import Result
from sampler_service.core.sequence import PASSING
from sampler_service.core.sizing import Sizes
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.scheduler import Scheduler
from tests.support.parameters import fast_ones
from tests.unit.modeling.test_families import MORE, ONE_BY_ONE, RECURRENT, make
from tests.unit.sampler_service.full_versions import make_full
from tests.unit.sampler_service.serving import (
    alone_and_interrupted,
    generate,
    make_adapter,
    prompt,
    request,
    serving,
)
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

SETTINGS = {**RECURRENT, **{family: settings for family, (settings, _) in ONE_BY_ONE.items()}, **MORE}
# With two heads, or an adapter of rank 1, many scores of its indexer are 0, and which of equal scores are the highest
# depends on their number. So more heads, and sequences that are dense in the warm-up and sparse in the tests.
SETTINGS["GlmMoeDsa"] = {**SETTINGS["GlmMoeDsa"], "index_n_heads": 16, "index_topk": 32}
OF_EACH_KIND = ("Mamba", "Mamba2", "NemotronH", "MiniMax", "KimiLinear", "Lfm2", "Qwen3_5Text", "Bloom", "GlmMoeDsa")
"""Every kind of layer that carries a state; the slow tests have families that put the same kinds together otherwise."""
FAMILIES = fast_ones((*RECURRENT, *ONE_BY_ONE, "FalconMamba", "Lfm2Moe"), OF_EACH_KIND)


def family_folder(folder: Path, family: str) -> Path:
    return make(folder / family, family, SETTINGS[family])


def tokens_of(length: int, seed: int) -> Any:
    return prompt(length, seed=seed, vocab_size=256)


def check(base: BaseModel, drawn: Sequence[tuple[Adapter | None, Any, Result]]) -> None:
    """The logprobs of the prompts and of the samples are the trainer's, which computes all sequences of all adapters in
    one packed pass. `drawn`: adapter, prompt and result of each request."""
    rows: list[Tensor] = []
    mine, lengths, runs = [], [], []
    for adapter, asked, result in sorted(drawn, key=lambda each: id(each[0])):
        assert result.prompt.logprobs is not None
        for sequence in result.sequences:
            rows.append(torch.tensor(np.concatenate([asked, sequence.tokens]).astype(np.int64)))
            mine.append(np.concatenate([result.prompt.logprobs[1:], sequence.logprobs]))
            if adapter is not None:
                runs.append(Run(adapter, slice(sum(lengths), sum(lengths) + len(rows[-1]) - 1)))
            lengths.append(len(rows[-1]) - 1)
    with torch.no_grad():
        tokens, targets = torch.cat([row[:-1] for row in rows]), torch.cat([row[1:] for row in rows])
        hidden = base.hidden_states(tokens, positions_of(lengths, base.device), Packed(lengths), runs)
        trained = target_logprobs(base.head, hidden, torch.arange(len(tokens)), targets, runs).split(lengths)
    for one, other in zip(mine, trained, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-4)


def greedy_of_transformers(folder: Path, tokens: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    answer = model.generate(
        torch.tensor(tokens[None], dtype=torch.int64),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(tokens) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_sampler_is_transformers_and_the_trainer(family: str, tmp_path: Path) -> None:
    """Greedy tokens of the base model equal those of transformers. Logprobs equal the trainer's: of prompts of several
    lengths, computed in pieces beside running sequences, of two adapters and of the base model; their samples go on
    from one prompt."""
    folder = family_folder(tmp_path, family)
    greedy = tokens_of(9, 1)
    expected = greedy_of_transformers(folder, greedy)
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    has_mlp = "mlp" in base.groups
    adapters = {
        "": None,
        "a": make_adapter(base.targets, seed=1, train_mlp=has_mlp),
        "b": make_adapter(base.targets, seed=2, rank=7, train_mlp=has_mlp),
    }
    asked = [(version_id, tokens_of(length, length)) for length in (3, 11, 42) for version_id in adapters]
    async with serving(folder, prefill_tokens_per_step=16) as engine:
        alone = await generate(engine, greedy, max_tokens=len(expected), temperature=0.0)
        assert list(alone.sequences[0].tokens) == expected
        for version_id, adapter in adapters.items():
            if adapter is not None:
                await engine.install(version_id, adapter.like(adapter.flat.clone()))
        wanted = {"num_samples": 2, "prompt_logprobs": True}
        results = await asyncio.gather(
            *(
                generate(engine, tokens, version_id=version_id, max_tokens=4 + n, seed=n, **wanted)
                for n, (version_id, tokens) in enumerate(asked)
            )
        )
    check(base, [(adapters[name], tokens, result) for (name, tokens), result in zip(asked, results, strict=True)])


@pytest.fixture(params=["Qwen3_5Text", "Bloom"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with recurrent layers, and one that runs one sequence at a time."""
    return family_folder(tmp_path, request.param)


async def test_sequences_that_move_grow_and_are_interrupted_draw_as_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one, other in await alone_and_interrupted(folder, monkeypatch):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)


async def test_versions_of_all_parameters_in_one_batch_equal_each_alone(folder: Path) -> None:
    """Their rows are not the first lanes of the cache, so states are gathered and stored again."""
    async with serving(folder, prefill_tokens_per_step=16) as engine:
        for seed in (1, 2):
            await engine.install(f"v{seed}", make_full(engine.base, seed=seed))
        versions = ["", "v1", "v2", "v1"]

        async def run(n: int) -> Result:
            asked = tokens_of(12 + 5 * n, n)
            return await generate(engine, asked, version_id=versions[n], max_tokens=6 + 4 * n, seed=n, num_samples=2)

        alone = [await run(n) for n in range(4)]
        together = await asyncio.gather(*(run(n) for n in range(4)))
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=2e-5)


async def test_a_stream_and_a_request_that_takes_a_cancelled_ones_lane(folder: Path) -> None:
    """A lane's old state is not the beginning of a new sequence."""
    asked = tokens_of(7, 1)
    async with serving(folder, max_running=1) as engine:
        expected = await generate(engine, asked, max_tokens=6, seed=3)
        other = await engine.submit(request(tokens_of(20, 2), max_tokens=100), stream=True)
        async for _ in other.deltas():
            break  # leaving the stream cancels
        generation = await engine.submit(request(asked, max_tokens=6, seed=3), stream=True)
        tokens = [token async for delta in generation.deltas() for token in delta.tokens]
    assert tokens == list(expected.sequences[0].tokens)


def test_memory_for_states_bounds_the_sequences_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_folder(tmp_path, "Qwen3_5Text")
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    config = SamplerConfig(base_model=str(folder))
    sizes = Sizes.of(base, config)
    assert sizes.bytes_per_lane == 4 * (4 * 16 * 16 + (2 * 2 * 16 + 4 * 16) * 4)  # a state, and a window of 4 inputs
    assert sizes.bytes_per_token == 4 * 2 * 2 * 16  # of the layer with attention
    assert sizes.max_running == 64
    monkeypatch.setattr(sizing, "free_bytes_of", lambda device: 2 * 8 * sizes.bytes_per_lane * (PASSING + 6))
    sizes = Sizes.of(base, config)
    assert sizes.max_running == 6
    prefixes = Scheduler(sizes, metrics=SamplerMetrics(CollectorRegistry())).kv.prefixes
    assert sizes.prefix_cache_bytes == sizes.bytes_per_lane * (PASSING + 6)
    assert prefixes.max_states == (PASSING + 6) // 2


def test_a_model_that_runs_one_sequence_at_a_time_has_no_prefix_cache(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "Bloom")
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert Sizes.of(base, SamplerConfig(base_model=str(folder))).prefix_cache_bytes == 0
