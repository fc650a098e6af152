"""The dashboard's page at `/`, and its data. The page itself needs no key, because it holds no data. It asks the user
for a key if the server needs one, and makes changes through the public API only."""

from __future__ import annotations

import codecs
import json
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from gateway.codec import Request
from gateway.database.tables.samples import RecentSample
from gateway.database.tables.sessions import SamplingSession
from gateway.gateway import Gateway
from gateway.http.endpoint import GET
from gateway.openai.generator import Source
from gateway.openai.text import Vocabulary
from gateway.views import Json
from tinsmith import __version__
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.rpc.paths import SCHEME

STATIC = Path(__file__).parents[2] / "dashboard" / "static"
_HEADERS = {
    # Styles and scripts come from files of this server only, so the text of a sample cannot run as a script. data: is
    # for thumbnails, which this server has made.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_MAX_SAMPLES = 64
_MAX_NUMBER = 2**31 - 1
"""Largest id of a sample or number of an operation or a step that the database can store."""


class _Files(StaticFiles):
    """Static files, sent with the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


async def page(request: Request) -> Response:
    """The page; needs no key."""
    return FileResponse(STATIC / "index.html", headers=_HEADERS)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= _MAX_NUMBER):
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a number from 0 to {_MAX_NUMBER}", field=name)
    return int(text)


async def overview(request: Request) -> Json:
    """The newest runs with their newest metrics, and facts about the server."""
    gateway = request.gateway
    clients = gateway.clients
    infos = [*clients.trainer_infos(), *clients.samplers.infos()]
    return {
        "now": time.time(),
        "version": __version__,
        "started_at": gateway.dashboard.started_at,
        "caller": request.caller.name,
        "needs_key": not gateway.tenants.callers.anyone,
        "base_models": sorted({name for info in infos for name in info.base_models}),
        "unreached": clients.unreached,
        "samplers": [replica.state for replica in clients.samplers.all],
        **await gateway.dashboard.lists.runs(owner=request.caller.sees_only),
    }


async def services(request: Request) -> Json:
    return await request.gateway.dashboard.services.state()


async def sessions(request: Request) -> Json:
    rows = await request.gateway.dashboard.lists.sessions(owner=request.caller.sees_only)
    return {"now": time.time(), "sessions": rows}


async def run(request: Request) -> Json:
    """One run, with its checkpoints."""
    lists = request.gateway.dashboard.lists
    found = await lists.run(request.path_params["run_id"], owner=request.caller.sees_only)
    return {"now": time.time(), **found}


async def history(request: Request) -> Json:
    """The metrics of a run after the point `after`, up to which the page has counted `steps` steps."""
    gateway, run_id = request.gateway, request.path_params["run_id"]
    await gateway.dashboard.lists.check_sees(run_id, owner=request.caller.sees_only)
    after, num_steps = _number(request, "after"), _number(request, "steps")
    return await gateway.dashboard.history.read(run_id, after=after, num_steps=num_steps)


async def samples(request: Request) -> Json:
    """The caller's samples of a run that are newer than the one with id `after`; newest first."""
    gateway, run_id = request.gateway, request.path_params["run_id"]
    await gateway.dashboard.lists.check_sees(run_id, owner=request.caller.sees_only)
    rows = await gateway.dashboard.samples.read(
        run_id, owner=request.caller.sees_only, after=_number(request, "after"), limit=_MAX_SAMPLES
    )
    vocabularies = {
        row.base_model: await _vocabulary(gateway, row) for row in {row.base_model: row for row in rows}.values()
    }
    return {
        "now": time.time(),
        "keeps": gateway.config.recent_samples,
        "samples": [_sample(row, vocabularies[row.base_model]) for row in rows],
    }


async def _vocabulary(gateway: Gateway, row: RecentSample) -> Vocabulary | None:
    """The vocabulary of a sample's base model; None when no sampler can give a tokenizer now."""
    if not gateway.clients.samplers.usable(row.base_model):
        return None
    source = Source("", row.owner, SamplingSession(base_model=row.base_model))
    try:
        return (await gateway.sampling.generator.tokenizer(source)).vocabulary
    except ServiceError:
        return None


def _sample(row: RecentSample, vocabulary: Vocabulary | None) -> Json:
    tokens = np.frombuffer(row.tokens, "<i4").tolist()
    logprobs = np.frombuffer(row.logprobs, "<f4")
    return {
        "id": row.sample_id,
        "at": row.at,
        "request_id": row.request_id,
        "version_id": row.version_id,
        "num_prompt_tokens": row.num_prompt_tokens,
        "prompt": None
        if vocabulary is None
        else "".join(_texts(vocabulary, np.frombuffer(row.prompt, "<i4").tolist())),
        "num_tokens": row.num_tokens,
        "tokens": tokens,
        "texts": None if vocabulary is None else _texts(vocabulary, tokens),
        "special": [] if vocabulary is None else [n for n, token in enumerate(tokens) if vocabulary.is_special(token)],
        "logprobs": [float(each) if np.isfinite(each) else None for each in logprobs],
        "ranks": np.frombuffer(row.ranks, "<u2").tolist() if row.ranks else None,
        "is_finished": row.is_finished,
        "pictures": json.loads(row.pictures or "[]"),
    }


def _texts(vocabulary: Vocabulary, tokens: list[int]) -> list[str]:
    """The text of each token. A character that several tokens make belongs to the last one."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [utf8.decode(vocabulary.bytes_of(token)) for token in tokens]
    if texts:
        texts[-1] += utf8.decode(b"", final=True)
    return texts


async def download(request: Request) -> Json:
    """A signed path on this host of the archive of a checkpoint's files."""
    gateway = request.gateway
    path = SCHEME + "/".join(request.path_params[part] for part in ("run_id", "kind", "name"))
    checkpoint = await gateway.storage.checkpoints.read(path, field="path", caller=request.caller, purpose="download")
    signed = gateway.storage.downloads.sign(
        request, "archives", *checkpoint.location.split("/"), version=checkpoint.version_id
    )
    address = urlsplit(signed.url)
    return {"url": f"{address.path}?{address.query}"}


_RUN = "/runs/{run_id}"
_get = partial(GET, include_in_schema=False)

page_routes = [
    Route("/", page, include_in_schema=False),
    Mount("/dashboard/static", app=_Files(directory=STATIC)),
    Mount(
        "/dashboard/api",
        routes=[
            _get("/overview", overview),
            _get("/services", services),
            _get("/sessions", sessions),
            _get(_RUN, run),
            _get(f"{_RUN}/history", history),
            _get(f"{_RUN}/samples", samples),
            _get("/checkpoints/{run_id}/{kind}/{name}/download", download),
        ],
    ),
]
