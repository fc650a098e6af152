"""Resident versions: immutable weights, kept within a memory bound, the least recently used one leaving first."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sampler_service.engine import VersionInfo
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.errors import AlreadyExists, InvalidRequest, OutOfCapacity, VersionNotLoaded

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Version:
    version_id: str
    weights: Weights
    namespace: int
    """Of its keys and values in the prefix cache: another one at each installation. 0 is the base model's."""
    num_running: int = 0
    """Generations that use it now."""


class AdapterStore:
    """Belongs to one thread, the event loop's. A version in use is never evicted."""

    def __init__(self, *, max_bytes: int, on_gone: Callable[[Version], None]) -> None:
        """`on_gone` hears of a version that is neither visible nor in use any more."""
        self.max_bytes = max_bytes
        self._on_gone = on_gone
        self._namespaces = itertools.count(1)
        self._visible: dict[str, Version] = {}
        """Least recently used first."""
        self._leaving: list[Version] = []
        """Removed, and still in use."""

    @property
    def num_bytes(self) -> int:
        return sum(version.weights.num_bytes for version in [*self._visible.values(), *self._leaving])

    def __contains__(self, version_id: str) -> bool:
        return version_id in self._visible

    def check(self, version_id: str) -> None:
        """Raises VersionNotLoaded."""
        if version_id not in self:
            raise VersionNotLoaded(
                f"version {version_id!r} is not loaded on this sampler; publish it again", version_id=version_id
            )

    def acquire(self, version_id: str) -> Version:
        """Counts one more user. Raises VersionNotLoaded."""
        self.check(version_id)
        version = self._visible[version_id] = self._visible.pop(version_id)
        version.num_running += 1
        return version

    def release(self, version: Version) -> None:
        version.num_running -= 1
        if version.num_running == 0 and version in self._leaving:
            self._leaving.remove(version)
            self._on_gone(version)

    def make_room(self, version_id: str, num_bytes: int) -> list[Weights]:
        """Evicts what must go before so many bytes come in, and returns it: nobody uses it any more.

        Raises AlreadyExists, OutOfCapacity while those in use leave no room, InvalidRequest if it is too large; then
        nothing is evicted.
        """
        if version_id in self._visible:
            raise AlreadyExists(f"version {version_id!r} is resident already", version_id=version_id)
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"version {version_id!r} needs {num_bytes} bytes, above this sampler's adapter_memory_bytes "
                f"{self.max_bytes}: it can never be served"
            )
        in_use = [version for version in [*self._visible.values(), *self._leaving] if version.num_running]
        used = sum(version.weights.num_bytes for version in in_use)
        if used + num_bytes > self.max_bytes:
            raise OutOfCapacity(
                f"version {version_id!r} needs {num_bytes} bytes, and {len(in_use)} versions in use hold {used} of "
                f"adapter_memory_bytes {self.max_bytes}"
            )

        evicted = []
        for version in [version for version in self._visible.values() if version.num_running == 0]:
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            del self._visible[version.version_id]
            self._on_gone(version)
            evicted.append(version.weights)
            logger.info("evicted version %s to make room for %s", version.version_id, version_id)
        return evicted

    def install(self, version_id: str, weights: Weights) -> None:
        """Raises as make_room does, with nothing changed."""
        self.make_room(version_id, weights.num_bytes)
        self._visible[version_id] = Version(version_id, weights, next(self._namespaces))

    def remove(self, version_id: str) -> None:
        version = self._visible.pop(version_id, None)
        if version is None:
            return
        if version.num_running:
            self._leaving.append(version)
        else:
            self._on_gone(version)

    def versions(self) -> list[VersionInfo]:
        return [
            VersionInfo(version_id, version.weights.config, version.weights.num_bytes, version.num_running)
            for version_id, version in sorted(self._visible.items())
        ]
