"""The ids of the Tinker API, and fingerprints of requests.

    <session>                        a session
    <session>:train:<n>              a model, which is a training run
    <session>:train:<n>:<seq_id>     a training operation; 0 is the creation of the model
    <session>:train:<n>:unload       the end of a run
    <session>:sample:<n>             a sampling session
    <session>:sample:<n>:<seq_id>    a sample; the ids of its sequences have ":<i>" behind this
    <session>:loss:<n>               a custom loss
    refused:<caller>:<text>          a request that was refused; the text of the refusal is in hexadecimal digits

Tinker paths (tinker://...) and versions of weights are in tinsmith/rpc/paths.py, because all services know them.
"""

from __future__ import annotations

import hashlib
import re

import xxhash

MAX_SEQ_ID = 2**31 - 1
"""Largest seq_id of a training operation."""
LAST_SEQ_ID = 2**63 - 1
"""Largest seq_id of a sample, which is the largest integer that the databases can store."""
CLONE_BLOCK = 10**9
"""Number of seq_ids of one client of a sampling session; the first seq_id of client n is n times this."""
LAST_CLONE_ID = LAST_SEQ_ID // CLONE_BLOCK
"""Largest number of a client of a sampling session."""

_UNLOAD = ":unload"
_REFUSED = "refused"
_MAX_TOLD = 1000
"""Most characters of the text of a refusal that a request id holds."""

_OPERATION = re.compile(r"(.+:train:[0-9]+):([0-9]{1,10})")
_SAMPLE = re.compile(r"(.*:sample:.*):([0-9]{1,19})", re.DOTALL)
_SAMPLING_SESSION = re.compile(r"[^/\s]+:sample:\d+")

Target = tuple[str, int]
"""One client of a sampling session: sampling_session_id and clone id."""


def session_of(thing_id: str) -> str:
    """The session that a model, a sampling session, a custom loss or a request belongs to."""
    return thing_id.partition(":")[0]


# Training


def model_id_of(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def is_model(group: str) -> bool:
    """Whether the id of a model, a sampling session or a session is a model's."""
    return ":train:" in group


def request_id_of(model_id: str, seq_id: int) -> str:
    return f"{model_id}:{seq_id}"


def operation_of(request_id: str) -> tuple[str, int] | None:
    """The model_id and the seq_id of a training operation; None when the id is no operation's."""
    match = _OPERATION.fullmatch(request_id)
    return None if match is None or int(match[2]) > MAX_SEQ_ID else (match[1], int(match[2]))


def unload_id_of(model_id: str) -> str:
    """The id of the request that ends a run."""
    return f"{model_id}{_UNLOAD}"


def unloaded_by(request_id: str) -> str | None:
    """The model_id of the run that an unload request ends; None when the id is that of another request."""
    return request_id.removesuffix(_UNLOAD) if request_id.endswith(_UNLOAD) else None


def custom_loss_id_of(session_id: str, number: int) -> str:
    return f"{session_id}:loss:{number}"


def is_custom_loss(request_id: str) -> bool:
    return ":loss:" in request_id


# Samples


def sampling_session_id_of(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def is_sampling_session(sampling_session_id: str) -> bool:
    """Whether the id has the form of a sampling session's."""
    return _SAMPLING_SESSION.fullmatch(sampling_session_id) is not None


def is_of_sampler(group: str) -> bool:
    """Whether the id of a model, a sampling session or a session is a sampling session's."""
    return ":sample:" in group


def sample_of(request_id: str) -> tuple[Target, int] | None:
    """The client and the seq_id of a sample; None when the id is no sample's."""
    match = _SAMPLE.fullmatch(request_id)
    if match is None or int(match[2]) > LAST_SEQ_ID:
        return None
    return (match[1], int(match[2]) // CLONE_BLOCK), int(match[2])


def target_of(request_id: str) -> Target | None:
    """The client of a sample; None when the id is no sample's."""
    found = sample_of(request_id)
    return None if found is None else found[0]


def first_of(clone_id: int) -> int:
    """The first seq_id of a client."""
    return clone_id * CLONE_BLOCK


# Refused requests


def refused_id_of(caller: str, text: str) -> str:
    """A request id that holds the beginning of the text of a refusal."""
    return f"{_REFUSED}:{caller}:{text[:_MAX_TOLD].encode().hex()}"


def refusal_of(request_id: str) -> tuple[str, str] | None:
    """The caller and the text that `refused_id_of` put into this id; None for any other id."""
    kind, _, rest = request_id.partition(":")
    caller, _, told = rest.rpartition(":")
    if kind != _REFUSED:
        return None
    try:
        return caller, bytes.fromhex(told).decode()
    except ValueError:
        return None


# Fingerprints


def fingerprint(*parts: bytes | str | None) -> str:
    """A hash of the parts of a request. A second request with the same id is a repeat if it has the same hash, else a
    conflict."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part or b""
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def batch_fingerprint(body: bytes) -> str:
    """A hash of the body of a batch, which may have megabytes. `fingerprint` would take 50 times as long."""
    return xxhash.xxh3_128_hexdigest(body)
