"""The order in which waiting jobs get their places. A job is a prompt to compute, and the sequences that go on from it.
Knows no tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from sampler_service.core.sequence import Sequence, SequenceGroup
from sampler_service.torch_engine.shares import owner_of
from tinsmith.modeling.recurrent_cache import RecurrentCache

SHORT_TOKENS = 1024
"""Most tokens of a sequence of size 0. Each further size is for sequences 4 times as long."""

_GROUP = 32
"""Largest difference between the lengths of jobs in one group, in tokens."""


def size_of(tokens: int) -> int:
    """Number of the cache whose lanes are for sequences of `tokens` tokens."""
    return ((tokens - 1) // SHORT_TOKENS).bit_length() + 1 >> 1


def most_of(size: int) -> int:
    """Tokens of the longest sequence in the cache with this number."""
    return SHORT_TOKENS << 2 * size


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to compute once, and the sequences that go on from it. A sequence that was interrupted is a job too: its
    prompt includes what it has generated."""

    group: SequenceGroup
    length: int
    sequences: list[Sequence]
    scored: bool
    """Whether this job computes the prompt's own logprobs."""
    done: int = 0
    """Number of tokens that are computed."""
    lane: int = 0
    blocks: list[int] = field(default_factory=list)
    """Blocks of the prefix cache from which the first `done` tokens come, until they are copied into the job's lane."""
    borders: list[int] = field(default_factory=list)
    """Numbers of tokens after which the prefix cache wants the states of recurrent layers."""
    states: dict[int, RecurrentCache] = field(default_factory=dict)
    """The states by their number of tokens. The passes fill them, and then the prefix cache gets them."""
    run: str = ""
    """The queue of the job: training run of its version (empty for the base model), and owner. Queues take turns."""
    place: tuple[int, int] = (0, 0)
    """Place of a waiting job: its start, in tokens, and its number among the jobs with that start."""

    @property
    def cost(self) -> int:
        """Cost of the job: tokens of its prompt, and tokens that are promised to its sequences."""
        return self.length + sum(sequence.need - sequence.length for sequence in self.sequences)

    @property
    def owner(self) -> str:
        return owner_of(self.sequences[0])

    @property
    def size(self) -> int:
        """Number of the cache that has the job's lanes. All sequences of a job need lanes of one size."""
        return size_of(self.sequences[0].promised)

    def in_whole_pictures(self, length: int) -> int:
        """Number of tokens of the next piece, if there is room for `length`. A piece cuts no picture whose tokens see
        each other. If such a picture is at the piece's beginning, the piece is that picture, and may be longer than
        `length`."""
        stop = self.done + length
        for one in self.group.request.pictures:
            if one.whole(stop) < stop:
                stop = one.start if one.start > self.done else one.stop
        return stop - self.done


class Waiting:
    """Jobs that wait for a place. Jobs of one run keep their order, and runs take turns by tokens: start-time fair
    queueing (Goyal, Vin and Cheng, 1996). A job starts where its run's job before it ends, and no earlier than the
    first of all those that wait; the job with the earliest start is the first. So a run that comes with thousands of
    jobs delays another one's by a job, not by thousands. Only iteration takes longer if more jobs wait."""

    def __init__(self, *, short_tokens: int) -> None:
        """`short_tokens`: most tokens of a job that may pass others."""
        self._short_tokens = short_tokens
        self._jobs: list[Job] = []
        """The waiting jobs, by their places."""
        self._numbers = count(1)
        self._start = 0
        """Start of the first job when one was last taken, in tokens."""
        self._ends: dict[str, int] = {}
        """Where the last job of each run ends, in tokens; forgotten when nobody waits."""
        self._of: dict[SequenceGroup, list[Job]] = {}
        self._by_owner: dict[str, list[Job]] = {}
        """The jobs of each owner, by their places."""
        self._short: list[list[Job]] = [[] for _ in range(0, short_tokens + 1, _GROUP)]
        """Jobs that may pass others, by their places, in groups of nearly the same length."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    @property
    def first(self) -> Job:
        return self._jobs[0]

    @property
    def owners(self) -> Collection[str]:
        """Owners of the jobs."""
        return self._by_owner.keys()

    def job_of(self, group: SequenceGroup) -> Job | None:
        """The first job of this request, if one waits."""
        return min(self._of.get(group, ()), key=_place, default=None)

    def first_of(self, owner: str) -> Job:
        return self._by_owner[owner][0]

    def append(self, job: Job) -> None:
        """Adds a job behind the other jobs of its run."""
        first = self.first.place[0] if self._jobs else 0
        start = max(self._start, first, self._ends.get(job.run, 0))
        self._ends[job.run] = start + job.cost
        self._add(job, (start, next(self._numbers)))

    def appendleft(self, job: Job) -> None:
        """Adds a job before all others."""
        start, number = self.first.place if self._jobs else (self._start, 0)
        self._add(job, (start, min(0, number) - 1))

    def take(self, job: Job) -> None:
        """Removes a job that gets a place."""
        self._start = max(self._start, self.first.place[0])  # a job that passes others changes no start
        self._remove(job)

    def put_first(self, job: Job, num_sequences: int) -> None:
        """Lets `count` sequences of a job go before all others. The other sequences keep the job's place."""
        first, rest, place = job, job.sequences[num_sequences:], job.place
        self._remove(job)
        if rest:
            first = Job(job.group, job.length, job.sequences[:num_sequences], job.scored, run=job.run)
            job.sequences, job.scored = rest, False
            self._add(job, place)
        self.appendleft(first)

    def drop(self, group: SequenceGroup) -> None:
        """Removes the jobs of a request. The run is not charged for them."""
        for job in reversed(list(self._of.get(group, ()))):
            if self._ends.get(job.run) == job.place[0] + job.cost:
                self._ends[job.run] = job.place[0]
            self._remove(job)

    def first_short(self, fits: Callable[[Job], bool]) -> Job | None:
        """The first job that may pass others and fits. Only the first job of each group is tried, because the others of
        the group need about as much."""
        return min(filter(fits, (group[0] for group in self._short if group)), key=_place, default=None)

    def _add(self, job: Job, place: tuple[int, int]) -> None:
        job.place = place
        insort(self._jobs, job, key=_place)
        if self.may_pass(job):
            insort(self._group(job), job, key=_place)
        insort(self._by_owner.setdefault(job.owner, []), job, key=_place)
        self._of.setdefault(job.group, []).append(job)

    def _remove(self, job: Job) -> None:
        _delete(self._jobs, job)
        _delete(self._by_owner[job.owner], job)
        if not self._by_owner[job.owner]:
            del self._by_owner[job.owner]
        if self.may_pass(job):
            _delete(self._group(job), job)
        self._of[job.group].remove(job)
        if not self._of[job.group]:
            del self._of[job.group]
        if not self._jobs:
            self._ends.clear()

    def may_pass(self, job: Job) -> bool:
        if job.group.request.on_trial:
            return False
        return len(job.sequences) == 1 and job.sequences[0].passes and job.length <= self._short_tokens

    def _group(self, job: Job) -> list[Job]:
        return self._short[job.length // _GROUP]


def _place(job: Job) -> tuple[int, int]:
    return job.place


def _delete(jobs: list[Job], job: Job) -> None:
    del jobs[bisect_left(jobs, job.place, key=_place)]
