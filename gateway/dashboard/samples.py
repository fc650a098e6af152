"""The newest sequences that were drawn from each run, for people to read. Sequences are written in the background.

A sequence belongs to the owner of the request, who is not always the owner of the run: anyone may sample a published
checkpoint. Other owners do not see it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sqlalchemy import delete, insert, select

from gateway.dashboard.thumbnails import first_pictures, thumbnail
from gateway.database.store import Store
from gateway.database.tables.samples import RecentSample
from tinsmith.threads import in_pool
from tinsmith.v1 import sampler_pb2, types_pb2

MAX_PROMPT_TOKENS = 256
"""Most tokens that are kept of a prompt, from its end."""
MAX_TOKENS = 2048
"""Most tokens that are kept of an output, from its beginning."""
_MAX_PER_FLUSH = 512
"""Most sequences that are written in one go; older ones are dropped."""
MAX_PICTURE_BYTES = 32 * 2**20
"""Most bytes of pictures that wait to be made small. Prompts beyond have no thumbnails."""
_INT32 = 4


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """The part of a sequence that is kept. Its request and answer may be a thousand times larger."""

    run_id: str
    session_id: str
    owner: str
    """Owner of the sample; empty means the owner of the session."""
    row: dict[str, Any]
    """Columns of the RecentSample row, without the owner and the pictures."""
    pictures: Sequence[types_pb2.Image] = field(default=(), repr=False)
    """Pictures of the prompt, for the first sequence of a request."""


class RecentSamples:
    """Records the newest sequences, and reads them."""

    def __init__(self, store: Store, *, keep: int) -> None:
        """`keep`: number of sequences that are kept for each run and owner; 0 means none."""
        self._store = store
        self._keep = keep
        self._drawn: deque[RecordedSequence] = deque(maxlen=_MAX_PER_FLUSH)
        self._picture_bytes = 0
        """Bytes of the pictures that came since the last flush."""

    def add(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        sequences: Sequence[types_pb2.SampledSequence],
        *,
        base_model: str,
        session_id: str = "",
        owner: str = "",
    ) -> None:
        """Adds the sequences of a sampler's answer. An empty `owner` means the owner of the session.

        Sequences of a base model belong to no run, and are not kept.
        """
        run_id = request.version_id.rpartition("@")[0]
        if self._keep and run_id:
            prompt = b"".join(chunk.encoded_text.tokens for chunk in request.prompt)
            about = {
                "run_id": run_id,
                "base_model": base_model,
                "at": time.time(),
                "request_id": request_id,
                "num_prompt_tokens": len(prompt) // _INT32,
                "prompt": prompt[-MAX_PROMPT_TOKENS * _INT32 :],
            }
            pictures = first_pictures(request.prompt)
            num_bytes = sum(len(one.data) for one in pictures)
            if self._picture_bytes + num_bytes > MAX_PICTURE_BYTES:
                pictures, num_bytes = (), 0
            self._picture_bytes += num_bytes
            for sequence in sequences[: self._keep]:
                row = {**about, **_row(sequence), "version_id": _version(sequence) or request.version_id}
                self._drawn.append(RecordedSequence(run_id, session_id, owner, row, pictures))
                pictures = ()

    async def flush(self) -> None:
        """Writes the sequences that wait. If that fails they are dropped, because newer ones follow.

        Raises SQLAlchemyError.
        """
        drawn = list(self._drawn)
        self._drawn.clear()
        self._picture_bytes = 0
        if any(each.pictures for each in drawn):
            drawn = await in_pool(lambda: [_with_thumbnails(each) for each in drawn])
        if drawn:
            await self._write(drawn)

    async def _write(self, drawn: Sequence[RecordedSequence]) -> None:
        owners: dict[str, str] = {}
        for session_id in {each.session_id for each in drawn if not each.owner}:
            whose = await self._store.sessions.whose(session_id)
            owners[session_id] = "" if whose is None else whose.owner
        async with self._store.begin() as db:
            newest: dict[tuple[str, str], deque[RecordedSequence]] = {}
            for each in drawn:
                owner = each.owner or owners[each.session_id]
                newest.setdefault((each.run_id, owner), deque(maxlen=self._keep)).append(each)
            rows = [
                {"pictures": None, **each.row, "owner": owner} for (_, owner), some in newest.items() for each in some
            ]
            await db.execute(insert(RecentSample), rows)
            for run_id, owner in newest:
                mine = (RecentSample.run_id == run_id, RecentSample.owner == owner)
                ids = select(RecentSample.sample_id).where(*mine).order_by(RecentSample.sample_id.desc())
                oldest = await db.scalar(ids.offset(self._keep - 1).limit(1))
                if oldest is not None:
                    await db.execute(delete(RecentSample).where(*mine, RecentSample.sample_id < oldest))

    async def read(self, run_id: str, *, owner: str | None, after: int = 0, limit: int = 64) -> list[RecentSample]:
        """Sequences of a run whose id is larger than `after`, newest first. `owner` None means those of all owners."""
        query = select(RecentSample).where(RecentSample.run_id == run_id, RecentSample.sample_id > after)
        if owner is not None:
            query = query.where(RecentSample.owner == owner)
        return await self._store.all(query.order_by(RecentSample.sample_id.desc()).limit(limit))


def _with_thumbnails(one: RecordedSequence) -> RecordedSequence:
    urls = [thumbnail(picture) for picture in one.pictures]
    return replace(one, row={**one.row, "pictures": json.dumps(urls) if urls else None}, pictures=())


def _version(sequence: types_pb2.SampledSequence) -> str:
    """Id of the version that drew the last token; empty when the sampler did not say."""
    spans = sequence.version_spans
    return spans[-1].version_id if spans else ""


def _row(sequence: types_pb2.SampledSequence) -> dict[str, Any]:
    tokens = sequence.tokens[: MAX_TOKENS * _INT32]
    return {
        "num_tokens": len(sequence.tokens) // _INT32,
        "tokens": tokens,
        "logprobs": sequence.logprobs[: len(tokens)],
        "ranks": _ranks(tokens, sequence.topk_sampled_logprobs) if sequence.topk_sampled_logprobs.k else b"",
        "is_finished": sequence.stop_reason == types_pb2.STOP_REASON_STOP,
    }


def _ranks(tokens: bytes, table: types_pb2.TopkLogprobs) -> bytes:
    """uint16, one for each token: its rank in its row of the table, from 1; 0 means that the row does not have it.

    An empty cell holds token 0. Such cells come last, so a drawn token 0 is found before them.
    """
    drawn_T = np.frombuffer(tokens, "<i4")
    best_Tk = np.frombuffer(table.token_ids, "<i4").reshape(-1, table.k)[: len(drawn_T)]
    found_Tk = best_Tk == drawn_T[: len(best_Tk), None]
    ranks_T = np.zeros(len(drawn_T), "<u2")
    ranks_T[: len(best_Tk)] = np.where(found_Tk.any(axis=1), found_Tk.argmax(axis=1) + 1, 0)
    return ranks_T.tobytes()
