"""Custom losses that clients have traced."""

from __future__ import annotations

from gateway import answers, schemas
from gateway.codec import Request
from gateway.http.endpoint import POST, SUBMISSION
from gateway.http.routes.models import check_session
from gateway.ids import custom_loss_id_of
from gateway.training.custom_losses import to_message


async def create_custom_loss(request: Request, body: schemas.CreateCustomLoss) -> answers.training.LossReceipt:
    """A loss that the client has traced.

    Idempotent by session_id and custom_loss_seq_id. A graph that the trainer refuses fails the future.
    """
    gateway = request.gateway
    await check_session(gateway, body.session_id, caller=request.caller)
    loss_id = custom_loss_id_of(body.session_id, body.custom_loss_seq_id)
    await gateway.training.custom_losses.create(loss_id, to_message(body), session_id=body.session_id)
    return {"request_id": loss_id}


routes = [POST("/create_custom_loss", create_custom_loss, errors=(404, *SUBMISSION))]
