"""The rules that find the request that kills samplers, without samplers: each test lets requests in, and ends lives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sampling import lives
from gateway.sampling.lives import Life, Suspicion
from tests.support.waiting import until


class Work:
    """One request at one sampler: it waits for its turn, then is in work until `end`. Its sampler confirms that it is
    alone, if it has to be, unless `is_confirmed` is False, and then sends a token, unless `begins` is False."""

    def __init__(self, life: Life, mine: Suspicion, *, is_confirmed: bool = True, begins: bool = True) -> None:
        self.life, self.mine, self.is_confirmed, self.begins = life, mine, is_confirmed, begins
        self.is_in_work = False
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.life.work(self.mine):
            self.is_in_work = not self.life.is_over
            if self.mine.runs_alone and self.is_confirmed:
                self.life.confirm(self.mine, self._end.set)
                if self.begins:
                    self.life.begun(self.mine)
            await self._end.wait()
        self.is_in_work = False

    async def end(self) -> None:
        self._end.set()
        await settled()

    async def leave(self) -> None:
        self._task.cancel()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextmanager
def at(life: Life, *requests: Suspicion) -> Iterator[list[Work]]:
    works = [Work(life, mine) for mine in requests]
    yield works
    for work in works:
        work._task.cancel()


def in_work(works: list[Work]) -> list[bool]:
    return [work.is_in_work for work in works]


def suspect(was_in_work_s: float = 100.0) -> Suspicion:
    return Suspicion(deaths=1, was_in_work_s=was_in_work_s)


async def test_a_death_counts_against_all_that_were_there_and_condemns_none_of_several() -> None:
    life, requests = Life(), [Suspicion(), Suspicion(), Suspicion(deaths=1, is_released=True)]
    with at(life, *requests) as works:
        await settled()
        assert in_work(works) == [True] * 3
        assert [life.ends(one) for one in requests] == [False] * 3
        assert [one.deaths for one in requests] == [1, 1, 2]
        assert life.is_over


async def test_how_long_it_was_in_work_is_noted() -> None:
    life, mine = Life(), Suspicion()
    with at(life, mine):
        await asyncio.sleep(0.05)
        life.ends(mine)
    assert 0.04 < mine.was_in_work_s < 5


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_death_alone_after_another_one_condemns(deaths: int) -> None:
    life, mine = Life(), Suspicion(deaths=deaths)
    with at(life, mine):
        await settled()
        assert life.ends(mine)
        assert mine.deaths == deaths + 1


async def test_the_first_death_alone_condemns_nobody() -> None:
    life, mine = Life(), Suspicion()
    with at(life, mine):
        await settled()
        assert not life.ends(mine)


async def test_a_death_before_the_sampler_has_confirmed_does_not_count() -> None:
    """The sampler waits for requests of other gateways, and has not begun with this one."""
    life, mine = Life(), suspect()
    work = Work(life, mine, is_confirmed=False)
    await settled()
    assert work.is_in_work
    assert not life.ends(mine)
    assert mine.deaths == 1
    await work.leave()


async def test_trials_come_one_by_one_the_shortest_first_and_others_wait() -> None:
    life = Life()
    with at(life, suspect(9.0), suspect(3.0), Suspicion(), suspect(1.0)) as works:
        await settled()
        assert in_work(works) == [True, False, False, False]
        assert life.is_closed
        for done, next_one in ((0, 3), (3, 1)):
            await works[done].end()
            assert in_work(works) == [n == next_one for n in range(4)]
        await works[1].end()
        assert in_work(works) == [False, False, True, False]
        assert not life.is_closed


async def test_a_trial_ends_after_its_time_if_another_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MARGIN_S", 0.05)
    life, first = Life(), suspect(0.0)
    with at(life, first, suspect()) as works:
        await settled()
        assert in_work(works) == [True, False]
        await until(lambda: works[1].is_in_work)
        assert first.is_released
        assert not first.runs_alone
        with at(life, first) as again:
            await settled()
            assert in_work(again) == [False]
            await works[1].end()
            assert in_work(again) == [True]


async def test_a_trial_goes_on_until_another_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MARGIN_S", 0.0)
    life, mine = Life(), suspect(0.0)
    with at(life, mine) as works:
        await asyncio.sleep(0.02)
        assert in_work(works) == [True]
        assert not mine.is_released
        with at(life, Suspicion()) as late:
            await until(lambda: late[0].is_in_work)
            assert mine.is_released


async def test_a_trial_does_not_end_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MARGIN_S", 0.0)
    life, mine = Life(), suspect(0.0)
    slow = Work(life, mine, begins=False)
    with at(life, Suspicion()) as others:
        await asyncio.sleep(0.02)
        assert slow.is_in_work
        life.begun(mine)
        await until(lambda: others[0].is_in_work)
    await slow.leave()


async def test_a_row_of_trials_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "TRIALS_S", 0.05)
    life, requests = Life(), [suspect() for _ in range(4)]
    with at(life, *requests, Suspicion()) as works:
        await until(lambda: works[4].is_in_work)
        assert all(one.is_released for one in requests)
        assert in_work(works) == [False, True, True, True, True]
        for work in works[1:]:
            await work.end()
        with at(life, suspect()) as later:  # a row of its own
            await settled()
            assert later[0].mine.is_alone


async def test_a_request_with_two_deaths_takes_turns_with_others() -> None:
    life = Life()
    with at(life, Suspicion(deaths=2), Suspicion(deaths=2), Suspicion(), Suspicion()) as works:
        await settled()
        assert in_work(works) == [True, False, False, False]
        await works[0].end()
        assert in_work(works) == [False, False, True, True]
        with at(life, Suspicion(deaths=2), Suspicion()) as late:
            await settled()
            assert in_work(works)[1:] == [True, True, True]  # the sampler lets these two end before it begins with it
            assert in_work(late) == [False, False]
            await works[1].end()
            assert in_work(late) == [False, True]


async def test_a_request_with_two_deaths_keeps_its_sampler_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "TRIALS_S", 0.0)
    life = Life()
    with at(life, Suspicion(deaths=2), Suspicion()) as works:
        await asyncio.sleep(0.02)
        assert in_work(works) == [True, False]


async def test_the_others_need_not_wait_for_one_that_has_left() -> None:
    life = Life()
    with at(life, suspect(), suspect(), Suspicion()) as works:
        await settled()
        await works[1].leave()
        await works[0].leave()
        assert in_work(works)[2]


async def test_those_that_wait_hear_of_a_death() -> None:
    life, mine = Life(), suspect()
    with at(life, mine, Suspicion(deaths=2), Suspicion(), suspect()) as works:
        await settled()
        life.ends(mine)
        await settled()
        assert in_work(works) == [True, False, False, False]
        await works[0].leave()
        assert not life.is_closed


def send_again(heard: asyncio.Future[str]) -> None:
    if not heard.done():
        heard.set_result("sent again")


@dataclass(eq=False)
class Request:
    """A request with as many steps until it ends, or until its sampler does."""

    num_steps: int
    is_guilty: bool
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_killed: int = 0
    """Samplers that it has killed."""
    was_unlucky: bool = False
    """Whether a sampler was killed from outside while it ran there alone."""
    outcome: str = ""


class World:
    """A sampler, which is started again whenever it dies."""

    def __init__(self) -> None:
        self.life = Life()
        self.in_work: dict[Request, asyncio.Future[str]] = {}
        self.steps: dict[Request, int] = {}

    async def send(self, request: Request) -> None:
        """As drawing.py does it."""
        mine = request.suspicion
        while not request.outcome:
            life = self.life
            async with life.work(mine):
                if life.is_over:
                    continue
                heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                if mine.runs_alone:
                    assert not self.in_work
                    life.confirm(mine, partial(send_again, heard))
                    life.begun(mine)
                self.in_work[request], self.steps[request] = heard, 0
                what = await heard
                self.in_work.pop(request, None)
                if what == "died" and life.ends(mine):
                    what = "condemned"
            if what in ("condemned", "answered"):
                request.outcome = what

    def step(self, request: Request) -> None:
        self.steps[request] += 1
        if self.steps[request] == request.num_steps:
            if request.is_guilty:
                request.num_killed += 1
                self.die()
            else:
                self.in_work.pop(request).set_result("answered")

    def die(self) -> None:
        self.life = Life()
        for heard in self.in_work.values():
            if not heard.done():
                heard.set_result("died")
        self.in_work.clear()

    def kill(self) -> None:
        """An operator does."""
        for request in self.in_work:
            request.was_unlucky |= request.suspicion.is_alone and request.suspicion.deaths > 0
        self.die()


REQUESTS = st.lists(st.builds(Request, st.integers(1, 4), st.booleans()), min_size=1, max_size=6)


@given(REQUESTS, st.lists(st.integers(0, 59), max_size=80))
@settings(max_examples=60, deadline=None)
def test_no_request_kills_three_samplers_and_no_innocent_one_fails(
    requests: list[Request], schedule: list[int]
) -> None:
    """In every order of steps, some of which are kills by an operator. Turns are not bounded in time here."""

    async def play() -> None:
        world = World()
        tasks = [asyncio.create_task(world.send(request)) for request in requests]
        num_kills = 0
        for number in [*schedule, *range(1, 2000)]:
            await settled()
            if all(task.done() for task in tasks):
                break
            running = [request for request, heard in world.in_work.items() if not heard.done()]
            if number % 20 == 0 and num_kills < 3:
                num_kills += 1
                world.kill()
            elif running:
                world.step(running[number % len(running)])
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        for request in requests:
            assert request.num_killed <= 2
            if request.is_guilty:
                assert request.outcome == "condemned"
            elif not request.was_unlucky:
                assert request.outcome == "answered"

    asyncio.run(play())
