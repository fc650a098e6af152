"""Retention policies of runs: Tinsmith's own endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway import schemas
from gateway.answers import checkpoints as answers
from gateway.codec import caller_of, gateway_of, json_response, owner_of, parse, read_json
from gateway.storage.retention_rules import Judged
from gateway.views import checkpoint_view
from tinsmith.errors import NotFound

_RUN = "/training_runs/{run_id}/retention"


async def _own_run(request: Request) -> str:
    run_id = request.path_params["run_id"]
    if not await gateway_of(request).tenants.access.owns(run_id, caller_of(request)):
        raise NotFound(f"training_run_id: there is no training run {run_id!r}")
    return run_id


def _kept_view(one: Judged) -> answers.KeptCheckpoint:
    return {**checkpoint_view(one.checkpoint), "kept_as": one.kept_as}


def _plan_view(plan: Sequence[Judged]) -> answers.RetentionPlan:
    return {
        "delete": [checkpoint_view(one.checkpoint) for one in plan if not one.kept_as],
        "keep": [_kept_view(one) for one in plan if one.kept_as],
    }


async def _answer(request: Request, run_id: str) -> Response:
    retention = gateway_of(request).storage.retention
    found = await retention.policy(run_id)
    plan = await retention.plan(run_id, found.policy)
    policy = found.policy.model_dump(exclude_none=True)
    answer: answers.Retention = {"policy": policy, "is_default": found.is_default, **_plan_view(plan)}
    return json_response(answer)


async def get_retention(request: Request) -> Response:
    """The run's policy, and the checkpoints that it would delete now."""
    return await _answer(request, await _own_run(request))


async def set_retention(request: Request) -> Response:
    gateway, run_id = gateway_of(request), await _own_run(request)
    content, _ = await read_json(request, gateway.config)
    await gateway.storage.retention.set_policy(run_id, parse(schemas.Policy, content))
    return await _answer(request, run_id)


async def use_default_retention(request: Request) -> Response:
    run_id = await _own_run(request)
    await gateway_of(request).storage.retention.use_default(run_id)
    return await _answer(request, run_id)


async def prune(request: Request) -> Response:
    """Deletes the checkpoints that a policy does not keep. The policy is the one in the body, or else the run's."""
    gateway, run_id = gateway_of(request), await _own_run(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.Prune, content)
    policy = body.policy or (await gateway.storage.retention.policy(run_id)).policy
    if body.dry_run:
        return json_response(_plan_view(await gateway.storage.retention.plan(run_id, policy)))
    only = None if body.paths is None else set(body.paths)
    deleted = await gateway.storage.retention.prune(run_id, policy, only=only, owner=owner_of(request))
    gone = {one.path for one in deleted}
    kept = [one for one in await gateway.storage.retention.plan(run_id, policy) if one.checkpoint.path not in gone]
    answer: answers.Pruned = {"deleted": [checkpoint_view(one) for one in deleted], **_plan_view(kept)}
    return json_response(answer)


routes: list[BaseRoute] = [
    Route(_RUN, get_retention),
    Route(_RUN, set_retention, methods=["PUT"]),
    Route(_RUN, use_default_retention, methods=["DELETE"]),
    Route(f"{_RUN}/prune", prune, methods=["POST"]),
]
