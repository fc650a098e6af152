"""The short form of soak.py: a minute, each service killed now and then. What grows is measured in half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import soak

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_a_minute_of_everything_with_random_kills(tmp_path: Path) -> None:
    assert soak.main(["--minutes", "1", "--kill-every", "6", "12", "--folder", str(tmp_path)]) == 0
