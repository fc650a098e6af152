"""Mutual TLS between the services: every one shows a certificate of one private authority, and asks for one."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from pydantic import model_validator
from pydantic_settings import BaseSettings

from tinsmith.rpc.auth import is_loopback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a service shows to the others, and whom it believes. PEM files; they are read when a service starts."""

    ca: Path
    """The authority that has signed the certificates of all services and gRPC clients."""
    cert: Path
    """Of this service, with the host names under which the others call it."""
    key: Path
    """The private key of `cert`, without a passphrase."""

    def server(self) -> grpc.ServerCredentials:
        """Refuses clients without a certificate of `ca`."""
        pair = self.key.read_bytes(), self.cert.read_bytes()
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)

    def client(self) -> grpc.ChannelCredentials:
        """Refuses servers without a certificate of `ca` for the host that is called."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    @classmethod
    def given(cls, *, ca: Path | None, cert: Path | None, key: Path | None) -> Certificates | None:
        """None when there are none. Raises ValueError for some of the three, and for files that cannot be used."""
        if ca is None and cert is None and key is None:
            return None
        if ca is None or cert is None or key is None:
            raise ValueError("grpc_ca, grpc_cert and grpc_key belong together: give all three, or none")
        check_pair(cert, key, names=("grpc_cert", "grpc_key"))
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
        except OSError as error:
            raise ValueError(f"grpc_ca: {ca} holds no certificate in PEM ({error})") from None
        return cls(ca, cert, key)


def check_pair(cert: Path, key: Path, *, names: tuple[str, str]) -> None:
    """Raises ValueError, naming the settings `names`, unless `cert` and `key` can be read and belong together."""
    try:
        # The passphrase is not asked for on the terminal: a service has none.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:  # SSLError is one
        raise ValueError(
            f"{names[0]} {cert} and {names[1]} {key} are not a certificate and its key in PEM, without a passphrase "
            f"({error})"
        ) from None


class GrpcTls(BaseSettings):
    """The settings that every service has for it."""

    grpc_ca: Path | None = None
    """Certificate (PEM) of the authority that signs those of all services; gRPC is encrypted then, and refuses whoever
    has no certificate of it. Needs grpc_cert and grpc_key. `tinsmith make-certificates` makes them."""
    grpc_cert: Path | None = None
    """This service's certificate (PEM), shown to those that call it and to those that it calls."""
    grpc_key: Path | None = None
    """Its private key (PEM)."""

    @model_validator(mode="after")
    def _usable_certificates(self) -> Self:
        _ = self.certificates
        return self

    @property
    def certificates(self) -> Certificates | None:
        return Certificates.given(ca=self.grpc_ca, cert=self.grpc_cert, key=self.grpc_key)


def warn_of_clear_text(host: str, *, what: str, remedy: str) -> None:
    """A line in the log where keys and data cross a network that others may listen to."""
    if not is_loopback(host):
        logger.warning("%s is not encrypted: keys and data go in clear; %s, or keep the network private", what, remedy)


def pinned(cert: Path) -> ssl.SSLContext:
    """For asking a server of this machine how it is: believes this certificate only, whatever host it is for."""
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
