"""The reaper: background work of the gateway, done every `reap_interval_s`.

It stops the samples of silent clients, ends silent sessions, frees the models of ended ones, takes over operations of
dead gateways, deletes what has expired, and counts sessions and checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson

from gateway.clients import TrainerClient
from gateway.config import GatewayConfig
from gateway.database.forgetting import Forgetting
from gateway.database.outages import log_failure
from gateway.database.store import Store
from gateway.database.tables.checkpoints import DELETED_AT, Checkpoint
from gateway.database.tables.sessions import Model
from gateway.futures import Answer, Futures, Gone, Pending
from gateway.high_availability.peers import BEAT_S, GatewayPeers
from gateway.metrics import Metrics
from gateway.placement import Placement
from gateway.sampling.records import Records
from gateway.sampling.silent_clients import SilentClients
from gateway.storage.checkpoints import Checkpoints
from gateway.storage.retention import Retention
from gateway.storage.retired_checkpoints import RetiredCheckpoints
from gateway.storage.transfers import Transfers
from gateway.tenants.billing import Billing
from gateway.training.operations import Operations
from gateway.training.refusals import Refusals
from gateway.training.submission import Submission
from tinsmith.errors import FailedPrecondition, InvalidRequest, ModelNotFound, SequenceConflict, ServiceError
from tinsmith.tasks import Pause, set_within, to_its_end
from tinsmith.v1 import trainer_pb2

logger = logging.getLogger(__name__)

_LAST_S = 5.0
"""Time within which operations that were let in before the end of their run reach the trainer, in seconds."""
EXPIRED = "expired"
"""Reason of a session that ended because it sent no heartbeats."""


class Reaper:
    """Ends sessions and runs, and cleans up after them."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        store: Store,
        placement: Placement,
        futures: Futures,
        transfers: Transfers,
        checkpoints: Checkpoints,
        retired: RetiredCheckpoints,
        billing: Billing,
        records: Records,
        silent_clients: SilentClients,
        operations: Operations,
        refusals: Refusals,
        peers: GatewayPeers,
        retention: Retention,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._placement = placement
        self._futures = futures
        self._transfers = transfers
        self._checkpoints = checkpoints
        self._retired = retired
        self._billing = billing
        self._records = records
        self._silent_clients = silent_clients
        self._operations = operations
        self._refusals = refusals
        self._peers = peers
        self._retention = retention
        self.forgetting = Forgetting(config, store=store)
        self._metrics = metrics
        self._heard_until = 0.0
        """Time of the last search for silent sessions, in seconds since 1970."""
        self._hears_since = 0.0
        """Time since which heartbeats could arrive without interruption, in seconds since 1970."""
        self._wake = asyncio.Event()

    async def end_session(self, session_id: str, *, reason: str, detail: str | None) -> None:
        """Ends a session; a repeat changes nothing. The session's samples end now, and its models are freed once their
        work is done."""
        if await self._store.sessions.end(session_id, reason=reason, detail=detail):
            logger.info("session %s ended: %s", session_id, reason)
            self._ended(session_id)

    async def end_run(self, model_id: str) -> None:
        """Ends a run, so that it takes no more operations. The run's model is freed once its work is done."""
        await self._store.models.end(model_id)
        logger.info("run %s was ended", model_id)
        self._wake.set()

    async def attach_end(self, request_id: str, model_id: str) -> None:
        """Makes the future of an unload_model request, unless there is one. Raises Gone when the run was not ended."""
        model = await self._store.models.get(model_id, is_newest=True)
        if model is None or model.ended_at is None:
            raise Gone
        if self._futures.pending(request_id) is None:
            pending = Pending(request_id, "unload_model", model.session_id, fingerprint=None)
            pending.progress.active("the work of the run that was accepted before is done first")
            self._futures.start(pending, self._freed(model_id))

    async def _freed(self, model_id: str) -> Answer:
        """Waits until a gateway has freed the model. Returns the answer of unload_model. Raises Gone when the run's row
        is gone."""
        pause = Pause()
        while (model := await self._store.models.get(model_id, is_newest=True)) is not None:
            if model.released_at is not None:
                return Answer(orjson.dumps({"type": "unload_model", "model_id": model_id}))
            await pause.wait()
        raise Gone

    def _ended(self, session_id: str) -> None:
        samplers = f"{session_id}:sample:"
        error = FailedPrecondition(f"session {session_id} has ended")
        self._futures.cancel(lambda group: group.startswith(samplers), error=error)
        self._wake.set()

    async def hear_of_ends(self) -> None:
        """Notices sessions that other gateways have ended, and ends their samples here."""
        for session_id in await self._store.sessions.forget_ended():
            self._ended(session_id)

    async def run(self) -> None:
        """Reaps every `reap_interval_s`, and when a session or run ends. Only one of several gateways reaps."""
        while True:
            await self.round()
            await set_within(self._wake, self._config.reap_interval_s)
            self._wake.clear()

    async def round(self) -> None:
        """One round: the steps of every gateway, and then `reap`."""
        for step in (
            self._count_sessions,
            self.count_stored,
            self._operations.take_over,
            self._transfers.finish_left,
            self._silent_clients.look,
            self.reap,
        ):
            await self._try(step)

    async def reap(self) -> None:
        """Runs the steps that only the gateway with the reaper's lease runs. Does nothing at another gateway."""
        if not await self._peers.has_lease("reaper"):
            return
        for step in (
            self.end_silent_sessions,
            self.release_models,
            self._billing.meter_storage,  # before the checkpoints that it counts are deleted
            self.delete_expired,
            self._retention.prune_all,
            self._retired.delete_unused,
            self._records.delete_expired,
            self.forgetting.forget_when_due,
            self._refusals.forget_old,
            self._checkpoints.forget_deletions,
        ):
            await self._try(step)

    async def _try(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await to_its_end(step())
        except Exception as error:
            log_failure("a step of the reaper failed", error, by=logger)

    async def _count_sessions(self) -> None:
        self._metrics.stored.sessions.set(await self._store.sessions.count())

    async def end_silent_sessions(self) -> None:
        now, timeout_s = time.time(), self._config.session_timeout_s
        # If the last search is long ago, heartbeats may have been lost meanwhile: this gateway was down, its machine
        # slept, the database had an outage, or another gateway was the reaper. Or the clock was set. Then the timeout
        # of all sessions begins anew.
        if abs(now - self._heard_until) > max(timeout_s / 2, 2 * self._config.reap_interval_s):
            self._hears_since = now
        if now - self._hears_since >= timeout_s:
            await self._store.sessions.heartbeats.flush()
            for session_id in await self._store.sessions.silent(seen_before=now - timeout_s):
                await self.end_session(session_id, reason=EXPIRED, detail=f"no heartbeat for {timeout_s:g} s")
        self._heard_until = now

    async def release_models(self) -> None:
        for model, session in await self._store.models.unreleased():
            # A client may close its session while its last save is queued, so the model waits for its work. The wait is
            # bounded, because a gap in the seq_ids may keep the work from running.
            ended_at = min(at for at in (model.ended_at, session.ended_at) if at is not None)
            ended_s = time.time() - max(ended_at, self._hears_since)
            overdue = session.end_reason == EXPIRED or ended_s > self._config.session_timeout_s
            if overdue or not (self._futures.num_pending(model.model_id) or self._is_busy_elsewhere(model, ended_s)):
                await self._release(model)
            elif ended_s > _LAST_S and not self._is_busy_elsewhere(model, ended_s):
                await self._give_up_missing(model)

    async def _give_up_missing(self, model: Model) -> None:
        """Gives up the missing seq_ids for which the operations of an ended run wait, because nobody will send them."""
        try:
            trainer = await self._placement.of_run(model.model_id, timeout_s=0)
            found = await trainer.stub.GetModel(trainer_pb2.GetModelRequest(model_id=model.model_id))
            numbers = self._futures.numbers(model.model_id)
            for seq_id in range(max(1, found.model.next_seq_id), max(numbers, default=0)):
                if seq_id not in numbers:
                    missing = Submission.of("forward_backward", model.model_id, seq_id, base_model=model.base_model)
                    missing.refuse(FailedPrecondition(f"seq_id {seq_id} has not arrived, and the run has ended"))
                    with suppress(SequenceConflict):  # the trainer has the operation meanwhile
                        await self._operations.submit(missing)
        except ServiceError as error:
            logger.info("the work of the ended model %s goes on waiting: %s", model.model_id, error.message)

    def _is_busy_elsewhere(self, model: Model, ended_s: float) -> bool:
        """Whether the model may have work at another gateway. This gateway hears of such work with a delay."""
        is_heard_of = ended_s > 3 * BEAT_S
        return self._peers.are_several and (not is_heard_of or model.model_id in self._peers.busy_models())

    async def _release(self, model: Model) -> None:
        async with self._placement.turn(model.model_id):
            if await self._store.moves.get(model.model_id) is None:  # otherwise the next round does it
                await self._release_here(model)

    async def _release_here(self, model: Model) -> None:
        self._placement.forget(model.model_id)  # another gateway may have moved it
        try:
            trainer = await self._trainer_of(model)
            await self._keep_ephemeral(model)
            await trainer.stub.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model.model_id))
        except InvalidRequest:
            pass  # no trainer serves its base model any more
        except ServiceError as error:
            logger.warning("model %s cannot be freed now: %s", model.model_id, error.message)
            return
        await self._store.models.release(model.model_id)
        what = model.model_id if model.ended_at is not None else f"the session of {model.model_id}"
        error = FailedPrecondition(f"{what} has ended")
        self._futures.cancel(model.model_id.__eq__, error=error)

    async def _trainer_of(self, model: Model) -> TrainerClient:
        """The trainer that has the run. When that trainer is gone for good, a trainer that can delete the run's files
        in the store.

        Raises NotReady, and InvalidRequest when no trainer serves the base model.
        """
        try:
            return await self._placement.of_run(model.model_id, timeout_s=0)
        except ModelNotFound:
            return await self._placement.of_checkpoint(model.model_id, model.base_model)

    async def _keep_ephemeral(self, model: Model) -> None:
        """Keeps the run's ephemeral versions that live samplers use, because the trainer deletes them with the model.

        A sampling session uses the version from which it was made. If it follows the run, it uses the run's newest
        inflight version; such sampling sessions may belong to any session.
        """
        versions = await self._store.samplers.ephemeral(model)
        location, version_id = model.inflight_location, model.inflight_version_id
        if location is not None and version_id is not None and location.startswith(f"{model.model_id}/ephemeral/"):
            versions.add((location, version_id))
        for location, version_id in sorted(versions):
            kept = Checkpoint(location=location, version_id=version_id, base_model=model.base_model)
            await self._retired.keep_for_samplers(kept)

    async def delete_expired(self) -> None:
        for checkpoint in await self._store.checkpoints.expired():
            try:
                if not await self._checkpoints.expire(checkpoint):
                    continue
            except ServiceError as error:
                logger.warning("%s cannot be deleted now: %s", checkpoint.path, error.message)
                continue
            reason = "deleted" if checkpoint.expires_at == DELETED_AT else "expired"
            self._metrics.stored.swept_checkpoints.labels(reason).inc()
            logger.info("deleted the files of %s (%s)", checkpoint.path, reason)

    async def count_stored(self) -> None:
        for kind, (number, num_bytes) in (await self._store.checkpoints.count()).items():
            self._metrics.stored.checkpoints.labels(kind).set(number)
            self._metrics.stored.checkpoint_bytes.labels(kind).set(num_bytes)
