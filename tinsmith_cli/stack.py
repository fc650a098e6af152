"""Builds the command lines of the services that `tinsmith up` runs: ports, folders and cores.

**Cores.** Trainer and sampler take turns in most reinforcement-learning loops, but two OpenMP pools that share cores
make each other 2 to 4 times slower. A service that computes alone therefore uses all cores. While all services compute,
the trainers share C // 2 of C usable cores and the samplers the rest, with at least one thread each
(`tinsmith/cores.py`). A deterministic trainer always uses its share, because the number of threads changes the rounding
of sums. An OpenMP thread without work spins for a moment, and then sleeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path

import psutil

from tinsmith.cores import SPINS, make_page, usable_cores
from tinsmith.rpc.addresses import Addresses
from tinsmith.rpc.auth import address_of, is_loopback
from tinsmith.rpc.tls import Certificates
from tinsmith_cli.base_models import ServedModel
from tinsmith_cli.planning.plan import Plan
from tinsmith_cli.ports import free_ports
from tinsmith_cli.readiness import wait_gateway, wait_grpc, wait_trainers
from tinsmith_cli.settings import SERVICE_PORTS, Settings
from tinsmith_cli.supervisor import Service

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Threads:
    """Numbers of threads of one trainer and of one sampler."""

    trainer: int
    sampler: int


def divide_cores(cores: int, *, groups: int, samplers: int, most: Threads, trainers: int = 1) -> Threads:
    """Threads of each trainer and each sampler while all services compute. `groups`: number of base models, each with
    `trainers` trainers and `samplers` samplers. `most`: largest allowed numbers; 0 means all cores."""
    training = max(1, cores // 2) if trainers and samplers else cores * bool(trainers)
    trainer = max(1, training // max(1, groups * trainers))
    sampler = max(1, (cores - training) // max(1, groups * samplers))
    return Threads(min(trainer, most.trainer or trainer), min(sampler, most.sampler or sampler))


@dataclass(frozen=True, slots=True)
class Instance:
    """Name, ports, and place on the page of cores, of one trainer or sampler."""

    suffix: str
    """End of the service's name; empty if it is the only one of its kind."""
    port: int
    metrics_port: int
    place: int
    """The service's place on the page of cores (tinsmith/cores.py)."""


@dataclass(frozen=True, slots=True)
class Node:
    """This machine's place among the machines of one trainer."""

    rank: int
    """Number of this machine; 0 for the machine that serves."""
    count: int
    """Number of machines of the trainer."""
    host: str
    """Host of the rendezvous of the ranks, which is the machine that serves."""
    port: int
    """Port of the rendezvous."""


@dataclass(frozen=True, slots=True)
class Site:
    """The part of a deployment on several machines that runs on this one."""

    roles: Collection[str]
    """Services that run here."""
    host: str
    """Address under which other machines reach this one."""
    services_file: Path
    """File with the addresses of all trainers and samplers, which change as machines join and leave."""
    nodes: Sequence[Node] = ()
    """This machine's place in the trainer of each base model; empty if it runs no trainer."""

    @property
    def interface(self) -> str:
        """Name of the network interface with the address `host`; empty if there is none, as when `host` is a name."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == self.host for address in addresses):
                return name
        return ""


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """The trainers and samplers of one base model on this machine."""

    model: ServedModel
    trainers: Sequence[Instance]
    samplers: Sequence[Instance]
    nodes: Sequence[Node]
    """This machine's place in each trainer."""
    plan: Plan | None = None
    """GPUs and memory of the services; None if the services find them by themselves, as on a CPU."""


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """Keys that callers of the services must send. They are passed by environment, because `ps` shows command lines to
    every user."""

    api_keys: str = field(repr=False)
    """JSON list, in the form of GATEWAY_API_KEYS. TRAINER_API_KEYS and SAMPLER_API_KEYS in the environment replace it
    for these services."""
    service_key: str = field(repr=False)
    """The key that the services send to each other."""

    def env(self, service: str) -> dict[str, str]:
        """Variables with the keys for a service."""
        name = f"{service.upper()}_API_KEYS"
        api_keys = self.api_keys if service == "gateway" else os.environ.get(name, self.api_keys)
        return {name: api_keys, f"{service.upper()}_SERVICE_KEY": self.service_key}


@dataclass(frozen=True, slots=True)
class Tls:
    """Files for encrypted connections. Connections without files are not encrypted."""

    cert: Path | None = None
    """Certificate of the HTTP API."""
    key: Path | None = None
    """Private key of `cert`."""
    folder: Path | None = None
    """Folder with the files for gRPC, made by `tinsmith make-certificates`."""

    def grpc(self, service: str) -> Certificates | None:
        """Certificates of a service for gRPC; None if gRPC is not encrypted."""
        if self.folder is None:
            return None
        return Certificates(self.folder / "ca.pem", self.folder / f"{service}.pem", self.folder / f"{service}-key.pem")

    def flags(self, service: str) -> dict[str, str]:
        flags: dict[str, str] = {}
        if service == "gateway" and self.cert is not None:
            flags = {"tls-cert": str(self.cert), "tls-key": str(self.key)}
        if (certificates := self.grpc(service)) is not None:
            flags |= {
                "grpc-ca": str(certificates.ca),
                "grpc-cert": str(certificates.cert),
                "grpc-key": str(certificates.key),
            }
        return flags


@dataclass(frozen=True, slots=True)
class Stack:
    """The services that `tinsmith up` runs on this machine: trainers, samplers and the gateway, or some of them."""

    settings: Settings
    models: Sequence[ServedModel]
    keys: ServiceKeys | None = None
    tls: Tls = Tls()
    plans: Sequence[Plan | None] = ()
    """The plan of each model; empty if no model has one."""
    site: Site | None = None
    """This machine's part of a deployment on several machines; None if this is the only machine."""

    @property
    def url(self) -> str:
        scheme, host = "http" if self.tls.cert is None else "https", self.settings.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def most_threads(self) -> Threads:
        """Most threads of each service; 0 means all cores."""
        return Threads(self.settings.trainer_threads or 0, self.settings.sampler_threads or 0)

    @property
    def logs(self) -> Path:
        return self.settings.state_dir / "logs"

    def groups(self) -> list[ModelGroup]:
        """Trainers and samplers of each base model. A port without a setting is any free port (ports.py), or a fixed
        port in a deployment on several machines, which know it."""
        counts = self._num_samplers()
        num_trainers = self.settings.trainers if self.runs("trainer") else 0
        free = iter(free_ports(sum(max(1, num_trainers) + 2 * (num_trainers + count) for count in counts)))
        trainer_port = self._first_port("trainer", self.settings.trainer_port)
        sampler_port = self._first_port("sampler", self.settings.sampler_port)
        trainer_ports = count(trainer_port) if trainer_port else free
        sampler_ports = count(sampler_port) if sampler_port else free
        places = count()
        groups = []
        for number, model in enumerate(self.models, start=1):
            suffix = f"-{number}" if len(self.models) > 1 else ""
            num_samplers = counts[number - 1]
            trainers = [
                Instance(
                    f"{suffix}-{replica}" if num_trainers > 1 else suffix, next(trainer_ports), next(free), next(places)
                )
                for replica in range(1, num_trainers + 1)
            ]
            samplers = [
                Instance(
                    f"{suffix}-{replica}" if num_samplers > 1 else suffix, next(sampler_ports), next(free), next(places)
                )
                for replica in range(1, num_samplers + 1)
            ]
            if self.site and self.site.nodes:
                nodes = [self.site.nodes[number - 1]]
            else:
                nodes = [Node(0, 1, _LOCAL, next(free)) for _ in trainers]
            groups.append(ModelGroup(model, trainers, samplers, nodes, self._plans()[number - 1]))
        return groups

    def _first_port(self, service: str, wanted: int) -> int:
        """First port of a kind of service; 0 means any free ports."""
        return wanted or (SERVICE_PORTS[service] if self.site else 0)

    def runs(self, service: str) -> bool:
        """Whether the service runs on this machine."""
        return self.site is None or service in self.site.roles

    def address(self, port: int) -> str:
        """Address of a service of this machine."""
        return address_of(self.site.host if self.site else _LOCAL, port)

    def trainers(self, groups: Sequence[ModelGroup]) -> list[str]:
        """Addresses of the trainers that serve on this machine."""
        return [
            self.address(trainer.port)
            for group in groups
            for trainer, node in zip(group.trainers, group.nodes, strict=True)
            if node.rank == 0
        ]

    def samplers(self, groups: Sequence[ModelGroup]) -> list[str]:
        """Addresses of the samplers on this machine."""
        return [self.address(sampler.port) for group in groups for sampler in group.samplers]

    def _plans(self) -> Sequence[Plan | None]:
        return self.plans or [None] * len(self.models)

    def _num_samplers(self) -> list[int]:
        """Number of samplers of each model on this machine."""
        if not self.runs("sampler"):
            return [0] * len(self.models)
        return [self.settings.samplers or 1 if plan is None else len(plan.samplers) for plan in self._plans()]

    def trainer_folder(self, group: ModelGroup, number: int) -> Path:
        """Folder of the journal of a base model's trainer. `number`: counts the trainers of the base model from 0. The
        folder of trainer 0 does not depend on the number of trainers."""
        name = _folder_name(group.model)
        return self.settings.state_dir / "trainers" / (f"{name}-{number + 1}" if number else name)

    def services(self, groups: Sequence[ModelGroup]) -> list[Service]:
        """All services: trainers, samplers, then the gateway. The last one is the first to be stopped."""
        return [
            *(self._trainer(group, number) for group in groups for number in range(len(group.trainers))),
            *(self._sampler(group, sampler) for group in groups for sampler in group.samplers),
            *([self._gateway(groups)] if self.runs("gateway") else []),
        ]

    def summary(self, groups: Sequence[ModelGroup], elsewhere: Addresses | None = None) -> str:
        """One line about the services. `elsewhere`: the addresses of the services of all machines."""
        services = elsewhere or Addresses(self.trainers(groups), self.samplers(groups))
        models = ", ".join(name for group in groups for name in group.model.names)
        trainers = ", ".join(services.trainers) or "elsewhere"
        samplers = ", ".join(services.samplers) or "elsewhere"
        instances = [each for group in groups for each in (*group.trainers, *group.samplers)]
        ports = ", ".join(str(instance.metrics_port) for instance in instances)
        metrics = "/metrics" + (f", and on ports {ports}" if ports else "")
        return f"models: {models}; trainer: {trainers}; sampler: {samplers}; metrics: {metrics}; logs: {self.logs}"

    def make_cores_page(self) -> None:
        """Writes the page of cores, which must exist before a service starts."""
        make_page(self._cores_page, cores=usable_cores(), shares=self._places())

    def _places(self) -> list[int]:
        """Threads of each service, by its place on the page of cores, while all services compute. The last entry is for
        the gateway, which never computes."""
        shares = self.shares()
        trainers = [shares.trainer] * (self.settings.trainers if self.runs("trainer") else 0)
        groups = ([*trainers, *[shares.sampler] * count] for count in self._num_samplers())
        return [*chain.from_iterable(groups), 0]

    @property
    def _cores_page(self) -> Path:
        return self.settings.state_dir / "cores"

    def shares(self) -> Threads:
        """Threads of each trainer and each sampler while all of them compute."""
        return divide_cores(
            usable_cores(),
            groups=len(self.models),
            trainers=self.settings.trainers if self.runs("trainer") else 0,
            samplers=max(self._num_samplers()),
            most=self.most_threads,
        )

    def _cores(self, instance: Instance, *, most: int) -> dict[str, str]:
        flags = {"cores-page": f"{self._cores_page}:{instance.place}"}
        return flags | {"num-threads": str(most)} if most else flags

    def _trainer(self, group: ModelGroup, number: int) -> Service:
        trainer, node = group.trainers[number], group.nodes[number]
        threads = self.shares().trainer
        flags = {
            "base-model": group.model.source,
            "model-names": json.dumps(group.model.names),
            "listen": self.address(trainer.port),
            **self._known_services(samplers=group.samplers),
            **self._channel_host(),
            "checkpoint-dir": self.settings.checkpoint_dir or str(self.settings.state_dir / "checkpoints"),
            "state-dir": str(self.trainer_folder(group, number)),
            "metrics-port": str(trainer.metrics_port),
            **self._cores(trainer, most=self.most_threads.trainer),
            **self.settings.passed_to("trainer"),
        }
        if number:  # the name of trainer 0 in TRAINER_JOURNAL does not depend on the number of trainers
            name = os.environ.get("TRAINER_JOURNAL_NAME") or group.model.names[0]
            flags["journal-name"] = f"{name}-{number + 1}"
        ranks = self.settings.trainer_ranks or 1 if group.plan is None else group.plan.trainer.ranks
        service = self._grpc_service(
            "trainer",
            trainer,
            flags,
            threads=max(1, threads // ranks),
            launcher=self._torchrun(ranks, node),
            placement=group.plan.trainer_env(number) if group.plan else {},
        )
        if self.site is None or node.rank == 0:
            return service
        ready = partial(wait_trainers, self.site.services_file, node.host, self.tls.grpc("gateway"))
        return replace(service, wait_ready=ready)

    def _torchrun(self, ranks: int, node: Node) -> list[str]:
        if ranks == node.count == 1:
            return []
        return torchrun(
            ranks, node.port, nodes=node.count, node=node.rank, host=node.host, timeout_s=self.settings.startup_timeout
        )

    def _known_services(self, **services: Sequence[Instance]) -> dict[str, str]:
        """Flags with the addresses of other services."""
        if self.site is not None:
            return {"services-file": str(self.site.services_file)}
        return {name: json.dumps([self.address(each.port) for each in found]) for name, found in services.items()}

    def _channel_host(self) -> dict[str, str]:
        return {"channel-host": self.site.host} if self.site else {}

    def _sampler(self, group: ModelGroup, sampler: Instance) -> Service:
        engine = self.settings.engine
        if engine == "auto":
            # vLLM cannot serve full-parameter versions of every model, so only --engine vllm selects it for them.
            engine = "torch" if self.settings.full_training else _planned_engine(group.plan)
        flags = {
            "base-model": group.model.source,
            "model-names": json.dumps(group.model.names),
            "listen": self.address(sampler.port),
            **self._channel_host(),
            "metrics-port": str(sampler.metrics_port),
            **self._cores(sampler, most=self.most_threads.sampler),
            **({} if engine == "auto" else {"engine": engine}),  # for auto, SAMPLER_ENGINE may name one
            **({"max-lora-rank": rank} if (rank := _environments_rank()) else {}),
            **self.settings.passed_to("sampler"),
        }
        number = group.samplers.index(sampler)
        placement = group.plan.sampler_env(number) if group.plan else {}
        return self._grpc_service("sampler", sampler, flags, threads=self.shares().sampler, placement=placement)

    def _grpc_service(
        self,
        kind: str,
        instance: Instance,
        flags: dict[str, str],
        *,
        threads: int,
        placement: Mapping[str, str],
        launcher: Sequence[str] = (),
    ) -> Service:
        """`placement`: variables with the GPUs and the memory of the service."""
        if self.settings.gpus == "none":
            placement = {"CUDA_VISIBLE_DEVICES": ""}
        return Service(
            name=f"{kind}{instance.suffix}",
            argv=_command(f"{kind}_service", {**flags, **self.tls.flags(kind)}, launcher=launcher),
            log=self.logs / f"{kind}{instance.suffix}.log",
            wait_ready=partial(wait_grpc, self.address(instance.port), self.tls.grpc("gateway")),
            restarts=self.settings.supervise,
            env={
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE",
                "GOMP_SPINCOUNT": SPINS,
                "TOKENIZERS_PARALLELISM": "false",
                # torch's store looks up the name of every peer; a lost DNS packet would stall a group for 5 seconds.
                "RES_OPTIONS": "timeout:1 attempts:2",
                "PYTHONSAFEPATH": "1",  # -P, also for the ranks
                **self._interfaces(),
                **placement,
                **self._keys(kind),
            },
        )

    def _interfaces(self) -> dict[str, str]:
        """Variables with the network interface for gloo and NCCL. Without them gloo takes the interface of this
        machine's name, and NCCL any interface."""
        interface = self.site.interface if self.site else ""
        names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
        return dict.fromkeys(names, interface) if interface else {}

    def _gateway(self, groups: Sequence[ModelGroup]) -> Service:
        flags = {
            "host": self.settings.host,
            "port": str(self.settings.port),
            **self._known_services(
                trainers=[trainer for group in groups for trainer in group.trainers],
                samplers=[sampler for group in groups for sampler in group.samplers],
            ),
            "state-dir": str(self.settings.state_dir / "gateway"),
            "cores-page": f"{self._cores_page}:{len(self._places()) - 1}",
            **self.tls.flags("gateway"),
            **self.settings.passed_to("gateway"),
        }
        tokenizers = _tokenizers(self.models) if is_loopback(self.settings.host) else {}
        if tokenizers and "GATEWAY_TOKENIZERS" not in os.environ:
            flags["tokenizers"] = json.dumps(tokenizers)
        return Service(
            name="gateway",
            argv=_command("gateway", flags),
            log=self.logs / "gateway.log",
            wait_ready=partial(self.wait_gateway, alone=self.site is not None),
            restarts=self.settings.supervise,
            env=self._keys("gateway"),
        )

    async def wait_gateway(self, *, alone: bool = False) -> None:
        """Waits until the gateway knows a trainer and a sampler; with `alone`, only until it answers."""
        await wait_gateway(self.settings.host, self.settings.port, self.tls.cert, alone=alone)

    def _keys(self, service: str) -> dict[str, str]:
        return self.keys.env(service) if self.keys else {}


def _environments_rank() -> str:
    """Value of TRAINER_MAX_LORA_RANK, for the samplers, too. Empty if it is not set, or if SAMPLER_MAX_LORA_RANK is."""
    return "" if "SAMPLER_MAX_LORA_RANK" in os.environ else os.environ.get("TRAINER_MAX_LORA_RANK", "")


def _tokenizers(models: Sequence[ServedModel]) -> dict[str, str]:
    """Folders of models on this machine, as sources of tokenizers, by public name. Names with a slash are left out,
    except tinsmith's own: they are probably hub ids, of which clients can load the tokenizer themselves."""
    return {
        name: model.source
        for model in models
        if Path(model.source).is_absolute() and not model.lacks_tokenizer
        for name in model.names
        if "/" not in name or name.startswith("tinsmith/")
    }


def torchrun(
    ranks: int, port: int, *, nodes: int = 1, node: int = 0, host: str = _LOCAL, timeout_s: float | None = None
) -> list[str]:
    """Arguments of `python -m`, to be put before the module, which run the module in several ranks. torchrun ends all
    ranks if one ends. --standalone is not used, because it reads pickles from a store that listens on all addresses.

    `ranks`: number of ranks on this machine, which has number `node` of `nodes`. `host`, `port`: place of the ranks'
    rendezvous. `timeout_s`: longest wait for the other machines, in seconds.
    """
    place = ["--rdzv-backend", "static", "--master-addr", host, "--master-port", str(port)]
    if nodes > 1:
        place += ["--node-rank", str(node), *(["--rdzv-conf", f"timeout={timeout_s:.0f}"] if timeout_s else [])]
    return ["torch.distributed.run", "--nnodes", str(nodes), *place, "--nproc-per-node", str(ranks), "-m"]


def _command(module: str, flags: dict[str, str], *, launcher: Sequence[str] = ()) -> list[str]:
    # -P: a folder named `gateway` in the current directory must not be imported.
    return [
        sys.executable,
        "-P",
        "-m",
        *launcher,
        module,
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]


def _planned_engine(plan: Plan | None) -> str:
    """The engine for which the plan divides the GPUs' memory. "auto" without a plan, and if SAMPLER_ENGINE names an
    engine."""
    if plan is None or os.environ.get("SAMPLER_ENGINE", "auto") != "auto":
        return "auto"
    return plan.engine


def _folder_name(model: ServedModel) -> str:
    """Name of the folder with the journal of a base model's trainer. It depends on the weights' source only, so every
    start finds it again."""
    readable = re.sub(r"[^\w.-]+", "-", Path(model.source).name)
    return f"{readable}-{hashlib.sha256(model.source.encode()).hexdigest()[:8]}"
