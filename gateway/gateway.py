"""The gateway's parts, and how they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request

from gateway.auth import Callers
from gateway.billing import Billing
from gateway.catalog import Catalog
from gateway.certificates import Certificates
from gateway.checkpoints import Checkpoints
from gateway.clients import Clients
from gateway.completions import Completions
from gateway.config import DATABASE, GatewayConfig
from gateway.copies import Copies
from gateway.custom_losses import CustomLosses
from gateway.downloads import Downloads
from gateway.futures import Futures
from gateway.imports import Imports
from gateway.inflight import Inflight
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.openai.generator import Generator
from gateway.operations import Operations
from gateway.publishing import Publishing
from gateway.reaper import Reaper
from gateway.records import Records
from gateway.results import Results
from gateway.retirement import Retirement
from gateway.samples import Samples
from gateway.session_search import SessionSearch
from gateway.store import Store
from gateway.tokens import Tokens
from tinsmith.rpc.auth import named


class StartError(Exception):
    """The gateway cannot start; the message says why."""


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.callers = Callers(named(config.api_keys))
        self.tokens = Tokens(config)
        self.store = Store(config.resolved_database_url, self.metrics)
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
        self.futures = Futures(cache_bytes=config.result_cache_bytes, metrics=self.metrics, ledger=self.ledger)
        self.completions = Completions(self.store, self.futures)
        self.records = Records(self.store, retention_s=config.record_retention_s)
        self.custom_losses = CustomLosses(config, store=self.store, clients=self.clients, futures=self.futures)
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
        self.copies = Copies(self.store, self.clients, self.checkpoints)
        self.imports = Imports(
            config, store=self.store, clients=self.clients, checkpoints=self.checkpoints, copies=self.copies
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
        )
        self.samples = Samples(
            config,
            clients=self.clients,
            futures=self.futures,
            inflight=self.inflight,
            records=self.records,
            publishing=self.publishing,
            ledger=self.ledger,
            metrics=self.metrics,
        )
        self.generator = Generator(
            config, clients=self.clients, publishing=self.publishing, ledger=self.ledger, metrics=self.metrics
        )
        self.reaper = Reaper(
            config,
            store=self.store,
            clients=self.clients,
            futures=self.futures,
            checkpoints=self.checkpoints,
            retirement=self.retirement,
            billing=self.billing,
            records=self.records,
            metrics=self.metrics,
        )
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
        except (OSError, SQLAlchemyError) as error:
            url = make_url(self.config.resolved_database_url).render_as_string(hide_password=True)
            raise StartError(f"the database {url} cannot be used: {error}") from error
        self.clients.start()
        self._tasks = [asyncio.create_task(self.reaper.run()), asyncio.create_task(self.ledger.run())]

    async def stop(self) -> None:
        """Accepted operations go on in the trainer; samples in work are lost, and the SDK submits them again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.futures.close()
        await self.inflight.close()
        await self.publishing.close()
        await self.clients.close()
        with contextlib.suppress(SQLAlchemyError):
            await self.ledger.flush()
        await self.store.close()


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def owner_of(request: Request) -> str:
    """Who the API key belongs to."""
    return cast(str, request.state.owner)
