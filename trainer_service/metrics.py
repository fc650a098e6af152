"""What the trainer measures, by subject. Kinds of operations are the field names of WaitResultResponse.

A phase is a part of the compute thread's time: `schedule` (choosing the next work), `pack`, `forward`, `loss`,
`backward`, `accumulate` of each micro-batch, `optimizer`, and `capture` (the copy for a checkpoint or a snapshot).
Forward and backward end with a value that the host waits for, so that on a GPU, too, they are what they took.
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


class Operations:
    """Of clients: from acceptance to the answer."""

    def __init__(self, declare: Declare) -> None:
        self.finished = declare.counter("operations", "Finished operations, by kind and outcome.", "kind", "outcome")
        for kind in KINDS:  # a series that begins at 1 has no increase
            for outcome in ("ok", "failed"):
                self.finished.labels(kind, outcome)
        self.queue_length = declare.gauge("queue_length", "Accepted operations that have not been executed.", "kind")
        self.queue_seconds = declare.seconds("queue", "From acceptance to execution.", "kind")
        self.queue_oldest = declare.gauge(
            "queue_oldest_seconds",
            "How long the next operation of a model has waited, of the model where that is longest; 0 for none.",
        )
        self.held_bytes = declare.gauge(
            "held_bytes",
            "Memory of accepted operations whose answers are not stored: bodies, batches, answers.",
        )
        self.held_limit_bytes = declare.gauge("held_limit_bytes", "Bound of it: max_queued_bytes.")


class Compute:
    """The compute thread."""

    def __init__(self, declare: Declare) -> None:
        self.step_seconds = declare.seconds("step", "Execution on the compute thread.", "kind")
        self.running = declare.gauge(
            "running_seconds", "How long the compute thread has been at its present work; 0 for none."
        )
        self.threads = declare.gauge("threads", "CPU threads of this process's newest work; 0 for torch's default.")
        self.tokens_per_second = declare.gauge(
            "tokens_per_second", "Measured speed of large micro-batches, by which their size is chosen; 0 at first."
        )
        self.idle_seconds = declare.counter("idle_seconds", "Time in which the compute thread had nothing to do.")
        phases = declare.seconds(
            "phase",
            "One phase of the compute thread's work; there is one of each for a micro-batch, step or capture.",
            "phase",
            buckets=PHASE_BUCKETS_S,
        )
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.micro_batches = declare.counter(
            "micro_batches", "Works of the engine; forward_backward operations share them."
        )
        self.tokens = declare.counter(
            "tokens", "Tokens of micro-batches, as they are charged: datums with many targets count for more."
        )
        self.micro_batch_tokens = declare.histogram(
            "micro_batch_tokens", "Tokens of one micro-batch, as they are charged.", buckets=[2**n for n in range(18)]
        )
        self.micro_batch_models = declare.histogram(
            "micro_batch_models", "Models with datums in one micro-batch.", buckets=[2**n for n in range(9)]
        )


class Memory:
    """Live models, and what memory allows."""

    def __init__(self, declare: Declare) -> None:
        self.token_budget = declare.gauge(
            "token_budget", "Most tokens of a micro-batch: as many as fit into memory, or as are set."
        )
        self.out_of_memory = declare.counter(
            "out_of_memory", "Micro-batches that ran out of memory, and were tried smaller."
        )
        self.models = declare.gauge("models", "Live models in memory.")
        self.parked_models = declare.gauge("parked_models", "Live models that are parked: on the disk only.")
        self.park_seconds = declare.seconds("park", "Parking a model: writing what is not on the disk, freeing it.")
        self.unpark_seconds = declare.seconds(
            "unpark", "Bringing a parked model back, from the first call that needs it; with the wait for a place."
        )
        self.model_bytes = declare.gauge(
            "model_bytes", "Weights, gradients and moments of the models in memory, by where they lie.", "place"
        )
        self.model_reserved_bytes = declare.gauge(
            "model_reserved_bytes", "What the models in memory take once each has gradients and moments."
        )
        self.model_limit_bytes = declare.gauge(
            "model_limit_bytes", "Bound of the reserved bytes; infinite where none was set."
        )
        self.device_bytes = declare.gauge(
            "device_memory_bytes",
            "The GPU's memory: allocated by tensors, reserved by torch, free, in all. On the CPU there is none.",
            "state",
        )


class Agreement:
    """How far trainer and sampler are apart in what is trained on."""

    def __init__(self, declare: Declare) -> None:
        self.sampler_kl = declare.histogram(
            "sampler_kl_nats",
            "KL(sampler || trainer) for each token of a batch, by its loss.",
            "loss_fn",
            buckets=_NATS,
        )
        self.ess = declare.histogram(
            "ess_ratio", "Effective sample size of a batch, as a share of its tokens.", "loss_fn", buckets=_SHARES
        )
        self.ratio_max = declare.histogram(
            "max_importance_ratio", "Largest ratio, trainer to sampler, of a batch.", "loss_fn", buckets=_RATIOS
        )

    def observe(self, mismatch: Mismatch, *, loss_fn: str) -> None:
        """Of one forward_backward."""
        self.sampler_kl.labels(loss_fn).observe(mismatch.sampler_kl)
        self.ess.labels(loss_fn).observe(mismatch.ess)
        self.ratio_max.labels(loss_fn).observe(mismatch.ratio_max)


class Publishing:
    """Versions on their way to the samplers."""

    def __init__(self, declare: Declare) -> None:
        self.publish_seconds = declare.seconds("publish", "Publishing a version to the samplers.")
        self.publish_gap = declare.histogram(
            "publish_gap_nats", "Largest gap of a canary token, of one sampler and version.", "engine", buckets=_NATS
        )
        self.publish_certificates = declare.counter(
            "publish_certificates",
            "Publishes: passed, warned, refused, or unscored: by no sampler.",
            "outcome",
        )
        for outcome in ("passed", "warned", "refused", "unscored"):  # a series that begins at 1 has no increase
            self.publish_certificates.labels(outcome)
        self.applied = declare.counter(
            "publish_applied",
            "Measured samplers: whether their logprobs change with the version as the trainer's do.",
            "applied",
        )
        for state in ("yes", "too_weak_to_tell", "no"):
            self.applied.labels(state)
        self.publish_bytes = declare.counter("publish_bytes", "Adapter bytes broadcast, once for each publish.")
        self.publish_failures = declare.counter("publish_failures", "Attempts to publish that failed.")
        self.weight_groups = declare.counter("weight_groups", "Process groups formed with samplers.")
        self.samplers = declare.gauge("samplers", "Samplers that are serving.")


class Storage:
    """Checkpoints."""

    def __init__(self, declare: Declare) -> None:
        self.checkpoint_seconds = declare.seconds("checkpoint", "Writing a checkpoint.")
        self.checkpoint_bytes = declare.counter("checkpoint_bytes", "Bytes of written checkpoints.")
        self.storage_free_bytes = declare.gauge(
            "storage_free_bytes", "Free bytes of the disk that checkpoints are written on."
        )
        self.storage_free_bytes.set(math.inf)  # as in an object store, until a folder says otherwise
        self.refused_saves = declare.counter(
            "refused_saves", "Saves, copies, imports and loads that were refused because the disk would become full."
        )
        self.swept_leftovers = declare.counter(
            "swept_leftovers", "Unfinished checkpoints of dead writers that were deleted."
        )
        self.damaged_checkpoints = declare.counter(
            "damaged_checkpoints", "Times that a file was not what its manifest says."
        )


class Durability:
    """Journal and snapshots, and what a restart makes of them."""

    def __init__(self, declare: Declare) -> None:
        self.state_free_bytes = declare.gauge(
            "state_free_bytes", "Free bytes of the disk with the journal and the snapshots."
        )
        self.snapshot_seconds = declare.seconds("snapshot", "Writing a snapshot, from its capture on.")
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
        for kind in KINDS:  # a replay is over between two scrapes: a series that begins at its end has no increase
            self.replayed_operations.labels(kind)
        self.restore_seconds = declare.seconds(
            "restore", "From the start to where a model was again when the trainer ended."
        )
        self.journal_bytes = declare.gauge("journal_bytes", "Bytes of requests and results in the journal.")
        self.journal_limit_bytes = declare.gauge("journal_limit_bytes", "Bound of the journal: journal_max_bytes.")
        self.journal_failures = declare.counter(
            "journal_failures", "Transactions that failed: their operations were refused."
        )
        self.journal_commit_seconds = declare.seconds("journal_commit", "One transaction of the journal.")


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        declare = Declare("trainer", registry)
        self.operations = Operations(declare)
        self.compute = Compute(declare)
        self.memory = Memory(declare)
        self.agreement = Agreement(declare)
        self.publishing = Publishing(declare)
        self.storage = Storage(declare)
        self.durability = Durability(declare)
