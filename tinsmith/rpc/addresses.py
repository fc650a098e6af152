"""The addresses of trainers and samplers, from a list in the settings or from a file. The file, and the addresses of a
DNS name, may change while the services run."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tinsmith.rpc.auth import address_of, host_of

logger = logging.getLogger(__name__)

DNS = "dns:///"
"""Prefix of a name in a list of samplers: dns:///HOST:PORT stands for every address that the host has."""
_FILE_INTERVAL_S = 0.5
"""Pause between two readings of the file, in seconds. The file is small, and a mounted ConfigMap or a network file
system does not notify of changes."""
_NAMES_INTERVAL_S = 2.0
"""Pause between two lookups of the names, in seconds. DNS servers of a cluster answer from a cache of some seconds."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """gRPC addresses, HOST:PORT. `samplers` may also contain names, dns:///HOST:PORT."""

    trainers: Sequence[str] = ()
    samplers: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """The entries of `samplers` that are names."""
        return [address for address in self.samplers if address.startswith(DNS)]


def check_addresses(addresses: Addresses, *, source: str) -> None:
    """Raises ValueError for an address that is not of the form HOST:PORT, and for one that is listed twice. `source`:
    where the addresses come from, for the message, such as "in the settings"."""
    for name, listed in asdict(addresses).items():
        if len(set(listed)) != len(listed):
            raise ValueError(f"{name} {source} contains a duplicate: {list(listed)}")
        for address in listed:
            if name == "trainers" and address.startswith(DNS):
                raise ValueError(
                    f"{name}: {address!r} {source}: each trainer needs an address of its own, HOST:PORT, because "
                    "its runs stay with it"
                )
            try:
                host_of(address.removeprefix(DNS))
            except ValueError:
                raise ValueError(f"{name}: {address!r} {source} is not of the form HOST:PORT") from None


def read_addresses(path: Path) -> Addresses:
    """Reads the file, which is JSON: {"trainers": ["HOST:PORT", ...], "samplers": [...]}. Raises ValueError for a file
    that cannot be used."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"services_file: {path} cannot be read ({error})") from None
    if not isinstance(found, dict) or not found.keys() <= {"trainers", "samplers"}:
        raise ValueError(
            f'services_file: {path} is not a JSON object {{"trainers": ["HOST:PORT", ...], "samplers": [...]}}'
        )
    for name, listed in found.items():
        if not isinstance(listed, list) or not all(isinstance(address, str) for address in listed):
            raise ValueError(f"services_file: {name} in {path} is not a list of HOST:PORT")
    addresses = Addresses(tuple(found.get("trainers", ())), tuple(found.get("samplers", ())))
    check_addresses(addresses, source=f"in {path} of services_file")
    return addresses


def write_addresses(path: Path, addresses: Addresses) -> None:
    """Replaces the file in one step, so that no reader finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(addresses)) + "\n")
    new.replace(path)


class AddressSource:
    """Keeps the addresses up to date: reads the file again and again, and looks up the names."""

    def __init__(self, listed: Addresses, file: Path | None = None, *, encrypted: bool = False) -> None:
        """`file`: file with the addresses, which may change; None if `listed` has them. `encrypted`: whether gRPC is
        encrypted. If so, DNS names are refused, because certificates name hosts and not the addresses that a DNS name
        has. Raises ValueError for addresses that cannot be used."""
        self._given = listed
        self._file = file
        self._encrypted = encrypted
        self._found: dict[str, Sequence[str]] = {}
        """For each name, the addresses that it had when it was last found."""
        self._complaints: dict[str, str] = {}
        """The newest error of each name, and that of the file under the empty name. Each error is logged once."""
        self._listed = self._read()
        self.known = self._resolved()
        """The newest addresses, HOST:PORT. The addresses of names are missing until `changes` is iterated."""

    @property
    def may_change(self) -> bool:
        return self._file is not None or bool(self._given.names)

    async def changes(self) -> AsyncIterator[Addresses]:
        """Yields `known` whenever the addresses have changed, for ever. Ends at once if they cannot change. While the
        file cannot be read, or a DNS name is not found, the earlier addresses stay."""
        while self.may_change:
            try:
                self._listed = self._read()
            except ValueError as error:
                self._complain("", error)
            else:
                self._complaints.pop("", None)
            for name in self._listed.names:
                await self._look_up(name)
            if (found := self._resolved()) != self.known:
                self.known = found
                logger.info("addresses of the services: %s", found)
                yield found
            await asyncio.sleep(_NAMES_INTERVAL_S if self._listed.names else _FILE_INTERVAL_S)

    def _read(self) -> Addresses:
        listed = self._given if self._file is None else read_addresses(self._file)
        if self._file is None:
            check_addresses(listed, source="in the settings")
        if self._encrypted and listed.names:
            raise ValueError(
                f"samplers: {listed.names[0]!r} stands for addresses that no certificate names; with grpc_ca list the "
                "samplers by their hosts, HOST:PORT"
            )
        return listed

    async def _look_up(self, name: str) -> None:
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._complain(name, error)
            return
        self._complaints.pop(name, None)
        self._found[name] = sorted({address_of(str(address[0]), int(port)) for *_, address in found})

    def _resolved(self) -> Addresses:
        """The listed addresses, in which each name is replaced by its addresses."""
        samplers: list[str] = []
        for address in self._listed.samplers:
            samplers += self._found.get(address, ()) if address.startswith(DNS) else [address]
        return Addresses(tuple(self._listed.trainers), tuple(dict.fromkeys(samplers)))

    def _complain(self, name: str, error: Exception) -> None:
        if self._complaints.get(name) != str(error):
            self._complaints[name] = str(error)
            logger.error("%s; the addresses stay %s", f"{name} is not found: {error}" if name else error, self.known)
