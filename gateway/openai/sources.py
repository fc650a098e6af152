"""Names of models in the OpenAI API: base models, and checkpoints by their tinker:// path."""

from __future__ import annotations

from sqlalchemy import select

from gateway.answers.openai import ModelCard
from gateway.database.catalog import exists_now
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import SamplingSession
from gateway.gateway import Gateway
from gateway.openai.generator import Source
from gateway.tenants.access import Caller
from tinsmith.errors import InvalidRequest, ModelNotFound
from tinsmith.rpc.paths import KINDS, SCHEME

MAX_LISTED = 100
"""Most checkpoints in the list of models, the newest ones."""


async def find_source(gateway: Gateway, model: str, *, caller: Caller) -> Source:
    """The weights behind a model's name.

    Raises ModelNotFound and CheckpointNotFound for an unknown name, InvalidRequest for a bad path, and NotReady when a
    service that may know the name cannot be reached.
    """
    session = SamplingSession(base_model=model, model_path=model, version_id="", location="", inflight_run_id=None)
    if model.startswith(SCHEME):
        checkpoints = gateway.storage.checkpoints
        checkpoint = await checkpoints.find_usable(model, field="model", caller=caller, purpose="sample")
        if gateway.sampling.generator.is_first(caller.owner, checkpoint.version_id):
            checkpoints.record("checkpoint_read", checkpoint, owner=caller.owner, purpose="sample")
        session = await gateway.sampling.inflight.resolve(
            SamplingSession(
                base_model=checkpoint.base_model,
                model_path=model,
                version_id=checkpoint.version_id,
                location=checkpoint.location,
                inflight_run_id=checkpoint.run_id if checkpoint.inflight else None,
            )
        )
    try:
        await gateway.clients.settle(
            lambda: gateway.clients.samplers.check_sampled(session.base_model),
            timeout_s=gateway.config.submit_timeout_s,
        )
    except InvalidRequest as error:
        raise ModelNotFound(error.message.replace("base_model:", "model:", 1), field="model") from error
    return Source(model, caller.owner, session, caller)


def _model(name: str, *, created: float, parent: str | None = None) -> ModelCard:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "tinsmith", "parent": parent}


async def list_models(gateway: Gateway, *, owner: str) -> list[ModelCard]:
    """The base models, and then the caller's newest checkpoints."""
    infos = gateway.clients.samplers.infos()
    names = sorted({name for info in infos for name in info.base_models})
    mine = (
        select(Checkpoint)
        .where(
            Checkpoint.owner == owner,
            Checkpoint.kind.in_(KINDS),
            exists_now(),
        )
        .order_by(Checkpoint.created_at.desc())
        .limit(MAX_LISTED)
    )
    checkpoints = await gateway.store.all(mine)
    return [
        *(_model(name, created=0) for name in names),
        *(_model(row.path, created=row.created_at, parent=row.base_model) for row in checkpoints),
    ]


async def get_model(gateway: Gateway, name: str, *, caller: Caller) -> ModelCard:
    """One entry of the list of models. Raises the errors of `find_source`."""
    await find_source(gateway, name, caller=caller)
    if not name.startswith(SCHEME):
        return _model(name, created=0)
    row = await gateway.storage.checkpoints.find(name, field="model", caller=caller)
    return _model(name, created=row.created_at, parent=row.base_model)
