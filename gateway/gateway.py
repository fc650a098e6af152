"""The gateway: all its parts, and how they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sqlalchemy.exc import SQLAlchemyError

from gateway.config import DATABASE, GatewayConfig
from gateway.database.catalog import Catalog
from gateway.database.urls import without_secrets
from gateway.high_availability.peers import OtherGateways
from gateway.parts import Core, Sampling, Storage, Tenants, Training
from gateway.reaper import Reaper
from gateway.session_search import SessionSearch
from gateway.tasks import to_its_end
from gateway.tenants.auth import REFRESH_S
from tinsmith.rpc.auth import require_keys

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The gateway cannot start; the message gives the reason."""


class Gateway(Core):
    """All parts of the gateway. Handlers get it from `codec.gateway_of`."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self.tenants = Tenants(self)
        self.storage = Storage(self, self.tenants)
        self.sampling = Sampling(self, self.tenants, self.storage)
        self.training = Training(self, self.storage, self.sampling)
        self.catalog = Catalog(self.store)
        self.session_search = SessionSearch(self.store)
        self.reaper = Reaper(
            config,
            store=self.store,
            clients=self.clients,
            futures=self.futures,
            transfers=self.storage.transfers,
            checkpoints=self.storage.checkpoints,
            retired=self.storage.retired,
            billing=self.tenants.billing,
            records=self.sampling.records,
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
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Prepares the database, and starts the background tasks.

        Raises StartError when the database cannot be used, other gateways use it, or a key is required and there is
        none.
        """
        try:
            if not self.config.database_url.get_secret_value():
                self.config.state_dir.mkdir(parents=True, exist_ok=True)
                database = self.config.state_dir / DATABASE
                database.touch(mode=0o600)  # it holds secrets for signing
                database.chmod(0o600)
            await self.store.migrate()
            await self.tenants.tokens.start(self.store)
            await self.storage.downloads.start(self.store)
            await self.peers.start()
            if self.sampling.forwarding is not None:
                await self.sampling.forwarding.start()
            await self.tenants.callers.read()
        except OtherGateways as error:
            raise StartError(str(error)) from None
        except (OSError, SQLAlchemyError) as error:
            url = without_secrets(self.config.resolved_database_url)
            raise StartError(f"the database {url} cannot be used: {error}") from error
        try:
            require_keys(
                self.config.host,
                [] if self.tenants.callers.anyone else ["some"],
                setting="host",
                env="GATEWAY_API_KEYS",
            )
        except ValueError as error:
            raise StartError(f"{error}, or make one with `tinsmith keys create`") from None
        self.clients.start()
        self._tasks = [
            asyncio.create_task(self.peers.run()),
            asyncio.create_task(self.reaper.run()),
            asyncio.create_task(self._read_keys()),
            *(asyncio.create_task(each.run()) for each in self._write_behinds),
        ]

    async def _read_keys(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await to_its_end(self.tenants.callers.refresh())

    async def stop(self) -> None:
        """Stops all tasks, and writes what is gathered.

        Accepted operations go on in the trainer. Samples in work are lost, and the SDK submits them again.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
