"""Which version's weights the device has, step by step; a step takes a second, and so does an exchange."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from sampler_service.vllm.weight_turns import WeightTurns


class Device:
    def __init__(self) -> None:
        self.now = 0.0
        self.turns = WeightTurns(lambda: self.now)

    def step(self, *with_work: int) -> int:
        before = self.turns.current
        chosen = self.turns.choose(with_work)
        self.now += 1.0 + (chosen != before)
        return chosen

    def steps(self, count: int, with_work: Collection[int]) -> list[int]:
        return [self.step(*with_work) for _ in range(count)]


def test_a_lone_version_goes_on_and_an_idle_one_gives_way_at_once() -> None:
    device = Device()
    assert device.steps(20, [3]) == [3] * 20
    assert [device.step(5), device.step(5, 0), device.step(0), device.step()] == [5, 5, 0, 0]


def test_a_turn_lasts_four_times_as_long_as_its_exchange_took() -> None:
    device = Device()
    drawn = device.steps(40, [1, 2])
    starts = [n for n in range(1, 40) if drawn[n] != drawn[n - 1]]
    # The first step comes with the exchange, 2 s; then 8 s.
    assert {later - earlier for earlier, later in pairwise(starts)} == {9}


def test_each_version_gets_its_turn_however_many_come_new() -> None:
    device = Device()
    waiting = [1, 2, 3]
    seen: list[int] = []
    for new in range(4, 60):
        seen.append(device.step(*waiting))
        waiting.append(new)
    order = list(dict.fromkeys(seen))
    assert order == sorted(order)
    assert {1, 2, 3} < set(order)
    rounds = Device()
    drawn = rounds.steps(100, [1, 2, 3])
    starts = [drawn[0], *(now for before, now in pairwise(drawn) if now != before)]
    assert starts[:7] == [1, 2, 3, 1, 2, 3, 1]


def test_a_turn_in_which_nothing_can_be_done_is_given_up() -> None:
    device = Device()
    assert device.step(1, 2) == 1
    device.turns.give_up()
    assert [device.step(1, 2), device.step(1, 2)] == [2, 2]
    device.turns.give_up()
    assert device.steps(9, [2]) == [2] * 9
    assert device.step(1, 2) == 1
