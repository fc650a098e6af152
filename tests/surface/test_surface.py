"""Every endpoint, every public method of the SDK and every command of its CLI has a test that proves it.

The table in docs/api.md is made here: `UPDATE_DOCS=1 pytest tests/surface` writes it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.surface import surface
from tests.surface.proofs import COMMANDS, ENDPOINTS, METHODS, REMARKS, proof_of

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs" / "api.md"
BEGIN, END = "<!-- surface: begin -->\n", "<!-- surface: end -->\n"


@functools.cache
def functions_of(file: str) -> set[str]:
    """Names of the functions of a file."""
    body = ast.parse((TESTS / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def check_proof(proof: str, mentions: str) -> None:
    """The test exists, and its file uses what it is said to prove."""
    file, _, test = proof.partition("::")
    assert (TESTS / file).exists(), f"{proof}: there is no such file"
    assert test in functions_of(file), f"{proof}: there is no such test"
    assert re.search(mentions, (TESTS / file).read_text()), f"{proof} never uses {mentions}"


def test_every_public_method_of_the_sdk_has_a_proof() -> None:
    known = surface.methods()
    assert not [name for name in known if proof_of(name, METHODS) is None]
    assert not set(METHODS) - set(known), "not methods of the installed SDK"


@pytest.mark.parametrize("name", surface.methods())
def test_the_proof_calls_the_method(name: str) -> None:
    proof = proof_of(name, METHODS)
    assert proof is not None
    check_proof(proof, rf"\b{name.partition('.')[2]}\b")


def test_every_command_of_the_cli_has_a_proof() -> None:
    known = surface.commands()
    assert not [name for name in known if name not in REMARKS and name not in COMMANDS]
    assert not set(COMMANDS) - set(known), "not commands of the installed CLI"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_proof_runs_the_command(name: str) -> None:
    words = [re.escape(word) for word in name.split()[1:]]
    check_proof(COMMANDS[name], r"[\s\"',\[\]]+".join(words))


def test_every_endpoint_has_a_proof() -> None:
    known = surface.endpoints()
    assert not [name for name in known if name not in ENDPOINTS]
    assert not set(ENDPOINTS) - set(known), "not routes of the gateway"


@pytest.mark.parametrize("name", sorted(ENDPOINTS))
def test_the_proof_of_the_endpoint_exists(name: str) -> None:
    check_proof(ENDPOINTS[name], "")


def test_docs_show_the_table() -> None:
    wanted = "\n".join(
        [
            *_table("Endpoint", surface.endpoints(), ENDPOINTS),
            "",
            *_table("Method of the SDK", surface.methods(), METHODS),
            "",
            *_table("Command", surface.commands(), COMMANDS),
            "",
        ]
    )
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(before + BEGIN + wanted + END + after)
    else:
        assert shown == wanted, "the table is old: UPDATE_DOCS=1 pytest tests/surface writes it"


def _table(title: str, names: Sequence[str], proofs: dict[str, str]) -> list[str]:
    rows = [f"| {title} | | proved by `tests/` |", "|---|---|---|"]
    for name in names:
        proof = proof_of(name, proofs)
        what = REMARKS.get(name, "supported")
        rows.append(f"| `{name}` | {what} | {f'`{proof}`' if proof else '-'} |")
    return rows
