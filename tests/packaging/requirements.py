"""Requirements of Tinsmith's extras, followed through the metadata of what is installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def required(extras: Iterable[str] = ()) -> set[str]:
    """Names of all distributions that `pip install tinsmith[extras]` needs here, without tinsmith itself.

    Reads pyproject.toml, not the metadata of an editable installation, which may be older. Raises PackageNotFoundError
    where a requirement is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [Requirement(line) for line in project["dependencies"]]
    by_extra = {name: [Requirement(line) for line in lines] for name, lines in project["optional-dependencies"].items()}
    pending = list(own)
    for extra in extras:
        pending += by_extra[extra]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        name, wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, wanted) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add((name, wanted))
        if name == "tinsmith":
            pending += [one for extra in wanted for one in by_extra[extra]]
            continue
        for line in metadata.requires(name) or ():
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                one.marker = None
                pending.append(one)
    return {name for name, _ in seen} - {"tinsmith"}
