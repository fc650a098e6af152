"""Which answers stay in memory."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest

from gateway.futures import _OVERHEAD_BYTES, Answer, AnswerCache, KeptAnswer, failed
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith.errors import InvalidRequest

KB = 1024


def put(answers: AnswerCache, owner: str, name: str, *, kilobytes: int) -> None:
    answers.put(name, KeptAnswer(owner, Answer(bytes(kilobytes * KB - _OVERHEAD_BYTES)), None))


def test_huge_answers_of_one_owner_push_out_nobody_elses() -> None:
    answers = AnswerCache(100 * KB)
    for number in range(10):
        put(answers, "ada", f"a{number}", kilobytes=2)
    for number in range(20):
        put(answers, "eve", f"e{number}", kilobytes=60)
        assert [f"a{n}" in answers for n in range(10)] == [True] * 10
        assert f"e{number}" in answers, "the newest is there to be fetched"
    assert [f"e{n}" in answers for n in range(19)] == [False] * 19


def test_small_answers_take_no_more_memory_than_is_counted_for_them() -> None:
    answers = AnswerCache(2**30)
    tracemalloc.start()
    for number in range(200):
        answers.put(f"{number}", KeptAnswer("ada", failed(InvalidRequest("a short text")), None))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes <= 200 * (len(failed(InvalidRequest("a short text")).body) + _OVERHEAD_BYTES)


def test_one_owner_alone_may_use_all_of_it_and_loses_what_was_used_least_recently() -> None:
    answers = AnswerCache(10 * KB)
    for number in range(10):
        put(answers, "ada", str(number), kilobytes=1)
    answers.use("0")
    put(answers, "ada", "10", kilobytes=1)
    assert [str(n) in answers for n in range(11)] == [True, False] + [True] * 9
    put(answers, "bob", "b", kilobytes=1)
    assert "2" not in answers
    assert "b" in answers


def test_no_more_is_kept_than_the_bound_and_one_answer_and_nothing_is_lost_below_it() -> None:
    rng, answers, bound = random.Random(0), AnswerCache(64 * KB), 64 * KB
    names = [str(number) for number in range(200)]

    def kept() -> dict[str, KeptAnswer]:
        return {name: found for name in names if (found := answers.get(name)) is not None}

    for number in range(3000):
        owner, name, size = rng.choice("abcd"), rng.choice(names), rng.choice((1, 1, 1, 8, 100))
        before = {**kept(), name: KeptAnswer(owner, Answer(bytes(size * KB - _OVERHEAD_BYTES)), None)}
        put(answers, owner, name, kilobytes=size)
        after = kept()
        sizes = [one.num_bytes for one in after.values()]
        assert sum(sizes) <= bound + max(sizes)
        assert name in after
        lost = [before[one] for one in before.keys() - after.keys()]
        assert not lost or sum(sizes) + max(one.num_bytes for one in lost) > bound
        if len(lost) == 1:  # an answer of the owner who has most, unless the newest is all that this owner has
            held = Counter[str]()
            for one in before.values():
                held[one.owner] += one.num_bytes
            if held[owner] == size * KB:
                del held[owner]
            assert held[lost[0].owner] == max(held.values())
        if number % 7 == 0:
            answers.forget(rng.choice(names))
        assert set(answers._ids) == set(answers._bytes) == {one.owner for one in kept().values()}


@pytest.mark.gateway(
    result_cache_bytes=4000, api_keys=[{"key": f"tml-{name}", "owner": name} for name in ("ada", "eve")]
)
async def test_samples_of_an_owner_stay_while_another_fills_the_cache(stack: Stack) -> None:
    ada, eve = [Client(base_url=stack.url, timeout=20, headers={"x-api-key": f"tml-{n}"}) for n in ("ada", "eve")]
    async with ada, eve:
        samplers = [await one.sampling_session(await one.session()) for one in (ada, eve)]
        mine = await ada.call("asample", sample_body(samplers[0], 0))
        assert isinstance(await ada.result(mine), bytes)
        for seq_id in range(8):
            receipt = await eve.call("asample", sample_body(samplers[1], seq_id))
            assert isinstance(await eve.result(receipt), bytes)
        assert isinstance(await ada.result(mine), bytes)
