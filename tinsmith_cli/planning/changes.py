"""Suggests changes by which a model may fit that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tinsmith.formatting import size_text as gb
from tinsmith.sizing import VLLM_RANKS
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.machine import Gpu, Machine
from tinsmith_cli.planning.shape import Shape

_MOST_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)


def changes(shape: Shape, machine: Machine, constraints: Constraints) -> Iterator[tuple[str, Machine, Constraints]]:
    """Changes by which a model may fit, the smallest first: the advice, and the machine and constraints after it."""
    for count in range((constraints.samplers or 1) - 1, 0, -1):
        yield f"--samplers {count}", machine, replace(constraints, samplers=count)
    for count in range(constraints.trainers - 1, 0, -1):
        yield f"--trainers {count}", machine, replace(constraints, trainers=count)
    for rank in _lower_ranks(constraints):
        yield f"--max-lora-rank {rank}", machine, replace(constraints, max_lora_rank=rank)
    if constraints.shard_base is False:
        yield "leave out TRAINER_SHARD_BASE=false", machine, replace(constraints, shard_base=None)
    for name, cleared in _settings(constraints).items():
        yield f"leave out {name}", machine, cleared
    if not machine.gpus:
        if "bfloat16" not in (constraints.trainer_dtype, constraints.sampler_dtype):
            yield "--dtype bfloat16", machine, replace(constraints, trainer_dtype="bfloat16", sampler_dtype="bfloat16")
        for quantised in constraints.quantisations if not constraints.quantised else ():
            yield f"--quantize {quantised}", machine, replace(constraints, quantised=quantised)
        needed = replace(machine, host_bytes=2**62)
        yield "more host memory, or GPUs", needed, constraints
        return
    if constraints.engine == "torch" and not shape.recurrent and not constraints.quantised:
        yield "--engine vllm (pip install 'tinsmith[vllm]')", machine, replace(constraints, engine="vllm")
    idle = [replace(gpu, free_bytes=max(gpu.free_bytes, int(0.99 * gpu.total_bytes))) for gpu in machine.gpus]
    if any(gpu.total_bytes - gpu.free_bytes > 0.05 * gpu.total_bytes for gpu in machine.gpus):
        used = sum(gpu.total_bytes - gpu.free_bytes for gpu in machine.gpus)
        others = replace(
            constraints,
            trainer_gpus=_same(constraints.trainer_gpus, idle),
            sampler_gpus=_same(constraints.sampler_gpus, idle),
        )
        yield f"end the processes that hold {gb(used)} of these GPUs", replace(machine, gpus=idle), others
    for quantised in constraints.quantisations if not constraints.quantised and not constraints.full_training else ():
        yield f"--quantize {quantised} --engine torch", machine, replace(constraints, quantised=quantised)
    best = max(machine.gpus, key=lambda gpu: gpu.free_bytes)
    anywhere = replace(constraints, trainer_gpus=None, sampler_gpus=None, ranks=None, samplers=None)
    with_vllm = constraints.engine == "torch" and not shape.recurrent and not constraints.quantised
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
    """The GPUs among `gpus` that have the ids of `named`; None for None."""
    return None if named is None else [gpu for gpu in gpus if gpu.id in {one.id for one in named}]


def _lower_ranks(constraints: Constraints) -> Iterator[int]:
    if constraints.max_lora_rank is not None:
        yield from (rank for rank in VLLM_RANKS[::-1] if rank < constraints.max_lora_rank)


def _settings(constraints: Constraints) -> Mapping[str, Constraints]:
    """For each setting that binds the planner, by name, the constraints without it."""
    cleared: dict[str, Constraints] = {}
    if constraints.memory_bytes:
        cleared["TRAINER_MEMORY_BYTES"] = replace(constraints, memory_bytes=0)
    if constraints.max_kv_tokens:
        cleared["SAMPLER_MAX_KV_TOKENS"] = replace(constraints, max_kv_tokens=0)
    if constraints.prefix_cache_bytes is not None:
        cleared["SAMPLER_PREFIX_CACHE_BYTES"] = replace(constraints, prefix_cache_bytes=None)
    if constraints.adapter_memory_bytes is not None:
        cleared["SAMPLER_ADAPTER_MEMORY_BYTES"] = replace(constraints, adapter_memory_bytes=None)
    if constraints.max_device_versions is not None:
        cleared["SAMPLER_MAX_DEVICE_VERSIONS"] = replace(constraints, max_device_versions=None)
    if constraints.sampler_tensor_parallel is not None:
        cleared["SAMPLER_TENSOR_PARALLEL"] = replace(constraints, sampler_tensor_parallel=None)
    if constraints.ranks is not None:
        cleared["--trainer-ranks"] = replace(constraints, ranks=None)
    if constraints.trainer_gpus is not None or constraints.sampler_gpus is not None:
        cleared["--trainer-gpus and --sampler-gpus"] = replace(constraints, trainer_gpus=None, sampler_gpus=None)
    return cleared
