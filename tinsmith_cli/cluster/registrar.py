"""The first machine's service: it admits further machines, and sends them the addresses of all services."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

import tinsmith
from tinsmith.errors import FailedPrecondition, InvalidRequest
from tinsmith.rpc.addresses import Addresses, write_addresses
from tinsmith.rpc.server import Server
from tinsmith.rpc.tls import PinnedCertificate
from tinsmith.threads import in_pool
from tinsmith.v1 import cluster_pb2 as pb
from tinsmith.v1 import cluster_pb2_grpc
from tinsmith_cli import make_certificates
from tinsmith_cli.base_models import ServedModel, UsageError
from tinsmith_cli.cluster.members import Members, TrainerMachines
from tinsmith_cli.cluster.token import Token, fingerprint
from tinsmith_cli.cluster.weights import weights_digest

ROLES = ("trainer", "sampler")
FIRST = "first"
"""The first machine's own id among the members."""

_JOIN = "join"
"""Name of the certificate of this service. Machines that join recognise it by the token, because they have no
certificate of the authority yet."""
_STOP_S = 0.2
_Context = grpc.aio.ServicerContext[Any, Any]


class Registrar(cluster_pb2_grpc.ClusterServiceServicer):
    """Keeps the records about all machines, and writes the addresses of their services into the file that the gateway
    and the trainers of this machine read."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        models: Sequence[ServedModel],
        settings: Mapping[str, str],
        certificates: Path | None,
        report: Callable[[str], None],
    ) -> None:
        """Makes keys and certificates, if they were not made before. Raises UsageError.

        `folder`: folder for the records, the key and the certificates. `address`: HOST:PORT at which machines join.
        `models`: base models of the deployment. `settings`: settings of `tinsmith up` that must be alike on all
        machines. `certificates`: folder of the user's own authority, made by `tinsmith make-certificates`; None makes
        an authority.
        """
        make_certificates.need_cryptography("--address")
        self._address = address
        self._host = address.rpartition(":")[0].strip("[]")
        self._settings = dict(settings)
        self._report = report
        self._changed = asyncio.Condition()
        self.services_file = folder / "services.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._members = Members(folder / "members.json")
            self.authority = certificates or folder / "certificates"
            if certificates is None:
                make_certificates.make_certificates(self.authority, hosts=[self._host])
            elif not (certificates / f"{make_certificates.CA}-key.pem").exists():
                raise UsageError(
                    f"--certificates: {certificates} has no ca-key.pem, with which certificates of further machines "
                    "are signed; leave --certificates out, and an authority of this deployment's own is made"
                )
            make_certificates.make_self_signed(folder, _JOIN, host=self._host)
            self._pinned = PinnedCertificate(*((folder / f"{_JOIN}{end}.pem").read_bytes() for end in ("", "-key")))
            self.token = Token(address, fingerprint(self._pinned.cert.decode()), _service_key(folder))
            self._token_file = folder / "join-token"
            self._models = [
                pb.BaseModel(source=model.source, names=model.names, digest=weights_digest(model.source))
                for model in models
            ]
            write_addresses(self.services_file, self._members.addresses)
        except (OSError, ValueError) as error:
            raise UsageError(f"--state-dir: {error}") from None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """A context in which machines are admitted. Raises UsageError if the address cannot be used."""
        key = self.token.service_key
        try:
            server = Server(self._address, [], api_keys=[key], admin_keys=[key], certificates=self._pinned)
        except SystemExit as error:
            raise UsageError(f"--address, --join-port: {error}") from None
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, server.grpc)
        await server.start()
        await server.set_serving(True)
        _write_secret(self._token_file, self.token.text + "\n")  # only now, because readers of the file join at once
        try:
            yield
        finally:
            await server.stop(_STOP_S)

    def place(self, model: ServedModel, *, nodes: int, ranks_port: int, replace: bool) -> tuple[int, TrainerMachines]:
        """The first machine's own place in a trainer: rank and trainer. Raises UsageError."""
        try:
            return self._members.take_place(
                model.names[0], FIRST, host=self._host, nodes=nodes, ranks_port=ranks_port, replace=replace
            )
        except (InvalidRequest, FailedPrecondition) as error:
            raise UsageError(error.message) from None

    def list_own(self, *, trainers: Sequence[str], samplers: Sequence[str]) -> None:
        """Records the first machine's own services."""
        self._members.list_services(FIRST, trainers=trainers, samplers=samplers, has_place=False)
        write_addresses(self.services_file, self._members.addresses)

    # The service

    async def Join(self, request: pb.JoinRequest, context: _Context) -> pb.JoinResponse:
        if request.version != tinsmith.__version__:
            raise FailedPrecondition(
                f"this machine has Tinsmith {request.version}, and the first machine, {self._host}, has "
                f"{tinsmith.__version__}: install one version on all"
            )
        if not request.roles or not set(request.roles) <= set(ROLES):
            raise InvalidRequest(
                f"--role: {','.join(request.roles)} is not for a machine that joins; trainer and sampler are"
            )
        if not request.member_id or request.member_id == FIRST:
            raise InvalidRequest(f"member_id: {request.member_id!r} is no id of a further machine")
        self._check_settings(request.settings)
        models = self._matched(request.base_models)
        certificate = await in_pool(self._signed, request)
        nodes = []
        if "trainer" in request.roles:
            for number, model in enumerate(models):
                rank, trainer = self._members.take_place(
                    model.names[0],
                    request.member_id,
                    host=request.host,
                    nodes=request.trainer_nodes or 1,
                    ranks_port=request.ranks_port + number,
                    replace=request.replace,
                )
                nodes.append(
                    pb.TrainerNode(rank=rank, master_host=trainer.hosts[0], master_port=trainer.ranks_port)
                )  # fmt: skip
            await self._tell()
        self._report(f"{request.host} joins as {' and '.join(request.roles)}")
        return pb.JoinResponse(
            ca=(self.authority / "ca.pem").read_bytes(),
            certificate=certificate,
            base_models=models,
            settings=self._settings,
            trainer_nodes=nodes,
        )

    def _signed(self, request: pb.JoinRequest) -> bytes:
        try:
            return make_certificates.sign_request(
                self.authority, request.signing_request, hosts=[request.host, *request.roles]
            )
        except UsageError as error:
            raise InvalidRequest(str(error)) from None

    async def Follow(self, request: pb.FollowRequest, context: _Context) -> AsyncIterator[pb.FollowResponse]:
        self._members.list_services(
            request.member_id,
            trainers=request.trainers,
            samplers=request.samplers,
            has_place=bool(request.trainers),
        )
        await self._tell()
        told: Addresses | None = None
        while True:
            async with self._changed:
                while (addresses := self._members.addresses) == told:
                    await self._changed.wait()
            yield pb.FollowResponse(trainers=addresses.trainers, samplers=addresses.samplers)
            told = addresses

    async def Leave(self, request: pb.LeaveRequest, context: _Context) -> pb.LeaveResponse:
        self._members.leave(request.member_id, gives_up_trainers=request.gives_up_trainers)
        await self._tell()
        return pb.LeaveResponse()

    async def _tell(self) -> None:
        addresses = self._members.addresses
        write_addresses(self.services_file, addresses)
        async with self._changed:
            self._changed.notify_all()

    def _check_settings(self, theirs: Mapping[str, str]) -> None:
        for name, value in theirs.items():
            ours = self._settings.get(name)
            if ours != value:
                raise InvalidRequest(
                    f"--{name}: {value} here, and {'not set' if ours is None else ours} on the first machine, "
                    f"{self._host}; it must be alike on all: leave it out here, and set it there"
                )

    def _matched(self, theirs: Sequence[pb.BaseModel]) -> Sequence[pb.BaseModel]:
        """The base models that a machine is to serve. Raises InvalidRequest for names that are not served, and
        FailedPrecondition for other weights."""
        if not theirs:
            return self._models
        matched = []
        for wanted in theirs:
            ours = next((model for model in self._models if wanted.names[0] in model.names), None)
            if ours is None:
                served = ", ".join(name for model in self._models for name in model.names)
                raise InvalidRequest(
                    f"--base-model: {wanted.names[0]!r} is not served in this deployment, which serves {served}; "
                    "name one of these, or leave --base-model out"
                )
            if wanted.digest and ours.digest and wanted.digest != ours.digest:
                raise FailedPrecondition(
                    f"--base-model: {wanted.source} here has other weights than {ours.names[0]} on the first machine, "
                    f"{self._host}, whose digest is {ours.digest[:12]}, not {wanted.digest[:12]}: copy its folder"
                )
            matched.append(pb.BaseModel(source=wanted.source, names=ours.names, digest=ours.digest))
        return matched


def _service_key(folder: Path) -> str:
    """The key that the services of all machines send to each other. It is made once, and kept in `folder`."""
    path = folder / "service-key"
    if not path.exists():
        _write_secret(path, secrets.token_urlsafe(32))
    return path.read_text().strip()


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)
