"""The token with which a machine joins: the first machine's address and certificate, and the service key."""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass, field
from typing import Self

from tinsmith.rpc.auth import host_of
from tinsmith_cli.base_models import UsageError

_PARTS = re.compile(r"(?P<address>[^/]+)/(?P<fingerprint>[0-9a-f]{64})/(?P<key>[\w-]{16,})")


@dataclass(frozen=True, slots=True)
class Token:
    """The token, whose text is HOST:PORT/FINGERPRINT/KEY."""

    address: str
    """HOST:PORT at which the first machine admits others."""
    fingerprint: str
    """SHA-256 of the first machine's certificate at this address, in hexadecimal. It prevents that the holder of the
    token joins an attacker's machine."""
    service_key: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"{self.address}/{self.fingerprint}/{self.service_key}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The token of a text. Raises UsageError for any other text, without repeating the secret in it."""
        found = _PARTS.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            host_of(found["address"])
        except ValueError:
            begin = text.strip().partition("/")[0][:40]
            raise UsageError(
                f"--join: {begin!r}... is not a whole token, HOST:PORT/FINGERPRINT/KEY; copy the line that `tinsmith "
                "up --address` prints on the first machine, or the file cluster/join-token in its --state-dir"
            ) from None
        return cls(found["address"], found["fingerprint"], found["key"])


def fingerprint(cert: str) -> str:
    """SHA-256 of a certificate in PEM."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert)).hexdigest()
