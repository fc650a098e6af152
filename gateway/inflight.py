"""Samplers that follow a training run: each new sample starts on the newest version that was saved with kind
"inflight". A generation keeps the version that it has started on."""

from __future__ import annotations

from gateway.store import Store
from gateway.tables import SamplingSession
from tinsmith.v1 import types_pb2


class Inflight:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def move(self, run_id: str, saved: types_pb2.CheckpointInfo) -> None:
        """The save is complete. One that was made before the newest, and is answered again, moves nothing back."""
        await self._store.move_inflight(run_id, saved.version_id, saved.location, is_newer=_is_newer)

    async def resolve(self, session: SamplingSession) -> SamplingSession:
        """The sampling session with the version that a sample which starts now is drawn from."""
        if session.inflight_run_id is None:
            return session
        run = await self._store.model(session.inflight_run_id)
        newest = None if run is None else run.inflight_version_id
        if run is None or newest is None or not _is_newer(newest, session.version_id):
            return session
        return SamplingSession(
            sampling_session_id=session.sampling_session_id,
            session_id=session.session_id,
            base_model=session.base_model,
            model_path=session.model_path,
            version_id=newest,
            location=run.inflight_location or "",
            created_at=session.created_at,
            inflight_run_id=session.inflight_run_id,
        )


def _is_newer(version_id: str, than: str) -> bool:
    """Of two versions of one run, "<run>@<seq_id>"."""
    return int(version_id.rpartition("@")[2]) > int(than.rpartition("@")[2])
