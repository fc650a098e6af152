"""The gateway: all its parts, one class for each package, and how they start and stop.

Each part is built from the parts above it, and knows no part below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sqlalchemy.exc import SQLAlchemyError

from gateway.assets import Assets
from gateway.clients import Clients
from gateway.config import DATABASE, GatewayConfig
from gateway.dashboard.recorder import Dashboard
from gateway.database.catalog import Catalog
from gateway.database.outages import in_words
from gateway.database.store import Store
from gateway.database.urls import without_secrets
from gateway.futures import Futures
from gateway.high_availability.forwarding import Forwarding
from gateway.high_availability.peers import GatewayPeers, OtherGateways
from gateway.load import Bodies, Pacer, Receiving, Turns, watch_event_loop
from gateway.metrics import Metrics
from gateway.moving import RunMover
from gateway.openai.generator import Generator
from gateway.placement import Placement
from gateway.reaper import Reaper
from gateway.sampling.certificates import PublishCertificates
from gateway.sampling.drawing import Drawings
from gateway.sampling.inflight import Inflight
from gateway.sampling.publishing import Publishing
from gateway.sampling.records import Records
from gateway.sampling.samples import Completions, SamplePlaces, Samples
from gateway.sampling.silent_clients import SilentClients
from gateway.sampling.suspects import Suspects
from gateway.sampling.unnamed import Unnamed
from gateway.session_search import SessionSearch
from gateway.storage.checkpoints import Checkpoints
from gateway.storage.copies import Copies
from gateway.storage.downloads import Downloads
from gateway.storage.imports import Imports
from gateway.storage.retention import Retention
from gateway.storage.retired_checkpoints import RetiredCheckpoints
from gateway.storage.transfers import Transfers
from gateway.tenants.access import Access
from gateway.tenants.auth import REFRESH_S, Callers
from gateway.tenants.billing import Billing
from gateway.tenants.keys import Keys
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Limits
from gateway.tenants.tokens import Tokens
from gateway.training.custom_losses import CustomLosses
from gateway.training.numbers import Numbers
from gateway.training.operations import Operations
from gateway.training.refusals import Refusals
from gateway.training.results import Results
from gateway.training.saves import PendingSaves
from tinsmith.rpc.auth import named, require_keys
from tinsmith.tasks import cancel_all, to_its_end

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The gateway cannot start; the message gives the reason."""


class Core:
    """Parts that all others use: database, services, futures and the other gateways."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.pacer = Pacer()
        self.turns = Turns()
        self.receiving = Receiving()
        self.bodies = Bodies(config.max_held_body_bytes, self.metrics.http.held_body_bytes)
        self.store = Store(config.resolved_database_url, self.metrics)
        self.store.is_shared = bool(config.peer_url)
        self.ledger = Ledger(self.store)
        self.clients = Clients(config, self.metrics)
        self.placement = Placement(self.store, self.clients, timeout_s=config.submit_timeout_s)
        self.futures = Futures(cache_bytes=config.result_cache_bytes, metrics=self.metrics, ledger=self.ledger)
        self.peers = GatewayPeers(self.store, self.futures, url=config.peer_url)
        self.moving = RunMover(
            store=self.store,
            clients=self.clients,
            placement=self.placement,
            peers=self.peers,
            metrics=self.metrics,
            adopt_after_s=config.adopt_after_s,
        )
        self.dashboard = Dashboard(
            config,
            store=self.store,
            clients=self.clients,
            futures=self.futures,
            moving=self.moving,
            metrics=self.metrics,
        )


class TenantParts:
    """Owners and their keys: authentication, access, rates, budgets and usage."""

    def __init__(self, core: Core) -> None:
        self.tokens = Tokens(core.config)
        self.keys = Keys(core.store)
        self.access = Access(core.store)
        self.billing = Billing(core.config, store=core.store, ledger=core.ledger)
        self.limits = Limits(
            self.keys,
            core.ledger,
            context_length=core.clients.samplers.context_length,
            counting=core.clients.counting,
            max_checkpoints=core.config.max_owner_rows,
        )
        self.callers = Callers(named(core.config.api_keys), self.keys, also_read=self.limits.refresh)


class StorageParts:
    """Checkpoints: the index, copies, imports, downloads, deletion and retention."""

    def __init__(self, core: Core, tenants: TenantParts) -> None:
        config, store, clients, ledger = core.config, core.store, core.clients, core.ledger
        placement = core.placement
        self.retired = RetiredCheckpoints(store, placement)
        self.checkpoints = Checkpoints(
            store, clients, placement, ledger=ledger, retired=self.retired, timeout_s=config.submit_timeout_s
        )
        self.transfers = Transfers(store, self.checkpoints, gateway_id=core.peers.gateway_id)
        self.copies = Copies(store, placement, self.checkpoints, limits=tenants.limits, transfers=self.transfers)
        self.imports = Imports(
            config, store=store, placement=placement, transfers=self.transfers, limits=tenants.limits
        )
        self.downloads = Downloads(config)
        self.retention = Retention(config, store=store, checkpoints=self.checkpoints, metrics=core.metrics)


class SamplingParts:
    """Samples, the samplers that generate them, and the publishing of versions to samplers."""

    def __init__(self, core: Core, tenants: TenantParts, storage: StorageParts) -> None:
        config, store, clients, peers = core.config, core.store, core.clients, core.peers
        self.completions = Completions(store, core.futures, home=peers.gateway_id if peers.are_several else None)
        self.suspects = Suspects(store)
        self.forwarding = Forwarding(store, peers, self.completions, self.suspects) if peers.are_several else None
        """None if this gateway is the only one of its database, and so has all samples."""
        self.unnamed = Unnamed(store)
        self.records = Records(store, retention_s=config.record_retention_s)
        self.publishing = Publishing(clients, core.placement, storage.retired)
        self.inflight = Inflight(store, clients, self.publishing)
        self.certificates = PublishCertificates(core.placement, self.inflight, storage.retired)
        self.places = SamplePlaces(config, core.futures)
        drawings = Drawings(
            clients=clients,
            publishing=self.publishing,
            inflight=self.inflight,
            suspects=self.suspects,
            ledger=core.ledger,
            recent=core.dashboard.samples,
            metrics=core.metrics,
        )
        self.silent_clients = SilentClients(
            store,
            core.futures,
            self.completions,
            timeout_s=config.sample_client_timeout_s,
            interval_s=config.reap_interval_s,
        )
        self.samples = Samples(config, drawings=drawings, futures=core.futures, records=self.records, pacer=core.pacer)
        self.generator = Generator(config, clients=clients, drawings=drawings, limits=tenants.limits, pacer=core.pacer)


class TrainingParts:
    """Training operations: from the client's request through the trainer to the stored answer."""

    def __init__(self, core: Core, storage: StorageParts, sampling: SamplingParts) -> None:
        config, store, clients, futures = core.config, core.store, core.clients, core.futures
        self.operations = Operations(
            config,
            placement=core.placement,
            futures=futures,
            results=Results(store, sampling.inflight, core.ledger),
            store=store,
            metrics=core.metrics,
            ledger=core.ledger,
            history=core.dashboard.history,
            gateway_id=core.peers.gateway_id,
        )
        self.refusals = Refusals(store, futures, gateway_id=core.peers.gateway_id)
        self.numbers = Numbers(core.placement, futures, core.peers, timeout_s=config.submit_timeout_s)
        self.saves = PendingSaves(
            store, storage.checkpoints, futures, self.operations, patience_s=config.submit_timeout_s
        )
        self.custom_losses = CustomLosses(config, store=store, clients=clients, futures=futures, refusals=self.refusals)


class Gateway(Core):
    """All parts of the gateway. Handlers get it from their request."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self.assets = Assets(config)
        self.tenants = TenantParts(self)
        self.storage = StorageParts(self, self.tenants)
        self.sampling = SamplingParts(self, self.tenants, self.storage)
        self.training = TrainingParts(self, self.storage, self.sampling)
        self.catalog = Catalog(self.store)
        self.session_search = SessionSearch(self.store)
        self.reaper = Reaper(
            config,
            store=self.store,
            placement=self.placement,
            futures=self.futures,
            transfers=self.storage.transfers,
            checkpoints=self.storage.checkpoints,
            retired=self.storage.retired,
            billing=self.tenants.billing,
            records=self.sampling.records,
            silent_clients=self.sampling.silent_clients,
            operations=self.training.operations,
            refusals=self.training.refusals,
            peers=self.peers,
            retention=self.storage.retention,
            metrics=self.metrics,
        )
        self.peers.on_beat = self.reaper.hear_of_ends
        self._write_behinds = (
            self.store.sessions.heartbeats,
            self.ledger.behind,
            self.dashboard.behind,
            self.tenants.callers.uses,
            self.sampling.suspects.behind,
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Prepares the database, and starts the background tasks.

        Raises StartError when the database cannot be used, when other gateways use it and this one has no peer_url, or
        when a key is required and there is none.
        """
        try:
            if not self.config.database_url.get_secret_value():
                self.config.state_dir.mkdir(parents=True, exist_ok=True)
                database = self.config.state_dir / DATABASE
                database.touch(mode=0o600)  # the database holds the secrets that sign JWTs and download URLs
                database.chmod(0o600)
            await self.store.migrate()
            await self.tenants.tokens.start(self.store)
            await self.storage.downloads.start(self.store)
            await self.peers.start()
            if self.sampling.forwarding is not None:
                await self.sampling.forwarding.start()
            await self.tenants.callers.read()
            await self.sampling.suspects.read()
        except OtherGateways as error:
            raise StartError(str(error)) from None
        except (OSError, SQLAlchemyError) as error:
            url = without_secrets(self.config.resolved_database_url)
            raise StartError(f"the database {url} cannot be used: {in_words(error)}") from error
        try:
            require_keys(
                self.config.host,
                [] if self.tenants.callers.anyone else ["some"],
                setting="host",
                env="GATEWAY_API_KEYS",
            )
        except ValueError as error:
            raise StartError(f"{error}, or make one with `tinsmith keys create`") from None
        await self.clients.start()
        self.tasks = [
            asyncio.create_task(self.peers.run()),
            asyncio.create_task(self.reaper.run()),
            asyncio.create_task(self.moving.run()),
            asyncio.create_task(watch_event_loop(self.metrics.http.event_loop_seconds)),
            asyncio.create_task(self._read_keys()),
            *(asyncio.create_task(each.run()) for each in self._write_behinds),
        ]

    async def _read_keys(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await to_its_end(self.tenants.callers.refresh())

    async def stop(self) -> None:
        """Stops all tasks, and writes the rows that are written behind.

        Accepted operations go on in the trainer. Samples in work are lost, and the SDK submits them again.
        """
        await cancel_all(self.tasks)
        if self.sampling.forwarding is not None:
            await self.sampling.forwarding.close()
        await self.futures.close()
        await self.sampling.inflight.close()
        await self.sampling.publishing.close()
        await self.clients.close()
        for write in (*(each.flush for each in self._write_behinds), self.peers.stop):
            with contextlib.suppress(SQLAlchemyError):
                await write()
        await self.store.close()
