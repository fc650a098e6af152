"""The home of a client's samples: the one of several gateways that has these samples in memory.

The first gateway that gets a sample of a client of a sampling session becomes the home of all samples of this client.
Any other gateway passes requests about these samples on to the home, with the client's own credentials. When the home
is dead, the next gateway that is asked becomes the home, and answers as a restarted gateway does (`Completions`):
samples that were in work are gone, and the client samples again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import ssl
import time

import httpx
from cachetools import LRUCache
from sqlalchemy import or_, select, update
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.database.store import Store
from gateway.database.tables.gateways import GatewayRow
from gateway.database.tables.samples import SampleMark
from gateway.high_availability.peers import BEAT_S, SILENT_S, GatewayPeers, living
from gateway.ids import Target, first_of, target_of
from gateway.sampling.samples import Completions
from gateway.sampling.suspects import Suspects
from tinsmith.errors import NotReady

logger = logging.getLogger(__name__)

_FORWARDED = "x-tinsmith-passed-on"
"""Header with a secret that the gateways share. It proves that another gateway has passed the request on."""
_ELSEWHERE = 421
"""Misdirected Request (RFC 9110, 15.5.20): this gateway is not, or no longer, the home."""
_OWN = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "te",
    "accept-encoding",
    "transfer-encoding",
    "upgrade",
    _FORWARDED,
}
"""Headers that belong to one connection, so that they are not passed on."""
_MAX_KNOWN = 100_000
"""Most clients of sampling sessions whose homes are kept in memory."""
_GIVE_UP_S = 2 * SILENT_S
"""Longest time for which a request looks for a home that answers, in seconds."""
_ANSWER_S = 60.0
"""Longest wait for the home's answer, in seconds; longer than a long poll."""
_SMALL_BYTES = 2**20
"""Largest answer of a home that is read as a whole before it is passed on, in bytes."""


class Forwarding:
    """Finds the homes of samples, and passes requests on to them. A gateway that is the only one of its database has
    no object of this class."""

    def __init__(self, store: Store, peers: GatewayPeers, completions: Completions, suspects: Suspects) -> None:
        self._store = store
        self._peers = peers
        self._completions = completions
        self._suspects = suspects
        self._known: LRUCache[Target, str] = LRUCache(_MAX_KNOWN)
        self._secret = ""
        self._http: httpx.AsyncClient | None = None
        """Client for the other gateways; None before `start`."""
        peers.on_taken_for_dead = self._forget

    async def start(self) -> None:
        """Reads the shared secret, or makes it. Must be called before any other method."""
        self._secret = await self._store.settings.get("peer_secret", default=secrets.token_hex(32))
        # No bound on connections, because clients may have any number of long polls at once.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(_ANSWER_S, connect=BEAT_S)
        authorities = ssl.create_default_context()  # it reads SSL_CERT_FILE
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, verify=authorities, trust_env=False)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def was_forwarded(self, request: Request) -> bool:
        """Whether another gateway has passed the request on to this one."""
        given = request.headers.get(_FORWARDED, "")
        return bool(self._secret) and hmac.compare_digest(given.encode(), self._secret.encode())

    async def forward(
        self, request: Request, body: bytes, target: Target | str, *, is_new: bool = False
    ) -> Response | None:
        """Passes a request on to its home. Returns the home's answer, or None when this gateway has to answer.

        `target`: the client of a sampling session, or the id of a sample. `is_new`: True for a new sample, for which
        this gateway becomes the home if there is none.

        Raises NotReady when the home does not answer, and no gateway has taken over in time.
        """
        found = target_of(target) if isinstance(target, str) else target
        if found is None:
            return None
        give_up_at = time.monotonic() + _GIVE_UP_S
        while (url := await self._elsewhere(found, is_new=is_new)) is not None:
            if self.was_forwarded(request):
                return Response(status_code=_ELSEWHERE)
            try:
                reply = await self._send(request, body, url)
            except httpx.TransportError as error:
                logger.info("the gateway at %s does not answer: %s", url, error or type(error).__name__)
            else:
                if reply.status_code != _ELSEWHERE:
                    return _as_it_came(reply)
                await reply.aclose()
            self._known.pop(found, None)
            if time.monotonic() > give_up_at:
                raise NotReady("the gateway that has these samples does not answer; try again")
            await asyncio.sleep(BEAT_S / 4)
        return None

    async def _send(self, request: Request, body: bytes, url: str) -> httpx.Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in {*_OWN, _FORWARDED}]
        assert self._http is not None
        query = f"?{request.url.query}" if request.url.query else ""
        passed_on = self._http.build_request(
            request.method,
            url + request.url.path + query,
            headers=[*headers, (_FORWARDED, self._secret)],
            content=body,
        )
        reply = await self._http.send(passed_on, stream=True)
        if int(reply.headers.get("content-length", 0)) <= _SMALL_BYTES:
            await reply.aread()  # if the connection breaks here, `forward` can still try again
        return reply

    async def _elsewhere(self, target: Target, *, is_new: bool) -> str | None:
        """URL of the home; None when this gateway is the home, or there is none."""
        if not self._peers.is_fresh:
            await self._peers.refresh()
        home = self._known.get(target)
        if home == self._peers.gateway_id:
            return None
        if home is not None and (url := self._peers.url_of(home)) is not None:
            return url
        home, url = await self._find(target, is_new=is_new)
        if home is not None:
            self._known[target] = home
        return None if home == self._peers.gateway_id else url

    async def _find(self, target: Target, *, is_new: bool) -> tuple[str | None, str | None]:
        """Id and URL of the home; None, None when there is none.

        This gateway becomes the home when there is none that lives, the session lives, and the target has samples or
        gets one now (`is_new`).
        """
        sampling_session_id, clone_id = target
        mine = self._peers.gateway_id
        await self._store.samplers.get(sampling_session_id)
        is_this = (SampleMark.sampling_session_id == sampling_session_id, SampleMark.clone_id == clone_id)
        was_of_dead = select(SampleMark.home).where(*is_this, SampleMark.home.not_in(living()))
        if await self._store.first(was_of_dead) is not None:
            await self._suspects.read()  # the dead gateway may have written some
        async with self._store.begin() as db:
            is_taken = False
            if self._store.samplers.lives(sampling_session_id):
                first = first_of(clone_id)
                empty = self._store.insert(SampleMark).values(
                    sampling_session_id=sampling_session_id, clone_id=clone_id, low=first, high=first - 1
                )
                if is_new:
                    await db.execute(empty.on_conflict_do_nothing())
                has_none = or_(SampleMark.home.is_(None), SampleMark.home.not_in(living()))
                taken = update(SampleMark).where(*is_this, has_none).values(home=mine).returning(SampleMark.home)
                is_taken = (await db.scalars(taken)).one_or_none() is not None
            query = select(SampleMark.home, GatewayRow.url).where(*is_this)
            row = (
                await db.execute(query.outerjoin(GatewayRow, GatewayRow.gateway_id == SampleMark.home))
            ).one_or_none()
        if is_taken:
            self._completions.forget(target)
        return (None, None) if row is None else (row[0], row[1])

    def _forget(self) -> None:
        """Forgets all homes, because other gateways may have become the homes meanwhile. Waiting clients have to ask
        again."""
        self._known.clear()
        self._completions.rouse()


def _as_it_came(reply: httpx.Response) -> Response:
    headers = {name: value for name, value in reply.headers.items() if name not in _OWN}
    if reply.is_closed:
        return Response(reply.content, reply.status_code, headers)
    return StreamingResponse(reply.aiter_raw(), reply.status_code, headers, background=BackgroundTask(reply.aclose))
