"""A plan as a row of a table."""

from __future__ import annotations

from tests.support.plans.nvml import machine_of, model_of
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.plan import DoesNotFit, Plan
from tinsmith_cli.planning.planner import plan

HEAD = ("trainer", "samplers", "adapters", "longest sequence", "KV tokens", "publish")


def planned(machine: str, model: str, **constraints: object) -> Plan:
    return plan(model, model_of(model), machine_of(machine), Constraints(**constraints))  # type: ignore[arg-type]


def row(machine: str, model: str, **constraints: object) -> list[str]:
    """The plan's cells, or one cell with what would make it fit."""
    try:
        found = planned(machine, model, **constraints)
    except DoesNotFit as error:
        return [f"does not fit: {error.change.removeprefix('the smallest change that makes it fit: ')}"]
    trainer, training = found.trainer, found.trainer.training
    places = [_place(sampler.gpus) for sampler in found.samplers]
    return [
        _place(trainer.gpus) + (", sharded" if trainer.shard_base else ""),
        " / ".join(places),
        f"{training.adapters_on_device} ({training.adapters}) of rank {found.rank}",
        f"{training.longest:,}",
        f"{min(sampler.kv_tokens for sampler in found.samplers):,}",
        f"{found.publish_bytes / 1e6:,.0f} MB, {found.channel}",
    ]


def _place(gpus: object) -> str:
    names = [_short(gpu.id) for gpu in gpus]  # type: ignore[attr-defined]
    if len(names) > 2 and names == [str(number) for number in range(int(names[0]), int(names[-1]) + 1)]:
        return f"{names[0]}-{names[-1]}"
    return " + ".join(names) or "CPU"


def _short(name: str) -> str:
    return name if name.isdecimal() else name.partition("-5555")[0].replace("MIG-0000000", "MIG ")
