"""The parts of the vLLM engine that need no vLLM."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from sampler_service import choice
from sampler_service.choice import settled
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Params, Request, Targets
from sampler_service.core.scoring import PromptScorer
from sampler_service.vllm import start
from sampler_service.vllm.full import FullVersion, Parameters
from sampler_service.vllm.outputs import DrawnToken, drawn_tokens
from sampler_service.vllm.pages import Pages
from sampler_service.vllm.pictures import WorkerPictures
from sampler_service.vllm.reference import _measure
from sampler_service.vllm.settings import engine_args
from sampler_service.vllm.shared_memory import Handle, SharedTensor
from sampler_service.vllm.versions import WorkerVersions
from sampler_service.vllm.wire import Draws, Scores, extra_args
from tests.support.models import make_vision_model
from tests.support.waiting import until
from tinsmith.errors import Unsupported
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.pictures.processing import Picture
from tinsmith.sizing import slot_rank


def test_another_process_reads_shared_weights_and_cannot_change_them() -> None:
    shared = SharedTensor.copy_of(torch.arange(5.0))
    code = """
import sys
from sampler_service.vllm.shared_memory import Handle
tensor = Handle(*map(int, sys.argv[1:])).open()
print(tensor.tolist())
tensor += 1
"""
    handle = shared.handle
    argv = [sys.executable, "-c", code, str(handle.pid), str(handle.fd), str(handle.num_bytes)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    assert done.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0]"
    assert shared.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    view = handle.open()
    shared.close()
    assert view.tolist() == shared.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(OSError, match=str(handle.fd)):
        Handle(handle.pid, handle.fd, handle.num_bytes).open()


def test_a_message_to_the_worker_comes_back_as_it_was() -> None:
    draws = Draws(key=2**64 - 1, first=3, temperature=0.5, top_k=-1, top_p=0.25, topk=2)
    targets = Targets(np.array([0, 2]), np.array([5, -1]))
    request = Request(
        np.array([1, 2, 3, 4], np.int32), params=Params(temperature=0.5), prompt_logprobs=True,
        prompt_logprobs_last_n=2, topk_prompt_logprobs=3, targets=targets, prompt_alt_tokens_k=4,
    )  # fmt: skip
    scores = Scores.of(request, name="n", seed=-9)
    args = extra_args(draws, scores)
    assert Draws.read(args) == draws
    again = Scores.read(args)
    assert again is not None
    assert again == scores
    seen = again.request([1, 2, 3, 4])
    assert seen.targets is not None
    np.testing.assert_array_equal(seen.targets.rows_M, targets.rows_M)
    np.testing.assert_array_equal(seen.targets.tokens_M, targets.tokens_M)
    ours, theirs = PromptScorer(request, seed=-9), PromptScorer(seen, seed=again.seed)
    assert theirs.first_row == ours.first_row
    for array in theirs._arrays:
        array[...] = np.arange(array.size).reshape(array.shape)
    ours.restore(theirs.dump())
    for one, other in zip(ours._arrays, theirs._arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    assert Scores.read(extra_args(draws, None)) is None


def flat(*positions: list[tuple[int, float]]) -> Any:
    """As vLLM's FlatLogprobs."""
    ends = np.cumsum([len(position) for position in positions]).tolist()
    entries = [entry for position in positions for entry in position]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for token, _ in entries],
        logprobs=[logprob for _, logprob in entries],
    )


def test_outputs_with_their_tables_also_where_vllm_has_joined_two() -> None:
    apart = [(7, -3.0), (1, -0.5), (2, -1.0)]
    among_the_best = [(2, -1.0), (1, -0.5), (2, -1.0)]
    joined = [(2, -1.0), (1, -0.5)]
    completion = SimpleNamespace(token_ids=[7, 2, 2], logprobs=flat(apart, among_the_best, joined))
    drawn = list(drawn_tokens(completion, 2))
    assert [(one.token, one.logprob) for one in drawn] == [(7, -3.0), (2, -1.0), (2, -1.0)]
    table = DrawnToken.table(drawn, 3)
    assert table is not None
    assert table.token_ids.tolist() == [[1, 2, 0]] * 3
    assert table.logprobs.tolist() == [[-0.5, -1.0, -99999.0]] * 3
    assert DrawnToken.table(drawn, 0) is None


def test_slots_are_of_the_next_rank_that_vllm_knows() -> None:
    assert [slot_rank(rank) for rank in (1, 2, 8, 33, 512)] == [1, 8, 8, 64, 512]
    with pytest.raises(ValueError, match="max_lora_rank: 513"):
        slot_rank(513)


@pytest.mark.parametrize(
    ("engine", "device", "installed", "chosen", "why"),
    [
        ("auto", "cuda", True, "vllm", 'the device is "cuda" and vLLM is installed'),
        ("auto", "cuda", False, "torch", 'vLLM is not installed: pip install "tinsmith[vllm]"'),
        ("auto", "cpu", True, "torch", 'the setting device is "cpu"'),
        ("torch", "cuda", True, "torch", "the setting engine names it"),
        ("vllm", "cpu", False, "vllm", "the setting engine names it"),
    ],
)
def test_auto_takes_vllm_on_cuda_where_it_is_installed(
    engine: Any, device: Any, installed: bool, chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "is_installed", lambda: installed)
    config, reason = settled(SamplerConfig(base_model="m", engine=engine, device=device))
    assert config.engine == chosen
    assert why in reason


def test_slots_of_vllm_are_as_large_as_the_largest_rank_that_is_served() -> None:
    reference = SimpleNamespace(
        sizes=SimpleNamespace(prefix_cache_bytes=0, max_running=8, max_kv_tokens=64, tokens_per_step=64),
        pages=Pages(32, 32), max_running=8, device="cuda", dtype="bfloat16", max_context_length=64, targets=["one"],
        picture_tokens=0, has_tower=False,
    )  # fmt: skip

    def rank(**settings: Any) -> object:
        config, _ = settled(SamplerConfig(base_model="m", **settings))
        return engine_args(config, cast(Any, reference))["max_lora_rank"]

    assert rank(engine="vllm") == 64
    assert rank(engine="vllm", max_lora_rank=8) == 8
    assert rank(engine="vllm", max_lora_rank=256) == 256
    assert settled(SamplerConfig(base_model="m", engine="torch"))[0].max_lora_rank == 256


def test_vllm_loads_a_tower_where_pictures_are_taken(tmp_path: Path) -> None:
    folder = str(make_vision_model(tmp_path))
    seeing, blind = (SamplerConfig(base_model=folder, device="cpu", pictures=one) for one in (True, False))
    reference = _measure(seeing)
    assert (reference.why_no_pictures, len(reference.pictures)) == ("", 2)
    args = engine_args(seeing, reference)
    assert args["mm_processor_kwargs"] == {"most_tokens": 80}  # a single row of them, of 8 x 8 pixels each
    assert "language_model_only" not in args
    reference = _measure(blind)
    assert "they are switched off here (pictures is false)" in reference.why_no_pictures
    assert not reference.pictures
    assert engine_args(blind, reference)["language_model_only"]


def test_vllm_refuses_pictures_of_a_family_whose_tower_is_not_known_there(tmp_path: Path) -> None:
    config = SamplerConfig(base_model=str(make_vision_model(tmp_path, "Kimi_K25")), device="cpu")
    reference = _measure(config)
    assert reference.why_no_pictures.startswith("the vLLM engine does not know how vLLM's tower takes pictures of ")
    assert not reference.pictures
    assert engine_args(config, reference)["language_model_only"]


async def test_workers_have_a_picture_once_while_any_request_needs_it() -> None:
    calls: list[tuple[str, int]] = []

    async def rpc(method: str, number: int, *_: Any) -> list[Any]:
        calls.append((method.removeprefix("tinsmith_"), number))
        return []

    pictures = WorkerPictures(rpc)
    one, other = (
        PlacedPicture(
            start, Picture(np.full((2, 2, 3), start, np.uint8), tokens=np.full(1, 5, np.int32), digest=bytes([start]))
        )
        for start in (0, 9)
    )
    async with pictures.held([one, other]) as first, pictures.held([one]) as second:
        assert (first, second) == ([1, 2], [1])
    async with pictures.held([one]) as third:
        assert third == [3]  # never a number again
    await until(lambda: len(calls) == 6)
    assert sorted(calls) == [(method, n) for method in ("forget_picture", "take_picture") for n in (1, 2, 3)]


def test_vllm_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"tinsmith\[vllm\]"):
        start.check_installed()


async def test_a_full_version_that_one_worker_cannot_load_is_forgotten_by_the_others() -> None:
    told: list[tuple[Any, ...]] = []

    async def rpc(method: str, *args: Any) -> list[Any]:
        told.append((method, args[0]))
        return ["", "no place for a.weight"] if method == "tinsmith_register_full" else [None, None]

    version = FullVersion(Parameters({"a.weight": (2, 2)}, frozenset(), torch.float32), torch.zeros(4))
    with pytest.raises(Unsupported, match=r"no place for a\.weight"):
        await WorkerVersions(rpc).register_full(version, SharedTensor.copy_of(version.flat))
    assert told == [("tinsmith_register_full", 1), ("tinsmith_forget_full", 1)]
