"""The settings of `tinsmith up`. Each setting is declared once, with its flag, default and help, and with the services
that get it."""

# ruff: noqa: RUF009 - `_flag` makes a field

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tinsmith.quantization import QUANTIZATIONS, check_quantization
from tinsmith_cli.base_models import UsageError

DEFAULT_MODEL_NAME = "tinsmith/small-qwen3"
_ALL = ("trainer", "sampler", "gateway")
_SHARED = ("dtype", "quantize", "max_lora_rank", "full_training")
"""Settings that must be alike on all machines."""
_OF_FIRST = ("host", "port", "api_key", "certificates", "tls_cert", "tls_key")
"""Settings of the first machine only."""


SERVICE_PORTS = {"trainer": 8101, "sampler": 8201, "ranks": 8301}
"""First ports of trainers, of samplers, and of the rendezvous of trainers' ranks, in a deployment of several machines.
They are fixed, so that a restarted machine has the same addresses as before."""


def _flag(
    default: Any = None,
    *,
    help: str | None = None,
    to: Collection[str] = (),
    decides: Collection[str] = (),
    least: float | None = None,
    **argument: Any,
) -> Any:
    """A field of `Settings` and its flag, which has the field's name. A flag whose default is False takes no value.

    `default`: a value, or a function that reads it from the environment.
    `to`: services that have a setting of the same name, to which the value is passed.
    `decides`: variables of the services' other settings whose values follow from this one.
    `least`: smallest allowed value.
    `argument`: further arguments of `add_argument`.
    """
    metadata = {"to": to, "decides": decides, "least": least, "argument": {"help": help, **argument}}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _environment(name: str) -> Callable[[], str]:
    return lambda: os.environ.get(name, "")


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 1 to 65535, or 0 for any free one")
    return int(text)


def quantization(text: str) -> str:
    """The type of the argument --quantize."""
    try:
        check_quantization(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _service_port(service: str) -> Any:
    return _flag(
        0, decides=[f"{service.upper()}_LISTEN"], type=_port, metavar="PORT",
        help=f"gRPC port of the first {service}; further ones get the ports after it (default: any free ports; where "
        f"there are several machines, {SERVICE_PORTS[service]})",
    )  # fmt: skip


def _threads(service: str) -> Any:
    return _flag(
        decides=[f"{service.upper()}_NUM_THREADS"], type=int, metavar="N", least=1,
        help=f"largest number of CPU threads of each {service} (default: all cores while no other service computes, "
        "and its share of them otherwise)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the user of `tinsmith up` has given. None means that the user gave no value, and that the
    service's own environment or default decides."""

    base_model: list[str] = _flag(
        list, decides=["TRAINER_BASE_MODEL", "SAMPLER_BASE_MODEL", "TRAINER_MODEL_NAMES", "SAMPLER_MODEL_NAMES"],
        action="append", metavar="[NAME=]PATH|HUB_ID",
        help="base model to serve, repeatable. PATH alone is served under its folder's name, HUB_ID under the id. A "
        "folder with several names is loaded once. Each base model has its own trainer and samplers. Default: a small "
        f"model, which is made on the first start and served as {DEFAULT_MODEL_NAME}",
    )  # fmt: skip
    models_file: Path | None = _flag(type=Path, metavar="FILE", help='more base models, as JSON: {"name": "path", ...}')
    host: str = _flag("127.0.0.1", decides=["GATEWAY_HOST"], help="address of the HTTP API (default %(default)s)")
    port: int = _flag(
        8000,
        decides=["GATEWAY_PORT"],
        type=int,
        help="port of the HTTP API; 0 takes any free one (default %(default)s)",
    )
    trainer_port: int = _service_port("trainer")
    sampler_port: int = _service_port("sampler")
    state_dir: Path = _flag(
        Path("~/.tinsmith"), decides=["TRAINER_STATE_DIR", "GATEWAY_STATE_DIR"], type=Path, metavar="DIR",
        help="checkpoints, journals, database and logs (default %(default)s)",
    )  # fmt: skip
    checkpoint_dir: str = _flag(
        _environment("TRAINER_CHECKPOINT_DIR"), decides=["TRAINER_CHECKPOINT_DIR"], metavar="DIR_OR_URL",
        help="place of checkpoints: a folder, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, with credentials from the "
        "environment (default: TRAINER_CHECKPOINT_DIR, or the folder checkpoints in --state-dir)",
    )  # fmt: skip
    api_key: list[str] = _flag(
        list, decides=["GATEWAY_API_KEYS"], action="append", metavar="KEY",
        help="key that clients must send, over HTTP and over gRPC, repeatable (the SDK takes only keys that begin with "
        "tml-); GATEWAY_API_KEYS='[\"KEY\"]' in the "
        "environment keeps it out of `ps`. Required unless --host is a loopback address; there, every key is accepted "
        "if none is given",
    )  # fmt: skip
    certificates: Path | None = _flag(
        decides=[f"{service.upper()}_GRPC_{file}" for service in _ALL for file in ("CA", "CERT", "KEY")],
        type=Path, metavar="DIR",
        help="folder made by `tinsmith make-certificates`, for HTTPS, whose clients must trust DIR/ca.pem, and for "
        "mutual TLS between the services and with gRPC clients",
    )  # fmt: skip
    tls_cert: Path | None = _flag(
        decides=["GATEWAY_TLS_CERT"], type=Path, metavar="FILE",
        help="certificate (PEM) for HTTPS, of an authority that clients already trust; needs --tls-key",
    )  # fmt: skip
    tls_key: Path | None = _flag(
        decides=["GATEWAY_TLS_KEY"], type=Path, metavar="FILE", help="private key (PEM) of --tls-cert"
    )
    full_training: bool = _flag(
        False, to=["trainer"],
        help="train all parameters of the base models instead of LoRA adapters, one run at a time for each base model "
        "(clients send rank 0)",
    )  # fmt: skip
    deterministic: bool = _flag(
        False, to=["trainer"],
        help="make results bit-equal for equal requests, independent of other runs and of crashes. Trainers then do "
        "not batch requests together, and do not change their number of threads, which makes them slower (default: "
        "TRAINER_DETERMINISTIC)",
    )  # fmt: skip
    dtype: str | None = _flag(
        choices=["auto", "float32", "bfloat16"], to=["trainer", "sampler"],
        help="type of the base weights in trainers and samplers; adapters are always float32. On a CPU with AMX or "
        "avx512_bf16, bfloat16 is faster and takes half the memory (default: TRAINER_DTYPE and SAMPLER_DTYPE, or auto: "
        "float32 on a CPU, bfloat16 on CUDA)",
    )  # fmt: skip
    quantize: str | None = _flag(
        type=quantization, choices=QUANTIZATIONS, to=["trainer", "sampler"],
        help="store the weights of the layers that take adapters in 8 bits (int8) or 4 bits (nf4), in trainers and "
        "samplers, as in QLoRA; adapters stay float32. A base model takes about a quarter or an eighth of the memory "
        "of float32, and training and sampling are slower on a CPU. Not with vLLM or --full-training (default: "
        "TRAINER_QUANTIZE and SAMPLER_QUANTIZE, or not quantised)",
    )  # fmt: skip
    pictures: bool | None = _flag(
        action=argparse.BooleanOptionalAction, to=["trainer", "sampler"],
        help="take pictures, if the base models see; --no-pictures saves the memory of their vision towers, and "
        "refuses pictures by name (default: TRAINER_PICTURES and SAMPLER_PICTURES, or --pictures)",
    )  # fmt: skip
    share_prefixes: bool | None = _flag(
        action=argparse.BooleanOptionalAction, to=["trainer"],
        help="compute beginnings that datums of a run have in common once, such as the prompt of a group of samples; "
        "results differ by rounding only (default: TRAINER_SHARE_PREFIXES, or --share-prefixes)",
    )  # fmt: skip
    engine: str = _flag(
        "auto", decides=["SAMPLER_ENGINE"], choices=["auto", "vllm", "torch"],
        help="engine of the samplers: vLLM, or torch, the trainer's own modelling code. auto takes vLLM on CUDA if it "
        "is installed and --full-training is not set, otherwise torch. SAMPLER_TENSOR_PARALLEL in the environment "
        "makes vLLM divide the model among GPUs",
    )  # fmt: skip
    max_lora_rank: int | None = _flag(
        type=int, metavar="N", least=1, to=["trainer", "sampler"],
        help="largest rank of adapters, for trainers and samplers (default: TRAINER_MAX_LORA_RANK for both; else 256, "
        "and 64 with vLLM, which reserves GPU memory for this rank in each slot)",
    )  # fmt: skip
    log_level: str | None = _flag(
        choices=["DEBUG", "INFO", "WARNING", "ERROR"], to=_ALL,
        help="least level of lines in the services' logs (default: TRAINER_LOG_LEVEL and so on, or INFO)",
    )  # fmt: skip
    log_format: str | None = _flag(
        choices=["json", "text"], to=_ALL,
        help="format of the services' logs (default: TRAINER_LOG_FORMAT and so on, or json)",
    )  # fmt: skip
    log_mb: float = _flag(
        100.0, type=float, metavar="MB", least=1,
        help="size at which a log is moved to NAME.log.1, replacing the older one, and begins again; inf never does "
        "(default %(default)g)",
    )  # fmt: skip
    tracing: bool = _flag(
        False, to=_ALL,
        help="send OpenTelemetry traces, configured by OTEL_EXPORTER_OTLP_ENDPOINT and OpenTelemetry's other "
        "variables; needs the extra otel",
    )  # fmt: skip
    role: str = _flag(
        "", metavar="LIST",
        help="services of this machine where there are several machines: gateway, trainer, sampler, separated by "
        "commas. The first machine runs the gateway (default: all there; a machine with --join must say it)",
    )  # fmt: skip
    address: str = _flag(
        "", decides=["TRAINER_CHANNEL_HOST", "SAMPLER_CHANNEL_HOST"], metavar="HOST",
        help="address or name under which other machines reach this one. Without --join it makes this the first of "
        "several machines, which admits others. With --join the default is this machine's address on the way to the "
        "first one",
    )  # fmt: skip
    join: str = _flag(
        _environment("TINSMITH_JOIN"), metavar="TOKEN",
        help="join the first machine, which prints the token, and run the services of --role for it. The token holds "
        "the service key: TINSMITH_JOIN in the environment keeps it out of `ps`",
    )  # fmt: skip
    join_port: int = _flag(
        8100, type=_port, metavar="PORT", help="port at which the first machine admits others (default %(default)s)"
    )
    trainer_nodes: int = _flag(
        1, type=int, metavar="N", least=1,
        help="number of machines that one trainer runs on, by torchrun, with one rank for each GPU of each machine. "
        "All of them give the same number, and the first one to join serves (default %(default)s)",
    )  # fmt: skip
    replace: bool = _flag(
        False,
        help="take the place of a trainer whose machine is gone for good. Its runs go on from their checkpoints only",
    )  # fmt: skip
    trainer_ranks: int | None = _flag(
        type=int, metavar="N", least=1,
        help="processes of each trainer, which divide the data and the trainer's threads (default: 1 on a CPU, and one "
        "for each of the trainer's GPUs); TRAINER_TENSOR_PARALLEL and TRAINER_SHARD_BASE in the environment also "
        "divide the base model",
    )  # fmt: skip
    trainers: int = _flag(
        1, type=int, metavar="N", least=1,
        help="number of trainers of each base model, which share its runs and the trainers' cores. Each run is placed "
        "at the trainer with most free memory and least work, and stays there. On GPUs, all trainers have equally many "
        "GPUs of their own. Not possible with several machines (default %(default)s)",
    )  # fmt: skip
    samplers: int | None = _flag(
        type=int, metavar="N", least=1,
        help="samplers of each base model, which share its requests and the samplers' cores (default: 1 on a CPU, and "
        "as many as the samplers' GPUs hold). If one ends, the others do its work until it is back",
    )  # fmt: skip
    gpus: str = _flag(
        "all", metavar="LIST",
        help="GPUs to use, by the numbers of nvidia-smi: 0,1 or 0-3; MIG instances by UUID. all takes what "
        "CUDA_VISIBLE_DEVICES leaves, none the CPU (default %(default)s). `tinsmith plan` shows who gets which, and "
        "how much memory",
    )  # fmt: skip
    trainer_gpus: str | None = _flag(metavar="LIST", help="GPUs of the trainer, one for each rank (default: planned)")
    sampler_gpus: str | None = _flag(metavar="LIST", help="GPUs of the samplers (default: planned)")
    train_share: float = _flag(
        0.5, type=float, metavar="PART",
        help="part of the GPUs that trains, or, on one GPU, of the memory that base weights leave (default "
        "%(default)s)",
    )  # fmt: skip
    supervise: bool = _flag(
        True, action=argparse.BooleanOptionalAction,
        help="restart a service that ends, after 1 s, then 2, 4, ... 30 s; clients wait meanwhile. With "
        "--no-supervise, a service that ends stops all of them, with status 1, for a "
        "supervisor of your own that restarts the whole (default: --supervise)",
    )  # fmt: skip
    trainer_threads: int | None = _threads("trainer")
    sampler_threads: int | None = _threads("sampler")
    startup_timeout: float = _flag(
        1800.0, type=float, metavar="SECONDS", least=1,
        help="give up if the models have not loaded after this time. A restarted service has the same time, after "
        "which it is killed and restarted again (default %(default)g)",
    )  # fmt: skip

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser, *, only: Collection[str] = ()) -> None:
        """Adds the flags of all settings, or of those named in `only`."""
        unset = cls()
        for each in fields(cls):
            if only and each.name not in only:
                continue
            argument = dict(each.metadata["argument"])
            default = getattr(unset, each.name)
            if default is False:
                argument["action"] = "store_true"
            parser.add_argument(_name(each.name), default=default, **argument)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        """The settings in parsed arguments. Settings without a flag there have their defaults. Raises UsageError for a
        number that is too small, and for settings that exclude each other."""
        settings = cls(**{each.name: getattr(arguments, each.name) for each in fields(cls) if each.name in arguments})
        for each in fields(cls):
            value, least = getattr(settings, each.name), each.metadata["least"]
            if least is not None and value is not None and not value >= least:  # NaN fails this comparison, too
                raise UsageError(f"{_name(each.name)}: {value} is not at least {least}")
        if settings.quantize is not None and (settings.full_training or settings.engine == "vllm"):
            other = "--full-training" if settings.full_training else "--engine vllm"
            raise UsageError(f"--quantize: {settings.quantize} is not possible together with {other}; leave one out")
        settings.check_machines()
        return settings

    @property
    def roles(self) -> Sequence[str]:
        """The services of this machine."""
        return tuple(name for name in _ALL if not self.role or name in self.role.split(","))

    def check_machines(self) -> None:
        """Raises UsageError for settings about several machines that do not go together."""
        named = self.role.split(",") if self.role else []
        if unknown := [name for name in named if name not in _ALL]:
            raise UsageError(f"--role: {unknown[0]!r} is no service; give some of gateway,trainer,sampler")
        if self.trainer_nodes > 1 and "trainer" not in self.roles:
            raise UsageError(f"--trainer-nodes: {self.trainer_nodes} is for machines whose --role has trainer")
        if self.trainers > 1 and (self.join or self.address):
            raise UsageError(
                f"--trainers: {self.trainers} is for one machine; of several machines each runs one trainer of a base "
                "model"
            )
        if self.trainers > 1 and "trainer" not in self.roles:
            raise UsageError(f"--trainers: {self.trainers} is for a machine whose --role has trainer")
        if self.address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            raise UsageError(f"--address: {self.address} is no address under which other machines reach this one")
        if self.join:
            if not named:
                raise UsageError("--join: say with --role what this machine runs: trainer, sampler, or trainer,sampler")
            if "gateway" in named:
                raise UsageError(
                    "--role: a further gateway needs the first one's database, PostgreSQL, and is started with `python "
                    "-m gateway` (docs/operations.md); machines with --join run trainer and sampler"
                )
            unset = Settings()
            for name in _OF_FIRST:
                if getattr(self, name) != getattr(unset, name):
                    raise UsageError(f"{_name(name)}: is for the first machine; leave it out on one with --join")
        elif self.address and "gateway" not in self.roles:
            raise UsageError(f"--role: {self.role} leaves out gateway, which the first machine runs")

    def check_up(self) -> None:
        """Raises UsageError if `tinsmith up` lacks a setting for several machines, or if such a setting is given
        without --address and --join."""
        if self.join:
            return
        if self.address:
            if not self.base_model and self.models_file is None:
                raise UsageError("--address: name the base model that all machines serve with --base-model")
            return
        for name in ("role", "trainer_nodes", "replace"):
            if getattr(self, name) != getattr(Settings(), name):
                raise UsageError(
                    f"{_name(name)}: is for several machines; give --address on the first one, and --join on the others"
                )

    def shared(self) -> dict[str, str]:
        """The given values of the settings that must be alike on all machines, by the names of their flags."""
        values = {name: getattr(self, name) for name in _SHARED}
        return {name.replace("_", "-"): str(value) for name, value in values.items() if value not in (None, False)}

    def with_shared(self, values: Mapping[str, str]) -> Settings:
        """The settings with `values`, the `shared` values of another machine."""
        known = {name.replace("_", "-"): name for name in _SHARED}
        types = {"max_lora_rank": int, "full_training": bool}
        return replace(
            self, **{known[flag]: types.get(known[flag], str)(value) for flag, value in values.items() if flag in known}
        )

    def passed_to(self, service: str) -> dict[str, str]:
        """Values of the service's flags, by their names. A setting without a value is left out, because the service's
        environment may have one."""
        passed = {}
        for each in fields(self):
            value = getattr(self, each.name)
            is_given = value is not None and not (value is False and each.default is False)
            if service in each.metadata["to"] and is_given:
                passed[each.name.replace("_", "-")] = str(value).lower() if isinstance(value, bool) else str(value)
        return passed


def flag_of(variable: str) -> str:
    """The flag of `tinsmith up` that sets this variable of a service; empty if there is none."""
    for each in fields(Settings):
        passed = [f"{service}_{each.name}".upper() for service in each.metadata["to"]]
        if variable in (*each.metadata["decides"], *passed):
            return _name(each.name)
    return ""


def _name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"
