"""The trainer's settings: flags, or environment variables with the prefix TRAINER_."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.quantization import Setting as Quantize
from tinsmith.rpc.addresses import Addresses, AddressSource
from tinsmith.rpc.auth import AnyKey, ServiceKey, accepted, admins, host_of, require_keys
from tinsmith.rpc.paths import check_checkpoint_root
from tinsmith.rpc.postgres import check_url
from tinsmith.rpc.tls import GrpcTls
from tinsmith.sizing import MAX_LORA_RANK

_MOST_TOKENS = 4096
"""Default of max_tokens_per_microbatch."""
_MOST_MEASURED_TOKENS = 16_384
"""Its default on CUDA, where the trainer has measured the memory of activations."""


class TrainerConfig(GrpcTls, BaseSettings):
    """Trains LoRA adapters of one frozen base model, or all its parameters, and serves TrainerService over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="TRAINER_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_prog_name="python -m trainer_service",
    )

    base_model: str
    """Hugging Face id or local path of the frozen base model."""
    model_names: list[str] = []
    """Public names of the base model, as a JSON list; the first is the principal one. Empty means [base_model]."""
    allow_other_base_weights: bool = False
    """Accept, with a warning, checkpoints and journalled models that were trained on other weights of a base model of
    this name, instead of refusing them."""
    listen: str = "127.0.0.1:8001"
    """Address of the gRPC server; port 0 lets the kernel choose. An address other than loopback needs keys."""
    api_keys: list[AnyKey] = []
    """Keys that gRPC clients may use, as a JSON list in the gateway's form. If it is empty and there is no service_key,
    clients need no key; that is allowed on a loopback address only."""
    service_key: ServiceKey = SecretStr("")
    """Key of Tinsmith's own services: accepted from the gateway, and sent to the samplers."""
    samplers: list[str] = []
    """Addresses of the sampler services that get published weights, HOST:PORT, as a JSON list. dns:///HOST:PORT stands
    for every address of the host, looked up every two seconds."""
    services_file: Path | None = None
    """JSON file with the addresses, {"samplers": [...]}, instead of samplers. It may change while the trainer runs:
    samplers that came get the versions that are published from then on, and earlier ones when they are asked for.
    `tinsmith up` writes it."""
    checkpoint_dir: str = ".tinsmith/checkpoints"
    """Root of the checkpoints: a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX. The latter two need the extra s3 or
    gcs, and find their credentials as s3fs (AWS_*) and gcsfs do."""
    min_free_bytes: int | None = Field(default=None, ge=0)
    """Bytes that must stay free on the disk. A checkpoint that would leave less is refused before it is written; a
    snapshot is not taken. The default is a twentieth of the disk, at most 1 GiB."""
    state_dir: Path = Path(".tinsmith/trainer")
    """Folder of the journal and the snapshots, unless these lie elsewhere (journal); one trainer at a time uses it."""
    journal: SecretStr = SecretStr("")
    """PostgreSQL database of the journal, postgresql://USER:PASSWORD@HOST/NAME, which several trainers may share. The
    snapshots then lie in checkpoint_dir. When this machine is lost, the trainer can be started on another one, with the
    same journal, journal_name and checkpoint_dir. Needs the extra postgres. Empty means a file in state_dir."""
    journal_name: str = ""
    """Name of this trainer in a journal in PostgreSQL. No two trainers may have the same; a trainer that finds an
    earlier process of its name alive does not start. Empty means the first of model_names, or base_model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights; auto means float32 on the CPU and bfloat16 on CUDA. Adapters are always float32."""
    quantize: Quantize = None
    """Store the weights of the layers that take adapters in 8 bits (int8) or 4 bits (nf4), as in QLoRA; adapters stay
    float32. Embeddings, norms, routers and the output layer keep their type. Samplers must have the same setting. Not
    together with full_training, tensor_parallel or shard_base."""
    kernels: Literal["auto", "plain", "compiled", "liger"] = "auto"
    """auto takes the fastest kernels available; plain uses none, as a reference. compiled and liger are like auto, but
    compute norms, rotations and SwiGLU by torch.compile or the package liger-kernel; without it the start fails."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of one computation; 0 means torch's default, or an equal share of the cores for each of several
    ranks. With a cores_page: most threads that all ranks together may use; 0 means all cores."""
    cores_page: str = ""
    """PATH:PLACE of a page, made by `tinsmith up`, on which the services of one machine say which of them compute. The
    trainer uses all cores while no other service computes, and its share of them otherwise. A deterministic trainer
    always uses num_threads, or its share when that is 0. Empty means that num_threads is fixed."""
    base_pages: str = ""
    """PATH of a file of memory, made by `tinsmith up`, through which the services of one machine share the pages of the
    base model's weights on a CPU. Empty: the service has pages of its own."""
    keep_freed_memory: bool = True
    """On a CPU with glibc: keep freed memory in the process, so that a step can use it again without page faults.
    Resident memory then stays at its peak. false returns it to the system, and costs about 10 % of a step's time."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of ranks that divide the features of each layer, by the model's own plan. torchrun sets the total number
    of ranks; the others divide the datums."""
    shard_base: bool = False
    """Divide the memory of the base model among the ranks that divide the datums (FSDP), so that each holds a part."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time that one rank waits for another within a common computation, in seconds; then all ranks end. It must
    be well above the slowest rank's time for a micro-batch or a step. Waiting for work, and for the base model to be
    loaded, has no limit; but all ranks end when one gives no sign of life for twice this time."""
    max_lora_rank: int = Field(default=MAX_LORA_RANK, ge=1)
    """Largest rank that a model may ask for. A sampler that serves less, in rank or in bytes, lowers it for new models
    once the trainer has seen it."""
    full_training: bool = False
    """Train all parameters of the base model instead of adapters: one model at a time, made with lora_config.rank 0."""
    max_models: int = Field(default=64, ge=1)
    """Most live models in memory. When another one needs a place, the idle model that was used longest ago is parked:
    written to state_dir and freed, until a request needs it. With full_training it is 1."""
    max_known_models: int = Field(default=10_000, ge=1)
    """Most live models, in memory or parked. A parked model takes disk space for its snapshots."""
    park_after_s: float = Field(default=300.0, ge=0)
    """Time without work after which a model is parked, in seconds. 0 means that a model is parked only when its place
    is needed."""
    max_tokens_per_microbatch: int = Field(default=0, ge=0)
    """Most tokens that go through the base model at once. 0 means 16,384 for adapters on CUDA. On the CPU, with
    full_training and for a deterministic trainer it means 4096. Fewer do when memory does not suffice, or when they
    would take longer than 2 s (while several models are at work, 0.1 s on the CPU and 0.5 s on CUDA), but time alone
    never lowers them below 256 on the CPU and 2048 on CUDA."""
    token_budget: int = Field(default=0, ge=0)
    """A lower limit than max_tokens_per_microbatch. A deterministic trainer always divides batches by it. 0 means
    max_tokens_per_microbatch."""
    max_targets_per_token: int = Field(default=1024, ge=1)
    """Most targets of one token of a datum, which are columns of target_tokens. Many targets count as more tokens in
    turns, micro-batches and memory. If this is lowered, a model whose journal has more targets is not restored."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory for training beside the base model: adapters, optimizers, activations. 0 means a share of the memory that
    is free at start: half on the CPU, nine tenths on CUDA."""
    adapter_device_bytes: int = Field(default=0, ge=0)
    """Most device memory for adapters, gradients and moments; models used longest ago wait in host memory. 0 means all
    of memory_bytes that activations leave. On the CPU nothing is moved."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute each layer twice instead of keeping its activations; auto does so only for micro-batches that would not
    fit otherwise. On CUDA, where fewer than 2,048 tokens would fit without checkpointing, auto makes larger
    micro-batches with it."""
    pictures: bool = True
    """Take pictures, if the base model sees. false saves the memory of its vision tower, which is then not loaded, and
    refuses pictures by name. With full_training the tower is loaded all the same, because it is in the checkpoints."""
    share_prefixes: bool = True
    """Compute beginnings that datums of a model have in common once in a micro-batch, such as the prompt of a group of
    samples. Results differ by rounding only. A deterministic trainer does so within one request."""
    deterministic: bool = False
    """Run every forward_backward by itself, divided only by its own tokens and token_budget (or, if that is 0,
    max_tokens_per_microbatch). The same requests then give the same bits, even after a crash and whatever other models
    do. Micro-batches are not shared, which costs speed, and activation_checkpointing auto means off."""
    max_queued_operations: int = Field(default=1024, ge=1)
    """Most waiting operations of one model. A seq_id may be at most this far ahead of the next one."""
    max_queued_bytes: int = Field(default=0, ge=0)
    """Memory for waiting and running operations of all models: uncompressed requests, arrays and answers. One model may
    hold as much as is free, so at most half when it is alone. Half as much again is reserved for operations that are
    the next of their models. 0 means an eighth of the memory that is free at start."""
    missing_operation_timeout_s: float = Field(default=900.0, ge=0)
    """Time without a new operation of a model after which a missing operation, for which others wait, is given up: the
    others run, and the next optim_step fails. 0 means never."""
    max_import_bytes: int = Field(default=16 * 1024**3, ge=1)
    """Largest archive of an adapter to import, also after decompression. The gateway has a limit of its own."""
    channel_host: str = "127.0.0.1"
    """Address of this machine that the samplers can reach, for the weight channel."""
    channel: Literal["auto", "gloo", "nccl", "cuda_ipc", "shm"] = "auto"
    """How weights are sent to the samplers. auto takes the best transport that reaches each sampler: cuda_ipc on the
    trainer's own GPU, nccl on another GPU, shm on the same machine, else gloo. Any other value must reach all."""
    channel_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time for forming a group of samplers, and for one call, in seconds."""
    channel_silence_s: float = Field(default=3.0, gt=0)
    """While weights are sent, a sampler that leaves a health check unanswered for this long is left out, in seconds."""
    version_homes: int = Field(default=4, ge=1)
    """Number of samplers to which each version of an adapter is sent, chosen by its run. While there are no more
    samplers, all have every version. Other samplers get a version when it is sampled so much that its own are busy."""
    channel_bucket_bytes: int = Field(default=16 * 1024**2, ge=64 * 1024, multiple_of=4)
    """Size of the buckets in which weights are sent; at most 4 MiB when all samplers are on the trainer's machine."""
    publish_gap_limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest gap, in nats, between the trainer's and a sampler's logprob of a canary token after a publish. The
    default is 0.01 for a float32 base model and 1 for bfloat16. 0 means no limit, and no version is refused."""
    publish_mean_gap_limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest mean of the gaps of one sampler, in nats. The default is 0.003 for a float32 base model and 0.25 for
    bfloat16. 0 means no limit."""
    on_publish_gap: Literal["refuse", "warn"] = "refuse"
    """What happens to a version whose gap is too large, or that a sampler does not apply. refuse: it is removed from
    the samplers and the save fails. warn: it is served, with a warning in the log and in its certificate."""
    publish_score_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time that a sampler may take to score the canary, in seconds; a slower one is not in the certificate."""
    journal_max_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Limit on the requests and results in the journal. Above half of it every step takes a snapshot, which lets the
    journal be cut. Above the limit the oldest results are cut, too."""
    snapshot_interval_s: float = Field(default=60.0, ge=0)
    """A model's snapshot is taken at its first step after this time since the last one, in seconds, and written to
    state_dir. After a crash the operations after the snapshot run again. 0 means no limit of time."""
    snapshot_steps: int = Field(default=500, ge=0)
    """A model's snapshot is taken after this many steps since the last one. 0 means no limit."""
    snapshot_journal_bytes: int = Field(default=256 * 1024**2, ge=0)
    """A model's snapshot is taken after this many bytes of its requests since the last one. 0 means no limit."""
    result_retention_s: float = Field(default=3600.0, ge=0)
    """How long the result of a finished operation is kept, in seconds."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 means none."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that is logged."""
    log_format: Literal["json", "text"] = "json"
    """Log lines as JSON, for machines, or as text."""
    tracing: bool = False
    """Send OpenTelemetry traces, as configured by OTEL_EXPORTER_OTLP_ENDPOINT and the like. Needs the extra `otel`."""

    @field_validator("checkpoint_dir")
    @classmethod
    def _known_store(cls, root: str) -> str:
        return check_checkpoint_root(root)

    @field_validator("journal")
    @classmethod
    def _known_database(cls, url: SecretStr) -> SecretStr:
        if url.get_secret_value():
            check_url(url.get_secret_value())
        return url

    @model_validator(mode="after")
    def _unique(self) -> TrainerConfig:
        if len(set(self.model_names)) != len(self.model_names):
            raise ValueError(f"model_names: {self.model_names} contains a duplicate")
        return self

    @model_validator(mode="after")
    def _one_list_of_samplers(self) -> TrainerConfig:
        if self.services_file is not None and self.samplers:
            raise ValueError("samplers and services_file exclude each other: give one of them")
        _ = self.services
        return self

    @model_validator(mode="after")
    def _within_bounds(self) -> TrainerConfig:
        if 0 < self.max_tokens_per_microbatch < self.token_budget:
            raise ValueError(
                f"token_budget: {self.token_budget} is above max_tokens_per_microbatch {self.max_tokens_per_microbatch}"
            )
        return self

    @model_validator(mode="after")
    def _quantizable(self) -> TrainerConfig:
        if self.quantize is None:
            return self
        reasons = {
            "full_training": (self.full_training, "changes the base weights; leave one of them out"),
            "tensor_parallel": (self.tensor_parallel > 1, "divides unquantised weights only; set it to 1"),
            "shard_base": (self.shard_base, "divides unquantised weights only; set it to false"),
        }
        for name, (is_set, reason) in reasons.items():
            if is_set:
                raise ValueError(f"quantize: {self.quantize} is not possible together with {name}, which {reason}")
        return self

    @model_validator(mode="after")
    def _keys_off_loopback(self) -> TrainerConfig:
        require_keys(host_of(self.listen), self.accepted_keys, setting="listen", env="TRAINER_API_KEYS")
        return self

    @property
    def name_in_journal(self) -> str:
        """journal_name, or its default."""
        return self.journal_name or self.public_names[0]

    @property
    def services(self) -> AddressSource:
        """The addresses of the samplers. Raises ValueError for ones that cannot be used."""
        listed = Addresses(samplers=tuple(self.samplers))
        return AddressSource(listed, self.services_file, encrypted=self.certificates is not None)

    @property
    def accepted_keys(self) -> list[str]:
        """Keys that clients may use, the service key included."""
        return accepted(self.api_keys, self.service_key)

    @property
    def admin_keys(self) -> list[str]:
        """Keys that may call TrainerAdminService."""
        return admins(self.api_keys, self.service_key)

    def most_tokens(self, device_type: str) -> int:
        """max_tokens_per_microbatch on this device, cpu or cuda. A larger token_budget raises its default."""
        measured = device_type == "cuda" and not self.deterministic and not self.full_training
        default = _MOST_MEASURED_TOKENS if measured else _MOST_TOKENS
        return self.max_tokens_per_microbatch or max(default, self.token_budget)

    @property
    def fixed_token_budget(self) -> int:
        """token_budget; for a deterministic trainer without one, max_tokens_per_microbatch. 0 when memory decides."""
        return self.token_budget or (self.max_tokens_per_microbatch or _MOST_TOKENS if self.deterministic else 0)

    @property
    def effective_checkpointing(self) -> Literal["auto", "on", "off"]:
        """activation_checkpointing; off instead of auto for a deterministic trainer, because auto depends on memory."""
        if self.deterministic and self.activation_checkpointing == "auto":
            return "off"
        return self.activation_checkpointing

    @property
    def public_names(self) -> list[str]:
        return self.model_names or [self.base_model]
