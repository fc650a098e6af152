"""Measures what the trainer's journal and snapshots cost a training loop, and what a restart takes.

    python -m benchmarks durability --size small

One process, one model, no gRPC: the same steps by the engine alone, through the journal, and through it with a snapshot
at every step, in rounds that alternate. A step is a forward_backward and an optim_step that are submitted together.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Figure, Report
from benchmarks.processes import model_folder
from benchmarks.ranks import ADAM, MAX_TOKENS, request, step
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.config import TrainerConfig
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Body
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import SnapshotPolicy, Snapshots
from trainer_service.engine.engine import TrainingEngine
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation
from trainer_service.operations.models import LiveModels
from trainer_service.operations.operations import Operations
from trainer_service.operations.restore import Restorer
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.weight_sync import WeightSender
from trainer_service.weight_sync.canary import Canary, canary_of
from trainer_service.weight_sync.certificate import GapRule, Publisher

MODEL = "bench:train:0"
LENGTHS = [256] * 4


class TrainerParts:
    """The parts of a trainer behind its gRPC server."""

    def __init__(self, base: BaseModel, folder: Path, policy: SnapshotPolicy) -> None:
        metrics = Metrics(CollectorRegistry())
        self._folder = folder
        self._seq_id = 0
        self._journal = Journal(folder / "journal", max_bytes=2**31, result_retention_s=3600, metrics=metrics)
        self.engine = TrainingEngine(base, max_tokens_per_microbatch=MAX_TOKENS, metrics=metrics)
        self.scheduler = Scheduler(
            self.engine.passes, self._journal, max_queued_operations=99, max_models=9, metrics=metrics
        )
        self.files = SnapshotFiles(folder / "snapshots")
        self.snapshots = Snapshots(self.files, self._journal, policy, metrics, self.scheduler.executing)
        sender = WeightSender(TrainerConfig(base_model="bench"), metrics, trainer_id="bench")
        sequences = canary_of(base)
        rule = GapRule(0.01, 0.01, "refuse", timeout_s=5)
        publisher = Publisher(sender, Canary(sequences, self.engine.score(None, sequences)), rule, metrics)
        checkpoints = CheckpointStore(folder / "checkpoints", metrics)
        models = LiveModels(["bench"], base.weights_sum)
        self._operations = Operations(self.engine, checkpoints, publisher, self.scheduler, models, 256, self.snapshots)
        self._restorer = Restorer(self._journal, self.snapshots, self._operations, self.scheduler, metrics)

    async def create(self, rank: int) -> None:
        lora = types_pb2.LoraConfig(rank=rank, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
        creation = pb.CreateModelRequest(model_id=MODEL, base_model="bench", lora_config=lora)
        await (await self._submit("create_model", creation)).wait()

    async def step(self) -> float:
        """Time of one step, in seconds."""
        forward_backward = request(LENGTHS, self.engine.limits.vocab_size)
        adam = pb.AdamParams(learning_rate=ADAM.learning_rate, beta1=ADAM.beta1, beta2=ADAM.beta2, eps=ADAM.eps)
        begin = time.perf_counter()
        operations = [
            await self._submit("forward_backward", forward_backward),
            await self._submit("optim_step", pb.OptimStepRequest(model_id=MODEL, adam_params=adam)),
        ]
        for operation in operations:
            await operation.wait()
        return time.perf_counter() - begin

    async def _submit(
        self, kind: str, message: pb.CreateModelRequest | pb.ForwardBackwardRequest | pb.OptimStepRequest
    ) -> Operation:
        seq_id, self._seq_id = self._seq_id, self._seq_id + 1
        if not isinstance(message, pb.CreateModelRequest):
            message.seq_id = seq_id
        operation, _ = await self.scheduler.accept(MODEL, seq_id, Body.pack(kind, message))
        await self.scheduler.begin(operation, self._operations.work_of(message))
        return operation

    async def restore(self) -> None:
        await self._restorer.run()
        await self.scheduler.check_held(MODEL)

    async def close(self) -> None:
        await self.scheduler.close(timeout_s=60)
        await self.snapshots.close()
        await asyncio.to_thread(self._journal.close)


async def measure(base: BaseModel, folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    alone = TrainingEngine(base, max_tokens_per_microbatch=MAX_TOKENS)
    alone.create_model(MODEL, AdapterConfig(rank=arguments.rank, seed=0), "adamw")
    journalled = TrainerParts(base, folder / "journalled", SnapshotPolicy(0, 0, 0))
    snapshotted = TrainerParts(base, folder / "snapshotted", SnapshotPolicy(1, 0, 0))
    for trainer in (journalled, snapshotted):
        await trainer.create(arguments.rank)
    rounds = []
    for _ in range(arguments.repeats + 1):
        engine_s = (await asyncio.to_thread(step, alone, LENGTHS))["seconds"]
        rounds.append((engine_s, await journalled.step(), await snapshotted.step()))
    engine_ms, journal_ms, snapshot_ms = ([1e3 * row[side] for row in rounds[1:]] for side in range(3))
    report.add(Figure("step through the journal", "ms", journal_ms, "engine alone", engine_ms))
    report.add(Figure("step with a snapshot each", "ms", snapshot_ms, "without", journal_ms))

    def capture() -> float:
        begin = time.perf_counter()
        journalled.engine.capture(MODEL, with_optimizer=True)
        return 1e3 * (time.perf_counter() - begin)

    captures = [await journalled.scheduler.compute.run_alone(capture) for _ in range(arguments.repeats)]
    report.add(Figure("capture, on the compute thread", "ms", captures, "engine alone", engine_ms))
    await snapshotted.close()
    (newest, *_) = snapshotted.files.seq_ids(MODEL)
    num_bytes = snapshotted.files.verify(MODEL, newest).size_bytes
    info, state = snapshotted.files.read(MODEL, newest, base)
    writes = []
    for _ in range(arguments.repeats):
        begin = time.perf_counter()
        snapshotted.files.write(newest, info, state)
        writes.append(1e3 * (time.perf_counter() - begin))
    report.add(Figure(f"writing a snapshot of {num_bytes / 1e6:.1f} MB", "ms", writes, "engine alone", engine_ms))
    num_steps = arguments.repeats + 1
    await journalled.close()
    for name, source in (("from the creation", "journalled"), ("from a snapshot", "snapshotted")):
        times = []
        for n in range(3):
            shutil.copytree(folder / source, folder / f"{source}-{n}")
            begin = time.perf_counter()
            trainer = TrainerParts(base, folder / f"{source}-{n}", SnapshotPolicy(0, 0, 0))
            await trainer.restore()
            times.append(1e3 * (time.perf_counter() - begin))
            await trainer.close()
        title = f"restoring a model of {num_steps} steps {name}"
        report.add(Figure(title, "ms", times, "those steps", [sum(journal_ms) * num_steps / len(journal_ms)] * 3))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter")
    parser.add_argument("--threads", type=int, default=1, help="number of compute threads")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of a figure (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary folder)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(arguments.threads)
    model = model_folder(arguments.size, arguments.models)
    base = BaseModel.load(model, device=torch.device("cpu"), dtype=torch.float32)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        asyncio.run(measure(base, Path(folder), arguments, report))
