"""A load balancer: each request goes to the next server, and to the one after it where nobody listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_METHODS = ["GET", "POST", "PUT", "DELETE"]
_OWN = {"connection", "content-length", "transfer-encoding"}


class RoundRobin:
    """An ASGI application."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.num_sent = [0] * len(urls)
        """Requests that each has answered."""
        self._urls = urls
        self._next = 0
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None), timeout=httpx.Timeout(60, connect=2), trust_env=False
        )
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=_METHODS)])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        for _ in self._urls:
            index, self._next = self._next, (self._next + 1) % len(self._urls)
            try:
                reply = await self._http.request(
                    request.method,
                    self._urls[index] + request.url.path,
                    params=request.query_params,
                    content=body,
                    headers=[(name, value) for name, value in request.headers.items() if name not in {*_OWN, "host"}],
                )
            except httpx.ConnectError:
                continue
            except httpx.TransportError as error:  # it may have been done: the client decides
                return Response(str(error), 502)
            self.num_sent[index] += 1
            headers = {name: value for name, value in reply.headers.items() if name not in _OWN}
            return Response(reply.content, reply.status_code, headers)
        return Response("no server listens", 502)

    async def close(self) -> None:
        await self._http.aclose()


@contextmanager
def balanced(urls: Sequence[str]) -> Iterator[tuple[str, RoundRobin]]:
    """Its address, while it runs in a thread of its own."""
    balancer = RoundRobin(urls)
    config = uvicorn.Config(balancer.app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve()
        await balancer.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the load balancer did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", balancer
    finally:
        server.should_exit = True
        thread.join()
