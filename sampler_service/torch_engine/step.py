"""What one step of the torch engine computes: a token of each running sequence, and pieces of prompts.

Shapes: B running sequences, T packed tokens, R rows that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from sampler_service.core.penalties import Penalized
from sampler_service.core.sampling import Rules, UInt64s
from sampler_service.core.sequence import Sequence as RunningSequence
from sampler_service.core.task import Task
from sampler_service.torch_engine.scheduler import Piece
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import FullWeights
from tinsmith.modeling.kv_cache import SharedPrompts
from tinsmith.modeling.lora import Run

MIN_SHARED_TOKENS = 32
"""Shorter prompts are read as often as they are used: two products cost more."""

TaskSequence = RunningSequence[Task]
TaskPiece = Piece[Task]


def adapter_of(sequence: TaskSequence) -> Adapter | None:
    """The adapter that a sequence is at; those of one job are at the same until its prompt is computed."""
    return sequence.owner.adapter_of(sequence)


def runs_of(segments: Iterable[tuple[Adapter | None, int]]) -> list[Run]:
    """Runs from (adapter, number of rows) of consecutive segments. One stretch of rows is a slice, which is cheaper."""
    stretches: dict[int, list[slice]] = {}
    adapters: dict[int, Adapter] = {}
    start = 0
    for adapter, count in segments:
        stop = start + count
        if adapter is not None:
            mine = stretches.setdefault(id(adapter), [])
            adapters[id(adapter)] = adapter
            if mine and mine[-1].stop == start:
                mine[-1] = slice(mine[-1].start, stop)
            else:
                mine.append(slice(start, stop))
        start = stop
    return [
        Run(
            adapters[key],
            mine[0]
            if len(mine) == 1
            else torch.cat([torch.arange(rows.start, rows.stop) for rows in mine]).to(adapters[key].flat.device),
        )
        for key, mine in stretches.items()
    ]


@dataclass(slots=True)
class Rows:
    """How the sampling rows draw: the running sequences in their order, then new ones."""

    sequences: Sequence[TaskSequence]
    rules: Rules
    keys: UInt64s
    counters: UInt64s
    """Index of the token that is drawn next."""
    topk: list[tuple[int, int]]
    """(row, k) of the rows that want a top-k table."""
    penalized: Penalized | None
    """The rows with penalties or biases; None when there are none."""
    with_grammar: list[int]
    """Indices of the rows that draw only tokens which their grammar allows."""

    @classmethod
    def of(cls, sequences: Sequence[TaskSequence], *, vocab_size: int, device: torch.device) -> Rows:
        return cls(
            sequences=sequences,
            rules=Rules.of([sequence.owner.rule for sequence in sequences], vocab_size=vocab_size, device=device),
            keys=np.array([sequence.owner.keys[sequence.index] for sequence in sequences], np.uint64),
            counters=np.array([len(sequence.tokens) for sequence in sequences], np.uint64),
            topk=[(n, sequence.owner.topk) for n, sequence in enumerate(sequences) if sequence.owner.topk],
            penalized=Penalized.of(
                [
                    (n, penalties, sequence.owner.history(sequence, vocab_size=vocab_size, device=device))
                    for n, sequence in enumerate(sequences)
                    if (penalties := sequence.owner.request.params.penalties)
                ],
                device=device,
            ),
            with_grammar=[n for n, sequence in enumerate(sequences) if sequence.owner.grammar is not None],
        )


@dataclass(slots=True)
class Pass:
    """What one forward pass computes: sequences and pieces for which the base model has the same parameters."""

    parameters: FullWeights | None
    """None: its own."""
    rows: list[int] = field(default_factory=list)
    """Of running sequences, in order."""
    pieces: list[TaskPiece] = field(default_factory=list)


def passes_of(running: Sequence[TaskSequence], pieces: Sequence[TaskPiece]) -> list[Pass]:
    """One for each set of parameters; as a rule there is one."""
    passes: dict[int, Pass] = {}
    for row, sequence in enumerate(running):
        parameters = sequence.owner.parameters_of(sequence)
        passes.setdefault(id(parameters), Pass(parameters)).rows.append(row)
    for piece in pieces:
        parameters = piece.job.owner.parameters_of(piece.job.sequences[0])
        passes.setdefault(id(parameters), Pass(parameters)).pieces.append(piece)
    return list(passes.values())


def shared_prompts_of(running: Sequence[TaskSequence], device: torch.device) -> SharedPrompts | None:
    """None where reading a prompt once for all its sequences would gain nothing."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(running):
        groups.setdefault(id(sequence.origin), []).append(row)
    length = min(sequence.shared_length for sequence in running)
    most = max(len(rows) for rows in groups.values())
    if length < MIN_SHARED_TOKENS or 2 * len(groups) > len(running) or len(groups) * most > 2 * len(running):
        return None
    return SharedPrompts.of(list(groups.values()), length, device)


def _size(sequence: TaskSequence) -> int:
    return sequence.size


@dataclass(slots=True)
class Decoding:
    """The running sequences as tensors; kept from step to step while the same ones run."""

    rows: Rows
    tokens_B: Tensor
    """Newest token of each, which has not been computed yet."""
    positions_B: Tensor
    """And its position."""
    runs: list[Run]
    passes: list[Pass]
    shared: dict[int, SharedPrompts | None]
    """By the size of sequences."""

    @classmethod
    def of(cls, running: Sequence[TaskSequence], *, vocab_size: int, device: torch.device) -> Decoding:
        return cls(
            rows=Rows.of(list(running), vocab_size=vocab_size, device=device),
            tokens_B=torch.tensor([sequence.tokens[-1] for sequence in running], dtype=torch.int64, device=device),
            positions_B=torch.tensor([sequence.length - 1 for sequence in running], dtype=torch.int64, device=device),
            runs=runs_of((adapter_of(sequence), 1) for sequence in running),
            passes=passes_of(running, []),
            shared={size: shared_prompts_of(list(rows), device) for size, rows in groupby(running, key=_size)},
        )

    def advance(self, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B
        self.positions_B = self.positions_B + 1
        self.rows.counters += np.uint64(1)
        if self.rows.penalized is not None:
            self.rows.penalized.take(tokens_B)


@dataclass(slots=True)
class Step:
    """What is computed together, and then drawn."""

    running: Sequence[TaskSequence]
    decoding: Decoding | None
    """Of these; None when there are none."""
    pieces: Sequence[TaskPiece]
    ending: Sequence[TaskPiece] = field(init=False)
    """The pieces with which their prompts end."""

    def __post_init__(self) -> None:
        self.ending = [piece for piece in self.pieces if piece.ends]

    @property
    def sampling(self) -> list[TaskSequence]:
        """Those that get a token: the running ones, then those of the prompts that end here."""
        return [*self.running, *(sequence for piece in self.ending for sequence in piece.job.sequences)]
