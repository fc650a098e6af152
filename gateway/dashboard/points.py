"""Points of a run's metrics: made from the trainer's answers, merged, and read as numbers. Pure functions.

The end of a metric's name says how several answers are merged: ":sum", ":mean" (weighted by sequences), ":max" or
":min", as the SDK merges the chunks of one batch. A metric is stored as [value, weight, number of values that were not
finite], and the value of a mean is multiplied by its weight. So merged points can be merged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gateway.database.tables.history import MetricPoint
from tinsmith.v1 import trainer_pb2 as pb

Sums = dict[str, list[float]]

NUM_TOKENS = "num_tokens:sum"
COMPUTE_SECONDS = "compute_seconds:sum"
LEARNING_RATE = "learning_rate:mean"
FORWARD = "forward/"
"""Prefix of the metrics of batches without gradients, which are no part of the training curve."""


def point_of(
    run_id: str,
    seq_id: int,
    reply: pb.ForwardBackwardResponse | pb.OptimStepResponse,
    *,
    at: float,
    body: bytes = b"",
    is_forward_only: bool = False,
    compute_s: float | None = None,
) -> dict[str, Any]:
    """An answer of the trainer as the columns of a `MetricPoint`.

    `body`: the request of an OptimStep; empty when this gateway does not have it.
    """
    metrics = dict(reply.metrics)
    weight = 1.0
    if isinstance(reply, pb.OptimStepResponse):
        if body:
            request = pb.OptimStepRequest.FromString(body)
            metrics[LEARNING_RATE] = getattr(request, request.WhichOneof("params") or "adam_params").learning_rate
    else:
        weight = metrics.get("num_sequences:sum") or 1.0
    if compute_s is not None:
        metrics[COMPUTE_SECONDS] = compute_s
    prefix = FORWARD if is_forward_only else ""
    return {
        "run_id": run_id,
        "seq_id": seq_id,
        "first_seq_id": seq_id,
        "at": at,
        "num_steps": int(isinstance(reply, pb.OptimStepResponse)),
        "num_operations": 1,
        "sums": {f"{prefix}{name}": _entry(name, value, weight) for name, value in metrics.items()},
    }


def _kind(name: str) -> str:
    return name.rpartition(":")[2]


def _entry(name: str, value: float, weight: float) -> list[float]:
    if not math.isfinite(value):
        return [0.0, 0.0, 1]
    return [value * weight, weight, 0] if _kind(name) == "mean" else [value, 1.0, 0]


def _together(name: str, one: list[float], other: list[float]) -> list[float]:
    kind = _kind(name)
    if kind in ("max", "min"):
        finite = [value for value, weight, _ in (one, other) if weight]
        pick = max if kind == "max" else min
        return [pick(finite, default=0.0), one[1] + other[1], one[2] + other[2]]
    return [mine + theirs for mine, theirs in zip(one, other, strict=True)]


def merge(points: Sequence[MetricPoint]) -> MetricPoint:
    """Merges neighbouring points, in order, into one."""
    if len(points) == 1:
        return points[0]
    sums: Sums = {}
    for point in points:
        for name, entry in point.sums.items():
            sums[name] = _together(name, sums[name], entry) if name in sums else entry
    return MetricPoint(
        run_id=points[0].run_id,
        seq_id=points[-1].seq_id,
        first_seq_id=min(point.first_seq_id for point in points),
        at=max(point.at for point in points),
        num_steps=sum(point.num_steps for point in points),
        num_operations=sum(point.num_operations for point in points),
        sums=sums,
    )


def by_steps(points: Iterable[MetricPoint]) -> tuple[list[MetricPoint], list[MetricPoint]]:
    """The points of optimizer steps, each merged with the batches before it, and the batches that wait for a step."""
    steps: list[MetricPoint] = []
    waiting: list[MetricPoint] = []
    for point in points:
        waiting.append(point)
        if point.num_steps:
            steps.append(merge(waiting))
            waiting = []
    return steps, waiting


def _steps(point: MetricPoint) -> int:
    return point.num_steps


def _operations(point: MetricPoint) -> int:
    return point.num_operations


def thinned(points: Sequence[MetricPoint], *, target: int) -> list[MetricPoint]:
    """At most `target` points of steps, and at most `target` points of batches that wait for a step.

    Each point but the last stands for about the same number of steps, even after repeated thinning.
    """
    steps, waiting = by_steps(points)
    return [*_even(steps, target=target, size=_steps), *_even(waiting, target=target, size=_operations)]


def _even(points: Sequence[MetricPoint], *, target: int, size: Callable[[MetricPoint], int]) -> Iterator[MetricPoint]:
    if len(points) <= target:
        yield from points
        return
    total, taken, begin, num_given = sum(map(size, points)), 0, 0, 0
    for end, point in enumerate(points, start=1):
        taken += size(point)
        if taken * target >= (num_given + 1) * total or end == len(points):
            yield merge(points[begin:end])
            begin = end
            num_given = taken * target // total


def value_of(name: str, point: MetricPoint) -> float | str | None:
    """The value of a metric at this point. A sum is divided by the number of steps.

    The value is "nan" when one of the merged values was not finite, and None when the point does not have the metric.
    """
    entry = point.sums.get(name)
    if entry is None:
        return None
    value, weight, num_broken = entry
    if num_broken:
        return "nan"
    match _kind(name):
        case "sum":
            return value / max(1, point.num_steps)
        case "mean":
            return value / weight if weight else None
    return value


def loss_per_token(point: MetricPoint, *, prefix: str = "") -> float | str | None:
    loss, tokens = point.sums.get(f"{prefix}loss:sum"), point.sums.get(f"{prefix}{NUM_TOKENS}")
    if loss is None or tokens is None:
        return None
    if loss[2]:
        return "nan"
    return loss[0] / tokens[0] if tokens[0] else None


def tokens_of(point: MetricPoint) -> float:
    """Number of tokens that were trained on."""
    return point.sums.get(NUM_TOKENS, [0.0])[0]


Columns = dict[str, list[Any]]


def columns(points: Sequence[MetricPoint], *, steps_before: int, at_before: float | None) -> Columns:
    """The points as the page reads them: for each metric a list with one value for each point.

    `steps_before`: number of steps before the first point. `at_before`: time of the point before it, in seconds since
    1970; None when there is none.
    """
    names = sorted({name for point in points for name in point.sums if _kind(name) != "sum"})
    found: Columns = {"seq": [], "step": [], "at": [], "num_steps": [], "tokens": []}
    series: Columns = {
        "loss/token": [loss_per_token(point) for point in points],
        f"{FORWARD}loss/token": [loss_per_token(point, prefix=FORWARD) for point in points],
        **{name: [value_of(name, point) for point in points] for name in names},
        **{
            name: [value_of(name, point) for point in points]
            for name in sorted({name for point in points for name in point.sums})
            if _kind(name) == "sum" and not name.removeprefix(FORWARD).startswith(("num_", "loss:", "compute_"))
        },
        "tokens/s": [],
        "s/step": [],
        "compute/step": [value_of(COMPUTE_SECONDS, point) for point in points],
        "tokens/step": [value_of(NUM_TOKENS, point) for point in points],
    }
    step, at = steps_before, at_before
    for point in points:
        step += point.num_steps
        seconds = None if at is None or point.at <= at else point.at - at
        at = point.at
        found["seq"].append(point.seq_id)
        found["step"].append(step)
        found["at"].append(point.at)
        found["num_steps"].append(point.num_steps)
        found["tokens"].append(tokens_of(point))
        series["tokens/s"].append(None if seconds is None else tokens_of(point) / seconds)
        series["s/step"].append(None if seconds is None else seconds / max(1, point.num_steps))
    found["series"] = {name: values for name, values in series.items() if any(each is not None for each in values)}  # type: ignore[assignment]
    return found
