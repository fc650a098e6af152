"""One rank of a trainer without its service, in one layout after another.

Rank 0 plays the scenario and writes what it gave, the others follow.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import scenario
from tinsmith.modeling.base_model import BaseModel
from trainer_service.config import TrainerConfig
from trainer_service.ranks import process
from trainer_service.ranks.follower import Follower
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.leader import LeadingEngine
from trainer_service.ranks.place import Place

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "sharded": {"shard_base": True},
    "sharded-tensor": {"shard_base": True, "tensor_parallel": 2},
    "full": {"full_training": True},
    "data-starved": {},
    "sharded-starved": {"shard_base": True},
}
CHECKPOINTED = ("sharded", "tensor")
"""Layouts that compute activations again in backward, with four ranks."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--others", type=Path, required=True)
    parser.add_argument("layouts", nargs="+", choices=[*LAYOUTS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    places = {
        name: Place.of(TrainerConfig(base_model=str(arguments.model), **LAYOUTS[name])) for name in arguments.layouts
    }
    first = next(iter(places.values()))
    process.begin(first, log_level="INFO")
    group = RankGroup.join(first, CPU, timeout_s=60)
    for name, place in places.items():
        mesh = init_device_mesh("cpu", (place.num_rows, place.tensor_parallel), mesh_dim_names=("data", "tensor"))
        run(name, replace(group, place=place, mesh=mesh), arguments)
    process.leave(0)


def run(name: str, group: RankGroup, arguments: argparse.Namespace) -> None:
    base = BaseModel.load(
        arguments.model, device=CPU, dtype=torch.float32, division=group.division(), trainable=name == "full"
    )
    again = group.place.world_size == 4 and name in CHECKPOINTED
    settings: dict[str, Any] = {"activation_checkpointing": "on" if again else "auto"}
    settings["max_tokens_per_microbatch"] = scenario.BUDGET
    starved = name.endswith("starved")
    if group.place.rank:
        failed = starve(base) if starved and group.place.rank == 1 else []
        Follower(base, group, **settings).work()
        (arguments.out / f"{name}-failures-{group.place.rank}").write_text(str(len(failed)))
        return
    engine = LeadingEngine(base, group, **settings)
    out = arguments.out / name
    out.mkdir()
    if starved:
        seen = scenario.play_starved(engine)
    elif name == "full":
        seen = scenario.play_full(engine)
    else:
        seen = scenario.play(engine, out / "checkpoints", others=arguments.others)
    scenario.write(seen, out)
    engine.stop()


def starve(base: BaseModel) -> list[int]:
    """Makes some passes run out of memory: in the middle of forward and of backward, in turn. Returns their numbers."""
    failed: list[int] = []
    num_passes = 0

    def fail() -> None:
        failed.append(num_passes)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes not in (2, 5, 9, 14):
            return
        if len(failed) % 2 == 0 or not args[0].requires_grad:
            fail()
        args[0].register_hook(lambda _: fail())

    base.layers[1].register_forward_pre_hook(count)  # between the layers, whatever they are made of
    return failed


if __name__ == "__main__":
    main()
