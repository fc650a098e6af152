"""Lists of training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import answers, schemas
from gateway.codec import Request, knows_external_checkpoints
from gateway.database.catalog import RunWithCheckpoints
from gateway.gateway import Gateway
from gateway.http.endpoint import GET
from gateway.views import checkpoint_view, page_view, run_view, time_text
from tinsmith.errors import NotFound
from tinsmith.rpc.paths import KINDS


def visible_kinds(request: Request) -> Sequence[str]:
    """Kinds of checkpoints that the client's SDK knows."""
    return [kind for kind in KINDS if kind != "external_weights" or knows_external_checkpoints(request)]


def owner_in_scope(request: Request, query: schemas.ScopedQuery) -> str | None:
    """The owner whose data is asked for. None means all owners, which only an admin can see."""
    caller = request.caller
    return caller.sees_only if query.access_scope == "accessible" else caller.owner


def _view(gateway: Gateway, run: RunWithCheckpoints) -> answers.checkpoints.TrainingRun:
    touched_at = gateway.ledger.touched_at(run.model.model_id)  # readers do not wait for the ledger
    view = run_view(run.model, run.owner, last=run.last, last_sampler=run.last_sampler)
    return view if touched_at is None else {**view, "last_request_time": time_text(touched_at)}


async def list_training_runs(request: Request, query: schemas.RunsQuery) -> answers.checkpoints.TrainingRunPage:
    """Training runs."""
    gateway = request.gateway
    runs, total = await gateway.catalog.runs(
        owner=owner_in_scope(request, query), project_id=query.project_id, limit=query.limit, offset=query.offset
    )
    cursor = page_view(offset=query.offset, limit=query.limit, total=total)
    return {
        "training_runs": [_view(gateway, run) for run in runs],
        "cursor": cursor,
    }


async def get_training_run(request: Request, query: schemas.ScopedQuery) -> answers.checkpoints.TrainingRun:
    """A training run."""
    gateway = request.gateway
    run_id = request.path_params["run_id"]
    owner = owner_in_scope(request, query)
    run = await gateway.catalog.run(run_id)
    if run is None or not request.caller.sees(run.owner):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    if owner is not None and run.owner != owner:
        raise NotFound(f"training_run_id: {run_id!r} is another user's; ask with access_scope=accessible")
    return _view(gateway, run)


async def list_checkpoints_of_run(request: Request) -> answers.checkpoints.CheckpointList:
    """Checkpoints of a training run.

    The oldest come first.
    """
    catalog = request.gateway.catalog
    run_id = request.path_params["run_id"]
    if not await request.gateway.tenants.access.owns(run_id, request.caller):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    checkpoints = await catalog.checkpoints_of_run(run_id, kinds=visible_kinds(request))
    if not checkpoints and await catalog.run(run_id) is None:
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    return {"checkpoints": [checkpoint_view(row) for row in checkpoints]}


async def list_checkpoints(request: Request, query: schemas.CheckpointsQuery) -> answers.checkpoints.CheckpointPage:
    """Checkpoints.

    These are the caller's checkpoints of all runs.
    """
    checkpoints, total = await request.gateway.catalog.checkpoints(
        owner=request.owner, kinds=visible_kinds(request), limit=query.limit, offset=query.offset
    )
    cursor = page_view(offset=query.offset, limit=query.limit, total=total)
    return {
        "checkpoints": [checkpoint_view(row) for row in checkpoints],
        "cursor": cursor,
    }


routes = [
    GET("/training_runs", list_training_runs, errors=(400,)),
    GET("/training_runs/{run_id}", get_training_run, errors=(400, 404)),
    GET("/training_runs/{run_id}/checkpoints", list_checkpoints_of_run, errors=(404,)),
    GET("/models/{run_id}/checkpoints", list_checkpoints_of_run, errors=(404,)),  # its name in SDK 0.3
    GET("/checkpoints", list_checkpoints, errors=(400,)),
]
