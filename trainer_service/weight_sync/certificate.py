"""Publishes a version with a certificate: the gap between the trainer and every sampler that holds the version.

Trainer and samplers score the canary: the trainer by the pass that trains, while the weights are sent, the samplers by
the call that serves clients. Until then the samplers hold the version on probation. A gap above the limit refuses the
version, or only warns. A sampler that could not be measured does not serve the version, unless gaps only warn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import torch

from tinsmith.errors import NotReady, OutOfCapacity, ServiceError, VersionNotLoaded, VersionRefused
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.times import duration, timestamp
from tinsmith.v1 import sampler_pb2, types_pb2, weight_sync_pb2
from tinsmith.v1.types_pb2 import PublishCertificate
from trainer_service.metrics import Metrics
from trainer_service.weight_sync import Published, Version, WeightSender
from trainer_service.weight_sync.calls import ChannelBroken
from trainer_service.weight_sync.canary import Canary, Pictured, Scores, Tokens, tokens_of
from trainer_service.weight_sync.samplers import Sampler

logger = logging.getLogger(__name__)

GAP_LIMITS = {torch.float32: 0.01, torch.bfloat16: 1.0}
"""Default limit of the largest gap, by the dtype that the trainer computes in, in nats. It is far above rounding
(docs/architecture.md has measurements) and far below the gap of a different model."""
MEAN_LIMITS = {torch.float32: 0.003, torch.bfloat16: 0.25}
"""Default limit of the mean gap over the tokens, in nats. It is lower: rounding rarely makes many gaps large at
once."""

_TELLS = 3.0
"""A version's change of the trainer's logprobs is conclusive if it is this many times the gap between sampler and
trainer without the version."""
_NO = 0.25
"""A sampler that shows at most this share of that change has not applied the version."""
_RIGHT = 2 / 3, 3 / 2
"""Least and largest factor between the sampler's change and the trainer's. Outside, the version is refused."""
_TOLD = 1 / 2, 2
"""A factor within these bounds excludes a version that is applied by half, and one that is applied twice."""
_ERRORS = 3.0
"""A factor counts as outside or within bounds if its distance from the bound is this many standard errors."""
_DEVIATES = 0.25
"""A sampler whose change deviates from the trainer's by this share of it, in the median over the tokens, does not apply
the version as the trainer does, whatever the factor is: one that applies a strong version twice shows no certain
factor."""
_NOISES = 8.0
"""This holds only for a deviation that is this many times the gap without the version, in the median, ..."""
_SHARE_OF_MEAN_LIMIT = 0.2
"""... and at least this share of the limit of the mean gap."""
_ROUNDING = 1e-5
"""A smaller change per token, in nats, may be rounding."""

_PAUSE_S = 0.05
"""Pause before a sampler whose queue is full is asked again, in seconds."""

OnGap = Literal["refuse", "warn"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GapRule:
    """The limits on gaps, and what happens above them."""

    limit: float
    """Largest gap of a token, in nats; 0 means no limit, and no version is refused."""
    mean_limit: float
    """Largest mean gap of a sampler, in nats; 0 means no limit."""
    on_gap: OnGap
    timeout_s: float
    """Longest time for scoring on one sampler, in seconds. A sampler that takes longer is not in the certificate."""

    @property
    def refuses(self) -> bool:
        """True when a version must be measured before it is served."""
        return self.limit > 0 and self.on_gap == "refuse"


@dataclass(frozen=True, slots=True)
class Certified:
    """A published version: served by samplers, or refused."""

    num_samplers: int
    """Number of samplers that serve the version; 0 when it was refused."""
    certificate: PublishCertificate


@dataclass(frozen=True, slots=True)
class _Measured:
    """One sampler's scores of the canary."""

    address: str
    engine: str
    scores: Scores
    unadapted: Scores
    """Scores of the base model alone."""

    def gap(self, ours: Scores, ours_unadapted: Scores, *, mean_limit: float) -> types_pb2.SamplerGap:
        theirs = self.scores.astype(np.float64)
        with np.errstate(invalid="ignore"):
            gaps_M = np.where(theirs == ours, 0.0, np.abs(theirs - ours))
        gaps_M[np.isnan(gaps_M)] = np.inf  # NaN logprobs count as infinitely far apart
        state, factor = applied(ours, ours_unadapted, self.scores, self.unadapted, mean_limit=mean_limit)
        return types_pb2.SamplerGap(
            address=self.address,
            engine=self.engine,
            max_gap=gaps_M.max(),
            mean_gap=gaps_M.mean(),
            num_tokens=gaps_M.size,
            applied=state,
            factor=factor,
        )


def applied(
    ours_M: Scores, ours_unadapted_M: Scores, theirs_M: Scores, theirs_unadapted_M: Scores, *, mean_limit: float
) -> tuple[types_pb2.Applied, float | None]:
    """Tells whether a sampler applies a version: compares the version's change of its scores with the trainer's change.

    The scores [M] are those of the canary: `ours` the trainer's, `theirs` the sampler's, `unadapted` without the
    version. `mean_limit`: limit of the mean gap, in nats.

    Returns the state, and the factor between the changes, from a linear regression through the origin; None if the
    version is too weak to tell. The factor's standard error comes from the regression's residuals, or from the rounding
    without the version if that is larger: it enters a difference of changes twice.
    """
    all_4_M = np.stack([ours_M, ours_unadapted_M, theirs_M, theirs_unadapted_M]).astype(np.float64)
    ours, ours_without, theirs, theirs_without = all_4_M[:, np.isfinite(all_4_M).all(0)]
    ours_change, theirs_change = ours - ours_without, theirs - theirs_without
    change = np.abs(ours_change).sum()
    if change <= _ROUNDING * ours.size:
        return types_pb2.APPLIED_TOO_WEAK_TO_TELL, None
    if not theirs_change.any() and (ours_change != 0).mean() > 0.5:  # the sampler's scores are the same to the last bit
        return types_pb2.APPLIED_NO, 0.0
    rounding = theirs_without - ours_without
    if change <= _TELLS * np.abs(rounding).sum():
        return types_pb2.APPLIED_TOO_WEAK_TO_TELL, None
    square = ours_change @ ours_change
    factor = float(ours_change @ theirs_change / square)
    residuals = theirs_change - factor * ours_change
    variance = max(residuals @ residuals / max(1, ours.size - 1), 2 * (rounding @ rounding) / ours.size)
    least, most = _bounds(ours_change, theirs_change, variance)
    if factor <= _NO and most < _RIGHT[0]:
        return types_pb2.APPLIED_NO, factor
    deviation = np.median(np.abs(theirs_change - ours_change))
    deviates = (
        deviation > _DEVIATES * np.median(np.abs(ours_change))
        and deviation > _NOISES * np.median(np.abs(rounding))
        and deviation > _SHARE_OF_MEAN_LIMIT * mean_limit
    )
    if deviates or most < _RIGHT[0] or least > _RIGHT[1]:
        return types_pb2.APPLIED_DIFFERENTLY, factor
    if _TOLD[0] < least and most < _TOLD[1]:
        return types_pb2.APPLIED_YES, factor
    return types_pb2.APPLIED_TOO_WEAK_TO_TELL, None


def _bounds(
    ours_change_M: npt.NDArray[np.float64], theirs_change_M: npt.NDArray[np.float64], variance: float
) -> tuple[float, float]:
    """Bounds of the factor: the least and largest one of the regressions that leave out one token, less and plus their
    standard errors. So no single token decides. NaN if only one token changes."""
    products, squares = ours_change_M * theirs_change_M, ours_change_M * ours_change_M
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = (products.sum() - products) / (squares.sum() - squares)
        errors = _ERRORS * np.sqrt(variance / (squares.sum() - squares))
    return float((factors - errors).min()), float((factors + errors).max())


class Publisher:
    """Publishes versions, measures them on the samplers, and confirms or withdraws them. Runs on one event loop."""

    def __init__(
        self,
        sender: WeightSender,
        canary: Canary,
        rule: GapRule,
        metrics: Metrics,
        *,
        check_ours: Callable[[], Awaitable[None]] | None = None,
        seeing: Canary | None = None,
    ) -> None:
        """`seeing`: the canary for versions that adapt the vision tower; None if it is that of all others.
        `check_ours`: raises NotReady when another trainer may have taken over the runs of this one; called before a
        version is sent, and before samplers serve it."""
        self.sender = sender
        self._check_ours = check_ours
        self._canary = canary
        self._seeing = seeing
        self._rule = rule
        self._metrics = metrics
        self._theirs_unadapted: dict[tuple[str, bool], tuple[str, Scores]] = {}
        """Each sampler's boot id and scores of the base model alone, by address and by whether the canary is the one
        with a picture. They are measured once for each boot."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each version, so that no other publish of it comes between its measurement and its
        confirmation."""

    def canary(self, config: AdapterConfig) -> Canary:
        """The canary for versions with this configuration."""
        return self._seeing if config.train_vision and self._seeing is not None else self._canary

    async def publish(
        self,
        version: Version,
        scores: asyncio.Future[Scores],
        *,
        sent: asyncio.Event | None = None,
        num_samplers: int = 0,
    ) -> Certified | None:
        """Publishes a version. `scores`: the trainer's scores of it. `sent`: set when the samplers have its weights.
        `num_samplers`: see WeightSender.publish. Returns None when no sampler is serving.

        No sampler serves a refused version; `check` raises for its certificate. Raises the errors of
        WeightSender.publish and of `scores`, and NotReady when no sampler could be measured or none has confirmed the
        version; no sampler serves it then.
        """
        scores.add_done_callback(lambda ours: ours.cancelled() or ours.exception())  # retrieve its error in any case
        async with self._turns.setdefault(version.version_id, asyncio.Lock()):
            if self._check_ours is not None:
                await self._check_ours()
            return await self._publish(version, scores, sent or asyncio.Event(), num_samplers)

    async def _publish(
        self, version: Version, scores: asyncio.Future[Scores], sent: asyncio.Event, num_samplers: int
    ) -> Certified | None:
        published = await self.sender.publish(version, num_samplers=num_samplers)
        sent.set()
        if not published.members:
            return None
        try:
            canary = self.canary(version.adapter.config)
            measuring = (self._measure(address, version.version_id, canary) for address in published.members)
            measured, ours = await asyncio.gather(asyncio.gather(*measuring), scores)
            certificate = self._certificate(published, version.version_id, measured, ours, canary.unadapted)
        except BaseException:
            await self.sender.withdraw(version.version_id)
            raise
        self._note(certificate)
        if self._is_refused(certificate):
            await self.sender.withdraw(version.version_id)
            return Certified(0, certificate)
        return await self._admit(certificate, published)

    async def _admit(self, certificate: PublishCertificate, published: Published) -> Certified:
        """Makes samplers serve the version: those that were measured, or all that hold it if gaps only warn."""
        members: Collection[str] = published.members
        if self._rule.refuses:
            members = {gap.address for gap in certificate.samplers}
        if not members:
            raise NotReady(
                f"{certificate.version_id} is not confirmed: no sampler could be measured within "
                f"{self._rule.timeout_s:g} s"
            )
        if self._check_ours is not None:
            await self._check_ours()
        serving = await self.sender.confirm(certificate.version_id, members)
        if not serving:
            raise NotReady(f"{certificate.version_id} was measured, and then no sampler has confirmed it")
        self._note_left_out(certificate.version_id, published, measured=members, serving=serving)
        return Certified(len(serving), certificate)

    def _note_left_out(
        self, version_id: str, published: Published, *, measured: Collection[str], serving: Collection[str]
    ) -> None:
        """Counts the homes that do not serve a published version in the metrics, and logs them."""
        left_out = dict(published.left_out)
        for address in published.members:
            if address not in serving:
                left_out[address] = "not_confirmed" if address in measured else "not_measured"
        for reason in left_out.values():
            self._metrics.publishing.left_out.labels(reason).inc()
        if left_out:
            names = ", ".join(f"{address} ({reason})" for address, reason in left_out.items())
            logger.info("number of samplers that serve %s: %d; left out: %s", version_id, len(serving), names)

    def check(self, certificate: PublishCertificate, *, location: str) -> None:
        """Raises VersionRefused when the version of this certificate was refused."""
        if not self._is_refused(certificate):
            return
        worst = _worst(certificate)
        what = "Sampler and trainer do not compute the same model; once that is repaired, sampling"
        if math.isinf(worst.max_gap):
            what = "If the weights have diverged, load an earlier checkpoint; else repair the sampler, and sampling"
        raise VersionRefused(
            f"{location} is saved, but version {certificate.version_id} is refused: {_described(worst, certificate)}. "
            f"{what} from the checkpoint publishes it again",
            version_id=certificate.version_id,
            sampler=worst.address,
            max_gap=worst.max_gap,
            limit=certificate.limit,
        )

    def _certificate(
        self,
        published: Published,
        version_id: str,
        measured: Sequence[_Measured | None],
        ours: Scores,
        unadapted: Scores,
    ) -> PublishCertificate:
        limit, mean_limit = self._rule.limit, self._rule.mean_limit
        gaps = [one.gap(ours, unadapted, mean_limit=mean_limit) for one in measured if one is not None]
        with np.errstate(invalid="ignore"):
            change = float(np.abs(ours.astype(np.float64) - unadapted).mean())
        return PublishCertificate(
            version_id=version_id,
            weights_hash=published.checksum,
            num_bytes=published.num_bytes,
            publish_time=duration(published.seconds),
            limit=limit,
            passed=bool(gaps) and not any(self._is_wrong(gap) for gap in gaps),
            samplers=gaps,
            issued_at=timestamp(time.time()),
            mean_limit=mean_limit if limit else 0,
            change=change,
        )

    def _is_wrong(self, gap: types_pb2.SamplerGap) -> bool:
        limit, mean_limit = self._rule.limit, self._rule.mean_limit
        if not limit:
            return False
        too_far = gap.max_gap > limit or (mean_limit > 0 and gap.mean_gap > mean_limit)
        return too_far or gap.applied in _WRONGLY

    def _is_refused(self, certificate: PublishCertificate) -> bool:
        return self._rule.refuses and bool(certificate.samplers) and not certificate.passed

    def _note(self, certificate: PublishCertificate) -> None:
        """Counts the certificate in the metrics, and logs it when it has not passed."""
        for gap in certificate.samplers:
            self._metrics.publishing.publish_gap.labels(gap.engine).observe(gap.max_gap)
            self._metrics.publishing.applied.labels(_STATES[gap.applied]).inc()
        refused = self._is_refused(certificate)
        outcome = "passed" if certificate.passed else "refused" if refused else "warned"
        if not certificate.samplers:
            outcome = "unscored"
            what = "served by none" if self._rule.refuses else "served nevertheless"
            logger.warning("%s is %s: no sampler could be measured", certificate.version_id, what)
        elif not certificate.passed:
            what = "refused" if refused else "served nevertheless"
            logger.warning("%s is %s: %s", certificate.version_id, what, _described(_worst(certificate), certificate))
        self._metrics.publishing.publish_certificates.labels(outcome).inc()

    async def _measure(self, address: str, version_id: str, canary: Canary) -> _Measured | None:
        """Scores the canary on one sampler. Returns None when it does not answer in time or no longer has the
        version."""
        sampler = self.sender.sampler(address)
        try:
            async with asyncio.timeout(self._rule.timeout_s):
                theirs, (engine, unadapted) = await self.sender.guarded(
                    address, self._score_both(sampler, version_id, canary)
                )
        except (NotReady, VersionNotLoaded, ChannelBroken, TimeoutError) as error:
            reason = str(error) or f"no answer within {self._rule.timeout_s:g} s"
            logger.warning("%s is not in the certificate of %s: %s", address, version_id, reason)
            return None
        return _Measured(address, engine, theirs, unadapted)

    async def _score_both(self, sampler: Sampler, version_id: str, canary: Canary) -> tuple[Scores, tuple[str, Scores]]:
        """The sampler's scores with the version, and what `_score_unadapted` returns."""
        return await asyncio.gather(self._scores(sampler, version_id, canary), self._score_unadapted(sampler, canary))

    async def _score_unadapted(self, sampler: Sampler, canary: Canary) -> tuple[str, Scores]:
        """The sampler's engine, and its scores of the base model alone."""
        info = await _called(sampler.versions.GetSamplerInfo(sampler_pb2.GetSamplerInfoRequest()))
        key = sampler.address, canary is self._seeing
        boot_id, scores = self._theirs_unadapted.get(key, ("", None))
        if scores is None or boot_id != info.boot_id:
            scores = await self._scores(sampler, "", canary)
            self._theirs_unadapted[key] = info.boot_id, scores
        return info.engine, scores

    async def _scores(self, sampler: Sampler, version_id: str, canary: Canary) -> Scores:
        """A sampler's scores of all canary sequences. `version_id`: empty for the base model alone."""
        return np.concatenate(
            await asyncio.gather(*(self._score(sampler, version_id, one) for one in canary.sequences))
        )

    async def _score(self, sampler: Sampler, version_id: str, sequence: Tokens | Pictured) -> Scores:
        """A sampler's logprobs of a sequence's tokens without the first; NaN when it cannot score the sequence."""
        request = sampler_pb2.SampleRequest(
            version_id=version_id,
            prompt=chunks_of(sequence),
            num_samples=1,
            sampling_params=sampler_pb2.SamplingParams(max_tokens=1, temperature=0, stop=sampler_pb2.StopCondition()),
            prompt_logprobs=True,
        )
        while True:
            try:
                answer = await _called(_sample(sampler, request))
                return np.frombuffer(answer.prompt_logprobs, "<f4")[1:]
            except OutOfCapacity:
                await asyncio.sleep(_PAUSE_S)
            except (NotReady, VersionNotLoaded):
                raise
            except ServiceError as error:  # the sampler computes no finite logprobs, or has another vocabulary
                logger.warning("scoring %s failed: %s", version_id, error)
                return np.full(tokens_of(sequence).size - 1, np.nan, np.float32)


def chunks_of(sequence: Tokens | Pictured) -> list[types_pb2.Chunk]:
    """The sequence as a prompt."""
    if not isinstance(sequence, Pictured):
        return [types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=sequence.astype("<i4").tobytes()))]
    before, after = sequence.tokens[: sequence.placed.start], sequence.tokens[sequence.placed.stop :]
    image = types_pb2.Image(data=sequence.png, format="png")
    return [*chunks_of(before), types_pb2.Chunk(image=image), *chunks_of(after)]


async def _sample(sampler: Sampler, request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    if not request.version_id:
        return await sampler.versions.Sample(request)
    return (await sampler.weights.SampleOnProbation(weight_sync_pb2.SampleOnProbationRequest(request=request))).response


async def _called(call: Awaitable[T]) -> T:
    """Awaits a call to a sampler. Raises NotReady when the sampler goes away, and its own errors otherwise."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        raise NotReady(error.details() or "it is gone") if gone else from_rpc_error(error) from error


_STATES = {
    types_pb2.APPLIED_YES: "yes",
    types_pb2.APPLIED_TOO_WEAK_TO_TELL: "too_weak_to_tell",
    types_pb2.APPLIED_NO: "no",
    types_pb2.APPLIED_DIFFERENTLY: "differently",
}
_WRONGLY = (types_pb2.APPLIED_NO, types_pb2.APPLIED_DIFFERENTLY)


def _worst(certificate: PublishCertificate) -> types_pb2.SamplerGap:
    return max(certificate.samplers, key=lambda gap: (gap.applied in _WRONGLY, gap.max_gap))


def _described(gap: types_pb2.SamplerGap, certificate: PublishCertificate) -> str:
    who = f"the sampler at {gap.address} ({gap.engine})"
    if math.isinf(gap.max_gap):
        return f"{who} or the trainer gives logprobs of the canary that are not finite"
    if gap.applied == types_pb2.APPLIED_NO:
        return (
            f"{who} does not apply it: with it the canary keeps the base model's logprobs, which the trainer's leave "
            f"by {certificate.change:.3g} nats on average"
        )
    mean_limit = certificate.mean_limit or math.inf
    is_near = gap.max_gap <= certificate.limit and gap.mean_gap <= mean_limit
    if is_near and gap.applied == types_pb2.APPLIED_DIFFERENTLY:
        return (
            f"{who} applies it differently than the trainer, as if it were applied twice or in part: it changes the "
            f"canary's logprobs by {gap.factor:.2f} times the trainer's change, which is {certificate.change:.3g} nats "
            "on average"
        )
    gaps = f"up to {gap.max_gap:.3g} nats in the logprob of a canary token ({gap.mean_gap:.3g} on average)"
    above = f"publish_gap_limit {certificate.limit:g}"
    if gap.max_gap <= certificate.limit:
        above = f"publish_mean_gap_limit {certificate.mean_limit:g}"
    return f"{who} and the trainer differ by {gaps}, above {above}"
