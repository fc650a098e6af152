"""A trainer alone, of one rank or several, without gateway and samplers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.faults.cluster import Process
from tinsmith.v1.trainer_pb2_grpc import TrainerServiceStub
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun

_REPOSITORY = Path(__file__).parents[2]


class Trainer(Process):
    """Its ranks, if any, are in sessions of their own."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        num_ranks: int = 1,
        *,
        module: str = "trainer_service",
        flags: Sequence[str] = ("--deterministic", "true", "--token-budget", "40", "--snapshot-steps", "6"),
        **env: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        port, ranks_port = free_ports(2)
        launcher = torchrun(num_ranks, ranks_port) if num_ranks > 1 else []
        address = f"127.0.0.1:{port}"
        argv = [
            *(*launcher, module, "--base-model", str(model), "--model-names", '["m"]', "--listen", address),
            *("--state-dir", str(folder / "state"), "--checkpoint-dir", str(folder / "checkpoints")),
            *("--num-threads", "1", *flags),
        ]
        env = {"PYTHONPATH": str(_REPOSITORY), **env}
        super().__init__("trainer", argv, address=address, log=folder / "log", env=env)
        self.state_dir = folder / "state"
        self.checkpoints = folder / "checkpoints"

    def kill(self) -> None:
        ranks = psutil.Process(self.pid).children(recursive=True) if self.is_running else []
        super().kill()
        for rank in ranks:
            rank.kill()
        psutil.wait_procs(ranks)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        self.start()
        self.wait_serving()
        with grpc.insecure_channel(self.address) as channel:
            yield TrainerServiceStub(channel)
