"""Plans a step: which sequences and prompts compute, and in which lane of the cache. Knows no tensors.

Its promises: requests of one training run get their room in the order in which they came, and runs take turns by tokens
(`Waiting`). The owners who share a run, or the base model, take turns, too. An owner who holds less than a share of
lanes and cache is the next, and sequences of those who hold more are interrupted for that (`give_way`); they go on
later, from the tokens that they have. Otherwise a sequence with max_tokens is never interrupted, for an admitted one
has its tokens reserved in the cache. A prompt is computed in pieces, beside the running sequences. A quarter of each
step's prompt tokens is for short prompts that have room: they do not wait until long ones before them are computed,
which lose that share of a step and nothing else. A short prompt that is only scored, or draws one token, needs its lane
for one step: it does not wait for the running sequences to end. A job that takes more than half of all room is divided
(`_divide_first`), as it would otherwise wait until hardly anything runs.

A sequence without max_tokens may reach the context's end, and mostly stops long before. It starts with a modest
reservation that grows as it goes; when there is no room to grow, the youngest such sequence gives its place back and
goes on later, from the tokens that it has.

The lanes: those of one cache have one length, that of the longest sequence there. So that a long sequence does not make
every lane long, sequences of different sizes have caches of their own: one for those that need up to 1,024 tokens, one
for up to 4 times as many, and so on. Promised of the memory is the sum of lanes times the longest over the caches.
In each cache lanes 0 .. n - 1 decode; above them lie the prompts that this step computes. At most one prompt is left
unfinished by a step, because pieces are handed out in order.

A prompt on trial (core/trial.py) has steps of its own. When it is the next one and has room, nothing is planned until
`may_begin`, then only this prompt, and then nothing until `end_trial`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain

from sampler_service.core.sequence import PASSING, Sequence, SequenceGroup, StateUnknown
from sampler_service.torch_engine.shares import Shares, owner_of
from sampler_service.torch_engine.waiting import Job, Waiting, most_of, size_of

SHORT_SHARE = 4
"""One part in so many of a step's prompt tokens is for short prompts."""

RESTING_TOKENS = 16
"""Number of tokens of long prompts in a step that is for the running sequences. Some are computed, so that all steps
have one form."""

MOST_FIRST = 4
"""Most owners whose job goes before others in one step, because they hold less than a share."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a job's prompt, computed in one step."""

    job: Job
    start: int
    length: int
    came_from: int
    """Lane that holds the earlier pieces. If it differs from job.lane, the pieces are moved first."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def ends(self) -> bool:
        return self.stop == self.job.length


class Reservations:
    """Tokens and lanes that are promised to sequences, over all caches."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self.lanes = 0
        self.tokens = 0
        self._by_size: dict[int, tuple[int, int]] = {}
        """For each cache, the number of its lanes, and the tokens of the longest one."""
        for sequence in sequences:
            self.add(1, sequence.promised)

    def copy(self) -> Reservations:
        room = Reservations()
        room.lanes, room.tokens, room._by_size = self.lanes, self.tokens, dict(self._by_size)
        return room

    def with_more(self, lanes: int, tokens: int) -> int:
        """Number of promised tokens after `lanes` further lanes of `tokens` tokens each."""
        here, longest = self._by_size.get(size_of(tokens), (0, 0))
        return self.tokens - here * longest + (here + lanes) * max(longest, tokens)

    def add(self, lanes: int, tokens: int) -> None:
        self.tokens = self.with_more(lanes, tokens)
        size = size_of(tokens)
        here, longest = self._by_size.get(size, (0, 0))
        self._by_size[size] = here + lanes, max(longest, tokens)
        self.lanes += lanes

    def longest(self, size: int, *, max_tokens: int) -> int:
        """Most tokens of one more lane of this size, if all lanes together may have `max_tokens` tokens; 0 if there is
        no room for a lane."""
        here, longest = self._by_size.get(size, (0, 0))
        tokens = min((max_tokens - self.tokens + here * longest) // (here + 1), most_of(size))
        return tokens if tokens >= longest else 0


class Planner:
    """Admits jobs, reserves their tokens in the cache, and cuts their prompts into the pieces of a step."""

    def __init__(
        self,
        *,
        max_running: int,
        max_kv_tokens: int,
        tokens_per_step: int,
        reuse: Callable[[Job], int] = lambda job: 0,
    ) -> None:
        """`reuse`: called when a job is admitted. Returns how many of the job's tokens need not be computed, always
        fewer than all."""
        self.max_running = max_running
        self.max_kv_tokens = max_kv_tokens
        self.tokens_per_step = tokens_per_step
        self._reuse = reuse
        self.waiting: Waiting = Waiting(short_tokens=tokens_per_step // SHORT_SHARE)
        self.partial: Job | None = None
        """The admitted job of which some pieces are computed, but not all."""
        self.running: list[Sequence] = []
        """The running sequences, by size, then by lane."""
        self.most_together: int | None = None
        """Most sequences that run together while memory is short; None means the usual number."""
        self.trial: SequenceGroup | None = None
        """The request whose prompt is computed while nothing else is; None without a trial."""
        self.may_begin = False
        """Whether the caller of the request on trial has been told that its prompt is next."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.partial or self.running)

    @property
    def is_held(self) -> bool:
        """Whether nothing may be computed now, because of a trial."""
        return self.trial is not None and self._on_trial() is None

    def _on_trial(self) -> Job | None:
        """The job on trial, if it is to be computed now."""
        if self.trial is None or self.trial.begun or not self.may_begin:
            return None
        return self.partial or self.waiting.job_of(self.trial)

    def end_trial(self, group: SequenceGroup) -> None:
        """Ends the trial of this request, even if it has not begun."""
        group.trial_over = True
        if self.trial is group:
            self.trial, self.may_begin = None, False

    def plan_trial(self) -> list[Piece]:
        """The piece of a step that computes nothing but the prompt on trial."""
        job = self._on_trial()
        assert job is not None
        lane = came_from = sum(one.size == job.size for one in self.running)
        if job is self.partial:
            came_from, self.partial = job.lane, None
        else:
            self._take(job)
        piece = _next_piece(job, self.tokens_per_step, lane=lane, came_from=came_from)
        if not piece.ends:
            self.partial = job
        return [piece]

    def plan(self, *, rests: bool = False) -> list[Piece]:
        """The pieces of this step, in the order of their lanes; admits jobs while there is room. `rests`: prompts that
        are not short get RESTING_TOKENS."""
        pieces: list[Piece] = []
        lanes = Counter(sequence.size for sequence in self.running)
        partial, self.partial = self.partial, None
        held = [] if partial is None else [partial]
        room = Reservations([*self.running, *(sequence for job in held for sequence in job.sequences)])
        passing = self._passing(room)
        first = [*passing, *self._overtaking([*held, *passing], room)]
        budget = RESTING_TOKENS + sum(job.length - job.done for job in first) if rests else self.tokens_per_step
        budget = min(budget, self.tokens_per_step)
        admitted = deque([*first, *held])
        while budget > 0:
            job = admitted.popleft() if admitted else self._admit(room)
            if job is None:
                break
            lane = lanes[job.size]
            pieces.append(_next_piece(job, budget, lane=lane, came_from=job.lane if job is partial else lane))
            budget -= pieces[-1].length
            lanes[job.size] += len(job.sequences)
            if not pieces[-1].ends:  # the rest of the budget may be less than a picture
                self.partial = job
                break
        return sorted(pieces, key=lambda piece: piece.job.size)

    def _passing(self, room: Reservations) -> list[Job]:
        """Admits short jobs that stay for one step, although jobs before them wait for room."""
        if not self.waiting or self._has_room(self.waiting.first, room):
            return []
        budget = self.tokens_per_step // SHORT_SHARE
        chosen: list[Job] = []

        def fits(job: Job) -> bool:
            return job.length <= budget and self._has_room(job, room, more_lanes=PASSING)

        while len(chosen) < PASSING and (job := self.waiting.first_short(fits)) is not None:
            budget -= job.length
            room.add(1, job.sequences[0].need)
            self._take(job)
            chosen.append(job)
        return chosen

    def _overtaking(self, held: list[Job], room: Reservations) -> list[Job]:
        """Admits short jobs that go before longer ones. There is room for the jobs ahead of them as well."""
        budget = self.tokens_per_step // SHORT_SHARE
        if not self._more_than_a_step(held):
            return []  # nobody has to wait
        chosen: list[Job] = []
        ahead = room.copy()
        for job in self.waiting:
            if budget == 0 or not self._has_room(job, ahead):
                break
            ahead.add(len(job.sequences), job.sequences[0].need)
            if job.length <= budget and not job.group.on_trial:
                room.add(len(job.sequences), job.sequences[0].need)
                budget -= job.length
                chosen.append(job)
        for job in chosen:
            self._take(job)
        return chosen

    def _take(self, job: Job) -> None:
        try:
            self.waiting.take(job)
            self._reserve(job)
        except MemoryError:
            raise
        except Exception as error:
            raise StateUnknown([job.group]) from error

    def _more_than_a_step(self, held: list[Job]) -> bool:
        pending = 0
        for job in chain(held, self.waiting):
            pending += job.length - job.done
            if pending > self.tokens_per_step:
                return True
        return False

    def _admit(self, room: Reservations) -> Job | None:
        if not self.waiting:
            return None
        if not self._has_room(self.waiting.first, room) and not self._divide_first(room):
            return None
        job = self.waiting.first
        if job.group.on_trial:
            self.trial = job.group
            return None
        room.add(len(job.sequences), job.sequences[0].need)
        self._take(job)
        return job

    def _divide_first(self, room: Reservations) -> bool:
        """Divides the first job if there is room for a part of it, and puts that part first. Returns whether it did.

        Only a job that takes more than half of all room is divided: otherwise one long sequence would keep it out, and
        those behind it, until it ends. The part is at least half of the job, because each part computes the prompt
        anew.
        """
        job, lanes = self.waiting.first, self.most_together or self.max_running
        samples, need = len(job.sequences), job.sequences[0].need
        if job.group.on_trial or 2 * samples <= min(lanes, self.max_kv_tokens // need):
            return False
        for part in (min(samples - 1, lanes - room.lanes), (samples + 1) // 2):
            if (samples + 1) // 2 <= part < samples and self._fits(part, need, room):
                self.waiting.put_first(job, part)
                return True
        return False

    def _has_room(self, job: Job, room: Reservations, *, more_lanes: int = 0) -> bool:
        return self._fits(len(job.sequences), job.sequences[0].need, room, more_lanes=more_lanes)

    def _fits(self, lanes: int, tokens: int, room: Reservations, *, more_lanes: int = 0) -> bool:
        """Whether there is room for so many lanes of `tokens` tokens each beside what is promised."""
        if self.most_together is not None:
            if room.lanes and room.lanes + lanes > self.most_together:
                return False
        elif room.lanes + lanes > self.max_running + more_lanes:
            return False
        return room.with_more(lanes, tokens) <= self.max_kv_tokens

    def put_back(self, sequences: list[Sequence]) -> None:
        """Lets sequences that have lost their places wait before all others. Prompts come first, because a beginning
        needs most memory. As many sequences of a prompt stay together as may run together."""
        most = self.most_together or self.max_running
        prompts: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in sequences:
            if not sequence.tokens:
                prompts.setdefault(sequence.group, []).append(sequence)
        jobs = [
            Job(group, ones[0].length, ones[n : n + most], scored=ones[n].index == 0)
            for group, ones in prompts.items()
            for n in range(0, len(ones), most)
        ]
        jobs += [Job(one.group, one.length, [one], scored=False) for one in sequences if one.tokens]
        for job in reversed(jobs):
            self.waiting.appendleft(job)

    def run_more(self) -> None:
        """Lets twice as many sequences run together, if memory was short."""
        if self.most_together is not None:
            more = 2 * self.most_together
            self.most_together = more if more < self.max_running else None

    def _reserve(self, job: Job) -> None:
        for sequence in job.sequences:
            sequence.reserved = sequence.need
            sequence.size = size_of(sequence.reserved)
        job.done = self._reuse(job)

    def grow(self) -> list[Sequence]:
        """Renews reservations that are used up. Returns the sequences that have to leave, which are queued again. Other
        sequences may have outgrown their lanes (`outgrown`)."""
        if all(sequence.length <= sequence.reserved for sequence in self.running):
            return []
        leaving: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda sequence: sequence.order):
            while sequence.length > sequence.reserved and sequence not in leaving:
                if (reserved := self._more_for(sequence, leaving)) >= sequence.length:
                    sequence.reserved = reserved
                else:
                    staying = (one for one in self.running if not one.bounded and one not in leaving)
                    leaving.append(max(staying, key=lambda one: one.order))
        self._requeue(sorted(leaving, key=lambda sequence: sequence.order, reverse=True))
        return leaving

    def _more_for(self, sequence: Sequence, leaving: list[Sequence]) -> int:
        """Number of tokens to reserve for a sequence: twice its length, or as many as are free; 0 if none is free."""
        held = self.partial.sequences if self.partial is not None else []
        room = Reservations([*(one for one in self.running if one is not sequence and one not in leaving), *held])
        wanted = min(sequence.max_length, 2 * sequence.length)
        if room.with_more(1, wanted) <= self.max_kv_tokens:
            return wanted
        return min(wanted, room.longest(size_of(sequence.length), max_tokens=self.max_kv_tokens))

    def give_way(self) -> list[Sequence]:
        """Lets owners who hold less than a share of lanes and cache be the next, as far as their share goes. Returns
        the running sequences of owners with more than a share that have to leave for that. These sequences are queued
        again."""
        partial = self.partial.sequences if self.partial is not None else []
        held = [*self.running, *partial]
        owners = {*self.waiting.owners, *map(owner_of, held)}
        if not self.waiting or len(owners) < 2:
            return []
        shares = Shares(owners, max_lanes=self.most_together or self.max_running, max_tokens=self.max_kv_tokens)
        for sequence in held:
            shares.hold(owner_of(sequence), lanes=1, tokens=sequence.promised)
        first: list[tuple[Job, int]] = []
        given: list[Sequence] = []
        for job in nsmallest(MOST_FIRST, self._with_less_than_a_share(shares), key=lambda job: job.place):
            need = job.sequences[0].need
            count = min(len(job.sequences), shares.lanes_left(job.owner, tokens=need))
            if self.waiting.may_pass(job) and not self._fits(count, need, Reservations(held)):
                continue  # the job passes others, and needs no place
            giving = self._giving(count, need, held, shares)
            if giving is None:
                break  # the job's sequence needs more than a share, so it gets the next room
            given += giving
            held = [*(one for one in held if one not in giving), *job.sequences[:count]]
            shares.hold(job.owner, lanes=count, tokens=need)
            first.append((job, count))
        self._requeue(given)
        for job, count in reversed(first):
            self.waiting.put_first(job, count)
        return [one for one in given if one in self.running]

    def _with_less_than_a_share(self, shares: Shares) -> Iterator[Job]:
        for owner in self.waiting.owners:
            job = self.waiting.first_of(owner)
            if shares.lanes_left(owner, tokens=job.sequences[0].need) > 0:
                yield job

    def _giving(self, lanes: int, tokens: int, held: list[Sequence], shares: Shares) -> list[Sequence] | None:
        """Sequences of those who hold more than a share, without which there is room for so many lanes of so many
        tokens: those that are cheapest to compute anew. None if there is no room without them either."""
        stay, giving = list(held), list[Sequence]()
        half_computed = self.partial.sequences if self.partial is not None else []
        while not self._fits(lanes, tokens, Reservations(stay)):
            owner = shares.greediest()
            if owner is None:
                return None
            theirs = (one for one in stay if owner_of(one) == owner and one not in half_computed[:1])
            leaving = min(theirs, key=lambda one: 0 if one in half_computed else one.length)
            shares.hold(owner, lanes=-1, tokens=leaving.promised)
            stay.remove(leaving)
            giving.append(leaving)
        return giving

    def _requeue(self, sequences: list[Sequence]) -> None:
        """Queues sequences before all others that wait. Running sequences keep their lanes until they leave."""
        for sequence in sequences:
            sequence.reserved = 0
            if sequence in self.running:
                self.waiting.appendleft(Job(sequence.group, sequence.length, [sequence], scored=False))
        if self.partial is not None and (back := [one for one in self.partial.sequences if one in sequences]):
            self.partial.sequences = [one for one in self.partial.sequences if one not in back]
            self.waiting.appendleft(Job(self.partial.group, self.partial.length, back, scored=False))

    def outgrown(self) -> list[Sequence]:
        """Running sequences whose lanes are too short for what is reserved for them."""
        return [sequence for sequence in self.running if size_of(sequence.reserved) != sequence.size]

    def join(self, sequence: Sequence, *, size: int) -> None:
        """Lets a sequence run in the next lane of this size."""
        sequence.size, sequence.lane = size, sum(one.size == size for one in self.running)
        self.running.append(sequence)
        self.running.sort(key=lambda one: (one.size, one.lane))

    def leave(self, sequence: Sequence) -> Sequence | None:
        """Takes a running sequence out. Returns the sequence whose lane moves into the free place; None if the sequence
        had the last lane. If several leave, the last lane must leave first."""
        last = max((one for one in self.running if one.size == sequence.size), key=lambda one: one.lane)
        self.running.remove(sequence)
        if last is sequence:
            return None
        last.lane = sequence.lane
        self.running.sort(key=lambda one: (one.size, one.lane))
        return last

    def drop(self, group: SequenceGroup) -> list[Sequence]:
        """Removes the jobs of a request that wait or are being prefilled. Returns those of its sequences that
        decode."""
        self.waiting.drop(group)
        if self.partial is not None and self.partial.group is group:
            self.partial = None
        return [sequence for sequence in self.running if sequence.group is group]


def _next_piece(job: Job, budget: int, *, lane: int, came_from: int) -> Piece:
    """The next piece of a job, which is admitted, in this lane."""
    piece = Piece(job, job.done, job.in_whole_pictures(min(budget, job.length - job.done)), came_from)
    job.lane = lane
    job.done += piece.length
    return piece
