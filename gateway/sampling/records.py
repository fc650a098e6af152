"""Records of sequences that were sampled with record_stability_info: prompt, tokens and logprobs, by sequence id.

A loss that names a sequence gets the sampler's logprobs from its record. A record is deleted `record_retention_s` after
its last use. The sequences of one request have one prompt, which is in the record of the first of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, update

from gateway.database.connection import parts
from gateway.database.store import Store
from gateway.database.tables.samples import SequenceRecord
from tinsmith.v1 import sampler_pb2

_TOUCH_AFTER_S = 60.0
"""A use is not written to the database if the previous one was at most this long ago."""


@dataclass(slots=True)
class _Batch:
    rows: list[dict[str, Any]]
    write: asyncio.Task[None]


class Records:
    """Writes and reads records."""

    def __init__(self, store: Store, *, retention_s: float) -> None:
        self._store = store
        self._retention_s = retention_s
        self._batch: _Batch | None = None
        self._writing = asyncio.Lock()

    async def add(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        response: sampler_pb2.SampleResponse,
        *,
        session_id: str,
    ) -> None:
        """Writes the sequences of an answer; returns once they are in the database. A repeat replaces them."""
        prompt = b"".join(chunk.encoded_text.tokens for chunk in request.prompt)
        expires_at = time.time() + self._retention_s
        rows = [
            {
                "sequence_id": f"{request_id}:{index}",
                "session_id": session_id,
                "version_id": request.version_id,
                "prompt": b"" if index else prompt,
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "expires_at": expires_at if index else expires_at + _TOUCH_AFTER_S,
            }
            for index, sequence in enumerate(response.sequences)
        ]
        if self._batch is None:
            self._batch = _Batch([], asyncio.create_task(self._write()))
        batch = self._batch
        batch.rows += rows
        await asyncio.shield(batch.write)

    async def _write(self) -> None:
        """Writes the gathered rows in one transaction. Rows that arrive meanwhile go into the next one."""
        async with self._writing:
            batch, self._batch = self._batch, None
            assert batch is not None
            statement = self._store.insert(SequenceRecord)
            values = {name: statement.excluded[name] for name in batch.rows[0] if name != "sequence_id"}
            async with self._store.begin() as db:
                await db.execute(
                    statement.on_conflict_do_update(index_elements=["sequence_id"], set_=values), batch.rows
                )

    async def find(self, sequence_ids: Iterable[str], *, session_id: str) -> Mapping[str, SequenceRecord]:
        """sequence_id -> record, for the sequences that belong to this session and whose records have not expired. The
        call counts as a use of the records."""
        now = time.time()
        found: dict[str, SequenceRecord] = {}
        wanted = sorted({each for each in sequence_ids if "\0" not in each})  # PostgreSQL takes no NUL
        for named in parts(wanted):
            firsts = list({_first_of(sequence_id) for sequence_id in named})
            living = SequenceRecord.session_id == session_id, SequenceRecord.expires_at > now
            rows = select(SequenceRecord).where(SequenceRecord.sequence_id.in_([*named, *firsts]), *living)
            async with self._store.begin() as db:
                records = {row.sequence_id: row for row in await db.scalars(rows)}
                found |= {each: records[each] for each in named if each in records and _first_of(each) in records}
                # The first record of a request expires last, because it has the prompt.
                until_s = now + self._retention_s
                uses = (named, until_s - _TOUCH_AFTER_S, until_s), (firsts, until_s, until_s + _TOUCH_AFTER_S)
                for ids, stale_before, until in uses:
                    use = update(SequenceRecord).where(SequenceRecord.sequence_id.in_(ids), *living)
                    await db.execute(use.where(SequenceRecord.expires_at < stale_before).values(expires_at=until))
            for each in named:
                if each in found:
                    found[each].prompt = found[each].prompt or records[_first_of(each)].prompt
        return found

    async def delete_expired(self) -> None:
        await self._store.run(delete(SequenceRecord).where(SequenceRecord.expires_at <= time.time()))


def _first_of(sequence_id: str) -> str:
    """Id of the first sequence of the same request."""
    return f"{sequence_id.rpartition(':')[0]}:0"
