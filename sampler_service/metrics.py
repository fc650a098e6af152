"""Metrics of the sampler, by subject.

A phase is a part of a step of the torch engine: `plan`, `forward` (up to the logits), `draw`, which waits
for the device where there is one, and `advance`. The phases of vLLM's steps are not measured.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tinsmith.rpc.metrics import PHASE_BUCKETS_S, Declare

PHASES = ("plan", "forward", "draw", "advance")


class Requests:
    def __init__(self, declare: Declare) -> None:
        self.ended = declare.counter("requests", "Requests that ended, by outcome: ok or an error's reason.", "outcome")
        self.running = declare.gauge("running_sequences", "Sequences that generate now.")
        self.waiting = declare.gauge("waiting_requests", "Requests that wait for a place.")
        self.waiting_tokens = declare.gauge(
            "waiting_tokens", "Tokens of the requests that wait for a place: prompts, and the most that may be sampled."
        )
        self.queue_oldest = declare.gauge(
            "queue_oldest_seconds", "Seconds that the oldest waiting request has waited; 0 if none waits."
        )
        self.queue_limit = declare.gauge("waiting_requests_limit", "Most requests that may wait: max_waiting.")
        self.queue_time = declare.seconds("queue_time", "Time from submission to a place in the batch.")
        self.first_token = declare.seconds("time_to_first_token", "Time from submission to the first token.")


class Steps:
    def __init__(self, declare: Declare) -> None:
        self.threads = declare.gauge(
            "threads", "CPU threads of the newest step; 0 with torch's default, and with vLLM."
        )
        self.step_time = declare.seconds("step", "Time of one engine step.")
        phases = declare.seconds("phase", "One phase of a step.", "phase", buckets=PHASE_BUCKETS_S)
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.prompt_tokens = declare.counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.prefilled_tokens = declare.counter(
            "prefilled_tokens", "Prompt tokens computed; num_samples share one computation."
        )
        self.sampled_tokens = declare.counter("sampled_tokens", "Tokens generated.")
        self.preemptions = declare.counter(
            "preemptions",
            "Sequences that gave their place back for a while: those without max_tokens, for want of memory, and those "
            "of an owner who held more than a share.",
        )
        self.moved = declare.counter(
            "moved_sequences", "Sequences that went on with a newer version of the run they follow."
        )


class Cache:
    """Keys and values: of running sequences, and of prefixes that may come again."""

    def __init__(self, declare: Declare) -> None:
        self.allocated_bytes = declare.gauge("kv_cache_bytes", "Memory of the key/value cache now, in bytes.")
        self.used_bytes = declare.gauge(
            "kv_cache_used_bytes", "Keys and values of running sequences in the key/value cache, in bytes."
        )
        self.limit_bytes = declare.gauge("kv_cache_limit_bytes", "Limit of the key/value cache, in bytes.")
        self.prefix_lookups = declare.counter(
            "prefix_cache_lookups", "Prompts that were looked up in the prefix cache."
        )
        self.prefix_hits = declare.counter("prefix_cache_hits", "Prompts whose beginning was in the prefix cache.")
        self.prefix_hit_tokens = declare.counter(
            "prefix_cache_hit_tokens", "Prompt tokens that were in the prefix cache, and were not computed."
        )
        self.prefix_bytes = declare.gauge(
            "prefix_cache_bytes", "Keys, values and states in the prefix cache, in bytes."
        )
        self.prefix_limit_bytes = declare.gauge("prefix_cache_limit_bytes", "Limit of the prefix cache, in bytes.")


class Versions:
    def __init__(self, declare: Declare) -> None:
        self.resident = declare.gauge("resident_versions", "Versions that can be sampled from.")
        self.resident_bytes = declare.gauge("resident_version_bytes", "Memory of the resident versions, in bytes.")
        self.limit_bytes = declare.gauge(
            "resident_version_limit_bytes", "Limit of the memory of versions, in bytes: adapter_memory_bytes."
        )
        self.publishes = declare.counter(
            "publishes", "Weight updates received, by outcome: ok or an error's reason.", "outcome"
        )
        self.publish_bytes = declare.counter("publish_bytes", "Bytes received by the weight channel.")
        self.publish_time = declare.seconds("publish", "Time from StartWeightUpdate to a visible version.")


class SamplerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        declare = Declare("sampler", registry)
        self.requests = Requests(declare)
        self.steps = Steps(declare)
        self.cache = Cache(declare)
        self.versions = Versions(declare)
