"""Mutual TLS between the services: each shows a certificate of one private authority, and asks the other side for
one."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.rpc.auth import is_loopback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificate of a service, and the authority that it trusts. PEM files, which are read when a service
    starts."""

    ca: Path
    """Certificate of the authority that has signed the certificates of all services and gRPC clients."""
    cert: Path
    """Certificate of this service. It names the hosts under which the others call the service."""
    key: Path
    """The private key of `cert`, without a passphrase."""

    def server(self) -> grpc.ServerCredentials:
        """Credentials of a server that refuses clients without a certificate of `ca`."""
        pair = self.key.read_bytes(), self.cert.read_bytes()
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)

    def client(self) -> grpc.ChannelCredentials:
        """Credentials of a client that refuses servers without a certificate of `ca` for the called host."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    @classmethod
    def given(cls, *, ca: Path | None, cert: Path | None, key: Path | None) -> Certificates | None:
        """The certificates of these files, or None if no file is given. Raises ValueError if only some are given, and
        for files that cannot be used."""
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


@dataclass(frozen=True, slots=True)
class PinnedCertificate:
    """A self-signed certificate by which callers recognise a server. The server asks its callers for no certificate,
    because they do not have one yet."""

    cert: bytes
    """PEM."""
    key: bytes = b""
    """The private key of `cert`, PEM; only the server has it."""

    def server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)])

    def client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.cert)


def check_pair(cert: Path, key: Path, *, names: tuple[str, str]) -> None:
    """Raises ValueError, naming the settings `names`, unless `cert` and `key` can be read and belong together."""
    try:
        # An empty passphrase keeps OpenSSL from asking for one on the terminal, which a service does not have.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:  # SSLError is one
        raise ValueError(
            f"{names[0]} {cert} and {names[1]} {key} are not a certificate and its key in PEM, without a passphrase "
            f"({error})"
        ) from None


class GrpcTls(BaseSettings):
    """The settings of every service for mutual TLS."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    grpc_ca: Path | None = None
    """Certificate (PEM) of the authority that signs the certificates of all services. It turns on encryption of gRPC,
    and the service refuses callers without a certificate of this authority. Needs grpc_cert and grpc_key. `tinsmith
    make-certificates` makes all three files."""
    grpc_cert: Path | None = None
    """This service's certificate (PEM), which it shows to its callers and to the services that it calls."""
    grpc_key: Path | None = None
    """Private key (PEM) of grpc_cert."""

    @model_validator(mode="after")
    def _usable_certificates(self) -> Self:
        _ = self.certificates
        return self

    @property
    def certificates(self) -> Certificates | None:
        return Certificates.given(ca=self.grpc_ca, cert=self.grpc_cert, key=self.grpc_key)


def warn_of_clear_text(host: str, *, what: str, remedy: str) -> None:
    """Logs a warning if `host` is open to other machines, because keys and data then cross a network in clear text.
    `what`: name of the unencrypted server. `remedy`: advice, both for the message."""
    if not is_loopback(host):
        logger.warning("%s is not encrypted: keys and data go in clear; %s, or keep the network private", what, remedy)


def pinned(cert: Path) -> ssl.SSLContext:
    """A client's TLS context for the health check of a server on this machine. It trusts only this certificate,
    whatever host the certificate names."""
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
