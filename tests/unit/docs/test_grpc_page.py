"""The tables of docs/grpc.md name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinsmith.rpc import errors
from trainer_service.objectives.losses import LOSS_FNS

PAGE = (Path(__file__).parents[3] / "docs" / "grpc.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    table = PAGE[PAGE.index(f"\n## {heading}\n") :].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_error_stands_beside_its_code() -> None:
    found = {
        (code.strip("`"), reason)
        for code, reasons, *_ in rows("Errors")
        for reason in re.findall(r"[A-Z_]{4,}", reasons)
    }
    expected = {(kind.code.name, kind.reason) for kind in errors._BY_REASON.values()}
    assert found == expected


def test_every_loss_has_its_settings_and_their_defaults() -> None:
    found = {
        name: {key: float(number) for key, number in re.findall(r"`(\w+)` \(([\d.]+)\)", settings)}
        for names, _, settings in rows("Losses")
        for name in re.findall(r"`(\w+)`", names)
    }
    assert found.pop("custom") == {}
    assert found == {name: dict(loss.config) for name, loss in LOSS_FNS.items()}


@pytest.mark.parametrize("name", LOSS_FNS)
def test_every_array_of_a_loss_is_named(name: str) -> None:
    arrays = {names.strip("`"): described for names, described, *_ in rows("Losses")}
    told, row = arrays["each"], arrays[name]
    while row:
        told += row
        other = re.match(r"as `(\w+)`", row)
        row = arrays["importance_sampling"] if row.startswith("likewise") else arrays[other[1]] if other else ""
    assert set(LOSS_FNS[name].arrays) <= set(re.findall(r"`(\w+)`", told))
