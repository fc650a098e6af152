"""TrainerAdminService: lets an operator list and prune the journal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc.aio

from tinsmith.v1 import trainer_admin_pb2 as pb
from tinsmith.v1 import trainer_admin_pb2_grpc
from trainer_service.servicer import TrainerServicer

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerAdminServicer(trainer_admin_pb2_grpc.TrainerAdminServiceServicer):
    def __init__(self, trainer: TrainerServicer) -> None:
        self._trainer = trainer

    async def ListJournal(self, request: pb.ListJournalRequest, context: Context) -> pb.ListJournalResponse:
        found = await self._trainer.journal.summaries()
        return pb.ListJournalResponse(models=[model.to_proto() for model in found])

    async def PruneJournal(self, request: pb.PruneJournalRequest, context: Context) -> pb.PruneJournalResponse:
        pruned = await self._trainer.journal.prune(dry_run=request.dry_run)
        return pb.PruneJournalResponse(**asdict(pruned))
