"""The groups in use: one for each sampler, so that a sampler that comes or goes disturbs no other one's.

All parameters of a model are too many bytes to be sent to each sampler by itself. They are broadcast to one group of
all samplers, which takes the place of these samplers' own groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer_service.metrics import Metrics
from trainer_service.weight_sync.calls import in_thread
from trainer_service.weight_sync.group import Former, Group
from trainer_service.weight_sync.samplers import Sampler


class Links:
    """Made and used on one event loop. Whoever forms a group of samplers holds the locks of these samplers."""

    def __init__(self, former: Former, metrics: Metrics) -> None:
        self._former = former
        self._metrics = metrics
        self._groups: dict[Sampler, Group] = {}

    def __contains__(self, sampler: Sampler) -> bool:
        """True when the sampler is a member of a group."""
        return sampler in self._groups

    @property
    def groups(self) -> list[Group]:
        """All groups, each once."""
        return list({group.epoch: group for group in self._groups.values()}.values())

    async def group_of(self, members: Sequence[Sampler]) -> Group:
        """The group of exactly these samplers; forms it if there is none. Raises the errors of `Former.form`."""
        group = self._groups.get(members[0])
        if group is None or list(group.members) != list(members):
            self.drop(members)
            group = await self._former.form(members)
            self._groups |= dict.fromkeys(members, group)
            self._metrics.publishing.weight_groups.inc()
        return group

    def drop(self, samplers: Sequence[Sampler]) -> None:
        """Gives up all groups that have one of these samplers as a member."""
        for group in [group for group in self.groups if not set(samplers).isdisjoint(group.members)]:
            for member in group.members:
                del self._groups[member]
            # Closing may block on a slow store, so it runs on a thread. Its errors do not matter: the group is not
            # used.
            in_thread(group.close).add_done_callback(lambda closing: closing.exception())
