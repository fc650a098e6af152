"""Files and folders that the pages for contributors name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    paths = {
        path for path in re.findall(r"(?<![\w./])\w[\w.-]*(?:/[\w.-]+)+", text) if (ROOT / path.split("/")[0]).is_dir()
    }
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", text))
    assert paths | links
    assert {path for path in paths if not (ROOT / path.rstrip(".")).exists()} == set()
    assert {link for link in links if not (page.parent / link).exists()} == set()
