"""What the trainer measures. Kinds of operations are the field names of WaitResultResponse."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tinsmith.rpc.metrics import LATENCY_BUCKETS_S


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"trainer_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"trainer_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"trainer_{name}_seconds", text, labels, buckets=LATENCY_BUCKETS_S, registry=registry)

        def sizes(name: str, text: str, *, largest: int) -> Histogram:
            buckets = [2**n for n in range(largest.bit_length())]
            return Histogram(f"trainer_{name}", text, buckets=buckets, registry=registry)

        self.operations = counter("operations", "Finished operations, by kind and outcome.", "kind", "outcome")
        self.queue_length = gauge("queue_length", "Accepted operations that have not been executed.", "kind")
        self.queue_seconds = seconds("queue", "From acceptance to execution.", "kind")
        self.step_seconds = seconds("step", "Execution on the compute thread.", "kind")
        self.micro_batches = counter("micro_batches", "Works of the engine; forward_backward operations share them.")
        self.tokens = counter("tokens", "Tokens of micro-batches.")
        self.micro_batch_tokens = sizes("micro_batch_tokens", "Tokens of one micro-batch.", largest=2**17)
        self.micro_batch_models = sizes("micro_batch_models", "Models with datums in one micro-batch.", largest=256)
        self.token_budget = gauge("token_budget", "Tokens that a micro-batch should have.")
        self.out_of_memory = counter("out_of_memory", "Micro-batches that ran out of memory, and were tried smaller.")
        self.models = gauge("models", "Live models.")
        self.publish_seconds = seconds("publish", "Publishing a version to the samplers.")
        self.publish_bytes = counter("publish_bytes", "Adapter bytes broadcast, once for each publish.")
        self.publish_failures = counter("publish_failures", "Attempts to publish that failed.")
        self.weight_groups = counter("weight_groups", "Process groups formed with samplers.")
        self.samplers = gauge("samplers", "Samplers that are serving.")
        self.checkpoint_seconds = seconds("checkpoint", "Writing a checkpoint.")
        self.checkpoint_bytes = counter("checkpoint_bytes", "Bytes of written checkpoints.")
        self.journal_bytes = gauge("journal_bytes", "Bytes of requests and results in the journal.")
        self.journal_commit_seconds = seconds("journal_commit", "One transaction of the journal.")
