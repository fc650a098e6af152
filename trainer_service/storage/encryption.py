"""Encrypts files with age (age-encryption.org). A holder of a recipient's identity can decrypt them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NewType

import pyrage

from tinsmith.errors import InvalidRequest

SUFFIX = ".age"
MAX_RECIPIENTS = 10

Recipient = NewType("Recipient", object)

_age: Any = pyrage  # pyrage has no type stubs


def parse_recipients(texts: Sequence[str], *, field: str) -> list[Recipient]:
    """Parses X25519 ("age1...") and SSH ("ssh-ed25519 ...", "ssh-rsa ...") recipients.

    Raises InvalidRequest for a malformed one, which the message names, and for too many.
    """
    if len(texts) > MAX_RECIPIENTS:
        raise InvalidRequest(f"{field}: {len(texts)} recipients; at most {MAX_RECIPIENTS} are possible", field=field)
    return [_parse(text, field=f"{field}[{index}]") for index, text in enumerate(texts)]


def _parse(text: str, *, field: str) -> Recipient:
    module = _age.ssh if text.startswith("ssh-") else _age.x25519
    try:
        return module.Recipient.from_str(text)
    except _age.RecipientError as error:
        raise InvalidRequest(
            f"{field}: {text!r} is not an age recipient ({error}); use age1... (of age-keygen) or an SSH public key",
            field=field,
        ) from None


def encrypt_folder(folder: Path, recipients: Sequence[Recipient]) -> None:
    """Replaces every file by its encrypted form, whose name ends in .age."""
    for path in sorted(folder.iterdir()):
        _age.encrypt_file(str(path), f"{path}{SUFFIX}", list(recipients))
        path.unlink()
