"""The trainer's metrics, by subject. Kinds of operations are the field names of WaitResultResponse.

A phase is a part of the compute thread's time: `schedule` (choosing the next work), `pack`, `forward`, `loss`,
`backward` and `accumulate` of each micro-batch, `optimizer`, and `capture` (the copy for a checkpoint or a snapshot).
The host waits for a value at the end of forward and of backward, so their times are right on a GPU, too.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from tinsmith.rpc.metrics import PHASE_BUCKETS_S, Declare
from tinsmith.v1.trainer_pb2 import WaitResultResponse
from trainer_service.objectives.mismatch import Mismatch

_NATS = [10.0**n for n in range(-7, 0)] + [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_SHARES = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0]
KINDS = [field.name for field in WaitResultResponse.DESCRIPTOR.oneofs_by_name["result"].fields]
PHASES = ("schedule", "pack", "forward", "loss", "backward", "accumulate", "optimizer", "capture")
_RATIOS = [1.0, 1.001, 1.01, 1.1, 1.2, 1.5, 2.0, 5.0, 10.0, 100.0, 1000.0]


class OperationsMetrics:
    """Operations, from acceptance to the answer."""

    def __init__(self, declare: Declare) -> None:
        self.finished = declare.counter("operations", "Finished operations, by kind and outcome.", "kind", "outcome")
        for kind in KINDS:  # each series must begin at 0: Prometheus sees no increase in one that begins at 1
            for outcome in ("ok", "failed"):
                self.finished.labels(kind, outcome)
        self.queue_length = declare.gauge("queue_length", "Accepted operations that have not been executed.", "kind")
        self.queue_seconds = declare.seconds("queue", "Time from acceptance to execution.", "kind")
        self.queue_oldest = declare.gauge(
            "queue_oldest_seconds",
            "Longest time that a model's next operation has waited, over all models; 0 when none waits.",
        )
        self.queued_tokens = declare.gauge(
            "queued_tokens",
            "Tokens of the batches that wait for the compute thread, what is left of running ones included.",
        )
        self.queued_seconds = declare.gauge(
            "queued_seconds",
            "Expected time until all work that waits for the compute thread has run; 0 before the first measurement.",
        )
        self.held_bytes = declare.gauge(
            "held_bytes",
            "Memory of accepted operations whose answers are not stored: bodies, batches, answers.",
        )
        self.held_limit_bytes = declare.gauge("held_limit_bytes", "Limit on held_bytes: max_queued_bytes.")


class ComputeMetrics:
    """The compute thread."""

    def __init__(self, declare: Declare) -> None:
        self.step_seconds = declare.seconds("step", "Time of one micro-batch or call on the compute thread.", "kind")
        self.running = declare.gauge(
            "running_seconds", "Time that the compute thread has spent on its current work; 0 while it is idle."
        )
        self.threads = declare.gauge("threads", "CPU threads of this process's newest work; 0 means torch's default.")
        self.tokens_per_second = declare.gauge(
            "tokens_per_second", "Measured speed of large micro-batches, by which their size is chosen; 0 at first."
        )
        self.idle_seconds = declare.counter("idle_seconds", "Time in which the compute thread had nothing to do.")
        phases = declare.seconds(
            "phase",
            "Time of one phase of the compute thread's work: of each micro-batch, step or capture.",
            "phase",
            buckets=PHASE_BUCKETS_S,
        )
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.micro_batches = declare.counter(
            "micro_batches", "Micro-batches computed; forward_backward operations share them."
        )
        self.tokens = declare.counter("tokens", "Charged tokens of micro-batches: a datum with many targets has more.")
        self.shared_tokens = declare.counter(
            "shared_tokens", "Tokens of datums that were not computed, because another datum began with them, too."
        )
        self.micro_batch_tokens = declare.histogram(
            "micro_batch_tokens", "Charged tokens of one micro-batch.", buckets=[2**n for n in range(18)]
        )
        self.micro_batch_models = declare.histogram(
            "micro_batch_models", "Models with datums in one micro-batch.", buckets=[2**n for n in range(9)]
        )


class MemoryMetrics:
    """Live models, and what memory allows."""

    def __init__(self, declare: Declare) -> None:
        self.token_budget = declare.gauge(
            "token_budget", "Most tokens of a micro-batch: as many as fit into memory, or as configured."
        )
        self.out_of_memory = declare.counter(
            "out_of_memory", "Micro-batches that ran out of memory and were tried again in smaller parts."
        )
        self.models = declare.gauge("models", "Live models in memory.")
        self.parked_models = declare.gauge("parked_models", "Live models that are parked: on disk only.")
        self.park_seconds = declare.seconds(
            "park", "Time of parking a model: writing its state and freeing its memory."
        )
        self.unpark_seconds = declare.seconds(
            "unpark", "Time of bringing back a parked model, including the wait for a place in memory."
        )
        self.model_bytes = declare.gauge(
            "model_bytes", "Weights, gradients and moments of the models in memory, on the device or the host.", "place"
        )
        self.model_reserved_bytes = declare.gauge(
            "model_reserved_bytes", "Memory that the models take once each has gradients and moments."
        )
        self.model_limit_bytes = declare.gauge(
            "model_limit_bytes", "Limit on model_reserved_bytes; infinite without a limit."
        )
        self.device_bytes = declare.gauge(
            "device_memory_bytes",
            "The GPU's memory: allocated by tensors, reserved by torch, free, and total. A CPU has no such series.",
            "state",
        )


class AgreementMetrics:
    """The gap between trainer and sampler on the tokens of training batches."""

    def __init__(self, declare: Declare) -> None:
        self.sampler_kl = declare.histogram(
            "sampler_kl_nats",
            "KL(sampler || trainer) per token of a batch, by loss.",
            "loss_fn",
            buckets=_NATS,
        )
        self.ess = declare.histogram(
            "ess_ratio", "Effective sample size of a batch, as a share of its tokens.", "loss_fn", buckets=_SHARES
        )
        self.ratio_max = declare.histogram(
            "max_importance_ratio",
            "Largest ratio of a token's probability, trainer to sampler, in a batch.",
            "loss_fn",
            buckets=_RATIOS,
        )

    def observe(self, mismatch: Mismatch, *, loss_fn: str) -> None:
        """Records one forward_backward."""
        self.sampler_kl.labels(loss_fn).observe(mismatch.sampler_kl)
        self.ess.labels(loss_fn).observe(mismatch.ess)
        self.ratio_max.labels(loss_fn).observe(mismatch.ratio_max)


class PublishingMetrics:
    """Publishing versions to the samplers."""

    def __init__(self, declare: Declare) -> None:
        self.publish_seconds = declare.seconds("publish", "Time of publishing a version to the samplers.")
        self.publish_gap = declare.histogram(
            "publish_gap_nats",
            "Largest logprob gap of a canary token between trainer and sampler, by publish and sampler.",
            "engine",
            buckets=_NATS,
        )
        self.publish_certificates = declare.counter(
            "publish_certificates",
            "Publishes: passed, warned, refused, or unscored (no sampler could be measured).",
            "outcome",
        )
        for outcome in ("passed", "warned", "refused", "unscored"):  # each series must begin at 0, as above
            self.publish_certificates.labels(outcome)
        self.applied = declare.counter(
            "publish_applied",
            "Measured samplers, by whether the version changes their logprobs as it changes the trainer's.",
            "applied",
        )
        for state in ("yes", "too_weak_to_tell", "no", "differently"):
            self.applied.labels(state)
        self.left_out = declare.counter(
            "publish_left_out",
            "Samplers that were chosen for a published version (its homes) and do not serve it, by reason: gone (no "
            "connection), not_serving (no answer, or loading), full, no_group (no transport to it yet), not_measured, "
            "not_confirmed.",
            "reason",
        )
        for reason in ("gone", "not_serving", "full", "no_group", "not_measured", "not_confirmed"):
            self.left_out.labels(reason)
        self.publish_bytes = declare.counter("publish_bytes", "Bytes of sent versions, counted once for each publish.")
        self.publish_failures = declare.counter("publish_failures", "Attempts to publish that failed.")
        self.weight_groups = declare.counter("weight_groups", "Process groups formed with samplers.")
        self.samplers = declare.gauge("samplers", "Samplers that are serving.")


class StorageMetrics:
    """Checkpoints."""

    def __init__(self, declare: Declare) -> None:
        self.checkpoint_seconds = declare.seconds("checkpoint", "Time of writing a checkpoint.")
        self.checkpoint_bytes = declare.counter("checkpoint_bytes", "Bytes of written checkpoints.")
        self.storage_free_bytes = declare.gauge(
            "storage_free_bytes", "Free bytes on the disk to which checkpoints are written."
        )
        self.storage_free_bytes.set(math.inf)  # until the storage has been opened
        self.refused_saves = declare.counter(
            "refused_saves", "Saves, copies, imports and loads that were refused because the disk would become full."
        )
        self.swept_leftovers = declare.counter(
            "swept_leftovers", "Unfinished checkpoints of dead writers that were deleted."
        )
        self.damaged_checkpoints = declare.counter(
            "damaged_checkpoints", "Reads of a checkpoint's file that differs from its manifest."
        )


class DurabilityMetrics:
    """The journal, the snapshots, and restoring models from them."""

    def __init__(self, declare: Declare) -> None:
        self.state_free_bytes = declare.gauge(
            "state_free_bytes", "Free bytes on the disk of the journal and the snapshots."
        )
        self.snapshot_seconds = declare.seconds("snapshot", "Time of writing a snapshot, until it is durable.")
        self.snapshot_bytes = declare.counter("snapshot_bytes", "Bytes of written snapshots.")
        self.snapshot_failures = declare.counter(
            "snapshot_failures", "Snapshots that could not be captured or written."
        )
        self.restored_models = declare.counter("restored_models", "Models that were restored after a restart.")
        self.unrestored_models = declare.counter(
            "unrestored_models", "Models that could not be restored after a restart."
        )
        self.replayed_operations = declare.counter(
            "replayed_operations", "Operations that ran again after a restart.", "kind"
        )
        for kind in KINDS:  # each series must begin at 0: a replay may be over before the first scrape
            self.replayed_operations.labels(kind)
        self.restore_seconds = declare.seconds("restore", "Time from the trainer's start until a model was restored.")
        self.released_models = declare.counter("released_models", "Models that were released for another trainer.")
        self.release_seconds = declare.seconds(
            "release", "Time of releasing a model for another trainer, with the operations that had begun."
        )
        self.adopted_models = declare.counter("adopted_models", "Models that were taken over from another trainer.")
        self.adopt_seconds = declare.seconds("adopt", "Time of taking over a model from another trainer.")
        self.journal_bytes = declare.gauge("journal_bytes", "Bytes of requests and results in the journal.")
        self.journal_limit_bytes = declare.gauge("journal_limit_bytes", "Limit on journal_bytes: journal_max_bytes.")
        self.journal_failures = declare.counter(
            "journal_failures", "Transactions of the journal that failed and were rolled back."
        )
        self.journal_commit_seconds = declare.seconds("journal_commit", "Time of one transaction of the journal.")


class Metrics:
    """All metrics of a trainer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        declare = Declare("trainer", registry)
        self.operations = OperationsMetrics(declare)
        self.compute = ComputeMetrics(declare)
        self.memory = MemoryMetrics(declare)
        self.agreement = AgreementMetrics(declare)
        self.publishing = PublishingMetrics(declare)
        self.storage = StorageMetrics(declare)
        self.durability = DurabilityMetrics(declare)
