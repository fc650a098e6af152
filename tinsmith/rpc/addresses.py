"""A file with the addresses of trainers and samplers. It may change while those who read it run."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tinsmith.rpc.auth import host_of

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
"""Pause between two readings of the file, in seconds. The file is small. It may be a mounted ConfigMap, or lie on a
network, where nothing tells of a change."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """gRPC addresses, HOST:PORT."""

    trainers: Sequence[str] = ()
    samplers: Sequence[str] = ()


def read_addresses(path: Path) -> Addresses:
    """The addresses in the file: JSON, {"trainers": [...], "samplers": [...]}. Raises ValueError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"services_file: {path} cannot be read ({error})") from None
    if not isinstance(found, dict) or not found.keys() <= {"trainers", "samplers"}:
        raise ValueError(
            f'services_file: {path} is not a JSON object {{"trainers": ["HOST:PORT", ...], "samplers": [...]}}'
        )
    for name, addresses in found.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ValueError(f"services_file: {name} in {path} is not a list of HOST:PORT")
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"services_file: {name} in {path} contains a duplicate: {addresses}")
        for address in addresses:
            try:
                host_of(address)
            except ValueError:
                raise ValueError(f"services_file: {address!r} in {path} is not of the form HOST:PORT") from None
    return Addresses(tuple(found.get("trainers", ())), tuple(found.get("samplers", ())))


def write_addresses(path: Path, addresses: Addresses) -> None:
    """Replaces the file as a whole, so that no reader finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(addresses)) + "\n")
    new.replace(path)


async def address_changes(path: Path, known: Addresses) -> AsyncIterator[Addresses]:
    """Yields the addresses whenever they differ from those before, at first `known`; for ever. While the file cannot
    be read, the addresses stay."""
    complaint = ""
    while True:
        try:
            found = read_addresses(path)
        except ValueError as error:
            if str(error) != complaint:
                complaint = str(error)
                logger.error("%s; the addresses stay %s", complaint, known)
        else:
            complaint = ""
            if found != known:
                known = found
                logger.info("services_file: %s", known)
                yield known
        await asyncio.sleep(_INTERVAL_S)
