"""Pictures that a request names by their location: an https URL, a file below a folder, or a data URL.

Clients choose the locations, so a fetch must not let a client reach this server's own network. The operator lists the
hosts. The address to which a host's name resolves is checked, and the connection goes to that very address, so that a
second resolution cannot give another one. Redirects are not followed, proxies of the environment are not used, and
answers must not be compressed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from gateway.config import GatewayConfig
from gateway.convert import picture_of, type_of
from gateway.load import Share
from gateway.shown import shown
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.pictures.headers import MAX_BYTES
from tinsmith.threads import in_pool

POINTER = "image_asset_pointer"
"""Type of a chunk that names a picture by its location."""
_AT_ONCE = 16
"""Most fetches of all requests at the same time."""
_AT_ONCE_OF_REQUEST = 4
"""Most pictures of one request that are read at the same time."""
_MAX_LOCATION = 2048
"""Longest URL or path of a file, in characters."""
_TRANSLATED = [ipaddress.ip_network(one) for one in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]
"""IPv6 networks whose addresses stand for IPv4 addresses: NAT64, 6to4 and Teredo."""

Asked = tuple[str, Any]
"""The field of a location, and the format that the client names."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Assets:
    """Reads pictures by their locations."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = {host.lower() for host in config.image_hosts}
        self._networks = config.image_networks
        self._folder = config.image_folder
        self._timeout_s = config.image_timeout_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tls: ssl.SSLContext | None = None

    @property
    def fetches(self) -> bool:
        """Whether pictures are fetched from any host."""
        return bool(self._hosts)

    async def fill(self, chunks: Iterable[tuple[str, dict[str, Any]]], share: Share) -> None:
        """Replaces pointers by their pictures, in place. `chunks`: the pointers, which are chunks in JSON, each with
        the name of its field. `share`: counts the bytes of the pictures.

        Raises InvalidRequest or Unsupported, which name field and location, when a picture cannot be read. Raises
        OutOfCapacity when there is no room for the pictures.
        """
        chunks = list(chunks)
        asked: dict[str, Asked] = {}
        for field, chunk in chunks:
            location = chunk.get("location")
            if not isinstance(location, str) or not location:
                raise InvalidRequest(f"{field}.location: {shown(location)} is no location", field=f"{field}.location")
            asked.setdefault(location, (f"{field}.location", chunk.get("format")))
        found = await self.read(asked, share)
        for _, chunk in chunks:
            chunk.update(type="image", data=found[chunk.pop("location")])

    async def read(self, asked: Mapping[str, Asked], share: Share) -> dict[str, bytes]:
        """The pictures of a request, by their locations. `asked`: location -> its field, and the format that a data URL
        must have. Raises the errors of `fill`."""
        found: dict[str, bytes] = {}
        turns = asyncio.Semaphore(_AT_ONCE_OF_REQUEST)

        async def read(location: str, field: str, file_format: Any) -> None:
            async with turns:
                found[location] = await self._read(location, file_format, field=field)
                share.take(len(found[location]))

        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for location, (field, file_format) in asked.items():
                    group.create_task(read(location, field, file_format))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            location = next(one for one in asked if one not in found)
            raise _refusal(asked[location][0], location, f"was not fetched within {self._timeout_s:g} s") from None
        return found

    async def _read(self, location: str, file_format: Any, *, field: str) -> bytes:
        if location.startswith("data:"):
            return _from_data_url(location, file_format, field=field)
        if len(location) > _MAX_LOCATION:
            raise _refusal(field, location, f"has {len(location)} characters, and may have at most {_MAX_LOCATION}")
        try:
            scheme = urlsplit(location).scheme
        except ValueError as error:
            raise _refusal(field, location, f"is no URL: {error}") from None
        if scheme in ("", "file"):
            return await in_pool(self._from_file, location, field=field)
        if scheme != "https":
            raise _refusal(field, location, "is no https: URL, no path of a file and no data: URL")
        try:
            async with self._turns:
                return await self._fetch(location, field=field)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise _refusal(field, location, f"could not be fetched: {type(error).__name__}") from None

    async def _fetch(self, url: str, *, field: str) -> bytes:
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError as error:
            raise _refusal(field, url, f"is no URL: {error}") from None
        name = host if port == 443 else f"{host}:{port}"
        if not self._hosts:
            raise Unsupported(
                f"{field}: {shown(url)} is not fetched, because this server's image_hosts names no host; send the "
                "picture itself",
                field=field,
            )
        if name not in self._hosts or parts.username is not None or parts.password is not None:
            raise _refusal(field, url, f"is of {name!r}, which is not one of this server's image_hosts")
        address = await self._address(host, port, field=field, url=url)
        target = httpx.URL(url).copy_with(host=str(address), port=port, fragment=None)
        if self._tls is None:
            self._tls = await in_pool(ssl.create_default_context)
        async with (
            httpx.AsyncClient(
                verify=self._tls, trust_env=False, follow_redirects=False, timeout=self._timeout_s
            ) as client,
            client.stream(
                "GET",
                target,
                headers={"host": name, "accept": "image/png, image/jpeg", "accept-encoding": "identity"},
                extensions={"sni_hostname": host},  # the certificate must be the host's
            ) as answer,
        ):
            if answer.status_code != 200:
                more = "; redirects are not followed" if answer.is_redirect else ""
                raise _refusal(field, url, f"was answered with the status {answer.status_code}{more}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _refusal(field, url, "was answered with a compressed body")
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > MAX_BYTES:
                    raise _too_large(field, url)
            return bytes(data)

    async def _address(self, host: str, port: int, *, field: str, url: str) -> Address:
        """An address of the host. Raises InvalidRequest if one of its addresses is not allowed."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        for address in addresses:
            if not _is_public(address) and not any(address in network for network in self._networks):
                raise _refusal(
                    field,
                    url,
                    "is of a host with an address in a private or reserved network, and none of this server's "
                    "image_networks has that address",
                )
        return addresses[0]

    def _from_file(self, location: str, *, field: str) -> bytes:
        if self._folder is None:
            raise Unsupported(
                f"{field}: {shown(location)} is not read, because this server has no image_folder; send the picture "
                "itself",
                field=field,
            )
        folder = self._folder.resolve()
        path = location
        if location.startswith("file:"):
            parts = urlsplit(location)
            if parts.netloc not in ("", "localhost"):
                raise _refusal(field, location, "names a file of another machine")
            path = unquote(parts.path)
        none = _refusal(field, location, "is no file below this server's image_folder")
        try:
            resolved = (folder / path).resolve()
            if not resolved.is_relative_to(folder):  # after links and dots are resolved
                raise none
            # O_NONBLOCK keeps the opening of a pipe from waiting for a writer.
            with open(os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise none
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError, RuntimeError):
            raise none from None
        if len(data) > MAX_BYTES:
            raise _too_large(field, location)
        return data


def pointers(chunks: Any, *, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pointers among chunks in JSON, each with the name of its field. There are none if `chunks` is no list."""
    for index, chunk in enumerate(chunks if isinstance(chunks, list) else ()):
        if isinstance(chunk, dict) and type_of(chunk) == POINTER:
            yield f"{field}[{index}]", chunk


def pointers_of_prompt(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pointers in the body of a sample in JSON, as `pointers` gives them."""
    prompt = body.get("prompt")
    yield from pointers(prompt.get("chunks") if isinstance(prompt, dict) else None, field="prompt.chunks")


def pointers_of_batch(batch: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pointers in a batch in JSON, as `pointers` gives them."""
    data = batch.get("data") if isinstance(batch, dict) else None
    for index, datum in enumerate(data if isinstance(data, list) else ()):
        model_input = datum.get("model_input") if isinstance(datum, dict) else None
        if isinstance(model_input, dict):
            yield from pointers(model_input.get("chunks"), field=f"data[{index}].model_input.chunks")


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not address.is_multicast


def _from_data_url(url: str, file_format: Any, *, field: str) -> bytes:
    found = picture_of(url, field=field)
    if found is None or found[0] != file_format:
        raise InvalidRequest(
            f"{field}: {shown(url[:60])} is no data URL of a {shown(file_format)}, such as "
            "data:image/png;base64,... for 'png'",
            field=field,
        )
    return found[1]


def _refusal(field: str, location: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {shown(location[:200])} {reason}", field=field)


def _too_large(field: str, location: str) -> InvalidRequest:
    return _refusal(field, location, f"has more than {MAX_BYTES} bytes, the most that this server takes for a picture")
