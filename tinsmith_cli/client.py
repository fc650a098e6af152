"""A client of a running server's HTTP API, for the commands that need one."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any

from tinsmith.rpc.paths import SCHEME
from tinsmith_cli.base_models import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 600.0
_AWAY = (502, 503, 504)
"""Statuses of a gateway, or of a proxy in front of it, that is not ready."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that ApiClient.of reads."""
    parser.add_argument(
        "--base-url", default=os.environ.get("TINKER_BASE_URL") or DEFAULT_URL,
        help=f"address of the server (default: TINKER_BASE_URL, or {DEFAULT_URL})",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default=os.environ.get("TINKER_API_KEY", ""), help="key for the server (default: TINKER_API_KEY)"
    )


class Unreachable(UsageError):
    """The server does not answer, or says that it is not ready, such as while a gateway restarts."""


class ApiClient:
    """Calls the HTTP API of one server with one key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(
                f"--base-url: {base_url!r} does not begin with http:// or https://; with such a TINKER_BASE_URL, the "
                "SDK waits and says nothing"
            )
        self._base_url = base_url.rstrip("/")
        self._headers = {"X-API-Key": api_key} if api_key else {}

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ApiClient:
        return cls(arguments.base_url, arguments.api_key)

    def call(
        self, path: str, *, body: IO[bytes] | None = None, content: object = None, method: str | None = None
    ) -> Any:
        """Sends a request and returns the JSON of the answer. `body`: tar archive to send. `content`: JSON to send.
        `method`: the HTTP method; by default POST with `body` or `content`, else GET. Raises UsageError with the
        server's message if it refuses the request, and Unreachable if it does not answer."""
        request = urllib.request.Request(f"{self._base_url}/api/v1/{path}", headers=self._headers, method=method)  # noqa: S310
        if body is not None:
            request.data = body
            request.add_header("Content-Type", "application/x-tar")
            request.add_header("Content-Length", str(body.seek(0, os.SEEK_END)))
            body.seek(0)
        elif content is not None:
            request.data = json.dumps(content).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with _open(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            kind = Unreachable if error.code in _AWAY else UsageError
            raise kind(f"the server refused it: {detail(error)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"no Tinsmith answers at {self._base_url}: {error}") from None

    def checkpoint(self, path: str, action: str = "", **options: Any) -> Any:
        """Calls the route of a checkpoint. `path`: tinker:// path of the checkpoint. `action`: last part of the route.
        `options`: see `call`."""
        run_id, _, checkpoint = path.removeprefix(SCHEME).partition("/")
        if not path.startswith(SCHEME) or checkpoint.count("/") != 1:
            raise UsageError(f"{path!r} is not a path of a checkpoint, such as {SCHEME}RUN_ID/weights/NAME")
        place = f"training_runs/{run_id}/checkpoints/{checkpoint}" + (f"/{action}" if action else "")
        return self.call(urllib.parse.quote(place, safe="/:"), **options)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects. The server's answer also has the address in its JSON, which the caller uses."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        return fp


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    return urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S)  # http or https


def detail(error: urllib.error.HTTPError) -> str:
    """The server's message in an error's body; status and reason if there is none."""
    try:
        return str(json.loads(error.read())["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
