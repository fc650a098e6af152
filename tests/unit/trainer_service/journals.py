"""Journals of both forms, for tests: a SQLite file, and a database of PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
from tinsmith.rpc.postgres import described
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.records import Body
from trainer_service.metrics import Metrics

MODEL = "s:train:0"


@dataclass(frozen=True, slots=True)
class Journals:
    """Where the journals of a test lie."""

    folder: Path
    url: str
    """The PostgreSQL database; empty for a SQLite file."""

    @property
    def name(self) -> str:
        """The journal's name in messages."""
        return described(self.url) if self.url else str(self.folder / "journal.sqlite")

    def database(self, *, trainer: str = "a", lease_s: float = 15.0, renew_s: float = 3.0) -> PostgresDatabase:
        """Must be called on a thread without an event loop."""
        return PostgresDatabase(self.url, trainer, lease_s=lease_s, renew_s=renew_s)

    def journal(
        self,
        database: PostgresDatabase | None = None,
        *,
        max_bytes: int = 1 << 20,
        result_retention_s: float = 3600.0,
        registry: CollectorRegistry | None = None,
    ) -> Journal:
        """Opens a journal; in PostgreSQL as trainer "a". Must be called on a thread without an event loop."""
        metrics = Metrics(registry or CollectorRegistry())
        options = {"max_bytes": max_bytes, "result_retention_s": result_retention_s, "metrics": metrics}
        if not self.url:
            return Journal(self.folder / "journal.sqlite", **options)
        return Journal((database or self.database(), self.folder), **options)

    @asynccontextmanager
    async def opened(
        self,
        *,
        max_bytes: int = 1 << 20,
        result_retention_s: float = 3600.0,
        registry: CollectorRegistry | None = None,
    ) -> AsyncIterator[Journal]:
        journal = await asyncio.to_thread(
            self.journal, max_bytes=max_bytes, result_retention_s=result_retention_s, registry=registry
        )
        try:
            yield journal
        finally:
            await asyncio.to_thread(journal.close)


def created() -> Body:
    return Body.pack("create_model", pb.CreateModelRequest(model_id=MODEL, base_model="tiny"))


def batch(seq_id: int, *, length: int = 8) -> Body:
    data = [random_datum(length, seq_id, vocab_size=50)]
    return Body.pack("forward_backward", request(data, model_id=MODEL, seq_id=seq_id))


def done(value: float) -> pb.WaitResultResponse:
    return pb.WaitResultResponse(optim_step=pb.OptimStepResponse(metrics={"norm:mean": value}))


async def requests(journal: Journal, model_id: str = MODEL) -> list[tuple[int, Body]]:
    """The requests whose bodies the journal still has, with their seq_ids."""
    kept = [entry.seq_id for entry in await journal.history(model_id) if entry.num_bytes]
    return [(seq_id, await journal.body(model_id, seq_id)) for seq_id in kept]


async def executed(journal: Journal, seq_ids: Iterable[int], *, length: int = 8) -> None:
    for seq_id in seq_ids:
        await journal.append(MODEL, seq_id, batch(seq_id, length=length) if seq_id else created())
        await journal.finish(MODEL, seq_id, done(seq_id))
