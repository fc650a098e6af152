"""This process's rank, the number of ranks and how they divide the work, from torchrun's environment and settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_service.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process among the ranks, which form rows.

    The ranks of one row compute the same datums together (tensor parallel). Rows divide the datums (data parallel).
    """

    rank: int
    world_size: int
    local_rank: int
    """Rank among those on this machine."""
    local_world_size: int
    tensor_parallel: int = 1
    """Number of ranks of one row."""
    shard_base: bool = False

    @classmethod
    def of(cls, config: TrainerConfig, env: Mapping[str, str] = os.environ) -> Place:
        """Raises SystemExit for settings that do not go together; the message names the setting and the value."""
        place = cls(
            rank=int(env.get("RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            tensor_parallel=config.tensor_parallel,
            shard_base=config.shard_base,
        )
        place._check(config)
        return place

    def _check(self, config: TrainerConfig) -> None:
        if self.world_size % self.tensor_parallel:
            raise SystemExit(
                f"--tensor-parallel: {self.tensor_parallel} does not divide the {self.world_size} ranks (WORLD_SIZE); "
                f"start a multiple of that, with torchrun --nproc-per-node {self.tensor_parallel} "
                "-m trainer_service"
            )
        if self.shard_base and self.num_rows == 1:
            raise SystemExit(
                f"--shard-base: true divides the base model among ranks that divide the datums, and {self.world_size} "
                f"with --tensor-parallel {self.tensor_parallel} are only one of them; start at least "
                f"{2 * self.tensor_parallel}, with torchrun --nproc-per-node {2 * self.tensor_parallel} "
                "-m trainer_service"
            )
        for flag, wanted in (("tensor-parallel", self.tensor_parallel > 1), ("shard-base", self.shard_base)):
            if wanted and config.full_training:
                raise SystemExit(
                    f"--{flag}: does not go with --full-training, whose parameters are whole on every rank; leave it "
                    "out: the ranks divide the datums then"
                )

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    @property
    def num_rows(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def row(self) -> int:
        return self.rank // self.tensor_parallel

    def leads(self, rank: int) -> bool:
        """True when `rank` is the first of its row, which sends the row's results to rank 0."""
        return rank % self.tensor_parallel == 0
