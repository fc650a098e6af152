"""Server-sent events, and the end of work whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.openai.draws import Draw, Update
from gateway.openai.errors import body_of
from tinsmith.errors import ServiceError
from tinsmith.tasks import cancel_all

T = TypeVar("T")

MEDIA_TYPE = "text/event-stream"


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled when the client leaves. Raises ClientDisconnect then.

    The body must have been read.
    """

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await cancel_all([working, leaving])


async def event_stream(
    request: Request,
    draws: list[Draw],
    chunks: Callable[[AsyncIterator[Update]], AsyncGenerator[dict[str, Any], None]],
    *,
    places: contextlib.ExitStack,
    are_named: bool = False,
) -> StreamingResponse:
    """Begins all draws, and returns a response that streams the chunks which `chunks` makes of their updates.

    `places` is closed at the end of the response. `are_named`: the `type` of a chunk is the name of its event, and no
    [DONE] follows the last one. Raises the error of a draw that fails before its first token. A later failure is sent
    as an event, because the status has been sent.
    """
    stack = contextlib.AsyncExitStack()
    stack.callback(places.close)
    begun = together([stack.enter_async_context(draw.updates()) for draw in draws])
    try:
        sources = await while_connected(request, begun)
    except BaseException:
        await stack.aclose()
        raise

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(_merge(sources)) as updates, aclosing(chunks(updates)) as parts:
                async for part in parts:
                    if are_named:
                        yield b"event: " + part["type"].encode() + b"\n"
                    yield b"data: " + orjson.dumps(part) + b"\n\n"
        except ServiceError as error:
            yield b"data: " + orjson.dumps(body_of(error)[1]) + b"\n\n"
        else:
            if not are_named:
                yield b"data: [DONE]\n\n"

    return _EventStream(events(), stack)


class _EventStream(StreamingResponse):
    """A streaming response that always ends its draws, also when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(events, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack, aclosing(self._events):
            await super().__call__(scope, receive, send)


async def together(works: Sequence[Awaitable[T]]) -> list[T]:
    """All results, in order. When one fails, the others are cancelled, and its exception is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def _merge(sources: list[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """The items of all sources in order of arrival. Raises the first error of a source."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    async def drain(source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        await cancel_all(tasks)
