"""`tinsmith checkpoints import`: an adapter made elsewhere becomes a checkpoint of a running server."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinsmith.cli.base_models import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DEFAULT_URL = "http://127.0.0.1:8000"
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIMEOUT_S = 600.0


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checkpoints", help="checkpoints of a running server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    importing = actions.add_parser(
        "import",
        help="import a PEFT LoRA adapter, to sample from or to train on",
        description="Sends a PEFT LoRA adapter to a server and prints the tinker:// path of the checkpoint that it "
        "becomes.",
    )
    importing.add_argument(
        "source", type=Path, metavar="FOLDER_OR_ARCHIVE",
        help=f"folder with {_CONFIG} and {_WEIGHTS[0]} (or .bin), or a tar archive of it",
    )  # fmt: skip
    importing.add_argument("--name", required=True, help="last part of the path")
    importing.add_argument(
        "--base-model", metavar="MODEL", help="public name of the base model (default: the server's, when it has one)"
    )
    importing.add_argument(
        "--ttl",
        type=_seconds,
        metavar="TIME",
        help="delete it after so many seconds, or 90m, 12h, 30d (default: never)",
    )
    importing.add_argument(
        "--base-url", default=os.environ.get("TINKER_BASE_URL") or DEFAULT_URL,
        help=f"address of the server (default: TINKER_BASE_URL, or {DEFAULT_URL})",
    )  # fmt: skip
    importing.add_argument(
        "--api-key", default=os.environ.get("TINKER_API_KEY", ""), help="key for it (default: TINKER_API_KEY)"
    )
    importing.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = _Server(arguments.base_url, arguments.api_key)
    with _archive(arguments.source) as archive:
        query = {"base_model": arguments.base_model or server.only_model(), "name": arguments.name}
        if arguments.ttl is not None:
            query["ttl_seconds"] = str(arguments.ttl)
        answer = server.call(f"checkpoints/import?{urllib.parse.urlencode(query)}", body=archive)
    print(answer["path"])
    for note in answer["notes"]:
        print(f"note: {note}")
    return 0


class _Server:
    def __init__(self, base_url: str, api_key: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url: {base_url!r} does not begin with http:// or https://")
        self._base_url = base_url.rstrip("/")
        self._headers = {"X-API-Key": api_key} if api_key else {}

    def only_model(self) -> str:
        models = self.call("get_server_capabilities")["supported_models"]
        names = [model["model_name"] for model in models if model.get("trainable", True)]
        if len(names) != 1:
            raise UsageError(f"--base-model: name one of {', '.join(names) or 'none'}, which this server trains")
        return names[0]

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


@contextmanager
def _archive(source: Path) -> Iterator[IO[bytes]]:
    """The file itself, or a tar archive of the folder's adapter."""
    if source.is_file():
        with source.open("rb") as file:
            yield file
        return
    if not source.is_dir():
        raise UsageError(f"{source}: there is no such folder or archive")
    weights = next((name for name in _WEIGHTS if (source / name).is_file()), None)
    if weights is None or not (source / _CONFIG).is_file():
        raise UsageError(f"{source}: it needs {_CONFIG} and {' or '.join(_WEIGHTS)}")
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in (_CONFIG, weights):
                tar.add((source / name).resolve(), arcname=name)  # a hub's snapshot holds links
        yield file


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 3600, 90m, 12h or 30d")
    return int(match[1]) * _UNITS_S[match[2]]
