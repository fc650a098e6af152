"""What the sampler counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tinsmith.rpc.metrics import LATENCY_BUCKETS_S


class SamplerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sampler_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"sampler_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"sampler_{name}_seconds", text, registry=registry, buckets=LATENCY_BUCKETS_S)

        self.requests = counter("requests", "Requests that ended, by outcome: ok or an error's reason", "outcome")
        self.running = gauge("running_sequences", "Sequences that generate now")
        self.waiting = gauge("waiting_requests", "Requests that wait for a place")
        self.queue_time = seconds("queue_time", "Time from submission to a place in the batch")
        self.first_token = seconds("time_to_first_token", "Time from submission to the first token")
        self.step_time = seconds("step", "Time of one engine step")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.prefilled_tokens = counter("prefilled_tokens", "Prompt tokens computed; num_samples share one computation")
        self.sampled_tokens = counter("sampled_tokens", "Tokens generated")
        self.preemptions = counter("preemptions", "Sequences without max_tokens that gave their place back for a while")
        self.moved = counter("moved_sequences", "Sequences that went on with a newer version of the run they follow")
        self.cache_bytes = gauge("kv_cache_bytes", "Size of the key/value cache")
        self.prefix_lookups = counter("prefix_cache_lookups", "Prompts that were looked up in the prefix cache")
        self.prefix_hits = counter("prefix_cache_hits", "Prompts whose beginning was there")
        self.prefix_hit_tokens = counter("prefix_cache_hit_tokens", "Tokens that it saved from being computed")
        self.prefix_bytes = gauge("prefix_cache_bytes", "Keys and values in the prefix cache")
        self.versions = gauge("resident_versions", "Adapter versions that can be sampled from")
        self.version_bytes = gauge("resident_version_bytes", "Memory that they take")
        self.publishes = counter("publishes", "Weight updates received, by outcome: ok or an error's reason", "outcome")
        self.publish_bytes = counter("publish_bytes", "Bytes received by the weight channel")
        self.publish_time = seconds("publish", "Time from StartWeightUpdate to a visible version")
