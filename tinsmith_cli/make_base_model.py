"""`tinsmith make-base-model`: makes a small Qwen3 model to try things with."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.cores import SPINS

if TYPE_CHECKING:
    from argparse import _SubParsersAction

SIZES = {"tiny": "1 M parameters, seconds", "small": "16 M parameters", "medium": "110 M parameters"}


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "make-base-model",
        help="make a small Qwen3 model with its own tokenizer",
        description="Makes a Qwen3 model and a byte-level BPE tokenizer with Qwen's chat tokens, from generated "
        "text. The settings determine the weights, except with --pretrain-seconds, which depends on the machine's "
        "speed.",
    )
    sizes = "; ".join(f"{size}: {meaning}" for size, meaning in SIZES.items())
    parser.add_argument("--size", choices=SIZES, required=True, help=sizes)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make; must be new or empty")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text and of the weights (default 0)")
    training = parser.add_mutually_exclusive_group()
    training.add_argument(
        "--pretrain-seconds", type=_positive_float, default=0.0, metavar="N",
        help="train for N seconds on the generated text (default: random weights)",
    )  # fmt: skip
    training.add_argument(
        "--pretrain-steps", type=_positive_int, default=0, metavar="N",
        help="train for N steps instead, which gives equal weights each time",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # OpenMP reads this variable when torch is loaded. A step of `tiny` takes 130 ms on two idle cores, and 215 ms with
    # one thread. Beside a process that takes one of the cores, it takes 300 ms, and 240 ms with one thread; without
    # this bound on spinning it would take 385 ms.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from safetensors import SafetensorError
    from transformers.utils import logging

    from tinsmith.toy.model import Recipe, make

    logging.disable_progress_bar()
    recipe = Recipe(arguments.size, arguments.seed, arguments.pretrain_seconds, arguments.pretrain_steps)
    try:
        made = make(recipe, arguments.out, report=_report)
    except FileExistsError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:  # no room, or no right to write there
        print(f"tinsmith: --out: {arguments.out} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out} {'is made' if made else 'already holds this model; nothing to do'}")
    return 0


def _report(line: str) -> None:
    print(line, flush=True)


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
