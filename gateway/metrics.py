"""What /metrics shows."""

from __future__ import annotations

from prometheus_client import Counter, Enum, Gauge, Histogram

from tinsmith.rpc.metrics import LATENCY_BUCKETS_S, new_registry


class Metrics:
    def __init__(self) -> None:
        self.registry = new_registry()
        self.requests = Counter(
            "gateway_requests_total", "HTTP requests.", ["method", "route", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "gateway_request_seconds",
            "Time until an HTTP request was answered; long polls included.",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.accept_seconds = Histogram(
            "gateway_accept_seconds",
            "Time until the trainer had a submission in its journal.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.future_seconds = Histogram(
            "gateway_future_seconds",
            "Time from submission to answer: queue and work.",
            ["kind", "outcome"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.pending_futures = Gauge(
            "gateway_pending_futures", "Submissions without an answer.", ["kind"], registry=self.registry
        )
        self.trained_tokens = Counter(
            "gateway_trained_tokens_total",
            "Tokens of the model inputs of finished forward_backward requests.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "gateway_prompt_tokens_total", "Prompt tokens of finished samples.", registry=self.registry
        )
        self.cached_prompt_tokens = Counter(
            "gateway_cached_prompt_tokens_total",
            "Those of the prompt tokens that a sampler's prefix cache saved from being computed.",
            registry=self.registry,
        )
        self.sampled_tokens = Counter("gateway_sampled_tokens_total", "Tokens sampled.", registry=self.registry)
        self.sessions = Gauge(
            "gateway_sessions",
            "Sessions in the database that have not ended, as of the last round of the reaper.",
            registry=self.registry,
        )
        self.checkpoints = Gauge(
            "gateway_checkpoints",
            "Stored checkpoints with a path, by its kind, as of the last round of the reaper.",
            ["kind"],
            registry=self.registry,
        )
        self.checkpoint_bytes = Gauge("gateway_checkpoint_bytes", "Their bytes.", ["kind"], registry=self.registry)
        self.swept_checkpoints = Counter(
            "gateway_swept_checkpoints_total",
            "Checkpoints that the reaper removed: expired, by retention, or deleted while their trainer was away.",
            ["reason"],
            registry=self.registry,
        )
        self.database_seconds = Histogram(
            "gateway_database_seconds",
            "One transaction, from the wait for a connection to its commit.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.database_errors = Counter(
            "gateway_database_errors_total",
            "Statements and connections that failed, by the kind of error; uniqueness is not among them.",
            ["error"],
            registry=self.registry,
        )
        self.trainer_up = Gauge(
            "gateway_trainer_up", "1 while the trainer answers, else 0.", ["trainer"], registry=self.registry
        )
        self.sampler_state = Enum(
            "gateway_sampler_state",
            "How each sampler is; only one that serves gets requests.",
            ["sampler"],
            states=["gone", "silent", "loading", "serving"],
            registry=self.registry,
        )
        self.sampler_sequences = Gauge(
            "gateway_sampler_sequences",
            "Sequences that each sampler has in work for this gateway.",
            ["sampler"],
            registry=self.registry,
        )
        self.sampler_requests = Counter(
            "gateway_sampler_requests_total", "Samples given to each sampler.", ["sampler"], registry=self.registry
        )
        self.resubmissions = Counter(
            "gateway_resubmissions_total",
            "Samples that were given to a sampler that became unreachable, and were sent again.",
            ["sampler"],
            registry=self.registry,
        )
