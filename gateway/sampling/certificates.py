"""Certificates of published versions: how far the logprobs of each sampler were from the trainer's."""

from __future__ import annotations

from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import SamplingSession
from gateway.placement import Placement
from gateway.sampling.inflight import Inflight
from gateway.storage.retired_checkpoints import RetiredCheckpoints
from tinsmith.errors import NotFound
from tinsmith.v1 import trainer_pb2, types_pb2


class PublishCertificates:
    """Reads certificates from the trainers."""

    def __init__(self, placement: Placement, inflight: Inflight, retired: RetiredCheckpoints) -> None:
        self._placement = placement
        self._inflight = inflight
        self._retired = retired

    async def of_checkpoint(self, checkpoint: Checkpoint) -> types_pb2.PublishCertificate:
        """The certificate of a checkpoint's version.

        Raises NotFound when the version was never published, CheckpointNotFound, and NotReady.
        """
        return await self._get(checkpoint.location, base_model=checkpoint.base_model)

    async def of_sampler(self, session: SamplingSession) -> types_pb2.PublishCertificate:
        """The certificate of the version that a sample would be drawn from now.

        Raises NotFound when the version was never published, or the session samples from the base model.
        """
        drawn_from = await self._inflight.resolve(session)
        version_id, base_model = drawn_from.version_id, drawn_from.base_model
        if not version_id:
            raise NotFound(f"{session.sampling_session_id} samples from the base model, which nobody has published")
        try:
            certificate = await self._get(drawn_from.location, base_model=base_model)
            if certificate.version_id == version_id:
                return certificate
            missing = NotFound(f"{drawn_from.location} holds another version than {version_id} by now")
        except NotFound as error:
            missing = error
        kept = await self._retired.find(drawn_from.location, version_id)
        if kept is None:
            raise missing
        return await self._get(kept, base_model=base_model)

    async def _get(self, location: str, *, base_model: str) -> types_pb2.PublishCertificate:
        trainer = await self._placement.of_checkpoint(location, base_model)
        reply = await trainer.stub.GetCertificate(trainer_pb2.GetCertificateRequest(location=location))
        return reply.certificate
