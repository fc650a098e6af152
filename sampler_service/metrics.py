"""What the sampler counts.

A phase is a part of a step of the torch engine: `plan`, `forward` (up to the logits), `draw`, which waits
for the device where there is one, and `advance`. vLLM's are not told apart.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tinsmith.rpc.metrics import LATENCY_BUCKETS_S, PHASE_BUCKETS_S

PHASES = ("plan", "forward", "draw", "advance")


class SamplerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sampler_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"sampler_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"sampler_{name}_seconds", text, registry=registry, buckets=LATENCY_BUCKETS_S)

        self.requests = counter("requests", "Requests that ended, by outcome: ok or an error's reason.", "outcome")
        self.running = gauge("running_sequences", "Sequences that generate now.")
        self.waiting = gauge("waiting_requests", "Requests that wait for a place.")
        self.queue_oldest = gauge(
            "queue_oldest_seconds", "How long the request that waits for longest has waited; 0 for none."
        )
        self.queue_limit = gauge("waiting_requests_limit", "Most requests that may wait: max_waiting.")
        self.queue_time = seconds("queue_time", "Time from submission to a place in the batch.")
        self.first_token = seconds("time_to_first_token", "Time from submission to the first token.")
        self.step_time = seconds("step", "Time of one engine step.")
        phases = Histogram(
            "sampler_phase_seconds", "One phase of a step.", ["phase"], registry=registry, buckets=PHASE_BUCKETS_S
        )
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.prefilled_tokens = counter(
            "prefilled_tokens", "Prompt tokens computed; num_samples share one computation."
        )
        self.sampled_tokens = counter("sampled_tokens", "Tokens generated.")
        self.preemptions = counter(
            "preemptions", "Sequences without max_tokens that gave their place back for a while."
        )
        self.moved = counter("moved_sequences", "Sequences that went on with a newer version of the run they follow.")
        self.cache_bytes = gauge("kv_cache_bytes", "Memory that the key/value cache has now.")
        self.cache_used_bytes = gauge("kv_cache_used_bytes", "Keys and values of running sequences in it.")
        self.cache_limit_bytes = gauge("kv_cache_limit_bytes", "What it may grow to.")
        self.prefix_lookups = counter("prefix_cache_lookups", "Prompts that were looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompts whose beginning was there.")
        self.prefix_hit_tokens = counter("prefix_cache_hit_tokens", "Tokens that it saved from being computed.")
        self.prefix_bytes = gauge("prefix_cache_bytes", "Keys and values in the prefix cache.")
        self.prefix_limit_bytes = gauge("prefix_cache_limit_bytes", "Bound of the prefix cache.")
        self.versions = gauge("resident_versions", "Adapter versions that can be sampled from.")
        self.version_bytes = gauge("resident_version_bytes", "Memory that they take.")
        self.version_limit_bytes = gauge("resident_version_limit_bytes", "Bound of it: adapter_memory_bytes.")
        self.publishes = counter(
            "publishes", "Weight updates received, by outcome: ok or an error's reason.", "outcome"
        )
        self.publish_bytes = counter("publish_bytes", "Bytes received by the weight channel.")
        self.publish_time = seconds("publish", "Time from StartWeightUpdate to a visible version.")
