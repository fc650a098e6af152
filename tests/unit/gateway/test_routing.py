"""Consistent hashing with bounded loads: balance, stickiness, little movement."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gateway.sampling.routing import Conversations, choose, ranked

REPLICAS = [f"sampler-{n}:8002" for n in range(5)]
FACTOR = 1.25


def keys(count: int) -> list[bytes]:
    return [n.to_bytes(8, "little") for n in range(count)]


def prompt(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(2000, size=length).astype("<i4").tobytes()


def busy(key: bytes) -> bool:
    return False


def idle(key: bytes) -> bool:
    return True


def test_keys_spread_evenly_over_idle_replicas() -> None:
    homes = Counter(ranked(key, REPLICAS)[0] for key in keys(5000))
    assert set(homes) == set(REPLICAS)
    assert max(homes.values()) < 1.1 * 1000


@pytest.mark.parametrize("num_keys", [1, 3, 1000])
@pytest.mark.parametrize("weight", [1, 16])
def test_no_load_goes_above_the_bound_however_few_keys_there_are(num_keys: int, weight: int) -> None:
    loads = dict.fromkeys(REPLICAS, 0.0)
    for n in range(1000):
        name = choose(keys(num_keys)[n % num_keys], loads, weight=weight, factor=FACTOR)
        mean = (sum(loads.values()) + weight) / len(loads)
        loads[name] += weight
        assert loads[name] < FACTOR * mean + weight
    assert sorted(loads.values())[1] > 0  # a single key leaves out the last of five: four times 1.25 is all


def test_a_key_stays_at_home_while_home_is_not_overloaded() -> None:
    for key in keys(50):
        home = ranked(key, REPLICAS)[0]
        loads = dict.fromkeys(REPLICAS, 10.0) | {home: 12.0}
        assert choose(key, loads, weight=1, factor=FACTOR) == home
        loads[home] = 14.0
        assert choose(key, loads, weight=1, factor=FACTOR) == ranked(key, REPLICAS)[1]


def test_a_replica_that_leaves_moves_its_own_keys_only_and_they_come_back_with_it() -> None:
    before = {key: ranked(key, REPLICAS)[0] for key in keys(2000)}
    left = REPLICAS[2]
    without = {key: ranked(key, [name for name in REPLICAS if name != left])[0] for key in before}
    assert all(without[key] == home for key, home in before.items() if home != left)
    taken_over = Counter(without[key] for key, home in before.items() if home == left)
    assert len(taken_over) == len(REPLICAS) - 1  # by all others, and not by one neighbour
    assert {key: ranked(key, sorted(REPLICAS, reverse=True))[0] for key in before} == before


def test_with_a_factor_of_one_the_loads_stay_equal() -> None:
    loads = dict.fromkeys(REPLICAS, 0.0)
    for _ in range(10 * len(REPLICAS)):
        loads[choose(b"one", loads, weight=1, factor=1.0)] += 1
    assert set(loads.values()) == {10.0}


def test_a_conversation_keeps_its_key_as_it_grows() -> None:
    conversations = Conversations()
    turns = prompt(500)
    first = conversations.key("v", turns[: 4 * 40], is_idle=busy)
    for length in (40, 130, 131, 500):
        assert conversations.key("v", turns[: 4 * length], is_idle=busy) == first
    other = turns[: 4 * 130] + prompt(100, seed=1)  # the second turn, with another answer to it
    assert conversations.key("v", other, is_idle=busy) == first


def test_prompts_that_only_begin_alike_have_keys_of_their_own_under_load() -> None:
    conversations = Conversations()
    system = prompt(64)
    made = {conversations.key("v", system + prompt(40, seed=n), is_idle=busy) for n in range(100)}
    assert len(made) == 100
    again = {conversations.key("v", system + prompt(40, seed=n), is_idle=busy) for n in range(100)}
    assert again == made  # the same prompts: a group goes where its first request went


def test_prompts_that_begin_alike_share_a_key_while_its_replica_is_idle() -> None:
    conversations = Conversations()
    system = prompt(64)
    made = {conversations.key("v", system + prompt(40, seed=n), is_idle=idle) for n in range(100)}
    assert len(made) == 1
    assert conversations.key("v", system + prompt(40, seed=0), is_idle=busy) in made


def test_versions_have_keys_of_their_own_and_two_gateways_agree() -> None:
    one, two = Conversations(), Conversations()
    tokens = prompt(40)
    assert one.key("v1", tokens, is_idle=busy) != one.key("v2", tokens, is_idle=busy)
    assert one.key("v1", tokens, is_idle=busy) == two.key("v1", tokens, is_idle=busy)


@pytest.mark.parametrize("length", [0, 1, 15])
def test_short_prompts_have_keys_too(length: int) -> None:
    conversations = Conversations()
    tokens = prompt(length)
    key = conversations.key("v", tokens, is_idle=busy)
    assert conversations.key("v", tokens, is_idle=busy) == key
    assert conversations.key("v", prompt(length + 1, seed=3), is_idle=busy) != key


def test_the_memory_of_prompts_is_bounded_and_forgets_the_oldest() -> None:
    conversations = Conversations(max_prompts=10)
    turns = prompt(200)
    first = conversations.key("v", turns[: 4 * 40], is_idle=busy)
    for n in range(8):
        conversations.key("v", prompt(40, seed=n + 1), is_idle=busy)
    assert conversations.key("v", turns, is_idle=busy) == first
    for n in range(20):
        conversations.key("v", prompt(40, seed=n + 50), is_idle=busy)
    assert conversations.key("v", turns, is_idle=busy) != first
    assert len(conversations._keys) == 10
