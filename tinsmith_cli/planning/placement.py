"""Makes the plans of `tinsmith up`, one for each base model, before a service starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tinsmith_cli.base_models import ServedModel, UsageError
from tinsmith_cli.planning.config_files import find
from tinsmith_cli.planning.constraints import constraints_of
from tinsmith_cli.planning.families import UnknownModel
from tinsmith_cli.planning.machine import Machine
from tinsmith_cli.planning.plan import DoesNotFit, Plan
from tinsmith_cli.planning.planner import plan
from tinsmith_cli.planning.shape import Shape
from tinsmith_cli.settings import Settings


def check(settings: Settings, machine: Machine, models: Sequence[ServedModel], env: Mapping[str, str]) -> None:
    """Raises UsageError for flags and variables about GPUs that cannot be used."""
    constraints_of(settings, machine, env)
    named = [name for name in ("trainer_gpus", "sampler_gpus") if getattr(settings, name) is not None]
    if named and len(models) > 1:
        raise UsageError(
            f"--{named[0].replace('_', '-')}: is for one base model, and {len(models)} are served; with several, "
            "--gpus is divided among them"
        )


def placed(
    settings: Settings,
    machine: Machine,
    models: Sequence[ServedModel],
    env: Mapping[str, str],
    *,
    report: Callable[[str], None],
) -> list[Plan | None]:
    """A plan for each base model; None on a CPU, where the services divide the memory themselves, and for a model that
    the planner does not know. `machine`: from `usable`. `report`: called with each note.

    Raises DoesNotFit if a model does not fit. On a CPU, models do not fit if the weights of all services take more than
    the free memory.
    """
    if machine.note:
        report(machine.note)
    plans: list[Plan | None] = []
    for number, model in enumerate(models):
        part = machine.part(number, of=len(models)) if machine.gpus else machine
        shape = _shape(model, has_gpus=bool(machine.gpus), report=report)
        if shape is None:
            plans.append(None)
            continue
        constraints = constraints_of(settings, part, env)
        try:
            found = plan(model.names[0], shape, part, constraints)
        except DoesNotFit as error:
            raise DoesNotFit(f"{model.names[0]} does not fit: {error.reason}", error.change) from None
        if found.device_type == "cpu":
            machine = replace(machine, host_bytes=machine.host_bytes - found.weights_bytes)
            plans.append(None)
            continue
        for note in found.notes:
            report(f"{model.names[0]}: {note}")
        plans.append(found)
    return plans


def _shape(model: ServedModel, *, has_gpus: bool, report: Callable[[str], None]) -> Shape | None:
    try:
        return find(model.source, fetch=has_gpus)
    except UnknownModel as error:
        if has_gpus:
            report(f"no plan: {error}. Its services start on the first GPU, and each takes a share of what is free")
    except UsageError:
        if has_gpus:
            raise
    return None  # on a CPU the services report what is wrong with the model
