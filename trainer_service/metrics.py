"""What the trainer measures. Kinds of operations are the field names of WaitResultResponse.

A phase is a part of the compute thread's time: `schedule` (choosing the next work), `pack`, `forward`, `loss`,
`backward`, `accumulate` of each micro-batch, `optimizer`, and `capture` (the copy for a checkpoint or a snapshot).
Forward and backward end with a value that the host waits for, so that on a GPU, too, they are what they took.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tinsmith.rpc.metrics import LATENCY_BUCKETS_S, PHASE_BUCKETS_S
from tinsmith.v1.trainer_pb2 import WaitResultResponse
from trainer_service.objectives.mismatch import Mismatch

_NATS = [10.0**n for n in range(-7, 0)] + [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_SHARES = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0]
KINDS = [field.name for field in WaitResultResponse.DESCRIPTOR.oneofs_by_name["result"].fields]
PHASES = ("schedule", "pack", "forward", "loss", "backward", "accumulate", "optimizer", "capture")
_RATIOS = [1.0, 1.001, 1.01, 1.1, 1.2, 1.5, 2.0, 5.0, 10.0, 100.0, 1000.0]


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

        def values(name: str, text: str, buckets: list[float], label: str) -> Histogram:
            return Histogram(f"trainer_{name}", text, [label], buckets=buckets, registry=registry)

        self.operations = counter("operations", "Finished operations, by kind and outcome.", "kind", "outcome")
        self.queue_length = gauge("queue_length", "Accepted operations that have not been executed.", "kind")
        self.queue_seconds = seconds("queue", "From acceptance to execution.", "kind")
        self.step_seconds = seconds("step", "Execution on the compute thread.", "kind")
        self.queue_oldest = gauge("queue_oldest_seconds", "How long what waits for longest has waited; 0 for nothing.")
        self.running = gauge("running_seconds", "How long the compute thread has been at its present work; 0 for none.")
        self.idle_seconds = counter("idle_seconds", "Time in which the compute thread had nothing to do.")
        phases = Histogram(
            "trainer_phase_seconds",
            "One phase of the compute thread's work; there is one of each for a micro-batch, step or capture.",
            ["phase"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.micro_batches = counter("micro_batches", "Works of the engine; forward_backward operations share them.")
        self.tokens = counter("tokens", "Tokens of micro-batches.")
        self.micro_batch_tokens = sizes("micro_batch_tokens", "Tokens of one micro-batch.", largest=2**17)
        self.micro_batch_models = sizes("micro_batch_models", "Models with datums in one micro-batch.", largest=256)
        self.token_budget = gauge("token_budget", "Tokens that a micro-batch should have.")
        self.out_of_memory = counter("out_of_memory", "Micro-batches that ran out of memory, and were tried smaller.")
        self.models = gauge("models", "Live models.")
        self.model_bytes = gauge(
            "model_bytes", "Weights, gradients and moments of the live models, by where they lie.", "place"
        )
        self.model_reserved_bytes = gauge(
            "model_reserved_bytes", "What the live models take once each has gradients and moments."
        )
        self.model_limit_bytes = gauge("model_limit_bytes", "Bound of the reserved bytes; infinite where none was set.")
        self.device_bytes = gauge(
            "device_memory_bytes",
            "The GPU's memory: allocated by tensors, reserved by torch, free, in all. On the CPU there is none.",
            "state",
        )
        self.sampler_kl = values(
            "sampler_kl_nats", "KL(sampler || trainer) for each token of a batch, by its loss.", _NATS, "loss_fn"
        )
        self.ess = values(
            "ess_ratio", "Effective sample size of a batch, as a share of its tokens.", _SHARES, "loss_fn"
        )
        self.ratio_max = values(
            "max_importance_ratio", "Largest ratio, trainer to sampler, of a batch.", _RATIOS, "loss_fn"
        )
        self.publish_seconds = seconds("publish", "Publishing a version to the samplers.")
        self.publish_gap = values(
            "publish_gap_nats", "Largest gap of a canary token, of one sampler and version.", _NATS, "engine"
        )
        self.publish_certificates = counter(
            "publish_certificates",
            "Publishes: passed, warned, refused, or unscored: by no sampler.",
            "outcome",
        )
        for outcome in ("passed", "warned", "refused", "unscored"):  # a series that begins at 1 has no increase
            self.publish_certificates.labels(outcome)
        self.publish_bytes = counter("publish_bytes", "Adapter bytes broadcast, once for each publish.")
        self.publish_failures = counter("publish_failures", "Attempts to publish that failed.")
        self.weight_groups = counter("weight_groups", "Process groups formed with samplers.")
        self.samplers = gauge("samplers", "Samplers that are serving.")
        self.checkpoint_seconds = seconds("checkpoint", "Writing a checkpoint.")
        self.checkpoint_bytes = counter("checkpoint_bytes", "Bytes of written checkpoints.")
        self.storage_free_bytes = gauge("storage_free_bytes", "Free bytes of the disk that checkpoints are written on.")
        self.storage_free_bytes.set(math.inf)  # as in an object store, until a folder says otherwise
        self.state_free_bytes = gauge("state_free_bytes", "Free bytes of the disk with the journal and the snapshots.")
        self.refused_saves = counter(
            "refused_saves", "Saves, copies, imports and loads that were refused because the disk would become full."
        )
        self.swept_leftovers = counter("swept_leftovers", "Unfinished checkpoints of dead writers that were deleted.")
        self.damaged_checkpoints = counter("damaged_checkpoints", "Times that a file was not what its manifest says.")
        self.snapshot_seconds = seconds("snapshot", "Writing a snapshot, from its capture on.")
        self.snapshot_bytes = counter("snapshot_bytes", "Bytes of written snapshots.")
        self.snapshot_failures = counter("snapshot_failures", "Snapshots that could not be captured or written.")
        self.restored_models = counter("restored_models", "Models that were restored after a restart.")
        self.unrestored_models = counter("unrestored_models", "Models that could not be restored after a restart.")
        self.replayed_operations = counter("replayed_operations", "Operations that ran again after a restart.", "kind")
        for kind in KINDS:  # a replay is over between two scrapes: a series that begins at its end has no increase
            self.replayed_operations.labels(kind)
        self.restore_seconds = seconds("restore", "From the start to where a model was again when the trainer ended.")
        self.journal_bytes = gauge("journal_bytes", "Bytes of requests and results in the journal.")
        self.journal_limit_bytes = gauge("journal_limit_bytes", "Bound of the journal: journal_max_bytes.")
        self.journal_failures = counter("journal_failures", "Transactions that failed: their operations were refused.")
        self.journal_commit_seconds = seconds("journal_commit", "One transaction of the journal.")

    def observe_mismatch(self, mismatch: Mismatch, *, loss_fn: str) -> None:
        """Of one forward_backward."""
        self.sampler_kl.labels(loss_fn).observe(mismatch.sampler_kl)
        self.ess.labels(loss_fn).observe(mismatch.ess)
        self.ratio_max.labels(loss_fn).observe(mismatch.ratio_max)
