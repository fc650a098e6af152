"""The sampler's process: load, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from typing import NoReturn

from sampler_service.choice import load_engine, settled
from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.metrics import SamplerMetrics
from sampler_service.servicer import SamplerServicer
from sampler_service.tokenizer import TokenizerSlot
from sampler_service.vllm.processes import kill_all_below
from sampler_service.weights.weight_sync import WeightSyncServicer
from tinsmith.allocator import exempt_from_collections, keep_freed_memory
from tinsmith.cores import SWITCH_S
from tinsmith.errors import EngineDead
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.metrics import new_registry, serve_metrics
from tinsmith.rpc.metrics_service import MetricsServicer
from tinsmith.rpc.server import Server, stop_event
from tinsmith.v1 import (
    metrics_pb2,
    metrics_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    weight_sync_pb2,
    weight_sync_pb2_grpc,
)

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""Time in which running generations may end after the service is told to stop, in seconds."""


def make_server(config: SamplerConfig, slot: EngineSlot, metrics: SamplerMetrics) -> Server:
    files = [sampler_pb2.DESCRIPTOR, weight_sync_pb2.DESCRIPTOR, metrics_pb2.DESCRIPTOR]
    server = Server(
        config.listen,
        files,
        api_keys=config.accepted_keys,
        admin_keys=config.admin_keys,
        certificates=config.certificates,
    )
    sampler = SamplerServicer(config, slot, TokenizerSlot(config.base_model))
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(sampler, server.grpc)
    weights = WeightSyncServicer(config, slot, metrics)
    weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server(weights, server.grpc)
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(metrics.registry), server.grpc)
    return server


async def serve(config: SamplerConfig) -> int:
    """Returns the exit status: 1 when the model cannot be loaded or the engine has died."""
    registry = new_registry()
    metrics = SamplerMetrics(registry)
    slot = EngineSlot()
    server = make_server(config, slot, metrics)
    await server.start()
    serve_metrics(registry, config.host, config.metrics_port)
    logger.info("listening on %s:%d, loading %s", config.host, server.port, config.base_model)
    async with stop_event() as stop:
        stopped = asyncio.create_task(stop.wait())
        loading = asyncio.create_task(load_engine(config, metrics))
        await asyncio.wait([stopped, loading], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await server.stop(0)
            return 0
        try:
            engine = await loading
        except (UnsupportedModel, OSError, ValueError, EngineDead) as error:  # EngineDead: in a first pass
            logger.error("cannot serve %s: %s", config.base_model, error)
            stopped.cancel()
            await server.stop(0)
            return 1
        slot.engine = engine
        engine.requests.on_death = partial(server.set_serving, False)
        exempt_from_collections()
        await server.set_serving(True)
        logger.info("serving %s on port %d", ", ".join(config.model_names), server.port)
        died = asyncio.create_task(engine.requests.died.wait())
        await asyncio.wait([stopped, died], return_when=asyncio.FIRST_COMPLETED)
        await server.set_serving(False)
        stopping = asyncio.create_task(server.stop(2 * GRACE_S))
        await asyncio.wait([stopping], timeout=GRACE_S)
        await engine.stop()  # unfinished requests fail with NotReady
        await stopping
        died.cancel()
        stopped.cancel()
    return 1 if engine.requests.died.is_set() else 0


def run(config: SamplerConfig) -> None:
    sys.setswitchinterval(SWITCH_S)
    config, why = settled(config)
    logs.setup(config.log_level, config.log_format)
    logger.info("engine %s: %s", config.engine, why)
    if config.tracing:
        tracing.setup("sampler")
    logger.info("configuration: %s", config.model_dump_json())
    keep_freed_memory()  # temporary tensors of a step are as large as those of a training step
    asyncio.run(_serve_and_leave(config))


async def _serve_and_leave(config: SamplerConfig) -> NoReturn:
    """Serves, and ends the process within the event loop. The loop's usual end would cancel open health checks, and
    gRPC would log that with a traceback, below the reason for which a model could not be served."""
    status = await serve(config)
    tracing.shutdown()
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Ends this process, and processes of vLLM that were still starting.

    A usual exit takes a second because of torch, and longer with vLLM, and has nothing left to save.
    """
    kill_all_below()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
