"""Lays the datums of a pass end to end, with the beginnings that datums of a model share only once.

Shapes: N tokens of all datums, T rows, M targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import positions_of
from tinsmith.modeling.prefixes import LEAST_SAVED, Forest, Ints, Tokens, forest_of, num_common
from tinsmith.modeling.tower import PlacedPicture, positions_with_pictures
from trainer_service.engine.batch import Datum, Example

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Pack:
    """The datums of one pass, in host memory."""

    num_tokens: int
    tokens_T: Tensor
    """int64."""
    positions: Tensor
    """int64 [T]; [3, T] with pictures."""
    layout: Packed
    placed: Sequence[PlacedPicture]
    """The pictures, in rising order of their rows."""
    models: Sequence[tuple[str, slice]]
    """Each model with the rows of its datums."""
    rows_M: Ints
    """The row of each target, in rising order."""
    targets_M: Ints
    sizes: Sequence[int]
    """Number of targets of each datum."""
    order_M: Ints | None
    """Index in `targets_M` of each target, in the order of the datums; None if both orders are the same."""

    @classmethod
    def of(cls, examples: Sequence[Example], *, share: bool) -> Pack:
        """`examples`: at least one; those of a model lie together."""
        datums = [example.datum for example in examples]
        lengths = [datum.length for datum in datums]
        starts = np.cumsum([0, *lengths])
        tokens_N = np.concatenate([datum.tokens_N for datum in datums])
        placed = [
            replace(one, start=int(start) + one.start)
            for datum, start in zip(datums, starts, strict=False)
            for one in datum.pictures
        ]
        positions = positions_with_pictures(lengths, placed, _HOST) if placed else positions_of(lengths, _HOST)
        rows_M = np.concatenate([_rows(datum, start) for datum, start in zip(datums, starts, strict=False)])
        targets_M = np.concatenate([datum.targets.ravel() for datum in datums])
        by_model: dict[str, list[int]] = {}
        for n, example in enumerate(examples):
            by_model.setdefault(example.model_id, []).append(n)
        pack = cls(
            num_tokens=tokens_N.size,
            tokens_T=torch.from_numpy(tokens_N).long(),
            positions=positions,
            layout=Packed(lengths),
            placed=placed,
            models=[(key, slice(int(starts[own[0]]), int(starts[own[-1] + 1]))) for key, own in by_model.items()],
            rows_M=rows_M,
            targets_M=targets_M,
            sizes=[datum.targets.size for datum in datums],
            order_M=None,
        )
        if not share:
            return pack
        forest = forest_of(_alike([[datums[n] for n in own] for own in by_model.values()]))
        return pack if forest is None else pack._shared(forest)

    def _shared(self, forest: Forest) -> Pack:
        """This pack, with common beginnings once."""
        sources = torch.from_numpy(forest.sources_T)
        rows_M = forest.rows_N[self.rows_M]
        rising = np.argsort(rows_M, kind="stable")
        order_M = np.empty_like(rising)
        order_M[rising] = np.arange(rising.size)
        places = {int(forest.rows_N[one.start]): one for one in self.placed}
        borders = [slice(int(forest.rows_N[rows].min()), int(forest.rows_N[rows].max()) + 1) for _, rows in self.models]
        return replace(
            self,
            tokens_T=self.tokens_T[sources],
            positions=self.positions[..., sources],
            layout=Packed(forest.lengths, forest.below),
            placed=[replace(one, start=row) for row, one in sorted(places.items())],
            models=[(model_id, rows) for (model_id, _), rows in zip(self.models, borders, strict=True)],
            rows_M=rows_M[rising],
            targets_M=self.targets_M[rising],
            order_M=order_M,
        )

    @property
    def num_shared(self) -> int:
        """Number of tokens that are not computed, because they share their rows with another datum's tokens."""
        return self.num_tokens - self.tokens_T.numel()

    def by_datum(self, logprobs_M: Tensor) -> Sequence[Tensor]:
        """The logprobs of each datum's targets, in row-major order."""
        own_M = logprobs_M if self.order_M is None else logprobs_M[torch.from_numpy(self.order_M)]
        return own_M.split(self.sizes)


def num_shared(datums: Sequence[Datum]) -> list[int]:
    """For each datum the number of its tokens that need not be computed, because the datum before it begins with
    them."""
    (numbers,) = _alike([datums])
    found = [0]
    for datum, before, own in zip(datums[1:], numbers, numbers[1:], strict=False):
        common = num_common(before, own)
        found.append(min(common, datum.charge - 1) if common >= LEAST_SAVED else 0)  # each datum has a cost
    return found


def _alike(groups: Sequence[Sequence[Datum]]) -> list[list[Tokens]]:
    """Numbers of the datums' tokens that are equal for equal tokens: a picture's have numbers of their own."""
    pictures: dict[bytes, int] = {}
    return [[_numbers(datum, pictures) for datum in datums] for datums in groups]


def _numbers(datum: Datum, pictures: dict[bytes, int]) -> Tokens:
    if not datum.pictures:
        return datum.tokens_N
    numbers = datum.tokens_N.copy()
    for one in datum.pictures:
        number = pictures.setdefault(one.picture.digest, len(pictures))
        numbers[one.start : one.start + one.picture.num_tokens] = -1 - number
    return numbers


def _rows(datum: Datum, start: int) -> Ints:
    """The packed row of each of the datum's targets, in row-major order: int64 [number of targets]."""
    rows = np.arange(start, start + datum.length)
    return rows if datum.targets.ndim == 1 else np.repeat(rows, datum.targets.shape[1])
