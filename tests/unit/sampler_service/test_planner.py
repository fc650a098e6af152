"""Admission, pieces and lanes, without a model."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from sampler_service.core.request import Request
from sampler_service.core.sequence import HEADROOM, Sequence
from sampler_service.torch_engine.planner import RESTING_TOKENS, Planner
from sampler_service.torch_engine.waiting import Job


class Named(str):
    """As much of a request as the planner needs."""

    version = None
    on_trial = False
    request: Request


@cache
def named(name: str, owner: str) -> Any:
    group = Named(name)
    group.request = Request(np.zeros(1, np.int32), owner=owner)
    return group


def job(
    name: str,
    length: int,
    *,
    samples: int = 1,
    max_tokens: int | None = 10,
    order: int = 0,
    run: str = "",
    owner: str = "",
) -> Job:
    group = named(name, owner)
    sequences = [
        Sequence(group, n, length, length + (max_tokens or 1000), bounded=max_tokens is not None, order=order)
        for n in range(samples)
    ]
    return Job(group, length, sequences, scored=True, run=run)


def scheduler(*jobs: Job, max_running: int = 8, max_kv_tokens: int = 10_000, tokens: int = 100) -> Planner:
    made: Planner = Planner(max_running=max_running, max_kv_tokens=max_kv_tokens, tokens_per_step=tokens)
    queue(made, *jobs)
    return made


def queue(scheduler: Planner, *jobs: Job) -> None:
    for one in jobs:
        scheduler.waiting.append(one)


def counting_room(scheduler: Planner) -> Counter[str]:
    """Counts from now on how often the scheduler asks whether there is room."""
    asked, has_room = Counter[str](), scheduler._has_room

    def counted(*args: Any, **kwargs: Any) -> bool:
        asked["room"] += 1
        return has_room(*args, **kwargs)

    scheduler._has_room = counted  # pyright: ignore[reportAttributeAccessIssue]
    return asked


def begin(scheduler: Planner) -> list[tuple[str, int, int, int]]:
    """One step in which every prompt that ends puts its sequences into the batch: (owner, start, length, lane)."""
    pieces = scheduler.plan()
    for piece in pieces:
        if piece.ends:
            for sequence in piece.job.sequences:
                scheduler.join(sequence, size=piece.job.size)
    return [(piece.job.group, piece.start, piece.length, piece.job.lane) for piece in pieces]


def test_prompts_share_a_steps_budget_in_order() -> None:
    s = scheduler(job("a", 60, samples=2), job("b", 70), job("c", 30))
    assert begin(s) == [("a", 0, 60, 0), ("b", 0, 40, 2)]
    assert begin(s) == [("b", 40, 30, 2), ("c", 0, 30, 3)]


def test_a_prompt_in_pieces_follows_the_running_when_they_leave() -> None:
    s = scheduler(job("a", 10, samples=3), job("b", 200))
    assert begin(s) == [("a", 0, 10, 0), ("b", 0, 90, 3)]
    del s.running[1:]
    (piece,) = s.plan()
    assert (piece.came_from, piece.job.lane, piece.start, piece.ends) == (3, 1, 90, False)


def first_token_after(s: Planner, owner: str) -> int:
    """Steps until the owner's prompt is computed, and its first token with it."""
    for step in range(1, 100):
        if any(name == owner for name, *_ in begin(s)) and any(one.group == owner for one in s.running):
            return step
    raise AssertionError(f"{owner} got no token in 100 steps")


@pytest.mark.parametrize("others", [[1000], [100, 100, 100], [70, 1000, 1000], [101, 5, 99, 400]])
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_short_prompt_gets_its_first_token_within_three_steps(others: list[int], steps_before: int) -> None:
    s = scheduler(job("running", 10, samples=3), *(job(f"long {n}", length) for n, length in enumerate(others)))
    for _ in range(steps_before):
        begin(s)
    s.waiting.append(job("short", 20))
    assert first_token_after(s, "short") <= 3


def test_a_step_that_rests_computes_short_prompts_and_few_tokens_of_others() -> None:
    s = scheduler(job("long", 300))
    assert begin(s) == [("long", 0, 100, 0)]
    assert [piece.length for piece in s.plan(rests=True)] == [RESTING_TOKENS]
    s.waiting.append(job("short", 20))
    assert [(piece.job.group, piece.length) for piece in s.plan(rests=True)] == [
        ("short", 20),
        ("long", RESTING_TOKENS),
    ]


def test_many_short_prompts_leave_most_of_each_step_to_a_long_one() -> None:
    s = scheduler(job("long", 300), max_running=100)
    steps = 0
    while not any(one.group == "long" for one in s.running):
        queue(s, *(job("short", 10) for _ in range(10)))
        begin(s)
        steps += 1
    assert steps == 4  # 75 or more of 100 tokens each


def test_a_prompt_in_pieces_lies_above_those_that_overtake_it() -> None:
    s = scheduler(job("long", 300))
    assert begin(s) == [("long", 0, 100, 0)]
    s.waiting.append(job("short", 20, samples=2))
    (first, second) = s.plan()
    assert (first.job.group, first.job.lane, first.ends) == ("short", 0, True)
    assert (second.came_from, second.job.lane, second.start, second.length) == (0, 2, 100, 80)


def test_nobody_overtakes_into_the_room_of_a_request_that_came_before() -> None:
    s = scheduler(job("a", 90, samples=4), job("b", 300, samples=4), job("short", 5))
    assert [piece[0] for piece in begin(s)] == ["a", "b"]
    assert [piece[0] for piece in begin(s)] == ["b"]


def test_a_job_waits_for_its_whole_room_and_nobody_overtakes_it() -> None:
    s = scheduler(job("a", 10, samples=6), job("b", 10, samples=4), job("c", 10))
    assert begin(s) == [("a", 0, 10, 0)]
    assert begin(s) == []
    del s.running[4:]
    assert [piece[0] for piece in begin(s)] == ["b"]


def test_a_job_for_all_room_does_not_wait_until_nothing_runs() -> None:
    s = scheduler(job("a", 10), job("lanes", 10, samples=8), job("b", 10))
    assert begin(s) == [("a", 0, 10, 0), ("lanes", 0, 10, 1)]
    assert [len(one.sequences) for one in s.waiting] == [1, 1], "the job's last sample, and the one behind it"
    s = scheduler(job("a", 10, max_tokens=90), job("tokens", 10, samples=4, max_tokens=90), max_kv_tokens=400)
    assert begin(s) == [("a", 0, 10, 0), ("tokens", 0, 10, 1)]
    assert [len(one.sequences) for one in s.waiting] == [1]


def test_the_cache_is_counted_as_lanes_times_the_longest() -> None:
    s = scheduler(job("long", 90), job("short", 5), job("shorter", 5), max_kv_tokens=250)
    assert [piece[0] for piece in begin(s)] == ["long", "short"]
    s.running.pop(0)
    assert [piece[0] for piece in begin(s)] == ["shorter"]


def test_a_sequence_without_max_tokens_grows_while_there_is_room() -> None:
    s = scheduler(job("a", 10, max_tokens=None), max_kv_tokens=600)
    begin(s)
    (sequence,) = s.running
    assert sequence.reserved == 10 + HEADROOM
    sequence.tokens = [0] * (HEADROOM + 1)
    assert s.grow() == []
    assert sequence.reserved == 534


def test_the_youngest_unlimited_sequence_gives_way_and_comes_back_first() -> None:
    s = scheduler(
        job("bounded", 10, max_tokens=300, order=0),
        job("old", 10, max_tokens=None, order=1),
        job("young", 10, max_tokens=None, order=2),
        job("later", 10, order=3),
        max_kv_tokens=3 * 310,
    )
    assert [piece[0] for piece in begin(s)] == ["bounded", "old", "young"]
    for sequence in s.running[1:]:
        sequence.tokens = [0] * 301
    leaving = s.grow()
    assert leaving == [s.running[2]]
    s.leave(leaving[0])
    assert [one.group for one in s.waiting] == ["young", "later"]
    assert s.waiting.first.length == 311
    assert not s.waiting.first.scored
    assert s.running[1].reserved == 465


def test_dropping_a_request_names_its_lanes() -> None:
    s = scheduler(job("a", 10), job("b", 10, samples=2), job("c", 300), job("b", 10))
    begin(s)
    assert s.drop(named("b", "")) == s.running[1:3]
    assert s.drop(named("c", "")) == []
    assert s.partial is None
    assert not s.waiting


def test_a_job_starts_behind_what_need_not_be_computed_also_when_it_takes_several_steps() -> None:
    s: Planner = Planner(
        max_running=8, max_kv_tokens=10_000, tokens_per_step=100, reuse=lambda job: {"a": 64, "b": 32}[job.group]
    )
    queue(s, job("a", 65, samples=2), job("b", 200))
    one, two = s.plan()
    assert (one.start, one.length, one.job.lane, one.came_from) == (64, 1, 0, 0)
    assert (two.start, two.length, two.job.lane, two.came_from) == (32, 99, 2, 2)
    s.running.extend(one.job.sequences[:1])
    (rest,) = s.plan()
    assert (rest.start, rest.length, rest.job.lane, rest.came_from) == (131, 69, 1, 2)


def test_a_short_prompt_of_one_token_passes_a_full_batch_and_those_that_wait_for_it() -> None:
    s = scheduler(job("full", 10, samples=4), max_running=4)
    begin(s)
    queue(s, job("waits", 10), *(job(f"scored {n}", 8, max_tokens=1) for n in range(5)))
    s.waiting.append(job("long", 90, max_tokens=1))
    s.waiting.append(job("several", 8, samples=2, max_tokens=1))
    assert [(name, lane) for name, _, _, lane in begin(s)] == [("scored 0", 4), ("scored 1", 5), ("scored 2", 6)]
    del s.running[4:]
    assert [piece.job.group for piece in s.plan()] == ["scored 3", "scored 4"]
    assert [one.group for one in s.waiting] == ["waits", "long", "several"]
    assert s.plan() == []


def test_a_request_that_passes_others_needs_room_in_the_cache() -> None:
    s = scheduler(job("full", 10, samples=4), max_running=4, max_kv_tokens=80)
    begin(s)
    queue(s, job("waits", 10), job("scored", 8, max_tokens=1))
    assert s.plan() == []


def test_a_cache_that_is_full_costs_a_step_nothing_however_many_scorings_wait() -> None:
    s = scheduler(job("full", 10, samples=4), max_running=4, max_kv_tokens=80)
    begin(s)
    s.waiting.append(job("waits", 10))
    queue(s, *(job(f"scored {n}", 8, max_tokens=1) for n in range(4096)))
    asked = counting_room(s)
    assert s.plan() == []
    assert asked.total() < 10


def test_a_waiting_request_is_compared_with_a_sum_and_not_with_every_running_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of those that wait has no room, and thousands behind it are too long to pass."""
    promises = 0
    promised: Any = Sequence.promised

    def counted(sequence: Sequence) -> int:
        nonlocal promises
        promises += 1
        return promised.fget(sequence)

    s = scheduler(job("runs", 10, samples=60), max_running=64, tokens=10_000)
    begin(s)
    s.waiting.append(job("waits", 10, samples=64))
    queue(s, *(job(f"scored {n}", 500, max_tokens=1) for n in range(1000)))
    s.max_kv_tokens = 61 * 400
    monkeypatch.setattr(Sequence, "promised", property(counted))
    s.plan()
    assert promises < 200


@pytest.mark.parametrize(
    ("max_kv_tokens", "length", "max_tokens"),
    [(100_000, 20, 500), (4 * 1000 + 500, 1500, 1), (4 * 20 + 25, 24, 1)],
    ids=["samplings behind a full batch", "long scorings", "short scorings without room"],
)
def test_a_step_looks_at_few_of_the_thousands_that_wait(
    monkeypatch: pytest.MonkeyPatch, max_kv_tokens: int, length: int, max_tokens: int
) -> None:
    """There is room for one token, and none of those that wait can have it."""
    looked = Counter[str]()
    passes: Any = Sequence.passes

    def counted(sequence: Sequence) -> bool:
        looked["passes"] += 1
        return passes.fget(sequence)

    s = scheduler(job("runs", 10, samples=4), max_running=4, max_kv_tokens=max_kv_tokens)
    begin(s)
    queue(s, *(job(f"waits {n}", length, max_tokens=max_tokens) for n in range(4096)))
    monkeypatch.setattr(Sequence, "passes", property(counted))
    asked = counting_room(s)
    assert s.plan() == []
    assert looked.total() + asked.total() < 20


def test_those_that_pass_do_so_in_the_order_in_which_they_came_whatever_their_lengths() -> None:
    s = scheduler(job("full", 10, samples=4), max_running=4, max_kv_tokens=400, tokens=400)
    begin(s)
    queue(
        s, job("waits", 10), *(job(f"scored {n}", length, max_tokens=1) for n, length in enumerate((40, 3, 9, 39, 4)))
    )
    s.waiting.appendleft(job("canary", 7, max_tokens=1))
    assert [owner for owner, *_ in begin(s)] == ["canary", "scored 0", "scored 1", "scored 2"]


def owners(s: Planner) -> list[str]:
    return [one.group for one in s.waiting]


@pytest.mark.parametrize("length", [20, 300], ids=["short", "long"])
def test_a_run_that_comes_with_thousands_delays_anothers_request_by_one(length: int) -> None:
    s = scheduler(*(job(f"many {n}", 100, max_tokens=1) for n in range(3000)), max_kv_tokens=1000)
    for _ in range(5):
        begin(s)
        s.running.clear()
    queue(s, job("one", length, run="other"))
    assert owners(s)[:3] == ["many 5", "one", "many 6"]
    assert first_token_after(s, "one") <= 1 + 2 + length // 100


def test_runs_take_turns_by_tokens_and_each_keeps_its_order() -> None:
    s = scheduler(*(job(f"large {n}", 290, run="a") for n in range(4)), *(job(f"small {n}", 90) for n in range(9)))
    assert owners(s)[:8] == ["large 0", "small 0", "small 1", "small 2", "large 1", "small 3", "small 4", "small 5"]


def test_a_job_counts_for_what_is_promised_to_its_sequences() -> None:
    s = scheduler(*(job(f"wide {n}", 10, samples=9, run="a") for n in range(2)), *(job(f"n {n}", 10) for n in range(9)))
    assert owners(s) == ["wide 0", *(f"n {n}" for n in range(5)), "wide 1", *(f"n {n}" for n in range(5, 9))]


def test_a_run_pays_for_nothing_that_it_took_back_or_had_when_nobody_else_waited() -> None:
    s = scheduler(*(job("gone", 100, run="a") for _ in range(50)), max_running=1)
    begin(s)
    queue(s, job("first", 10, run="b"), job("second", 10, run="b"))
    s.drop(named("gone", ""))
    queue(s, job("a again", 10, run="a"), job("third", 10, run="b"))
    assert owners(s) == ["first", "a again", "second", "third"]


def test_a_run_that_comes_with_one_request_after_the_other_overtakes_no_other_run_for_ever() -> None:
    s = scheduler(*(job(f"many {n}", 100, max_tokens=1) for n in range(9)), max_running=1)
    order: list[str] = []
    for n in range(9):
        queue(s, job(f"single {n}", 100, run="a", max_tokens=1))
        order += [owner for owner, *_ in begin(s)]
        s.running.clear()
    assert order == ["many 0", "single 0", "many 1", "single 1", "many 2", "single 2", "many 3", "single 3", "many 4"]


def test_those_that_pass_others_put_no_newcomer_behind_their_run() -> None:
    s = scheduler(job("full", 10, samples=4), max_running=4)
    begin(s)
    queue(s, job("waits", 10), *(job(f"scored {n}", 8, max_tokens=1) for n in range(9)))
    begin(s)
    queue(s, job("other", 10, run="b"))
    assert owners(s)[:3] == ["waits", "other", "scored 3"]


def test_a_long_sequence_takes_its_own_room_and_short_ones_take_theirs() -> None:
    s = scheduler(job("long", 16_000), *(job(f"{n}", 100) for n in range(100)), max_running=64, max_kv_tokens=65_536)
    s.tokens_per_step = 100_000
    begin(s)
    assert len(s.running) == 64
    assert sorted(one.size for one in s.running) == [0] * 63 + [2]
    assert [one.lane for one in s.running] == [*range(63), 0]


def test_sizes_are_promised_apart_and_never_more_than_there_is() -> None:
    lengths = [16_000, 3000, 5000, 900, 16_384, 20_000, 100, 4000, 1024, 12_000, 1025]
    s = scheduler(*(job(f"{n}", length - 10) for n, length in enumerate(lengths)), max_running=64, max_kv_tokens=65_536)
    s.tokens_per_step = 1_000_000
    begin(s)
    by_size: dict[int, list[int]] = {}
    for one in s.running:
        by_size.setdefault(one.size, []).append(one.reserved)
    assert sum(len(lanes) * max(lanes) for lanes in by_size.values()) <= 65_536
    assert {size: max(lanes) <= 1024 * 4**size for size, lanes in by_size.items()} == dict.fromkeys(by_size, True)
    assert s.waiting


def test_a_sequence_without_max_tokens_outgrows_its_lane() -> None:
    s = scheduler(job("a", 700, max_tokens=None), job("b", 20), max_kv_tokens=10_000, tokens=2000)
    s.waiting.first.sequences[0].max_length = 4000
    begin(s)
    one, other = s.running
    assert (one.size, one.lane, other.size, other.lane) == (0, 0, 0, 1)
    one.tokens = [0] * (HEADROOM + 1)
    assert s.grow() == []
    assert one.reserved == 2 * (700 + HEADROOM + 1)
    assert s.outgrown() == [one]
    assert s.leave(one) is other
    s.join(one, size=1)
    assert [(each.size, each.lane) for each in s.running] == [(0, 0), (1, 0)]


def step(s: Planner) -> list[str]:
    """A step as the scheduler makes it. Returns the names of those that had to leave."""
    leaving = s.give_way()
    for sequence in leaving:
        s.leave(sequence)
    begin(s)
    return [str(one.group) for one in leaving]


def end(s: Planner, name: str) -> None:
    """The sequences of this name have drawn all their tokens."""
    s.running = [one for one in s.running if one.group != name]
    for lane, one in enumerate(s.running):
        one.lane = lane


def running(s: Planner) -> Counter[str]:
    """How many sequences of each owner run."""
    return Counter(one.group.request.owner for one in s.running)


def many(owner: str, number: int, *, samples: int = 1, max_tokens: int = 400) -> list[Job]:
    return [
        job(f"{owner} {n}", 10, samples=samples, max_tokens=max_tokens, run=owner, owner=owner) for n in range(number)
    ]


def test_an_owner_who_has_nothing_is_in_the_next_step_although_another_one_has_all() -> None:
    s = scheduler(*many("a", 40, samples=8))
    assert step(s) == []
    assert running(s) == {"a": 8}
    queue(s, *many("b", 1))
    assert step(s) == ["a 0"]
    assert running(s) == {"a": 7, "b": 1}
    end(s, "b 0")
    assert step(s) == []
    assert running(s) == {"a": 8}, "the one that had to leave is before all others"
    assert {str(one.group) for one in s.running} == {"a 0"}


def test_each_owner_gets_a_share_and_keeps_it() -> None:
    s = scheduler(*many("a", 40, samples=8))
    step(s)
    queue(s, *many("b", 20), *many("c", 20))
    for _ in range(10):
        step(s)
    assert running(s) == {"a": 4, "b": 2, "c": 2}
    for n in range(10):
        for name in "bc":
            end(s, f"{name} {n}")
        assert [step(s) for _ in range(3)] == [[], [], []], "nobody has to leave again"
        assert running(s) == {"a": 4, "b": 2, "c": 2}


def test_samples_of_one_request_beyond_the_share_wait() -> None:
    s = scheduler(*many("a", 40, samples=8))
    step(s)
    queue(s, *many("b", 1, samples=8))
    step(s)
    assert running(s) == {"a": 4, "b": 4}
    assert sum(len(one.sequences) for one in s.waiting if one.owner == "b") == 4
    assert [one.scored for one in s.waiting if one.owner == "b"] == [False]
    end(s, "a 0")
    step(s)
    assert running(s) == {"a": 4, "b": 4}, "those of a that had to leave"


def test_a_share_of_the_cache_counts_as_one_of_the_lanes() -> None:
    s = scheduler(*many("a", 40, max_tokens=900), max_running=100, max_kv_tokens=9200)
    for _ in range(3):
        step(s)
    assert running(s) == {"a": 10}
    queue(s, *many("b", 3, max_tokens=900))
    assert sum(len(step(s)) for _ in range(5)) == 3
    assert running(s) == {"a": 7, "b": 3}


def test_a_prompt_that_is_half_computed_gives_its_other_lanes() -> None:
    s = scheduler(job("long", 900, samples=8, owner="a"))
    step(s)
    queue(s, *many("b", 1))
    assert step(s) == []
    assert running(s) == {"b": 1}
    assert s.partial is not None
    assert len(s.partial.sequences) == 7
    assert [(str(one.group), len(one.sequences), one.scored) for one in s.waiting] == [("long", 1, False)]


def test_a_sequence_that_needs_more_than_a_share_interrupts_nobody_and_gets_the_next_room() -> None:
    s = scheduler(*many("a", 40, max_tokens=900), max_running=100, max_kv_tokens=9200)
    for _ in range(3):
        step(s)
    queue(s, job("long", 20, max_tokens=8500, run="b", owner="b"), *many("c", 10, max_tokens=900))
    for n in range(12):
        assert step(s) == []
        assert not running(s)["c"], "it came later"
        end(s, f"a {n}")
    step(s)
    assert running(s) == {"b": 1}


def test_one_owner_alone_is_not_interrupted() -> None:
    s = scheduler(*many("a", 40, samples=8), job("other run", 10, run="other", owner="a"))
    assert [step(s) for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize("num_owners", [8, 500])
def test_more_owners_than_lanes_interrupt_nobody(num_owners: int) -> None:
    s = scheduler(*many("a", 40, samples=8))
    step(s)
    for n in range(num_owners):
        queue(s, *many(f"owner {n}", 2))
    for _ in range(20):
        step(s)
    assert len(running(s)) == 8
    assert step(s) == []
