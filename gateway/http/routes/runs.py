"""Lists of training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.answers import checkpoints as answers
from gateway.codec import caller_of, gateway_of, json_response, knows_external_checkpoints, owner_of, parse
from gateway.database.catalog import RunWithCheckpoints
from gateway.gateway import Gateway
from gateway.views import checkpoint_view, page_view, run_view, time_text
from tinsmith.errors import NotFound
from tinsmith.rpc.paths import KINDS


def visible_kinds(request: Request) -> Sequence[str]:
    """Kinds of checkpoints that the client's SDK knows."""
    return [kind for kind in KINDS if kind != "external_weights" or knows_external_checkpoints(request)]


def owner_in_scope(request: Request, query: schemas.ScopedQuery) -> str | None:
    """The owner whose data is asked for; None: all owners, which only an admin can see."""
    caller = caller_of(request)
    return None if caller.admin and query.access_scope == "accessible" else caller.owner


def _view(gateway: Gateway, run: RunWithCheckpoints) -> answers.TrainingRun:
    touched_at = gateway.ledger.touched_at(run.model.model_id)  # readers do not wait for the ledger
    view = run_view(run.model, run.owner, last=run.last, last_sampler=run.last_sampler)
    return view if touched_at is None else {**view, "last_request_time": time_text(touched_at)}


async def list_training_runs(request: Request) -> Response:
    gateway = gateway_of(request)
    query = parse(schemas.RunsQuery, dict(request.query_params))
    runs, total = await gateway.catalog.runs(
        owner=owner_in_scope(request, query), project_id=query.project_id, limit=query.limit, offset=query.offset
    )
    cursor = page_view(offset=query.offset, limit=query.limit, total=total)
    found: answers.TrainingRunPage = {"training_runs": [_view(gateway, run) for run in runs], "cursor": cursor}
    return json_response(found)


async def get_training_run(request: Request) -> Response:
    gateway = gateway_of(request)
    run_id = request.path_params["run_id"]
    owner = owner_in_scope(request, parse(schemas.ScopedQuery, dict(request.query_params)))
    run = await gateway.catalog.run(run_id)
    if run is None or not caller_of(request).sees(run.owner):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    if owner is not None and run.owner != owner:
        raise NotFound(f"training_run_id: {run_id!r} is another user's; ask with access_scope=accessible")
    return json_response(_view(gateway, run))


async def list_checkpoints_of_run(request: Request) -> Response:
    """All checkpoints of a run, oldest first."""
    catalog = gateway_of(request).catalog
    run_id = request.path_params["run_id"]
    if not await gateway_of(request).tenants.access.owns(run_id, caller_of(request)):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    checkpoints = await catalog.checkpoints_of_run(run_id, kinds=visible_kinds(request))
    if not checkpoints and await catalog.run(run_id) is None:
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    found: answers.CheckpointList = {"checkpoints": [checkpoint_view(row) for row in checkpoints]}
    return json_response(found)


async def list_checkpoints(request: Request) -> Response:
    """The caller's checkpoints of all runs."""
    query = parse(schemas.CheckpointsQuery, dict(request.query_params))
    checkpoints, total = await gateway_of(request).catalog.checkpoints(
        owner=owner_of(request), kinds=visible_kinds(request), limit=query.limit, offset=query.offset
    )
    cursor = page_view(offset=query.offset, limit=query.limit, total=total)
    found: answers.CheckpointPage = {"checkpoints": [checkpoint_view(row) for row in checkpoints], "cursor": cursor}
    return json_response(found)


routes = [
    Route("/training_runs", list_training_runs),
    Route("/training_runs/{run_id}", get_training_run),
    Route("/training_runs/{run_id}/checkpoints", list_checkpoints_of_run),
    Route("/models/{run_id}/checkpoints", list_checkpoints_of_run),  # its name in SDK 0.3
    Route("/checkpoints", list_checkpoints),
]
