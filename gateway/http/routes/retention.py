"""Retention policies of runs: Tinsmith's own endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import answers, schemas
from gateway.codec import Request
from gateway.http.endpoint import DELETE, GET, POST, PUT
from gateway.storage.retention_rules import Judged
from gateway.views import checkpoint_view
from tinsmith.errors import NotFound
from tinsmith.rpc.paths import KINDS

_RUN = "/training_runs/{run_id}/retention"


async def _own_run(request: Request) -> str:
    """The run's id. Raises NotFound for an unknown run, too, because a policy for it would be a row that nobody
    deletes."""
    run_id, gateway = request.path_params["run_id"], request.gateway
    is_own = await gateway.tenants.access.owns(run_id, request.caller)
    if not is_own or not (
        await gateway.store.models.get(run_id) is not None
        or await gateway.catalog.checkpoints_of_run(run_id, kinds=list(KINDS))
    ):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    return run_id


def _kept_view(one: Judged) -> answers.checkpoints.KeptCheckpoint:
    return {**checkpoint_view(one.checkpoint), "kept_as": one.kept_as}


def _plan_view(plan: Sequence[Judged]) -> answers.checkpoints.RetentionPlan:
    return {
        "delete": [checkpoint_view(one.checkpoint) for one in plan if not one.kept_as],
        "keep": [_kept_view(one) for one in plan if one.kept_as],
    }


async def _answer(request: Request, run_id: str) -> answers.checkpoints.RetentionState:
    retention = request.gateway.storage.retention
    found = await retention.policy(run_id)
    plan = await retention.plan(run_id, found.policy)
    policy = found.policy.model_dump(exclude_none=True)
    return {"policy": policy, "is_default": found.is_default, **_plan_view(plan)}


async def get_retention(request: Request) -> answers.checkpoints.RetentionState:
    """The retention policy of a training run, and what it would delete now."""
    return await _answer(request, await _own_run(request))


async def set_retention(request: Request, body: schemas.Policy) -> answers.checkpoints.RetentionState:
    """Set the retention policy of a training run."""
    gateway, run_id = request.gateway, await _own_run(request)
    await gateway.storage.retention.set_policy(run_id, body)
    return await _answer(request, run_id)


async def use_default_retention(request: Request) -> answers.checkpoints.RetentionState:
    """Go back to the server's retention policy."""
    run_id = await _own_run(request)
    await request.gateway.storage.retention.use_default(run_id)
    return await _answer(request, run_id)


async def prune(request: Request, body: schemas.Prune) -> answers.checkpoints.PruneResult:
    """Delete the checkpoints that a policy does not keep, or list them.

    The policy is that of the body, or else that of the run.
    """
    gateway, run_id = request.gateway, await _own_run(request)
    policy = body.policy or (await gateway.storage.retention.policy(run_id)).policy
    if body.dry_run:
        return {**_plan_view(await gateway.storage.retention.plan(run_id, policy))}
    only = None if body.paths is None else set(body.paths)
    deleted = await gateway.storage.retention.prune(run_id, policy, only=only, owner=request.owner)
    gone = {one.path for one in deleted}
    kept = [one for one in await gateway.storage.retention.plan(run_id, policy) if one.checkpoint.path not in gone]
    return {"deleted": [checkpoint_view(one) for one in deleted], **_plan_view(kept)}


routes = [
    GET(_RUN, get_retention, errors=(404,)),
    PUT(_RUN, set_retention, errors=(404,)),
    DELETE(_RUN, use_default_retention, errors=(404,)),
    POST(f"{_RUN}/prune", prune, errors=(404,)),
]
