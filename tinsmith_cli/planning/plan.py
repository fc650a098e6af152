"""Divides the GPUs and their memory between the trainer and the samplers of one base model.

On one GPU both lie together, each with a fixed part of the memory. With several, the trainer gets the share of them
that is asked for, or as many as the model needs, and the samplers the others. A trainer divides the memory of the base
model among its ranks (`shard_base`) if the whole leaves too little of a GPU; a vLLM sampler divides the model among
the fewest GPUs that hold it. What is left of each GPU goes into caches and training memory, by the services' rules.

GPUs in all formulas are counted at 0.9 of their free memory. The bytes of a process that are no weights and no cache
are assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinsmith.formatting import size_text as gb
from tinsmith.quantization import QUANTIZATIONS
from tinsmith.sizing import (
    TRAINING_SHARE,
    VLLM_MAX_LORA_RANK,
    VLLM_RANKS,
    full_bytes,
    kv_tokens,
    prefix_cache_bytes,
    slot_rank,
    training_bytes,
)
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning import memory
from tinsmith_cli.planning.machine import Gpu, Machine
from tinsmith_cli.planning.memory import Training
from tinsmith_cli.planning.shape import Shape

TRAINER_PROCESS_BYTES = 1_000_000_000
"""CUDA's context, NCCL's buffers and cuBLAS' workspaces of a trainer on a GPU. Assumed."""
SAMPLER_PROCESS_BYTES = {"vllm": 3_000_000_000, "torch": 2_000_000_000}
"""CUDA's context, graphs and the activations of a step of a sampler on a GPU. Assumed."""
KV_PART, PREFIX_PART = 2, 4
"""One part in so many of a sampler's own memory is for keys and values, and for the prefix cache. The rest is for
steps."""
LEAST_CONTEXT = 1024
"""A plan whose trainer cannot take a sequence of so many tokens does not count as one that fits."""
LEAST_KV_TOKENS = 4096
COMFORTABLE_CONTEXT = 8192
"""A trainer that cannot take sequences of so many tokens, or two adapters, with the whole base model on each rank,
divides its memory."""
COMFORTABLE_KV_TOKENS = 32768
_ATTEMPTS = ((32, True), (32, False), (8, False), (1, False))
"""Least rank, if none is given, and whether trainer and samplers must be comfortable: the first placement that offers
so much is taken."""
_MOST_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)


class DoesNotFit(UsageError):
    """The model does not fit. `reason` says what is missing, `change` what would make it fit, if anything would."""

    def __init__(self, reason: str, change: str = "") -> None:
        super().__init__(f"{reason}; {change}" if change else reason)
        self.reason = reason
        self.change = change


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user has settled by flags and environment. None and 0: the planner decides."""

    trainer_gpus: Sequence[Gpu] | None = None
    sampler_gpus: Sequence[Gpu] | None = None
    train_share: float = 0.5
    ranks: int | None = None
    samplers: int | None = None
    max_lora_rank: int | None = None
    trainer_tensor_parallel: int = 1
    shard_base: bool | None = None
    sampler_tensor_parallel: int | None = None
    engine: str = "vllm"
    """Engine that samplers on a GPU take, "vllm" or "torch". On a CPU they take torch."""
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


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    gpus: Sequence[Gpu]
    """One for each rank; none on a CPU."""
    ranks: int
    tensor_parallel: int
    shard_base: bool
    base_bytes: int
    """Base weights on each rank."""
    training: Training


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    gpus: Sequence[Gpu]
    """GPUs that divide the model; none on a CPU."""
    base_bytes: int
    """Base weights on each GPU."""
    slots_bytes: int
    """Memory for adapters on each GPU."""
    kv_tokens: int
    kv_bytes_per_token: int
    """On each GPU."""
    prefix_bytes: int

    @property
    def tensor_parallel(self) -> int:
        return max(1, len(self.gpus))


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    shape: Shape
    machine: Machine
    wishes: Wishes
    device_type: str
    """ "cuda" or "cpu"."""
    engine: str
    dtype: str
    rank: int
    """Largest rank of adapters."""
    device_versions: int
    adapter_memory_bytes: int
    trainer: TrainerPlan
    samplers: Sequence[SamplerPlan]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def is_shared(self) -> bool:
        """Whether trainer and sampler share a GPU."""
        return bool(self.trainer.gpus) and self.trainer.gpus == self.samplers[0].gpus

    @property
    def publish_bytes(self) -> int:
        """Bytes on the weight channel to each sampler, for an adapter of the largest rank."""
        if self.wishes.full_training:
            return memory.ADAPTER_BYTES * self.shape.parameters
        return memory.adapter_bytes(self.shape, self.rank)

    @property
    def channel(self) -> str:
        """The transport that TRAINER_CHANNEL=auto will choose."""
        if self.device_type == "cpu" or self.engine == "vllm" or self.has_mig:
            return "shm"
        return "cuda_ipc" if self.is_shared else "nccl"

    @property
    def has_mig(self) -> bool:
        return any(gpu.is_mig for gpu in [*self.trainer.gpus, *(gpu for one in self.samplers for gpu in one.gpus)])

    @property
    def loading_bytes(self) -> int:
        """Host memory while the services load: each of them has the whole model there, a trainer's ranks in turns."""
        return _whole_bytes(self.shape, self.wishes, self.dtype) * (1 + len(self.samplers))

    @property
    def weights_bytes(self) -> int:
        """Base weights of all services together."""
        of_samplers = sum(sampler.base_bytes * sampler.tensor_parallel for sampler in self.samplers)
        return self.trainer.ranks * self.trainer.base_bytes + of_samplers

    def trainer_env(self) -> dict[str, str]:
        """Environment of the trainer; empty on a CPU."""
        if self.device_type == "cpu":
            return {}
        env = {**_devices(self.trainer.gpus), "TRAINER_MEMORY_BYTES": str(self.trainer.training.memory_bytes)}
        if self.wishes.full_training:
            del env["TRAINER_MEMORY_BYTES"]
        if self.trainer.tensor_parallel > 1:
            env["TRAINER_TENSOR_PARALLEL"] = str(self.trainer.tensor_parallel)
        if self.trainer.shard_base:
            env["TRAINER_SHARD_BASE"] = "true"
        if self.has_mig and self.engine == "torch":
            env["TRAINER_CHANNEL"] = "shm"
        return {**env, "TRAINER_MAX_LORA_RANK": str(self.rank)}

    def sampler_env(self, number: int) -> dict[str, str]:
        """Environment of a sampler; empty on a CPU."""
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


def plan(name: str, shape: Shape, machine: Machine, wishes: Wishes) -> Plan:
    """The plan. Raises DoesNotFit with the smallest change that would make it fit, and UsageError for wishes that
    contradict each other."""
    try:
        return _plan(name, shape, machine, wishes)
    except DoesNotFit as error:
        for change, other_machine, other in _changes(shape, machine, wishes):
            try:
                _plan(name, shape, other_machine, other)
            except UsageError:
                continue
            raise DoesNotFit(error.reason, f"the smallest change that makes it fit: {change}") from None
        raise DoesNotFit(
            error.reason, "no change helps, nor do more GPUs of this kind" if machine.gpus else ""
        ) from None


def _plan(name: str, shape: Shape, machine: Machine, wishes: Wishes) -> Plan:
    if not machine.gpus:
        return _on_cpu(name, shape, machine, wishes)
    _check_together(shape, machine, wishes)
    failure: DoesNotFit | None = None
    for least, comfortable in _ATTEMPTS:
        for trainer, samplers in _placements(shape, machine, wishes):
            for rank in _ranks(wishes, least=least):
                try:
                    planned = _fill(name, shape, machine, wishes, trainer=trainer, samplers=samplers, rank=rank)
                except DoesNotFit as error:
                    failure = failure or error
                    continue
                if not comfortable or _is_comfortable(planned):
                    return planned
                break  # a lower rank is not preferred to another placement
    raise failure or UsageError(_impossible(shape, machine, wishes))


def _is_comfortable(planned: Plan) -> bool:
    training, context = planned.trainer.training, planned.shape.context
    return training.longest >= min(context, COMFORTABLE_CONTEXT) and all(
        sampler.kv_tokens >= min(context, COMFORTABLE_KV_TOKENS) for sampler in planned.samplers
    )


def _check_together(shape: Shape, machine: Machine, wishes: Wishes) -> None:
    """Raises DoesNotFit if all GPUs together cannot hold the base weights twice."""
    gpus = set(machine.gpus)
    if wishes.trainer_gpus is not None and wishes.sampler_gpus is not None:
        gpus = {*wishes.trainer_gpus, *wishes.sampler_gpus}
    free = sum(gpu.free_bytes for gpu in gpus)
    needed = 2 * _whole_bytes(shape, wishes, _dtype(wishes.trainer_dtype, "bfloat16"))
    if needed > TRAINING_SHARE["cuda"] * free:
        raise DoesNotFit(
            f"the base weights take {gb(needed)} in trainer and sampler together, and {gb(free)} are free on "
            f"{_named(sorted(gpus, key=lambda gpu: gpu.id))}"
        )


def _ranks(wishes: Wishes, *, least: int) -> Iterator[int]:
    """Largest ranks to try, the largest first."""
    if wishes.max_lora_rank is not None or wishes.full_training:
        yield wishes.max_lora_rank or 1
        return
    rank = VLLM_MAX_LORA_RANK
    while rank >= least:
        yield rank
        rank //= 2


def _placements(
    shape: Shape, machine: Machine, wishes: Wishes
) -> Iterator[tuple[Sequence[Gpu], Sequence[Sequence[Gpu]]]]:
    """GPUs of the trainer's ranks and of each sampler, the preferred placement first: near to the wanted share, few
    GPUs for each sampler, and no GPU idle."""
    gpus = sorted(machine.gpus, key=lambda gpu: -round(gpu.free_bytes / 1e9))
    if wishes.trainer_gpus is not None and wishes.sampler_gpus is not None:
        yield from _within(shape, wishes, wishes.trainer_gpus, wishes.sampler_gpus, host_bytes=machine.host_bytes)
        return
    if wishes.trainer_gpus is not None or wishes.sampler_gpus is not None:
        named = wishes.trainer_gpus if wishes.trainer_gpus is not None else wishes.sampler_gpus
        assert named is not None
        rest = [gpu for gpu in gpus if gpu not in named] or [*named]
        trains, samples = (named, rest) if wishes.trainer_gpus is not None else (rest, named)
        yield from _within(shape, wishes, trains, samples, host_bytes=machine.host_bytes)
        return
    if len(gpus) == 1:
        yield from _within(shape, wishes, gpus, gpus, host_bytes=machine.host_bytes)
        return
    # Last, trainer and sampler together on the GPU that has most free, if the others have too little.
    found = [
        ((float(len(gpus)), 1, 0, 0), *one)
        for one in _within(shape, wishes, gpus[:1], gpus[:1], host_bytes=machine.host_bytes)
    ]
    orders = [gpus] if len({round(gpu.free_bytes / 1e9) for gpu in gpus}) == 1 else [gpus, gpus[::-1]]
    for order, ordered in enumerate(orders):
        for count in range(1, len(gpus)):
            for trains, samplers in _within(
                shape, wishes, ordered[:count], ordered[count:], host_bytes=machine.host_bytes
            ):
                used = len(trains) + sum(map(len, samplers))
                distance = abs(len(trains) / len(gpus) - wishes.train_share)
                found.append(((distance, len(samplers[0]), -used, order), trains, samplers))
    for _, trains, samplers in sorted(found, key=lambda one: one[0]):
        yield trains, samplers


def _within(
    shape: Shape, wishes: Wishes, trains: Sequence[Gpu], samples: Sequence[Gpu], *, host_bytes: int
) -> Iterator[tuple[Sequence[Gpu], Sequence[Sequence[Gpu]]]]:
    """The ways in which the ranks use `trains` and the samplers `samples`."""
    trains = trains[: wishes.ranks or (1 if trains[0].is_mig else None)]
    shared = set(trains) & set(samples)
    if shared and (len(trains) > 1 or list(trains) != list(samples)[:1]):
        ids = ", ".join(sorted(gpu.id for gpu in shared))
        raise UsageError(
            f"--trainer-gpus, --sampler-gpus: GPU {ids} is in both; trainer and sampler can share one GPU if it is the "
            "only one of both"
        )
    if wishes.ranks is not None and len(trains) != wishes.ranks:
        return
    if len(trains) % wishes.trainer_tensor_parallel or (len(trains) > 1 and any(gpu.is_mig for gpu in trains)):
        return
    # Each service loads the whole model into host memory first.
    max_samplers = max(1, host_bytes // _whole_bytes(shape, wishes, _dtype(wishes.trainer_dtype, "bfloat16")) - 1)
    for size in (1, 2, 4, 8, 16):
        if wishes.sampler_tensor_parallel not in (None, size) or size > len(samples):
            continue
        if size > 1 and (_engine(shape, wishes) == "torch" or not shape.divides(size)):
            continue
        groups = [list(samples[n : n + size]) for n in range(0, len(samples) - size + 1, size)]
        if shared:
            groups = groups[:1]
        if size > 1 and any(gpu.is_mig for group in groups for gpu in group):
            continue
        if wishes.samplers is None or wishes.samplers <= len(groups):
            yield trains, groups[: wishes.samplers or max_samplers]


def _impossible(shape: Shape, machine: Machine, wishes: Wishes) -> str:
    """The message about wishes for which these GPUs allow no placement."""
    count = len(machine.gpus)
    if wishes.sampler_tensor_parallel is not None and (
        not shape.divides(wishes.sampler_tensor_parallel) or _engine(shape, wishes) == "torch"
    ):
        return (
            f"SAMPLER_TENSOR_PARALLEL: {wishes.sampler_tensor_parallel} is not possible: it needs vLLM, and a model "
            f"whose {shape.heads} heads and {shape.kv_heads} key heads it divides"
        )
    wanted = f"--trainer-ranks {wishes.ranks or 'unset'}, --samplers {wishes.samplers or 'unset'}"
    tp = f"TRAINER_TENSOR_PARALLEL {wishes.trainer_tensor_parallel}"
    return (
        f"{wanted}, {tp}: the {count} GPUs here cannot be divided so; each rank takes one, and each sampler one for "
        "each part of the model. MIG instances cannot be joined"
    )


def _engine(shape: Shape, wishes: Wishes) -> str:
    """The engine of the samplers. vLLM has neither recurrent layers nor quantised weights here."""
    return "torch" if shape.recurrent or wishes.quantised else wishes.engine


def _fill(
    name: str,
    shape: Shape,
    machine: Machine,
    wishes: Wishes,
    *,
    trainer: Sequence[Gpu],
    samplers: Sequence[Sequence[Gpu]],
    rank: int,
) -> Plan:
    """The plan of this placement and rank. Raises DoesNotFit."""
    engine = _engine(shape, wishes)
    dtype = _dtype(wishes.trainer_dtype, "bfloat16")
    _check_loading(shape, machine, wishes, dtype, num_samplers=len(samplers))
    adapter_memory = _adapter_memory(shape, machine, wishes, engine=engine, rank=rank, num_samplers=len(samplers))
    for versions in [wishes.max_device_versions] if wishes.max_device_versions else [4, 2, 1]:
        try:
            of_trainer, of_samplers = _divided(
                shape,
                machine,
                wishes,
                engine=engine,
                dtype=dtype,
                trainer=trainer,
                samplers=samplers,
                rank=rank,
                adapter_memory=adapter_memory,
                versions=versions,
            )
        except DoesNotFit:
            if versions == (wishes.max_device_versions or 1) or engine == "torch":
                raise
            continue
        return Plan(
            name=name,
            shape=shape,
            machine=machine,
            wishes=wishes,
            device_type="cuda",
            engine=engine,
            dtype=dtype,
            rank=rank,
            device_versions=versions,
            adapter_memory_bytes=adapter_memory,
            trainer=of_trainer,
            samplers=of_samplers,
            notes=_notes(shape, machine),
        )
    raise AssertionError


def _divided(
    shape: Shape,
    machine: Machine,
    wishes: Wishes,
    *,
    engine: str,
    dtype: str,
    trainer: Sequence[Gpu],
    samplers: Sequence[Sequence[Gpu]],
    rank: int,
    adapter_memory: int,
    versions: int,
) -> tuple[TrainerPlan, Sequence[SamplerPlan]]:
    """The memory of each GPU. Raises DoesNotFit."""

    def sampler_rest(gpus: Sequence[Gpu]) -> tuple[int, int, int]:
        """Base weights, memory for adapters, and what is left, on each GPU."""
        base = memory.sampler_base_bytes(
            shape,
            _dtype(wishes.sampler_dtype, "bfloat16"),
            quantised=wishes.quantised,
            tensor_parallel=len(gpus),
        )
        slots = adapter_memory
        if engine == "vllm":
            slots = memory.slots_bytes(
                shape, dtype, rank=slot_rank(rank), count=versions, tensor_parallel=len(gpus)
            )  # fmt: skip
        free = min(gpu.free_bytes for gpu in gpus)
        return base, slots, int(TRAINING_SHARE["cuda"] * free) - base - slots - SAMPLER_PROCESS_BYTES[engine]

    if list(trainer) == list(samplers[0]):
        base, slots, rest = sampler_rest(trainer)
        of_trainer = memory.base_bytes(shape, dtype, quantised=wishes.quantised)
        rest -= of_trainer + TRAINER_PROCESS_BYTES
        for_training = wishes.memory_bytes or int(rest * wishes.train_share)
        where = f"GPU {trainer[0].id}, which trainer and sampler share,"
        if rest <= 0:
            raise DoesNotFit(
                f"{where} has {gb(trainer[0].free_bytes)} free, and base weights, adapters and processes of both "
                f"take {gb(int(TRAINING_SHARE['cuda'] * trainer[0].free_bytes) - rest)}"
            )
        training = _training(shape, machine, wishes, dtype, for_training, rank=rank, ranks=1, where=where)
        planned = TrainerPlan(trainer, 1, 1, False, of_trainer, training)
        left = rest - training.memory_bytes
        return planned, [_sampler(shape, wishes, trainer, base, slots, left, where=where)]
    planned = _trainer(shape, machine, wishes, dtype, trainer, rank=rank)
    return planned, [
        _sampler(shape, wishes, gpus, *sampler_rest(gpus), where=f"the sampler's {_named(gpus)}") for gpus in samplers
    ]


def _trainer(
    shape: Shape, machine: Machine, wishes: Wishes, dtype: str, gpus: Sequence[Gpu], *, rank: int
) -> TrainerPlan:
    """The trainer on GPUs of its own: with the whole base model on each if that leaves enough, else divided."""
    parallel, ranks = wishes.trainer_tensor_parallel, len(gpus)
    rows = ranks // parallel
    found: list[TrainerPlan] = []
    failure: DoesNotFit | None = None
    ways = [False, True] if wishes.shard_base is None else [wishes.shard_base]
    for shards in ways:
        if shards and (rows == 1 or wishes.full_training or wishes.quantised):
            continue
        base = memory.base_bytes(
            shape,
            dtype,
            quantised=wishes.quantised,
            shards=rows if shards else 1,
            tensor_parallel=parallel,
        )
        free = min(gpu.free_bytes for gpu in gpus) - base - TRAINER_PROCESS_BYTES
        where = f"the trainer's {_named(gpus)}"
        try:
            if free <= 0:
                raise DoesNotFit(
                    f"{where} has {gb(min(gpu.free_bytes for gpu in gpus))} free, and {gb(base)} of base weights "
                    "leave no room for training"
                )
            for_training = wishes.memory_bytes or training_bytes(free, "cuda")
            training = _training(shape, machine, wishes, dtype, for_training, rank=rank, ranks=ranks, where=where)
            if wishes.memory_bytes > free:
                raise DoesNotFit(
                    f"TRAINER_MEMORY_BYTES: {wishes.memory_bytes} is more than the {max(0, free)} that {where} leave"
                )
        except DoesNotFit as error:
            failure = error
            continue
        found.append(TrainerPlan(gpus, ranks, parallel, shards, base, training))
        is_comfortable = training.longest >= min(shape.context, COMFORTABLE_CONTEXT) and training.adapters_on_device > 1
        if is_comfortable:
            return found[-1]
    if found:
        return found[-1]
    raise failure or DoesNotFit("TRAINER_SHARD_BASE: true needs at least two ranks that divide the datums")


def _training(
    shape: Shape,
    machine: Machine,
    wishes: Wishes,
    dtype: str,
    for_training: int,
    *,
    rank: int,
    ranks: int,
    where: str,
) -> Training:
    """Raises DoesNotFit if the memory does not suffice for a sequence of LEAST_CONTEXT tokens."""
    if wishes.full_training:
        needed = memory.full_training_bytes(shape)
        if for_training < needed:
            raise DoesNotFit(
                f"{where} leaves {gb(for_training)} for training, and gradients and moments of all parameters take "
                f"{gb(needed)}"
            )
        return Training(for_training, 1, 1, shape.context)
    training = Training.within(
        for_training,
        shape,
        dtype,
        rank=rank,
        host_bytes=machine.host_bytes,
        ranks=ranks,
        max_models=wishes.max_models,
        tensor_parallel=wishes.trainer_tensor_parallel,
    )
    step_bytes = full_bytes(memory.adapter_bytes(shape, rank))  # a step has all of a model on the device
    if training.longest < min(shape.context, LEAST_CONTEXT) or step_bytes > for_training:
        raise DoesNotFit(
            f"{where} leaves {gb(for_training)} for training, an adapter of rank {rank} with its optimizer takes "
            f"{gb(step_bytes)}, and the longest sequence would have "
            f"{training.longest} tokens"
        )
    return training


def _sampler(
    shape: Shape, wishes: Wishes, gpus: Sequence[Gpu], base: int, slots: int, rest: int, *, where: str
) -> SamplerPlan:
    """Raises DoesNotFit."""
    size = len(gpus)
    per_token = memory.kv_bytes_per_token(shape, _dtype(wishes.sampler_dtype, "bfloat16"), tensor_parallel=size)
    prefix = max(0, rest) // PREFIX_PART if wishes.prefix_cache_bytes is None else wishes.prefix_cache_bytes
    most = wishes.max_running * shape.context
    tokens = wishes.max_kv_tokens or min(most, max(0, rest) // KV_PART // per_token)
    if tokens < min(shape.context, LEAST_KV_TOKENS) or tokens * per_token + prefix > rest:
        free = min(gpu.free_bytes for gpu in gpus)
        raise DoesNotFit(
            f"{where} has {gb(free)} free, and {gb(base)} of base weights and {gb(slots)} of adapters leave room for "
            f"{max(0, rest) // KV_PART // per_token} tokens of keys and values"
        )
    return SamplerPlan(gpus, base, slots, tokens, per_token, prefix)


def _adapter_memory(
    shape: Shape, machine: Machine, wishes: Wishes, *, engine: str, rank: int, num_samplers: int
) -> int:
    """Bytes of each sampler for versions. vLLM keeps them in host memory, where four of the largest rank may lie if
    they take at most a quarter of it. Raises DoesNotFit if not even one has room."""
    default = 2 * 1024**3
    one = memory.ADAPTER_BYTES * shape.parameters if wishes.full_training else memory.adapter_bytes(shape, rank)
    chosen = wishes.adapter_memory_bytes or default
    if wishes.adapter_memory_bytes is None and engine == "vllm":
        chosen = max(default, min(4 * one, machine.host_bytes // 4 // num_samplers))
    if wishes.full_training and wishes.adapter_memory_bytes is None:
        chosen = max(chosen, one)
    if one > chosen:
        raise DoesNotFit(
            f"an adapter of rank {rank} takes {gb(one)} in a sampler, whose memory for adapters is {gb(chosen)}"
        )
    return chosen


def _whole_bytes(shape: Shape, wishes: Wishes, dtype: str) -> int:
    return memory.base_bytes(shape, dtype, quantised=wishes.quantised)


def _check_loading(shape: Shape, machine: Machine, wishes: Wishes, dtype: str, *, num_samplers: int) -> None:
    needed = _whole_bytes(shape, wishes, dtype) * (1 + num_samplers)
    if needed > machine.host_bytes:
        raise DoesNotFit(
            f"trainer and {num_samplers} samplers load the base weights into host memory first, {gb(needed)} "
            f"together, and {gb(machine.host_bytes)} of it are free"
        )


def _on_cpu(name: str, shape: Shape, machine: Machine, wishes: Wishes) -> Plan:
    """All services in host memory, with what they find there by themselves. Raises DoesNotFit if the weights alone do
    not fit."""
    ranks, num_samplers = wishes.ranks or 1, wishes.samplers or 1
    parallel = wishes.trainer_tensor_parallel
    dtype, sampler_dtype = _dtype(wishes.trainer_dtype, "float32"), _dtype(wishes.sampler_dtype, "float32")
    rows = ranks // parallel if not ranks % parallel else 1
    of_trainer = memory.base_bytes(
        shape,
        dtype,
        quantised=wishes.quantised,
        shards=rows if wishes.shard_base else 1,
        tensor_parallel=parallel,
    )
    of_sampler = memory.base_bytes(shape, sampler_dtype, quantised=wishes.quantised)
    weights = ranks * of_trainer + num_samplers * of_sampler
    if weights > machine.host_bytes:
        raise DoesNotFit(
            f"base weights of {ranks} trainer rank(s) in {dtype} and {num_samplers} sampler(s) in {sampler_dtype} take "
            f"{gb(weights)}, and {gb(machine.host_bytes)} of host memory are free"
        )
    left = machine.host_bytes - weights

    def with_rank(rank: int) -> Training:
        return Training.within(
            wishes.memory_bytes or training_bytes(left, "cpu") // ranks,
            shape,
            dtype,
            rank=rank,
            host_bytes=left,
            ranks=ranks,
            max_models=wishes.max_models,
            device_type="cpu",
        )

    # The trainer accepts larger ranks, too, and then refuses runs for which there is no memory.
    tried = [wishes.max_lora_rank] if wishes.max_lora_rank else [256, 128, 64, 32, 16, 8, 4, 2, 1]
    rank = next((rank for rank in tried if with_rank(rank).adapters), tried[-1])
    training = with_rank(rank)
    per_token = memory.kv_bytes_per_token(shape, sampler_dtype)
    tokens = kv_tokens(left, per_token, max_running=wishes.max_running, max_context=shape.context)
    prefix = prefix_cache_bytes(left) if wishes.prefix_cache_bytes is None else wishes.prefix_cache_bytes
    adapter_memory = wishes.adapter_memory_bytes or 2 * 1024**3
    sampler = SamplerPlan([], of_sampler, adapter_memory, wishes.max_kv_tokens or tokens, per_token, prefix)
    return Plan(
        name=name,
        shape=shape,
        machine=machine,
        wishes=wishes,
        device_type="cpu",
        engine="torch",
        dtype=dtype,
        rank=rank,
        device_versions=1,
        adapter_memory_bytes=adapter_memory,
        trainer=TrainerPlan([], ranks, parallel, bool(wishes.shard_base), of_trainer, training),
        samplers=[sampler] * num_samplers,
        notes=_notes(shape, machine),
    )


def _notes(shape: Shape, machine: Machine) -> list[str]:
    return [note for note in (shape.note, machine.note) if note]


def _changes(shape: Shape, machine: Machine, wishes: Wishes) -> Iterator[tuple[str, Machine, Wishes]]:
    """Changes that may make a model fit, the smallest first."""
    for count in range((wishes.samplers or 1) - 1, 0, -1):
        yield f"--samplers {count}", machine, replace(wishes, samplers=count)
    for rank in _lower_ranks(wishes):
        yield f"--max-lora-rank {rank}", machine, replace(wishes, max_lora_rank=rank)
    if wishes.shard_base is False:
        yield "leave out TRAINER_SHARD_BASE=false", machine, replace(wishes, shard_base=None)
    for name, cleared in _settings(wishes).items():
        yield f"leave out {name}", machine, cleared
    if not machine.gpus:
        if "bfloat16" not in (wishes.trainer_dtype, wishes.sampler_dtype):
            yield "--dtype bfloat16", machine, replace(wishes, trainer_dtype="bfloat16", sampler_dtype="bfloat16")
        for quantised in wishes.quantisations if not wishes.quantised else ():
            yield f"--quantize {quantised}", machine, replace(wishes, quantised=quantised)
        needed = replace(machine, host_bytes=2**62)
        yield "more host memory, or GPUs", needed, wishes
        return
    if wishes.engine == "torch" and not shape.recurrent and not wishes.quantised:
        yield "--engine vllm (pip install 'tinsmith[vllm]')", machine, replace(wishes, engine="vllm")
    idle = [replace(gpu, free_bytes=max(gpu.free_bytes, int(0.99 * gpu.total_bytes))) for gpu in machine.gpus]
    if any(gpu.total_bytes - gpu.free_bytes > 0.05 * gpu.total_bytes for gpu in machine.gpus):
        used = sum(gpu.total_bytes - gpu.free_bytes for gpu in machine.gpus)
        others = replace(
            wishes, trainer_gpus=_same(wishes.trainer_gpus, idle), sampler_gpus=_same(wishes.sampler_gpus, idle)
        )
        yield f"end the processes that hold {gb(used)} of these GPUs", replace(machine, gpus=idle), others
    for quantised in wishes.quantisations if not wishes.quantised and not wishes.full_training else ():
        yield f"--quantize {quantised} --engine torch", machine, replace(wishes, quantised=quantised)
    best = max(machine.gpus, key=lambda gpu: gpu.free_bytes)
    anywhere = replace(wishes, trainer_gpus=None, sampler_gpus=None, ranks=None, samplers=None)
    with_vllm = wishes.engine == "torch" and not shape.recurrent and not wishes.quantised
    for count in _MOST_GPUS if not best.is_mig else ():
        if count <= len(machine.gpus):
            continue
        more = [replace(best, id=str(number), uuid=str(number)) for number in range(count)]
        larger = replace(machine, gpus=more, host_bytes=2**62)
        text = f"{count} GPUs with {gb(best.free_bytes)} free, as {best.name}"
        if count > 8:
            text += ", on several machines (docs/quickstart-gpu.md)"
        yield text, larger, anywhere
        if with_vllm:
            yield f"{text}, with --engine vllm", larger, replace(anywhere, engine="vllm")
    for count in (1, 2, 4, 8) if best.is_mig else ():
        whole = [Gpu(str(number), "GPU", 85_000_000_000, 84_000_000_000) for number in range(count)]
        text = f"{count} whole GPU{'' if count == 1 else 's'} of 80 GB instead of MIG instances, which cannot be joined"
        yield text, replace(machine, gpus=whole, host_bytes=2**62), anywhere


def _same(named: Sequence[Gpu] | None, gpus: Sequence[Gpu]) -> list[Gpu] | None:
    return None if named is None else [gpu for gpu in gpus if gpu.id in {one.id for one in named}]


def _lower_ranks(wishes: Wishes) -> Iterator[int]:
    if wishes.max_lora_rank is not None:
        yield from (rank for rank in VLLM_RANKS[::-1] if rank < wishes.max_lora_rank)


def _settings(wishes: Wishes) -> Mapping[str, Wishes]:
    """The wishes without each setting that binds the planner."""
    cleared: dict[str, Wishes] = {}
    if wishes.memory_bytes:
        cleared["TRAINER_MEMORY_BYTES"] = replace(wishes, memory_bytes=0)
    if wishes.max_kv_tokens:
        cleared["SAMPLER_MAX_KV_TOKENS"] = replace(wishes, max_kv_tokens=0)
    if wishes.prefix_cache_bytes is not None:
        cleared["SAMPLER_PREFIX_CACHE_BYTES"] = replace(wishes, prefix_cache_bytes=None)
    if wishes.adapter_memory_bytes is not None:
        cleared["SAMPLER_ADAPTER_MEMORY_BYTES"] = replace(wishes, adapter_memory_bytes=None)
    if wishes.max_device_versions is not None:
        cleared["SAMPLER_MAX_DEVICE_VERSIONS"] = replace(wishes, max_device_versions=None)
    if wishes.sampler_tensor_parallel is not None:
        cleared["SAMPLER_TENSOR_PARALLEL"] = replace(wishes, sampler_tensor_parallel=None)
    if wishes.ranks is not None:
        cleared["--trainer-ranks"] = replace(wishes, ranks=None)
    if wishes.trainer_gpus is not None or wishes.sampler_gpus is not None:
        cleared["--trainer-gpus and --sampler-gpus"] = replace(wishes, trainer_gpus=None, sampler_gpus=None)
    return cleared


def _dtype(wanted: str, default: str) -> str:
    return default if wanted == "auto" else wanted


def _named(gpus: Sequence[Gpu]) -> str:
    ids = ", ".join(gpu.id for gpu in gpus)
    return f"GPU {ids}" if len(gpus) == 1 else f"GPUs {ids}"
