"""Points of a run's metrics: merged and thinned, they still say the same."""

from __future__ import annotations

import math
import random

import pytest

from gateway.dashboard.points import (
    COMPUTE_SECONDS,
    LEARNING_RATE,
    by_steps,
    columns,
    loss_per_token,
    merge,
    point_of,
    thinned,
    value_of,
)
from gateway.database.tables.history import MetricPoint
from tinsmith.v1 import trainer_pb2 as pb

RUN = "s:train:0"


def batch(seq_id: int, *, is_forward_only: bool = False, **metrics: float) -> MetricPoint:
    given = {name.replace("__", ":"): value for name, value in metrics.items()}
    reply = pb.ForwardBackwardResponse(metrics=given)
    columns = point_of(RUN, seq_id, reply, at=100.0 + seq_id, is_forward_only=is_forward_only, compute_s=0.5)
    return MetricPoint(**columns)


def step(seq_id: int, *, norm: float = 1.0, learning_rate: float = 1e-3) -> MetricPoint:
    reply = pb.OptimStepResponse(metrics={"grad_norm:mean": norm})
    adam = pb.AdamParams(learning_rate=learning_rate)
    body = pb.OptimStepRequest(model_id=RUN, seq_id=seq_id, adam_params=adam).SerializeToString()
    return MetricPoint(**point_of(RUN, seq_id, reply, at=100.0 + seq_id, body=body))


def run_of(num_steps: int) -> list[MetricPoint]:
    """Two batches and a step, again and again."""
    rng = random.Random(0)
    points = []
    for n in range(num_steps):
        for seq_id in (3 * n + 1, 3 * n + 2):
            points.append(batch(seq_id, loss__sum=rng.random() * 10, num_tokens__sum=10, num_sequences__sum=2))
        points.append(step(3 * n + 3))
    return points


def test_the_batches_before_a_step_make_one_point_with_it() -> None:
    first = batch(1, loss__sum=6, num_tokens__sum=10, num_sequences__sum=3, sampler_kl__mean=1, ratio__max=2)
    second = batch(2, loss__sum=2, num_tokens__sum=30, num_sequences__sum=1, sampler_kl__mean=5, ratio__max=7)
    (point,), waiting = by_steps([first, second, step(3, norm=4, learning_rate=0.25)])
    assert waiting == []
    assert (point.first_seq_id, point.seq_id, point.num_steps, point.num_operations) == (1, 3, 1, 3)
    assert loss_per_token(point) == 8 / 40
    assert value_of("sampler_kl:mean", point) == (3 * 1 + 1 * 5) / 4  # by sequences, as the SDK merges chunks
    assert value_of("ratio:max", point) == 7
    assert value_of("grad_norm:mean", point) == 4
    assert value_of(LEARNING_RATE, point) == 0.25
    assert value_of(COMPUTE_SECONDS, point) == 1.0


def test_batches_without_a_step_wait_for_it() -> None:
    points = [batch(1, loss__sum=1), step(2), batch(3, loss__sum=1)]
    steps, waiting = by_steps(points)
    assert [point.seq_id for point in steps] == [2]
    assert [point.seq_id for point in waiting] == [3]


def test_a_sum_over_several_steps_is_that_of_one() -> None:
    steps, _ = by_steps(run_of(4))
    assert value_of("num_tokens:sum", merge(steps)) == 20


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_stays_visible_after_every_merge(value: float) -> None:
    points = [batch(1, loss__sum=value, num_tokens__sum=1), step(2), batch(3, loss__sum=1, num_tokens__sum=1), step(4)]
    point = merge(by_steps(points)[0])
    assert loss_per_token(point) == "nan"
    assert value_of("grad_norm:mean", point) == 1
    assert all(math.isfinite(number) for entry in point.sums.values() for number in entry), "JSON has no NaN"


def test_batches_without_gradients_are_apart() -> None:
    (point,), _ = by_steps(
        [
            batch(1, is_forward_only=True, loss__sum=5, num_tokens__sum=5),
            batch(2, loss__sum=1, num_tokens__sum=4),
            step(3),
        ]
    )
    assert loss_per_token(point) == 0.25
    assert loss_per_token(point, prefix="forward/") == 1


@pytest.mark.parametrize("num_steps", [5, 64, 65, 1000])
def test_thinning_bounds_the_points_and_keeps_every_step_and_mean(num_steps: int) -> None:
    points = run_of(num_steps)
    fewer = thinned(points, target=64)
    assert len(fewer) <= 64
    assert sum(point.num_steps for point in fewer) == num_steps
    assert loss_per_token(merge(fewer)) == pytest.approx(loss_per_token(merge(points)))
    assert [point.first_seq_id for point in fewer[1:]] == [point.seq_id + 1 for point in fewer[:-1]]


def test_a_run_that_is_thinned_again_and_again_is_equally_fine_everywhere() -> None:
    points: list[MetricPoint] = []
    for point in run_of(4000):
        points.append(point)
        if len(points) > 256:
            points = thinned(points, target=64)
    steps = [point.num_steps for point in thinned(points, target=64)]
    assert sum(steps) == 4000
    assert max(steps) <= 4 * 4000 / 64


def test_batches_that_never_see_a_step_are_bounded_too() -> None:
    points = [batch(seq_id, loss__sum=1, num_tokens__sum=2) for seq_id in range(1, 1001)]
    fewer = thinned(points, target=64)
    assert len(fewer) <= 64
    assert sum(point.num_operations for point in fewer) == 1000


def test_columns_have_one_value_for_each_point_and_leave_out_what_nobody_has() -> None:
    steps, _ = by_steps([*run_of(2), batch(7, loss__sum=1, num_tokens__sum=10, ess__mean=0.5), step(8)])
    found = columns(steps, steps_before=10, at_before=None)
    assert found["step"] == [11, 12, 13]
    series = dict(found["series"])  # type: ignore[call-overload]
    assert {len(values) for values in series.values()} == {3}
    assert series["ess:mean"] == [None, None, 0.5]
    assert series["tokens/s"] == [None, 20 / 3, 5.0]
    assert "forward/loss/token" not in series
