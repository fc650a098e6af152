"""Resident versions: immutable weights, kept within a memory bound, the least recently used one leaving first."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sampler_service.core.request import Request
from sampler_service.metrics import Versions
from tinsmith.errors import AlreadyExists, InvalidRequest, OutOfCapacity, VersionNotLoaded
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.paths import is_newer

logger = logging.getLogger(__name__)

PROBATION_S = 60.0
"""A version that is not confirmed within this time is dropped, in seconds."""


@dataclass(frozen=True, slots=True)
class VersionInfo:
    version_id: str
    config: AdapterConfig
    num_bytes: int
    num_running: int


@dataclass(slots=True, eq=False)
class Version:
    version_id: str
    weights: Weights
    namespace: int
    """Number of the namespace of the version's keys and values in the prefix cache. Each installation gets a new
    number; 0 is the base model's."""
    on_probation: bool = False
    """Whether the version is hidden from requests that do not ask for a version on probation."""
    checksum: str = ""
    """XXH3-128 of the received bytes, in hexadecimal; empty if the version did not come from a trainer."""
    num_running: int = 0
    """Number of generations that use the version now."""
    timer: asyncio.TimerHandle | None = None
    """Timer that ends the probation. The event loop refers to the version until the timer is cancelled."""

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class VersionStore:
    """The resident versions. Belongs to the event loop's thread. A version in use is never evicted."""

    def __init__(self, *, max_bytes: int, metrics: Versions, on_gone: Callable[[Version], None]) -> None:
        """`on_gone` is called with each version that is neither resident nor in use any more."""
        self.max_bytes = max_bytes
        self._metrics = metrics
        self._on_gone = on_gone
        self._namespaces = itertools.count(1)
        self._resident: dict[str, Version] = {}
        """Least recently used first."""
        self._leaving: list[Version] = []
        """Versions that were removed and are still in use."""
        self._newest: dict[str, str] = {}
        """For each followed run, the newest version to which it was moved, while that version is visible."""
        metrics.limit_bytes.set(max_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(version.weights.num_bytes for version in [*self._resident.values(), *self._leaving])

    def __contains__(self, version_id: str) -> bool:
        """Whether a version of this id is visible."""
        version = self._resident.get(version_id)
        return version is not None and not version.on_probation

    def acquire(self, version_id: str, *, on_probation: bool = False) -> Version:
        """Counts one more user of a version. `on_probation`: whether the version may be on probation. Raises
        VersionNotLoaded."""
        if not (version_id in self or (on_probation and version_id in self._resident)):
            raise _not_loaded(version_id)
        version = self._resident[version_id] = self._resident.pop(version_id)
        version.num_running += 1
        return version

    def release(self, version: Version) -> None:
        version.num_running -= 1
        if version.num_running == 0 and version in self._leaving:
            self._leaving.remove(version)
            self._on_gone(version)
            self._count()

    def make_room(self, version_id: str, num_bytes: int) -> list[Weights]:
        """Evicts versions until there is room for so many bytes. Returns the evicted versions, which nobody uses any
        more.

        A version of the same id that is on probation is dropped. Raises AlreadyExists, OutOfCapacity while those in
        use leave no room, InvalidRequest if it is too large; then nothing is evicted.
        """
        if version_id in self:
            checksum = self._resident[version_id].checksum
            raise AlreadyExists(f"version {version_id!r} is resident already", version_id=version_id, checksum=checksum)
        self.remove(version_id)
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"version {version_id!r} needs {num_bytes} bytes, above this sampler's adapter_memory_bytes "
                f"{self.max_bytes}: it can never be served"
            )
        in_use = [version for version in [*self._resident.values(), *self._leaving] if version.num_running]
        used = sum(version.weights.num_bytes for version in in_use)
        if used + num_bytes > self.max_bytes:
            raise OutOfCapacity(
                f"version {version_id!r} needs {num_bytes} bytes, and {len(in_use)} versions in use hold {used} of "
                f"adapter_memory_bytes {self.max_bytes}"
            )

        evicted = []
        for version in [version for version in self._resident.values() if version.num_running == 0]:
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            del self._resident[version.version_id]
            version.stop_timer()
            self._on_gone(version)
            evicted.append(version.weights)
            logger.info("evicted version %s to make room for %s", version.version_id, version_id)
        self._count()
        return evicted

    def install(self, version_id: str, weights: Weights, *, on_probation: bool = False, checksum: str = "") -> None:
        """Adds a version. Raises the errors of make_room; nothing has changed then.

        `on_probation`: hidden until it is confirmed, and dropped after PROBATION_S; needs a running event loop.
        """
        self.make_room(version_id, weights.num_bytes)
        version = Version(version_id, weights, next(self._namespaces), on_probation, checksum)
        self._resident[version_id] = version
        if on_probation:
            version.timer = asyncio.get_running_loop().call_later(PROBATION_S, self._expire, version)
        self._count()

    def confirm(self, version_id: str) -> None:
        """Makes a version visible. Raises VersionNotLoaded."""
        if version_id not in self._resident:
            raise _not_loaded(version_id)
        self._resident[version_id].on_probation = False
        self._resident[version_id].stop_timer()
        self._count()

    def _expire(self, version: Version) -> None:
        if version.on_probation and self._resident.get(version.version_id) is version:
            logger.warning("dropped version %s: it was not confirmed in %g s", version.version_id, PROBATION_S)
            self.remove(version.version_id)

    def remove(self, version_id: str) -> None:
        """Hides a version at once, and drops it when no generation uses it. An unknown id is no error."""
        version = self._resident.pop(version_id, None)
        if version is None:
            return
        version.stop_timer()
        if version.num_running:
            self._leaving.append(version)
        else:
            self._on_gone(version)
        self._count()

    def versions(self) -> list[VersionInfo]:
        """The visible versions, by id."""
        return [
            VersionInfo(version_id, version.weights.config, version.weights.num_bytes, version.num_running)
            for version_id, version in sorted(self._resident.items())
            if not version.on_probation
        ]

    def move(self, run_id: str, version_id: str) -> bool:
        """Records that a followed run goes on with this version. Returns False when the run is at a newer version.

        Raises VersionNotLoaded, and InvalidRequest when the version is not of this run.
        """
        if version_id not in self:
            raise _not_loaded(version_id)
        self._newest = {run: newest for run, newest in self._newest.items() if newest in self}
        if is_newer(self._newest.get(run_id, ""), version_id, run_id=run_id):
            return False
        self._newest[run_id] = version_id
        return True

    def first_version(self, request: Request) -> str:
        """Id of the version that a new request begins with. A request that was sent before a move of its run, and
        arrives after it, names an older version and begins with the newest one.

        Raises InvalidRequest when its version does not fit its follow_run.
        """
        if not request.follow_run:
            return request.version_id
        newest = self._newest.get(request.follow_run, "")
        goes_on = is_newer(newest, request.version_id, run_id=request.follow_run) and newest in self
        return newest if goes_on else request.version_id

    def _count(self) -> None:
        self._metrics.resident.set(len(self.versions()))
        self._metrics.resident_bytes.set(self.num_bytes)


def _not_loaded(version_id: str) -> VersionNotLoaded:
    return VersionNotLoaded(
        f"version {version_id!r} is not loaded on this sampler; publish it again", version_id=version_id
    )
