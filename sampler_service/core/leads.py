"""Which version the generations that follow a run are to use. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable

from sampler_service.core.request import Request
from tinsmith.rpc.paths import is_newer


class Leads:
    """The newest version that each followed run has been moved to, for as long as it is resident.

    It is for requests that cross with a move: their version was the newest when they were sent.
    """

    def __init__(self, is_resident: Callable[[str], bool]) -> None:
        self._is_resident = is_resident
        self._newest: dict[str, str] = {}

    def move(self, run_id: str, version_id: str) -> bool:
        """False when the run is at a newer version. Raises InvalidRequest when it is no version of the run."""
        self._newest = {run: newest for run, newest in self._newest.items() if self._is_resident(newest)}
        if is_newer(self._newest.get(run_id, ""), version_id, run_id=run_id):
            return False
        self._newest[run_id] = version_id
        return True

    def first_version(self, request: Request) -> str:
        """What a request that is taken now begins with. Raises InvalidRequest when it does not fit its follow_run."""
        if not request.follow_run:
            return request.version_id
        newest = self._newest.get(request.follow_run, "")
        goes_on = is_newer(newest, request.version_id, run_id=request.follow_run) and self._is_resident(newest)
        return newest if goes_on else request.version_id
