"""The rule that finds the request that kills samplers, alone, without samplers."""

from gateway.sampling.lives import Life, Suspicion


def test_a_first_death_makes_suspects_of_all_that_were_there() -> None:
    life, requests = Life(), [Suspicion() for _ in range(3)]
    assert [life.ends(one) for one in requests] == [False] * 3
    assert [one.deaths for one in requests] == [1] * 3
    assert life.is_over


def test_the_request_on_trial_at_a_death_is_guilty_and_nobody_else_is_suspected() -> None:
    guilty, cleared, fresh = Suspicion(deaths=1), Suspicion(deaths=1), Suspicion()
    for order in ([guilty, cleared, fresh], [fresh, cleared, guilty]):
        guilty.deaths = 1
        life = Life(on_trial=guilty, suspects={cleared})
        assert [life.ends(one) for one in order] == [one is guilty for one in order]
        assert (cleared.deaths, fresh.deaths) == (1, 0)


def test_a_request_alone_at_two_deaths_is_guilty_also_after_its_first_token() -> None:
    late, fresh = Suspicion(deaths=1), Suspicion()
    life = Life(suspects={late})
    assert [life.ends(fresh), life.ends(late)] == [False, True]
    assert fresh.deaths == 1


def test_several_that_share_two_deaths_are_suspects_still() -> None:
    one, other = Suspicion(deaths=1), Suspicion(deaths=1)
    life = Life(suspects={one, other})
    assert [life.ends(one), life.ends(other)] == [False, False]
    assert (one.deaths, other.deaths) == (2, 2)
