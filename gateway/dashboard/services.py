"""State and metrics of gateway, trainers and samplers. The services are asked only while somebody looks at the page."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import SQLAlchemyError

from gateway.clients import Clients, TrainerClient
from gateway.metrics import Metrics
from gateway.moving import RunMover, TrainerState
from gateway.sampling.replicas import Replica
from gateway.views import Json
from tinsmith.errors import ServiceError
from tinsmith.v1 import metrics_pb2, metrics_pb2_grpc

logger = logging.getLogger(__name__)

_FRESH_S = 1.5
"""Time within which requests share one answer, in seconds."""
_ASK_TIMEOUT_S = 1.0
"""Longest wait for the metrics of a service, in seconds."""
_LEFT_OUT = ("_bucket", "_created")
"""Ends of the names of samples that are left out."""
_SHOWN = ("trainer_", "sampler_", "gateway_pending", "gateway_sampler", "gateway_trained", "process_")
"""Beginnings of the names of metrics that the page may show."""


class Services:
    """Asks the services for their metrics."""

    def __init__(self, clients: Clients, moving: RunMover, metrics: Metrics) -> None:
        self._clients = clients
        self._moving = moving
        self._registry: CollectorRegistry = metrics.registry
        self._asking: asyncio.Task[Json] | None = None
        self._asked_at = 0.0

    async def state(self) -> Json:
        """The state of all services. The `figures` of a service are those of `parse_figures`, and None when the service
        does not answer."""
        if self._asking is None or time.monotonic() - self._asked_at > _FRESH_S:
            self._asking, self._asked_at = asyncio.create_task(self._ask()), time.monotonic()
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Json:
        trainers, samplers = self._clients.trainers, self._clients.samplers.all
        figures = await asyncio.gather(*(_figures(service.channel) for service in (*trainers, *samplers)))
        moves = await self._moves()
        return {
            "at": time.time(),
            "gateway": {"figures": parse_figures(generate_latest(self._registry).decode())},
            "trainers": [_trainer(one, found, moves.get(one)) for one, found in zip(trainers, figures, strict=False)],
            "samplers": [_sampler(one, found) for one, found in zip(samplers, figures[len(trainers) :], strict=True)],
        }

    async def _moves(self) -> dict[TrainerClient, TrainerState]:
        """The runs of several trainers. Empty for one trainer, which has nowhere to move its runs to, and while the
        database cannot be read."""
        if len(self._clients.trainers) < 2:
            return {}
        try:
            return {one.trainer: one for one in await self._moving.state()}
        except SQLAlchemyError as error:
            logger.debug("the runs of the trainers cannot be read: %s", error)
            return {}


async def _figures(channel: grpc.aio.Channel) -> dict[str, float] | None:
    stub: Any = metrics_pb2_grpc.MetricsServiceStub(channel)
    try:
        reply = await stub.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=_ASK_TIMEOUT_S)
    except ServiceError as error:
        logger.debug("the metrics of a service cannot be read: %s", error.message)
        return None
    return parse_figures(reply.exposition)


def parse_figures(exposition: str) -> dict[str, float]:
    """Name and labels -> value, of the metrics in Prometheus's text format that the page may show.

    `trainer_queue_length{kind="optim_step"}` becomes "trainer_queue_length:optim_step".
    """
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(exposition)
        if family.name.startswith(_SHOWN)
        for sample in family.samples
        if not sample.name.endswith(_LEFT_OUT)
    }


def _trainer(trainer: TrainerClient, figures: dict[str, float] | None, moves: TrainerState | None) -> Json:
    info = trainer.info
    about: Json = {"address": trainer.address, "state": trainer.state, "figures": figures}
    if info is not None:
        about |= {
            "base_models": list(info.base_models),
            "device": info.device,
            "boot_id": info.boot_id,
            "architecture": info.architecture,
            "max_context_length": info.max_context_length,
            "max_lora_rank": info.max_lora_rank,
            "full_training": info.full_training,
        }
    if moves is not None:
        about |= {
            "num_runs": moves.num_runs,
            "is_drained": moves.is_drained,
            "can_be_stopped": moves.can_be_stopped,
            "num_problems": len(moves.problems),
        }
    return about


def _sampler(replica: Replica, figures: dict[str, float] | None) -> Json:
    info = replica.info
    about: Json = {
        "address": replica.address,
        "state": replica.state,
        "load": replica.load,
        "num_versions": len(replica.versions),
        "figures": figures,
    }
    if info is not None:
        about |= {
            "base_models": list(info.base_models),
            "engine": info.engine,
            "device": info.device,
            "boot_id": info.boot_id,
            "max_context_length": info.max_context_length,
            "max_lora_rank": info.max_lora_rank,
        }
    return about
