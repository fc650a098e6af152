"""Content negotiation: protobuf or JSON for an answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import JSON, PROTOBUF, Answer
from gateway.config import GatewayConfig
from gateway.http.body import off_loop


async def negotiate(request: Request, answer: Answer, config: GatewayConfig) -> Response:
    """The answer in protobuf if the header Accept names that, else in JSON: SDKs before 0.18.1 read only JSON."""
    to_json = answer.as_json
    weights = _weights(request.headers.get("accept", ""))
    protobuf = weights.get(PROTOBUF, 0.0)
    if to_json is None or (protobuf > 0 and protobuf >= weights.get(JSON, 0.0)):
        return Response(answer.body, media_type=answer.media_type)
    body = await off_loop(lambda: to_json(answer.body), num_bytes=len(answer.body), config=config)
    return Response(body, media_type=JSON)


def _weights(accept: str) -> dict[str, float]:
    """Media type -> weight, of an Accept header (RFC 9110, 12.5.1). Weight 0 means not acceptable."""
    weights = {}
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            weights[media_type] = float(quality)
        except ValueError:
            weights[media_type] = 1.0
    return weights
