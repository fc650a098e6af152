"""Makes the parts of a trainer from its configuration."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.allocator import exempt_from_collections
from tinsmith.cores import Cores
from tinsmith.errors import NotReady
from tinsmith.memory import host_bytes
from tinsmith.modeling.base_model import BaseModel
from tinsmith.threads import in_pool
from trainer_service.config import TrainerConfig
from trainer_service.durability import journal_file, packages, stored_snapshots
from trainer_service.durability.executing import Executing
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import SnapshotPolicy, Snapshots
from trainer_service.durability.stored_snapshots import SnapshotStore, StoredSnapshots
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.measure import Bounds, measure
from trainer_service.metrics import Metrics
from trainer_service.operations.models import LiveModels
from trainer_service.operations.moving import Moving
from trainer_service.operations.operations import Operations
from trainer_service.operations.restore import Restorer, check_journal, check_no_file
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.leader import LeadingEngine
from trainer_service.ranks.place import Place
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.choice import keep_trainer_id, open_storage, trainer_id
from trainer_service.storage.imports import Importer
from trainer_service.storage.protocol import Storage, StorageUnusable
from trainer_service.trainer import Trainer
from trainer_service.weight_sync import WeightSender
from trainer_service.weight_sync.canary import Canary, canary_of, with_picture
from trainer_service.weight_sync.certificate import GAP_LIMITS, MEAN_LIMITS, GapRule, Publisher

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SNAPSHOTS = "snapshots"
_QUEUED_SHARE = 8
"""One part in this many of the memory that is free once the base model is loaded is for queued operations."""


class RestoringFailed(Exception):
    """The models of the last run cannot be restored, for a reason other than the base model."""


async def assemble(
    config: TrainerConfig,
    journal: Journal,
    executing: Executing,
    metrics: Metrics,
    group: RankGroup | None,
    cores: Cores,
) -> Trainer:
    """Loads the base model, makes the parts of the trainer, and begins to restore the models.

    Raises StorageUnusable, RestoringFailed, and the errors of `load`.
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
    publisher = await _new_publisher(config, engine, sender, journal, metrics)
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
    exempt_from_collections()  # before models are made, which may be deleted
    restorer = Restorer(journal, snapshots, operations, scheduler, metrics)
    try:
        await restorer.run()
    except (OSError, ValueError) as error:
        raise RestoringFailed(str(error)) from error
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


async def _new_publisher(
    config: TrainerConfig, engine: TrainingEngine, sender: WeightSender, journal: Journal, metrics: Metrics
) -> Publisher:
    """The publisher, with the canary scored by the base model."""
    sequences, pictured = canary_of(engine.base), with_picture(engine.base)
    canary, seeing = Canary(sequences, await in_pool(engine.score, None, sequences)), None
    if pictured:
        unadapted = await in_pool(engine.score, None, pictured)
        seeing = Canary([*sequences, *pictured], np.concatenate([canary.unadapted, unadapted]))
    rule = gap_rule(config, engine.base.dtype)
    return Publisher(sender, canary, rule, metrics, check_ours=journal.check_ours, seeing=seeing)


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
    StorageUnusable, and RestoringFailed when the folder cannot be used."""
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
        raise RestoringFailed(str(error)) from error


def engine_settings(config: TrainerConfig) -> dict[str, Any]:
    """Settings of the engine, which are the same on every rank."""
    return {
        "max_tokens_per_microbatch": config.most_tokens(device_of(config).type),
        "max_targets_per_token": config.max_targets_per_token,
        "activation_checkpointing": config.effective_checkpointing,
        "deterministic": config.deterministic,
        "share_prefixes": config.share_prefixes,
    }


def snapshot_policy(config: TrainerConfig) -> SnapshotPolicy:
    return SnapshotPolicy(config.snapshot_steps, config.snapshot_interval_s, config.snapshot_journal_bytes)


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


def device_of(config: TrainerConfig) -> torch.device:
    """The device on which this rank computes."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, Place.of(config).local_rank) if kind == "cuda" else torch.device(kind)
