"""Versions of all parameters on vLLM, over gRPC and the weight channel, against the torch engine and transformers."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sampler_service.torch_engine.engine import TorchEngine
from tests.support.waiting import until
from tests.unit.sampler_service.full_versions import make_full, save
from tests.unit.sampler_service.serving import floats, ints, make_adapter, plain_logits, sample
from tests.vllm.client import TOLERANCE, Service, assert_same, moved_midway, num_running, tokens_of, torch_sample
from tests.vllm.service import VllmService, flags
from tinsmith.errors import InvalidRequest, VersionNotLoaded
from tinsmith.modeling.full_weights import FullWeights
from tinsmith.v1 import sampler_pb2 as pb

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = tokens_of(40, 1)


@pytest.fixture(scope="module")
def server(model: Path, torch_engine: TorchEngine) -> Iterator[VllmService]:
    settings = {
        "max-lora-rank": 8,
        "max-device-versions": 2,
        "max-kv-tokens": 4096,
        "prefix-cache-bytes": 4 * 1024 * 1024,
        "max-running": 8,
        "adapter-memory-bytes": int(2.5 * make_full(torch_engine.base, seed=0).num_bytes),
    }
    with VllmService(model, *flags(settings)) as server:
        yield server


@pytest.fixture
def fulls(torch_engine: TorchEngine) -> list[FullWeights]:
    return [make_full(torch_engine.base, seed=seed) for seed in (1, 2, 3)]


async def scored(service: Service, version_id: str = "") -> np.ndarray:
    """Logprobs of the prompt's tokens, and of eight that are drawn after it."""
    response = await service.sample(PROMPT, version_id=version_id, seed=3, max_tokens=8, prompt_logprobs=True)
    return np.concatenate([floats(response.prompt_logprobs)[1:], floats(response.sequences[0].logprobs)])


async def test_a_version_scores_and_draws_what_the_torch_engine_and_transformers_do(
    service: Service, torch_engine: TorchEngine, fulls: list[FullWeights], tmp_path: Path
) -> None:
    base = await scored(service)
    await service.publish("one", fulls[0])
    request = sample(PROMPT, version_id="one", seed=7, max_tokens=12, num_samples=3, prompt_logprobs=True)
    found = await service.call("Sample", request)
    await torch_engine.install("one", fulls[0])
    assert_same(found, await torch_sample(torch_engine, request))
    torch_engine.store.remove("one")
    whole = [*PROMPT.tolist(), *ints(found.sequences[0].tokens)]
    table = plain_logits(save(fulls[0], tmp_path / "one"), whole).log_softmax(-1)
    wanted = table[:-1].gather(1, torch.tensor(whole[1:])[:, None])[:, 0].numpy()
    ours = np.concatenate([floats(found.prompt_logprobs)[1:], floats(found.sequences[0].logprobs)])
    np.testing.assert_allclose(ours, wanted, atol=TOLERANCE)
    assert np.abs(base[: len(PROMPT) - 1] - ours[: len(PROMPT) - 1]).max() > 0.1

    np.testing.assert_array_equal(await scored(service), base)
    one = await scored(service, "one")
    await service.publish("two", fulls[1])
    assert np.abs(await scored(service, "two") - one).max() > 0.1
    np.testing.assert_array_equal(await scored(service, "one"), one)
    np.testing.assert_array_equal(await scored(service), base)
    await service.remove("one")
    await service.remove("two")


async def test_an_adapter_on_the_base_model_is_the_same_before_and_after_full_versions(
    service: Service, torch_engine: TorchEngine, fulls: list[FullWeights]
) -> None:
    adapter = make_adapter(torch_engine.targets, seed=1, rank=4)
    await service.publish("adapter", adapter)
    before = await scored(service, "adapter")
    await service.publish("one", fulls[0])
    one = await scored(service, "one")
    np.testing.assert_array_equal(await scored(service, "adapter"), before)
    await torch_engine.install("adapter", adapter)
    requests = [
        sample(PROMPT, version_id=name, seed=5, max_tokens=30, num_samples=2) for name in ("adapter", "", "one")
    ]
    wanted = [await service.call("Sample", request) for request in requests]
    assert_same(wanted[0], await torch_sample(torch_engine, requests[0]))
    together = await asyncio.gather(*(service.call("Sample", request) for request in requests * 2))
    for found, alone in zip(together, wanted * 2, strict=True):
        assert_same(found, alone)
    np.testing.assert_array_equal(await scored(service, "one"), one)
    torch_engine.store.remove("adapter")
    for name in ("adapter", "one"):
        await service.remove(name)


async def test_a_publish_leaves_running_generations_as_they_are_and_needs_not_wait_for_them(
    service: Service, fulls: list[FullWeights]
) -> None:
    await service.publish("one", fulls[0])
    request = sample(PROMPT, version_id="one", seed=9, max_tokens=400, num_samples=2)
    undisturbed = await service.call("Sample", request)
    running = asyncio.create_task(service.call("Sample", request))
    await until(lambda: num_running(service, "one"))
    await service.publish("two", fulls[1])
    assert not running.done()
    two = await scored(service, "two")
    disturbed = await running
    assert [one.tokens for one in disturbed.sequences] == [one.tokens for one in undisturbed.sequences]
    assert [one.logprobs for one in disturbed.sequences] == [one.logprobs for one in undisturbed.sequences]
    np.testing.assert_array_equal(await scored(service, "two"), two)
    await service.remove("one")
    await service.remove("two")


async def test_versions_beyond_the_memory_leave_and_are_bit_equal_when_they_come_again(
    service: Service, fulls: list[FullWeights]
) -> None:
    await service.publish("one", fulls[0])
    before = await scored(service, "one")
    await service.publish("two", fulls[1])
    await service.publish("three", fulls[2])
    listed = await service.call("ListVersions", pb.ListVersionsRequest())
    assert [version.version_id for version in listed.versions] == ["three", "two"]
    with pytest.raises(VersionNotLoaded):
        await scored(service, "one")
    await service.publish("one", fulls[0])
    np.testing.assert_array_equal(await scored(service, "one"), before)
    for name in ("one", "two", "three"):
        await service.remove(name)


async def test_a_generation_moves_between_tokens_to_the_newer_version_of_its_run(
    service: Service, torch_engine: TorchEngine, fulls: list[FullWeights]
) -> None:
    for name, weights in (("run@1", fulls[0]), ("run@2", fulls[1])):
        await service.publish(name, weights)
        await torch_engine.install(name, weights)
    request = sample(PROMPT, version_id="run@1", follow_run="run", seed=5, max_tokens=120, num_samples=2)
    result = await moved_midway(service, request, run_id="run", version_id="run@2")
    for sequence in result.sequences:
        assert [span.version_id for span in sequence.version_spans] == ["run@1", "run@2"]
        tokens, logprobs, start = ints(sequence.tokens), floats(sequence.logprobs), 0
        whole = np.array([*PROMPT, *tokens], np.int32)
        for span in sequence.version_spans:  # each part as that version scores it, after all that came before
            fields = {"version_id": span.version_id, "max_tokens": 1, "prompt_logprobs": True}
            wanted = floats((await torch_sample(torch_engine, sample(whole, **fields))).prompt_logprobs)
            end = start + span.num_tokens
            part = wanted[len(PROMPT) + start : len(PROMPT) + end]
            np.testing.assert_allclose(logprobs[start:end], part, atol=TOLERANCE)
            start = end
    for name in ("run@1", "run@2"):
        await service.remove(name)
        torch_engine.store.remove(name)


class Announced(FullWeights):
    """Parameters of which one is announced as another."""

    def __init__(self, weights: FullWeights, name: str, announced: tuple[str, tuple[int, ...]]) -> None:
        super().__init__(weights.base, weights.flat)
        self._name, self._announced = name, announced

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [self._announced if spec[0] == self._name else spec for spec in super().specs()]


async def test_a_version_of_other_parameters_is_refused_by_name_and_what_is_served_stays(
    service: Service, fulls: list[FullWeights]
) -> None:
    await service.publish("one", fulls[0])
    before = await scored(service, "one")
    name, (rows, columns) = (
        "model.layers.1.mlp.up_proj.weight",
        fulls[1].base.parameters["model.layers.1.mlp.up_proj.weight"].shape,
    )
    for announced in ((name, (columns, rows)), ("model.layers.1.mlp.other.weight", (rows, columns))):
        with pytest.raises(InvalidRequest, match=re.escape(name)):
            await service.publish("two", Announced(fulls[1], name, announced))
        np.testing.assert_array_equal(await scored(service, "one"), before)
    await service.remove("one")
