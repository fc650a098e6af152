"""What is known of who kills samplers: the requests that were at one when its process or its engine died.

A request that was there is a suspect: it may have done it. Suspects are given to a sampler one at a time, until they
have their first token. So when a sampler dies again, and a suspect is on trial there, that one has done it, and nobody
else is suspected. A death without a trial makes suspects of all that were there; one that was there at two deaths, and
shares that with nobody, has done it; several that share it are on trial until they end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Suspicion:
    """Against one request."""

    deaths: int = 0
    """Of samplers that may have died of it."""


@dataclass(slots=True, eq=False)
class Life:
    """A sampler's process, from when it begins to serve until it is lost."""

    is_over: bool = False
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    on_trial: Suspicion | None = None
    """The suspect that has no token here yet. It stays when the sampler dies."""
    suspects: set[Suspicion] = field(default_factory=set)
    """Those in work here that have one. They stay when the sampler dies."""

    def ends(self, suspicion: Suspicion) -> bool:
        """The sampler has died with this request in work. True when the request has now killed two."""
        self.is_over = True
        if self.on_trial is not None and self.on_trial is not suspicion:
            return False
        suspicion.deaths += 1
        is_sole = self.on_trial is suspicion or self.suspects == {suspicion}
        return suspicion.deaths > 1 and is_sole
