"""The trainers behind the gateway, and draining them: Tinsmith's own endpoints, for admins."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from gateway import answers, schemas
from gateway.codec import Request
from gateway.http.endpoint import GET, POST
from gateway.moving import TrainerState


def _check_admin(request: Request) -> None:
    if not request.caller.admin:
        raise HTTPException(403, f"the key {request.caller.name!r} is not that of an admin, which this needs")


def _view(state: TrainerState) -> answers.trainers.TrainerFacts:
    trainer = state.trainer
    return {
        "address": trainer.address,
        "trainer_id": trainer.trainer_id,
        "boot_id": trainer.info.boot_id if trainer.info is not None else "",
        "base_models": list(trainer.info.base_models) if trainer.info is not None else [],
        "state": trainer.state,
        "is_drained": state.is_drained,
        "can_be_stopped": state.can_be_stopped,
        "num_runs": state.num_runs,
        "num_moving": state.num_moving,
        "problems": {
            model_id: f"gone: {problem['why']}" if problem["is_gone"] else problem["why"]
            for model_id, problem in state.problems.items()
        },
    }


async def _answer(request: Request) -> answers.trainers.Trainers:
    return {"trainers": [_view(one) for one in await request.gateway.moving.state()]}


async def get_trainers(request: Request) -> answers.trainers.Trainers:
    """The trainers, with their runs.

    For admins.
    """
    _check_admin(request)
    return await _answer(request)


async def drain(request: Request, body: schemas.Drain) -> answers.trainers.Trainers:
    """Drain a trainer: it gets no new runs, and its runs move to other trainers.

    For admins. Repeats change nothing.
    """
    _check_admin(request)
    moving = request.gateway.moving
    await moving.drain(moving.find(body.trainer), until_restart=body.until_restart)
    return await _answer(request)


async def undrain(request: Request, body: schemas.TrainerName) -> answers.trainers.Trainers:
    """Let a drained trainer take runs again.

    For admins. Runs that have moved stay where they are.
    """
    _check_admin(request)
    moving = request.gateway.moving
    await moving.undrain(moving.find(body.trainer))
    return await _answer(request)


routes = [
    GET("/trainers", get_trainers, errors=(403,)),
    POST("/trainers/drain", drain, errors=(403, 503)),
    POST("/trainers/undrain", undrain, errors=(403, 503)),
]
