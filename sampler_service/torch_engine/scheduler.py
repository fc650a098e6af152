"""Who computes in the next step, and in which lane of the cache. Knows no tensors.

Its promises: requests get their room in the order in which they came; what is admitted has its room in the cache, so
that a sequence with max_tokens is never interrupted; a prompt is computed in pieces, beside the running sequences. A
quarter of each step's prompt tokens is for short prompts that have room: they do not wait until long ones before them
are computed, which lose that share of a step and nothing else. A short prompt that is only scored, or draws one token,
needs its lane for one step: it does not wait for the running sequences to end.

A sequence without max_tokens may reach the context's end, and mostly stops long before. It starts with a modest
reservation that grows as it goes; when there is no room to grow, the youngest such sequence gives its place back and
goes on later, from the tokens that it has.

The lanes: 0 .. len(running) - 1 decode; above them lie the prompts that this step computes. At most one prompt is left
unfinished by a step, the last one, because pieces are handed out in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

HEADROOM = 256
"""Output tokens that a sequence without max_tokens reserves at first."""

SHORT_SHARE = 4
"""One part in so many of a step's prompt tokens is for short prompts."""

PASSING = 4
"""Lanes beyond those of running sequences, for prompts that stay for one step."""


@dataclass(slots=True, eq=False)
class Sequence(Generic[Owner]):
    """One of the num_samples of a request."""

    owner: Owner
    index: int
    prompt_length: int
    max_length: int
    """Prompt and output."""
    bounded: bool
    """The request said max_tokens."""
    order: int
    """Grows with submission."""
    reserved: int = 0
    """Cached tokens that it may use without asking."""
    prompt: Job[Owner] | None = None
    """What its cached tokens began with, together with those of the job's other sequences."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.tokens)

    @property
    def need(self) -> int:
        """Cached tokens to reserve when it is admitted."""
        return self.max_length if self.bounded else min(self.max_length, self.length + HEADROOM)

    @property
    def passes(self) -> bool:
        """It ends with the token that its prompt gives."""
        return self.max_length <= self.length + 1


@dataclass(slots=True, eq=False)
class Job(Generic[Owner]):
    """A prompt to compute once, and the sequences that go on from it. A sequence that was interrupted is a job too: its
    prompt includes what it has generated."""

    owner: Owner
    length: int
    sequences: list[Sequence[Owner]]
    scored: bool
    """The prompt's own logprobs are wanted from this job."""
    done: int = 0
    """Tokens computed."""
    lane: int = 0
    blocks: list[int] = field(default_factory=list)
    """Blocks of the prefix cache that its first `done` tokens come from, until they lie in its lane."""


@dataclass(frozen=True, slots=True)
class Piece(Generic[Owner]):
    """Part of a job's prompt, computed in one step."""

    job: Job[Owner]
    start: int
    length: int
    came_from: int
    """Lane that holds the earlier pieces; differs from job.lane when they have to be moved first."""

    @property
    def ends(self) -> bool:
        return self.start + self.length == self.job.length


class Scheduler(Generic[Owner]):
    def __init__(
        self,
        *,
        max_running: int,
        max_kv_tokens: int,
        tokens_per_step: int,
        reuse: Callable[[Job[Owner]], int] = lambda job: 0,
    ) -> None:
        """`reuse` is asked at a job's admission how many of its tokens need not be computed; fewer than all of them."""
        self.max_running = max_running
        self.max_kv_tokens = max_kv_tokens
        self.tokens_per_step = tokens_per_step
        self._reuse = reuse
        self.waiting: deque[Job[Owner]] = deque()
        self.partial: Job[Owner] | None = None
        """Admitted, with some pieces computed."""
        self.running: list[Sequence[Owner]] = []
        """By lane."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.partial or self.running)

    def plan(self) -> list[Piece[Owner]]:
        """The pieces of this step, in the order of their lanes; admits jobs while there is room."""
        budget = self.tokens_per_step
        pieces: list[Piece[Owner]] = []
        lane = len(self.running)
        partial, self.partial = self.partial, None
        held = [] if partial is None else [partial]
        passing = self._passing(held)
        admitted = deque([*passing, *self._overtaking([*held, *passing]), *held])
        while budget > 0:
            job = admitted.popleft() if admitted else self._admit(pieces)
            if job is None:
                break
            length = min(budget, job.length - job.done)
            pieces.append(Piece(job, job.done, length, came_from=job.lane if job is partial else lane))
            job.lane = lane
            job.done += length
            budget -= length
            lane += len(job.sequences)
            if not pieces[-1].ends:
                self.partial = job
        return pieces

    def _passing(self, held: list[Job[Owner]]) -> list[Job[Owner]]:
        """Short jobs of one step, admitted although those before them wait for room."""
        ahead = [sequence for job in held for sequence in job.sequences]
        if not self.waiting or self._has_room(self.waiting[0], ahead):
            return []
        budget = self.tokens_per_step // SHORT_SHARE
        chosen: list[Job[Owner]] = []
        for job in self.waiting:
            if len(chosen) == PASSING:
                break
            passes = len(job.sequences) == 1 and job.sequences[0].passes
            if passes and job.length <= budget and self._has_room(job, ahead, more_lanes=PASSING):
                budget -= job.length
                ahead += job.sequences
                chosen.append(job)
        self._take(chosen)
        return chosen

    def _overtaking(self, held: list[Job[Owner]]) -> list[Job[Owner]]:
        """Short jobs that go before longer ones, admitted; there is room for those ahead of them as well."""
        budget = self.tokens_per_step // SHORT_SHARE
        if not self._more_than_a_step(held):
            return []  # nobody has to wait
        chosen, ahead = [], [sequence for job in held for sequence in job.sequences]
        for job in self.waiting:
            if budget == 0 or not self._has_room(job, ahead):
                break
            ahead += job.sequences
            if job.length <= budget:
                budget -= job.length
                chosen.append(job)
        self._take(chosen)
        return chosen

    def _take(self, chosen: list[Job[Owner]]) -> None:
        for job in chosen:
            self.waiting.remove(job)
            self._reserve(job)

    def _more_than_a_step(self, held: list[Job[Owner]]) -> bool:
        pending = 0
        for job in chain(held, self.waiting):
            pending += job.length - job.done
            if pending > self.tokens_per_step:
                return True
        return False

    def _admit(self, pieces: Iterable[Piece[Owner]]) -> Job[Owner] | None:
        if not self.waiting or not self._has_room(
            self.waiting[0], [s for piece in pieces for s in piece.job.sequences]
        ):
            return None
        job = self.waiting.popleft()
        self._reserve(job)
        return job

    def _has_room(self, job: Job[Owner], ahead: Iterable[Sequence[Owner]], *, more_lanes: int = 0) -> bool:
        """Beside the running sequences and those `ahead`, which have or will get their room."""
        active = [*self.running, *ahead]
        lanes = len(active) + len(job.sequences)
        longest = max(sequence.need for sequence in job.sequences)
        capacity = max([longest, *(sequence.reserved or sequence.need for sequence in active)])
        return lanes <= self.max_running + more_lanes and lanes * capacity <= self.max_kv_tokens

    def _reserve(self, job: Job[Owner]) -> None:
        for sequence in job.sequences:
            sequence.reserved = sequence.need
        job.done = self._reuse(job)

    def grow(self) -> list[int]:
        """Renews reservations that are used up. Returns the lanes whose sequences have to leave; they are queued."""
        if all(sequence.length <= sequence.reserved for sequence in self.running):
            return []
        leaving: set[int] = set()
        for sequence in sorted(self.running, key=lambda sequence: sequence.order):
            while sequence.length > sequence.reserved and self.running.index(sequence) not in leaving:
                lanes = len(self.running) - len(leaving) + (len(self.partial.sequences) if self.partial else 0)
                room = self.max_kv_tokens // lanes
                if room >= sequence.length:
                    sequence.reserved = min(sequence.max_length, 2 * sequence.length, room)
                else:
                    leaving.add(self._youngest_unbounded(leaving))
        for lane in sorted(leaving, key=lambda lane: self.running[lane].order, reverse=True):
            sequence = self.running[lane]
            sequence.reserved = 0
            self.waiting.appendleft(Job(sequence.owner, sequence.length, [sequence], scored=False))
        return sorted(leaving)

    def _youngest_unbounded(self, leaving: set[int]) -> int:
        lanes = (n for n, sequence in enumerate(self.running) if not sequence.bounded and n not in leaving)
        return max(lanes, key=lambda lane: self.running[lane].order)

    def drop(self, owner: Owner) -> list[int]:
        """Forgets a request that waits or is being prefilled. Returns the lanes that it decodes in."""
        self.waiting = deque(job for job in self.waiting if job.owner is not owner)
        if self.partial is not None and self.partial.owner is owner:
            self.partial = None
        return [lane for lane, sequence in enumerate(self.running) if sequence.owner is owner]
