"""API keys: their settings, and the check that a gRPC call carries one. HTTP takes the same keys in the same
headers."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, SecretStr, Tag

from tinsmith.errors import PermissionDenied, ServiceError, Unauthenticated
from tinsmith.rpc.errors import to_status

KEY_HEADER = "x-api-key"

_OPEN_METHODS = f"/{health.SERVICE_NAME}/"
"""Calls that need no key. Health checks reveal only that the service runs, and a container runtime, which makes them,
has no key."""


ALONE = ("x-tinsmith-alone", "1")
"""Metadata by which a gateway asks the sampler to run a call while no other call runs. The sampler confirms it with the
same pair as initial metadata once it runs the call so. Callers need the service key, or a key with `admin`, because
other calls wait meanwhile, and running calls are ended after a while."""
PROMPT_ALONE = (ALONE[0], "prompt")
"""Like ALONE, but only for the prompt of a streamed sample: until the first token of the sample, the sampler computes
nothing else. Other calls wait, and none is ended. An engine that cannot do that computes the sample like any other, and
confirms nothing. A sampler whose caller has an ordinary key does the same."""
ADMIN_SERVICES = frozenset({"tinsmith.v1.TrainerAdminService", "tinsmith.v1.WeightSyncService"})
"""Services whose calls concern all callers. They accept only the service key and keys with `admin`."""


def _usable(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a key is one or more visible ASCII characters, such as tml-choose-a-long-one")
    return key


def _usable_or_none(key: SecretStr) -> SecretStr:
    return _usable(key) if key.get_secret_value() else key


def _form(value: object) -> str:
    return "details" if isinstance(value, (ApiKey, dict)) else "key"


OWNER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
"""Regular expression of an owner's name."""

Key = Annotated[SecretStr, AfterValidator(_usable)]
ServiceKey = Annotated[SecretStr, AfterValidator(_usable_or_none)]
"""One key; the empty string stands for none."""


class ApiKey(BaseModel):
    """A key, and the details of its holder."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    key: Key
    """The key itself."""
    name: str = ""
    """Name of the key."""
    note: str = ""
    """Free text about the key."""
    email: str = ""
    """Address of the key's holder."""
    owner: str = Field(default="", pattern=rf"{OWNER_PATTERN}|^$")
    """Owner of the sessions, runs and checkpoints that are made with the key. Keys of one owner share them. Without an
    owner, the key shares with no other key."""
    admin: bool = False
    """Over HTTP the key sees and changes the objects of every owner. Over gRPC it may call ADMIN_SERVICES."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Largest number of HTTP requests in a minute."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Largest number of tokens in a minute that are trained on, read or sampled over HTTP."""


AnyKey = Annotated[Annotated[Key, Tag("key")] | Annotated[ApiKey, Tag("details")], Discriminator(_form)]
"""A key, with or without its details."""


def named(keys: Iterable[SecretStr | ApiKey]) -> list[ApiKey]:
    """All keys as ApiKey. A key that was given without details gets empty ones."""
    return [key if isinstance(key, ApiKey) else ApiKey(key=key) for key in keys]


def accepted(api_keys: Iterable[SecretStr | ApiKey], service_key: SecretStr) -> list[str]:
    """The keys that a gRPC service with these settings accepts. If there are none, it accepts every call."""
    texts = [key.key.get_secret_value() for key in named(api_keys)]
    return [*texts, *filter(None, [service_key.get_secret_value()])]


def admins(api_keys: Iterable[SecretStr | ApiKey], service_key: SecretStr) -> list[str]:
    """The keys that ADMIN_SERVICES accept: the service key, and keys with `admin`."""
    return accepted([key for key in named(api_keys) if key.admin], service_key)


@functools.lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: a loopback address, or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(listen: str) -> str:
    """The host in `listen`, which is HOST:PORT. Raises ValueError for another form."""
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isdigit()) or (":" in host and host[0] + host[-1] != "[]"):
        raise ValueError(f"listen: {listen!r} is not of the form HOST:PORT")
    return host


def address_of(host: str, port: int) -> str:
    """HOST:PORT, the inverse of `host_of` for a host without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_keys(host: str, keys: Sequence[object], *, setting: str, env: str) -> None:
    """Raises ValueError if there are no keys, and `host`, the value of `setting`, is open to other machines.

    `env`: environment variable that would hold the keys.
    """
    if not keys and not is_loopback(host):
        raise ValueError(
            f"{setting} {host!r} can be reached from other machines, so api_keys must name at least one key "
            f"({env}='[\"tml-...\"]'); without keys listen on 127.0.0.1"
        )


def given_key(headers: Mapping[str, str]) -> str:
    """The key in the header X-API-Key, else the one in Authorization: Bearer; empty without either header."""
    if key := headers.get(KEY_HEADER):
        return key
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyRing:
    """The accepted keys, as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def find(self, given: str) -> int | None:
        """Position of the key `given`, or None. All keys are compared, each in constant time, so that the duration
        reveals nothing about them."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()  # has the same length for every key


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without an accepted key (UNAUTHENTICATED), and calls of an admin service with an ordinary key
    (PERMISSION_DENIED), before it reads their body. Health checks need no key."""

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._ring = KeyRing(keys)
        self._admins = KeyRing(admin_keys)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata: Any = handler_call_details.invocation_metadata or ()
        given = given_key({name: value for name, value in metadata if isinstance(value, str)})
        error = self._error(handler_call_details.method, given, wants_alone=ALONE in tuple(metadata))
        if error is None:
            return await continuation(handler_call_details)

        async def refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort_with_status(to_status(error))

        # A unary call is a stream of one message on the wire, so this handler refuses calls of every kind.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _error(self, method: str, given: str, *, wants_alone: bool) -> ServiceError | None:
        if method.startswith(_OPEN_METHODS):
            return None
        header = f"the metadata {KEY_HEADER} (or authorization: Bearer KEY)"
        if self._ring.find(given) is None:
            return Unauthenticated(f"{header} {'holds no key of this service' if given else 'is missing'}")
        service = method.split("/")[1]
        if service in ADMIN_SERVICES and self._admins.find(given) is None:
            return PermissionDenied(
                f"{header} holds an ordinary key; {service} takes the service key, or one with admin"
            )
        if wants_alone and self._admins.find(given) is None:
            return PermissionDenied(
                f"{header} holds an ordinary key; the metadata {ALONE[0]} takes the service key, or one with admin"
            )
        return None
