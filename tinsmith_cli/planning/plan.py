"""A plan: the GPUs of each service, the use of their memory, and the environment that passes both to the services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning import memory
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.machine import Gpu, Machine
from tinsmith_cli.planning.memory import TrainingCapacity
from tinsmith_cli.planning.shape import Shape


class DoesNotFit(UsageError):
    """The model does not fit. `reason`: what is missing. `change`: advice by which it would fit; empty if there is
    none."""

    def __init__(self, reason: str, change: str = "") -> None:
        super().__init__(f"{reason}; {change}" if change else reason)
        self.reason = reason
        self.change = change


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """The trainer. Several trainers all have these figures, because a run may be placed at any of them."""

    gpus: Sequence[Gpu]
    """GPUs of all trainers, one for each rank, beginning with the first trainer; empty on a CPU."""
    ranks: int
    """Number of ranks of each trainer."""
    tensor_parallel: int
    shard_base: bool
    base_bytes: int
    """Bytes of base weights on each rank."""
    training: TrainingCapacity
    """Adapters and sequences of each rank."""


NO_TRAINER = TrainerPlan((), 0, 1, False, 0, TrainingCapacity(0, 0, 0, 0))
"""The plan of a machine without a trainer."""


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """One sampler."""

    gpus: Sequence[Gpu]
    """GPUs that divide the model; empty on a CPU."""
    base_bytes: int
    """Bytes of base weights on each GPU."""
    slots_bytes: int
    """Bytes for adapters on each GPU."""
    kv_tokens: int
    """Size of the key/value cache, in tokens."""
    kv_bytes_per_token: int
    """Bytes of a token's keys and values on each GPU."""
    prefix_bytes: int
    """Bytes of the prefix cache on each GPU."""

    @property
    def tensor_parallel(self) -> int:
        return max(1, len(self.gpus))


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one base model on this machine."""

    name: str
    shape: Shape
    machine: Machine
    constraints: Constraints
    device_type: str
    """ "cuda" or "cpu"."""
    engine: str
    dtype: str
    rank: int
    """Largest rank of adapters."""
    device_versions: int
    """Number of vLLM's slots for adapters."""
    adapter_memory_bytes: int
    """Memory of each sampler for versions."""
    trainer: TrainerPlan
    """NO_TRAINER on a machine without a trainer."""
    samplers: Sequence[SamplerPlan]
    """Empty on a machine without samplers."""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def is_shared(self) -> bool:
        """Whether trainer and sampler share a GPU."""
        return bool(self.trainer.gpus and self.samplers) and self.trainer.gpus == self.samplers[0].gpus

    @property
    def num_trainers(self) -> int:
        """Number of trainers on this machine."""
        return self.constraints.trainers if self.trainer.ranks else 0

    @property
    def publish_bytes(self) -> int:
        """Bytes that a publish sends to each sampler: an adapter of the largest rank, or all parameters."""
        if self.constraints.full_training:
            return memory.ADAPTER_BYTES * self.shape.parameters
        return memory.adapter_bytes(self.shape, self.rank)

    @property
    def channel(self) -> str:
        """The transport that TRAINER_CHANNEL=auto will choose."""
        if not self.trainer.ranks or not self.samplers:  # the other side is on another machine
            return "gloo" if self.device_type == "cpu" or self.engine == "vllm" else "nccl"
        if self.device_type == "cpu" or self.engine == "vllm" or self.has_mig:
            return "shm"
        return "cuda_ipc" if self.is_shared else "nccl"

    @property
    def has_mig(self) -> bool:
        return any(gpu.is_mig for gpu in [*self.trainer.gpus, *(gpu for one in self.samplers for gpu in one.gpus)])

    @property
    def loading_bytes(self) -> int:
        """Host memory that the services take while they load, in bytes. Each sampler counts with the whole model, and
        so does a trainer that does not divide the model. A trainer that divides it counts with one rank's part, because
        its ranks read one after the other. If the files are quantised or the family is unknown, it counts with the
        whole model, because each rank may read the whole files."""
        whole, trainer = whole_bytes(self.shape, self.constraints, self.dtype), self.trainer
        of_trainer = whole
        if (trainer.shard_base or trainer.tensor_parallel > 1) and not self.shape.note:
            rows = trainer.ranks * self.constraints.nodes // trainer.tensor_parallel
            of_trainer = memory.read_bytes(
                self.shape,
                self.dtype,
                shards=rows if trainer.shard_base else 1,
                tensor_parallel=trainer.tensor_parallel,
            )
        return of_trainer * self.num_trainers + whole * len(self.samplers)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the base weights of all services together."""
        of_samplers = sum(sampler.base_bytes * sampler.tensor_parallel for sampler in self.samplers)
        return self.num_trainers * self.trainer.ranks * self.trainer.base_bytes + of_samplers

    def trainer_gpus(self, number: int) -> Sequence[Gpu]:
        """GPUs of trainer `number`, one for each rank; empty on a CPU."""
        return self.trainer.gpus[number * self.trainer.ranks : (number + 1) * self.trainer.ranks]

    def trainer_env(self, number: int) -> dict[str, str]:
        """Environment variables of trainer `number`; empty on a CPU."""
        if self.device_type == "cpu" or not self.trainer.ranks:
            return {}
        env = {**_devices(self.trainer_gpus(number)), "TRAINER_MEMORY_BYTES": str(self.trainer.training.memory_bytes)}
        if self.constraints.full_training:
            del env["TRAINER_MEMORY_BYTES"]
        if self.trainer.tensor_parallel > 1:
            env["TRAINER_TENSOR_PARALLEL"] = str(self.trainer.tensor_parallel)
        if self.trainer.shard_base:
            env["TRAINER_SHARD_BASE"] = "true"
        if self.has_mig and self.engine == "torch":
            env["TRAINER_CHANNEL"] = "shm"
        return {**env, "TRAINER_MAX_LORA_RANK": str(self.rank)}

    def sampler_env(self, number: int) -> dict[str, str]:
        """Environment variables of sampler `number`; empty on a CPU."""
        if self.device_type == "cpu":
            return {}
        sampler = self.samplers[number]
        env = {
            **_devices(sampler.gpus),
            "SAMPLER_MAX_KV_TOKENS": str(sampler.kv_tokens),
            "SAMPLER_PREFIX_CACHE_BYTES": str(sampler.prefix_bytes),
            "SAMPLER_ADAPTER_MEMORY_BYTES": str(self.adapter_memory_bytes),
            "SAMPLER_MAX_LORA_RANK": str(self.rank),
        }
        if self.engine == "vllm":
            env["SAMPLER_MAX_DEVICE_VERSIONS"] = str(self.device_versions)
        if sampler.tensor_parallel > 1:
            env["SAMPLER_TENSOR_PARALLEL"] = str(sampler.tensor_parallel)
        return env


def _devices(gpus: Sequence[Gpu]) -> dict[str, str]:
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus)}


def whole_bytes(shape: Shape, constraints: Constraints, dtype: str) -> int:
    """Bytes of the base weights of a service that holds the whole model."""
    return memory.base_bytes(shape, dtype, quantised=constraints.quantised)
