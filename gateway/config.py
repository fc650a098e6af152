"""What an operator can set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.database import urls
from gateway.http.connections import Limits
from gateway.storage.retention_rules import Policy
from tinsmith.memory import total_bytes
from tinsmith.rpc.auth import AnyKey, ServiceKey
from tinsmith.rpc.tls import GrpcTls, check_pair

DATABASE = "gateway.db"
"""Name of the default database's file in state_dir."""

_BODY_BYTES = 64 * 2**20

TokenKind = Literal["training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample"]


class GatewayConfig(GrpcTls, BaseSettings):
    """The Tinker API over HTTP, in front of trainers and samplers."""

    model_config = SettingsConfigDict(
        env_prefix="GATEWAY_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_prog_name="python -m gateway",
    )

    host: str = "127.0.0.1"
    """Address to listen on. Any other than a loopback address needs a key, of api_keys or of `tinsmith keys create`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    tls_cert: Path | None = None
    """Certificate (PEM, with those between it and its authority) for HTTPS; with tls_key. Absent: plain HTTP."""
    tls_key: Path | None = None
    """Private key (PEM) of tls_cert, without a passphrase."""
    trainers: list[str] = ["127.0.0.1:8001"]
    """gRPC addresses of the trainers, HOST:PORT; each serves the base models that it names."""
    samplers: list[str] = ["127.0.0.1:8002"]
    """gRPC addresses of the samplers, HOST:PORT; those that serve one base model share its requests."""
    sampler_timeout_s: float = Field(default=3.0, gt=0, le=60)
    """A sampler that answers no health check for so long gets no requests until it does, and others get what it has."""
    sampler_load_factor: float = Field(default=1.25, ge=1)
    """Requests that share a prefix go to one sampler, until it has so many times the mean of the sequences in work."""
    state_dir: Path = Path("state/gateway")
    """Folder of the default database."""
    database_url: SecretStr = SecretStr("")
    """SQLAlchemy URL with an async driver; empty means SQLite, in state_dir."""
    peer_url: str = ""
    """Address under which other gateways on the same database reach this one, such as http://10.0.0.2:8000. Empty: it
    is the only gateway of its database."""
    api_keys: list[AnyKey] = []
    """Keys that clients may use, as a JSON list: "KEY", or {"key": "KEY", "name": ..., "note": ..., "email": ...} with
    what the server is to say about it; an owner, whose other keys share everything with it; admin, requests_per_minute
    and tokens_per_minute. `tinsmith keys create` makes others. Without any, all are accepted, on a loopback address."""
    service_key: ServiceKey = SecretStr("")
    """Key that the gateway sends to trainers and samplers; the service_key of theirs."""
    organization: str = Field(default="tinsmith", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of all users of this server together, in whoami and auth/apikey/me."""
    jwt_auth: bool = False
    """Let the SDK exchange its key for a JWT, which goes with its requests then. whoami needs it."""
    jwt_lifetime_s: int = Field(default=3600, ge=1)
    """How long a JWT is valid. The SDK renews it at half of that, and before each request in its last minute."""
    jwt_secret: SecretStr = SecretStr("")
    """Signs the JWTs; at least 32 characters. Empty: made at the first start and kept in the database."""

    allowed_hosts: list[str] = []
    """Without api_keys: further host names in the address under which clients may ask, as a JSON list; this machine's
    loopback names and public_url's are always. So no page in a browser can reach the gateway under its own name."""
    max_connections: int = Field(default=4096, ge=16)
    """HTTP connections open at once; the next one is closed at once."""
    max_idle_connections: int = Field(default=256, ge=0)
    """HTTP connections that are kept open between two requests. Of more, those idle for longest are closed, each after
    15 s without a request: the SDK leaves those of ended sessions open, and uses none that has been idle for 5 s."""
    max_header_bytes: int = Field(default=64 * 2**10, ge=4096)
    """Largest headers of a request, about; larger ones are answered 431."""
    header_timeout_s: float = Field(default=20.0, gt=0)
    """How long the headers of a request may take to arrive before a 408."""
    transfer_grace_s: float = Field(default=30.0, gt=0)
    """How long a body, or the client that reads an answer, is waited for, beyond what min_transfer_bytes_s gives it;
    then a 408, or the end of the connection."""
    min_transfer_bytes_s: int = Field(default=1024, gt=0)
    """Slowest rate, in bytes per second, of bodies that come and of answers that are read."""
    max_sessions: int = Field(default=4096, gt=0)
    """Sessions of one owner that have not ended; above it create_session is answered 429."""
    max_sampling_sessions: int = Field(default=1_000_000, gt=0)
    """Sampling sessions of one owner; above it create_sampling_session is answered 429, and an ephemeral save fails.
    Sampling sessions of an ended session count until they are forgotten, ended_session_retention_s later."""
    max_body_bytes: int = Field(default=_BODY_BYTES, gt=0)
    """Largest request body, also after decompression; a larger one is answered 413."""
    max_held_body_bytes: int = Field(default_factory=lambda: max(_BODY_BYTES, total_bytes() // 4), gt=0)
    """Bytes of request bodies that are held at once, of all clients together; a quarter of the machine's memory, or of
    the limit of the process's cgroup, unless given. A body for which there is no room is answered 429. Bodies up to
    64 KiB, as of heartbeats and polls, do not count. At least max_body_bytes."""
    max_body_values: int = Field(default=1_000_000, ge=1000)
    """Most values in a request body; in JSON a list or an object counts as 10, a member of an object as 3 more than its
    value. A body with more is answered 413: parsing it would hold up all other
    requests, and take many times its size in memory."""
    max_import_bytes: int = Field(default=4 * 2**30, gt=0)
    """Largest archive of an adapter to import; a larger one is answered 413. The trainer has a bound of its own."""
    thread_body_bytes: int = Field(default=256 * 2**10, gt=0)
    """Bodies above this are decompressed and parsed in a thread, so that other requests go on."""
    long_poll_s: float = Field(default=30.0, gt=0, le=40)
    """How long retrieve_future waits before it answers try_again; the SDK itself gives up after 45 s."""
    submit_timeout_s: float = Field(default=20.0, gt=0)
    """How long a request waits for the trainer's acknowledgement, or for a service that is not up yet, before a 503."""
    sample_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a sample may take, waiting for a sampler that is unreachable or full included, before it fails."""
    openai_wait_s: float = Field(default=60.0, ge=0)
    """How long a request to /v1 waits for a sampler that is unreachable or full, before a 503 or a 429."""
    openai_default_max_tokens: int = Field(default=4096, ge=0)
    """Longest output of a chat or a response of /v1 that names no maximum, in tokens. The context bounds every output.
    0 means that nothing else does."""
    session_timeout_s: float = Field(default=1800.0, gt=0)
    """A session without a heartbeat for so long is ended."""
    reap_interval_s: float = Field(default=30.0, gt=0)
    """How often ended sessions are released and expired checkpoints are deleted."""
    tokenizers: dict[str, str] = {}
    """For base models whose names the Hugging Face hub does not know: where clients find the tokenizer, as another hub
    id or a folder on their machines. What TrainingClient.get_tokenizer() of the SDK loads."""
    max_num_samples: int = Field(default=1024, gt=0)
    """Most sequences of one sample request."""
    max_pending_samples: int = Field(default=4096, gt=0)
    """Samples in work at once; above it asample is answered 429, on which the SDK slows down."""
    max_pending_samples_per_owner: int = Field(default=2048, gt=0)
    """Of them, those of one owner, so that nobody takes the places of all others; above it 429, too."""
    max_pending_operations: int = Field(default=1024, gt=0)
    """Training operations of one model in work at once; above it a submission is answered 429."""
    result_cache_bytes: int = Field(default=256 * 2**20, gt=0)
    """Memory for answers that can be asked for again, and one answer more. Above it the owner whose answers are largest
    together loses the least recently used of them."""
    metadata_only_bytes: int = Field(default=2**20, gt=0)
    """A larger answer is announced with its size first, to clients that allow it, so that they can limit what they load
    at once."""
    sample_use_retrieve_futures: bool = True
    """Clients wait for all samples of a sampling session with one poll, instead of one for each."""
    sample_cancel_enabled: bool = True
    """Clients tell which samples they no longer wait for, and those are stopped."""
    custom_loss_server_side: bool = True
    """Clients send traced losses to be computed by the trainer, instead of computing them themselves."""
    max_custom_losses: int = Field(default=256, gt=0)
    """Custom losses that one session may create."""
    record_retention_s: float = Field(default=86400.0, gt=0)
    """How long what was sampled with record_stability_info is kept after its last use."""
    public_url: str = ""
    """Address under which clients reach the gateway, such as https://tinker.example.org; download addresses begin with
    it. Empty: that of the request which asks for one."""
    download_secret: SecretStr = SecretStr("")
    """Signs download addresses. Empty: made at the first start and kept in the database."""
    download_url_s: float = Field(default=3600.0, ge=600)
    """How long a download address works."""
    retention: Policy = Policy()
    """Which checkpoints of a training run are kept, unless it has a policy of its own, as JSON, such as
    {"training": {"keep_last": 5}, "sampler": {"keep_within_seconds": 86400}}; docs/checkpoints.md has the rules. By
    default all."""
    span_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """How long the times of finished requests are kept, for the export of traces."""
    max_spans: int = Field(default=1_000_000, ge=1)
    """Finished requests whose times are kept at most, the newest."""
    audit_retention_s: float = Field(default=365 * 86400.0, gt=0)
    """How long it is kept what was done to checkpoints, projects and keys."""
    ended_session_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """How long the samplers and custom losses of an ended session are remembered. The session itself, its runs, its
    checkpoints and its usage stay."""
    history_points: int = Field(default=4096, ge=0)
    """Points that the dashboard keeps of the metrics of a run, whatever its length; at least 64, or 0 for none."""
    history_retention_s: float = Field(default=180 * 86400.0, gt=0)
    """How long they are kept."""
    max_history_points: int = Field(default=2_000_000, ge=1)
    """Points of all runs together, about; the oldest go first."""
    recent_samples: int = Field(default=64, ge=0, le=1024)
    """Sequences that the dashboard keeps of each run, the newest: the end of the prompt, tokens and logprobs. 0: none;
    no text is stored then."""
    recent_sample_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """How long they are kept."""
    max_recent_samples: int = Field(default=100_000, ge=1)
    """Sequences of all runs together, about; the oldest go first."""
    token_prices_usd: dict[str, dict[TokenKind, Annotated[float, Field(ge=0)]]] = {}
    """USD per million tokens, by base model (or "*") and kind; what is not listed costs nothing."""
    storage_price_usd: float = Field(default=0.0, ge=0)
    """USD per gigabyte and month of 720 hours of stored checkpoints."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """Log lines as JSON, for machines, or as text."""
    tracing: bool = False
    """Send OpenTelemetry traces, as OTEL_EXPORTER_OTLP_ENDPOINT and its like say. Needs the extra `otel`."""

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, url: SecretStr) -> SecretStr:
        if url.get_secret_value():
            urls.parse(url.get_secret_value())
        return url

    @field_validator("public_url", "peer_url")
    @classmethod
    def _http_url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url.rstrip("/")

    @field_validator("history_points")
    @classmethod
    def _enough_points(cls, number: int) -> int:
        if 0 < number < 64:
            raise ValueError("must be 0 or at least 64")
        return number

    @field_validator("jwt_secret")
    @classmethod
    def _long_secret(cls, secret: SecretStr) -> SecretStr:
        if secret.get_secret_value() and len(secret.get_secret_value()) < 32:
            raise ValueError("must have at least 32 characters, as HMAC-SHA256 asks for (RFC 7518, 3.2)")
        return secret

    @model_validator(mode="after")
    def _room_for_a_body(self) -> GatewayConfig:
        if self.max_held_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_held_body_bytes {self.max_held_body_bytes} is below max_body_bytes {self.max_body_bytes}: "
                "no room for one body"
            )
        return self

    @model_validator(mode="after")
    def _usable_tls(self) -> GatewayConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or none")
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key, names=("tls_cert", "tls_key"))
        return self

    @property
    def own_hosts(self) -> list[str]:
        """Names of the gateway beside the loopback ones."""
        return [*self.allowed_hosts, *filter(None, [urlsplit(self.public_url).hostname])]

    @property
    def limits(self) -> Limits:
        return Limits(
            max_connections=self.max_connections,
            max_idle_connections=self.max_idle_connections,
            max_header_bytes=self.max_header_bytes,
            header_timeout_s=self.header_timeout_s,
            transfer_grace_s=self.transfer_grace_s,
            min_transfer_bytes_s=self.min_transfer_bytes_s,
        )

    @property
    def resolved_database_url(self) -> str:
        return self.database_url.get_secret_value() or f"sqlite+aiosqlite:///{self.state_dir.absolute() / DATABASE}"
