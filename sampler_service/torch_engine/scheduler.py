"""Decides who computes in each step, and what becomes of the tokens. Belongs to the compute thread.

A step is `schedule() -> Runner.run(batch) -> update(batch, drawn)`. `planner.py` admits requests and cuts prompts into
pieces; `kv_cache.py` keeps their keys and values.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from sampler_service.core.queue_status import Progress, Speed
from sampler_service.core.request import Delta, Result
from sampler_service.core.scoring import not_finite
from sampler_service.core.sequence import PASSING, Sequence, SequenceGroup
from sampler_service.core.sizing import Sizes
from sampler_service.core.versions import Version
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.kv_cache import KVCacheManager, Wanted
from sampler_service.torch_engine.planner import Piece, Planner
from sampler_service.torch_engine.runner import Batch, Drawn
from sampler_service.torch_engine.shares import owner_of
from sampler_service.torch_engine.waiting import Job, size_of
from tinsmith.errors import ServiceError
from tinsmith.modeling.kv_cache import KVCache

GOOD_STEPS = 64
"""After a step that found no memory, fewer sequences run together. Their number doubles again after this many good
steps."""

PROGRESS_S = 0.1
"""Time between two notes of the progress while nothing begins or ends, in seconds."""


@dataclass(slots=True)
class StepOutput:
    """Outcome of a step and of the commands before the step, for the event loop."""

    admitted: list[tuple[SequenceGroup, float]] = field(default_factory=list)
    """Requests whose computation has begun, and when, in seconds since 1970."""
    left: list[tuple[SequenceGroup, Version]] = field(default_factory=list)
    """Versions that a request does not use any more."""
    moved: list[tuple[asyncio.Future[int], int]] = field(default_factory=list)
    """The futures of the moves that were made, and how many sequences go on with the new version."""
    on_trial: list[SequenceGroup] = field(default_factory=list)
    """Requests whose trial is due."""
    deltas: list[tuple[SequenceGroup, Delta]] = field(default_factory=list)
    ended: list[tuple[SequenceGroup, Result | ServiceError]] = field(default_factory=list)
    progress: Progress | None = None
    """The progress; None if it is about that of the output before."""

    @property
    def groups(self) -> list[SequenceGroup]:
        """The requests to which the output belongs."""
        return [*self.on_trial, *(group for group, _ in (*self.admitted, *self.left, *self.deltas, *self.ended))]

    def __bool__(self) -> bool:
        return bool(self.groups or self.moved or self.progress)


class Scheduler:
    def __init__(self, sizes: Sizes, *, metrics: SamplerMetrics) -> None:
        self.kv = KVCacheManager(
            max_lanes=sizes.max_running + PASSING,
            max_tokens=sizes.max_kv_tokens,
            bytes_per_token=sizes.bytes_per_token,
            prefix_bytes=sizes.prefix_cache_bytes,
            bytes_per_lane=sizes.bytes_per_lane,
            metrics=metrics,
        )
        self.planner: Planner = Planner(
            max_running=sizes.max_running,
            max_kv_tokens=sizes.max_kv_tokens,
            tokens_per_step=sizes.tokens_per_step,
            reuse=self._reuse,
        )
        self.speed = Speed()
        self.metrics = metrics
        self._groups: dict[SequenceGroup, None] = {}
        """Requests that have not ended, in the order of their arrival."""
        self._begun: dict[SequenceGroup, None] = {}
        """The requests whose computation has begun."""
        self._noted_at = 0.0
        """When the progress was last noted, by the performance counter."""
        self._changed = True
        """Whether running sequences, lanes or versions have changed since the last batch."""
        self._output = StepOutput()
        self._prefilling: set[str] = set()
        """Owners whose prompts were in the last step in which prompts did not rest."""
        self._num_good = 1
        """Steps since the last one that found no memory."""
        self._owed_s = 0.0
        """Time that this step took, and that running sequences of other owners have not had since, in seconds."""

    @property
    def idle(self) -> bool:
        return self.planner.idle

    @property
    def is_held(self) -> bool:
        """Whether no step may be computed now, because of a trial."""
        return self.planner.is_held

    def begin_trial(self, group: SequenceGroup) -> None:
        """Lets the request's prompt be computed: its caller has been told that the prompt is next."""
        if self.planner.trial is group:
            self.planner.may_begin = True

    def end_trial(self, group: SequenceGroup) -> None:
        """Ends the request's trial."""
        self.planner.end_trial(group)

    @property
    def groups(self) -> Collection[SequenceGroup]:
        """Requests that have not ended, in the order of their arrival."""
        return self._groups.keys()

    def add(self, jobs: list[Job]) -> None:
        """The jobs of one request."""
        self._groups[jobs[0].group] = None
        if jobs[0].group.request.on_probation:  # a publish waits for it
            for job in reversed(jobs):
                self.planner.waiting.appendleft(job)
        else:
            for job in jobs:
                self.planner.waiting.append(job)

    @torch.inference_mode()
    def cancel(self, group: SequenceGroup, outcome: ServiceError) -> None:
        """Removes a request, and leaves nothing of it in the cache. Does nothing for a request that has ended."""
        if group not in self._groups:
            return
        partial = self.planner.partial
        if partial is not None and partial.group is group:
            self.kv.caches[partial.size].wipe(partial.lane)
        running = self.planner.drop(group)
        for sequence in running:
            self.kv.caches[sequence.size].wipe(sequence.lane)
        self._leave(running)
        self._end(group, outcome)

    def move(self, groups: list[SequenceGroup], version: Version, future: asyncio.Future[int]) -> None:
        """Lets the sequences of these requests go on with another version.

        Running ones keep the keys and values that they have. A sequence that is not in a lane is computed anew, by the
        new version alone. A prompt that is half computed is finished by the version that began it, which also draws the
        first token: scores of a prompt are of one version.

        `future`: for the event loop, which sets it to the number of sequences that go on with the version.
        """
        running, partial = set(self.planner.running), self.planner.partial
        half_computed = set() if partial is None else set(partial.sequences)
        num_moved = 0
        for group in groups:
            if group not in self._groups:
                continue
            group.move(version)
            for sequence in group.unfinished:
                num_moved += 1
                if sequence not in half_computed:
                    sequence.follow(has_lane=sequence in running)
            self._let_go(group)
        self._changed = True
        self.metrics.steps.moved.inc(num_moved)
        self._output.moved.append((future, num_moved))

    def _let_go(self, group: SequenceGroup) -> None:
        self._output.left += [(group, version) for version in group.take_unused()]

    def retreat(self, error: BaseException) -> None:
        """After a step that found no memory, and may have broken off anywhere: what was in it is computed anew, from
        the tokens that it has, and half as many sequences run beside each other. A request ends with an error when one
        of its sequences found no memory alone. Raises the error again when nothing was in this step and the one
        before, which found none either."""
        waiting = {sequence for job in self.planner.waiting for sequence in job.sequences}
        in_step: list[Sequence] = []
        for group in list(self._groups):
            lost = [sequence for sequence in group.unfinished if sequence not in waiting]
            if group.failure is not None or group.complete:
                outcome = group.failure or group.outcome()
            elif len(lost) == 1 and self.planner.most_together == 1:  # the sequence was computed alone
                outcome = group.fail_alone(error)
                self.planner.most_together = None
            else:
                in_step += lost
                continue
            self.planner.drop(group)
            self._end(group, outcome)
        if not (in_step or self._output.ended or self._num_good):
            raise error
        self._num_good = 0
        self.planner.running.clear()
        self.planner.partial = None
        self.metrics.requests.running.set(0)
        self._changed = True
        self.kv.clear()
        if in_step:
            self.planner.most_together = max(1, len(in_step) // 2)
        for sequence in in_step:
            sequence.begin_anew()
        self.planner.put_back(in_step)
        for group in dict.fromkeys(sequence.group for sequence in in_step):
            self._let_go(group)

    def forget_warm_up(self) -> None:
        """Drops speed and prefixes of the warm-up: first steps are slow, and no user sends those prompts."""
        self.speed = Speed()
        self.kv.prefixes.clear()

    def forget_version(self, namespace: int) -> None:
        """Drops a version's keys and values from the prefix cache. Its requests have ended, so no more will come."""
        self.kv.prefixes.forget(namespace)

    def note_progress(self) -> None:
        """Notes the progress for the next output, if a request has begun or ended, or some time has passed."""
        now = time.perf_counter()
        is_due = not self.idle and now - self._noted_at >= PROGRESS_S
        if is_due or self._output.admitted or self._output.ended:
            self._noted_at = now
            self._output.progress = Progress.of(self._begun, self.planner.running, self.speed)

    def take_output(self) -> StepOutput:
        output, self._output = self._output, StepOutput()
        return output

    @torch.inference_mode()
    def schedule(self) -> Batch:
        """The next batch, which is empty if a trial comes first. Requests are admitted, and lanes hold what the batch
        reads."""
        started = time.perf_counter()
        with self.metrics.steps.phases["plan"].time():
            if self.planner.trial is not None:
                return Batch([], self._place(self.planner.plan_trial(), moving=[]), started=started)
            rests = self._rests()
            pieces = self._plan(rests=rests)
            if self.planner.trial is not None:
                self._output.on_trial.append(self.planner.trial)
        changed, self._changed = self._changed, False
        return Batch(self.planner.running, pieces, changed, rests, started)

    @torch.inference_mode()
    def update(self, batch: Batch, drawn: Drawn) -> None:
        """Gives the tokens of a batch to its sequences. The outcome waits in take_output()."""
        running, pieces = batch.running, batch.pieces
        if drawn.tokens_R:
            with self.metrics.steps.phases["advance"].time():
                self._advance(batch, drawn)
        for group in dict.fromkeys([*(sequence.group for sequence in running), *(one.job.group for one in pieces)]):
            if group.failure is not None:
                self.cancel(group, group.failure)
        self._num_good += 1
        if self._num_good % GOOD_STEPS == 0:
            self.planner.run_more()
        seconds = time.perf_counter() - batch.started
        self._note(seconds, pieces, rests=batch.rests)
        self.speed.observe(seconds, prefilled=batch.prompt_tokens)
        self.metrics.steps.step_time.observe(seconds)
        self.metrics.requests.running.set(len(self.planner.running))
        self.kv.observe(running_tokens=sum(one.length for one in self.planner.running), idle=self.idle)

    def _rests(self) -> bool:
        """Whether prompts wait in this step. Sequences get a token in each step, and one that computes prompts takes
        many times as long as one that does not. So owners take turns by time: as long as the prompts of some took,
        others get tokens, if they have sequences that run. Prompts of those who run alone never wait."""
        if self._owed_s <= 0:
            return False
        return any(owner_of(sequence) not in self._prefilling for sequence in self.planner.running)

    def _note(self, seconds: float, pieces: list[Piece], *, rests: bool) -> None:
        """The time of a step."""
        if rests:
            self._owed_s -= seconds
        else:
            self._owed_s = seconds if pieces else 0.0
            self._prefilling = {piece.job.owner for piece in pieces}

    def _reuse(self, job: Job) -> int:
        try:
            return self.kv.reuse(job)
        except Exception as error:
            job.group.fail(error)
            return 0

    def _plan(self, *, rests: bool) -> list[Piece]:
        self._interrupt(self.planner.grow())
        self._interrupt(self.planner.give_way())
        moving = self._move_out(self.planner.outgrown())
        return self._place(self.planner.plan(rests=rests), moving=moving)

    def _place(self, pieces: list[Piece], *, moving: list[tuple[Sequence, KVCache]]) -> list[Piece]:
        """Prepares lanes for the step: those of the pieces, and those of sequences that have outgrown their lanes.
        Returns the pieces."""
        for piece in pieces:
            group = piece.job.group
            if piece.came_from > piece.job.lane:  # before the cache may shrink
                self.kv.caches[piece.job.size].move(piece.came_from, piece.job.lane, piece.start)
            if group not in self._begun:
                self._begun[group] = None
                group.cache_hit_tokens = piece.start
                self._output.admitted.append((group, time.time()))
                self.metrics.requests.queue_time.observe(time.perf_counter() - group.submitted)
                self.metrics.steps.prompt_tokens.inc(len(group.request.prompt))
            if not group.begun:
                group.prompt_done = piece.start + piece.length
        wanted: defaultdict[int, Wanted] = defaultdict(Wanted)
        for sequence in self.planner.running:
            # Beside a trial, the newest token of a sequence may be one more than was promised. It is not in the cache
            # yet.
            wanted[sequence.size].add(1, min(sequence.length, sequence.reserved), sequence.reserved)
        for piece in pieces:
            sequences = piece.job.sequences
            wanted[piece.job.size].add(len(sequences), piece.start + piece.length, sequences[0].reserved)
        self.kv.fit(wanted)
        for piece in pieces:
            if piece.came_from < piece.job.lane:  # a sequence that has outgrown its lane may get the one that it leaves
                self.kv.caches[piece.job.size].move(piece.came_from, piece.job.lane, piece.start)
        for sequence, computed in moving:
            self.kv.caches[sequence.size].write(sequence.lane, computed)
        for piece in pieces:
            self.kv.load(piece)
        self.kv.want_states(pieces)
        return pieces

    def _interrupt(self, leaving: list[Sequence]) -> None:
        """Removes sequences from the batch that will go on later."""
        if not leaving:
            return
        self.metrics.steps.preemptions.inc(len(leaving))
        for sequence in leaving:
            self.kv.remember(sequence, sequence.lane)
            sequence.mixed = False  # the whole sequence will be computed anew
        self._leave(leaving)

    def _move_out(self, outgrown: list[Sequence]) -> list[tuple[Sequence, KVCache]]:
        """Gives sequences a lane of their present size, and copies their keys and values there."""
        moving = [(one, self.kv.caches[one.size].read(one.lane, one.length - 1)) for one in outgrown]
        self._leave(outgrown)
        for sequence in outgrown:
            self.planner.join(sequence, size=size_of(sequence.reserved))
        return moving

    def _advance(self, batch: Batch, drawn: Drawn) -> None:
        """Gives the tokens to their sequences. Ended sequences leave, and new sequences take the lanes above the
        running ones."""
        sequences = batch.sampling
        ended: set[int] = set()
        for row, (sequence, token, logprob) in enumerate(zip(sequences, drawn.tokens_R, drawn.logprobs_R, strict=True)):
            group = sequence.group
            if group.failure is not None:
                continue
            if not math.isfinite(logprob):
                group.failure = not_finite(sequence.version_id)
                continue
            try:
                if group.generation.stream:
                    self._output.deltas.append((group, sequence.delta(token, logprob)))
                if sequence.take(token, logprob):
                    ended.add(row)
            except Exception as error:
                group.fail(error)
        self.metrics.steps.sampled_tokens.inc(len(sequences))
        num_running = row = len(batch.running)
        for piece in batch.ending:
            job = piece.job
            first = sum(sequence.size == job.size for sequence in self.planner.running)
            going_on = [sequence for n, sequence in enumerate(job.sequences, row) if n not in ended]
            row += len(job.sequences)
            if job.group.failure is not None:
                self.kv.caches[job.size].wipe(job.lane)
                continue
            if not job.scored or job.group.scorer is None or job.group.scorer.finite:
                self.kv.remember(job.sequences[0], job.lane, job.states)
            job.states = {}  # the sequences refer to the job, and would keep its states in memory
            self.kv.place(job, first, len(going_on))
            for sequence in going_on:
                self.planner.join(sequence, size=job.size)
                sequence.origin, sequence.shared_length = job, job.length
            for sequence in going_on:
                sequence.follow(has_lane=True)
            self._let_go(job.group)
            if not job.group.begun:
                job.group.begun = True
                self.metrics.requests.first_token.observe(time.perf_counter() - job.group.submitted)
        if batch.ending:
            self._changed = True
        leaving = [sequences[row] for row in ended if row < num_running]
        for sequence in leaving:
            if sequence.group.failure is None:
                self.kv.remember(sequence, sequence.lane)
        self._leave(leaving)
        for group in dict.fromkeys(sequences[row].group for row in sorted(ended)):
            if group.complete and group.failure is None:
                self._end(group, group.outcome())

    def _leave(self, sequences: list[Sequence]) -> None:
        """Removes sequences from the batch. The sequences in the last lanes move into the free lanes, so that no lane
        between them is free."""
        for sequence in sorted(sequences, key=lambda one: one.lane, reverse=True):
            came_from = sum(one.size == sequence.size for one in self.planner.running) - 1
            if (moved := self.planner.leave(sequence)) is not None:
                self.kv.caches[sequence.size].move(came_from, moved.lane, moved.length)
        if sequences:
            self._changed = True
            self.metrics.requests.running.set(
                len(self.planner.running)
            )  # set here, because no step may follow that would set it

    def _end(self, group: SequenceGroup, outcome: Result | ServiceError) -> None:
        del self._groups[group]
        self._begun.pop(group, None)
        self._output.ended.append((group, outcome))
