"""Two workers that divide the model, held against the torch engine, which has all of it. One server for all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from sampler_service.torch_engine.engine import TorchEngine
from tests.support.waiting import until
from tests.unit.sampler_service.full_versions import make_full
from tests.unit.sampler_service.serving import floats, make_adapter, sample
from tests.vllm.cases import FLAGS, VERSIONS, assert_each_alone_and_together
from tests.vllm.client import Service, assert_same, is_running, moved_midway, tokens_of, torch_sample
from tests.vllm.service import VllmService, flags
from tinsmith.errors import NotReady, VersionNotLoaded
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import Weights
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
        **FLAGS,
        "tensor-parallel": 2,
        "adapter-memory-bytes": int(2.5 * make_full(torch_engine.base, seed=0).num_bytes),
    }
    before = in_shared_memory()
    with VllmService(model, *flags(settings)) as server:
        assert in_shared_memory() <= before  # or a worker that is killed leaves it behind
        yield server


def in_shared_memory() -> set[Path]:
    """By which workers on a CPU exchange tensors."""
    return set(Path("/dev/shm").glob("vllm_dist_*"))


def workers(server: VllmService) -> list[psutil.Process]:
    """In the order of their ranks."""
    return sorted((one for one in server.engines() if "Worker_TP" in one.cmdline()[0]), key=lambda one: one.cmdline())


async def serves_as_the_torch_engine(
    service: Service, torch_engine: TorchEngine, version_id: str, weights: Weights | None
) -> pb.SampleResponse:
    """A published version, or the base model."""
    request = sample(PROMPT, version_id=version_id, seed=7, max_tokens=12, num_samples=2, prompt_logprobs=True)
    if weights is not None:
        await torch_engine.install(version_id, weights)
    found = await service.call("Sample", request)
    assert_same(found, await torch_sample(torch_engine, request))
    if weights is not None:
        torch_engine.store.remove(version_id)
    return found


async def test_the_model_is_divided_among_two_workers_and_each_request_gives_what_the_torch_engine_gives(
    server: VllmService, service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    assert len(workers(server)) == 2
    info = await service.call("GetSamplerInfo", pb.GetSamplerInfoRequest())
    assert [*info.adapter_groups] == [1, 2, 3]
    await assert_each_alone_and_together(service, torch_engine)


async def test_a_prompt_is_reused_by_its_version_and_salt_alone(service: Service, adapters: dict[str, Adapter]) -> None:
    prompt, asked = tokens_of(100, 6), {"max_tokens": 1}
    first = await service.sample(prompt, version_id="all", **asked)
    again = await service.sample(prompt, version_id="all", **asked)
    base = await service.sample(prompt, **asked)
    other = await service.sample(prompt, version_id="all", cache_salt="other", **asked)
    assert [one.prompt_cache_hit_tokens for one in (first, again, base, other)] == [0, 96, 0, 0]


async def test_a_generation_moves_to_another_version_of_its_run(service: Service, torch_engine: TorchEngine) -> None:
    adapter = make_adapter(torch_engine.targets, seed=51, rank=4)
    for name in ("twin@1", "twin@2"):
        await service.publish(name, adapter)
    fields = {"version_id": "twin@1", "seed": 6, "max_tokens": 100, "num_samples": 2, "temperature": 0.8, "top_k": 50}
    moved = await moved_midway(service, sample(PROMPT, follow_run="twin", **fields), run_id="twin", version_id="twin@2")
    assert all(len(sequence.version_spans) == 2 for sequence in moved.sequences)
    assert_same(moved, await service.sample(PROMPT, **fields))
    for name in ("twin@1", "twin@2"):
        await service.remove(name)


async def test_versions_of_all_parameters_come_and_go_and_come_again_beside_adapters(
    service: Service, torch_engine: TorchEngine, adapters: dict[str, Adapter]
) -> None:
    fulls = {name: make_full(torch_engine.base, seed=seed) for seed, name in enumerate(("one", "two", "three"), 1)}
    base = await serves_as_the_torch_engine(service, torch_engine, "", None)
    answers: dict[str, pb.SampleResponse] = {}
    for name, weights in fulls.items():
        await service.publish(name, weights)
        answers[name] = await serves_as_the_torch_engine(service, torch_engine, name, weights)
    found = [base, *answers.values()]
    assert len({one.prompt_logprobs for one in found}) == len(found)
    with pytest.raises(VersionNotLoaded):  # there is memory for two, and for no adapter beside them
        await service.sample(PROMPT, version_id="one", max_tokens=1)
    with pytest.raises(VersionNotLoaded):
        await service.sample(PROMPT, version_id=VERSIONS[0], max_tokens=1)
    await service.publish("one", fulls["one"])
    again = await serves_as_the_torch_engine(service, torch_engine, "one", fulls["one"])
    np.testing.assert_array_equal(floats(again.prompt_logprobs), floats(answers["one"].prompt_logprobs))
    await service.remove("three")
    for name in VERSIONS:
        await service.publish(name, adapters[name])
    requests = [
        sample(PROMPT, version_id=name, seed=5, max_tokens=30, num_samples=2) for name in ("", "all", "one", "head")
    ]
    alone = [await service.call("Sample", request) for request in requests]
    for name in ("all", "head"):
        wanted = next(request for request in requests if request.version_id == name)
        assert_same(alone[requests.index(wanted)], await torch_sample(torch_engine, wanted))
    together = await asyncio.gather(*(service.call("Sample", request) for request in requests * 2))
    for ours, theirs in zip(together, alone * 2, strict=True):
        assert_same(ours, theirs)


async def test_the_death_of_one_worker_ends_all_and_the_service(server: VllmService, service: Service) -> None:
    processes = server.engines()
    long = sample(tokens_of(10), max_tokens=1000)
    calls = [service.call("Sample", long, metadata=(("x-request-id", f"long {n}"),)) for n in range(3)]
    waiting = [asyncio.create_task(call) for call in calls]
    await until(lambda: is_running(service, "long 2"))
    workers(server)[1].kill()
    for one in waiting:
        with pytest.raises(NotReady):  # EngineDead is one; the channel tries again, and may find nobody
            await one
    assert await asyncio.to_thread(server.process.wait, 30) == 1
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive  # the other worker waits for it in the middle of a step
