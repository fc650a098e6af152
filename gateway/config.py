"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, IPvAnyNetwork, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.database import urls
from gateway.schemas import Policy
from tinsmith.memory import total_bytes
from tinsmith.rpc.addresses import Addresses, AddressSource
from tinsmith.rpc.auth import AnyKey, ServiceKey
from tinsmith.rpc.tls import GrpcTls, check_pair

DATABASE = "gateway.db"
"""File name of the default database in state_dir."""

_BODY_BYTES = 64 * 2**20

TokenKind = Literal["training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample"]


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$")]
"""HOST or HOST:PORT."""


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
    """Address to listen on. An address other than loopback needs a key, from api_keys or `tinsmith keys create`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    tls_cert: Path | None = None
    """Certificate for HTTPS (PEM, with its intermediate certificates); needs tls_key. Without it, the gateway serves
    plain HTTP."""
    tls_key: Path | None = None
    """Private key (PEM) of tls_cert, without a passphrase."""
    trainers: list[str] = ["127.0.0.1:8001"]
    """gRPC addresses of the trainers, HOST:PORT. The gateway asks each which base models it serves. Trainers of one
    base model share its runs, and need the same settings and the same store of checkpoints (docs/scale.md)."""
    samplers: list[str] = ["127.0.0.1:8002"]
    """gRPC addresses of the samplers, HOST:PORT. Samplers of one base model share its requests. dns:///HOST:PORT stands
    for every address of the host, looked up every two seconds."""
    services_file: Path | None = None
    """JSON file with the addresses, {"trainers": [...], "samplers": [...]}, instead of trainers and samplers. It may
    change while the gateway runs: within a second the gateway takes up services that were added, and leaves services
    that were removed. `tinsmith up` writes the file."""
    sampler_timeout_s: float = Field(default=3.0, gt=0, le=60)
    """A sampler that has not answered a health check for this long, in seconds, gets no requests, and other samplers
    take its work."""
    sampler_load_factor: float = Field(default=1.25, ge=1)
    """Requests that share a prefix go to one sampler, until its load reaches this factor of the mean load."""
    state_dir: Path = Path("state/gateway")
    """Folder of the default database."""
    database_url: SecretStr = SecretStr("")
    """SQLAlchemy URL with an async driver. Empty means SQLite in state_dir."""
    peer_url: str = ""
    """URL under which other gateways on the same database reach this one, such as http://10.0.0.2:8000. Empty means
    that this is the only gateway of its database."""
    api_keys: list[AnyKey] = []
    """Keys that clients may use, as a JSON list. A key is "KEY" or {"key": "KEY", ...} with the optional fields name,
    note and email, which the server shows; owner (all keys of an owner share its sessions, runs and checkpoints);
    admin, requests_per_minute and tokens_per_minute. `tinsmith keys create` makes further keys. Without any key, a
    server on a loopback address accepts every key."""
    service_key: ServiceKey = SecretStr("")
    """Key that the gateway sends to trainers and samplers; their setting service_key has the same key."""
    organization: str = Field(default="tinsmith", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the organization of all users of this server, in whoami and auth/apikey/me."""
    jwt_auth: bool = False
    """Let the SDK exchange its key for a JWT, and send the JWT with its requests. whoami needs this."""
    jwt_lifetime_s: int = Field(default=3600, ge=1)
    """Time for which a JWT is valid, in seconds. The SDK renews a JWT after half of that time, and before each request
    in the last minute."""
    jwt_secret: SecretStr = SecretStr("")
    """Secret that signs JWTs, at least 32 characters. If it is empty, the gateway makes one at its first start, and
    stores it in the database."""

    allowed_hosts: list[str] = []
    """Further host names under which clients may reach a server without keys, as a JSON list. Loopback names and the
    host of public_url are always allowed. This keeps pages in a browser from reaching the gateway under a host name of
    their own."""
    max_connections: int = Field(default=4096, ge=16)
    """Most open HTTP connections. A further one is closed at once. If another address has more connections, one of
    that address is closed instead."""
    max_idle_connections: int = Field(default=256, ge=0)
    """Most HTTP connections that are kept open between two requests. Above it, those idle for longest are closed, after
    at least 15 s without a request. The SDK leaves connections of ended sessions open, and uses none after 5 s idle."""
    max_header_bytes: int = Field(default=64 * 2**10, ge=4096)
    """Largest headers of a request, about; larger ones are answered 431."""
    header_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time in which the headers of a request may arrive, in seconds; then the request is answered 408. The
    first byte of a new connection may take six times as long."""
    transfer_grace_s: float = Field(default=30.0, gt=0)
    """Time that a body may take to arrive, or an answer to be read, beyond the time at min_transfer_bytes_s, in
    seconds. After that a body is answered 408, and the connection of an answer is closed."""
    min_transfer_bytes_s: int = Field(default=1024, gt=0)
    """Slowest rate of bodies and of answers, in bytes per second."""
    max_sessions: int = Field(default=4096, gt=0)
    """Most sessions of one owner that have not ended; above it create_session is answered 429."""
    max_sampling_sessions: int = Field(default=1_000_000, gt=0)
    """Most sampling sessions of one owner. Above it create_sampling_session is answered 429, and an ephemeral save
    fails. Sampling sessions of an ended session count until they are forgotten, ended_session_retention_s later."""
    max_body_bytes: int = Field(default=_BODY_BYTES, gt=0)
    """Largest request body, also after decompression, in bytes; a larger one is answered 413."""
    max_held_body_bytes: int = Field(default_factory=lambda: max(_BODY_BYTES, total_bytes() // 4), gt=0)
    """Most bytes of request bodies in memory, for all clients together; at least max_body_bytes. The default is a
    quarter of the machine's memory, or of the limit of the process's cgroup. An owner with several bodies may hold as
    many bytes as stay free, so at most half. A body for which there is no room is answered 429. Bodies up to 64 KiB,
    such as heartbeats and polls, do not count."""
    max_body_values: int = Field(default=1_000_000, ge=1000)
    """Most values in a request body. In JSON a list or an object counts as 10, and a member of an object as 3 more than
    its value. A body with more values is answered 413, because parsing it would block other requests, and take many
    times its size in memory."""
    max_import_bytes: int = Field(default=4 * 2**30, gt=0)
    """Largest archive of an adapter to import, in bytes; a larger one is answered 413. The trainer has a bound of its
    own."""
    image_hosts: list[Host] = []
    """Hosts from which pictures that a request names by an https URL are fetched, as a JSON list of HOST or HOST:PORT.
    Redirects are not followed, and a host's address must be public or in image_networks."""
    image_networks: list[IPvAnyNetwork] = []
    """Private networks in which hosts of image_hosts may be, such as 10.1.2.0/24, as a JSON list."""
    image_folder: Path | None = None
    """Folder of pictures that requests may name by a path below it. Every user of this server can read them. Without
    it, pictures named by a path are refused."""
    image_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time for fetching the pictures of a request, in seconds. The wait for pictures of other requests
    counts."""
    thread_body_bytes: int = Field(default=256 * 2**10, gt=0)
    """Bodies above this size, in bytes, are decompressed and parsed in a thread, so that other requests go on."""
    cores_page: str = ""
    """PATH:PLACE of a page that says which services of this machine need cores; `tinsmith up` sets it."""
    long_poll_s: float = Field(default=30.0, gt=0, le=40)
    """Time for which retrieve_future waits before it answers try_again, in seconds. The SDK itself gives up after
    45 s."""
    submit_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time for which a request waits for the trainer's acknowledgement, or for a service that is not up yet, in
    seconds; then the request is answered 503."""
    sample_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time of a sample before it fails, in seconds. The wait for an unreachable or full sampler counts."""
    openai_wait_s: float = Field(default=60.0, ge=0)
    """Longest time for which a request to /v1 waits for a sampler, in seconds. Then the request is answered 503 if the
    sampler is unreachable, and 429 if it is full."""
    openai_default_max_tokens: int = Field(default=4096, ge=0)
    """Longest output of a chat or a response of /v1 that names no maximum, in tokens. 0 means that only the context
    bounds the output."""
    session_timeout_s: float = Field(default=1800.0, gt=0)
    """Time without a heartbeat after which a session is ended, in seconds."""
    sample_client_timeout_s: float = Field(default=60.0, gt=0)
    """Time without a sign of a client after which its samples are stopped, in seconds; more than long_poll_s. A poll
    for the sample and a heartbeat of its session are such signs. As a rule the client was killed. One that comes back
    samples again."""
    adopt_after_s: float = Field(default=60.0, ge=0)
    """Time after which a trainer that is away may be lost, in seconds. Its runs are then adopted by other trainers, if
    these have their journals in the same PostgreSQL database and find there that the trainer is dead. 0 means never."""
    reap_interval_s: float = Field(default=30.0, gt=0)
    """Time between two rounds of the reaper, which frees the models of ended sessions and deletes expired checkpoints,
    in seconds."""
    tokenizers: dict[str, str] = {}
    """Base model -> tokenizer that TrainingClient.get_tokenizer() of the SDK loads: a hub id, or a folder on the
    clients' machines. Base models need an entry if the Hugging Face hub does not know their names."""
    max_num_samples: int = Field(default=1024, gt=0)
    """Most sequences in one sample request."""
    max_pending_samples: int = Field(default=4096, gt=0)
    """Most samples in work, of both APIs together; above it a sample is answered 429, and the SDK slows down."""
    max_pending_samples_per_owner: int = Field(default=2048, gt=0)
    """Most samples of one owner in work, so that no owner takes all places; above it a sample is answered 429."""
    max_pending_operations: int = Field(default=1024, gt=0)
    """Most training operations of one model in work; above it a submission is answered 429."""
    result_cache_bytes: int = Field(default=256 * 2**20, gt=0)
    """Memory for answers that clients may ask for again, in bytes; the newest answer may exceed it. Above it, the owner
    whose answers take most memory loses the least recently used one."""
    metadata_only_bytes: int = Field(default=2**20, gt=0)
    """Size above which an answer is first announced by its size, to clients that allow this, in bytes. So these clients
    can limit their memory."""
    sample_use_retrieve_futures: bool = True
    """Let clients wait for all samples of a sampling session with one poll, instead of one poll for each sample."""
    sample_cancel_enabled: bool = True
    """Let clients tell the server for which samples they no longer wait. These samples are stopped."""
    custom_loss_server_side: bool = True
    """Let clients send traced losses, which the trainer computes, instead of computing them themselves."""
    max_custom_losses: int = Field(default=256, gt=0)
    """Most custom losses that one session may create."""
    record_retention_s: float = Field(default=86400.0, gt=0)
    """Time for which sequences sampled with record_stability_info are stored after their last use, in seconds."""
    max_owner_record_bytes: int = Field(default=2**30, ge=1)
    """Most bytes that one owner's sequences sampled with record_stability_info take. Above it the sequences that were
    not used for longest are deleted."""
    public_url: str = ""
    """URL under which clients reach the gateway, such as https://tinker.example.org; download URLs begin with it. If it
    is empty, a download URL begins as the URL of the request that asks for it."""
    download_secret: SecretStr = SecretStr("")
    """Secret that signs download URLs. If it is empty, the gateway makes one at its first start, and stores it in the
    database."""
    download_url_s: float = Field(default=3600.0, ge=600)
    """Time for which a download URL works, in seconds."""
    retention: Policy = Policy()
    """Retention policy of training runs that have none of their own, as JSON, such as {"training": {"keep_last": 5},
    "sampler": {"keep_within_seconds": 86400}}; docs/checkpoints.md has the rules. By default all checkpoints are
    kept."""
    span_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """Time for which the times of finished requests are kept for the export of traces, in seconds."""
    max_spans: int = Field(default=1_000_000, ge=1)
    """Most finished requests whose times are kept; the oldest go first."""
    audit_retention_s: float = Field(default=365 * 86400.0, gt=0)
    """Time for which entries of the audit log of checkpoints, projects and keys are kept, in seconds."""
    ended_session_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """Time for which the sampling sessions and custom losses of an ended session are remembered, in seconds. Its
    checkpoints and its usage stay; max_owner_rows bounds the rest."""
    max_owner_rows: int = Field(default=100_000, ge=1)
    """Most rows of each kind that one owner leaves in the database. Above it the oldest ended sessions, ended runs and
    entries of the audit log are forgotten, except runs and sessions with checkpoints; so is the progress of clients of
    the oldest sampling sessions; and the usage of the oldest hours is summed up over sessions, which changes no bill. A
    further checkpoint or custom loss is refused."""
    history_points: int = Field(default=4096, ge=0)
    """Most points of a run's metrics that the dashboard keeps, however long the run is; at least 64, or 0 for none."""
    history_retention_s: float = Field(default=180 * 86400.0, gt=0)
    """Time for which points of metrics are kept, in seconds."""
    max_history_points: int = Field(default=2_000_000, ge=1)
    """Most points of metrics of all runs together, about; the oldest go first."""
    recent_samples: int = Field(default=64, ge=0, le=1024)
    """Number of recent sequences that the dashboard keeps for each run and owner: the end of the prompt, tokens and
    logprobs. 0 means none, so that no text of samples is stored."""
    recent_sample_retention_s: float = Field(default=7 * 86400.0, gt=0)
    """Time for which recent sequences are kept, in seconds."""
    max_recent_samples: int = Field(default=100_000, ge=1)
    """Largest number of recent sequences of all runs together, about; the oldest go first."""
    token_prices_usd: dict[str, dict[TokenKind, Annotated[float, Field(ge=0)]]] = {}
    """Prices in USD per million tokens, by base model (or "*") and kind. A kind that is not listed costs nothing."""
    storage_price_usd: float = Field(default=0.0, ge=0)
    """Price of stored checkpoints, in USD per gigabyte and month of 720 hours."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """Form of log lines: JSON for machines, or text."""
    tracing: bool = False
    """Send OpenTelemetry traces, by OTEL_EXPORTER_OTLP_ENDPOINT and the like. Needs the extra `otel`."""

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
    def _one_list_of_services(self) -> GatewayConfig:
        if self.services_file is not None:
            for name in ("trainers", "samplers"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} and services_file exclude each other: give one of them")
        _ = self.services
        return self

    @model_validator(mode="after")
    def _room_for_a_body(self) -> GatewayConfig:
        if self.max_held_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_held_body_bytes {self.max_held_body_bytes} is below max_body_bytes {self.max_body_bytes}: "
                "no room for one body"
            )
        return self

    @model_validator(mode="after")
    def _time_for_a_poll(self) -> GatewayConfig:
        if self.sample_client_timeout_s <= self.long_poll_s:
            raise ValueError(
                f"sample_client_timeout_s {self.sample_client_timeout_s:g} must be more than long_poll_s "
                f"{self.long_poll_s:g}: a client polls once in that time"
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
    def services(self) -> AddressSource:
        """The addresses of trainers and samplers. Raises ValueError when an address cannot be used."""
        listed = Addresses(tuple(self.trainers), tuple(self.samplers))
        return AddressSource(listed, self.services_file, encrypted=self.certificates is not None)

    @property
    def own_hosts(self) -> list[str]:
        """Host names of the gateway besides the loopback names: those of allowed_hosts and of public_url."""
        return [*self.allowed_hosts, *filter(None, [urlsplit(self.public_url).hostname])]

    @property
    def resolved_database_url(self) -> str:
        return self.database_url.get_secret_value() or f"sqlite+aiosqlite:///{self.state_dir.absolute() / DATABASE}"
