"""TrainerAdminService: lets an operator list and prune the journal, and move models between trainers."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import grpc.aio

from tinsmith.errors import InvalidRequest
from tinsmith.v1 import trainer_admin_pb2 as pb
from tinsmith.v1 import trainer_admin_pb2_grpc
from trainer_service.durability.run_file import Move
from trainer_service.servicer import TrainerServicer

Context = grpc.aio.ServicerContext[Any, Any]
_ID = re.compile(r"[0-9a-f]{32}")


class TrainerAdminServicer(trainer_admin_pb2_grpc.TrainerAdminServiceServicer):
    def __init__(self, trainer: TrainerServicer) -> None:
        self._trainer = trainer

    async def ListJournal(self, request: pb.ListJournalRequest, context: Context) -> pb.ListJournalResponse:
        found = await self._trainer.journal.summaries()
        return pb.ListJournalResponse(models=[model.to_proto() for model in found])

    async def PruneJournal(self, request: pb.PruneJournalRequest, context: Context) -> pb.PruneJournalResponse:
        pruned = await self._trainer.journal.prune(dry_run=request.dry_run)
        return pb.PruneJournalResponse(**asdict(pruned))

    async def ReleaseModel(self, request: pb.ReleaseModelRequest, context: Context) -> pb.ReleaseModelResponse:
        move = Move(_id(request.move_id, field="move_id"), _id(request.trainer_id, field="trainer_id"))
        await self._trainer.moves(request.model_id, lambda moving: moving.release(request.model_id, move))
        return pb.ReleaseModelResponse()

    async def AdoptModel(self, request: pb.AdoptModelRequest, context: Context) -> pb.AdoptModelResponse:
        move_id, fenced = _id(request.move_id, field="move_id"), request.fenced_trainer_id
        if fenced:
            _id(fenced, field="fenced_trainer_id")
        await self._trainer.moves(
            request.model_id, lambda moving: moving.adopt(request.model_id, move_id, fenced_trainer_id=fenced)
        )
        return pb.AdoptModelResponse()

    async def FenceTrainer(self, request: pb.FenceTrainerRequest, context: Context) -> pb.FenceTrainerResponse:
        await self._trainer.journal.moved.fence(_id(request.trainer_id, field="trainer_id"))
        return pb.FenceTrainerResponse()

    async def ForgetMove(self, request: pb.ForgetMoveRequest, context: Context) -> pb.ForgetMoveResponse:
        move_id = _id(request.move_id, field="move_id")
        await self._trainer.moves(request.model_id, lambda moving: moving.forget(request.model_id, move_id))
        return pb.ForgetMoveResponse()


def _id(value: str, *, field: str) -> str:
    """Raises InvalidRequest unless the value has the form of an id of a move or a trainer."""
    if not _ID.fullmatch(value):
        raise InvalidRequest(f"{field}: {value!r} is not 32 hexadecimal digits", field=field)
    return value
