"""The gateway's parts, and how they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import cast

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request

from gateway.clients import Clients
from gateway.config import DATABASE, GatewayConfig
from gateway.dashboard.recorder import Dashboard
from gateway.database.catalog import Catalog
from gateway.database.store import Store
from gateway.futures import Futures
from gateway.metrics import Metrics
from gateway.openai.generator import Generator
from gateway.peers import OtherGateways, Peers
from gateway.reaper import Reaper
from gateway.sampling.certificates import Certificates
from gateway.sampling.completions import Completions
from gateway.sampling.homes import Homes
from gateway.sampling.inflight import Inflight
from gateway.sampling.publishing import Publishing
from gateway.sampling.records import Records
from gateway.sampling.samples import Samples
from gateway.session_search import SessionSearch
from gateway.storage.arrivals import Arrivals
from gateway.storage.checkpoints import Checkpoints
from gateway.storage.copies import Copies
from gateway.storage.downloads import Downloads
from gateway.storage.imports import Imports
from gateway.storage.retention import Retention
from gateway.storage.retirement import Retirement
from gateway.tasks import to_its_end
from gateway.tenants.access import Access
from gateway.tenants.auth import REFRESH_S, Caller, Callers
from gateway.tenants.billing import Billing
from gateway.tenants.keys import Keys
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Limits
from gateway.tenants.tokens import Tokens
from gateway.training.custom_losses import CustomLosses
from gateway.training.operations import Operations
from gateway.training.results import Results
from gateway.training.saves import Saves
from gateway.turns import Turns
from tinsmith.rpc.auth import named, require_keys

logger = logging.getLogger(__name__)


_HEARTBEATS_S = 1.0
"""Between two times that they are written."""


class StartError(Exception):
    """The gateway cannot start; the message says why."""


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.turns = Turns()
        self.tokens = Tokens(config)
        self.store = Store(config.resolved_database_url, self.metrics)
        self.keys = Keys(self.store)
        self.callers = Callers(named(config.api_keys), self.keys)
        self.access = Access(self.store)
        self.ledger = Ledger(self.store)
        self.clients = Clients(
            trainers=config.trainers,
            samplers=config.samplers,
            metrics=self.metrics,
            api_key=config.service_key.get_secret_value(),
            certificates=config.certificates,
            sampler_timeout_s=config.sampler_timeout_s,
            sampler_load_factor=config.sampler_load_factor,
        )
        self.limits = Limits(self.keys, self.ledger, context_length=self._context_length)
        self.callers.also_read = self.limits.refresh
        self.futures = Futures(cache_bytes=config.result_cache_bytes, metrics=self.metrics, ledger=self.ledger)
        self.dashboard = Dashboard(
            config, store=self.store, clients=self.clients, futures=self.futures, metrics=self.metrics
        )
        self.store.is_shared = bool(config.peer_url)
        self.peers = Peers(self.store, self.futures, url=config.peer_url)
        self.completions = Completions(
            self.store, self.futures, home=self.peers.gateway_id if self.peers.are_several else None
        )
        self.homes = Homes(self.store, self.peers, self.completions)
        self.records = Records(self.store, retention_s=config.record_retention_s)
        self.retirement = Retirement(self.store, self.clients)
        self.publishing = Publishing(self.clients, self.retirement)
        self.inflight = Inflight(self.store, self.clients, self.publishing)
        self.checkpoints = Checkpoints(
            self.store,
            self.clients,
            ledger=self.ledger,
            retirement=self.retirement,
            timeout_s=config.submit_timeout_s,
        )
        self.certificates = Certificates(self.clients, self.inflight, self.retirement)
        self.arrivals = Arrivals(self.store, self.checkpoints, gateway_id=self.peers.gateway_id)
        self.copies = Copies(
            self.store,
            self.clients,
            self.checkpoints,
            limits=self.limits,
            arrivals=self.arrivals,
            ledger=self.ledger,
        )
        self.imports = Imports(
            config,
            store=self.store,
            clients=self.clients,
            arrivals=self.arrivals,
            limits=self.limits,
            ledger=self.ledger,
        )
        self.catalog = Catalog(self.store)
        self.session_search = SessionSearch(self.store)
        self.billing = Billing(config, store=self.store, ledger=self.ledger)
        self.downloads = Downloads(config)
        self.operations = Operations(
            config,
            clients=self.clients,
            futures=self.futures,
            results=Results(self.store, self.inflight, self.ledger),
            store=self.store,
            metrics=self.metrics,
            ledger=self.ledger,
            history=self.dashboard.history,
            gateway_id=self.peers.gateway_id,
        )
        self.saves = Saves(
            self.store, self.checkpoints, self.futures, self.operations, patience_s=config.submit_timeout_s
        )
        self.custom_losses = CustomLosses(
            config, store=self.store, clients=self.clients, futures=self.futures, operations=self.operations
        )
        self.samples = Samples(
            config,
            clients=self.clients,
            futures=self.futures,
            inflight=self.inflight,
            records=self.records,
            publishing=self.publishing,
            ledger=self.ledger,
            recent=self.dashboard.samples,
            metrics=self.metrics,
            turns=self.turns,
        )
        self.generator = Generator(
            config,
            clients=self.clients,
            publishing=self.publishing,
            ledger=self.ledger,
            limits=self.limits,
            recent=self.dashboard.samples,
            metrics=self.metrics,
        )
        self.retention = Retention(config, store=self.store, checkpoints=self.checkpoints, metrics=self.metrics)
        self.reaper = Reaper(
            config,
            store=self.store,
            clients=self.clients,
            futures=self.futures,
            arrivals=self.arrivals,
            checkpoints=self.checkpoints,
            retirement=self.retirement,
            billing=self.billing,
            records=self.records,
            operations=self.operations,
            peers=self.peers,
            retention=self.retention,
            metrics=self.metrics,
        )
        self.peers.on_death = self.operations.take_over
        self.peers.on_beat = self.reaper.hear_of_ends
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises StartError when the database cannot be used."""
        try:
            if not self.config.database_url.get_secret_value():
                self.config.state_dir.mkdir(parents=True, exist_ok=True)
                database = self.config.state_dir / DATABASE
                database.touch(mode=0o600)  # it holds secrets that sign
                database.chmod(0o600)
            await self.store.migrate()
            await self.tokens.start(self.store)
            await self.downloads.start(self.store)
            await self.peers.start()
            await self.homes.start()
            await self.callers.read()
        except OtherGateways as error:
            raise StartError(str(error)) from None
        except (OSError, SQLAlchemyError) as error:
            url = make_url(self.config.resolved_database_url).render_as_string(hide_password=True)
            raise StartError(f"the database {url} cannot be used: {error}") from error
        try:
            require_keys(
                self.config.host, [] if self.callers.anyone else ["some"], setting="host", env="GATEWAY_API_KEYS"
            )
        except ValueError as error:
            raise StartError(f"{error}, or make one with `tinsmith keys create`") from None
        self.clients.start()
        await self.operations.take_over()
        self._tasks = [
            asyncio.create_task(self.peers.run()),
            asyncio.create_task(self._write_heartbeats()),
            asyncio.create_task(self.reaper.run()),
            asyncio.create_task(self.ledger.run()),
            asyncio.create_task(self.dashboard.run()),
            asyncio.create_task(self._read_keys()),
        ]

    def _context_length(self, base_model: str) -> int:
        infos = [info for info in self.clients.sampler_infos() if base_model in info.base_models]
        return max((info.max_context_length for info in infos), default=0)

    async def _read_keys(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await to_its_end(self.callers.refresh())

    async def _write_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEATS_S)
            try:
                await to_its_end(self.store.sessions.write_heartbeats())
            except SQLAlchemyError as error:
                logger.warning("heartbeats cannot be written, so those of the last second are lost: %s", error)

    async def stop(self) -> None:
        """Accepted operations go on in the trainer; samples in work are lost, and the SDK submits them again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.homes.close()
        await self.futures.close()
        await self.inflight.close()
        await self.publishing.close()
        await self.clients.close()
        with contextlib.suppress(SQLAlchemyError):
            await self.store.sessions.write_heartbeats()
            await self.ledger.flush()
            await self.peers.stop()
            await self.dashboard.flush()
            await self.callers.write_used()
        await self.store.close()


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def caller_of(request: Request) -> Caller:
    """Who the API key belongs to."""
    return cast(Caller, request.state.caller)


def owner_of(request: Request) -> str:
    """To whom belongs what the request makes."""
    return caller_of(request).owner
