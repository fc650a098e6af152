"""The trainer's process, or that of one of its ranks: load, restore the models, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from tinsmith.allocator import exempt_from_collections, keep_freed_memory
from tinsmith.cores import SWITCH_S, Cores, usable_cores
from tinsmith.errors import NotReady
from tinsmith.memory import host_bytes
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.rpc import tracing
from tinsmith.rpc.metrics import new_registry, serve_metrics
from tinsmith.rpc.metrics_service import MetricsServicer
from tinsmith.rpc.server import Server, stop_event
from tinsmith.threads import in_pool
from tinsmith.v1 import metrics_pb2, trainer_admin_pb2, trainer_pb2
from tinsmith.v1.metrics_pb2_grpc import add_MetricsServiceServicer_to_server
from tinsmith.v1.trainer_admin_pb2_grpc import add_TrainerAdminServiceServicer_to_server
from tinsmith.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tinsmith.weight_channel.ring_memory import gpu_uuid
from trainer_service.admin_servicer import TrainerAdminServicer
from trainer_service.config import TrainerConfig
from trainer_service.durability import journal_file, packages, stored_snapshots
from trainer_service.durability.executing import Executing
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database, Superseded
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import Policy, Snapshots
from trainer_service.durability.stored_snapshots import SnapshotStore, StoredSnapshots
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.measure import Bounds, measure
from trainer_service.metrics import Metrics
from trainer_service.operations.missing import LostOperations
from trainer_service.operations.models import LiveModels
from trainer_service.operations.moving import Moving
from trainer_service.operations.operations import Operations
from trainer_service.operations.restore import Restorer, check_journal, check_no_file
from trainer_service.ranks import process
from trainer_service.ranks.follower import Follower
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.leader import LeadingEngine
from trainer_service.ranks.place import Place
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.servicer import TrainerServicer
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.choice import keep_trainer_id, open_storage, trainer_id
from trainer_service.storage.imports import Importer
from trainer_service.storage.protocol import Storage, StorageUnusable
from trainer_service.trainer import Trainer
from trainer_service.weight_sync import WeightSender
from trainer_service.weight_sync.canary import Canary, canary_of, with_picture
from trainer_service.weight_sync.certificate import GAP_LIMITS, MEAN_LIMITS, GapRule, Publisher
from trainer_service.weight_sync.choice import check_channel

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SNAPSHOTS = "snapshots"
_QUEUED_SHARE = 8
"""One part in this many of the memory that is free once the base model is loaded is for queued operations."""
_CALL_GRACE_S = 0.3
"""Time that running calls get to end when the server stops, in seconds."""
_STOP_TIMEOUT_S = 2.0
"""Longest wait for the current micro-batch or step when the trainer stops, in seconds."""


class _RestoringFailed(Exception):
    """The models of the last run cannot be restored, for a reason other than the base model."""


async def serve(config: TrainerConfig, group: RankGroup | None, cores: Cores) -> None:
    """Serves until SIGINT or SIGTERM, or until the engine has died. `group`: the ranks; None when there is only one.

    The health service says NOT_SERVING while the base model is loaded. Raises SystemExit when the trainer cannot start.
    """
    registry = new_registry()
    metrics = Metrics(registry)
    serve_metrics(registry, config.metrics_host, config.metrics_port)
    journal = await in_pool(open_journal, config, metrics)
    executing = Executing(journal.folder)
    servicer = TrainerServicer()
    server = new_server(config, servicer, registry)
    async with stop_event() as stop:
        await server.start()
        logger.info("listening on port %d", server.port)
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(start(config, journal, executing, metrics, group, cores))
        superseded = asyncio.wrap_future(journal.writer.superseded)
        await asyncio.wait({stopping, starting, superseded}, return_when=asyncio.FIRST_COMPLETED)
        if superseded.done():
            executing.close()
            _end_superseded(superseded.result())
        if not starting.done():
            executing.close()  # restored models may run operations already
            _leave("stopped while the base model was loading")
        servicer.trainer = trainer = await _started(starting, server, config)
        await server.set_serving(True)
        logger.info("serving %s", ", ".join(config.public_names))
        background = _begin_background(config, trainer)
        died = asyncio.create_task(trainer.scheduler.compute.engine_died.wait())
        await asyncio.wait({stopping, died, superseded}, return_when=asyncio.FIRST_COMPLETED)
        await server.set_serving(False)
        if superseded.done():
            executing.close()  # no operation is to blame
            await server.stop(0)
            _end_superseded(superseded.result())
        logger.info("stopping")
        for task in background:
            task.cancel()
        await server.stop(_CALL_GRACE_S)
        ended = await _close(trainer)
        if died.done():
            _leave("ended, because the engine has died", status=1)
        if group is None or ended or not await in_pool(group.lacks_a_rank):
            executing.close()
        _leave("stopped" if ended else "stopped in the middle of a step")


def open_journal(config: TrainerConfig, metrics: Metrics) -> Journal:
    """Opens the journal of `state_dir` or the one in PostgreSQL, or creates it. Raises SystemExit when it cannot be
    used. Blocks, and may not be called on the thread of an event loop."""
    path = config.state_dir / journal_file.NAME
    where: Path | tuple[Database, Path] = path
    try:
        if url := config.journal.get_secret_value():
            check_no_file(path)
            database = PostgresDatabase(url, config.name_in_journal)
            where = database, config.state_dir
            keep_trainer_id(config.state_dir, database.trainer_id)
        else:
            check_journal(path, config.state_dir / _SNAPSHOTS)
    except OSError as error:
        raise SystemExit(f"state_dir: {config.state_dir} cannot be used: {error}") from None
    return Journal(
        where, max_bytes=config.journal_max_bytes, result_retention_s=config.result_retention_s, metrics=metrics
    )


def _end_superseded(reason: Superseded) -> NoReturn:
    """Ends a process whose journal belongs to another one. That one computes again what this one still computes."""
    logger.error("%s; this process ends", reason)
    _leave("ended, because another trainer has taken over the journal", status=1)


def new_server(config: TrainerConfig, servicer: TrainerServicer, registry: CollectorRegistry) -> Server:
    """The gRPC server, which is not listening yet, with the trainer's three services."""
    server = Server(
        config.listen,
        [trainer_pb2.DESCRIPTOR, trainer_admin_pb2.DESCRIPTOR, metrics_pb2.DESCRIPTOR],
        api_keys=config.accepted_keys,
        admin_keys=config.admin_keys,
        certificates=config.certificates,
    )
    add_TrainerServiceServicer_to_server(servicer, server.grpc)
    add_TrainerAdminServiceServicer_to_server(TrainerAdminServicer(servicer), server.grpc)
    add_MetricsServiceServicer_to_server(MetricsServicer(registry), server.grpc)
    return server


async def _started(starting: asyncio.Task[Trainer], server: Server, config: TrainerConfig) -> Trainer:
    """The started trainer. If it cannot start, the server is stopped, and SystemExit says why."""
    try:
        return starting.result()
    except StorageUnusable as error:
        reason, cause = str(error), None
    except _RestoringFailed as error:
        reason, cause = f"cannot restore the models in {config.state_dir}: {error}", error
    except (UnsupportedModel, OSError, ValueError) as error:
        reason, cause = f"cannot load the base model {config.base_model}: {error}", None
    await server.stop(0)
    raise SystemExit(reason) from cause


def _begin_background(config: TrainerConfig, trainer: Trainer) -> set[asyncio.Task[None]]:
    """Starts the tasks that give up lost operations and park idle models, where they are configured, and the one that
    watches the weight channel's device."""
    background: set[asyncio.Task[None]] = set()
    if timeout_s := config.missing_operation_timeout_s:
        lost = LostOperations(trainer.scheduler, trainer.operations.work_of, timeout_s=timeout_s)
        background.add(asyncio.create_task(lost.run()))
    if config.park_after_s:
        background.add(asyncio.create_task(trainer.scheduler.parking.run(idle_s=config.park_after_s)))
    background.add(asyncio.create_task(_end_with_device(trainer)))
    return background


async def _end_with_device(trainer: Trainer) -> None:
    """Lets the trainer end when the device fails where no operation meets it."""
    await trainer.operations.publishing.publisher.sender.device_failed.wait()
    trainer.scheduler.compute.engine_died.set()


async def _close(trainer: Trainer) -> bool:
    """Ends the trainer's work and closes its journal. Returns False when the current micro-batch or step still runs."""
    ended = await trainer.scheduler.close(timeout_s=_STOP_TIMEOUT_S)
    await trainer.operations.publishing.publisher.sender.close()
    if ended and isinstance(trainer.operations.engine, LeadingEngine):
        await asyncio.wait({asyncio.create_task(in_pool(trainer.operations.engine.stop))}, timeout=1)
    trainer.journal.close()
    return ended


async def start(
    config: TrainerConfig,
    journal: Journal,
    executing: Executing,
    metrics: Metrics,
    group: RankGroup | None,
    cores: Cores,
) -> Trainer:
    """Loads the base model, makes the parts of the trainer, and begins to restore the models.

    Raises StorageUnusable, _RestoringFailed, and the errors of `load`.
    """
    storage = await in_pool(
        open_storage,
        config.checkpoint_dir,
        state_dir=config.state_dir,
        metrics=metrics,
        min_free_bytes=config.min_free_bytes,
    )
    own_id = await in_pool(trainer_id, config.state_dir)
    sender = WeightSender(config, metrics, trainer_id=own_id, device=device_of(config))
    sender.start()
    base = await in_pool(load, config, group)
    cores.tokens_per_thread = base.tokens_per_thread
    engine = new_engine(config, base, group, metrics)
    await in_pool(lambda: engine.follow(plan(engine, config)))
    checkpoints = CheckpointStore(storage, metrics)
    scheduler = new_scheduler(config, engine, journal, executing, cores, metrics)
    sequences, pictured = canary_of(base), with_picture(base)
    canary, seeing = Canary(sequences, await in_pool(engine.score, None, sequences)), None
    if pictured:
        unadapted = await in_pool(engine.score, None, pictured)
        seeing = Canary([*sequences, *pictured], np.concatenate([canary.unadapted, unadapted]))
    rule = gap_rule(config, base.dtype)
    publisher = Publisher(sender, canary, rule, metrics, check_ours=journal.check_ours, seeing=seeing)
    files = await _open_snapshots(config, journal, metrics)
    snapshots = Snapshots(files, journal, snapshot_policy(config), metrics, executing)
    models = LiveModels(config.public_names, base.weights_sum, allow_other_weights=config.allow_other_base_weights)
    operations = Operations(
        engine,
        checkpoints,
        publisher,
        scheduler,
        models,
        config.max_lora_rank,
        snapshots,
    )
    importer = Importer(base, checkpoints, max_rank=config.max_lora_rank, max_bytes=config.max_import_bytes)
    exempt_from_collections()  # before there are models, which may be deleted
    restorer = Restorer(journal, snapshots, operations, scheduler, metrics)
    try:
        await restorer.run()
    except (OSError, ValueError) as error:
        raise _RestoringFailed(str(error)) from error
    return Trainer(
        uuid.uuid4().hex,
        operations,
        scheduler,
        journal,
        checkpoints,
        importer,
        Moving(restorer, partial(_open_packages, config, metrics), trainer_id=own_id),
        own_id,
        fingerprint(config, engine),
    )


def fingerprint(config: TrainerConfig, engine: TrainingEngine) -> dict[str, str]:
    """Properties that trainers of one base model must have in common, by name: those that decide whether a request is
    accepted, and those on which the numbers of its answer depend beyond rounding. A deterministic trainer promises
    every bit, so it adds what changes bits."""
    base = engine.base
    found = {
        "base_weights": base.weights_sum,
        "dtype": str(base.dtype).removeprefix("torch."),
        "full_training": str(base.trainable).lower(),
        "deterministic": str(config.deterministic).lower(),
        "max_context_length": str(base.max_context_length),
        "max_lora_rank": str(config.max_lora_rank),
        "trainable_groups": ", ".join(base.groups),
        "pictures": str(base.tower is not None).lower(),
    }
    if config.deterministic:
        found |= {
            "device": base.device.type,
            "kernels": config.kernels,
            "share_prefixes": str(config.share_prefixes).lower(),
            "token_budget": str(config.fixed_token_budget),
            "picture_cost": str(engine.memory.plan.picture_cost),
        }
    return found


def new_engine(config: TrainerConfig, base: BaseModel, group: RankGroup | None, metrics: Metrics) -> TrainingEngine:
    settings = {**engine_settings(config), "metrics": metrics}
    return TrainingEngine(base, **settings) if group is None else LeadingEngine(base, group, **settings)


def new_scheduler(
    config: TrainerConfig,
    engine: TrainingEngine,
    journal: Journal,
    executing: Executing,
    cores: Cores,
    metrics: Metrics,
) -> Scheduler:
    return Scheduler(
        engine.passes,
        journal,
        max_queued_operations=config.max_queued_operations,
        max_models=1 if config.full_training else config.max_models,
        max_known_models=config.max_known_models,
        max_queued_bytes=config.max_queued_bytes or host_bytes() // _QUEUED_SHARE,
        metrics=metrics,
        device_type=engine.base.device.type,
        alone=config.deterministic,
        executing=executing,
        cores=cores,
    )


def _open_packages(config: TrainerConfig, metrics: Metrics) -> Storage:
    """The packages of models that move: a part of the checkpoints' storage. Raises NotReady."""
    try:
        return open_storage(
            f"{config.checkpoint_dir.rstrip('/')}/{packages.FOLDER}",
            state_dir=config.state_dir,
            metrics=metrics,
            min_free_bytes=config.min_free_bytes,
            scratch="moving.scratch",
        )
    except StorageUnusable as error:
        raise NotReady(str(error)) from error


async def _open_snapshots(config: TrainerConfig, journal: Journal, metrics: Metrics) -> SnapshotStore:
    """The snapshots: a folder of state_dir, or with a journal in PostgreSQL, a part of the checkpoints' storage. Raises
    StorageUnusable, and _RestoringFailed when the folder cannot be used."""
    if journal.shared_id:
        storage = await in_pool(
            open_storage,
            f"{config.checkpoint_dir.rstrip('/')}/{stored_snapshots.FOLDER}/{journal.shared_id}",
            state_dir=config.state_dir,
            metrics=metrics,
            min_free_bytes=config.min_free_bytes,
            scratch="snapshots.scratch",
        )
        return StoredSnapshots(storage)
    try:
        return await in_pool(SnapshotFiles, config.state_dir / _SNAPSHOTS, min_free_bytes=config.min_free_bytes)
    except OSError as error:
        raise _RestoringFailed(str(error)) from error


def follow(config: TrainerConfig, group: RankGroup, cores: Cores) -> None:
    """The work of a rank other than 0: loads the base model, then runs the commands of rank 0."""
    try:
        base = load(config, group)
    except (UnsupportedModel, OSError, ValueError) as error:
        group.end(f"cannot load the base model {config.base_model}: {error}")
    exempt_from_collections()
    Follower(base, group, cores, **engine_settings(config)).work()


def engine_settings(config: TrainerConfig) -> dict[str, Any]:
    """Settings of the engine, which are the same on every rank."""
    return {
        "max_tokens_per_microbatch": config.most_tokens(device_of(config).type),
        "max_targets_per_token": config.max_targets_per_token,
        "activation_checkpointing": config.effective_checkpointing,
        "deterministic": config.deterministic,
        "share_prefixes": config.share_prefixes,
    }


def snapshot_policy(config: TrainerConfig) -> Policy:
    return Policy(config.snapshot_steps, config.snapshot_interval_s, config.snapshot_journal_bytes)


def plan(engine: TrainingEngine, config: TrainerConfig) -> Plan:
    """The memory plan of this machine. Raises ValueError when memory does not suffice for the token budget of a
    deterministic trainer."""
    limits = bounds(config)
    measured = measure(engine, limits)
    if config.deterministic and measured.token_budget < limits.token_budget:
        raise ValueError(
            f"deterministic: {limits.token_budget} tokens at once do not fit into memory, which has room for "
            f"{measured.token_budget}; set token_budget to that or less, and keep it"
        )
    return measured


def bounds(config: TrainerConfig) -> Bounds:
    return Bounds(
        max_tokens_per_microbatch=config.most_tokens(device_of(config).type),
        max_lora_rank=config.max_lora_rank,
        token_budget=config.fixed_token_budget,
        memory_bytes=config.memory_bytes,
        adapter_device_bytes=config.adapter_device_bytes,
        ranks_per_machine=Place.of(config).local_world_size,
    )


def gap_rule(config: TrainerConfig, dtype: torch.dtype) -> GapRule:
    limit = GAP_LIMITS[dtype] if config.publish_gap_limit is None else config.publish_gap_limit
    mean_limit = MEAN_LIMITS[dtype] if config.publish_mean_gap_limit is None else config.publish_mean_gap_limit
    return GapRule(limit, mean_limit, config.on_publish_gap, config.publish_score_timeout_s)


def load(config: TrainerConfig, group: RankGroup | None) -> BaseModel:
    """Loads the base model on this rank. Raises UnsupportedModel, OSError, ValueError."""
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the setting is per thread
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return BaseModel.load(
        config.base_model,
        device=device,
        dtype=_DTYPES[dtype],
        trainable=config.full_training,
        kernels=config.kernels,
        division=None if group is None else group.division(),
        quantize=config.quantize,
        pictures=config.pictures,
        pages=config.base_pages,
    )


def cores_of(config: TrainerConfig, place: Place, device: torch.device) -> Cores:
    """This rank's share of the cores. Raises ValueError for an invalid cores_page."""
    most = config.num_threads
    if not config.cores_page and device.type == "cpu":
        most = process.num_threads(place, most, cores=usable_cores())
    return Cores(
        config.cores_page,
        most=most,
        set_threads=torch.set_num_threads,
        processes=place.local_world_size,
        announces=place.rank == 0,
        fixed=config.deterministic,
    )


def device_of(config: TrainerConfig) -> torch.device:
    """The device on which this rank computes."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, Place.of(config).local_rank) if kind == "cuda" else torch.device(kind)


def _leave(reason: str, *, status: int = 0) -> NoReturn:
    """Logs the reason and ends the process at once: a regular exit would wait for the compute thread."""
    logger.info("%s", reason)
    tracing.shutdown()
    process.leave(status)


def run(config: TrainerConfig) -> None:
    sys.setswitchinterval(SWITCH_S)
    place = Place.of(config)
    process.begin(place, log_level=config.log_level, log_format=config.log_format)
    if config.tracing and place.rank == 0:
        tracing.setup("trainer")
    logger.info("config: %s", config.model_dump_json())
    cores = _prepare_process(config, place)
    if place.alone:
        asyncio.run(serve(config, None, cores))
        return
    group = RankGroup.join(place, device_of(config), timeout_s=config.rank_timeout_s)
    logger.info("rank %d of %d", place.rank, place.world_size)
    if place.rank == 0:
        try:
            asyncio.run(serve(config, group, cores))
        except SystemExit as error:  # after a regular exit the others would take this rank for stopped, and kill it
            group.end(str(error))
        except Exception as error:
            logger.exception("this rank has failed")
            group.end(f"{type(error).__name__}: {error}")
    else:
        process.follow(lambda: follow(config, group, cores))


def _prepare_process(config: TrainerConfig, place: Place) -> Cores:
    """Sets up memory allocation and deterministic kernels, and returns this rank's share of the cores.

    Raises SystemExit for a channel or a cores_page that cannot be used here.
    """
    device = device_of(config)
    try:
        check_channel(config.channel, gpu_uuid=gpu_uuid(device))
        if device.type == "cpu" and config.keep_freed_memory and not keep_freed_memory():
            logger.info("keep_freed_memory: has no effect here, the C library is not glibc")
        cores = cores_of(config, place, device)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    logger.info("%s", cores)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return cores
