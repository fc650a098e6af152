"""`tinsmith up`: trainer, samplers and gateway as separate processes on this machine, in the foreground.

This process only starts, watches and stops the others; it loads no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tinsmith.child import die_with_parent
from tinsmith.rpc.auth import is_loopback
from tinsmith.rpc.paths import check_checkpoint_root
from tinsmith.rpc.tls import Certificates, check_pair
from tinsmith_cli.base_models import BaseModel, UsageError, parse
from tinsmith_cli.keys import has_keys
from tinsmith_cli.left_journals import with_live_runs
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import Keys, Stack, Threads, Tls
from tinsmith_cli.supervisor import supervise

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DEFAULT_MODEL_NAME = "tinsmith/small-qwen3"
_DEFAULT_MODEL_SETTINGS = ("--size", "small", "--pretrain-seconds", "60")


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up",
        help="start trainer, sampler and gateway on this machine",
        description="Starts trainer, sampler and gateway as separate processes and stays in the foreground; Ctrl-C "
        "stops all of them. One that ends by itself is started again. What has no flag here is set through TRAINER_*, "
        "SAMPLER_* and GATEWAY_* in the environment (`python -m trainer_service --help` and so on list them).",
    )
    _add_models_and_folders(parser)
    _add_access(parser)
    _add_processes(parser)
    parser.set_defaults(run=run)


def _add_models_and_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-model", action="append", default=[], metavar="[NAME=]PATH|HUB_ID",
        help="weights to serve, repeatable. PATH alone is served under its folder's name, HUB_ID under itself. Several "
        "names for one folder load it once; each different one has its own trainer and samplers. Default: a small "
        f"model made on the first start and served as {DEFAULT_MODEL_NAME}",
    )  # fmt: skip
    parser.add_argument("--models-file", type=Path, metavar="FILE", help='more of them, as JSON: {"name": "path", ...}')
    parser.add_argument("--host", default="127.0.0.1", help="address of the HTTP API (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="its port; 0 takes any free one (default %(default)s)")
    for service in ("trainer", "sampler"):
        parser.add_argument(
            f"--{service}-port", type=_port, default=0, metavar="PORT",
            help=f"gRPC port of the first {service}; further ones have the ports after it (default: any free ports)",
        )  # fmt: skip
    parser.add_argument(
        "--state-dir", type=Path, default=Path("~/.tinsmith"), metavar="DIR",
        help="checkpoints, journals, database and logs (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-dir", default=os.environ.get("TRAINER_CHECKPOINT_DIR", ""), metavar="DIR_OR_URL",
        help="where checkpoints lie: a folder, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, with credentials from the "
        "environment (default: TRAINER_CHECKPOINT_DIR, or the folder checkpoints of --state-dir)",
    )  # fmt: skip


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key that clients must send, over HTTP and over gRPC, repeatable; GATEWAY_API_KEYS='[\"KEY\"]' in the "
        "environment keeps it out of `ps`. Required unless --host is a loopback address; without one, any key is "
        "accepted there",
    )  # fmt: skip
    parser.add_argument(
        "--certificates", type=Path, metavar="DIR",
        help="folder made by `tinsmith make-certificates`: HTTPS for clients, who must trust DIR/ca.pem, and mutual "
        "TLS between the services and for gRPC clients",
    )  # fmt: skip
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE",
        help="certificate (PEM) for HTTPS, of an authority that clients trust already; with --tls-key",
    )  # fmt: skip
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full-training", action="store_true",
        help="train all parameters of the base models, one run at a time for each (clients send rank 0), instead of "
        "LoRA adapters",
    )  # fmt: skip
    parser.add_argument(
        "--deterministic", action="store_true",
        help="the same requests give the same bits, whatever other runs do and also after a crash: trainers do not put "
        "requests together and keep their number of threads, which costs what both gain (default: "
        "TRAINER_DETERMINISTIC)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", default="auto", choices=["auto", "vllm", "torch"],
        help="what generates: vLLM, or the trainer's own modelling code; auto is vLLM on CUDA, where it is "
        "installed, and torch with --full-training; SAMPLER_TENSOR_PARALLEL in the environment has vLLM divide the "
        "model among GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--max-lora-rank", type=int, metavar="N",
        help="largest rank of adapters, for trainers and samplers (default: TRAINER_MAX_LORA_RANK for both; "
        "else 256, and 64 where vLLM samples, whose slots on the GPU are as large as this makes them)",
    )  # fmt: skip
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument(
        "--log-format", default="json", choices=["json", "text"], help="of the services' logs (default %(default)s)"
    )
    parser.add_argument(
        "--log-mb", type=float, default=100.0, metavar="MB",
        help="a log of this size begins again, and the one before stays beside it as NAME.log.1; inf lets "
        "it grow (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--tracing", action="store_true",
        help="send OpenTelemetry traces, as OTEL_EXPORTER_OTLP_ENDPOINT and its like say; needs the extra otel",
    )  # fmt: skip
    parser.add_argument(
        "--trainer-ranks", type=int, default=1, metavar="N",
        help="processes of each trainer, which divide the data and its threads (default %(default)s); "
        "TRAINER_TENSOR_PARALLEL and TRAINER_SHARD_BASE in the environment divide the base model, too",
    )  # fmt: skip
    parser.add_argument(
        "--samplers", type=int, default=1, metavar="N",
        help="samplers of each base model, which share its requests and the samplers' cores (default %(default)s); the "
        "others do the work of one that ends until it is back",
    )  # fmt: skip
    parser.add_argument(
        "--supervise", action=argparse.BooleanOptionalAction, default=True,
        help="start a service again when it ends, after 1 s, then 2, 4, ... 30 s; clients wait meanwhile. Without it "
        "one that ends ends all, with status 1: for those whose own supervisor starts all of it again (default: "
        "--supervise)",
    )  # fmt: skip
    for kind in ("trainer", "sampler"):
        parser.add_argument(
            f"--{kind}-threads", type=int, metavar="N",
            help=f"most CPU threads of each {kind} (default: all cores while no other service computes, and its share "
            "of them otherwise)",
        )  # fmt: skip
    parser.add_argument(
        "--startup-timeout", type=float, default=1800.0, metavar="SECONDS",
        help="give up when the models have not loaded by then; a service that is started again has as long, and is "
        "then killed and started once more (default %(default)g)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Checks everything that can be checked before a process starts; raises UsageError."""
    state_dir: Path = arguments.state_dir.expanduser().absolute()
    models = parse(arguments.base_model, models_file=arguments.models_file)
    for flag in ("samplers", "trainer_ranks", "log_mb"):
        if not (value := getattr(arguments, flag)) >= 1:  # not a number is none
            raise UsageError(f"--{flag.replace('_', '-')}: {value} is not at least 1")
    if arguments.max_lora_rank is not None and arguments.max_lora_rank < 1:
        raise UsageError(f"--max-lora-rank: {arguments.max_lora_rank} is not at least 1")
    for flag in ("trainer_threads", "sampler_threads"):
        if (value := getattr(arguments, flag)) is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')}: {value} is not at least 1")
    checkpoint_dir = _checkpoint_dir(arguments.checkpoint_dir)
    keys = _keys(arguments.host, arguments.api_key, state_dir=state_dir)
    tls = _tls(arguments)
    port = _check_port(arguments.host, arguments.port)
    with _lock(state_dir):
        stack = Stack(
            models=models or [BaseModel(str(_default_model(state_dir)), (DEFAULT_MODEL_NAME,))],
            host=arguments.host,
            port=port,
            state_dir=state_dir,
            checkpoint_dir=checkpoint_dir,
            keys=keys,
            log_level=arguments.log_level,
            log_format=arguments.log_format,
            tracing=arguments.tracing,
            most_threads=Threads(arguments.trainer_threads or 0, arguments.sampler_threads or 0),
            full_training=arguments.full_training,
            deterministic=arguments.deterministic,
            engine=arguments.engine,
            max_lora_rank=arguments.max_lora_rank,
            trainer_ranks=arguments.trainer_ranks,
            num_samplers=arguments.samplers,
            trainer_port=arguments.trainer_port,
            sampler_port=arguments.sampler_port,
            tls=tls,
            supervised=arguments.supervise,
        )
        groups = stack.groups()
        stack.make_cores_page()
        folders = {stack.trainer_folder(group) for group in groups}
        for folder, num_runs in with_live_runs(state_dir / "trainers", served=folders).items():
            _report(
                f"{folder} has {num_runs} live runs of a base model that is not served now; they go on when it is "
                "served again, with --base-model, from the folder where it was"
            )
        return asyncio.run(
            supervise(
                stack.services(groups),
                on_ready=lambda: _report(f"Tinsmith is ready at {stack.url} ({stack.summary(groups)})"),
                report=_report,
                startup_timeout_s=arguments.startup_timeout,
                log_max_bytes=1e6 * arguments.log_mb,
            )
        )


def _checkpoint_dir(root: str) -> str:
    try:
        check_checkpoint_root(root)
    except ValueError as error:
        raise UsageError(f"--checkpoint-dir: {error}") from None
    return root if "://" in root or not root else str(Path(root).expanduser().absolute())


def _report(line: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that is gone, is no reason to end the services
        print(line, flush=True)


def _keys(host: str, api_keys: list[str], *, state_dir: Path) -> Keys | None:
    """Those of the command line, else of the environment. None when there are none, and none of `tinsmith keys create`
    either: then every caller is let in. Those of the database are the gateway's alone: trainers and samplers know of no
    owners, and take the service key and the configured keys."""
    if not all(api_keys):
        raise UsageError("--api-key: '' is no key; give at least one character")
    try:
        given = api_keys or json.loads(os.environ.get("GATEWAY_API_KEYS") or "[]")
    except ValueError:
        raise UsageError('GATEWAY_API_KEYS: is not a JSON list, such as ["tml-choose-a-long-one"]') from None
    if given or has_keys(state_dir):
        return Keys(json.dumps(given), secrets.token_urlsafe(32))
    if not is_loopback(host):
        raise UsageError(
            f"--host: {host!r} can be reached from other machines, so keys are needed: make one with "
            "`tinsmith keys create`, give --api-key, or GATEWAY_API_KEYS='[\"...\"]' in the environment"
        )
    return None


def _tls(arguments: argparse.Namespace) -> Tls:
    """--tls-cert before GATEWAY_TLS_CERT of the environment, before what --certificates holds."""
    cert, key = (
        Path(text) if (text := getattr(arguments, name) or os.environ.get(f"GATEWAY_{name.upper()}")) else None
        for name in ("tls_cert", "tls_key")
    )
    folder: Path | None = arguments.certificates
    if cert is None and key is None and folder is not None:
        cert, key = folder / "gateway.pem", folder / "gateway-key.pem"
    if cert is None or key is None:
        if cert or key:
            raise UsageError("--tls-cert and --tls-key belong together: give both, or none")
        return Tls()
    tls = Tls(cert.absolute(), key.absolute(), folder and folder.absolute())
    try:
        check_pair(cert, key, names=("--tls-cert", "--tls-key"))
        for service in ("gateway", "trainer", "sampler"):
            if (files := tls.grpc(service)) is not None:
                Certificates.given(ca=files.ca, cert=files.cert, key=files.key)
    except ValueError as error:
        made = f"; `tinsmith make-certificates {folder}` makes what --certificates needs" if folder else ""
        raise UsageError(f"{error}{made}") from None
    return tls


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 1 to 65535, or 0 for any free one")
    return int(text)


def _check_port(host: str, port: int) -> int:
    """The port itself, or a free one for 0. Refuses one in use before anything is started."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port: {port} is not in 0 to 65535")
    try:
        port = port or free_ports(1)[0]
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway does: TIME_WAIT is no obstacle
            probe.bind(address)
            return port
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({error}); try another --port") from None


def _lock(state_dir: Path) -> IO[str]:
    """Two stacks on one state directory would write the same journals; the second is refused."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise UsageError(f"--state-dir: cannot write to {state_dir} ({error})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UsageError(
            f"--state-dir: another `tinsmith up` uses {state_dir}; stop it or name another folder"
        ) from None
    return lock


def _default_model(state_dir: Path) -> Path:
    out = state_dir / "base_models" / "small-qwen3"
    if not out.exists():
        _report("no --base-model given: making a small one (once, about a minute)")
        command = [sys.executable, "-m", "tinsmith_cli", "make-base-model", *_DEFAULT_MODEL_SETTINGS, "--out", str(out)]
        made = subprocess.run(command, preexec_fn=partial(die_with_parent, os.getpid()), check=False)  # noqa: S603
        if made.returncode:
            raise UsageError(f"the default base model could not be made (exit status {made.returncode})")
    return out
