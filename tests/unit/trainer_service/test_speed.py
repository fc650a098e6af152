from __future__ import annotations

from random import Random

import pytest

from trainer_service.scheduling.speed import Speed


def measured(num_tokens: int, seconds: float, *, times: int = 20) -> Speed:
    speed = Speed()
    for _ in range(times):
        speed.observe(seconds, num_tokens=num_tokens)
    return speed


def test_a_short_micro_batch_takes_a_tenth_of_a_second() -> None:
    assert measured(8000, 0.4).tokens_of(0.1) == 2000
    assert measured(8000, 0.2).tokens_of(0.1) == 4000


def test_small_micro_batches_do_not_tell_how_many_tokens_a_short_one_has() -> None:
    """Each takes 50 ms for 16 tokens: by their speed it would have 80."""
    speed = measured(2000, 0.1)
    for _ in range(100):
        speed.observe(0.05, num_tokens=16)
    assert speed.tokens_of(0.1) == 2000


def test_a_short_micro_batch_follows_a_machine_that_becomes_slow_and_fast_again() -> None:
    tokens_per_s, speed = 20_000.0, measured(2000, 0.1)
    for tokens_per_s in (5000.0, 50_000.0):
        for _ in range(20):
            speed.observe(speed.tokens_of(0.1) / tokens_per_s, num_tokens=speed.tokens_of(0.1))
        assert abs(speed.tokens_of(0.1) - tokens_per_s / 10) < 10


def test_a_short_micro_batch_grows_from_the_first_small_one() -> None:
    """Each takes 30 ms and 0.1 ms for each token, so 700 tokens take a tenth of a second."""
    speed = Speed()
    speed.observe(0.0316, num_tokens=16)
    for _ in range(20):
        speed.observe(0.03 + speed.tokens_of(0.1) * 1e-4, num_tokens=speed.tokens_of(0.1))
    assert abs(speed.tokens_of(0.1) - 700) < 20


def test_short_micro_batches_follow_at_once_when_others_take_the_cores() -> None:
    """After one late micro-batch the next has what takes a tenth of a second at its speed, however many fast ones came
    before. Each one in time then doubles the limit, and those of few tokens do not."""
    speed = measured(2000, 0.1)
    assert speed.short_tokens == 2000
    speed.observe(0.5, num_tokens=2000)
    assert speed.short_tokens == 400
    speed.observe(0.05, num_tokens=16)
    assert speed.short_tokens == 400
    speed.observe(0.15, num_tokens=400)
    assert speed.short_tokens == 800
    speed.observe(3.0, num_tokens=800)
    for expected in (256, 512, 1024, 2000, 2000):
        assert speed.short_tokens == expected
        speed.observe(expected / 20_000, num_tokens=expected)


def test_a_model_that_has_the_trainer_for_itself_loses_nothing_by_a_late_micro_batch() -> None:
    speed = measured(8000, 0.4)
    speed.observe(9.0, num_tokens=8000)
    assert speed.short_tokens < 2000
    assert speed.tokens_of(2.0) == 40_000


def test_no_micro_batch_is_cut_below_256_tokens() -> None:
    assert Speed().tokens_of(0.1) == measured(256, 30.0).tokens_of(0.1) == 256
    assert Speed().short_tokens == measured(256, 30.0).short_tokens == 256


def test_short_micro_batches_on_cuda_are_worth_the_start_of_their_operations() -> None:
    """A pass takes 0.4 s for the start of its operations, or as long as 15,000 tokens a second take. With the CPU's
    limits, late passes would shrink to 256 tokens, and many runs together would train at 640 tokens a second."""
    speeds = {device: Speed(device) for device in ("cpu", "cuda")}
    for _ in range(30):
        for speed in speeds.values():
            speed.observe(max(0.4, speed.short_tokens / 15_000), num_tokens=speed.short_tokens)
    assert speeds["cpu"].short_tokens == 256
    assert speeds["cuda"].short_tokens > 6000


@pytest.mark.parametrize("tokens_per_s", [200.0, 1800.0, 20_000.0])
def test_starts_on_a_noisy_machine_choose_the_same_size_within_one_step(tokens_per_s: float) -> None:
    """Each pass takes 20 ms, and up to a third less or more; one in seven takes three times as long."""
    chosen = []
    for seed in range(10):
        random, speed = Random(seed), Speed()
        for _ in range(10):
            num_tokens = min(4096, speed.tokens_of(2.0))
            seconds = (0.02 + num_tokens / tokens_per_s) * random.uniform(0.75, 1.33)
            speed.observe(3 * seconds if random.random() < 1 / 7 else seconds, num_tokens=num_tokens)
        chosen.append(min(4096, speed.tokens_of(2.0)))
    assert max(chosen) <= 2 * min(chosen)
    assert min(chosen) >= min(4096, tokens_per_s)
