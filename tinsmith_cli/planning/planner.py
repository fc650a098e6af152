"""Divides the GPUs and their memory between the trainer and the samplers of one base model.

On a machine with one GPU, trainer and sampler share it, each with a fixed part of the memory. With several GPUs, the
trainer gets the wanted share of them, or as many as the model needs, and the samplers get the others. The ranks of a
trainer divide the memory of the base model (`shard_base`) if the whole base model leaves too little of a GPU. A vLLM
sampler divides the model among the fewest GPUs that hold it. Several trainers get equal numbers of GPUs of their own.
The remaining memory of each GPU goes into caches and training memory, by the services' rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinsmith.formatting import size_text as gb
from tinsmith.sizing import MAX_LORA_RANK, TRAINING_SHARE, VLLM_MAX_LORA_RANK
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.changes import changes
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.fit import COMFORTABLE_CONTEXT, dtype_of, engine_of, fill, gpus_text, on_cpu
from tinsmith_cli.planning.machine import Gpu, Machine
from tinsmith_cli.planning.plan import DoesNotFit, Plan, whole_bytes
from tinsmith_cli.planning.shape import Shape

COMFORTABLE_KV_TOKENS = 32768
"""A sampler with at least this many tokens of keys and values is comfortable."""
_ATTEMPTS = ((32, True), (32, False), (8, False), (1, False))
"""Demands on a placement, the highest first: the least rank, unless the user gives one, and whether trainer and
samplers must be comfortable. The first placement that meets the highest possible demand is taken."""


def plan(name: str, shape: Shape, machine: Machine, constraints: Constraints) -> Plan:
    """The plan for a base model. Raises DoesNotFit, with the smallest change by which the model would fit, and
    UsageError for constraints that contradict each other."""
    try:
        return _plan(name, shape, machine, constraints)
    except DoesNotFit as error:
        reason = "; note: ".join(filter(None, [error.reason, shape.note]))
        for change, other_machine, other in changes(shape, machine, constraints):
            try:
                _plan(name, shape, other_machine, other)
            except UsageError:
                continue
            raise DoesNotFit(reason, f"the smallest change that makes it fit: {change}") from None
        raise DoesNotFit(reason, "no change helps, nor do more GPUs of this kind" if machine.gpus else "") from None


def _plan(name: str, shape: Shape, machine: Machine, constraints: Constraints) -> Plan:
    if not machine.gpus:
        return on_cpu(name, shape, machine, constraints)
    _check_together(shape, machine, constraints)
    failure: DoesNotFit | None = None
    fewest = len(machine.gpus)
    for least, comfortable in _ATTEMPTS:
        for trainer, samplers in _placements(shape, machine, constraints):
            for rank in _ranks(shape, constraints, least=least):
                try:
                    planned = fill(name, shape, machine, constraints, trainer=trainer, samplers=samplers, rank=rank)
                except DoesNotFit as error:
                    # The placement with the fewest samplers gives the reason: more samplers may fail for more reasons.
                    if failure is None or len(samplers) < fewest:
                        failure, fewest = error, len(samplers)
                    continue
                if not comfortable or _is_comfortable(planned):
                    return planned
                break  # a lower rank is not preferred to another placement
    raise failure or UsageError(_impossible(shape, machine, constraints))


def _is_comfortable(planned: Plan) -> bool:
    trainer, context = planned.trainer, planned.shape.context
    return (not trainer.ranks or trainer.training.longest >= min(context, COMFORTABLE_CONTEXT)) and all(
        sampler.kv_tokens >= min(context, COMFORTABLE_KV_TOKENS) for sampler in planned.samplers
    )


def _check_together(shape: Shape, machine: Machine, constraints: Constraints) -> None:
    """Raises DoesNotFit if there are fewer GPUs than trainers, or if all GPUs together cannot hold the base weights of
    each trainer and of a sampler."""
    gpus = set(machine.gpus)
    for_trainers = gpus if constraints.trainer_gpus is None else set(constraints.trainer_gpus)
    count, ranks = constraints.trainers, constraints.ranks or constraints.trainer_tensor_parallel
    if constraints.trains and count > 1:
        beside = for_trainers is gpus and constraints.samples
        if len(for_trainers) < count * ranks + beside:
            raise DoesNotFit(
                f"--trainers: {count} trainers need {count * ranks} GPUs of their own"
                f"{', and a sampler one more' if beside else ''}, and there are {len(for_trainers)}"
            )
    if not constraints.trains or not constraints.samples:
        return
    if constraints.trainer_gpus is not None and constraints.sampler_gpus is not None:
        gpus = {*constraints.trainer_gpus, *constraints.sampler_gpus}
    free = sum(gpu.free_bytes for gpu in gpus)
    needed = (count + 1) * whole_bytes(shape, constraints, dtype_of(constraints.trainer_dtype, "bfloat16"))
    if needed > TRAINING_SHARE["cuda"] * free:
        raise DoesNotFit(
            f"the base weights take {gb(needed)} in {'trainer' if count == 1 else f'{count} trainers'} and sampler "
            f"together, and {gb(free)} are free on "
            f"{gpus_text(sorted(gpus, key=lambda gpu: gpu.id))}"
        )


def _ranks(shape: Shape, constraints: Constraints, *, least: int) -> Iterator[int]:
    """The largest ranks of adapters to try: the user's, else the services' default and halves of it, down to
    `least`."""
    if constraints.max_lora_rank is not None or constraints.full_training:
        yield constraints.max_lora_rank or 1
        return
    rank = VLLM_MAX_LORA_RANK if engine_of(shape, constraints) == "vllm" else MAX_LORA_RANK
    while rank >= least:
        yield rank
        rank //= 2


def _placements(
    shape: Shape, machine: Machine, constraints: Constraints
) -> Iterator[tuple[Sequence[Gpu], Sequence[Sequence[Gpu]]]]:
    """Placements, the preferred one first: the GPUs of the trainers' ranks, and the GPUs of each sampler. A placement
    is preferred if it is near to the wanted share, has few GPUs for each sampler, and leaves no GPU idle."""
    gpus = sorted(machine.gpus, key=lambda gpu: -round(gpu.free_bytes / 1e9))
    if not constraints.trains:
        samples = gpus if constraints.sampler_gpus is None else constraints.sampler_gpus
        yield from _within(shape, constraints, [], samples)
        return
    if not constraints.samples:
        trains = gpus if constraints.trainer_gpus is None else constraints.trainer_gpus
        for count in range(len(trains), 0, -1):
            yield from _within(shape, constraints, trains[:count], [])
        return
    if constraints.trainer_gpus is not None and constraints.sampler_gpus is not None:
        yield from _within(shape, constraints, constraints.trainer_gpus, constraints.sampler_gpus)
        return
    if constraints.trainer_gpus is not None or constraints.sampler_gpus is not None:
        named = constraints.trainer_gpus if constraints.trainer_gpus is not None else constraints.sampler_gpus
        assert named is not None
        rest = [gpu for gpu in gpus if gpu not in named] or [*named]
        trains, samples = (named, rest) if constraints.trainer_gpus is not None else (rest, named)
        yield from _within(shape, constraints, trains, samples)
        return
    if len(gpus) == 1:
        yield from _within(shape, constraints, gpus, gpus)
        return
    # The last placement has trainer and sampler together on the GPU with most free memory. It is for machines whose
    # other GPUs have too little.
    found = [((float(len(gpus)), 1, 0, 0), *one) for one in _within(shape, constraints, gpus[:1], gpus[:1])]
    orders = [gpus] if len({round(gpu.free_bytes / 1e9) for gpu in gpus}) == 1 else [gpus, gpus[::-1]]
    for order, ordered in enumerate(orders):
        for count in range(1, len(gpus)):
            for trains, samplers in _within(shape, constraints, ordered[:count], ordered[count:]):
                used = len(trains) + sum(map(len, samplers))
                distance = abs(len(trains) / len(gpus) - constraints.train_share)
                found.append(((distance, len(samplers[0]), -used, order), trains, samplers))
    for _, trains, samplers in sorted(found, key=lambda one: one[0]):
        yield trains, samplers


def _within(
    shape: Shape, constraints: Constraints, trains: Sequence[Gpu], samples: Sequence[Gpu]
) -> Iterator[tuple[Sequence[Gpu], Sequence[Sequence[Gpu]]]]:
    """The placements in which the trainers' ranks use the GPUs `trains`, and the samplers the GPUs `samples`."""
    count = constraints.trainers if trains else 0
    ranks = 0
    if trains:
        ranks = constraints.ranks or (1 if trains[0].is_mig else len(trains) // count)
        trains = trains[: ranks * count]
        if not trains:
            return
    shared = set(trains) & set(samples)
    if shared and (len(trains) > 1 or list(trains) != list(samples)[:1]):
        ids = ", ".join(sorted(gpu.id for gpu in shared))
        raise UsageError(
            f"--trainer-gpus, --sampler-gpus: GPU {ids} is in both; trainer and sampler can share one GPU if it is the "
            "only one of both"
        )
    if len(trains) != ranks * count:
        return
    if ranks * constraints.nodes % constraints.trainer_tensor_parallel or (
        ranks > 1 and any(gpu.is_mig for gpu in trains)
    ):
        return
    if not samples:
        yield trains, []
        return
    for size in (1, 2, 4, 8, 16):
        if constraints.sampler_tensor_parallel not in (None, size) or size > len(samples):
            continue
        if size > 1 and (engine_of(shape, constraints) == "torch" or not shape.divides(size)):
            continue
        groups = [list(samples[n : n + size]) for n in range(0, len(samples) - size + 1, size)]
        if shared:
            groups = groups[:1]
        if size > 1 and any(gpu.is_mig for group in groups for gpu in group):
            continue
        # Fewer samplers need less host memory while they load.
        most = len(groups)
        for number in range(most, 0, -1) if constraints.samplers is None else [constraints.samplers]:
            if number <= most:
                yield trains, groups[:number]


def _impossible(shape: Shape, machine: Machine, constraints: Constraints) -> str:
    """The message about constraints for which these GPUs allow no placement."""
    count = len(machine.gpus)
    if constraints.sampler_tensor_parallel is not None and (
        not shape.divides(constraints.sampler_tensor_parallel) or engine_of(shape, constraints) == "torch"
    ):
        return (
            f"SAMPLER_TENSOR_PARALLEL: {constraints.sampler_tensor_parallel} is not possible: it needs vLLM, and a "
            f"model whose {shape.heads} heads and {shape.kv_heads} key heads it divides"
        )
    trainers = f"--trainers {constraints.trainers}, " if constraints.trainers > 1 else ""
    wanted = f"{trainers}--trainer-ranks {constraints.ranks or 'unset'}, --samplers {constraints.samplers or 'unset'}"
    tp = f"TRAINER_TENSOR_PARALLEL {constraints.trainer_tensor_parallel}"
    return (
        f"{wanted}, {tp}: the {count} GPUs here cannot be divided so; each rank takes one, and each sampler one for "
        "each part of the model. MIG instances cannot be joined"
    )
