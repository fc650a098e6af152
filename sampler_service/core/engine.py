"""The interface of an engine that generates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sampler_service.core.request import Generation, QueueStatus, Request
from sampler_service.core.versions import VersionInfo
from tinsmith.modeling.adapter import Target
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.rpc.errors import NotReady


class SamplingEngine(Protocol):
    """Generates from one base model and the versions installed beside it. All methods belong to the event loop."""

    @property
    def name(self) -> str:
        """Which engine: "torch" or "vllm"."""
        ...

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda"."""
        ...

    @property
    def weights_device(self) -> str:
        """Where this process wants versions to arrive: "cpu" or "cuda"."""
        ...

    @property
    def max_context_length(self) -> int:
        """Longest prompt and output together: of the model, and no more than the key/value cache holds."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Tokens that end a sequence when the request has no stop of its own."""
        ...

    @property
    def targets(self) -> Sequence[Target]:
        """Layers that a version may change."""
        ...

    async def submit(self, request: Request, *, stream: bool = False, request_id: str = "") -> Generation:
        """Checks and queues a request. Raises InvalidRequest, VersionNotLoaded, OutOfCapacity or EngineDead."""
        ...

    def describe(self, request_id: str) -> QueueStatus | None:
        """Progress of the youngest request with this id; None when there is none."""
        ...

    def full_weights(self, flat: Tensor) -> FullWeights:
        """A version of all parameters over a buffer. Raises Unsupported when the engine serves adapters only."""
        ...

    def memory_for(self, layout: Weights) -> Weights | None:
        """A version of this layout over memory of the engine's own, for it to arrive in; None: any memory will do.

        Raises OutOfCapacity.
        """
        ...

    def make_room(self, version_id: str, num_bytes: int) -> Sequence[Weights]:
        """Evicts what must leave for a version that is to come, and returns it: its buffers may be used again.

        Raises AlreadyExists or OutOfCapacity when install would.
        """
        ...

    async def install(
        self, version_id: str, weights: Weights, *, on_probation: bool = False, checksum: str = ""
    ) -> None:
        """Makes a version visible to the next request; running ones keep theirs. The weights are the engine's now.

        `on_probation`: only to requests that ask for it as such, until it is confirmed; for a minute at most.
        `checksum`: of the bytes that it came as, for whoever announces the version again.
        """
        ...

    def confirm(self, version_id: str) -> None:
        """Makes a version on probation visible to all. Raises VersionNotLoaded."""
        ...

    def remove(self, version_id: str) -> None:
        """Hides a version at once and frees it when no generation uses it. An unknown one is no error."""
        ...

    async def move(self, run_id: str, version_id: str) -> int:
        """Lets the generations that follow a run go on with a version of it, from their next token; those that come
        start on it. Returns how many sequences go on with it; 0 when the run has moved to a newer one.

        Raises InvalidRequest when it is no version of the run, VersionNotLoaded, EngineDead, or Unsupported.
        """
        ...

    def versions(self) -> list[VersionInfo]:
        """Visible versions, by id."""
        ...


@dataclass(slots=True)
class EngineSlot:
    """The engine, once the model is loaded."""

    engine: SamplingEngine | None = None

    def get(self) -> SamplingEngine:
        if self.engine is None:
            raise NotReady("the base model is still loading; health turns to SERVING when it is ready")
        return self.engine
