"""Finds requests that kill samplers.

When a sampler's process or engine dies, any request that it had in work may be the cause, and becomes a suspect. A
suspect is on trial until its first token, and a sampler takes one suspect on trial at a time. If the sampler dies
during a trial, the suspect on trial is the cause, and no other request is suspected. If it dies without a trial, all
its requests become suspects. A suspect that is present at a second death is the cause if it is the only suspect there;
several such suspects stay on trial until they end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Suspicion:
    """How much one request is suspected."""

    deaths: int = 0
    """Number of samplers that died and may have been killed by the request."""


@dataclass(slots=True, eq=False)
class Life:
    """One life of a sampler's process: from when it begins to serve until it is lost."""

    is_over: bool = False
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    on_trial: Suspicion | None = None
    """The suspect that has no token from this sampler yet. It is kept when the sampler dies."""
    suspects: set[Suspicion] = field(default_factory=set)
    """Suspects in work here that have their first token. They are kept when the sampler dies."""

    def ends(self, suspicion: Suspicion) -> bool:
        """Notes that the sampler died with this request in work. True when the request has now killed two samplers."""
        self.is_over = True
        if self.on_trial is not None and self.on_trial is not suspicion:
            return False
        suspicion.deaths += 1
        is_sole = self.on_trial is suspicion or self.suspects == {suspicion}
        return suspicion.deaths > 1 and is_sole
