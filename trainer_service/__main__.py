"""python -m trainer_service"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from typing import NoReturn

import torch

from tinsmith.modeling.base_model import BaseModel, UnsupportedModel
from tinsmith.rpc import logs
from tinsmith.rpc.metrics import new_registry, serve_metrics
from tinsmith.rpc.server import Server, stop_event
from tinsmith.rpc.settings import read_settings
from tinsmith.v1 import trainer_pb2
from tinsmith.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tinsmith.weight_group import Backend
from trainer_service.checkpoints import CheckpointStore
from trainer_service.config import TrainerConfig
from trainer_service.engine import TrainingEngine
from trainer_service.imports import Importer
from trainer_service.journal import Journal
from trainer_service.metrics import Metrics
from trainer_service.operations import Operations
from trainer_service.scheduler import Scheduler
from trainer_service.servicer import Trainer, TrainerServicer
from trainer_service.weight_sync import WeightSender

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CALL_GRACE_S = 0.3
_STOP_TIMEOUT_S = 2.0


async def serve(config: TrainerConfig) -> None:
    """Runs until SIGINT or SIGTERM. Health is NOT_SERVING while the base model is loaded."""
    registry = new_registry()
    metrics = Metrics(registry)
    serve_metrics(registry, config.metrics_host, config.metrics_port)
    journal = Journal(
        config.state_dir / "journal.sqlite",
        max_bytes=config.journal_max_bytes,
        result_retention_s=config.result_retention_s,
        metrics=metrics,
    )
    server = Server(config.listen, [trainer_pb2.DESCRIPTOR], api_keys=config.accepted_keys)
    servicer = TrainerServicer()
    add_TrainerServiceServicer_to_server(servicer, server.grpc)
    async with stop_event() as stop:
        await server.start()
        logger.info("listening on port %d", server.port)
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(start(config, journal, metrics, port=server.port))
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            _leave("stopped while the base model was loading")
        try:
            servicer.trainer = trainer = starting.result()
        except (UnsupportedModel, OSError, ValueError) as error:
            await server.stop(0)
            raise SystemExit(f"cannot load the base model {config.base_model}: {error}") from None
        await server.set_serving(True)
        logger.info("serving %s", ", ".join(config.public_names))
        await stopping
        logger.info("stopping")
        await server.stop(_CALL_GRACE_S)
        ended = await trainer.scheduler.close(timeout_s=_STOP_TIMEOUT_S)
        await trainer.operations.sender.close()
        journal.close()
        _leave("stopped" if ended else "stopped in the middle of a step")


async def start(config: TrainerConfig, journal: Journal, metrics: Metrics, *, port: int) -> Trainer:
    """Loads the base model and puts the parts together."""
    num_lost = await journal.lose_models()
    if num_lost:
        logger.warning("%d models of an earlier run are lost; their results can still be asked for", num_lost)
    sender = WeightSender(
        config.samplers,
        api_key=config.service_key.get_secret_value(),
        trainer_id=f"{socket.gethostname()}:{port}",
        host=config.channel_host,
        backend=channel_backend(config),
        timeout_s=config.channel_timeout_s,
        metrics=metrics,
    )
    sender.start()
    base = await asyncio.to_thread(load, config)
    engine = TrainingEngine(base, max_tokens_per_microbatch=config.max_tokens_per_microbatch)
    checkpoints = CheckpointStore(config.checkpoint_dir, metrics)
    operations = Operations(engine, checkpoints, sender, config.public_names, config.max_lora_rank)
    scheduler = Scheduler(
        engine,
        journal,
        max_queued_operations=config.max_queued_operations,
        max_models=config.max_models,
        metrics=metrics,
    )
    importer = Importer(base, checkpoints, max_rank=config.max_lora_rank, max_bytes=config.max_import_bytes)
    return Trainer(uuid.uuid4().hex, operations, scheduler, journal, checkpoints, importer)


def load(config: TrainerConfig) -> BaseModel:
    device = device_of(config)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return BaseModel.load(config.base_model, device=device, dtype=_DTYPES[dtype])


def device_of(config: TrainerConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def channel_backend(config: TrainerConfig) -> Backend:
    if config.channel_backend == "auto":
        return "nccl" if device_of(config).type == "cuda" else "gloo"
    return config.channel_backend


def _leave(reason: str) -> NoReturn:
    """Ends the process as it is: the interpreter would wait for threads that compute, which cannot be stopped."""
    logger.info("%s", reason)
    logging.shutdown()
    os._exit(0)


def main() -> None:
    config = read_settings(TrainerConfig)
    logs.setup(config.log_level)
    logger.info("config: %s", config.model_dump_json())
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
