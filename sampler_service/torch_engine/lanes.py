"""The running sequences' keys and values: room for them, and what they exchange with the prefix cache.

All of it happens on the compute thread.
"""

from __future__ import annotations

from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from sampler_service.torch_engine.scheduler import Job
from sampler_service.torch_engine.step import TaskPiece, TaskSequence
from sampler_service.torch_engine.task import Task
from tinsmith.modeling.kv_cache import KVCache

IDLE_CACHE_BYTES = 64 * 1024 * 1024
"""Larger lanes are given back when nothing runs."""


class Lanes:
    def __init__(
        self, *, max_lanes: int, max_tokens: int, bytes_per_token: int, prefix_bytes: int, metrics: SamplerMetrics
    ) -> None:
        """`max_tokens`: lanes x tokens of one; `prefix_bytes`: of the prefix cache, 0 for none."""
        self.cache = KVCache()
        self.prefixes = PrefixCache(max_bytes=prefix_bytes, bytes_per_token=bytes_per_token)
        self._max_lanes = max_lanes
        self._max_tokens = max_tokens
        self._bytes_per_token = bytes_per_token
        self._metrics = metrics
        metrics.cache.limit_bytes.set(max_tokens * bytes_per_token)
        metrics.cache.prefix_limit_bytes.set(prefix_bytes)

    def fit(self, lanes: int, tokens: int) -> None:
        """Grows by doubling, or to what is needed when the bound is near."""
        cache, limit = self.cache, self._max_tokens
        if lanes <= cache.num_lanes and tokens <= cache.capacity:
            return
        more_lanes = max(cache.num_lanes, min(_power_of_two(lanes), self._max_lanes))
        more_tokens = max(cache.capacity, _power_of_two(tokens))
        if more_lanes * more_tokens > limit:
            more_lanes, more_tokens = lanes, min(_power_of_two(tokens), limit // lanes)
        cache.resize(more_lanes, more_tokens)

    def place(self, job: Job[Task], first: int, count: int) -> None:
        """Copies a prompt to `count` lanes from `first` on, which lies at its own lane or below."""
        below = slice(first, min(job.lane, first + count))
        above = slice(job.lane + 1, first + count)
        for lanes in (below, above):
            if lanes.start < lanes.stop:
                self.cache.fork(job.lane, lanes, job.length)

    def clear(self) -> None:
        """After a step that broke off anywhere: what it left may be half written."""
        self.cache.clear()
        self.prefixes.clear()

    def observe(self, *, running_tokens: int, idle: bool) -> None:
        """After each step. `running_tokens`: of the running sequences, prompts included."""
        self._metrics.cache.used_bytes.set(running_tokens * self._bytes_per_token)
        self._metrics.cache.allocated_bytes.set(self.cache.num_bytes())
        self._metrics.cache.prefix_bytes.set(self.prefixes.num_bytes)
        if idle and self.cache.num_bytes() > IDLE_CACHE_BYTES:
            self.cache.clear()

    def reuse(self, job: Job[Task]) -> int:
        """How many of a job's tokens the prefix cache spares it: up to the first row that it scores, and never all, for
        the last one gives the first draw."""
        if not self.prefixes.enabled:
            return 0
        task = job.owner
        most = job.length - 1
        if job.scored and task.scorer is not None:
            most = min(most, task.scorer.first_row)
        num_blocks = -(-most // BLOCK_TOKENS)
        job.blocks = self.prefixes.match(task.digests(job.sequences[0])[:num_blocks]) if most else []
        tokens = min(most, len(job.blocks) * BLOCK_TOKENS)
        self._metrics.cache.prefix_lookups.inc()
        self._metrics.cache.prefix_hits.inc(tokens > 0)
        self._metrics.cache.prefix_hit_tokens.inc(tokens)
        return tokens

    def load(self, piece: TaskPiece) -> None:
        """Brings a job's reused tokens to its lane, before its first piece is computed."""
        job = piece.job
        if job.blocks:
            self.prefixes.load(self.cache, job.lane, job.blocks, piece.start)
            job.blocks = []

    def remember(self, sequence: TaskSequence, lane: int) -> None:
        """Keeps the computed tokens of a sequence whose lane is about to be given away or shared; unless they are of
        more than one version, for then no request may find them."""
        task = sequence.owner
        if self.prefixes.enabled and sequence.index not in task.mixed:
            self.prefixes.put(task.namespace_of(sequence), task.digests(sequence), self.cache, lane)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
