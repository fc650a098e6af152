"""Runs sequences as vLLM's requests: hands them over in order, receives their tokens, aborts them and begins them
again.

Each sequence is a request of its own, so that a move, a stop string or a cancel ends one sequence and no other; they
share the blocks of their prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sampler_service.core.engine import OpenRequests
from sampler_service.core.request import Delta
from sampler_service.core.scoring import not_finite
from sampler_service.core.sequence import PASSING, Sequence, SequenceGroup
from sampler_service.core.versions import Version, VersionStore
from sampler_service.metrics import SamplerMetrics
from sampler_service.vllm.outputs import DrawnToken, drawn_tokens
from sampler_service.vllm.pictures import WorkerPictures
from sampler_service.vllm.requests import lora_request, prompt, sampling_params
from sampler_service.vllm.start import VllmProcess
from sampler_service.vllm.wire import Scores
from tinsmith.errors import ServiceError
from tinsmith.pictures.processing import Processor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class VllmRequest:
    """One of vLLM's requests: a sequence from its prompt on, or from the token at which it moved to another version."""

    group: SequenceGroup
    sequence: Sequence
    version: Version | None
    generating: asyncio.Task[None]


class VllmSequences:
    """The sequences of all requests, in vLLM or waiting for a place there. Belongs to the event loop."""

    def __init__(
        self,
        process: VllmProcess,
        requests: OpenRequests,
        store: VersionStore,
        metrics: SamplerMetrics,
        *,
        max_running: int,
        processor: Processor | None,
    ) -> None:
        self._process = process
        self._requests = requests
        self._store = store
        self._metrics = metrics
        self._max_running = max_running
        self._processor = processor
        self._pictures = WorkerPictures(process.call)
        self._queue: deque[Sequence] = deque()
        """Sequences that wait for a place."""
        self._runs: dict[Sequence, VllmRequest] = {}
        self._leaving: dict[VllmRequest, None] = {}
        """Runs that were cancelled, until vLLM has been told."""
        self._names = itertools.count()

    @property
    def running(self) -> Collection[Sequence]:
        """Sequences that vLLM has."""
        return self._runs.keys()

    def add(self, group: SequenceGroup) -> None:
        """The sequences of a new request."""
        first, *others = group.sequences
        has_place = group.request.on_probation or len(self._runs) < self._max_running + PASSING
        if first.passes and not others and has_place:
            self._begin(first)  # such a request need not wait for running sequences to end
        else:
            self._queue.extend(group.sequences)
            self._admit()

    def move(self, groups: Iterable[SequenceGroup], version: Version) -> int:
        """Lets the sequences of these requests go on with another version, for which vLLM computes their keys and
        values anew. Returns how many."""
        moved = sum([self._move(group, version) for group in groups])
        self._admit()
        return moved

    def drop(self, group: SequenceGroup) -> None:
        """Aborts the sequences of a request that has ended."""
        if any(sequence not in self._runs and sequence.finished is None for sequence in group.sequences):
            self._queue = deque(sequence for sequence in self._queue if sequence.group is not group)
        current = asyncio.current_task()
        for run in [run for run in self._runs.values() if run.group is group and run.generating is not current]:
            del self._runs[run.sequence]
            self._break_off(run)
        self._release_unused(group)

    def _admit(self) -> None:
        """Hands sequences to vLLM, in the order in which they came, while it has places."""
        while self._queue and len(self._runs) < self._max_running:
            self._begin(self._queue.popleft())

    def _begin(self, sequence: Sequence) -> None:
        group = sequence.group
        if group in self._requests.waiting:
            self._metrics.requests.queue_time.observe(time.perf_counter() - group.submitted)
            self._metrics.steps.prompt_tokens.inc(len(group.request.prompt))
            self._requests.admit(group, time.time())
        version = sequence.version
        generating = asyncio.create_task(self._generate(sequence, version))
        run = VllmRequest(group, sequence, version, generating)
        self._runs[sequence] = run
        generating.add_done_callback(lambda _: self._left(run))

    async def _generate(self, sequence: Sequence, version: Version | None) -> None:
        """Runs one sequence to its end, or until it is cancelled."""
        group = sequence.group
        name = f"{next(self._names)}"
        scores = self._scores_of(sequence, name)
        try:
            async with self._pictures.held(group.request.pictures) as pictures:
                outputs = self._process.llm.generate(
                    prompt(sequence, version, self._processor, pictures),
                    sampling_params(sequence, version, scores, topk=self._topk(group)),
                    name,
                    lora_request=lora_request(version),
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        first = not sequence.tokens and output.outputs[0].token_ids
                        if first and sequence.index == 0:
                            self._note_reuse(group, output.num_cached_tokens or 0)
                        if first and scores is not None:
                            await self._take_scores(group, name)
                            scores = None
                        if self._deliver(sequence, output) and not output.finished:
                            break  # vLLM would go on computing the sequence
            if sequence.finished is None:
                reason = f"vLLM ended a sequence early, after {len(sequence.tokens)} tokens"
                self._requests.end(group, ServiceError(reason))
        except Exception as error:
            if self._process.answers:
                logger.error("a request failed in vLLM", exc_info=error)
                self._requests.end(
                    group, ServiceError(f"the engine failed in this request: {error}; the log has the cause")
                )
            # else the health check ends everything
        finally:
            if scores is not None and self._process.answers:
                await self._process.call("tinsmith_take_scores", name)  # nobody wants these tokens any more

    def _scores_of(self, sequence: Sequence, name: str) -> Scores | None:
        """The scores that this run computes. Those of the request belong to its first sequence, until it has a token;
        None for other runs."""
        group = sequence.group
        if group.scorer is None or sequence.index or sequence.tokens:
            return None
        return Scores.of(group.request, name=name, seed=group.scorer.seed)

    def _note_reuse(self, group: SequenceGroup, tokens: int) -> None:
        """Prompt tokens that vLLM had computed before."""
        group.cache_hit_tokens = tokens
        self._metrics.cache.prefix_lookups.inc()
        self._metrics.cache.prefix_hits.inc(tokens > 0)
        self._metrics.cache.prefix_hit_tokens.inc(tokens)

    async def _take_scores(self, group: SequenceGroup, name: str) -> None:
        assert group.scorer is not None
        scores, *_ = await self._process.call("tinsmith_take_scores", name)
        group.scorer.restore(scores)

    def _topk(self, group: SequenceGroup) -> int:
        return min(group.request.topk_sample_logprobs, self._requests.limits.vocab_size)

    def _deliver(self, sequence: Sequence, output: Any) -> bool:
        """True when the sequence has ended, or its request."""
        group = sequence.group
        columns, topk = group.request.topk_sample_logprobs, self._topk(group)
        new: list[DrawnToken] = []
        ended = False
        for drawn in drawn_tokens(output.outputs[0], topk):
            if not math.isfinite(drawn.logprob):
                broken = ServiceError("the grammar library failed in this request; the log has the cause")
                self._requests.end(group, broken if group.grammar is not None else not_finite(sequence.version_id))
                return True
            if topk:
                sequence.take_row(drawn.table_ids, drawn.table_logprobs)
            new.append(drawn)
            if ended := sequence.take(drawn.token, drawn.logprob):
                break
        if new and not group.begun:
            group.begun = True
            group.prompt_done = len(group.request.prompt)
            self._metrics.requests.first_token.observe(time.perf_counter() - group.submitted)
        if new and group.generation.stream:
            tokens, logprobs = tuple(one.token for one in new), tuple(one.logprob for one in new)
            group.generation.push(Delta(sequence.index, tokens, logprobs, DrawnToken.table(new, columns)))
        if ended and group.complete:
            self._requests.end(group, group.outcome())
        return ended

    def _move(self, group: SequenceGroup, version: Version) -> int:
        group.move(version)
        going_on = group.unfinished
        again = [sequence for sequence in going_on if sequence in self._runs]
        for sequence in going_on:
            sequence.follow(has_lane=False)
        for sequence in again:
            self._break_off(self._runs.pop(sequence))
            self._begin(sequence)
        self._release_unused(group)
        return len(going_on)

    def _break_off(self, run: VllmRequest) -> None:
        self._leaving[run] = None
        run.generating.cancel()

    def _left(self, run: VllmRequest) -> None:
        """Called when vLLM has nothing of the run any more, or will be told so before any later call."""
        with self._requests.dying_of_errors():
            self._leaving.pop(run, None)
            if self._runs.get(run.sequence) is run:
                del self._runs[run.sequence]
            self._release_unused(run.group)
            self._admit()

    def _release_unused(self, group: SequenceGroup) -> None:
        """Lets go of the versions that neither the request nor one of its runs uses."""
        used = {id(run.version) for run in (*self._runs.values(), *self._leaving) if run.group is group}
        if group in self._requests:
            used.add(id(group.version))
        for version in [version for version in group.held if id(version) not in used]:
            group.held.remove(version)
            self._store.release(version)
