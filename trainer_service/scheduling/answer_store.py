"""Stores the answers of operations in the journal. An operation is forgotten once its answer is stored."""

from __future__ import annotations

import logging
import time

from tinsmith.errors import ServiceError
from tinsmith.rpc import logs
from tinsmith.tasks import Pause
from trainer_service.durability.executing import Executing
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Unstorable
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Outcome
from trainer_service.scheduling.held_bytes import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.tasks import Tasks

logger = logging.getLogger(__name__)

_STORE_AGAIN_S = 1.0
"""Pause before the second attempt to store an answer, in seconds. It doubles with each attempt."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause between attempts to store an answer, in seconds."""


class AnswerStore:
    """All methods run on one event loop."""

    def __init__(
        self,
        journal: Journal,
        models: ModelQueues,
        held: HeldBytes,
        executing: Executing,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._journal = journal
        self._models = models
        self._held = held
        self._executing = executing
        self._metrics = metrics
        self._tasks = tasks

    def keep(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Logs and counts an outcome, and stores it in the background."""
        failed = isinstance(outcome, ServiceError)
        self._metrics.operations.finished.labels(operation.kind, "failed" if failed else "ok").inc()
        logs.request_id.set(f"{operation.model_id}:{operation.seq_id}")
        logs.model_id.set(operation.model_id)
        logger.info(
            "%s of %s, seq_id %d: %s after %.3f s",
            operation.kind,
            model.model_id,
            operation.seq_id,
            outcome.reason if isinstance(outcome, ServiceError) else "ok",
            time.perf_counter() - operation.arrived_s,
        )
        self._tasks.spawn(self._store(model, operation, outcome))

    async def _store(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Stores an answer, trying again until it succeeds, and then releases the operation.

        A restart before that would run the operation again. An answer that can never be stored is dropped, and the
        journal only has that the operation is done. A restart then runs it again to change the model, and later
        requests for its answer fail.
        """
        stored: Outcome | None = outcome
        pause = Pause(_STORE_AGAIN_S, _LONGEST_PAUSE_S)
        while model.restoration is None or not model.restoration.has_failed:
            try:
                async with self._executing.stage(model.model_id, operation.seq_id):
                    await self._journal.finish(
                        model.model_id, operation.seq_id, stored, keep_body=operation.changes_model
                    )
                self._executing.forget(model.model_id, operation.seq_id)
                break
            except Unstorable as error:
                logger.error("%s, seq_id %d: its answer is not kept: %s", model.model_id, operation.seq_id, error)
                stored = None
                continue
            except ServiceError as error:
                logger.warning(
                    "the result of %s, seq_id %d, is not stored yet: %s", model.model_id, operation.seq_id, error
                )
            if self._tasks.is_closing:
                break
            await pause.wait()
        self.release(model, operation)
        if operation.seq_id == 0 and model.gone and self._models.get(model.model_id) is model:
            self._models.remove(model.model_id)

    def release(self, model: ModelQueue, operation: Operation) -> None:
        """Forgets an operation that needs nothing more."""
        model.operations.pop(operation.seq_id, None)  # an operation that could not be appended is gone already
        self._held.release(operation)
        operation.stored.set()
        model.used_s = time.monotonic()
        self._models.released.set()
