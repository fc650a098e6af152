"""Calls of a running server's HTTP API by the commands that speak to one."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import IO, Any

from tinsmith.cli.base_models import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that Server.of reads."""
    parser.add_argument(
        "--base-url", default=os.environ.get("TINKER_BASE_URL") or DEFAULT_URL,
        help=f"address of the server (default: TINKER_BASE_URL, or {DEFAULT_URL})",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default=os.environ.get("TINKER_API_KEY", ""), help="key for it (default: TINKER_API_KEY)"
    )


class Server:
    def __init__(self, base_url: str, api_key: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url: {base_url!r} does not begin with http:// or https://")
        self._base_url = base_url.rstrip("/")
        self._headers = {"X-API-Key": api_key} if api_key else {}

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Server:
        return cls(arguments.base_url, arguments.api_key)

    def call(self, path: str, *, body: IO[bytes] | None = None) -> Any:
        """The answer's JSON. Raises UsageError with what the server says."""
        request = urllib.request.Request(f"{self._base_url}/api/v1/{path}", data=body, headers=self._headers)  # noqa: S310
        if body is not None:
            request.add_header("Content-Type", "application/x-tar")
            request.add_header("Content-Length", str(body.seek(0, os.SEEK_END)))
            body.seek(0)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310  # http or https
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise UsageError(f"the server refused it: {_detail(error)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UsageError(f"no Tinsmith answers at {self._base_url}: {error}") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
