"""The trainer's settings: flags, or environment variables with the prefix TRAINER_."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.rpc.auth import AnyKey, ServiceKey, accepted, admins, host_of, require_keys
from tinsmith.rpc.paths import check_checkpoint_root
from tinsmith.rpc.tls import GrpcTls


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
    """Take checkpoints, and models of the journal, that were trained on other weights of a base model of this name,
    with a warning, instead of refusing them."""
    listen: str = "127.0.0.1:8001"
    """Address of the gRPC server; port 0 lets the kernel choose. Any other than a loopback address needs keys."""
    api_keys: list[AnyKey] = []
    """Keys that gRPC clients may use, as a JSON list in the form of the gateway's. Empty, and no service_key: none is
    needed, on a loopback address only."""
    service_key: ServiceKey = SecretStr("")
    """Key of Tinsmith's own services: accepted from the gateway, and sent to the samplers."""
    samplers: list[str] = []
    """Addresses of the sampler services that get published weights, as a JSON list."""
    checkpoint_dir: str = ".tinsmith/checkpoints"
    """Root of the checkpoints: a folder, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, which need the extra s3 or gcs
    and find their credentials as s3fs (AWS_*) and gcsfs do."""
    min_free_bytes: int | None = Field(default=None, ge=0)
    """A checkpoint that would leave less of the disk free is refused before it is written, and a snapshot is left out.
    By default a twentieth of the disk, at most 1 GiB."""
    state_dir: Path = Path(".tinsmith/trainer")
    """Folder of the journal; one trainer at a time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights; auto means float32 on the CPU and bfloat16 on CUDA. Adapters are always float32."""
    kernels: Literal["auto", "plain", "compiled", "liger"] = "auto"
    """auto takes the fastest kernels that are there, plain none, as a reference. compiled and liger are auto with
    norms, rotations and SwiGLU by torch.compile or by the package liger-kernel; without them, no start."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of one computation; 0 leaves torch's default, and divides the cores among several ranks. With a
    cores_page, the most that all ranks together may use; 0 means all cores."""
    cores_page: str = ""
    """PATH:PLACE of a page that `tinsmith up` makes, on which the services of one machine say which of them compute.
    The trainer uses all cores while no other service computes, and its share of them otherwise. A deterministic trainer
    keeps to num_threads, or its share where that is 0. Empty means that num_threads are fixed."""
    keep_freed_memory: bool = True
    """On a CPU with glibc: freed memory stays with the process, so that a step finds it again without a page fault. Its
    resident memory then stays at its peak; false gives it back to the system, and costs some 10 % of a step's time."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that divide the features of each layer, by the model's own plan. How many ranks there are says torchrun;
    the other ranks divide the datums."""
    shard_base: bool = False
    """Divide the memory of the base model among the ranks that divide the datums (FSDP), so that each holds a part."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time that one rank waits for another once they have begun something together; then all end. It must be
    well above what the slowest rank needs for one micro-batch or step. Waiting for work has no limit."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Largest rank that a model may ask for. A sampler that has been seen, and serves less, in rank or in bytes, lowers
    it for new models."""
    full_training: bool = False
    """Train all parameters of the base model instead of adapters: one model at a time, made with lora_config.rank 0."""
    max_models: int = Field(default=64, ge=1)
    """Most live models in memory. When another one needs a place, the model that was used longest ago is parked:
    written to state_dir and freed, until a request needs it. full_training means 1."""
    max_known_models: int = Field(default=10_000, ge=1)
    """Most live models, in memory or parked. A parked model takes the room of its snapshots on the disk."""
    park_after_s: float = Field(default=300.0, ge=0)
    """Time without work after which a model is parked, in seconds. 0 means that a model is parked only when its place
    is needed."""
    max_tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Most tokens that go through the base model at once. Fewer do where memory has no room for them, and where they
    would take longer than 2 s, or 0.1 s while several models are at work; but at least 256."""
    token_budget: int = Field(default=0, ge=0)
    """Like max_tokens_per_microbatch, below it, and for a deterministic trainer the one that counts. 0 means
    max_tokens_per_microbatch."""
    max_targets_per_token: int = Field(default=1024, ge=1)
    """Most columns of target_tokens: targets that one token of a datum may have. Many targets count as more tokens in
    turns, micro-batches and memory. After it was lowered, a model whose journal has more is not restored."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory for training beside the base model: adapters, optimizers, activations. 0 means measured at start: of what
    is free then, half on the CPU and nine tenths on CUDA."""
    adapter_device_bytes: int = Field(default=0, ge=0)
    """Most of the device's memory for adapters, gradients and moments; models that were not used for longest wait in
    host memory. 0 means all of memory_bytes that activations leave. On the CPU nothing is moved."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute each layer twice instead of keeping its activations; auto does so for what would not fit otherwise."""
    deterministic: bool = False
    """Run every forward_backward by itself, divided only by its own lengths and token_budget (or, where that is 0,
    max_tokens_per_microbatch): the same requests then give the same bits, also after a crash and whatever other models
    do. Costs what sharing micro-batches gains; activation_checkpointing auto is off."""
    max_queued_operations: int = Field(default=1024, ge=1)
    """Most operations of one model that wait for their turn, and how far ahead of the next one a seq_id may be."""
    max_queued_bytes: int = Field(default=0, ge=0)
    """Memory for the operations of all models that wait or run, uncompressed, with their arrays and answers. A model
    may have as much of it as is free, so one alone at most half. Half as much again is reserved for operations that
    are the next of their models. 0 means an eighth of the memory that is free at start."""
    missing_operation_timeout_s: float = Field(default=900.0, ge=0)
    """An operation that others wait for and that has not arrived is given up when nothing of its model has come for so
    long: the others run, and the next optim_step fails. 0 means never."""
    max_import_bytes: int = Field(default=16 * 1024**3, ge=1)
    """Largest archive of an adapter to import, also after decompression. The gateway has a bound of its own."""
    channel_host: str = "127.0.0.1"
    """Address of this machine that the samplers can reach, for the weight channel."""
    channel: Literal["auto", "gloo", "nccl", "cuda_ipc", "shm"] = "auto"
    """How weights travel to the samplers. auto takes for each the best that reaches it: on the trainer's own GPU
    cuda_ipc, on another one nccl, on the same machine shm, else gloo. Any other value is for all of them, or fails."""
    channel_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that forming a group of samplers, or one call, may take."""
    channel_silence_s: float = Field(default=3.0, gt=0)
    """While weights are sent, a sampler that leaves a health check unanswered for so long is left out."""
    channel_bucket_bytes: int = Field(default=16 * 1024**2, ge=64 * 1024, multiple_of=4)
    """Weights travel in buckets of so many bytes; at most 4 MiB where all samplers are on the trainer's machine."""
    publish_gap_limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest gap, in nats, between the trainer's and a sampler's logprob of a canary token after a publish. By default
    0.01 where the base model is float32 and 1 where it is bfloat16; 0 is no limit, and nothing is refused."""
    publish_mean_gap_limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest mean of the gaps of one sampler, in nats. By default 0.003 where the base model is float32 and 0.25 where
    it is bfloat16; 0 is no limit."""
    on_publish_gap: Literal["refuse", "warn"] = "refuse"
    """What becomes of a version with a larger gap, or that a sampler does not apply: it is taken from the samplers and
    the save fails, or it is served with a warning in the log and in its certificate."""
    publish_score_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time that a sampler may take to score the canary; one that takes longer is not in the certificate."""
    journal_max_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Bound of the requests and results in the journal; from half of it on every step takes a snapshot, behind which
    the journal is cut, and above it the oldest results are cut, too."""
    snapshot_interval_s: float = Field(default=60.0, ge=0)
    """A model is copied at its first step after so many seconds, and written to state_dir; after a crash its operations
    since then run again. 0 is no limit of time."""
    snapshot_steps: int = Field(default=500, ge=0)
    """The same after so many steps. 0 is no limit."""
    snapshot_journal_bytes: int = Field(default=256 * 1024**2, ge=0)
    """The same after so many bytes of its requests. 0 is no limit."""
    result_retention_s: float = Field(default=3600.0, ge=0)
    """How long the result of a finished operation can be asked for."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 means none."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that is logged."""
    log_format: Literal["json", "text"] = "json"
    """Log lines as JSON, for machines, or as text."""
    tracing: bool = False
    """Send OpenTelemetry traces, as OTEL_EXPORTER_OTLP_ENDPOINT and its like say. Needs the extra `otel`."""

    @field_validator("checkpoint_dir")
    @classmethod
    def _known_store(cls, root: str) -> str:
        return check_checkpoint_root(root)

    @model_validator(mode="after")
    def _unique(self) -> TrainerConfig:
        for name, values in (("model_names", self.model_names), ("samplers", self.samplers)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: {values} names one twice")
        return self

    @model_validator(mode="after")
    def _within_bounds(self) -> TrainerConfig:
        if self.token_budget > self.max_tokens_per_microbatch:
            raise ValueError(
                f"token_budget: {self.token_budget} is above max_tokens_per_microbatch {self.max_tokens_per_microbatch}"
            )
        return self

    @model_validator(mode="after")
    def _keys_off_loopback(self) -> TrainerConfig:
        require_keys(host_of(self.listen), self.accepted_keys, setting="listen", env="TRAINER_API_KEYS")
        return self

    @property
    def accepted_keys(self) -> list[str]:
        return accepted(self.api_keys, self.service_key)

    @property
    def admin_keys(self) -> list[str]:
        return admins(self.api_keys, self.service_key)

    @property
    def fixed_token_budget(self) -> int:
        """0 where it is measured."""
        return self.token_budget or (self.max_tokens_per_microbatch if self.deterministic else 0)

    @property
    def effective_checkpointing(self) -> Literal["auto", "on", "off"]:
        """auto asks how much memory there is."""
        if self.deterministic and self.activation_checkpointing == "auto":
            return "off"
        return self.activation_checkpointing

    @property
    def public_names(self) -> list[str]:
        return self.model_names or [self.base_model]
