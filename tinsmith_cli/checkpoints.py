"""`tinsmith checkpoints`: imports an adapter that was made elsewhere into a running server, and shows certificates. The
other actions are in checkpoint_views.py, checkpoint_pruning.py and checkpoint_export.py."""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinsmith.rpc.paths import SCHEME
from tinsmith_cli import checkpoint_export, checkpoint_pruning, checkpoint_views, client
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.checkpoint_views import seconds
from tinsmith_cli.client import ApiClient
from tinsmith_cli.convert_pickle import to_safetensors

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checkpoints", help="checkpoints of a running server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    checkpoint_views.add_parsers(actions)
    checkpoint_pruning.add_parsers(actions)
    checkpoint_export.add_parser(actions)
    importing = actions.add_parser(
        "import",
        help="import a PEFT LoRA adapter, to sample from or to train on",
        description="Sends a PEFT LoRA adapter to a server, which stores it as a checkpoint, and prints the "
        "checkpoint's tinker:// path.",
    )
    importing.add_argument(
        "source", type=Path, metavar="FOLDER_OR_ARCHIVE",
        help=f"folder with {_CONFIG} and {_WEIGHTS[0]} (or .bin, which is converted here), or a tar archive of it",
    )  # fmt: skip
    importing.add_argument("--name", required=True, help="last part of the checkpoint's path")
    importing.add_argument(
        "--base-model",
        metavar="MODEL",
        help="public name of the base model (default: the server's, if it has one only)",
    )
    importing.add_argument(
        "--ttl",
        type=seconds,
        metavar="TIME",
        help="delete the checkpoint after this time: 3600 (seconds), 90m, 12h or 30d (default: never)",
    )
    client.add_arguments(importing)
    importing.set_defaults(run=run_import)
    certifying = actions.add_parser(
        "certificate",
        help="differences between the samplers' and the trainer's logprobs when a version was published",
        description="Prints the certificate of a published version. Exits with 1 if a difference was above the limit.",
    )
    certifying.add_argument(
        "version", metavar="PATH_OR_SAMPLER", help="tinker:// path of a checkpoint, or the id of a sampler"
    )
    certifying.add_argument("--json", action="store_true", help="print the server's JSON")
    client.add_arguments(certifying)
    certifying.set_defaults(run=run_certificate)


def run_import(arguments: argparse.Namespace) -> int:
    server = ApiClient.of(arguments)
    with _archive(arguments.source) as archive:
        query = {"base_model": arguments.base_model or _only_model(server), "name": arguments.name}
        if arguments.ttl is not None:
            query["ttl_seconds"] = str(arguments.ttl)
        answer = server.call(f"checkpoints/import?{urllib.parse.urlencode(query)}", body=archive)
    print(answer["path"])
    for note in answer["notes"]:
        print(f"note: {note}")
    return 0


def run_certificate(arguments: argparse.Namespace) -> int:
    version = arguments.version
    server = ApiClient.of(arguments)
    if version.startswith(SCHEME):
        certificate = server.checkpoint(version, "certificate")
    else:
        certificate = server.call(urllib.parse.quote(f"samplers/{version}/certificate", safe="/:"))
    print(json.dumps(certificate, indent=2) if arguments.json else "\n".join(_lines(certificate)))
    return 0 if certificate["passed"] else 1


_APPLIED = {
    "yes": "it applies the version",
    "no": "it does NOT apply the version",
    "differently": "it does NOT apply the version as the trainer does",
    "too weak to tell": "the version is too weak to tell whether it is applied",
    None: "whether it applies the version was not asked",
}


def _lines(certificate: Mapping[str, Any]) -> Iterator[str]:
    limit = certificate["limit"]
    yield f"version    {certificate['version_id']}, XXH3-128 {certificate['weights_hash']}"
    yield f"published  {certificate['num_bytes']} bytes in {certificate['publish_seconds']:.3f} s"
    yield f"issued     {certificate['issued_at']}"
    mean = "" if certificate["mean_limit"] is None else f", of the mean {certificate['mean_limit']:g} nats"
    yield f"limit      {'none' if limit is None else f'{limit:g} nats{mean}'}"
    for gap in certificate["samplers"]:
        gaps = f"largest gap {float(gap['max_gap']):.2e} nats, mean {float(gap['mean_gap']):.2e}"
        yield f"sampler    {gap['address']} ({gap['engine']}): {gaps}, {gap['num_tokens']} tokens"
        factor = "" if gap.get("factor") is None else f" (factor {gap['factor']:.2f})"  # older gateways send none
        yield f"           {_APPLIED[gap['applied']]}{factor}"
    if not certificate["samplers"]:
        yield "sampler    none has scored the version"
    yield (
        "passed"
        if certificate["passed"]
        else "NOT passed: a gap is above a limit, or the version is not applied as it should be"
    )


def _only_model(server: ApiClient) -> str:
    models = server.call("get_server_capabilities")["supported_models"]
    names = [model["model_name"] for model in models if model.get("trainable", True)]
    if len(names) != 1:
        raise UsageError(f"--base-model: name one of {', '.join(names) or 'none'}, the models that this server trains")
    return names[0]


@contextmanager
def _archive(source: Path) -> Iterator[IO[bytes]]:
    """The open archive: `source` itself if it is a file, or a tar archive of the adapter in the folder `source`."""
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
            tar.add((source / _CONFIG).resolve(), arcname=_CONFIG)  # snapshots of the hub consist of links
            if weights == _WEIGHTS[0]:
                tar.add((source / weights).resolve(), arcname=weights)
            else:
                content = to_safetensors(source / weights)
                info = tarfile.TarInfo(_WEIGHTS[0])
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        yield file
