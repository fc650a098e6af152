"""Progress of requests, in numbers and in words, and the measured speed from which their time is expected.

The thread that computes notes its progress in a copy (`Progress`), from which the event loop answers. So no question
waits for a step, and a request may be finished before the event loop hears of its admission."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sampler_service.core.request import QueueStatus
from sampler_service.core.sequence import Sequence, SequenceGroup

_KEPT = 20
"""Sums over the queue are kept for this many times the time that adding them up took."""
_SHARE = 0.1
"""Weight of the newest step."""


@dataclass(slots=True)
class Speed:
    """Exponential moving averages over the engine's own steps; None while nothing was measured."""

    decode_step_s: float | None = None
    """Time of a step that gives every running sequence one token and computes no prompt, in seconds."""
    prefill_token_s: float | None = None
    """Time of one token of a prompt, in seconds."""

    def observe(self, seconds: float, *, prefilled: int) -> None:
        """Counts one step, which took `seconds` and computed `prefilled` tokens of prompts. Those tokens took the extra
        time, compared with a step without prompts."""
        if prefilled == 0:
            self.decode_step_s = _average(self.decode_step_s, seconds)
        else:
            share = max(0.0, seconds - (self.decode_step_s or 0.0)) / prefilled
            self.prefill_token_s = _average(self.prefill_token_s, share)

    def seconds(self, *, prompt_tokens: int, steps: float) -> float | None:
        """Expected time of so many prompt tokens and decode steps, in seconds. None when the time of one of the two
        kinds is needed and has not been measured."""
        if (prompt_tokens and self.prefill_token_s is None) or (steps and self.decode_step_s is None):
            return None
        return prompt_tokens * (self.prefill_token_s or 0.0) + steps * (self.decode_step_s or 0.0)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _SHARE * (new - old)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Progress of one request."""

    prompt_done: int = 0
    """Prompt tokens that are computed, or were reused."""
    num_drawn: int | None = None
    """Tokens of all sequences of the request; None before the first token."""
    num_running: int = 0
    """Sequences that are in the batch."""
    left: int = 0
    """Most tokens that its sequences may still draw, all together."""
    longest_left: int = 0
    """Most tokens that one of its sequences may still draw."""

    @classmethod
    def of_new(cls, group: SequenceGroup) -> RequestProgress:
        """Progress of a request of which nothing is computed yet."""
        left = group.sequences[0].expected  # all alike, and there may be a thousand in each of thousands of requests
        return cls(left=left * len(group.sequences), longest_left=left)

    @classmethod
    def of(cls, group: SequenceGroup, num_running: int) -> RequestProgress:
        if not (group.begun or group.num_finished):
            return replace(cls.of_new(group), prompt_done=group.prompt_done)
        left = [sequence.expected_left for sequence in group.unfinished]
        return cls(
            prompt_done=group.prompt_done,
            num_drawn=sum(len(sequence.tokens) for sequence in group.sequences),
            num_running=num_running,
            left=sum(left),
            longest_left=max(left, default=0),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the engine at one moment."""

    num_running: int = 0
    """Sequences that are in the batch."""
    requests: Mapping[SequenceGroup, RequestProgress] = field(default_factory=dict)
    """Progress of the requests whose computation has begun."""
    speed: Speed = field(default_factory=Speed)

    @classmethod
    def of(cls, begun: Iterable[SequenceGroup], running: Iterable[Sequence], speed: Speed) -> Progress:
        """A copy of the progress, which belongs to the compute thread."""
        counts: dict[SequenceGroup, int] = {}
        for sequence in running:
            counts[sequence.group] = counts.get(sequence.group, 0) + 1
        requests = {group: RequestProgress.of(group, counts.get(group, 0)) for group in begun}
        return cls(sum(counts.values()), requests, replace(speed))


@dataclass(frozen=True, slots=True)
class Ahead:
    """Sums over the requests before another one."""

    num_requests: int = 0
    num_waiting: int = 0
    prompts: int = 0
    """Prompt tokens that are still to be computed."""
    outputs: int = 0
    """Most tokens that may still be drawn."""


class Queue:
    """The work before each request. It is added up for all in one pass, and kept for _KEPT times as long as that took:
    each of thousands of waiting requests is asked about, and these questions belong to the event loop."""

    def __init__(self) -> None:
        self._by_order: dict[int, Ahead] = {}
        """One entry for each request, by its place in the order of arrival."""
        self._all = Ahead()
        self._kept_until = 0.0

    def ahead_of(
        self,
        group: SequenceGroup,
        groups: Iterable[SequenceGroup],
        waiting: Collection[SequenceGroup],
        progress: Progress,
    ) -> Ahead:
        """The work before a request. The parameters are those of `status_of`. A request that arrived after the sums
        were made counts as behind all others."""
        if (began := time.perf_counter()) >= self._kept_until:
            self._add_up(groups, waiting, progress)
            ended = time.perf_counter()
            self._kept_until = ended + _KEPT * (ended - began)
        return self._by_order.get(_order(group), self._all)

    def _add_up(self, groups: Iterable[SequenceGroup], waiting: Collection[SequenceGroup], progress: Progress) -> None:
        self._by_order.clear()
        num_requests = num_waiting = prompts = outputs = 0
        for group in groups:
            self._by_order[_order(group)] = Ahead(num_requests, num_waiting, prompts, outputs)
            done = _progress_of(group, progress)
            num_requests += 1
            num_waiting += group in waiting
            prompts += _prompt_left(group, done)
            outputs += done.left
        self._all = Ahead(num_requests, num_waiting, prompts, outputs)


def _order(group: SequenceGroup) -> int:
    return group.sequences[0].order


def status_of(
    request_id: str,
    groups: Iterable[SequenceGroup],
    waiting: Collection[SequenceGroup],
    progress: Progress,
    queue: Queue,
) -> QueueStatus | None:
    """Progress of the youngest request with this id; None when there is none.

    `groups`: the requests that have not ended, in the order of their arrival. `waiting`: the ones of which no step has
    computed anything.
    """
    groups = list(groups)
    group = next((one for one in reversed(groups) if one.request_id == request_id), None)
    if group is None:
        return None
    own = _progress_of(group, progress)
    beside = progress.num_running - own.num_running
    if group not in waiting:
        expected = progress.speed.seconds(prompt_tokens=_prompt_left(group, own), steps=own.longest_left)
        return QueueStatus(True, 0, 0, expected, f"{_in_words(group, own)}, {beside} sequences run beside it")
    ahead = queue.ahead_of(group, groups, waiting, progress)
    expected = progress.speed.seconds(
        prompt_tokens=ahead.prompts + _prompt_left(group, own),
        # A step gives a token to each running sequence. While the request waits, the most sequences run that can.
        steps=ahead.outputs / max(1, progress.num_running) + own.longest_left,
    )
    reason = (
        f"waits for a place: {ahead.num_requests} requests are before it, {ahead.num_waiting} of them wait too; "
        f"{progress.num_running} sequences run"
    )
    return QueueStatus(False, ahead.num_requests, ahead.prompts + ahead.outputs, expected, reason)


def _progress_of(group: SequenceGroup, progress: Progress) -> RequestProgress:
    return progress.requests.get(group) or RequestProgress.of_new(group)


def _prompt_left(group: SequenceGroup, done: RequestProgress) -> int:
    return len(group.request.prompt) - done.prompt_done


def _in_words(group: SequenceGroup, done: RequestProgress) -> str:
    if done.num_drawn is None:
        return f"reading the prompt: {done.prompt_done} of {len(group.request.prompt)} tokens"
    most = group.request.params.max_tokens
    of_all = "" if most is None else f" of {most * len(group.sequences)}"
    sequences = f" in {len(group.sequences)} sequences" if len(group.sequences) > 1 else ""
    return f"generating: {done.num_drawn}{of_all} tokens{sequences}"
