"""Fits the services into the memory of a placement: base weights first, then adapters, then training and caches.

All formulas use 0.9 of a GPU's free memory. The bytes of a process beside weights and caches are assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.formatting import size_text as gb
from tinsmith.sizing import (
    MAX_LORA_RANK,
    TRAINING_SHARE,
    full_bytes,
    kv_tokens,
    prefix_cache_bytes,
    slot_rank,
    training_bytes,
)
from tinsmith_cli.planning import memory
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.machine import Gpu, Machine
from tinsmith_cli.planning.memory import TrainingCapacity
from tinsmith_cli.planning.plan import NO_TRAINER, DoesNotFit, Plan, SamplerPlan, TrainerPlan
from tinsmith_cli.planning.shape import Shape

TRAINER_PROCESS_BYTES = 1_000_000_000
"""Assumed bytes of a trainer on a GPU beside weights and training: CUDA's context, NCCL's buffers and cuBLAS'
workspaces."""
SAMPLER_PROCESS_BYTES = {"vllm": 3_000_000_000, "torch": 2_000_000_000}
"""Assumed bytes of a sampler on a GPU beside weights and caches: CUDA's context, graphs and the activations of a
step."""
KV_PART, PREFIX_PART = 2, 4
"""Divisors of a sampler's own memory: keys and values get half of it, and the prefix cache a quarter. The rest is for
steps."""
LEAST_CONTEXT = 1024
"""A model fits only if the trainer can take a sequence of this length, in tokens."""
LEAST_KV_TOKENS = 4096
"""A model fits only if each sampler has at least this many tokens of keys and values."""
COMFORTABLE_CONTEXT = 8192
"""The ranks of a trainer divide the base model's memory if, with the whole base model on each rank, the trainer could
not take a sequence of this length, in tokens, or not two adapters."""


def engine_of(shape: Shape, constraints: Constraints) -> str:
    """The engine of the samplers. It is torch for quantised weights, which vLLM does not have here. For a model with
    recurrent layers it is torch unless the user names vLLM, because vLLM's kernels for these layers have not run on a
    GPU here. The states of these layers take no more than the part of the memory that is for steps
    (`tinsmith.sizing.STATES_SHARE`)."""
    if constraints.quantised or (shape.recurrent and not constraints.names_engine):
        return "torch"
    return constraints.engine


def fill(
    name: str,
    shape: Shape,
    machine: Machine,
    constraints: Constraints,
    *,
    trainer: Sequence[Gpu],
    samplers: Sequence[Sequence[Gpu]],
    rank: int,
) -> Plan:
    """The plan for a placement. `trainer`: GPUs of the trainers. `samplers`: GPUs of each sampler. `rank`: largest rank
    of adapters. Raises DoesNotFit."""
    engine = engine_of(shape, constraints)
    dtype = dtype_of(constraints.trainer_dtype, "bfloat16")
    adapter_memory = _adapter_memory(shape, machine, constraints, engine=engine, rank=rank, num_samplers=len(samplers))
    for versions in [constraints.max_device_versions] if constraints.max_device_versions else [4, 2, 1]:
        try:
            of_trainer, of_samplers = _divided(
                shape,
                machine,
                constraints,
                engine=engine,
                dtype=dtype,
                trainer=trainer,
                samplers=samplers,
                rank=rank,
                adapter_memory=adapter_memory,
                versions=versions,
            )
        except DoesNotFit:
            if versions == (constraints.max_device_versions or 1) or engine == "torch":
                raise
            continue
        plan = Plan(
            name=name,
            shape=shape,
            machine=machine,
            constraints=constraints,
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
        _check_loading(plan)
        return plan
    raise AssertionError


def _divided(
    shape: Shape,
    machine: Machine,
    constraints: Constraints,
    *,
    engine: str,
    dtype: str,
    trainer: Sequence[Gpu],
    samplers: Sequence[Sequence[Gpu]],
    rank: int,
    adapter_memory: int,
    versions: int,
) -> tuple[TrainerPlan, Sequence[SamplerPlan]]:
    """Divides the memory of each GPU. `adapter_memory`: memory of each sampler for versions, in bytes. `versions`:
    number of vLLM's slots for adapters. Raises DoesNotFit."""

    def sampler_rest(gpus: Sequence[Gpu]) -> tuple[int, int, int]:
        """Bytes of base weights, of adapters, and of the remaining memory, on each GPU of a sampler."""
        base = memory.sampler_base_bytes(
            shape,
            dtype_of(constraints.sampler_dtype, "bfloat16"),
            quantised=constraints.quantised,
            tensor_parallel=len(gpus),
        )
        slots = adapter_memory
        if engine == "vllm":
            slots = memory.slots_bytes(
                shape, dtype, rank=slot_rank(rank), count=versions, tensor_parallel=len(gpus)
            )  # fmt: skip
        free = min(gpu.free_bytes for gpu in gpus)
        return base, slots, int(TRAINING_SHARE["cuda"] * free) - base - slots - SAMPLER_PROCESS_BYTES[engine]

    if samplers and list(trainer) == list(samplers[0]):
        base, slots, rest = sampler_rest(trainer)
        of_trainer = memory.base_bytes(shape, dtype, quantised=constraints.quantised)
        rest -= of_trainer + TRAINER_PROCESS_BYTES
        for_training = constraints.memory_bytes or int(rest * constraints.train_share)
        where = f"GPU {trainer[0].id}, which trainer and sampler share,"
        if rest <= 0:
            raise DoesNotFit(
                f"{where} has {gb(trainer[0].free_bytes)} free, and base weights, adapters and processes of both "
                f"take {gb(int(TRAINING_SHARE['cuda'] * trainer[0].free_bytes) - rest)}"
            )
        training = _training(shape, machine, constraints, dtype, for_training, rank=rank, ranks=1, where=where)
        planned = TrainerPlan(trainer, 1, 1, False, of_trainer, training)
        left = rest - training.memory_bytes
        return planned, [_sampler(shape, constraints, trainer, base, slots, left, where=where)]
    own = _trainer(shape, machine, constraints, dtype, trainer, rank=rank) if trainer else NO_TRAINER
    return own, [
        _sampler(shape, constraints, gpus, *sampler_rest(gpus), where=f"the sampler's {gpus_text(gpus)}")
        for gpus in samplers
    ]


def _trainer(
    shape: Shape, machine: Machine, constraints: Constraints, dtype: str, gpus: Sequence[Gpu], *, rank: int
) -> TrainerPlan:
    """Plans trainers on GPUs of their own. The GPU with least memory decides for all of them. Each GPU holds the whole
    base model if that leaves enough memory; otherwise the ranks of each trainer divide it. Raises DoesNotFit."""
    parallel, ranks = constraints.trainer_tensor_parallel, len(gpus) // constraints.trainers
    rows = ranks * constraints.nodes // parallel
    whose = "the trainer's" if constraints.trainers == 1 else "the trainers'"
    found: list[TrainerPlan] = []
    failure: DoesNotFit | None = None
    ways = [False, True] if constraints.shard_base is None else [constraints.shard_base]
    for shards in ways:
        if shards and (rows == 1 or constraints.full_training or constraints.quantised):
            continue
        base = memory.base_bytes(
            shape,
            dtype,
            quantised=constraints.quantised,
            shards=rows if shards else 1,
            tensor_parallel=parallel,
        )
        free = min(gpu.free_bytes for gpu in gpus) - base - TRAINER_PROCESS_BYTES
        where = f"{whose} {gpus_text(gpus)}"
        try:
            if free <= 0:
                raise DoesNotFit(
                    f"{where} has {gb(min(gpu.free_bytes for gpu in gpus))} free, and {gb(base)} of base weights "
                    "leave no room for training"
                )
            for_training = constraints.memory_bytes or training_bytes(free, "cuda")
            here = len(gpus)  # the ranks of all trainers divide the host memory for idle adapters
            training = _training(shape, machine, constraints, dtype, for_training, rank=rank, ranks=here, where=where)
            if constraints.memory_bytes > free:
                raise DoesNotFit(
                    f"TRAINER_MEMORY_BYTES: {constraints.memory_bytes} is more than the {max(0, free)} that "
                    f"{where} leave"
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
    constraints: Constraints,
    dtype: str,
    for_training: int,
    *,
    rank: int,
    ranks: int,
    where: str,
) -> TrainingCapacity:
    """The adapters and sequences for which `for_training` bytes suffice. `where`: the GPUs, for messages. Raises
    DoesNotFit if the bytes do not suffice for a sequence of LEAST_CONTEXT tokens, or for a step with one adapter."""
    if constraints.full_training:
        needed = memory.full_training_bytes(shape)
        if for_training < needed:
            raise DoesNotFit(
                f"{where} leaves {gb(for_training)} for training, and gradients and moments of all parameters take "
                f"{gb(needed)}"
            )
        return TrainingCapacity(for_training, 1, 1, shape.context)
    training = TrainingCapacity.within(
        for_training,
        shape,
        dtype,
        rank=rank,
        host_bytes=machine.host_bytes,
        ranks=ranks,
        max_models=constraints.max_models,
        tensor_parallel=constraints.trainer_tensor_parallel,
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
    shape: Shape, constraints: Constraints, gpus: Sequence[Gpu], base: int, slots: int, rest: int, *, where: str
) -> SamplerPlan:
    """Plans a sampler. `base`, `slots`, `rest`: bytes on each GPU for base weights and for adapters, and remaining
    bytes. `where`: the GPUs, for messages. Raises DoesNotFit."""
    size = len(gpus)
    per_token = memory.kv_bytes_per_token(shape, dtype_of(constraints.sampler_dtype, "bfloat16"), tensor_parallel=size)
    prefix = max(0, rest) // PREFIX_PART if constraints.prefix_cache_bytes is None else constraints.prefix_cache_bytes
    most = constraints.max_running * shape.context
    tokens = constraints.max_kv_tokens or min(most, max(0, rest) // KV_PART // per_token)
    if tokens < min(shape.context, LEAST_KV_TOKENS) or tokens * per_token + prefix > rest:
        free = min(gpu.free_bytes for gpu in gpus)
        raise DoesNotFit(
            f"{where} has {gb(free)} free, and {gb(base)} of base weights and {gb(slots)} of adapters leave room for "
            f"{max(0, rest) // KV_PART // per_token} tokens of keys and values"
        )
    return SamplerPlan(gpus, base, slots, tokens, per_token, prefix)


def _adapter_memory(
    shape: Shape, machine: Machine, constraints: Constraints, *, engine: str, rank: int, num_samplers: int
) -> int:
    """Memory of each sampler for versions, in bytes: 2 GiB by default. vLLM keeps versions in host memory, and gets
    enough for four adapters of the largest rank, but at most a quarter of the host memory for all samplers together.
    Raises DoesNotFit if not even one adapter fits in."""
    default = 2 * 1024**3
    one = memory.ADAPTER_BYTES * shape.parameters if constraints.full_training else memory.adapter_bytes(shape, rank)
    chosen = constraints.adapter_memory_bytes or default
    if constraints.adapter_memory_bytes is None and engine == "vllm":
        chosen = max(default, min(4 * one, machine.host_bytes // 4 // max(1, num_samplers)))
    if constraints.full_training and constraints.adapter_memory_bytes is None:
        chosen = max(chosen, one)
    if one > chosen:
        raise DoesNotFit(
            f"an adapter of rank {rank} takes {gb(one)} in a sampler, whose memory for adapters is {gb(chosen)}"
        )
    return chosen


def _check_loading(plan: Plan) -> None:
    needed, free = plan.loading_bytes, plan.machine.host_bytes
    if needed > free:
        num_trainers, num_samplers = plan.num_trainers, len(plan.samplers)
        trainers = ["trainer"] if num_trainers == 1 else [f"{num_trainers} trainers"] * bool(num_trainers)
        who = " and ".join([*trainers, *[f"{num_samplers} samplers"] * bool(num_samplers)])
        raise DoesNotFit(
            f"{who} load the base weights into host memory first, {gb(needed)} together, and {gb(free)} of it are free"
        )


def on_cpu(name: str, shape: Shape, machine: Machine, constraints: Constraints) -> Plan:
    """Foresees how the services divide host memory by themselves. Raises DoesNotFit if the base weights alone do not
    fit."""
    ranks = (constraints.ranks or 1) if constraints.trains else 0
    num_samplers = (constraints.samplers or 1) if constraints.samples else 0
    parallel = constraints.trainer_tensor_parallel
    dtype, sampler_dtype = (
        dtype_of(constraints.trainer_dtype, "float32"),
        dtype_of(constraints.sampler_dtype, "float32"),
    )
    rows = ranks * constraints.nodes // parallel if not ranks * constraints.nodes % parallel else 1
    of_trainer = memory.base_bytes(
        shape,
        dtype,
        quantised=constraints.quantised,
        shards=rows if constraints.shard_base else 1,
        tensor_parallel=parallel,
    )
    of_sampler = memory.base_bytes(shape, sampler_dtype, quantised=constraints.quantised)
    all_ranks = ranks * constraints.trainers
    weights = all_ranks * of_trainer + num_samplers * of_sampler
    if weights > machine.host_bytes:
        raise DoesNotFit(
            f"base weights of {all_ranks} trainer rank(s) in {dtype} and {num_samplers} sampler(s) in {sampler_dtype} "
            f"take {gb(weights)}, and {gb(machine.host_bytes)} of host memory are free"
        )
    left = machine.host_bytes - weights
    rank, training = _training_on_cpu(shape, dtype, constraints, left=left, num_ranks=max(1, all_ranks))
    trainer = NO_TRAINER
    if constraints.trains:
        trainer = TrainerPlan([], ranks, parallel, bool(constraints.shard_base), of_trainer, training)
    adapter_memory = constraints.adapter_memory_bytes or 2 * 1024**3
    per_token = memory.kv_bytes_per_token(shape, sampler_dtype)
    tokens = kv_tokens(left, per_token, max_running=constraints.max_running, max_context=shape.context)
    prefix = prefix_cache_bytes(left) if constraints.prefix_cache_bytes is None else constraints.prefix_cache_bytes
    sampler = SamplerPlan([], of_sampler, adapter_memory, constraints.max_kv_tokens or tokens, per_token, prefix)
    return Plan(
        name=name,
        shape=shape,
        machine=machine,
        constraints=constraints,
        device_type="cpu",
        engine="torch",
        dtype=dtype,
        rank=rank,
        device_versions=1,
        adapter_memory_bytes=adapter_memory,
        trainer=trainer,
        samplers=[sampler] * num_samplers,
        notes=_notes(shape, machine),
    )


def _training_on_cpu(
    shape: Shape, dtype: str, constraints: Constraints, *, left: int, num_ranks: int
) -> tuple[int, TrainingCapacity]:
    """The largest rank of which an adapter fits in memory, and the training with it; the smallest rank if no adapter
    fits. `left`: host memory beside the base weights, in bytes."""

    def with_rank(rank: int) -> TrainingCapacity:
        return TrainingCapacity.within(
            constraints.memory_bytes or training_bytes(left, "cpu") // num_ranks,
            shape,
            dtype,
            rank=rank,
            host_bytes=left,
            ranks=num_ranks,
            max_models=constraints.max_models,
            device_type="cpu",
        )

    # The trainer accepts larger ranks, too, and then refuses runs for which there is no memory.
    tried = (
        [constraints.max_lora_rank]
        if constraints.max_lora_rank
        else [MAX_LORA_RANK >> halvings for halvings in range(9)]
    )
    rank = next((rank for rank in tried if with_rank(rank).adapters), tried[-1])
    return rank, with_rank(rank)


def _notes(shape: Shape, machine: Machine) -> list[str]:
    return [note for note in (shape.note, machine.note) if note]


def dtype_of(wanted: str, default: str) -> str:
    """The type of base weights: `wanted`, or `default` for "auto"."""
    return default if wanted == "auto" else wanted


def gpus_text(gpus: Sequence[Gpu]) -> str:
    """The GPUs in words, for messages."""
    ids = ", ".join(gpu.id for gpu in gpus)
    return f"GPU {ids}" if len(gpus) == 1 else f"GPUs {ids}"
