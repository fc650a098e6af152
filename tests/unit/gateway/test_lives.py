"""The rules that find the request that kills samplers, without samplers: each test lets requests in, and ends lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gateway.sampling import lives
from gateway.sampling.lives import Life, Suspicion
from tests.support.waiting import until
from tinsmith.errors import InvalidRequest, OutOfCapacity, ServiceError


def suspect(deaths: int) -> Suspicion:
    """A request that was in work when as many samplers died."""
    return Suspicion(deaths)


class Work:
    """One request at one sampler: it waits for its turn, then is in work until `end`."""

    def __init__(self, life: Life, mine: Suspicion) -> None:
        self.life, self.mine = life, mine
        self.is_in_work = False
        self._first_token, self._end = asyncio.Event(), asyncio.Event()
        self._tasks = [asyncio.create_task(self._run())]

    async def _run(self) -> None:
        async with self.life.work(self.mine) as begun:
            self.is_in_work = not self.life.is_over
            self._tasks.append(asyncio.create_task(self._begin(begun)))
            await self._end.wait()

    async def _begin(self, begun: Callable[[], None]) -> None:
        await self._first_token.wait()
        begun()

    async def first_token(self) -> None:
        self._first_token.set()
        await settled()

    async def end(self) -> None:
        self._end.set()
        await settled()

    async def leave(self) -> None:
        self._tasks[0].cancel()
        await settled()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextmanager
def at(life: Life, *requests: Suspicion) -> Iterator[list[Work]]:
    works = [Work(life, mine) for mine in requests]
    yield works
    for work in works:
        work.stop()


def in_work(works: list[Work]) -> list[bool]:
    return [work.is_in_work for work in works]


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled call leaves the sampler at once, except in the tests that are about this."""
    monkeypatch.setattr(lives, "STEP_S", 0.0)


async def test_a_death_counts_against_all_that_were_there_and_condemns_none_of_several() -> None:
    for deaths in (0, 1):
        life, requests = Life(), [suspect(deaths), Suspicion(), Suspicion()]
        with at(life, *requests) as works:
            await settled()
            assert in_work(works) == [True] * 3
            assert [life.ends(one) for one in requests] == [False] * 3
            assert [one.deaths for one in requests] == [deaths + 1, 1, 1]
            assert life.is_over


@pytest.mark.parametrize(("deaths", "is_guilty"), [(0, False), (1, True), (2, True)])
async def test_a_second_death_alone_condemns(deaths: int, is_guilty: bool) -> None:
    life, mine = Life(), suspect(deaths)
    with at(life, mine):
        await settled()
        assert life.ends(mine) is is_guilty


async def test_one_that_had_company_for_a_while_was_not_alone() -> None:
    for order in ("before", "after"):
        life, mine, other = Life(), suspect(1), Suspicion()
        with at(life, *([other, mine] if order == "before" else [mine, other])) as works:
            await settled()
            await works[order == "after"].end()
            assert not life.ends(mine)


async def test_requests_with_one_death_wait_for_the_first_token_of_the_one_before_and_others_do_not() -> None:
    life = Life()
    with at(life, suspect(1), suspect(1), Suspicion()) as works:
        await settled()
        assert in_work(works) == [True, False, True]
        await works[0].first_token()
        assert in_work(works) == [True, True, True]


async def test_a_request_with_two_deaths_has_the_sampler_to_itself() -> None:
    life, mine = Life(), suspect(2)
    with at(life, Suspicion(), mine, Suspicion(), suspect(1)) as works:
        await settled()
        assert in_work(works) == [True, False, False, False]
        assert life.is_closed
        await works[0].end()
        assert in_work(works)[1:] == [True, False, False]
        assert life.is_closed
        await works[1].end()
        assert in_work(works)[1:] == [True, True, True]
        assert not life.is_closed


async def test_those_that_run_alone_and_the_others_take_turns() -> None:
    life = Life()
    with at(life, suspect(2), suspect(2), Suspicion(), Suspicion()) as works:
        await settled()
        assert in_work(works) == [True, False, False, False]
        await works[0].end()
        assert in_work(works)[1:] == [False, True, True]
        with at(life, Suspicion()) as late:
            await settled()
            await works[2].end()
            await works[3].leave()
            assert works[1].is_in_work
            assert in_work(late) == [False]
            await works[1].end()
            assert in_work(late) == [True]


async def test_the_others_need_not_wait_for_one_that_has_left() -> None:
    life = Life()
    with at(life, Suspicion(), suspect(2), Suspicion()) as works:
        await settled()
        await works[1].leave()
        assert in_work(works) == [True, False, True]


async def test_long_work_is_taken_away_from_before_one_that_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "PATIENCE_S", 0.0)
    taken: list[Life] = []
    life = Life(take_away=lambda: taken.append(life))
    mine = suspect(2)
    with at(life, Suspicion(), mine, Suspicion()) as works:
        await settled()
        await asyncio.sleep(0.01)
        assert taken == [life]
        assert in_work(works) == [True, True, False]
        await works[0].end()  # its call has ended by then
        assert not works[2].is_in_work
        assert life.ends(mine)


async def test_those_that_wait_hear_of_a_death() -> None:
    life, mine = Life(), Suspicion()
    with at(life, mine, suspect(2), Suspicion(), suspect(1)) as works:
        await settled()
        life.ends(mine)
        await settled()
        assert in_work(works) == [True, False, False, False]
        assert not life.is_closed


@pytest.mark.parametrize("how", ["its client leaves", "it is taken away"])
async def test_a_request_that_comes_after_a_cancelled_one_is_not_alone_until_its_step_has_ended(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancelled one may still kill the sampler. The innocent one must not be condemned for it."""
    monkeypatch.setattr(lives, "STEP_S", 0.2)
    if how == "it is taken away":
        monkeypatch.setattr(lives, "PATIENCE_S", 0.0)
    life, innocent = Life(), suspect(2)
    with at(life, Suspicion(), innocent, Suspicion()) as works:
        await settled()
        if how == "its client leaves":
            await works[0].leave()
        await asyncio.sleep(0.02)
        assert in_work(works)[1:] == [False, False]
        await until(lambda: works[1].is_in_work)
        assert not works[2].is_in_work
        assert life.ends(innocent)  # nothing of the cancelled one is left, so it was the cause


async def test_one_that_is_alone_by_chance_after_a_cancelled_one_is_not_condemned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lives, "STEP_S", 1e3)
    life, innocent = Life(), suspect(1)
    with at(life, Suspicion()) as cancelled:
        await settled()
        await cancelled[0].leave()
        with at(life, innocent) as works:
            await settled()
            assert in_work(works) == [True]
            assert not life.ends(innocent)


@pytest.mark.parametrize("error", [InvalidRequest("it is bad"), OutOfCapacity("it is full")])
async def test_one_that_the_sampler_has_answered_leaves_nothing_behind(
    error: ServiceError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "STEP_S", 1e3)
    life = Life()
    with pytest.raises(ServiceError):
        async with life.work(Suspicion()):
            raise error
    async with life.work(Suspicion()):
        pass
    with at(life, suspect(2)) as works:
        await settled()
        assert in_work(works) == [True]


async def test_a_death_while_a_prompt_is_computed_alone_condemns_it_and_counts_against_no_other() -> None:
    life, mine, waiting = Life(is_shared=True), suspect(1), suspect(1)
    running, new = suspect(1), Suspicion()
    with at(life, running) as before:
        await settled()
        await before[0].first_token()
        with at(life, mine, waiting, new) as works:
            await settled()
            assert in_work(works) == [True, False, True]
            life.tries(mine)
            # The calls end in any order.
            assert not life.ends(new)
            assert life.ends(mine)
            assert not life.ends(running)
            assert [one.deaths for one in (mine, waiting, running, new)] == [2, 1, 1, 0]


async def test_a_death_after_the_first_token_of_a_prompt_that_was_computed_alone_counts_against_all() -> None:
    life, mine, other = Life(), suspect(1), Suspicion()
    with at(life, mine, other) as works:
        await settled()
        life.tries(mine)
        await works[0].first_token()
        assert [life.ends(mine), life.ends(other)] == [False, False]
        assert [mine.deaths, other.deaths] == [2, 1]
