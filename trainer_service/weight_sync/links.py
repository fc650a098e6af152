"""The groups in use: one for each sampler, so that a sampler that comes or goes disturbs no other one's.

All parameters of a model are too many bytes to be sent to each sampler by itself. They are broadcast to one group of
all samplers, which takes the place of these samplers' own groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinsmith.errors import ServiceError
from tinsmith.faults import is_lasting_fault
from tinsmith.tasks import cancel_all
from trainer_service.metrics import Metrics
from trainer_service.weight_sync.calls import ChannelBroken, in_thread
from trainer_service.weight_sync.group import Former, Group
from trainer_service.weight_sync.samplers import Sampler, Samplers

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0
_YOUNG_S = 0.75
"""For how long publishes wait for the group of a sampler that has begun to serve, in seconds."""
_AGAIN_S = 0.05
"""Pause before a second attempt to form the group of a sampler, in seconds. It doubles with each attempt."""
_RARELY_S = 30.0
"""Longest pause between attempts to form the group of a sampler, in seconds."""


class Links:
    """Made and used on one event loop."""

    def __init__(self, former: Former, samplers: Samplers, metrics: Metrics) -> None:
        self._former = former
        self._samplers = samplers
        self._metrics = metrics
        self._groups: dict[Sampler, Group] = {}
        self._forming: set[asyncio.Task[None]] = set()
        self._young: set[asyncio.Task[None]] = set()
        """The tasks of `_forming` that began less than _YOUNG_S ago."""
        self.device_failed = asyncio.Event()
        """Set when a group was to be formed in the background, and the device can compute no more."""

    async def close(self) -> None:
        await cancel_all(self._forming)
        if closing := [in_thread(group.close) for group in self.groups]:
            await asyncio.wait(closing, timeout=_CLOSE_S)

    def __contains__(self, sampler: Sampler) -> bool:
        """True when the sampler is a member of a group."""
        return sampler in self._groups

    @property
    def groups(self) -> list[Group]:
        """All groups, each once."""
        return list({group.epoch: group for group in self._groups.values()}.values())

    async def group_of(self, members: Sequence[Sampler]) -> Group:
        """The group of exactly these samplers, whose locks the caller holds; forms it if there is none. Raises the
        errors of `Former.form`."""
        group = self._groups.get(members[0])
        if group is None or list(group.members) != list(members):
            self.drop(members)
            group = await self._former.form(members)
            self._groups |= dict.fromkeys(members, group)
            self._metrics.publishing.weight_groups.inc()
        return group

    def drop(self, samplers: Sequence[Sampler]) -> None:
        """Gives up all groups that have one of these samplers as a member. Their other members get groups of their
        own."""
        for group in [group for group in self.groups if not set(samplers).isdisjoint(group.members)]:
            for member in group.members:
                del self._groups[member]
                if member not in samplers:
                    self.begin(member)
            # Closing may block on a slow store, so it runs on a thread. Its errors do not matter: the group is not
            # used.
            in_thread(group.close).add_done_callback(lambda closing: closing.exception())

    # Ahead of need

    def begin(self, sampler: Sampler) -> None:
        """Begins to form the group of a sampler, in the background, and goes on until it has one or does not serve."""
        task = asyncio.create_task(self._form_ahead(sampler))
        for tasks in (self._forming, self._young):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        asyncio.get_running_loop().call_later(_YOUNG_S, self._young.discard, task)

    async def formed(self) -> None:
        """Waits for the groups that were begun less than _YOUNG_S ago, for up to that time."""
        if self._young:
            await asyncio.wait(self._young, timeout=_YOUNG_S)

    async def _form_ahead(self, sampler: Sampler) -> None:
        pause_s = 0.0
        while True:
            async with sampler.lock:
                if not sampler.serving or await self._try_to_form(sampler):
                    return
            pause_s = min(max(2 * pause_s, _AGAIN_S), _RARELY_S)
            await asyncio.sleep(pause_s)

    async def _try_to_form(self, sampler: Sampler) -> bool:
        """True when the sampler has a group, or the device can compute no more."""
        if sampler in self:
            return True
        try:
            await self._samplers.guarded([sampler], self.group_of([sampler]), among=self._samplers.serving())
        except ChannelBroken as error:
            logger.warning("no weights can be sent to a sampler yet: %s", error)
            if sampler.serving:  # it was not lost, so its transport may be the cause
                self._former.distrust([sampler])
            return False
        except ServiceError as error:
            logger.error("weights cannot be published: %s", error)
            return False
        except RuntimeError as error:
            if not is_lasting_fault(error):
                raise
            logger.critical("the device has failed while a group was formed", exc_info=error)
            self.device_failed.set()
        return True
