"""The table of docs/security.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "security.md").read_text().partition("## Test matrix")[2]


def test_every_row_names_tests_that_exist() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            functions = {
                node.name
                for node in ast.parse((ROOT / path).read_text()).body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, f"{path} has no {name}"


def test_the_attacks_that_an_operator_asks_about_are_there() -> None:
    for word in ("foreign", "traversal", "oversized", "malformed", "replayed", "slow-loris"):
        assert word in TABLE
