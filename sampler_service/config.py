"""Settings of the sampler service: one frozen class, read from the command line and the environment."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.quantization import Setting as Quantize
from tinsmith.rpc.auth import AnyKey, ServiceKey, accepted, admins, host_of, require_keys
from tinsmith.rpc.tls import GrpcTls
from tinsmith.sizing import MAX_LORA_RANK


class SamplerConfig(GrpcTls, BaseSettings):
    """Serves generation from a base model and from the adapter versions that a trainer publishes."""

    model_config = SettingsConfigDict(
        env_prefix="SAMPLER_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_prog_name="python -m sampler_service",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    base_model: str
    """Local path or Hugging Face id of the base model."""
    model_names: tuple[str, ...] = ()
    """Public names of the base model; the first is the principal one. Default: the value of base_model."""
    listen: str = "127.0.0.1:8002"
    """Address of the gRPC server; port 0 lets the kernel choose. Any other than a loopback address needs keys."""
    api_keys: list[AnyKey] = []
    """Keys of gRPC clients, as a JSON list in the form of the gateway's. Without api_keys and service_key nobody needs
    a key, and `listen` has to be a loopback address."""
    service_key: ServiceKey = SecretStr("")
    """Key of Tinsmith's own services: accepted from the gateway and the trainers."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics, on the host of `listen`; 0 is off."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads that compute; 0 leaves torch's default. With a cores_page it is the most that may compute, and 0
    means all cores."""
    cores_page: str = ""
    """PATH:PLACE of the shared page, made by `tinsmith up`, in which each service of a machine notes whether it
    computes. The torch engine uses all cores while no other service computes, and its share of them otherwise. vLLM
    always keeps to its share. Empty: the number of threads is fixed by num_threads."""
    base_pages: str = ""
    """PATH of a file of memory, made by `tinsmith up`, through which the services of one machine share the pages of the
    base model's weights on a CPU with the torch engine. Empty: the service has pages of its own."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """Log lines as JSON, for machines, or as text."""
    tracing: bool = False
    """Send OpenTelemetry traces. The standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and others) say where to. Needs
    the extra `otel`."""

    engine: Literal["auto", "vllm", "torch"] = "auto"
    """Engine that generates: vllm, or torch, which runs the trainer's modelling code. auto takes vllm on CUDA if vLLM
    is installed, and torch otherwise."""
    tensor_parallel: int = Field(default=1, ge=1)
    """vLLM only: number of GPUs among which the features of each layer are divided; the first visible ones are taken.
    Settings that bound a device (max_kv_tokens where it is 0, prefix_cache_bytes, max_device_versions) hold for each
    GPU."""
    max_device_versions: int = Field(default=4, ge=1)
    """vLLM only: most versions that one step may mix. Each has a slot on the device, as large as an adapter of
    max_lora_rank. The other versions wait in host memory, within adapter_memory_bytes, and take some milliseconds to
    get a slot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA when there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base weights; auto is float32 on a CPU and bfloat16 on CUDA."""
    quantize: Quantize = None
    """Torch engine only: store the weights of the layers that take adapters in 8 bits (int8) or 4 bits (nf4). Must be
    the trainer's setting, because its versions are for these weights."""
    pictures: bool = True
    """Take pictures, if the base model sees. false saves the memory of its vision tower, which is then not loaded, and
    refuses pictures by name."""
    max_lora_rank: int = Field(default=MAX_LORA_RANK, ge=1)
    """Largest rank of a version; set it to the trainer's. Default: 256 with the torch engine, where a version takes the
    memory of its own rank, and 64 with vLLM, where each slot on the device takes the memory of the largest rank."""
    adapter_memory_bytes: int = Field(default=2 * 1024**3, ge=1)
    """Most memory for versions, in bytes. A new version evicts the least recently used ones that no request uses."""

    max_running: int = Field(default=64, ge=1)
    """Most sequences that generate at once."""
    max_kv_tokens: int = Field(default=0, ge=0)
    """Most tokens in the key/value cache. Sequences of up to 1,024 tokens count together as their number times the
    length of the longest, and so do those of up to 4,096, and so on. 0: as many as a quarter of the memory that is free
    after loading can hold."""
    prefix_cache_bytes: int | None = Field(default=None, ge=0)
    """Most memory, in bytes, for the keys and values of earlier prompts and outputs, which requests that begin with the
    same tokens reuse. States of recurrent layers get half of it. 0 switches the cache off. Default: an eighth of the
    memory that is free after loading."""
    prefill_tokens_per_step: int = Field(default=0, ge=0)
    """Most prompt tokens that one step computes, so that a long prompt does not stall the running sequences. 0: 512
    on a CPU, 8192 on CUDA."""
    prepack: bool | None = None
    """Torch engine on a CPU only: keep a second copy of the base model's matrices, in the layout of the CPU's products.
    With it steps of several sequences take little more than half the time. Default: if the copy takes no more than a
    quarter of the free memory."""
    max_waiting: int = Field(default=4096, ge=1)
    """Most requests that wait for a place; further ones are refused with OUT_OF_CAPACITY."""
    max_held_bytes: int = Field(default=1024**3, ge=1)
    """Most memory for requests that wait or run, in bytes: their messages, tables of scores, and what each sequence
    takes before it has a token. A request beyond it is refused with OUT_OF_CAPACITY, unless no other one is open."""
    max_num_samples: int = Field(default=1024, ge=1)
    """Largest num_samples of a request."""
    max_topk_logprobs: int = Field(default=128, ge=0)
    """Largest k of a top-k table, and of prompt_alt_tokens_k."""

    channel_host: str = "127.0.0.1"
    """Address at which trainers reach this process for the weight channel (gloo, nccl)."""
    channel_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for a trainer in the weight channel, in seconds."""

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, values: dict[str, object]) -> dict[str, object]:
        if not values.get("model_names") and "base_model" in values:
            values = {**values, "model_names": [values["base_model"]]}
        return values

    @model_validator(mode="after")
    def _quantizable(self) -> Self:
        if self.quantize is not None and self.engine == "vllm":
            raise ValueError(
                f'quantize: {self.quantize} is for engine "torch"; engine "vllm" would compute with other weights than '
                "the trainer, which quantises in a form of its own"
            )
        if self.quantize is not None and self.prepack:
            raise ValueError(f"quantize: {self.quantize} leaves no matrices to prepack; leave prepack out")
        return self

    @model_validator(mode="after")
    def _keys_off_loopback(self) -> Self:
        require_keys(self.host, self.accepted_keys, setting="listen", env="SAMPLER_API_KEYS")
        return self

    @property
    def host(self) -> str:
        return host_of(self.listen)

    @property
    def accepted_keys(self) -> list[str]:
        return accepted(self.api_keys, self.service_key)

    @property
    def admin_keys(self) -> list[str]:
        return admins(self.api_keys, self.service_key)
