"""Random lives of the sampler's batch: the real scheduler, planner, caches and prefix cache around a model that stores
what can be told again, so that all that a sequence reads can be held against what it must be."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from sampler_service.core.request import Generation, Params, Request, Result, StopCondition
from sampler_service.core.sampling import stream_keys
from sampler_service.core.sequence import Sequence, SequenceGroup, StopRule
from sampler_service.core.sizing import Sizes
from sampler_service.core.versions import Version
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine import waiting
from sampler_service.torch_engine.planner import Reservations
from sampler_service.torch_engine.runner import Batch, Runner, prefills_of
from sampler_service.torch_engine.scheduler import Scheduler
from sampler_service.torch_engine.waiting import Job, size_of
from tinsmith.errors import Cancelled
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.recurrent_cache import Key

VOCAB = 50
MAX_KV_TOKENS = 700
MAX_RUNNING = 6
LANE_BYTES = 5120
"""Size of a lane's state. The prefix cache has room for 2 states, and for 20 blocks."""
STATE: Key = ("state", 0, 0)
ONE_KEY, ONE_STATE = torch.zeros(1, 1, 1), torch.zeros(1, 2)
SHORT_TOKENS = 16
"""In place of 1,024, so that small requests have all sizes."""


class NotingModel(Runner):
    """A runner without a model. A token's key is the token, its value its position. The state after some tokens is
    their number and their sum. Logits are flat. It may fail."""

    def __init__(self, base: BaseModel, scheduler: Scheduler) -> None:
        super().__init__(base, scheduler.kv.caches, metrics=scheduler.metrics)
        self.fails: BaseException | None = None

    def logits(self, batch: Batch) -> torch.Tensor:
        for sequence in batch.running:
            known = self.tokens(sequence)
            self._check(sequence.size, sequence.lane, known[:-1])
            self._store(sequence.size, sequence.lane, known, len(known) - 1)
        for piece in batch.pieces:
            job = piece.job
            known = self.tokens(job.sequences[0])
            for part in prefills_of(piece):
                assert part.lane == job.lane
                self._check(job.size, job.lane, known[: part.start])
                self._store(job.size, job.lane, known[: part.start + part.length], part.start)
                if part.states_after is not None:
                    part.states_after.stores.update(self.caches[job.size].states.read(job.lane).stores)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return torch.zeros(len(batch.running) + len(batch.ending), VOCAB)

    def tokens(self, sequence: Sequence) -> list[int]:
        return [*sequence.group.request.prompt.tolist(), *sequence.tokens]

    def _store(self, size: int, lane: int, known: list[int], start: int) -> None:
        cache = self.caches[size]
        assert lane < cache.num_lanes
        assert len(known) <= cache.capacity
        keys, values = (each.numpy() for each in cache.layer(0, ONE_KEY, ONE_KEY))
        keys[lane, 0, start : len(known), 0] = known[start:]
        values[lane, 0, start : len(known), 0] = range(start, len(known))
        state = cache.states.store(STATE, ONE_STATE).numpy()
        before = state[lane] if start else 0
        state[lane] = before + np.array([len(known) - start, sum(known[start:])])

    def _check(self, size: int, lane: int, known: list[int]) -> None:
        """Asserts that the lane holds the sequence's tokens."""
        if known:
            cache = self.caches[size]
            assert cache.keys[0].numpy()[lane, 0, : len(known), 0].tolist() == known
            assert cache.values[0].numpy()[lane, 0, : len(known), 0].tolist() == list(range(len(known)))
            assert cache.states.stores[STATE][lane].tolist() == [len(known), sum(known)]


def make_scheduler() -> tuple[Scheduler, NotingModel]:
    base: Any = type("Base", (), {"vocab_size": VOCAB, "device": torch.device("cpu")})()
    sizes = Sizes(
        bytes_per_token=32, bytes_per_lane=LANE_BYTES, max_running=MAX_RUNNING, max_kv_tokens=MAX_KV_TOKENS,
        prefix_cache_bytes=2 * 2 * LANE_BYTES, tokens_per_step=60,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampler_service.torch_engine.runner.ParameterSwitch", lambda base: None)
        scheduler = Scheduler(sizes, metrics=SamplerMetrics(CollectorRegistry()))
        return scheduler, NotingModel(cast(BaseModel, base), scheduler)


async def _generation(*, stream: bool) -> Generation:
    return Generation(stream=stream, on_cancel=lambda: None)


class BatchMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(waiting, "SHORT_TOKENS", SHORT_TOKENS)
        self.patch.setattr("sampler_service.core.sequence.HEADROOM", 8)
        self.scheduler, self.model = make_scheduler()
        self.waiting: dict[SequenceGroup, None] = {}
        """Requests that have not ended."""
        self.broken: set[SequenceGroup] = set()
        self.order = 0
        self.namespace = 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            self.finish()
        finally:
            self.patch.undo()
            self.loop.close()

    def finish(self) -> None:
        # Each step gives one token at least, or a piece of a prompt; what is interrupted is computed again.
        num_steps = 100 + 4 * sum(one.max_length for group in self.waiting for one in group.sequences)
        while not self.scheduler.idle and num_steps:
            if self.scheduler.is_held:
                self.go_on(tells=num_steps % 3 > 0)
            self.step()
            num_steps -= 1
        assert not self.waiting, "every request has ended"
        assert not self.scheduler.groups
        assert not self.scheduler.planner.running
        assert self.scheduler.planner.partial is None

    @rule(
        length=st.integers(1, 120),
        max_tokens=st.one_of(st.none(), st.integers(1, 60)),
        num_samples=st.integers(1, 9),
        seed=st.integers(0, 2),
        on_probation=st.booleans(),
        follows=st.booleans(),
        owner=st.sampled_from(["", "a", "b"]),
        on_trial=st.booleans(),
    )
    def submit(
        self,
        length: int,
        max_tokens: int | None,
        num_samples: int,
        seed: int,
        on_probation: bool,
        follows: bool,
        owner: str = "",
        on_trial: bool = False,
    ) -> None:
        prompt = np.random.default_rng(seed).integers(VOCAB, size=length).astype(np.int32)
        request = Request(
            prompt,
            num_samples=num_samples,
            params=Params(max_tokens=max_tokens, stop=StopCondition()),
            on_probation=on_probation,
            follow_run="run" if follows else "",
            owner=owner,
            on_trial=on_trial,
        )
        group = SequenceGroup(
            request=request,
            generation=self.loop.run_until_complete(_generation(stream=follows)),
            version=None,
            stop=StopRule(frozenset()),
            keys=stream_keys(seed, 0, num_samples),
            scorer=None,
        )
        most = length + (60 if max_tokens is None else max_tokens)
        group.sequences = [
            Sequence(group, n, length, most, bounded=max_tokens is not None, order=self.order)
            for n in range(num_samples)
        ]
        self.order += 1
        together = min(MAX_RUNNING, MAX_KV_TOKENS // group.sequences[0].need)
        parts = [group.sequences[n : n + together] for n in range(0, num_samples, together)]
        self.waiting[group] = None
        self.scheduler.add([Job(group, length, part, scored=n == 0) for n, part in enumerate(parts)])

    @precondition(lambda self: not self.scheduler.idle)
    @rule(times=st.integers(1, 12))
    def compute(self, times: int) -> None:
        for _ in range(times):
            if not self.scheduler.idle:
                self.step()

    @precondition(lambda self: self.scheduler.is_held)
    @rule(tells=st.booleans())
    def go_on(self, tells: bool) -> None:
        """`tells`: the caller of a trial that has not begun is told so. Otherwise the trial ends."""
        planner = self.scheduler.planner
        assert planner.trial is not None
        if tells and not planner.may_begin:
            self.scheduler.begin_trial(planner.trial)
        else:
            self.scheduler.end_trial(planner.trial)

    def step(self) -> None:
        if self.scheduler.is_held:
            return
        trial = self.scheduler.planner.trial
        try:
            batch = self.scheduler.schedule()
            if not (batch.running or batch.pieces):
                assert self.scheduler.planner.trial is not None
                return
            groups = {*(one.group for one in batch.running), *(piece.job.group for piece in batch.pieces)}
            if trial is not None:
                assert groups == {trial}
            assert not any(group.on_trial for group in groups - {trial})
            self.scheduler.update(batch, self.model.run(batch))
        except torch.OutOfMemoryError as error:
            self.scheduler.retreat(error)
        self.deliver()
        self.check()

    def deliver(self) -> None:
        for group, outcome in self.scheduler.take_output().ended:
            del self.waiting[group]  # KeyError: it has ended twice
            if isinstance(outcome, Result):
                assert [len(one.tokens) for one in outcome.sequences] == [
                    one.max_length - one.prompt_length for one in group.sequences
                ]
            else:
                ran_out = "this request is out of memory" in outcome.message
                assert group in self.broken or isinstance(outcome, Cancelled) or ran_out, outcome

    @precondition(lambda self: bool(self.waiting))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(list(self.waiting)))
        self.scheduler.cancel(group, Cancelled("the caller has left"))
        self.deliver()
        assert group not in self.waiting

    @precondition(lambda self: not self.scheduler.idle)
    @rule()
    def run_out_of_memory(self) -> None:
        num_before = len(self.waiting)
        self.model.fails = torch.OutOfMemoryError("full")
        self.step()
        assert len(self.waiting) >= num_before - 1 - len(self.broken), "only one that was alone ends"

    @precondition(lambda self: bool(self.waiting))
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(list(self.waiting)))
        group.fail(ValueError("no such luck"))
        self.broken.add(group)

    @precondition(lambda self: bool(self.waiting))
    @rule()
    def move(self) -> None:
        self.namespace += 1
        weights: Any = None
        version = Version(f"run@{self.namespace}", weights, namespace=self.namespace)
        asked = [group for group in self.waiting if group.request.follow_run]
        for group in asked:
            group.held.append(version)
        self.scheduler.move(asked, version, self.namespace)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        planner, kv = self.scheduler.planner, self.scheduler.kv
        assert self.waiting.keys() == self.scheduler.groups
        # Every sequence that has not ended is in one place.
        places = [one for job in planner.waiting for one in job.sequences]
        places += planner.partial.sequences if planner.partial is not None else []
        places += planner.running
        assert len(places) == len({id(one) for one in places})
        unfinished = {id(one) for group in self.waiting for one in group.sequences if one.finished is None}
        assert {id(one) for one in places} == unfinished
        # Lanes are dense, and no more is promised than there is.
        by_size: dict[int, list[Sequence]] = {}
        for one in planner.running:
            by_size.setdefault(one.size, []).append(one)
            assert one.size == size_of(one.reserved)
        assert list(by_size) == sorted(by_size)
        assert all([one.lane for one in group] == list(range(len(group))) for group in by_size.values())
        held = planner.partial.sequences if planner.partial is not None else []
        assert Reservations([*planner.running, *held]).tokens <= MAX_KV_TOKENS
        assert sum(cache.num_lanes * cache.capacity for cache in kv.caches.values()) <= MAX_KV_TOKENS
        # Every block is free or found, once.
        prefixes = kv.prefixes
        blocks = [*prefixes._free, *prefixes._unused, *(block.id for block in prefixes._index.values())]
        assert sorted(blocks) == list(range(prefixes._blocks.num_blocks))
        assert sum(len(digests) for digests in prefixes._namespaces.values()) == len(prefixes._index)
        # States have a block, and with those that a prompt in pieces has left, no more than their room.
        assert prefixes._states.keys() <= {block.id for block in prefixes._index.values()}
        of_partial = planner.partial.states if planner.partial is not None else {}
        assert len(prefixes._states) + len(of_partial) <= prefixes.max_states == 2
        assert not any(one.origin.states for one in planner.running if isinstance(one.origin, Job))


BatchMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_every_request_ends_and_no_lane_or_block_leaks = pytest.mark.slow(BatchMachine.TestCase)


@pytest.mark.parametrize("num_steps", range(24, 34))
def test_a_sequence_that_outgrows_its_lane_leaves_a_half_computed_prompt_alone(num_steps: int) -> None:
    """It gets the lane of its new size in which the prompt lay. The steps are those around its move."""
    machine = BatchMachine()
    machine.begin()
    machine.submit(length=10, max_tokens=None, num_samples=1, seed=0, on_probation=False, follows=False)
    machine.compute(num_steps)
    machine.submit(length=120, max_tokens=4, num_samples=1, seed=1, on_probation=False, follows=False)
    machine.teardown()


def test_lanes_stay_within_the_bound_while_a_prompt_is_on_trial() -> None:
    """Five sequences of 128 promised tokens and the prompt's 60 are all that there is. The sequences wait with one
    token more than promised, which is not in the cache yet."""
    machine = BatchMachine()
    machine.begin()
    machine.submit(length=120, max_tokens=None, num_samples=5, seed=0, on_probation=False, follows=False)
    planner = machine.scheduler.planner
    while not planner.running or planner.running[0].length < planner.running[0].reserved:
        machine.step()
    machine.submit(length=48, max_tokens=12, num_samples=1, seed=1, on_probation=False, follows=False, on_trial=True)
    machine.step()
    assert planner.trial is not None
    assert {one.length - one.reserved for one in planner.running} == {1}
    machine.go_on(tells=True)
    machine.step()
    machine.teardown()
