"""Certificates of publishes, with samplers that score by the modelling code or are wrong in a way of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.models import make_model, make_recurrent_model, make_sparse_model
from tests.unit.trainer_service.engines import create
from tinsmith.errors import InvalidRequest, NotReady, OutOfCapacity, ServiceError, VersionNotLoaded, VersionRefused
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_weights import FULL, Weights
from tinsmith.rpc.channel import connect
from tinsmith.rpc.server import Server
from tinsmith.rpc.times import seconds_of
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import sampler_pb2_grpc, types_pb2, weight_sync_pb2, weight_sync_pb2_grpc
from trainer_service.engine.engine import TrainingEngine
from trainer_service.metrics import Metrics
from trainer_service.weight_sync import Published, Version
from trainer_service.weight_sync.calls import ChannelBroken
from trainer_service.weight_sync.canary import Canary, Scores, Tokens, canary_of, score
from trainer_service.weight_sync.certificate import (
    GAP_LIMITS,
    MEAN_LIMITS,
    GapRule,
    OnGap,
    Publisher,
    _Measured,
    applied,
)
from trainer_service.weight_sync.samplers import LeftOut

T = TypeVar("T")


@dataclass
class Sampler(sampler_pb2_grpc.SamplerServiceServicer, weight_sync_pb2_grpc.WeightSyncServiceServicer):
    """Scores as the trainer does, unless `wrong` changes the weights; `errors` come first, one for each call."""

    base: BaseModel
    wrong: Callable[[Weights], Weights] = lambda weights: weights
    errors: list[ServiceError] = field(default_factory=list)
    versions: dict[str, Weights] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    confirms: bool = True
    boot_id: str = "first"
    asked: list[pb.SampleRequest] = field(default_factory=list)
    on_probation: list[pb.SampleRequest] = field(default_factory=list)
    delay: asyncio.Event = field(default_factory=asyncio.Event)
    """Sample waits for it."""

    def __post_init__(self) -> None:
        self.delay.set()

    async def GetSamplerInfo(self, request: Any, context: Any) -> pb.GetSamplerInfoResponse:
        return pb.GetSamplerInfoResponse(engine="fake", boot_id=self.boot_id)

    async def SampleOnProbation(
        self, request: weight_sync_pb2.SampleOnProbationRequest, context: Any
    ) -> weight_sync_pb2.SampleOnProbationResponse:
        self.on_probation.append(request.request)
        return weight_sync_pb2.SampleOnProbationResponse(response=await self.Sample(request.request, context))

    async def Sample(self, request: pb.SampleRequest, context: Any) -> pb.SampleResponse:
        self.asked.append(request)
        await self.delay.wait()
        if self.errors:
            raise self.errors.pop(0)
        tokens = np.frombuffer(request.prompt[0].encoded_text.tokens, "<i4")
        weights = None
        if request.version_id:
            if request.version_id not in self.versions:
                raise VersionNotLoaded(request.version_id)
            weights = self.wrong(self.versions[request.version_id])
        scores = score(self.base, weights, [tokens])
        return pb.SampleResponse(prompt_logprobs=np.concatenate([[np.nan], scores]).astype("<f4").tobytes())


class Sender:
    """The part of a WeightSender that Publisher uses."""

    def __init__(self, samplers: dict[str, Sampler], stubs: dict[str, Any]) -> None:
        self.samplers = samplers
        self.stubs = stubs
        self.left_out: dict[str, LeftOut] = {}
        self.hang: set[str] = set()
        """Addresses of samplers that leave health checks unanswered."""

    async def publish(self, version: Version, *, num_samplers: int = 0) -> Published:
        for sampler in self.samplers.values():
            sampler.versions[version.version_id] = version.adapter
        return Published(version.sent_bytes, 0.25, "c0ffee", list(self.samplers), self.left_out)

    async def guarded(self, address: str, work: Coroutine[Any, Any, T]) -> T:
        if address not in self.hang:
            return await work
        work.close()
        raise ChannelBroken(f"{address}: no answer to a health check")

    async def withdraw(self, version_id: str) -> None:
        for sampler in self.samplers.values():
            sampler.versions.pop(version_id, None)
            sampler.confirmed.discard(version_id)

    async def confirm(self, version_id: str, addresses: Sequence[str]) -> Sequence[str]:
        confirmed = [address for address in self.samplers if address in addresses and self.samplers[address].confirms]
        for address in confirmed:
            self.samplers[address].confirmed.add(version_id)
        return confirmed

    def sampler(self, address: str) -> Any:
        return self.stubs[address]


@dataclass
class Bench:
    publisher: Publisher
    samplers: Sequence[Sampler]
    version: Version
    scores: Scores
    registry: CollectorRegistry

    async def publish(self) -> types_pb2.PublishCertificate:
        ours: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        ours.set_result(self.scores)
        certified = await self.publisher.publish(self.version, ours)
        assert certified is not None
        assert certified.num_samplers == len(self.serving)
        return certified.certificate

    def count(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("trainer_publish_certificates_total", {"outcome": outcome})

    def num_left_out(self, reason: LeftOut) -> float | None:
        return self.registry.get_sample_value("trainer_publish_left_out_total", {"reason": reason})

    @property
    def holders(self) -> list[int]:
        """Numbers of the samplers that hold the version."""
        return [n for n, sampler in enumerate(self.samplers) if sampler.versions]

    @property
    def serving(self) -> list[int]:
        """Numbers of those that have confirmed it."""
        return [n for n, sampler in enumerate(self.samplers) if sampler.confirmed]


MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make_bench(base: BaseModel) -> AsyncIterator[MakeBench]:
    servers: list[Server] = []
    channels: list[Any] = []

    async def make(
        *samplers: Sampler,
        limit: float = 0.01,
        mean_limit: float = 0.01,
        on_gap: OnGap = "refuse",
        timeout_s: float = 20.0,
        base: BaseModel = base,
        strength: float = 1.0,
    ) -> Bench:
        stubs, by_address = {}, {}
        for sampler in samplers:
            server = Server("127.0.0.1:0", [pb.DESCRIPTOR])
            sampler_pb2_grpc.add_SamplerServiceServicer_to_server(sampler, server.grpc)
            weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server(sampler, server.grpc)
            await server.start()
            servers.append(server)
            channels.append(connect(f"127.0.0.1:{server.port}"))
            by_address[f"127.0.0.1:{server.port}"] = sampler
            stubs[f"127.0.0.1:{server.port}"] = SimpleNamespace(
                address=f"127.0.0.1:{server.port}",
                versions=sampler_pb2_grpc.SamplerServiceStub(channels[-1]),
                weights=weight_sync_pb2_grpc.WeightSyncServiceStub(channels[-1]),
            )
        engine = TrainingEngine(base, max_tokens_per_microbatch=100)
        create(engine, "m")
        weights = engine.capture("m", with_optimizer=False).adapter
        assert isinstance(weights, Adapter)
        for one in weights.weights.values():
            one.b_O_R.mul_(strength)
        registry = CollectorRegistry()
        sender: Any = Sender(by_address, stubs)
        sequences = canary_of(base)
        rule = GapRule(limit, mean_limit, on_gap, timeout_s)
        canary = Canary(sequences, engine.score(None, sequences))
        publisher = Publisher(sender, canary, rule, Metrics(registry))
        return Bench(publisher, samplers, Version("m@1", "tiny", weights), engine.score(weights, sequences), registry)

    yield make
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


def perturbed(weights: Weights) -> Weights:
    """One of its values is another."""
    flat = weights.flat.clone()
    flat[0] += 5.0
    return weights.like(flat)


def without_adapter(weights: Weights) -> Weights:
    return weights.like(torch.zeros_like(weights.flat))


def not_finite(weights: Weights) -> Weights:
    return weights.like(torch.full_like(weights.flat, torch.nan))


async def test_samplers_that_compute_the_same_pass(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base), Sampler(base))
    certificate = await bench.publish()
    assert certificate.passed
    assert (certificate.version_id, certificate.weights_hash, certificate.limit) == ("m@1", "c0ffee", 0.01)
    assert (certificate.num_bytes, seconds_of(certificate.publish_time)) == (bench.version.sent_bytes, 0.25)
    assert [gap.engine for gap in certificate.samplers] == ["fake", "fake"]
    assert len({gap.address for gap in certificate.samplers}) == 2
    for gap in certificate.samplers:
        assert 0 <= gap.mean_gap <= gap.max_gap < 1e-4
        assert gap.num_tokens == bench.scores.size == 15
    bench.publisher.check(certificate, location="r/sampler_weights/one")
    assert bench.serving == [0, 1]
    assert bench.count("passed") == 1
    assert bench.registry.get_sample_value("trainer_publish_gap_nats_count", {"engine": "fake"}) == 2


async def test_the_canary_is_scored_by_the_call_that_serves_clients(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base))
    await bench.publish()
    asked = bench.samplers[0].asked
    of_version = [one for one in asked if one.version_id]
    assert len(of_version) == len(bench.publisher.canary(FULL).sequences)
    assert {one.version_id for one in of_version} == {"m@1"}
    assert all(one.prompt_logprobs and one.sampling_params.max_tokens == 1 for one in asked)
    assert bench.samplers[0].on_probation == of_version


async def test_the_base_model_alone_is_scored_once_for_each_start_of_a_sampler(
    base: BaseModel, make_bench: MakeBench
) -> None:
    bench = await make_bench(Sampler(base))
    sampler = bench.samplers[0]
    for boot_id, asked in (("first", 1), ("first", 0), ("second", 1)):
        sampler.boot_id = boot_id
        sampler.asked.clear()
        await bench.publish()
        assert sum(not one.version_id for one in sampler.asked) == asked


async def test_homes_that_do_not_serve_a_version_are_counted_and_logged_with_the_reason(
    base: BaseModel, make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = await make_bench(Sampler(base), Sampler(base), Sampler(base, confirms=False))
    sender: Any = bench.publisher.sender
    _, hangs, late = sender.samplers
    sender.hang = {hangs}
    sender.left_out = {"full:1": "full", "dead:1": "gone"}
    certificate = await bench.publish()
    assert bench.serving == [0]
    assert hangs not in {gap.address for gap in certificate.samplers}
    reasons: tuple[LeftOut, ...] = ("full", "gone", "not_measured", "not_confirmed", "no_group")
    assert [bench.num_left_out(reason) for reason in reasons] == [1, 1, 1, 1, 0]
    assert (
        "number of samplers that serve m@1: 1; left out: full:1 (full), dead:1 (gone), "
        f"{hangs} (not_measured), {late} (not_confirmed)"
    ) in caplog.messages


@pytest.mark.parametrize("wrong", [perturbed, without_adapter, not_finite])
async def test_one_wrong_replica_refuses_the_version_everywhere(
    base: BaseModel, make_bench: MakeBench, wrong: Callable[[Weights], Weights]
) -> None:
    bench = await make_bench(Sampler(base), Sampler(base, wrong))
    certificate = await bench.publish()
    assert not certificate.passed
    good, bad = certificate.samplers
    assert good.max_gap < 1e-4 < 0.01 < bad.max_gap
    with pytest.raises(VersionRefused) as refused:
        bench.publisher.check(certificate, location="r/sampler_weights/one")
    message = refused.value.message
    assert message.startswith("r/sampler_weights/one is saved, but version m@1 is refused: the sampler at")
    assert bad.address in message
    expected: dict[object, str] = {
        perturbed: f"{bad.max_gap:.3g} nats in the logprob of a canary token",
        without_adapter: "does not apply it: with it the canary keeps the base model's logprobs",
        not_finite: "not finite",
    }
    assert expected[wrong] in message
    assert ("above publish_gap_limit 0.01" in message) == (wrong is perturbed)
    assert good.applied == types_pb2.APPLIED_YES
    assert (bad.applied == types_pb2.APPLIED_NO) == (wrong is without_adapter)
    assert bench.holders == []
    assert bench.count("refused") == 1


async def test_a_warning_serves_the_version_all_the_same(
    base: BaseModel, make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(Sampler(base, perturbed), on_gap="warn")
    certificate = await bench.publish()
    assert not certificate.passed
    bench.publisher.check(certificate, location="r/sampler_weights/one")
    assert bench.serving == [0]
    assert bench.count("warned") == 1
    assert "m@1 is served nevertheless" in caplog.text


@pytest.mark.parametrize(("limit", "passed"), [(0.0, True), (1e3, True), (1e-3, False)])
async def test_the_limit_decides_and_0_is_none(
    base: BaseModel, make_bench: MakeBench, limit: float, passed: bool
) -> None:
    bench = await make_bench(Sampler(base, perturbed), limit=limit, mean_limit=limit)
    certificate = await bench.publish()
    assert certificate.passed == passed
    assert certificate.samplers[0].max_gap > 1e-3
    assert bench.holders == bench.serving == ([0] if passed else [])


async def test_weights_that_have_diverged_are_refused_by_what_the_trainer_says(
    base: BaseModel, make_bench: MakeBench
) -> None:
    bench = await make_bench(Sampler(base))
    bench.scores = np.full_like(bench.scores, np.nan)
    certificate = await bench.publish()
    why = "or the trainer gives logprobs of the canary that are not finite.* If the weights have diverged"
    with pytest.raises(VersionRefused, match=why):
        bench.publisher.check(certificate, location="x")


@pytest.mark.parametrize("error", [NotReady("stopping"), VersionNotLoaded("evicted")])
async def test_a_sampler_that_cannot_be_measured_does_not_serve_the_version(
    base: BaseModel, make_bench: MakeBench, error: ServiceError
) -> None:
    bench = await make_bench(Sampler(base), Sampler(base, errors=[error] * 50))
    certificate = await bench.publish()
    assert certificate.passed
    assert len(certificate.samplers) == 1
    assert bench.serving == [0]
    assert bench.count("passed") == 1


@pytest.fixture
def stuck(base: BaseModel) -> Iterator[Sampler]:
    """It does not answer while the test lasts."""
    sampler = Sampler(base)
    sampler.delay.clear()
    yield sampler
    sampler.delay.set()


async def test_a_version_that_no_sampler_has_measured_is_served_by_none(
    make_bench: MakeBench, stuck: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(stuck, timeout_s=0.05)
    with pytest.raises(NotReady, match=r"m@1 is not confirmed: no sampler could be measured within 0\.05 s"):
        await bench.publish()
    assert bench.serving == []
    assert bench.count("unscored") == 1
    assert "m@1 is served by none: no sampler could be measured" in caplog.text


@pytest.mark.parametrize("rule", [{"on_gap": "warn"}, {"limit": 0.0}], ids=str)
async def test_where_gaps_refuse_nothing_it_is_served_and_has_not_passed(
    make_bench: MakeBench, stuck: Sampler, rule: dict[str, Any]
) -> None:
    bench = await make_bench(stuck, timeout_s=0.05, **rule)
    certificate = await bench.publish()
    assert (certificate.passed, list(certificate.samplers)) == (False, [])
    bench.publisher.check(certificate, location="x")
    assert bench.serving == [0]
    assert bench.count("unscored") == 1


async def test_a_sampler_that_does_not_confirm_does_not_count(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base), Sampler(base, confirms=False))
    assert len((await bench.publish()).samplers) == 2
    assert bench.serving == [0]
    with pytest.raises(NotReady, match="no sampler has confirmed"):
        await (await make_bench(Sampler(base, confirms=False))).publish()


async def test_a_full_sampler_is_asked_again(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base, errors=[OutOfCapacity("full")] * 6))
    assert len((await bench.publish()).samplers) == 1


async def test_a_sampler_of_another_vocabulary_is_refused(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base, errors=[InvalidRequest("token 400 is not in the vocabulary")] * 2))
    assert not (await bench.publish()).passed
    assert bench.holders == []


def test_tokens_that_are_impossible_to_both_are_no_gap() -> None:
    ours = np.array([-1.0, -np.inf, -2.0], np.float32)

    def gap(theirs: Scores) -> float:
        return _Measured("a", "e", theirs, theirs).gap(ours, ours, mean_limit=0.0).max_gap

    assert gap(ours.copy()) == 0
    assert gap(np.array([-1.0, -9.0, -2.0], np.float32)) == np.inf
    assert gap(np.array([np.nan, -np.inf, -2.0], np.float32)) == np.inf


@pytest.fixture(scope="module")
def half(model_folder: Path) -> BaseModel:
    """In bfloat16."""
    return BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.bfloat16)


LOOSE = {"limit": GAP_LIMITS[torch.bfloat16], "mean_limit": MEAN_LIMITS[torch.bfloat16]}


async def test_a_sampler_that_ignores_a_young_adapter_is_refused_in_bfloat16(
    half: BaseModel, make_bench: MakeBench
) -> None:
    bench = await make_bench(Sampler(half, without_adapter), base=half, strength=0.1, **LOOSE)
    certificate = await bench.publish()
    (gap,) = certificate.samplers
    assert gap.max_gap < certificate.limit  # which let it pass
    assert gap.mean_gap < certificate.mean_limit
    assert 0.01 < certificate.change < 0.25
    assert gap.applied == types_pb2.APPLIED_NO
    assert not certificate.passed
    with pytest.raises(VersionRefused, match=r"does not apply it.* base model's logprobs"):
        bench.publisher.check(certificate, location="x")
    assert bench.holders == []


@pytest.mark.parametrize("strength", [0.1, 1.0])
async def test_a_sampler_that_applies_a_young_adapter_is_told_from_one_that_does_not(
    half: BaseModel, make_bench: MakeBench, strength: float
) -> None:
    bench = await make_bench(Sampler(half), base=half, strength=strength, **LOOSE)
    certificate = await bench.publish()
    assert certificate.passed
    assert certificate.samplers[0].applied == types_pb2.APPLIED_YES
    assert bench.registry.get_sample_value("trainer_publish_applied_total", {"applied": "yes"}) == 1


@pytest.mark.parametrize("wrong", [lambda weights: weights, without_adapter], ids=["right", "ignores it"])
async def test_an_adapter_that_changes_nothing_cannot_be_told_from_none(
    base: BaseModel, make_bench: MakeBench, wrong: Callable[[Weights], Weights]
) -> None:
    bench = await make_bench(Sampler(base, wrong), strength=0.0)
    certificate = await bench.publish()
    assert certificate.passed
    assert certificate.samplers[0].applied == types_pb2.APPLIED_TOO_WEAK_TO_TELL


async def test_many_middling_gaps_are_refused_where_one_would_not_be(base: BaseModel, make_bench: MakeBench) -> None:
    def a_little(weights: Weights) -> Weights:
        return weights.like(weights.flat * 1.05)

    bench = await make_bench(Sampler(base, a_little), limit=10.0, mean_limit=1e-4)
    certificate = await bench.publish()
    assert not certificate.passed
    with pytest.raises(VersionRefused, match=r"above publish_mean_gap_limit 0\.0001"):
        bench.publisher.check(certificate, location="x")


def scaled(factor: float) -> Callable[[Weights], Weights]:
    """Applies the adapter as many times."""

    def change(weights: Weights) -> Weights:
        changed = weights.like(weights.flat.clone())
        assert isinstance(changed, Adapter)
        for one in changed.weights.values():
            one.b_O_R.mul_(factor)
        return changed

    return change


STATES = {
    0.0: types_pb2.APPLIED_NO,
    0.5: types_pb2.APPLIED_DIFFERENTLY,
    1.0: types_pb2.APPLIED_YES,
    2.0: types_pb2.APPLIED_DIFFERENTLY,
}


@pytest.mark.parametrize("strength", [0.03, 0.1, 0.15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", STATES)
async def test_an_adapter_that_is_applied_twice_or_by_half_is_refused_by_name(
    base: BaseModel, half: BaseModel, make_bench: MakeBench, factor: float, dtype: torch.dtype, strength: float
) -> None:
    model = base if dtype == torch.float32 else half
    limits = {"limit": GAP_LIMITS[torch.bfloat16], "mean_limit": MEAN_LIMITS[torch.bfloat16]}
    bench = await make_bench(Sampler(model, scaled(factor)), base=model, strength=strength, **limits)
    certificate = await bench.publish()
    (gap,) = certificate.samplers
    assert gap.max_gap < certificate.limit  # which let it pass
    assert gap.mean_gap < certificate.mean_limit
    if factor == 0.5 and dtype == torch.bfloat16:  # rounding may hide it
        assert gap.applied in (types_pb2.APPLIED_DIFFERENTLY, types_pb2.APPLIED_TOO_WEAK_TO_TELL)
        return
    assert gap.applied == STATES[factor]
    assert certificate.passed == (factor == 1)
    if strength <= 0.03:  # a stronger one changes logprobs by no certain factor
        assert gap.factor == pytest.approx(factor, abs=0.25)
    if gap.applied == types_pb2.APPLIED_DIFFERENTLY:
        why = f"applies it differently than the trainer.* {gap.factor:.2f} times the trainer's change"
        with pytest.raises(VersionRefused, match=why):
            bench.publisher.check(certificate, location="x")


@pytest.mark.parametrize("factor", STATES)
@pytest.mark.parametrize("strength", [1e-4, 0.1])
async def test_a_sampler_that_rounds_otherwise_is_judged_by_the_rounding(
    base: BaseModel, half: BaseModel, make_bench: MakeBench, factor: float, strength: float
) -> None:
    """It computes in float32, and the trainer in bfloat16."""
    bench = await make_bench(Sampler(base, scaled(factor)), base=half, strength=strength, **LOOSE)
    certificate = await bench.publish()
    (gap,) = certificate.samplers
    if strength < 0.01 and factor:
        assert gap.applied == types_pb2.APPLIED_TOO_WEAK_TO_TELL
        assert not gap.HasField("factor")
        assert certificate.passed
    elif factor != 0.5:
        assert gap.applied == STATES[factor]


def test_a_change_of_a_sampler_is_told_from_rounding() -> None:
    ours = np.random.default_rng(0).normal(0, 0.1, 60).astype(np.float32)
    weak, without = ours / np.float32(100), np.zeros_like(ours)

    def state(ours: Scores, theirs: Scores, without: Scores) -> types_pb2.Applied:
        return applied(ours, 0 * ours, theirs, without, mean_limit=0.25)[0]

    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.02, (2, 60)).astype(np.float32)
        without, with_it = noise
        for factor, expected in STATES.items():
            assert state(ours, np.float32(factor) * ours + with_it, without) in (
                expected,
                *((types_pb2.APPLIED_TOO_WEAK_TO_TELL,) if factor == 0.5 else ()),
            )
            assert state(weak, np.float32(factor) * weak + with_it, without) == types_pb2.APPLIED_TOO_WEAK_TO_TELL
    assert state(weak, without, without) == types_pb2.APPLIED_NO  # no rounding at all: it is not computed
    not_a_number = np.full(60, np.nan, np.float32)
    assert state(ours, not_a_number, without) == types_pb2.APPLIED_TOO_WEAK_TO_TELL


@pytest.mark.parametrize("num_tokens", [15, 60])
def test_a_right_sampler_is_hardly_ever_refused_for_its_rounding(num_tokens: int) -> None:
    """Rounding of every size, with a few large values as logprobs of unlikely tokens have. One of them, in one of the
    four passes, may outweigh the change of all other tokens, so no single token may decide. Two of them still may."""
    num_refused = 0
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        change = rng.normal(0, 0.1, num_tokens)
        size = 10 ** rng.uniform(-3, 1) * 0.1
        ours_without, ours, theirs_without, theirs = size * rng.standard_t(3, (4, num_tokens))
        scores = [ours + change, ours_without, theirs + change, theirs_without]
        ours_M, ours_without_M, theirs_M, theirs_without_M = (one.astype(np.float32) for one in scores)
        state, _ = applied(ours_M, ours_without_M, theirs_M, theirs_without_M, mean_limit=0.0)
        assert state != types_pb2.APPLIED_DIFFERENTLY
        num_refused += state == types_pb2.APPLIED_NO
    assert num_refused <= 3  # of 3,000


def as_a_sampler(base: BaseModel, weights: Adapter | None, tokens: Tokens) -> Scores:
    """Scores without gradients, beside another sequence, so with other rounding than `score`."""
    others = np.arange(7, dtype=np.int32)
    tokens_T = torch.from_numpy(np.concatenate([others, tokens])).long()
    lengths = [others.size, tokens.size]
    runs = [] if weights is None else [Run(weights, slice(others.size, tokens_T.numel()))]
    with torch.no_grad():
        hidden_T_H = base.hidden_states(tokens_T, positions_of(lengths, tokens_T.device), Packed(lengths), runs)
        rows = torch.arange(others.size, tokens_T.numel() - 1)
        return base.target_logprobs(hidden_T_H, rows, torch.from_numpy(tokens[1:]).long(), runs).float().numpy()


@pytest.mark.parametrize("make", [make_model, make_sparse_model, make_recurrent_model])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_right_samplers_of_toy_models_are_not_refused_and_those_that_ignore_the_adapter_are(
    make: Callable[[Path], Path], dtypes: tuple[str, str], tmp_path: Path
) -> None:
    """Dtypes of trainer and sampler. docs/architecture.md has the rates of more models, adapters and factors."""
    folder = make(tmp_path)
    trainer, sampler = (
        BaseModel.load(folder, device=torch.device("cpu"), dtype=getattr(torch, dtype)) for dtype in dtypes
    )
    (tokens,) = canary_of(trainer)
    without = score(trainer, None, [tokens]), as_a_sampler(sampler, None, tokens)
    limit = MEAN_LIMITS[trainer.dtype]
    for seed, strength in product(range(2), (1e-4, 0.003, 0.1, 1.0, 3.0)):
        adapter = Adapter.create(AdapterConfig(rank=8, seed=seed), trainer.targets, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        for one in adapter.weights.values():
            one.b_O_R.normal_(0, 0.05 * strength, generator=generator)
        ours = score(trainer, adapter, [tokens])
        received = adapter.rounded(torch.bfloat16) if sampler.dtype == torch.bfloat16 else adapter
        right = as_a_sampler(sampler, received, tokens)
        assert applied(ours, without[0], right, without[1], mean_limit=limit)[0] in (
            types_pb2.APPLIED_YES,
            types_pb2.APPLIED_TOO_WEAK_TO_TELL,
        )
        ignores_it = as_a_sampler(sampler, None, tokens)
        state, _ = applied(ours, without[0], ignores_it, without[1], mean_limit=limit)
        assert state == types_pb2.APPLIED_NO


async def test_a_version_that_the_trainer_cannot_score_is_on_no_sampler(base: BaseModel, make_bench: MakeBench) -> None:
    bench = await make_bench(Sampler(base))
    ours: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
    ours.set_exception(OutOfCapacity("there is no memory"))
    with pytest.raises(OutOfCapacity, match="no memory"):
        await bench.publisher.publish(bench.version, ours)
    assert bench.holders == []
