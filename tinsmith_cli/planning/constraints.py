"""The user's own choices, from the settings of `tinsmith up` and the services' variables in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from tinsmith.quantization import QUANTIZATIONS
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.machine import Gpu, Machine, chosen
from tinsmith_cli.settings import Settings

FLAGS = (
    "gpus", "trainer_gpus", "sampler_gpus", "train_share", "trainer_ranks", "trainers", "samplers",
    "max_lora_rank", "dtype", "engine", "full_training", "quantize", "role", "trainer_nodes",
)  # fmt: skip
"""Settings of `tinsmith up` that the plan depends on."""
_DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Choices of the user, by flags and environment, which bind the planner. The planner decides where a choice is None
    or 0."""

    trains: bool = True
    """Whether this machine runs a trainer."""
    samples: bool = True
    """Whether this machine runs samplers."""
    nodes: int = 1
    """Number of machines of the trainer, each with as many ranks as this one."""
    trainer_gpus: Sequence[Gpu] | None = None
    sampler_gpus: Sequence[Gpu] | None = None
    train_share: float = 0.5
    ranks: int | None = None
    trainers: int = 1
    """Number of trainers of the base model, each with `ranks` ranks."""
    samplers: int | None = None
    max_lora_rank: int | None = None
    trainer_tensor_parallel: int = 1
    shard_base: bool | None = None
    sampler_tensor_parallel: int | None = None
    engine: str = "vllm"
    """Engine that samplers on a GPU take, "vllm" or "torch". On a CPU they take torch."""
    names_engine: bool = False
    """Whether the user has named the engine."""
    trainer_dtype: str = "auto"
    sampler_dtype: str = "auto"
    quantised: str = ""
    full_training: bool = False
    memory_bytes: int = 0
    max_kv_tokens: int = 0
    prefix_cache_bytes: int | None = None
    adapter_memory_bytes: int | None = None
    max_device_versions: int | None = None
    max_running: int = 64
    max_models: int = 64
    quantisations: Sequence[str] = QUANTIZATIONS
    """Values of --quantize to suggest."""


def usable(machine: Machine, settings: Settings) -> Machine:
    """The machine with the GPUs that --gpus leaves. Raises UsageError."""
    if settings.gpus == "all":
        return machine
    if settings.gpus == "none":
        return replace(machine, gpus=[], note="")
    return replace(machine, gpus=chosen(machine.gpus, settings.gpus, flag="--gpus"))


def constraints_of(settings: Settings, machine: Machine, env: Mapping[str, str]) -> Constraints:
    """The constraints of these settings and variables. `machine`: from `usable`. Raises UsageError for a value that
    cannot be used."""
    if not 0 < settings.train_share < 1:
        raise UsageError(f"--train-share: {settings.train_share} is not between 0 and 1")
    named = {}
    for name in ("trainer_gpus", "sampler_gpus"):
        if (text := getattr(settings, name)) is not None:
            named[name] = chosen(machine.gpus, text, flag=f"--{name.replace('_', '-')}")
    shard = env.get("TRAINER_SHARD_BASE", "").lower()
    named_engine = _named_engine(settings, env)
    return Constraints(
        **named,
        trains="trainer" in settings.roles,
        samples="sampler" in settings.roles,
        nodes=settings.trainer_nodes,
        train_share=settings.train_share,
        ranks=settings.trainer_ranks,
        trainers=settings.trainers,
        samplers=settings.samplers,
        max_lora_rank=settings.max_lora_rank
        or _number(env, "TRAINER_MAX_LORA_RANK", least=1)
        or _number(env, "SAMPLER_MAX_LORA_RANK", least=1),
        trainer_tensor_parallel=_number(env, "TRAINER_TENSOR_PARALLEL", least=1) or 1,
        shard_base=None if not shard else shard in ("1", "true", "yes", "on", "t", "y"),
        sampler_tensor_parallel=_number(env, "SAMPLER_TENSOR_PARALLEL", least=1),
        engine=named_engine or _usual_engine(settings),
        names_engine=bool(named_engine),
        trainer_dtype=settings.dtype or _choice(env, "TRAINER_DTYPE", _DTYPES) or "auto",
        sampler_dtype=settings.dtype or _choice(env, "SAMPLER_DTYPE", (*_DTYPES, "float16")) or "auto",
        quantised=settings.quantize or _choice(env, "TRAINER_QUANTIZE", QUANTIZATIONS),
        full_training=settings.full_training,
        memory_bytes=_number(env, "TRAINER_MEMORY_BYTES") or 0,
        max_kv_tokens=_number(env, "SAMPLER_MAX_KV_TOKENS") or 0,
        prefix_cache_bytes=_number(env, "SAMPLER_PREFIX_CACHE_BYTES"),
        adapter_memory_bytes=_number(env, "SAMPLER_ADAPTER_MEMORY_BYTES", least=1),
        max_device_versions=_number(env, "SAMPLER_MAX_DEVICE_VERSIONS", least=1),
        max_running=_number(env, "SAMPLER_MAX_RUNNING", least=1) or 64,
        max_models=_number(env, "TRAINER_MAX_MODELS", least=1) or 64,
    )


def _named_engine(settings: Settings, env: Mapping[str, str]) -> str:
    """The engine that --engine or SAMPLER_ENGINE names; empty where neither does."""
    wanted = settings.engine
    if wanted == "auto":
        wanted = _choice(env, "SAMPLER_ENGINE", ("auto", "vllm", "torch"))
    return "" if wanted == "auto" else wanted


def _usual_engine(settings: Settings) -> str:
    """The engine of samplers on a GPU where none is named."""
    return "vllm" if find_spec("vllm") is not None and not settings.full_training else "torch"


def _choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """The value of the variable; empty if it is not set."""
    text = env.get(name, "")
    if text and text not in choices:
        raise UsageError(f"{name}: {text!r} is not one of {', '.join(choices)}")
    return text


def _number(env: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    """The value of the variable; None if it is not set."""
    text = env.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{name}: {text!r} is not a whole number") from None
    if value < least:
        raise UsageError(f"{name}: {value} is not at least {least}")
    return value
