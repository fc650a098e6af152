"""The trainer's process, or that of one of its ranks: serves until SIGTERM. assembly.py makes its parts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import NoReturn

import torch
from prometheus_client import CollectorRegistry

from tinsmith.allocator import exempt_from_collections, keep_freed_memory
from tinsmith.cores import SWITCH_S, Cores, usable_cores
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
from trainer_service.assembly import RestoringFailed, assemble, device_of, engine_settings, load, open_journal
from trainer_service.config import TrainerConfig
from trainer_service.durability.executing import Executing
from trainer_service.durability.journal_database import Superseded
from trainer_service.metrics import Metrics
from trainer_service.operations.missing import LostOperations
from trainer_service.ranks import process
from trainer_service.ranks.follower import Follower
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.leader import LeadingEngine
from trainer_service.ranks.place import Place
from trainer_service.servicer import TrainerServicer
from trainer_service.storage.protocol import StorageUnusable
from trainer_service.trainer import Trainer
from trainer_service.weight_sync.choice import check_channel

logger = logging.getLogger(__name__)

_CALL_GRACE_S = 0.3
"""Time that running calls get to end when the server stops, in seconds."""
_STOP_TIMEOUT_S = 2.0
"""Longest wait for the current micro-batch or step when the trainer stops, in seconds."""


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
        starting = asyncio.create_task(assemble(config, journal, executing, metrics, group, cores))
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


def _end_superseded(reason: Superseded) -> NoReturn:
    """Ends this process, because its journal belongs to another one by now. The other process repeats the operations
    that this one still computes."""
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
    except RestoringFailed as error:
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
    """Lets the trainer end when the device fails outside any operation."""
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


def follow(config: TrainerConfig, group: RankGroup, cores: Cores) -> None:
    """The work of a rank other than 0: loads the base model, then runs the commands of rank 0."""
    try:
        base = load(config, group)
    except (UnsupportedModel, OSError, ValueError) as error:
        group.end(f"cannot load the base model {config.base_model}: {error}")
    exempt_from_collections()
    Follower(base, group, cores, **engine_settings(config)).work()


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
        except SystemExit as error:  # after a regular exit the other ranks would take this one for stopped, and kill it
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
