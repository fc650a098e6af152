"""A trainer without gRPC: real engine, journal, files. A crash leaves a copy of its folder, as kill -9 would.

`serving` adds its gRPC server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from torch import Tensor

from tinsmith.errors import ServiceError
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.server import Server
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1.trainer_admin_pb2_grpc import add_TrainerAdminServiceServicer_to_server
from tinsmith.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from trainer_service.admin_servicer import TrainerAdminServicer
from trainer_service.config import TrainerConfig
from trainer_service.durability import packages, stored_snapshots
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database
from trainer_service.durability.records import Body
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import SnapshotPolicy, Snapshots
from trainer_service.durability.stored_snapshots import SnapshotStore, StoredSnapshots
from trainer_service.engine.engine import TrainingEngine
from trainer_service.metrics import Metrics
from trainer_service.operation import Answer, Operation
from trainer_service.operations.models import LiveModels
from trainer_service.operations.moving import Moving
from trainer_service.operations.operations import Operations
from trainer_service.operations.restore import Restorer
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.servicer import TrainerServicer
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.imports import Importer
from trainer_service.storage.local import LocalStorage
from trainer_service.trainer import Trainer
from trainer_service.weight_sync import WeightSender
from trainer_service.weight_sync.canary import Canary, canary_of
from trainer_service.weight_sync.certificate import GapRule, Publisher

NEVER = SnapshotPolicy(0, 0, 0)
KINDS = {
    "CreateModelRequest": "create_model",
    "ForwardBackwardRequest": "forward_backward",
    "OptimStepRequest": "optim_step",
    "SkipOperationRequest": "skip",
    "SaveCheckpointRequest": "save_checkpoint",
    "LoadCheckpointRequest": "load_checkpoint",
}


@dataclass
class Process:
    folder: Path
    registry: CollectorRegistry
    trainer: Trainer
    has_stopped: bool = False

    def __post_init__(self) -> None:
        self.journal = self.trainer.journal
        self.operations = self.trainer.operations
        self.scheduler = self.trainer.scheduler
        self.moving = self.trainer.moving
        self.engine = self.operations.engine
        self.snapshots = self.operations.snapshots

    @classmethod
    async def start(
        cls,
        folder: Path,
        base: BaseModel,
        *,
        policy: SnapshotPolicy = NEVER,
        max_bytes: int = 1 << 24,
        base_models: Sequence[str] = ("tiny",),
        allow_other_weights: bool = False,
        result_retention_s: float = 3600.0,
        min_free_bytes: int | None = None,
        max_models: int = 4,
        max_known_models: int = 1000,
        max_queued_operations: int = 99,
        max_tokens_per_microbatch: int = 24,
        deterministic: bool = True,
        store: Path | None = None,
        trainer_id: str = "t",
        database: Database | None = None,
        samplers: Sequence[str] = (),
    ) -> Process:
        """Everything that can be is restored, or goes on being so. `deterministic`: packs every batch alone. `store`:
        the checkpoints' folder, which several trainers may share. `database`: the journal's, instead of a file.
        `samplers`: addresses."""
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        store = store or folder / "checkpoints"
        path = folder / "journal.sqlite" if database is None else (database, folder)
        options = {"max_bytes": max_bytes, "result_retention_s": result_retention_s, "metrics": metrics}
        journal = await asyncio.to_thread(lambda: Journal(path, **options))
        engine = TrainingEngine(
            base,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            deterministic=deterministic,
            metrics=metrics,
        )
        sender = WeightSender(TrainerConfig(base_model="tiny", samplers=list(samplers)), metrics, trainer_id="t")
        if samplers:
            sender.start()
        scheduler = Scheduler(
            engine.passes,
            journal,
            max_queued_operations=max_queued_operations,
            max_models=max_models,
            max_known_models=max_known_models,
            metrics=metrics,
            alone=deterministic,
        )
        files: SnapshotStore = SnapshotFiles(folder / "snapshots", min_free_bytes=min_free_bytes)
        if database is not None:
            files = StoredSnapshots(LocalStorage(store / stored_snapshots.FOLDER / journal.shared_id, metrics))
        snapshots = Snapshots(files, journal, policy, metrics, scheduler.executing)
        sequences = canary_of(base)
        rule = GapRule(0.01, 0.01, "refuse", timeout_s=20)
        publisher = Publisher(sender, Canary(sequences, engine.score(None, sequences)), rule, metrics)
        checkpoints = CheckpointStore(store, metrics)
        models = LiveModels(base_models, base.weights_sum, allow_other_weights=allow_other_weights)
        operations = Operations(engine, checkpoints, publisher, scheduler, models, 16, snapshots)
        restorer = Restorer(journal, snapshots, operations, scheduler, metrics)
        await restorer.run()
        trainer = Trainer(
            "boot",
            operations,
            scheduler,
            journal,
            checkpoints,
            Importer(base, checkpoints, max_rank=16, max_bytes=1 << 22),
            Moving(restorer, lambda: LocalStorage(store / packages.FOLDER, metrics), trainer_id=trainer_id),
            trainer_id,
            {"base_weights": base.weights_sum},
        )
        return cls(folder, registry, trainer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        """The trainer's gRPC server. The trainer stops with it."""
        servicer = TrainerServicer()
        servicer.trainer = self.trainer
        server = Server("127.0.0.1:0", [pb.DESCRIPTOR])
        add_TrainerServiceServicer_to_server(servicer, server.grpc)
        add_TrainerAdminServiceServicer_to_server(TrainerAdminServicer(servicer), server.grpc)
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)
            await self.stop()

    async def send(self, request: Any) -> Operation:
        """Returns once it is in the journal."""
        seq_id = getattr(request, "seq_id", 0)
        kind = KINDS[type(request).__name__]
        operation, is_new = await self.scheduler.accept(request.model_id, seq_id, Body.pack(kind, request))
        if is_new:
            await self.scheduler.begin(operation, self.operations.work_of(request))
        return operation

    async def outcome(self, model_id: str, seq_id: int) -> Answer | str:
        """The answer, or the error's message."""
        try:
            return await (await self.scheduler.find(model_id, seq_id)).wait()
        except ServiceError as error:
            return str(error)

    async def weights(self, model_id: str) -> dict[str, Tensor]:
        """Weights of the adapter, and tensors of its optimizer, once the operations before a crash have run again."""
        await self.scheduler.check_held(model_id)
        state = await self.scheduler.compute.run_alone(lambda: self.engine.capture(model_id, with_optimizer=True))
        assert state.optimizer is not None
        return {"adapter": state.adapter.flat, **state.optimizer.tensors}

    async def crash(self, folder: Path) -> Path:
        """Copies the files that a kill at this moment would leave; this process goes on."""
        loop = asyncio.get_running_loop()

        async def copy() -> None:
            await self.journal.writer.submit(lambda _: shutil.copytree(self.folder, folder, ignore=_unfinished))

        await self.snapshots._on_thread(lambda: asyncio.run_coroutine_threadsafe(copy(), loop).result())
        return folder

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"trainer_{name}", labels) or 0.0

    def num_replayed(self, kind: str) -> float:
        return self.count("replayed_operations_total", kind=kind)

    async def stop(self) -> None:
        if self.has_stopped:
            return
        self.has_stopped = True
        await self.scheduler.compute.close(timeout_s=10)
        await self.scheduler.close(timeout_s=3)  # a save that waits for operations which will not run does not end
        await self.snapshots.close()
        await self.operations.publishing.publisher.sender.close()
        await asyncio.to_thread(self.journal.close)
        self.operations.publishing.checkpoints.close()


def _unfinished(folder: str, names: list[str]) -> set[str]:
    return {"~tmp"} if Path(folder).name == "checkpoints" else set()
