"""`tinsmith make-certificates`: a private authority, and certificates for the services and their clients."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith_cli.base_models import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA = "ca"
SERVICES = ("gateway", "trainer", "sampler")
CLIENT = "client"
_CA_DAYS = 3650
_DAYS = 397
_BACKDATED = timedelta(hours=1)
"""Certificates are valid from this time before they are made, so that machines with a slow clock accept them."""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "make-certificates",
        help="make a private certificate authority, and certificates for HTTPS and for mutual TLS of gRPC",
        description="Writes NAME.pem and NAME-key.pem for an authority (ca), the services (gateway, trainer, sampler) "
        "and a gRPC client of your own (client). An authority that DIR already holds is kept and signs new "
        "certificates, which renews them. `tinsmith up --certificates DIR` uses the files; docs/security.md has the "
        "settings for services on several machines. Keep ca-key.pem off the machines that serve.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME|ADDRESS",
        help="host name or address under which a service is called, repeatable; localhost, this machine's name and the "
        "service's own name, as in the Compose file, are always included",
    )  # fmt: skip
    parser.add_argument("--days", type=int, default=_DAYS, help="validity of the certificates (default %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.days < 1:
        raise UsageError(f"--days: {arguments.days} is not at least 1")
    made = make_certificates(arguments.dir, hosts=arguments.host, days=arguments.days)
    trusted = arguments.dir.absolute() / f"{CA}.pem"
    print(f"made {', '.join(made)} in {arguments.dir}; clients of the HTTP API set SSL_CERT_FILE={trusted}")
    return 0


def need_cryptography(what: str) -> None:
    """Raises UsageError if the package is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError(f"{what} needs the package cryptography: pip install 'tinsmith[tls]'") from None


@dataclass(frozen=True, slots=True)
class _Authority:
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, *, hosts: list[str], days: int = _DAYS, now: datetime | None = None) -> list[str]:
    """Writes the certificates and their keys to `folder`, and returns their names. `days`: validity. Raises
    UsageError."""
    need_cryptography("make-certificates")
    now = now or datetime.now(UTC)
    common = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not (folder / f"{CA}.pem").exists()
        authority = _make_authority(folder, now) if is_new else _read_authority(folder)
        for service in SERVICES:
            names = [service, *(["sampler-2"] if service == "sampler" else []), *common]
            _make(folder, service, authority, hosts=names, now=now, days=days)
        _make(folder, CLIENT, authority, hosts=[], now=now, days=days)
    except OSError as error:
        raise UsageError(f"{folder}: {error}") from None
    return [*([CA] if is_new else []), *SERVICES, CLIENT]


def make_self_signed(folder: Path, name: str, *, host: str) -> None:
    """Writes NAME.pem and NAME-key.pem for a server whose callers recognise it by this very certificate. Keeps existing
    files if they are for `host`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    path = folder / f"{name}.pem"
    alternatives = x509.SubjectAlternativeName([_host(host)])
    if path.exists():
        known = x509.load_pem_x509_certificate(path.read_bytes())
        if known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value == alternatives:
            return
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"Tinsmith {name}")
    builder = (
        _builder(subject, subject, key.public_key(), datetime.now(UTC), timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
    )
    _write(folder, name, _sign(builder, key), key)


def make_request(name: str) -> tuple[bytes, bytes]:
    """A new private key, and the request to sign its certificate, both in PEM. The signer decides for which hosts the
    certificate is."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    return _key_text(key), request.public_bytes(Encoding.PEM)


def sign_request(folder: Path, request: bytes, *, hosts: list[str]) -> bytes:
    """The certificate for a request's key and these hosts, in PEM, signed by the authority in `folder`. Raises
    UsageError for a request that cannot be used."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        wanted = x509.load_pem_x509_csr(request)
    except ValueError as error:
        raise UsageError(f"signing_request: is no PKCS #10 request in PEM ({error})") from None
    key = wanted.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not wanted.is_signature_valid:
        raise UsageError("signing_request: is not signed by an elliptic-curve key of its own")
    authority = _read_authority(folder)
    common = ["localhost", "127.0.0.1", "::1", *hosts]
    cert = _issue("machine", authority, key, hosts=common, now=datetime.now(UTC), days=_DAYS)
    return cert.public_bytes(Encoding.PEM)


def _make_authority(folder: Path, now: datetime) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Tinsmith private authority")
    builder = (
        _builder(name, name, key.public_key(), now, timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    authority = _Authority(_sign(builder, key), key)
    _write(folder, CA, authority.cert, key)
    return authority


def _read_authority(folder: Path) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        cert = x509.load_pem_x509_certificate((folder / f"{CA}.pem").read_bytes())
        key = load_pem_private_key((folder / f"{CA}-key.pem").read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{folder}: ca.pem and ca-key.pem are not an authority of this command ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise UsageError(f"{folder}: ca-key.pem is not the key of ca.pem")
    return _Authority(cert, key)


def _make(folder: Path, name: str, authority: _Authority, *, hosts: list[str], now: datetime, days: int) -> None:
    """Writes a certificate and its key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    _write(folder, name, _issue(name, authority, key.public_key(), hosts=hosts, now=now, days=days), key)


def _issue(
    name: str,
    authority: _Authority,
    key: ec.EllipticCurvePublicKey,
    *,
    hosts: list[str],
    now: datetime,
    days: int,
) -> x509.Certificate:
    """A certificate that the authority has signed. Without hosts it is one for clients only, with which no service can
    run."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_name(name), authority.cert.subject, key, now, timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer_key, critical=False)
    )
    if hosts:
        alternatives = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(alternatives, critical=False)
    return _sign(builder, authority.key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Any, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
    )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UsageError(f"--host: {host!r} is neither a host name nor an address ({error})") from None


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(folder: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    write_pair(folder, name, cert.public_bytes(Encoding.PEM), _key_text(key))


def write_pair(folder: Path, name: str, cert: bytes, key: bytes) -> None:
    """Writes NAME.pem, and NAME-key.pem, which only this user can read."""
    for path, content, mode in ((folder / f"{name}-key.pem", key, 0o600), (folder / f"{name}.pem", cert, 0o644)):
        new = path.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
        new.replace(path)
