"""Shows a plan as text, as JSON, and as the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tinsmith.formatting import columns, size_text
from tinsmith_cli.planning import memory
from tinsmith_cli.planning.plan import Plan, SamplerPlan


def as_text(plan: Plan) -> str:
    """The plan as a table for people, and the command that starts it."""
    shape, trainer = plan.shape, plan.trainer
    training = trainer.training
    gpus = plan.machine.gpus
    lines = [
        f"{plan.name}: {_parameters(shape.parameters)} parameters, sequences of up to {shape.context:,} tokens",
        f"on {_machine(plan)}",
        *(f"note: {note}" for note in plan.notes),
        "",
    ]
    each = " each" if plan.num_trainers > 1 else ""
    division = [f"{_count(trainer.ranks, 'rank')}{each}{_of_each(plan)}"]
    if trainer.tensor_parallel > 1:
        division.append(f"tensor parallel {trainer.tensor_parallel}")
    if trainer.shard_base:
        division.append("which divide the memory of the base model (shard_base)")
    adapters = f"{training.adapters_on_device} on the device, {training.adapters} with host memory"
    num_ranks = plan.num_trainers * trainer.ranks
    of_trainer = " of each trainer" if plan.num_trainers > 1 else ""
    rows = [
        (
            "trainer" if plan.num_trainers <= 1 else _count(plan.num_trainers, "trainer"),
            _place_of_trainers(plan),
            ", ".join(division),
        ),
        ("", "base weights", f"{size_text(trainer.base_bytes)} in {plan.dtype}{_each(num_ranks, 'rank')}"),
        ("", "training", f"{size_text(training.memory_bytes)}{_each(num_ranks, 'rank')}"),
    ]
    if not trainer.ranks:
        rows = []
    elif not plan.constraints.full_training:
        rows += [
            ("", f"adapters of rank {plan.rank}", f"{adapters if gpus else training.adapters}{of_trainer}"),
            ("", "longest sequence", f"{training.longest:,} tokens"),
        ]
    if trainer.ranks and shape.tower_parameters and not plan.constraints.full_training:
        tower = memory.BYTES_PER_PARAMETER[plan.dtype] * shape.tower_parameters
        words = f"{size_text(int(tower))} of the base weights"
        if shape.tower:
            more = memory.ADAPTER_BYTES * plan.rank * sum(one.rank_elements for one in shape.tower)
            words += f"; an adapter on the vision tower, too, has {size_text(more)} more"
        rows.append(("", "towers", words))
    for sampler, numbers in _alike(plan):
        rows += [
            (
                _sampler_name(numbers, len(plan.samplers)),
                _places(plan, numbers),
                _engine(plan, sampler, numbers),
            ),
            ("", "base weights", f"{size_text(sampler.base_bytes)}{_each(sampler.tensor_parallel, 'GPU')}"),
            ("", "adapters", _adapters_of_sampler(plan, sampler)),
            ("", "keys and values", _kv(sampler)),
            ("", "prefix cache", f"{size_text(sampler.prefix_bytes)}{_each(sampler.tensor_parallel, 'GPU')}"),
        ]
    what = "all parameters" if plan.constraints.full_training else f"an adapter of rank {plan.rank}"
    rows.append(("publish", plan.channel, f"{size_text(plan.publish_bytes)} to each sampler for {what}"))
    loading = f"{size_text(plan.loading_bytes)} while the services load, of {size_text(plan.machine.host_bytes)} free"
    rows.append(("host memory", "", loading))
    return "\n".join([*lines, columns(rows), "", *command(plan)])


def summary(plan: Plan) -> str:
    """The plan in one line."""
    trainer, parts = plan.trainer, []
    if trainer.ranks:
        sharing = ", which divide the base model" if trainer.shard_base else ""
        whose = "the trainer" if plan.num_trainers == 1 else f"each of {plan.num_trainers} trainers"
        parts.append(
            f"{_count(trainer.ranks, 'rank')} of {whose} on {_place_of_trainers(plan)}{sharing}, "
            f"{size_text(trainer.training.memory_bytes)} each for training"
        )
    if plan.samplers:
        places = " / ".join(_place(one.gpus).removeprefix("GPU ") for one in plan.samplers)
        parts.append(
            f"{_count(len(plan.samplers), 'sampler')} on GPU {places}, {plan.samplers[0].kv_tokens:,} tokens of keys "
            "and values"
        )
    return f"plan of {plan.name}: {'; '.join(parts)}; adapters of rank {plan.rank} at most"


def command(plan: Plan) -> list[str]:
    """Lines for a shell, which start the services as planned."""
    trainer, samplers = plan.trainer, plan.samplers
    common = {**plan.trainer_env(0), **(plan.sampler_env(0) if samplers else {})}
    settled = {name: value for name, value in common.items() if not name.startswith("CUDA_") and "MAX_LORA" not in name}
    lines = [f"export {name}={value}" for name, value in settled.items() if _is_common(plan, name)]
    words = ["tinsmith", "up", "--base-model", plan.name]
    if not trainer.ranks or not samplers:
        words += ["--role", "trainer" if trainer.ranks else "sampler", "--join", "TOKEN"]
    if plan.constraints.nodes > 1:
        words += ["--trainer-nodes", str(plan.constraints.nodes)]
    if plan.device_type == "cuda":
        of_samplers = [gpu.id for sampler in samplers for gpu in sampler.gpus]
        words += ["--trainer-gpus", ",".join(gpu.id for gpu in trainer.gpus)] if trainer.ranks else []
        words += ["--sampler-gpus", ",".join(of_samplers)] if samplers else []
        words += ["--trainer-ranks", str(trainer.ranks)] if trainer.ranks else []
        words += ["--trainers", str(plan.num_trainers)] if plan.num_trainers > 1 else []
        words += ["--samplers", str(len(samplers))] if samplers else []
        words += ["--max-lora-rank", str(plan.rank), "--engine", plan.engine]
    else:
        words += ["--gpus", "none"] if not plan.machine.note else []
        words += ["--trainer-ranks", str(trainer.ranks)] if trainer.ranks > 1 else []
        words += ["--trainers", str(plan.num_trainers)] if plan.num_trainers > 1 else []
        words += ["--samplers", str(len(samplers))] if len(samplers) > 1 else []
    constraints = plan.constraints
    if constraints.trainer_dtype != "auto" and constraints.trainer_dtype == constraints.sampler_dtype:
        words += ["--dtype", constraints.trainer_dtype]
    words += ["--full-training"] if constraints.full_training else []
    words += ["--quantize", constraints.quantised] if constraints.quantised else []
    return [*lines, shlex.join(words)]


def _is_common(plan: Plan, name: str) -> bool:
    """Whether the variable has one value for all samplers, so that one environment can hold it."""
    return len({plan.sampler_env(number).get(name) for number in range(len(plan.samplers))}) == 1


def as_json(plan: Plan) -> Mapping[str, Any]:
    """The plan with its figures, in bytes and tokens."""
    trainer, training = plan.trainer, plan.trainer.training
    return {
        "fits": True,
        "model": plan.name,
        "family": plan.shape.family,
        "parameters": plan.shape.parameters,
        "estimate": plan.shape.is_estimate,
        "device": plan.device_type,
        "dtype": plan.dtype,
        "quantize": plan.constraints.quantised or None,
        "max_lora_rank": plan.rank,
        "notes": list(plan.notes),
        "machine": {
            "gpus": [asdict(gpu) for gpu in plan.machine.gpus],
            "cores": plan.machine.cores,
            "host_bytes": plan.machine.host_bytes,
        },
        "trainer": None
        if not trainer.ranks
        else {
            "gpus": [gpu.id for gpu in trainer.gpus],
            "trainers": plan.num_trainers,
            "ranks": trainer.ranks,
            "tensor_parallel": trainer.tensor_parallel,
            "shard_base": trainer.shard_base,
            "base_bytes": trainer.base_bytes,
            "memory_bytes": training.memory_bytes,
            "adapters_on_device": training.adapters_on_device,
            "adapters": training.adapters,
            "longest_sequence": training.longest,
            "environment": plan.trainer_env(0),
        },
        "samplers": [
            {
                "engine": plan.engine,
                "gpus": [gpu.id for gpu in sampler.gpus],
                "tensor_parallel": sampler.tensor_parallel,
                "base_bytes": sampler.base_bytes,
                "adapter_bytes": sampler.slots_bytes,
                "kv_tokens": sampler.kv_tokens,
                "kv_bytes_per_token": sampler.kv_bytes_per_token,
                "prefix_cache_bytes": sampler.prefix_bytes,
                "environment": plan.sampler_env(number),
            }
            for number, sampler in enumerate(plan.samplers)
        ],
        "publish_bytes": plan.publish_bytes,
        "tower_bytes": int(memory.BYTES_PER_PARAMETER[plan.dtype] * plan.shape.tower_parameters),
        "tower_adapter_bytes": memory.ADAPTER_BYTES * plan.rank * sum(one.rank_elements for one in plan.shape.tower),
        "channel": plan.channel,
        "loading_host_bytes": plan.loading_bytes,
        "command": command(plan),
    }


def _machine(plan: Plan) -> str:
    machine = plan.machine
    kinds: dict[tuple[str, str], int] = {}
    for gpu in machine.gpus:
        kind = gpu.name, size_text(gpu.free_bytes)
        kinds[kind] = kinds.get(kind, 0) + 1
    gpus = ", ".join(f"{count} x {name} ({free} free)" for (name, free), count in kinds.items()) or "no GPU"
    return f"{gpus}; {_count(machine.cores, 'core')}, {size_text(machine.host_bytes)} of host memory free"


def _alike(plan: Plan) -> list[tuple[SamplerPlan, list[int]]]:
    """The samplers with different figures, each with the numbers of all samplers that have its figures."""
    found: list[tuple[SamplerPlan, list[int]]] = []
    for number, sampler in enumerate(plan.samplers):
        for known, numbers in found:
            same = known.kv_tokens, known.prefix_bytes, known.tensor_parallel
            if same == (sampler.kv_tokens, sampler.prefix_bytes, sampler.tensor_parallel):
                numbers.append(number)
                break
        else:
            found.append((sampler, [number]))
    return found


def _sampler_name(numbers: list[int], count: int) -> str:
    if count == 1:
        return "sampler"
    return f"{_count(len(numbers), 'sampler')}"


def _places(plan: Plan, numbers: list[int]) -> str:
    return " / ".join(_place(plan.samplers[number].gpus) for number in numbers) if plan.machine.gpus else "CPU"


def _place_of_trainers(plan: Plan) -> str:
    if not plan.trainer.gpus:
        return "CPU"
    places = (_place(plan.trainer_gpus(number)).removeprefix("GPU ") for number in range(plan.num_trainers))
    return f"GPU {' / '.join(places)}"


def _place(gpus: Any) -> str:
    return f"GPU {','.join(gpu.id for gpu in gpus)}" if gpus else "CPU"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.1f} million"


def _engine(plan: Plan, sampler: SamplerPlan, numbers: list[int]) -> str:
    return f"engine {plan.engine}{_tp(sampler)}{', each with' if len(numbers) > 1 else ''}"


def _of_each(plan: Plan) -> str:
    nodes = plan.constraints.nodes
    return f" on each of {nodes} machines" if nodes > 1 else ""


def _each(count: int, noun: str) -> str:
    return f" on each {noun}" if count > 1 else ""


def _tp(sampler: SamplerPlan) -> str:
    return f", tensor parallel {sampler.tensor_parallel}" if sampler.tensor_parallel > 1 else ""


def _adapters_of_sampler(plan: Plan, sampler: SamplerPlan) -> str:
    if plan.engine == "torch":
        return f"up to {size_text(sampler.slots_bytes)}"
    return (
        f"{_count(plan.device_versions, 'slot')} of rank {plan.rank}, {size_text(sampler.slots_bytes)}"
        f"{_each(sampler.tensor_parallel, 'GPU')}; up to {size_text(plan.adapter_memory_bytes)} in host memory"
    )


def _kv(sampler: SamplerPlan) -> str:
    num_bytes = sampler.kv_tokens * sampler.kv_bytes_per_token
    return (
        f"{sampler.kv_tokens:,} tokens of {size_text(sampler.kv_bytes_per_token)}, {size_text(num_bytes)}"
        f"{_each(sampler.tensor_parallel, 'GPU')}"
    )
