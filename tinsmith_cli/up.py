"""`tinsmith up`: runs trainer, samplers and gateway as separate processes on this machine, in the foreground. With
--address or --join it runs this machine's part of a deployment on several machines.

This process only starts, watches and stops the services. It does not load torch.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tinsmith.child import die_with_parent
from tinsmith.rpc.addresses import read_addresses
from tinsmith.rpc.auth import address_of, is_loopback
from tinsmith.rpc.paths import check_checkpoint_root
from tinsmith.rpc.settings import unknown_variables
from tinsmith.rpc.tls import Certificates, check_pair
from tinsmith_cli import hub
from tinsmith_cli.base_models import ServedModel, UsageError, parse
from tinsmith_cli.cluster.joining import ClusterClient
from tinsmith_cli.cluster.registrar import Registrar
from tinsmith_cli.cluster.token import Token
from tinsmith_cli.keys import has_keys
from tinsmith_cli.planning.constraints import usable
from tinsmith_cli.planning.machine import Machine, see
from tinsmith_cli.planning.placement import check, placed
from tinsmith_cli.planning.plan import Plan
from tinsmith_cli.planning.report import summary
from tinsmith_cli.ports import free_ports
from tinsmith_cli.settings import DEFAULT_MODEL_NAME, SERVICE_PORTS, Settings, flag_of
from tinsmith_cli.stack import ModelGroup, Node, ServiceKeys, Site, Stack, Tls
from tinsmith_cli.supervisor import supervise
from tinsmith_cli.unserved_journals import with_live_runs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from pydantic_settings import BaseSettings

CLUSTER = "cluster"
"""Name of the folder in --state-dir with the keys, certificates and addresses of a deployment on several machines."""

_SOON_S = 1.0
"""The gateway is reported as waiting for other machines if it is not ready within this time, in seconds."""
_DEFAULT_MODEL_SETTINGS = ("--size", "small", "--pretrain-steps", "120")
"""Settings of the default model. They fix the number of steps and not the time: on a busy machine a minute gave 20
steps, after which `examples/multi_turn.py` and `examples/dpo.py` learn nothing. 120 steps take 100 s of one core."""


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
    settings.check_up()
    settings = replace(
        settings,
        state_dir=settings.state_dir.expanduser().absolute(),
        checkpoint_dir=_checkpoint_dir(settings.checkpoint_dir),
    )
    for sentence in _unknown_variables():
        _report(sentence)
    if settings.join:
        token = Token.parse(settings.join)
        with _lock(settings.state_dir):
            return asyncio.run(_run_further(settings, models, token))
    keys = _keys(settings.host, settings.api_key, state_dir=settings.state_dir)
    tls = _tls(settings)
    settings = replace(settings, port=_check_port(settings.host, settings.port))
    machine = usable(see(), settings)
    check(settings, machine, models, os.environ)
    with _lock(settings.state_dir):
        models = models or [ServedModel(str(_default_model(settings.state_dir)), (DEFAULT_MODEL_NAME,))]
        for model in models:
            if model.lacks_tokenizer:
                _report(
                    f"{model.source} has no files of a tokenizer: clients can only send tokens, and get_tokenizer() "
                    "fails; copy these files of the model into the folder"
                )
        if settings.address:
            return _run_first(settings, models, keys, tls, machine)
        stack = Stack(settings, models, keys, tls, _plans(settings, machine, models))
        groups = _prepared(stack)
        ready = f"Tinsmith is ready at {stack.url} ({stack.summary(groups)})\n{_next_steps(stack.url, keys)}"
        return asyncio.run(_supervise(stack, groups, on_ready=lambda: _report(ready)))


def _run_first(
    settings: Settings, models: Sequence[ServedModel], keys: ServiceKeys | None, tls: Tls, machine: Machine
) -> int:
    """Runs the first machine of several: its services, and the service at which other machines join."""
    registrar = Registrar(
        settings.state_dir / CLUSTER,
        address=address_of(settings.address, settings.join_port),
        models=models,
        settings=settings.shared(),
        certificates=settings.certificates,
        report=_report,
    )
    keys = ServiceKeys(keys.api_keys if keys else "[]", registrar.token.service_key)
    tls = replace(tls, folder=registrar.authority.absolute())
    nodes = []
    if "trainer" in settings.roles:
        for port, model in enumerate(models, start=SERVICE_PORTS["ranks"]):
            rank, trainer = registrar.place(
                model, nodes=settings.trainer_nodes, ranks_port=port, replace=settings.replace
            )
            nodes.append(Node(rank, settings.trainer_nodes, trainer.hosts[0], trainer.ranks_port))
    site = Site(settings.roles, settings.address, registrar.services_file, nodes)
    stack = Stack(settings, models, keys, tls, _plans(settings, machine, models), site)
    groups = _prepared(stack)
    registrar.list_own(trainers=stack.trainers(groups), samplers=stack.samplers(groups))

    async def serve() -> int:
        announcing: list[asyncio.Task[None]] = []

        def announce() -> None:
            announcing.append(asyncio.create_task(_announce(stack, groups)))

        async with registrar.serving():
            _report(
                f"other machines join with this line, which holds the service key:\n    tinsmith up --role sampler "
                f"--join {registrar.token.text}"
            )
            try:
                return await _supervise(stack, groups, on_ready=announce)
            finally:
                for task in announcing:
                    task.cancel()

    return asyncio.run(serve())


async def _announce(stack: Stack, groups: Sequence[ModelGroup]) -> None:
    """Reports when the gateway is ready: when it knows a trainer and a sampler."""
    waiting = asyncio.create_task(stack.wait_gateway())
    done, _ = await asyncio.wait([waiting], timeout=_SOON_S)
    if not done:
        _report(f"the gateway answers at {stack.url}, and waits for a trainer and a sampler to join")
    await waiting
    assert stack.site is not None
    everywhere = read_addresses(stack.site.services_file)
    _report(
        f"Tinsmith is ready at {stack.url} ({stack.summary(groups, everywhere)})\n{_next_steps(stack.url, stack.keys)}"
    )


async def _run_further(settings: Settings, named: Sequence[ServedModel], token: Token) -> int:
    """Runs a further machine of several: joins the first one, and runs this machine's services."""
    joined = ClusterClient(token, settings.state_dir / CLUSTER, report=_report)
    host = settings.address or joined.local_host
    settings = replace(settings, address=host)
    admission = await joined.join(
        roles=settings.roles,
        host=host,
        models=named,
        settings=settings.shared(),
        trainer_nodes=settings.trainer_nodes,
        ranks_port=SERVICE_PORTS["ranks"],
        replace=settings.replace,
    )
    background: list[asyncio.Task[None]] = []
    is_ready = False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = True
        _report(f"this machine is ready ({stack.summary(groups)})")

    try:
        settings, models = settings.with_shared(admission.settings), admission.models
        machine = usable(see(), settings)
        check(settings, machine, models, os.environ)
        nodes = [
            Node(node.rank, settings.trainer_nodes, node.master_host, node.master_port) for node in admission.nodes
        ]
        site = Site(settings.roles, host, joined.services_file, nodes)
        keys, tls = ServiceKeys("[]", token.service_key), Tls(folder=joined.certificates)
        stack = Stack(settings, models, keys, tls, _plans(settings, machine, models), site)
        groups = _prepared(stack)
        listing = joined.follow(trainers=stack.trainers(groups), samplers=stack.samplers(groups))
        background.append(asyncio.create_task(listing))
        return await _supervise(stack, groups, on_ready=on_ready)
    finally:
        for task in background:
            task.cancel()
        await joined.leave(gives_up_trainers=not is_ready)


def _take(taken: dict[int, str], flag: str, port: int) -> None:
    """Records in `taken` that a flag has the port. Raises UsageError if there is no such port, or if another flag has
    it."""
    if port > 65535:
        raise UsageError(f"{flag}: {port} is no port; take a smaller first one")
    if port in taken:
        raise UsageError(f"{flag}: {port} is also a port of {taken[port]}; take another")
    taken[port] = flag


def _plans(settings: Settings, machine: Machine, models: Sequence[ServedModel]) -> Sequence[Plan | None]:
    """Makes and reports the plan of each model. None for a model without a plan (`placed`). Raises UsageError."""
    if not {"trainer", "sampler"} & set(settings.roles):
        return [None] * len(models)
    for model in models:
        hub.require(model.source, flag="--base-model", report=_report)
    plans = placed(settings, machine, models, os.environ, report=_report)
    for plan in plans:
        if plan is not None:
            _report(summary(plan))
    return plans


def _prepared(stack: Stack) -> Sequence[ModelGroup]:
    """The groups of the stack. Checks their ports, writes the page of cores, and reports journals that are not served.
    Raises UsageError for a port that cannot be used."""
    groups = stack.groups()
    where = f"--address {stack.site.host} " if stack.site else ""
    taken: dict[int, str] = {}
    if stack.runs("gateway"):
        _take(taken, "--port", stack.settings.port)
        if stack.site:
            _take(taken, "--join-port", stack.settings.join_port)
    for flag, addresses in (("--trainer-port", stack.trainers(groups)), ("--sampler-port", stack.samplers(groups))):
        for address in addresses:
            host, _, port = address.rpartition(":")
            _take(taken, flag, int(port))
            _probe(host.strip("[]"), int(port), flags=f"{where}{flag} {port}")
    for sentence in _overridden_variables(stack, groups, os.environ):
        _report(sentence)
    stack.make_cores_page()
    folders = {stack.trainer_folder(group, number) for group in groups for number in range(len(group.trainers))}
    for folder, num_runs in with_live_runs(stack.settings.state_dir / "trainers", served=folders).items():
        _report(
            f"{folder} has {num_runs} live runs of a trainer that is not started now; they go on once --base-model "
            "serves the same folder again, with as many --trainers"
        )
    return groups


async def _supervise(stack: Stack, groups: Sequence[ModelGroup], *, on_ready: Callable[[], None]) -> int:
    env = _base_pages()
    return await supervise(
        [replace(service, env={**service.env, **env}) for service in stack.services(groups)],
        on_ready=on_ready,
        report=_report,
        startup_timeout_s=stack.settings.startup_timeout,
        log_max_bytes=1e6 * stack.settings.log_mb,
    )


def _base_pages() -> dict[str, str]:
    """Variables with the path of a new file of memory, through which the services share the pages of base models
    (tinsmith/modeling/shared_pages.py). The kernel frees the file when this process and all services that map it have
    ended. Empty if no such file can be made, as on other systems than Linux, and in a Python that was built for an old
    C library.
    """
    names = [name for name in ("TRAINER_BASE_PAGES", "SAMPLER_BASE_PAGES") if name not in os.environ]
    make = getattr(os, "memfd_create", None)
    if make is None or not names:
        return {}
    try:
        file = make("base-pages")
    except OSError as error:
        _report(f"each service has its own copy of the base model in memory: there is no file of memory ({error})")
        return {}
    return dict.fromkeys(names, f"/proc/{os.getpid()}/fd/{file}")


def _configs() -> dict[str, type[BaseSettings]]:
    """The settings of each service."""
    from gateway.config import GatewayConfig
    from sampler_service.config import SamplerConfig
    from trainer_service.config import TrainerConfig

    return {"trainer": TrainerConfig, "sampler": SamplerConfig, "gateway": GatewayConfig}


def _unknown_variables() -> list[str]:
    """Sentences about variables of the environment that look like settings of a service but are none. Such variables
    are reported and not refused, because a shell may have them for Compose, and Kubernetes may have set them."""
    return [sentence for config in _configs().values() for sentence in unknown_variables(config, os.environ)]


def _overridden_variables(stack: Stack, groups: Sequence[ModelGroup], env: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of the environment that has no effect, because every service of its kind gets
    another value by flag, or another key. Such variables are reported and not refused, for the same reason as in
    `_unknown_variables`."""
    sentences = []
    services = stack.services(groups)
    for kind, config in _configs().items():
        of_kind = [service for service in services if service.name.partition("-")[0] == kind]
        keys = stack.keys.env(kind) if stack.keys else {}
        for field in config.model_fields:
            variable = f"{kind}_{field}".upper()
            given = env.get(variable)
            flags = [dict(pairwise(service.argv)).get(f"--{field.replace('_', '-')}") for service in of_kind]
            used = [keys.get(variable) if value is None else value for value in flags]
            if given is None or not used or any(value is None or _means(given, value) for value in used):
                continue
            value, instead = ("", " its own value") if variable in keys else (f"={given}", f" {used[0]}")
            flag = flag_of(variable)
            advice = f"set it by {flag}" if flag else "no flag changes it"
            sentences.append(
                f"{variable}{value} in the environment has no effect: `tinsmith up` gives the {kind}{instead}; {advice}"
            )
    return sentences


def _means(text: str, value: str) -> bool:
    """Whether the text of a variable is another form of the value: a relative path, or JSON with other spaces."""
    try:
        return json.loads(text) == json.loads(value)
    except ValueError:
        return value in (text, str(Path(text).expanduser().absolute()))


def _checkpoint_dir(root: str) -> str:
    try:
        check_checkpoint_root(root)
    except ValueError as error:
        raise UsageError(f"--checkpoint-dir: {error}") from None
    return root if "://" in root or not root else str(Path(root).expanduser().absolute())


def _report(line: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that has gone, must not end the services
        print(line, flush=True)


def _next_steps(url: str, keys: ServiceKeys | None) -> str:
    key = "tml-anything" if keys is None else "YOUR_KEY"
    anywhere = next((host for host in ("0.0.0.0", "[::]") if f"//{host}:" in url), "")  # noqa: S104 - read, not bound
    elsewhere = f"\nOn other machines: the name of this one in place of {anywhere}" if anywhere else ""
    return f"For the SDK: export TINKER_BASE_URL={url} TINKER_API_KEY={key}{elsewhere}\nDashboard: {url}   Stop: Ctrl-C"


def _keys(host: str, api_keys: list[str], *, state_dir: Path) -> ServiceKeys | None:
    """The keys on the command line, else those in the environment. None if there are none, and if `tinsmith keys
    create` has made none either; every caller is then accepted. Keys in the database are accepted by the gateway only.
    Trainers and samplers do not know owners, and accept the service key and the configured keys. Raises UsageError for
    keys that cannot be used, and if there are none but other machines can reach `host`."""
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
    """Files for TLS. --tls-cert takes precedence over GATEWAY_TLS_CERT in the environment, which takes precedence over
    the files in --certificates. Raises UsageError for files that cannot be used."""
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
    port = port or free_ports(1)[0]
    _probe(host, port, flags=f"--host {host} --port {port}", remedy="; try another --port")
    return port


def _probe(host: str, port: int, *, flags: str, remedy: str = "") -> None:
    """Raises UsageError unless a service can listen on `host` and `port`. `flags`: the flags that name them, and
    `remedy`: advice, both for the message."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the services do: TIME_WAIT is no obstacle
            probe.bind(address)
    except OSError as error:
        raise UsageError(f"{flags}: cannot listen there ({error}){remedy}") from None


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
    """Folder of the default base model, which is made if it is not there. Raises UsageError."""
    out = state_dir / "base_models" / "small-qwen3"
    if not out.exists():
        for part in out.parent.glob(f".{out.name}.*"):  # an earlier start that was killed may have left parts
            shutil.rmtree(part, ignore_errors=True)
        _report("no --base-model given: making a small one (once, about a minute)")
        command = [sys.executable, "-m", "tinsmith_cli", "make-base-model", *_DEFAULT_MODEL_SETTINGS, "--out", str(out)]
        made = subprocess.run(command, preexec_fn=partial(die_with_parent, os.getpid()), check=False)  # noqa: S603
        if made.returncode:
            raise UsageError(f"the default base model could not be made (exit status {made.returncode})")
    return out
