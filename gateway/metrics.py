"""What /metrics shows, by subject."""

from __future__ import annotations

from prometheus_client import Enum

from tinsmith.rpc.metrics import Declare, new_registry


class Http:
    def __init__(self, declare: Declare) -> None:
        self.requests = declare.counter("requests_total", "HTTP requests.", "method", "route", "status")
        self.request_seconds = declare.seconds(
            "request", "Time until an HTTP request was answered; long polls included.", "route"
        )
        self.held_body_bytes = declare.gauge(
            "held_body_bytes", "Bytes of request bodies in memory: of those that are read or submitted, and of samples."
        )


class Submissions:
    """What clients submit and then wait for: training operations and samples."""

    def __init__(self, declare: Declare) -> None:
        self.accept_seconds = declare.seconds("accept", "Time until the trainer had a submission in its journal.")
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
            "Those of the prompt tokens that a sampler's prefix cache saved from being computed.",
        )
        self.sampled_tokens = declare.counter("sampled_tokens_total", "Tokens sampled.")


class Stored:
    """What exists, and the database that knows it."""

    def __init__(self, declare: Declare) -> None:
        self.sessions = declare.gauge(
            "sessions", "Sessions in the database that have not ended, as of the last round of the reaper."
        )
        self.checkpoints = declare.gauge(
            "checkpoints", "Stored checkpoints with a path, by its kind, as of the last round of the reaper.", "kind"
        )
        self.checkpoint_bytes = declare.gauge("checkpoint_bytes", "Their bytes.", "kind")
        self.swept_checkpoints = declare.counter(
            "swept_checkpoints_total",
            "Checkpoints that the reaper removed: expired, by retention, or deleted while their trainer was away.",
            "reason",
        )
        self.database_seconds = declare.seconds(
            "database", "One transaction, from the wait for a connection to its commit."
        )
        self.database_errors = declare.counter(
            "database_errors_total",
            "Statements and connections that failed, by the kind of error; uniqueness is not among them.",
            "error",
        )
        self.dropped_rows = declare.counter(
            "dropped_rows_total",
            "Points of histories and spans of timelines that were forgotten while the database could not be written.",
            "kind",
        )


class Services:
    """The trainers and samplers behind the gateway."""

    def __init__(self, declare: Declare) -> None:
        self.trainer_up = declare.gauge("trainer_up", "1 while the trainer answers, else 0.", "trainer")
        self.sampler_state = Enum(
            "gateway_sampler_state",
            "How each sampler is; only one that serves gets requests.",
            ["sampler"],
            states=["gone", "silent", "loading", "serving"],
            registry=declare.registry,
        )
        self.sampler_sequences = declare.gauge(
            "sampler_sequences", "Sequences that each sampler has in work for this gateway.", "sampler"
        )
        self.sampler_requests = declare.counter("sampler_requests_total", "Samples given to each sampler.", "sampler")
        self.resubmissions = declare.counter(
            "resubmissions_total",
            "Samples that were given to a sampler that became unreachable, and were sent again.",
            "sampler",
        )


class Metrics:
    def __init__(self) -> None:
        self.registry = new_registry()
        declare = Declare("gateway", self.registry)
        self.http = Http(declare)
        self.submissions = Submissions(declare)
        self.stored = Stored(declare)
        self.services = Services(declare)
