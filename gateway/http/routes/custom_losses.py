"""Custom losses that clients have traced."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.codec import caller_of, gateway_of, json_response, parse, read_json
from gateway.http.routes.models import check_session
from gateway.ids import custom_loss_id_of
from gateway.training.custom_losses import to_message


async def create_custom_loss(request: Request) -> Response:
    """Stores a custom loss. Idempotent by session_id and custom_loss_seq_id. A graph that the trainer refuses fails
    the future."""
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.CreateCustomLoss, content)
    await check_session(gateway, body.session_id, caller=caller_of(request))
    loss_id = custom_loss_id_of(body.session_id, body.custom_loss_seq_id)
    await gateway.training.custom_losses.create(loss_id, to_message(body), session_id=body.session_id)
    return json_response({"request_id": loss_id})


routes = [Route("/create_custom_loss", create_custom_loss, methods=["POST"])]
