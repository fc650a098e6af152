"""Arguments that several benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.rounds import MIN_ROUNDS

SIZES = ("tiny", "small", "medium")
"""Sizes that `tinsmith make-base-model` knows."""


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", type=Path, default=Path("~/.cache/tinsmith-bench"), help="folder of the models (%(default)s)"
    )


def add_size(parser: argparse.ArgumentParser, *, default: str, sizes: Iterable[str] = SIZES) -> None:
    parser.add_argument(
        "--size", choices=tuple(sizes), default=default, help="size of the model, which is made here (%(default)s)"
    )


def add_rounds(parser: argparse.ArgumentParser, *, repeats: int, budget_s: float) -> None:
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of a figure (%(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help=f"seconds of a figure, after {MIN_ROUNDS} rounds (%(default)s)"
    )


def add_only(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    names = list(names)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
