"""The gateway's metrics, by subject."""

from __future__ import annotations

from prometheus_client import Enum

from tinsmith.rpc.metrics import Declare, new_registry


class HttpMetrics:
    """HTTP requests."""

    def __init__(self, declare: Declare) -> None:
        self.requests = declare.counter("requests_total", "HTTP requests.", "method", "route", "status")
        self.request_seconds = declare.seconds(
            "request", "Time until an HTTP request was answered; long polls included.", "route"
        )
        self.held_body_bytes = declare.gauge(
            "held_body_bytes", "Bytes of request bodies in memory, being read or in work."
        )
        self.event_loop_seconds = declare.seconds(
            "event_loop",
            "Processor time of the event loop's thread between two looks at its clock, which are 0.02 s apart while it "
            "is free. A longer time is a stall: all requests waited.",
            buckets=(0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0),
        )


class SubmissionsMetrics:
    """Training operations and samples, which clients submit and wait for."""

    def __init__(self, declare: Declare) -> None:
        self.accept_seconds = declare.seconds(
            "accept", "Time from a submission until the trainer had it in its journal."
        )
        self.future_seconds = declare.seconds(
            "future", "Time from submission to answer: queue and work.", "kind", "outcome"
        )
        self.pending_futures = declare.gauge("pending_futures", "Submissions without an answer.", "kind")
        self.trained_tokens = declare.counter(
            "trained_tokens_total", "Tokens of the model inputs of finished forward_backward requests."
        )
        self.prompt_tokens = declare.counter("prompt_tokens_total", "Prompt tokens of finished samples.")
        self.cached_prompt_tokens = declare.counter(
            "cached_prompt_tokens_total",
            "Prompt tokens of finished samples that were in a sampler's prefix cache, and were not computed.",
        )
        self.sampled_tokens = declare.counter("sampled_tokens_total", "Tokens sampled.")


class StoredMetrics:
    """Sessions, checkpoints, and the database."""

    def __init__(self, declare: Declare) -> None:
        self.sessions = declare.gauge("sessions", "Sessions that have not ended, at the last round of the reaper.")
        self.checkpoints = declare.gauge(
            "checkpoints", "Stored checkpoints by kind, at the last round of the reaper.", "kind"
        )
        self.checkpoint_bytes = declare.gauge(
            "checkpoint_bytes", "Bytes of stored checkpoints by kind, at the last round of the reaper.", "kind"
        )
        self.swept_checkpoints = declare.counter(
            "swept_checkpoints_total",
            "Checkpoints that the reaper removed: expired, by retention, or deleted while the trainer was unreachable.",
            "reason",
        )
        self.database_seconds = declare.seconds(
            "database", "Time of a database transaction, from the wait for a connection to the commit."
        )
        self.database_errors = declare.counter(
            "database_errors_total",
            "Failed statements and connections, by the kind of error; violations of uniqueness do not count.",
            "error",
        )
        self.dropped_rows = declare.counter(
            "dropped_rows_total",
            "Points of histories and spans of timelines that were dropped while the database could not be written.",
            "kind",
        )


class ServicesMetrics:
    """The trainers and samplers behind the gateway."""

    def __init__(self, declare: Declare) -> None:
        self.trainer_up = declare.gauge("trainer_up", "1 while the trainer answers, else 0.", "trainer")
        self.moved_runs = declare.counter("moved_runs_total", "Runs that this gateway has moved to another trainer.")
        self.move_seconds = declare.seconds(
            "move", "Time from the beginning of a run's move to another trainer until calls of the run go there."
        )
        self.sampler_state = Enum(
            "gateway_sampler_state",
            "State of each sampler; only a sampler in state serving gets requests.",
            ["sampler"],
            states=["gone", "silent", "loading", "serving"],
            registry=declare.registry,
        )
        self.sampler_sequences = declare.gauge(
            "sampler_sequences", "Sequences that each sampler has in work for this gateway.", "sampler"
        )
        self.sampler_requests = declare.counter("sampler_requests_total", "Calls sent to each sampler.", "sampler")
        self.resubmissions = declare.counter(
            "resubmissions_total",
            "Calls that a sampler lost by becoming unreachable, and that were sent again.",
            "sampler",
        )


class Metrics:
    """All metrics of the gateway, in one registry."""

    def __init__(self) -> None:
        self.registry = new_registry()
        declare = Declare("gateway", self.registry)
        self.http = HttpMetrics(declare)
        self.submissions = SubmissionsMetrics(declare)
        self.stored = StoredMetrics(declare)
        self.services = ServicesMetrics(declare)
