"""Certificates to test with: good ones, expired ones, and those of another authority."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinsmith.rpc.tls import Certificates
from tinsmith_cli.make_certificates import make_certificates


@dataclass(frozen=True)
class Made:
    """`tinsmith make-certificates` in three folders."""

    good: Path
    expired: Path
    """Signed by the authority of `good`; expired a day ago."""
    foreign: Path
    """Signed by another authority."""

    def certificates(self, name: str, folder: Path | None = None) -> Certificates:
        """A service's certificates, from `good` unless another folder is given; it trusts `good`'s authority."""
        folder = folder or self.good
        return Certificates(self.good / "ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")

    def env(self, prefix: str, name: str) -> dict[str, str]:
        files = self.certificates(name)
        return {f"{prefix}_GRPC_{part.upper()}": str(getattr(files, part)) for part in ("ca", "cert", "key")}


def make(folder: Path) -> Made:
    made = Made(folder / "good", folder / "expired", folder / "foreign")
    make_certificates(made.good, hosts=[])
    make_certificates(made.foreign, hosts=[])
    made.expired.mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        (made.expired / name).write_bytes((made.good / name).read_bytes())
    make_certificates(made.expired, hosts=[], days=1, now=datetime.now(UTC) - timedelta(days=2))
    return made
