"""Memory of this machine, within the limits of this process's cgroups (version 1 or 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def host_bytes() -> int:
    """Memory that this process can still allocate, in bytes. Cached files count as free."""
    left = [max(0, limit - used) for limit, used in _cgroups(_CGROUPS, _MEMBERSHIP)]
    return min([psutil.virtual_memory().available, *left])


def total_bytes() -> int:
    """Memory of the machine, or the lowest limit of this process's cgroups if that is less, in bytes."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroups(_CGROUPS, _MEMBERSHIP))])


def _cgroups(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each cgroup that has a limit, in bytes. Use does not include cached files."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, use, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder, limit, use = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        here = folder / path.lstrip("/")
        # A container may see the path of its cgroup on the host, which is not mounted. The container's cgroup is the
        # root of the mounted tree then.
        for group in [group for group in (here, *here.parents) if group.is_relative_to(folder)]:
            try:
                max_bytes = int((group / limit).read_text())
                used_bytes = int((group / use).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # not there, or "max"
                continue
            yield max_bytes, used_bytes - int(stat.get(cached, 0))
