"""A further machine: joins the first one, follows its list of services, and leaves."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

import tinsmith
from tinsmith.errors import ServiceError, Unauthenticated
from tinsmith.rpc.addresses import Addresses, write_addresses
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.tls import PinnedCertificate
from tinsmith.v1 import cluster_pb2 as pb
from tinsmith.v1 import cluster_pb2_grpc
from tinsmith_cli import make_certificates
from tinsmith_cli.base_models import ServedModel, UsageError
from tinsmith_cli.cluster.token import Token, fingerprint
from tinsmith_cli.cluster.weights import weights_digest

_TIMEOUT_S = 10.0
_JOIN_S = 30.0
_LEAVE_S = 2.0
_AGAIN_S = 1.0
"""Pause before the first machine is called again, in seconds."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The first machine's answer to a further machine that joins."""

    models: Sequence[ServedModel]
    """The base models that the further machine is to serve."""
    settings: Mapping[str, str]
    """Settings of `tinsmith up` that are alike on all machines."""
    nodes: Sequence[pb.TrainerNode]
    """The machine's place in the trainer of each model; empty without the role trainer."""


class ClusterClient:
    """Client of a further machine for the first machine's service."""

    def __init__(self, token: Token, folder: Path, *, report: Callable[[str], None]) -> None:
        """`folder`: folder for this machine's id, key and certificates.

        Raises UsageError if the first machine cannot be reached, or is another machine than the token names.
        """
        make_certificates.need_cryptography("--join")
        self._token = token
        self._report = report
        self._cert, self.local_host = _certificate_of(token)
        self.services_file = folder / "services.json"
        self.certificates = folder / "certificates"
        try:
            self.certificates.mkdir(mode=0o700, parents=True, exist_ok=True)
            id_file = folder / "member-id"
            if not id_file.exists():
                id_file.write_text(secrets.token_hex(8))
            self._id = id_file.read_text()
            write_addresses(self.services_file, Addresses())
        except OSError as error:
            raise UsageError(f"--state-dir: cannot write to {folder} ({error})") from None

    async def join(
        self,
        *,
        roles: Sequence[str],
        host: str,
        models: Sequence[ServedModel],
        settings: Mapping[str, str],
        trainer_nodes: int,
        ranks_port: int,
        replace: bool,
    ) -> Admission:
        """Joins the deployment, and stores the certificates. Raises UsageError with the first machine's reason if it
        refuses, and if this machine does not have a base model that it is to serve."""
        key, signing_request = make_certificates.make_request(host)
        request = pb.JoinRequest(
            version=tinsmith.__version__,
            member_id=self._id,
            roles=roles,
            host=host,
            signing_request=signing_request,
            base_models=[
                pb.BaseModel(source=model.source, names=model.names, digest=weights_digest(model.source))
                for model in models
            ],
            settings=settings,
            trainer_nodes=trainer_nodes,
            ranks_port=ranks_port,
            replace=replace,
        )
        async with self._connected() as channel:
            try:
                # The call waits for the connection. A connection that breaks while it is made is made again.
                stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                reply = await stub.Join(request, timeout=_JOIN_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise UsageError(
                        f"--join: the first machine, {self._token.address}, has not answered within {_JOIN_S:g} s; try "
                        "again"
                    ) from None
                raise UsageError(self._reason(from_rpc_error(error))) from None
        (self.certificates / "ca.pem").write_bytes(reply.ca)
        for service in make_certificates.SERVICES:
            make_certificates.write_pair(self.certificates, service, reply.certificate, key)
        try:
            served = [_local(model, self._token.address) for model in reply.base_models]
        except UsageError:
            await self.leave(gives_up_trainers=True)
            raise
        return Admission(served, dict(reply.settings), reply.trainer_nodes)

    def _reason(self, error: ServiceError) -> str:
        if isinstance(error, Unauthenticated):
            return (
                f"--join: the first machine, {self._token.address}, does not know this token's key; it was given new "
                "keys, or the token is not whole. Take the one that `tinsmith up --address` prints there now"
            )
        return error.message

    async def follow(self, *, trainers: Sequence[str], samplers: Sequence[str]) -> None:
        """Registers this machine's services, and writes the addresses of all machines' services into `services_file`
        whenever they change. Never returns. While the first machine cannot be reached, the addresses stay."""
        request = pb.FollowRequest(member_id=self._id, trainers=trainers, samplers=samplers)
        complaint = ""
        async with self._connected() as channel:
            while True:
                try:
                    async for reply in cluster_pb2_grpc.ClusterServiceStub(channel).Follow(request):
                        if complaint:
                            self._report(f"the first machine, {self._token.address}, can be reached again")
                        complaint = ""
                        write_addresses(self.services_file, Addresses(tuple(reply.trainers), tuple(reply.samplers)))
                except grpc.aio.AioRpcError as error:
                    reason = self._reason(from_rpc_error(error))
                    if reason != complaint:
                        self._report(f"the first machine, {self._token.address}: {reason}; this machine goes on")
                    complaint = reason
                await asyncio.sleep(_AGAIN_S)

    async def leave(self, *, gives_up_trainers: bool) -> None:
        """Removes this machine's services from the first machine's list, if the first machine can be reached."""
        request = pb.LeaveRequest(member_id=self._id, gives_up_trainers=gives_up_trainers)
        async with self._connected() as channel:
            with suppress(grpc.aio.AioRpcError):
                await cluster_pb2_grpc.ClusterServiceStub(channel).Leave(request, timeout=_LEAVE_S)

    def _connected(self) -> grpc.aio.Channel:
        return connect(self._token.address, api_key=self._token.service_key, certificates=PinnedCertificate(self._cert))


def _certificate_of(token: Token) -> tuple[bytes, str]:
    """The first machine's certificate, in PEM, and this machine's address on the way there. Raises UsageError if the
    certificate is not the one that the token names, or if the first machine cannot be reached."""
    host, _, port = token.address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False  # the token names the certificate itself
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            cert = ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True) or b"")
            local_host = encrypted.getsockname()[0]
    except OSError as error:
        raise UsageError(
            f"--join: the first machine cannot be reached at {token.address} ({error}). Is `tinsmith up --address` "
            "running there, and does a firewall let this machine through?"
        ) from None
    if fingerprint(cert) != token.fingerprint:
        raise UsageError(
            f"--join: {token.address} shows another certificate than the token's, so it is another machine, or was "
            "given new keys. Take the token that `tinsmith up --address` prints there now"
        )
    return cert.encode(), local_host


def _local(model: pb.BaseModel, first: str) -> ServedModel:
    """A base model of the first machine, on this machine. Raises UsageError if it is not on this machine, or has other
    weights here."""
    served = ServedModel(model.source, tuple(model.names))
    if not Path(model.source).is_absolute():
        return served
    if not (Path(model.source) / "config.json").is_file():
        raise UsageError(
            f"--base-model: the first machine, {first}, serves {served.names[0]} from {model.source}, which is no "
            f"folder of a model here; copy it, or name the folder that it has here: --base-model {served.names[0]}=PATH"
        )
    digest = weights_digest(model.source)
    if model.digest and digest and digest != model.digest:
        raise UsageError(
            f"--base-model: {model.source} here has other weights than {served.names[0]} on the first machine, "
            f"{first}, whose digest is {model.digest[:12]}, not {digest[:12]}: copy its folder"
        )
    return served
