"""Stops a model between two operations, so that another trainer can take it over (operations/moving.py)."""

from __future__ import annotations

import asyncio

from tinsmith.errors import ModelMoved, ModelNotFound
from trainer_service.scheduling.model_queue import ModelQueue
from trainer_service.scheduling.scheduler import Scheduler


async def withhold(scheduler: Scheduler, model_id: str, error: ModelMoved) -> int | None:
    """Stops a model between two operations. From then on every call for the model fails with `error`, and so do its
    accepted operations that have not begun; they stay in the journal. Waits for those that have begun, and until all
    answers are stored.

    Returns the seq_id of the last operation that has run; None for a parked model. Then the caller either removes the
    model from `scheduler.models`, or calls `resume`. Raises ModelNotFound, ModelLost, and the error of a model that is
    being deleted.
    """
    model = await _model_at_rest(scheduler, model_id)
    scheduler.models.moved[model_id] = error
    if model is None:
        scheduler.models.parked.remove(model_id)
        scheduler.models.fail_waiting(model_id, error)
        return None
    model.gone = error
    if model.restoration is not None:
        model.restoration.stop_feeding()
    operations = list(model.operations.values())
    scheduler.compute.withhold(model_id, error)
    for operation in operations:
        # The head may wait for operations that are withheld, such as a load for a save.
        if operation not in model.unsettled or operation is model.head:
            scheduler.execution.settle(model, operation, error)
    for operation in operations:
        await asyncio.shield(operation.accepted)
        await asyncio.shield(operation.outcome)
        await operation.stored.wait()
    withheld = [operation.seq_id for operation in operations if operation.outcome.result() is error]
    return min([model.next_to_enter, *withheld]) - 1


async def _model_at_rest(scheduler: Scheduler, model_id: str) -> ModelQueue | None:
    """The model, once it is neither being made nor restored, parked or brought back. None for a parked model."""
    while True:
        await scheduler.parking.settled(model_id)
        if model_id in scheduler.models.parked:
            return None
        model = scheduler.models.get(model_id)
        if model is None:
            await scheduler.check_held(model_id)
            if model_id not in scheduler.models and not scheduler.models.is_away(model_id):
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            continue
        if model.gone is not None:
            raise model.gone
        creation = model.operations.get(0)
        if not model.is_being_restored and (creation is None or creation.outcome.done()):
            return model
        await scheduler.check_held(model_id)


def resume(scheduler: Scheduler, model_id: str, *, is_covered: bool) -> None:
    """Lets a withheld model, which is not in memory, go on from its snapshot and the journal. `is_covered`: whether no
    operation of the model waits."""
    scheduler.models.remove(model_id)
    scheduler.models.moved.pop(model_id, None)
    scheduler.models.parked.add(model_id)
    if not is_covered:
        scheduler.parking.begin_to_have(model_id)
