"""The promises of the deficit round robin, in simulations of what models may do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from tests.unit.trainer_service.scheduling import fake_batch
from trainer_service.engine.batch import Batch
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.scheduling.packing import DeficitRoundRobin


def load_of(model_id: str, lengths: Sequence[int], *, forward_only: bool = False) -> Batch:
    return fake_batch(model_id, model_id=model_id, lengths=lengths, forward_only=forward_only)


@dataclass
class Waiting:
    """A datum that is the next of its model, since some moment."""

    length: int
    deficit: float
    others_tokens: int
    """That were computed for others before that moment."""
    num_micro_batches: int


@dataclass
class Simulation:
    """A ring with a budget, and an account of everything that it does."""

    budget: int
    ring: DeficitRoundRobin = field(default_factory=DeficitRoundRobin)
    loads: dict[str, list[Batch]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    num_micro_batches: int = 0
    longest: int = 1
    waiting: dict[str, Waiting] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)

    def add(self, model: str, *lengths: int, forward_only: bool = False) -> Batch:
        load = load_of(model, lengths, forward_only=forward_only)
        self.models.add(model)
        self.loads.setdefault(model, []).append(load)
        self.longest = max(self.longest, *lengths)
        self.ring.add(load)
        return load

    def has_work(self, model: str) -> bool:
        return any(load.num_waiting for load in self.loads.get(model, ()))

    def remove(self, model: str) -> None:
        self.ring.remove(model)
        self.loads.pop(model, None)
        self.waiting.pop(model, None)

    def step_freely(self) -> Counter[str]:
        """One micro-batch, without the bounds that hold where tokens alone are charged."""
        owners = {load: model for model, loads in self.loads.items() for load in loads}
        tokens: Counter[str] = Counter()
        for load, indices in self.ring.next_micro_batch(self.budget):
            tokens[owners[load]] += sum(load.costs[index] for index in indices)
        self.tokens += tokens
        return tokens

    def step(self) -> Counter[str]:
        """One micro-batch: the tokens of each model in it. Checks what is true of every one."""
        for model in self.loads:
            if self.has_work(model) and model not in self.waiting:
                self._wait(model)
        parts = self.ring.next_micro_batch(self.budget)
        assert bool(parts) == any(bool(indices) for _, indices in parts)
        assert len({load.forward_only for load, _ in parts}) <= 1
        owners = {load: model for model, loads in self.loads.items() for load in loads}
        tokens: Counter[str] = Counter()
        for load, indices in parts:
            tokens[owners[load]] += sum(load.costs[index] for index in indices)
        num_datums = sum(len(indices) for _, indices in parts)
        assert tokens.total() <= self.budget or num_datums == 1
        for model in tokens:
            self._check_wait(model)
        self.tokens += tokens
        self.num_micro_batches += bool(parts)
        for model in self.loads:
            self.loads[model] = [load for load in self.loads[model] if load.num_waiting]
        deficits = {model: self.ring.deficit(model) for model in self.models}
        assert all(-deficits[model] <= self.unfairness for model in self.loads)
        assert abs(sum(deficits.values())) <= 1e-6
        return tokens

    @property
    def unfairness(self) -> float:
        return max(self.longest, self.budget / 4)

    def _wait(self, model: str) -> None:
        load = next(load for load in self.loads[model] if load.num_waiting)
        others = self.tokens.total() - self.tokens[model]
        rest = load.num_waiting_tokens
        length = rest if rest <= self.budget / 4 else load.costs[load.num_taken]  # a short rest is taken as one datum
        self.waiting[model] = Waiting(length, self.ring.deficit(model), others, self.num_micro_batches)

    def _check_wait(self, model: str) -> None:
        """The bound of the module's docstring."""
        one, n = self.waiting.pop(model), len(self.models)
        bound = (n - 1) * (one.length + self.unfairness) + n * max(0.0, -one.deficit) + self.budget
        assert self.tokens.total() - self.tokens[model] - one.others_tokens <= bound
        assert self.num_micro_batches - one.num_micro_batches <= 4 * bound / self.budget + 2


def lengths_of(random_: random.Random, style: int, count: int) -> list[int]:
    """Up to `style` tokens: most of them near it, some much shorter."""
    return [
        random_.randint(max(1, style // 4), style) if random_.random() < 0.7 else int(style ** random_.random())
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_no_datum_waits_longer_than_the_bound_whatever_the_models_do(seed: int) -> None:
    """Some always have more, some send one datum at a time, some come in bursts, with or without gradients."""
    random_ = random.Random(seed)
    budget = random_.choice([50, 100, 400])
    models = [str(n) for n in range(random_.choice([1, 2, 3, 5, 9, 16]))]
    habit = {model: random_.choice(["backlog", "one by one", "bursts"]) for model in models}
    style = {model: random_.choice([1, 4, budget // len(models), budget // 2, budget, 2 * budget]) for model in models}
    forward_share = {model: random_.choice([0.0, 0.0, 0.5, 1.0]) for model in models}
    simulation = Simulation(budget)
    for _ in range(80):
        for model in models:
            match habit[model]:
                case "backlog":
                    comes, count = not simulation.has_work(model) or random_.random() < 0.2, random_.randint(1, 8)
                case "one by one":
                    comes, count = not simulation.has_work(model) and random_.random() < 0.7, 1
                case _:
                    comes, count = not simulation.has_work(model) and random_.random() < 0.05, random_.randint(1, 20)
            if comes:
                lengths = lengths_of(random_, max(1, style[model]), count)
                simulation.add(model, *lengths, forward_only=random_.random() < forward_share[model])
            elif random_.random() < 0.01:
                simulation.remove(model)
        simulation.step()
    for _ in range(10_000):  # whatever there is left is computed
        if not simulation.step():
            break
    assert not simulation.ring
    assert not any(map(simulation.has_work, models))


@pytest.mark.parametrize("seed", range(20))
def test_models_with_a_backlog_get_the_same_number_of_tokens(seed: int) -> None:
    random_ = random.Random(seed)
    budget = random_.choice([64, 512])
    models = [str(n) for n in range(random_.choice([2, 3, 5, 8, 16]))]
    simulation = Simulation(budget)
    for model in models:
        style = random_.choice([max(1, budget // 16), budget // len(models), budget // 2, budget, 2 * budget])
        lengths = lengths_of(random_, style, 4)
        while sum(lengths) < 12 * budget:
            lengths += lengths_of(random_, style, 4)
        simulation.add(model, *lengths, forward_only=random_.random() < 0.2)
    most = 0
    while most < 10 * budget:
        simulation.step()
        received = [simulation.tokens[model] for model in models]
        most = max(received)
        assert most - min(received) <= 2 * simulation.unfairness


def micro_batches(*loads: Batch, budget: int) -> Iterator[dict[str, int]]:
    ring = DeficitRoundRobin()
    for load in loads:
        ring.add(load)
    while ring:
        yield {load.model_id: len(indices) for load, indices in ring.next_micro_batch(budget)}


def test_models_with_small_datums_share_every_micro_batch_in_equal_parts() -> None:
    loads = [load_of(model, [size] * (1024 // size)) for model, size in zip("abcd", (1, 2, 4, 8), strict=True)]
    for sizes in micro_batches(*loads, budget=256):
        assert sizes == {"a": 64, "b": 32, "c": 16, "d": 8}


@pytest.mark.parametrize("num_long", [1, 4, 15])
def test_a_short_job_is_in_the_very_next_micro_batch_beside_any_number_of_long_ones(num_long: int) -> None:
    """Each long datum fills a micro-batch alone, and all of them are there first. The short ones come one by one."""
    simulation = Simulation(256)
    for n in range(num_long):
        simulation.add(f"long {n}", *[256] * 40)
    for _ in range(40):
        assert list(simulation.step().values()) == [256]
        simulation.add("short", 6, 5, 5)
        assert simulation.step()["short"] == 16
    assert max(simulation.tokens.values()) == 256 * -(-40 // num_long)


def test_small_batches_of_many_models_are_taken_whole_and_the_first_ones_need_not_wait_for_the_last() -> None:
    ring = DeficitRoundRobin()
    loads = [load_of(f"m{n}", [8, 16, 4]) for n in range(16)]
    for load in loads:
        ring.add(load)
    micro_batches = [ring.next_micro_batch(256), ring.next_micro_batch(256)]
    assert ring.next_micro_batch(256) == []
    assert [load for taken in micro_batches for load, _ in taken] == loads
    assert all(indices == range(3) for taken in micro_batches for _, indices in taken)


def test_a_datum_above_the_share_of_its_model_still_goes_before_longer_ones_that_are_owed_alike() -> None:
    simulation = Simulation(256)
    for n in range(15):
        simulation.add(f"long {n}", *[256] * 4)
    simulation.step()
    simulation.add("medium", 60)  # with 16 models a share is 16
    assert simulation.step() == {"medium": 60}


def test_a_short_job_waits_for_one_micro_batch_of_the_other_kind_at_most() -> None:
    simulation = Simulation(100)
    simulation.add("long", *[100] * 10)
    simulation.add("logprobs", *[100] * 10, forward_only=True)
    for _ in range(4):
        simulation.step()
        simulation.add("short", 10, forward_only=True)
        assert "short" in {*simulation.step(), *simulation.step()}


def test_a_datum_that_fits_into_the_rest_of_a_micro_batch_is_taken_and_a_too_long_one_goes_alone() -> None:
    batches = micro_batches(load_of("a", [70, 70]), load_of("huge", [250]), load_of("b", [20, 20]), budget=100)
    assert list(batches) == [{"a": 1, "b": 1}, {"b": 1}, {"huge": 1}, {"a": 1}]


def test_consecutive_loads_of_one_model_share_a_micro_batch_and_keep_their_order() -> None:
    first, second = load_of("a", [10] * 3), load_of("a", [10] * 4)
    third = load_of("a", [10], forward_only=True)
    ring = DeficitRoundRobin()
    for load in (first, second, third):
        ring.add(load)
    assert ring.next_micro_batch(50) == [(first, range(3)), (second, range(2))]
    assert ring.next_micro_batch(50) == [(second, range(2, 4))]  # the third takes no gradient
    assert ring.next_micro_batch(50) == [(third, range(1))]
    assert ring.next_micro_batch(50) == []


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_alone_the_model_that_has_had_least_with_its_next_datum_goes_first(order: str) -> None:
    loads = {"a": load_of("a", [30]), "b": load_of("b", [20])}
    ring = DeficitRoundRobin(alone=True)
    for name in order:
        ring.add(loads[name])
    assert [ring.next_micro_batch(100) for _ in range(2)] == [[(loads["b"], range(1))], [(loads["a"], range(1))]]


def test_a_load_that_is_taken_back_is_not_computed_and_no_other_is_touched() -> None:
    ring = DeficitRoundRobin()
    loads = {name: load_of(name, [10] * 9) for name in ("a", "b", "c")}
    for load in loads.values():
        ring.add(load)
    ring.next_micro_batch(30)
    ring.drop(loads["a"])
    ring.remove("b")
    assert ring.next_micro_batch(40) == [(loads["c"], range(1, 5))]
    assert (loads["a"].num_taken, loads["b"].num_taken) == (1, 1)


def test_small_portions_do_not_shake_off_a_debt() -> None:
    """The portions take what room a micro-batch has, and is gone before the next; the others need all of the room."""
    simulation = Simulation(100)
    for name in ("long 1", "long 2"):
        simulation.add(name, *[100] * 60)
    for _ in range(90):
        if not simulation.has_work("portions"):
            simulation.add("portions", *[1] * 100)
        simulation.step()
    received = [simulation.tokens[name] for name in ("long 1", "long 2", "portions")]
    assert max(received) - min(received) <= 2 * 100


def test_a_load_without_datums_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="without datums"):
        DeficitRoundRobin().add(Batch("empty", LOSS_FNS["cross_entropy"], {}, forward_only=False, datums=[]))


def test_alone_every_micro_batch_is_of_one_load_and_its_division_does_not_depend_on_others() -> None:
    def divisions(num_others: int) -> list[range]:
        ring = DeficitRoundRobin(alone=True)
        load = load_of("mine", [4, 5, 3, 20, 1, 9])
        ring.add(load)
        for n in range(num_others):
            ring.add(load_of(f"other-{n}", [7, 2, 6], forward_only=n % 2 == 0))
        found = []
        while parts := ring.next_micro_batch(10):
            ((one, indices),) = parts
            if one is load:
                found.append(indices)
        return found

    assert divisions(0) == [range(2), range(2, 3), range(3, 4), range(4, 6)]
    assert all(divisions(num_others) == divisions(0) for num_others in range(1, 5))


def test_a_model_that_is_charged_for_more_than_its_tokens_has_that_much_less_of_the_others_tokens() -> None:
    simulation = Simulation(100)
    ring = simulation.ring
    for name in ("costly", "cheap", "other"):
        simulation.add(name, *[50] * 200)
    num_charged = 0
    for _ in range(60):
        if simulation.step_freely()["costly"]:
            ring.charge("costly", 950)  # each datum costs as much as 1,000 tokens
            num_charged += 1
    received = {name: simulation.tokens[name] for name in ("cheap", "other")}
    assert max(received.values()) - min(received.values()) <= 2 * 100
    costly = simulation.tokens["costly"] + 950 * num_charged
    assert abs(costly - received["cheap"]) <= 2 * 1000


def test_a_charge_that_comes_when_the_model_has_left_the_ring_is_a_debt_all_the_same() -> None:
    """One datum at a time would otherwise never pay: its model has nothing left while the datum is computed."""
    ring = DeficitRoundRobin()
    ring.add(load_of("portions", [1]))
    ring.add(load_of("long", [99] * 100))
    assert len(ring.next_micro_batch(100)) == 2
    ring.add(load_of("third", [1]))  # "portions" has nothing to do, and is owed: it leaves
    assert ring.deficit("portions") == 0.0
    ring.charge("portions", 5000)
    ring.add(load_of("portions", [1]))
    before_its_turn = 0
    while all(load.costs != [1] or load.num_taken == 0 for load, _ in ring.next_micro_batch(100)[-1:]):
        before_its_turn += 1
    assert before_its_turn >= 20


def test_a_charge_is_no_debt_where_nobody_waits() -> None:
    ring = DeficitRoundRobin()
    ring.charge("alone", 5000)
    ring.add(load_of("alone", [10]))
    ring.add(load_of("other", [10]))
    assert ring.deficit("alone") == 0.0
    assert len(ring.next_micro_batch(100)) == 2


def test_models_that_do_not_fit_on_the_device_together_take_turns() -> None:
    ring = DeficitRoundRobin()
    for name in ("a", "b", "c"):
        ring.add(load_of(name, [10] * 4))

    def go_together(model_ids: Sequence[str]) -> bool:
        return set(model_ids) != {"a", "b", "c"} and set(model_ids) != {"a", "b"}

    seen: Counter[str] = Counter()
    while micro_batch := ring.next_micro_batch(40, go_together):
        names = [load.model_id for load, _ in micro_batch]
        assert len(names) == 1 or go_together(names)
        seen.update({load.model_id: len(indices) for load, indices in micro_batch})
        assert max(seen.values()) - min(seen[name] for name in ("a", "b", "c")) <= 4
    assert seen == {"a": 4, "b": 4, "c": 4}


def test_a_model_that_was_moved_to_the_device_fills_the_micro_batch() -> None:
    """Two of twenty models fit at once. If all waited for their turns, each would compute one datum for its move."""
    ring = DeficitRoundRobin()
    for number in range(20):
        ring.add(load_of(f"m{number}", [10] * 50))
    assert not ring.is_crowded
    seen: Counter[str] = Counter()
    num_crowded = 0
    for _ in range(20):
        micro_batch = ring.next_micro_batch(400, lambda model_ids: len(model_ids) <= 2)
        assert sum(len(indices) for _, indices in micro_batch) == 40
        seen.update({load.model_id: len(indices) for load, indices in micro_batch})
        num_crowded += ring.is_crowded
    assert num_crowded > 5
    assert len(seen) == 20, "all have had a turn"
    assert max(seen.values()) - min(seen.values()) <= 40, "nobody is more than a micro-batch ahead"
