"""Ids of requests, and fingerprints of what they hold."""

from __future__ import annotations

import hashlib


def fingerprint(*parts: bytes | str | None) -> str:
    """A hash of the parts of a request, which tells a repeat from a conflict."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part or b""
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
