"""The gRPC channel through which every client calls a Tinsmith service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinsmith.rpc import logs, tracing
from tinsmith.rpc.auth import KEY_HEADER
from tinsmith.rpc.message_memory import BOUNDED
from tinsmith.rpc.server import MAX_MESSAGE_BYTES
from tinsmith.rpc.tls import Certificates, PinnedCertificate

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def connect(
    address: str,
    *,
    api_key: str = "",
    certificates: Certificates | PinnedCertificate | None = None,
    resends: bool = True,
) -> grpc.aio.Channel:
    """A channel with keepalive and large messages. It retries calls that fail with UNAVAILABLE, unless `resends` is
    False. Every call carries the key, if there is one, and the id of the HTTP request for which it is made.

    With `certificates` the other side must have a certificate of the same authority for the host in `address`.
    """
    options = [*_OPTIONS, ("grpc.service_config", _SERVICE_CONFIG)] if resends else _OPTIONS
    if certificates is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, certificates.client(), options=options)
    if tracing.is_on():
        _trace_calls(channel)
    return _with_metadata(channel, api_key)


def _with_metadata(channel: grpc.aio.Channel, api_key: str) -> grpc.aio.Channel:
    """Adds the key, the request id and BOUNDED to every call. An interceptor would do this too, but would wrap each
    call in an object with tasks of its own, which is slower."""
    key = (BOUNDED, *(((KEY_HEADER, api_key),) if api_key else ()))

    def completed(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_completed(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = make(*args, **kwargs)

            def call_completed(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
                return call(*args, metadata=(*(metadata or _request_id()), *key), **kwargs)

            return call_completed

        return make_completed

    for kind in _KINDS:
        setattr(channel, kind, completed(getattr(channel, kind)))
    return channel


def _request_id() -> tuple[tuple[str, str], ...]:
    """Metadata of a call whose caller passes none."""
    request_id = logs.request_id.get()
    return ((logs.REQUEST_ID_METADATA, request_id),) if request_id else ()


def _trace_calls(channel: grpc.aio.Channel) -> None:
    """Makes every call within a trace a span of the trace, and sends the trace's id to the other side."""

    def traced(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_traced(method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = make(method, *args, **kwargs)

            def call_traced(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
                if (begun := tracing.call(method)) is None:
                    return call(*args, metadata=metadata, **kwargs)
                span, told = begun
                made = call(*args, metadata=(*(metadata or ()), *told), **kwargs)
                made.add_done_callback(lambda _: tracing.end(span))
                return made

            return call_traced

        return make_traced

    for kind in _KINDS:
        setattr(channel, kind, traced(getattr(channel, kind)))


async def is_serving(channel: grpc.aio.Channel, *, timeout_s: float = 2.0) -> bool:
    """True when the service behind the channel answers its health check with SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the type checker cannot see its methods
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def wait_serving(channel: grpc.aio.Channel, *, timeout_s: float) -> None:
    """Returns once the service is healthy; raises TimeoutError after `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not await is_serving(channel):  # noqa: ASYNC110 - another process holds the state
            await asyncio.sleep(0.05)
