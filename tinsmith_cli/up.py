"""`tinsmith up`: runs trainer, samplers and gateway as separate processes on this machine, in the foreground.

This process only starts, watches and stops the others. It does not load torch.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tinsmith.child import die_with_parent
from tinsmith.rpc.auth import is_loopback
from tinsmith.rpc.paths import check_checkpoint_root
from tinsmith.rpc.tls import Certificates, check_pair
from tinsmith_cli.base_models import ServedModel, UsageError, parse
from tinsmith_cli.keys import has_keys
from tinsmith_cli.planning.constraints import usable
from tinsmith_cli.planning.machine import see
from tinsmith_cli.planning.placement import check, placed
from tinsmith_cli.planning.report import summary
from tinsmith_cli.ports import free_ports
from tinsmith_cli.settings import DEFAULT_MODEL_NAME, Settings
from tinsmith_cli.stack import ServiceKeys, Stack, Tls
from tinsmith_cli.supervisor import supervise
from tinsmith_cli.unserved_journals import with_live_runs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DEFAULT_MODEL_SETTINGS = ("--size", "small", "--pretrain-seconds", "60")


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up",
        help="start trainer, sampler and gateway on this machine",
        description="Starts trainer, sampler and gateway as separate processes and stays in the foreground; Ctrl-C "
        "stops all of them. A process that ends by itself is restarted. GPUs and their memory are divided as `tinsmith "
        "plan` shows, and a model that does not fit is refused before anything starts. Settings without a flag here "
        "are set by TRAINER_*, SAMPLER_* and GATEWAY_* in the environment (`python -m trainer_service --help` and so "
        "on list them).",
    )
    Settings.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks everything that can be checked before a process starts, then runs the services. Raises UsageError."""
    models = parse(arguments.base_model, models_file=arguments.models_file)
    settings = Settings.of(arguments)
    settings = replace(
        settings,
        state_dir=settings.state_dir.expanduser().absolute(),
        checkpoint_dir=_checkpoint_dir(settings.checkpoint_dir),
    )
    state_dir = settings.state_dir
    keys = _keys(settings.host, settings.api_key, state_dir=state_dir)
    tls = _tls(settings)
    settings = replace(settings, port=_check_port(settings.host, settings.port))
    machine = usable(see(), settings)
    check(settings, machine, models, os.environ)
    with _lock(state_dir):
        models = models or [ServedModel(str(_default_model(state_dir)), (DEFAULT_MODEL_NAME,))]
        plans = placed(settings, machine, models, os.environ, report=_report)
        for plan in plans:
            if plan is not None:
                _report(summary(plan))
        stack = Stack(settings, models, keys, tls, plans)
        groups = stack.groups()
        stack.make_cores_page()
        folders = {stack.trainer_folder(group) for group in groups}
        for folder, num_runs in with_live_runs(state_dir / "trainers", served=folders).items():
            _report(
                f"{folder} has {num_runs} live runs of a base model that is not served now; they go on once "
                "--base-model serves it again from the same folder"
            )
        return asyncio.run(
            supervise(
                stack.services(groups),
                on_ready=lambda: _report(f"Tinsmith is ready at {stack.url} ({stack.summary(groups)})"),
                report=_report,
                startup_timeout_s=settings.startup_timeout,
                log_max_bytes=1e6 * settings.log_mb,
            )
        )


def _checkpoint_dir(root: str) -> str:
    try:
        check_checkpoint_root(root)
    except ValueError as error:
        raise UsageError(f"--checkpoint-dir: {error}") from None
    return root if "://" in root or not root else str(Path(root).expanduser().absolute())


def _report(line: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that has gone, must not end the services
        print(line, flush=True)


def _keys(host: str, api_keys: list[str], *, state_dir: Path) -> ServiceKeys | None:
    """The keys on the command line, else those in the environment. None if there are none, and `tinsmith keys create`
    has made none either; every caller is then accepted. Only the gateway accepts keys in the database. Trainers and
    samplers do not know owners, and accept the service key and the configured keys."""
    if not all(api_keys):
        raise UsageError("--api-key: '' is not a key; give at least one character")
    try:
        given = api_keys or json.loads(os.environ.get("GATEWAY_API_KEYS") or "[]")
    except ValueError:
        raise UsageError('GATEWAY_API_KEYS: is not a JSON list, such as ["tml-choose-a-long-one"]') from None
    if given or has_keys(state_dir):
        return ServiceKeys(json.dumps(given), secrets.token_urlsafe(32))
    if not is_loopback(host):
        raise UsageError(
            f"--host: {host!r} can be reached from other machines, so keys are needed: make one with "
            "`tinsmith keys create`, give --api-key, or GATEWAY_API_KEYS='[\"...\"]' in the environment"
        )
    return None


def _tls(settings: Settings) -> Tls:
    """Files for TLS. --tls-cert takes precedence over GATEWAY_TLS_CERT in the environment, and that over the files in
    --certificates."""
    cert, key = (
        Path(text) if (text := getattr(settings, name) or os.environ.get(f"GATEWAY_{name.upper()}")) else None
        for name in ("tls_cert", "tls_key")
    )
    folder = settings.certificates
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
        made = f"; `tinsmith make-certificates {folder}` makes the files for --certificates" if folder else ""
        raise UsageError(f"{error}{made}") from None
    return tls


def _check_port(host: str, port: int) -> int:
    """The port itself, or a free one for 0. Raises UsageError for a port in use, before anything is started."""
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
    """Locks the state directory. Raises UsageError if another `tinsmith up` uses it, which would write the same
    journals."""
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
